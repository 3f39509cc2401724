"""Runs in a notebook: a real kernel trains, shows its progress, and is interrupted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from hetero_framework.core import addresses
from tests.installed import needs
from tests.samples import free_ports, plan_of, save_llama
from tests.waiting import WAIT_S, is_running, wait_until

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook.ipynb"

pytestmark = [
    needs("reporting"),
    pytest.mark.skipif(sys.platform == "win32", reason="pyzmq needs another loop there"),
]


@pytest.mark.timeout(240)
def test_the_example_trains_twice_and_shows_both_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=3 * WAIT_S, resources=folder).execute()
    *_, first, generated, second = (cell for cell in notebook.cells if cell.cell_type == "code")
    for cell in (first, second):
        (shown,) = (o.data["text/html"] for o in cell.outputs if o.output_type == "display_data")
        assert "<progress value='30' max='30'" in shown
        for column in ("Step", "Training Loss", "Validation Loss"):
            assert f"<th>{column}</th>" in shown
        printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
        assert "step 5/30" not in printed  # the table has it
        assert "evaluation loss" in printed  # in the summary
    assert "7 plus" in generated.outputs[0].text
    assert "adapter: loss " in second.outputs[-1].text


@pytest.fixture
def cell(tmp_path):
    """cell(code): runs code in a kernel, and returns a function that waits for its reply."""
    manager = KernelManager()
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=WAIT_S)

    def run(code):
        # Else an error ends cells that are sent soon after it, too.
        request = client.execute(code, stop_on_error=False)

        def reply():
            while True:
                found = client.get_shell_msg(timeout=WAIT_S)
                if found["parent_header"].get("msg_id") == request:
                    return found["content"]

        return reply

    run.manager = manager
    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(["cpu"], marks=pytest.mark.long, id="here"),
        pytest.param(["cpu"] * 2, id="with a worker"),
    ],
)
def test_an_interrupted_cell_stops_its_run_and_the_kernel_goes_on(devices, cell, tmp_path):
    save_llama(tmp_path / "model", layers=2)
    (port,) = free_ports(1)
    owners = [("local", 2)] if len(devices) == 1 else [("local", 1), ("coordinator@2", 2)]
    training = {"output_dir": "run", "max_steps": 3000, "save_steps": 9000, "visualize": False}
    config = {
        "coordinator": {"ip": "127.0.0.1", "port": port, "devices": devices},
        "shard_plan": plan_of(*owners),
        "model": {"name_or_path": "model"},
        "training": training,
    }
    call = f"from hetero_framework import load_config, train\nconfig = {json.dumps(config)}\n"
    call = call.replace("false", "False")
    rows = "rows = [{'text': 'a model of many words'}] * 8\n"
    reply = cell(call + rows + "train(load_config(config), train_dataset=rows)")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2, "three steps")
    kernel = psutil.Process(cell.manager.provisioner.pid)
    workers = [child.pid for child in kernel.children(recursive=True)]
    assert len(workers) == len(devices) - 1
    cell.manager.interrupt_kernel()
    stopped = reply()
    assert (stopped["status"], stopped["ename"]) == ("error", "StoppedEarly")
    assert "stopped by SIGINT after step" in stopped["evalue"]
    assert "in Python: the same call" in stopped["evalue"]
    assert len(stopped["traceback"]) == 1  # the sentence alone
    wait_until(lambda: not any(map(is_running, workers)), "the workers end")
    assert addresses.port_is_free("127.0.0.1", port)

    steps = metrics.read_bytes().count(b"\n")
    shorter = f"config['training']['max_steps'] = {steps + 2}\n"
    again = cell(shorter + "print(train(load_config(config), train_dataset=rows).steps)")()
    assert again["status"] == "ok", again
    done = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert done == [*range(1, steps + 3)]
