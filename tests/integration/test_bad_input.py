"""Wrong inputs, row by row: one message with the fault, its place and the remedy; an exit code;
nothing left behind."""

from __future__ import annotations

import errno
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors.torch import load_file, save_file

from hetero_framework.cli import main
from hetero_framework.core.devices import Device, Memory
from hetero_framework.core.frames import PROTOCOL_VERSION
from hetero_framework.core.messages import Message, Welcome
from hetero_framework.trainer import checkpoint
from tests.framed import answering, framed
from tests.integration.bad_inputs import LOCAL, configuration, merged
from tests.samples import plan_of, save_llama

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

SCREEN_LINES = 24
TWO = plan_of(("local", 3), (1, 6))


class Ran:
    """What a command gave back: its exit code and what it showed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def expect(self, code: int, *texts: str) -> None:
        """The exit code and the texts (regular expressions), all in one short error message, which
        is the last thing that is said."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        _, start, message = self.err.rpartition("hetero: error: ")
        assert start, self.err
        assert len(message.splitlines()) <= SCREEN_LINES
        for text in texts:
            assert re.search(text, start + message), self.err


@pytest.fixture
def run(tmp_path, llama, texts, capsys):
    """Run a command on a small valid configuration with changes in it."""
    base = configuration(
        {
            "shard_plan": plan_of(("local", 6)),
            "model": {"name_or_path": str(llama)},
            "adapter": None,
            "data": {"train": str(texts)},
            "training": {"max_steps": 2, "connect_timeout_s": 3.0, "liveness_timeout_s": 3.0},
        }
    )

    def call(changes: dict[str, Any] | None = None, *options: str, command: str = "train") -> Ran:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(merged(base, changes or {})))
        code = main([command, "--config", str(file), *options])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


def with_worker(port: int, **sections: Any) -> dict[str, Any]:
    """The last half of the layers is worker 1's, at this port."""
    return {"workers": [{**LOCAL, "id": 1, "port": port}], "shard_plan": TWO, **sections}


def test_an_output_directory_in_use(run, tmp_path):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        run().expect(2, "another run is writing into .*run", "choose another")


def test_a_machine_that_the_configuration_does_not_name(run):
    """All are named, which takes more lines than bad_inputs.py has for a message."""
    coordinator = {"hostname": "desk", "ip": "198.51.100.1"}
    worker = {**LOCAL, "hostname": "far", "ip": "198.51.100.2", "id": 1, "port": 9999}
    changes = {"coordinator": coordinator, "workers": [worker], "shard_plan": TWO}
    run(changes).expect(2, "names this machine", r"198\.51\.100\.1", "--role coordinator")


# -- machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
            r"program at 127\.0\.0\.1:\d+ does .* like a worker: worker 1: not a hetero",
        ),
        (lambda sock: None, "silent for 3 s"),
        (lambda sock: sock.shutdown(socket.SHUT_RDWR), "closed|lost"),
    ],
    ids=["is another program's", "accepts and says nothing", "closes at once"],
)
def test_a_port_that_is_no_workers(answer, said, run):
    with answering(answer) as port:
        run(with_worker(port)).expect(2, "does not behave like a worker", said)


def test_a_worker_of_another_protocol_version(run):
    welcome = Welcome("2", "cpu", "cpu", 1, 1, protocol=PROTOCOL_VERSION + 1, package="9.9")
    frame = framed(Message(welcome))
    with answering(lambda sock: sock.sendall(frame)) as port:
        run(with_worker(port)).expect(
            2, f"speaks protocol version {PROTOCOL_VERSION + 1}", "install the same version"
        )


def test_a_worker_with_anothers_address(run, pool):
    port = pool.machines["workers"][1]["port"]
    run(with_worker(port)).expect(2, "worker 1 refused: this is worker 2, not 1")


def test_a_workers_port_that_is_taken(run):
    with answering(lambda sock: None) as port:
        ran = run(with_worker(port), "--worker-id", "1", command="worker")
        ran.expect(2, f"cannot listen on 127.0.0.1:{port}: the port is in use", "stop the program")


def test_a_model_that_only_a_worker_lacks(run, tmp_path, pool):
    """The worker looks beside its own configuration, where there is none."""
    save_llama(tmp_path / "model")
    changes = with_worker(pool.machines["workers"][0]["port"], model={"name_or_path": "./model"})
    run(changes).expect(2, r"worker 1: .*no model directory .*model")


def test_a_stage_that_does_not_fit_its_device(run, monkeypatch):
    monkeypatch.setattr(Device, "memory", lambda self: Memory(1 << 20, 1 << 20))
    run().expect(2, r"stage 0", "1.00 MiB free", "layers")


# -- numbers and disks ----------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_names_stage_and_micro_batch(run, tmp_path, pool):
    model = save_llama(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][0] = 3e38  # finite, but few sums of it are
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    port = pool.machines["workers"][0]["port"]
    training = {"max_skipped_steps": 2, "max_steps": 9, "gradient_accumulation_steps": 2}
    changes = with_worker(port, model={"name_or_path": str(model)}, training=training)
    run(changes).expect(
        5,
        "3 steps in a row had non-finite losses",
        r"micro-batch 0, first out of stage 1 \(worker 1, layers 3-5\)",
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["skipped"] for line in lines] == ["non-finite"] * 2


def test_a_full_disk_costs_checkpoints_first_and_then_the_run(run, tmp_path, monkeypatch):
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "sync_file", full)
    ran = run({"training": {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}})
    ran.expect(6, "disk|space")
    for step in (1, 2):
        assert ran.out.count(f"checkpoint {step} could not be written") == 1
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_worker_with_other_weights_is_refused_before_the_first_step(run, pool, tmp_path, capsys):
    theirs = save_llama(pool.logs[0].parent / "refused", seed=7)
    save_llama(tmp_path / "refused")
    capsys.readouterr()  # progress bars of saving
    # Relative: each process finds its own.
    plan = {"workers": pool.machines["workers"][:1], "shard_plan": TWO}
    changes = {**plan, "model": {"name_or_path": "refused"}}
    run(changes).expect(2, "worker 1 has loaded another model than the coordinator: .* weights of")
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    run(changes).expect(2, r"worker 1 .* coordinator: config\.json differs", "copy one model")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
