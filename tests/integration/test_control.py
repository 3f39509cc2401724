"""User messages over real sockets: the shipped example, and workers without it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import control
from hetero_framework.cli import main
from hetero_framework.config import Config
from hetero_framework.errors import UserError
from hetero_framework.trainer.coordinator import train
from tests.pools import TRAINING
from tests.samples import free_ports, plan_of

pytestmark = pytest.mark.xdist_group("pool")

EXAMPLE = Path(__file__).parents[2] / "examples" / "watch_machines.py"


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(control, "_handlers", {})
    monkeypatch.setattr(control, "_watchers", [])
    monkeypatch.setattr(control, "_imported", [])
    monkeypatch.setattr(control, "_functions", {})


def configuration(
    worker: int | str, folder: Path, llama: Path, texts: Path, **training: Any
) -> dict[str, Any]:
    """Half of the layers are those of a worker that the run starts."""
    ports = free_ports(2)
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
    return {
        "coordinator": {**machine, "port": ports[0]},
        "workers": [{**machine, "id": worker, "port": ports[1]}],
        "shard_plan": plan_of(("local", 3), (worker, 6)),
        "model": {"name_or_path": str(llama)},
        "data": {"train": str(texts), "eval": str(texts), "max_length": 64},
        "training": {**TRAINING, "output_dir": str(folder / "run"), **training},
    }


SAVING = """
from hetero_framework import control
from hetero_framework.core.protocol import Message, MessageType

def checkpoint(step):
    control.send(Message(MessageType.CONTROL, {"command": "checkpoint"}, {"step": step}))

control.on("save")(checkpoint)

@control.after_step
def ask(step, cluster):
    if step == 1:
        cluster.control("box", "save", step)  # the worker sends it
    if step == 3:
        checkpoint(step)
"""


def test_example_asks_the_worker_it_started_and_messages_save_checkpoints(
    tmp_path, llama, texts, capsys
):
    config = configuration("box", tmp_path, llama, texts, max_steps=4)
    file = tmp_path / "hetero_config.json"
    file.write_text(json.dumps(config))
    saving = tmp_path / "saving.py"
    saving.write_text(SAVING)
    imports = ["--import", str(EXAMPLE), "--import", str(saving)]
    directory = ["--checkpoint_dir", str(tmp_path / "saved")]
    assert main(["train", "--config", str(file), *imports, *directory, "--debug"]) == 0
    lines = re.findall(r"step (\d), worker box: processor \d+ % busy", capsys.readouterr().out)
    assert lines == ["1", "2", "3", "4"]
    assert sorted(path.name for path in (tmp_path / "saved").glob("step_*")) == ["step_1", "step_3"]


MEASURING = """
import os

def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(-1) * 0 + os.getpid(), labels.ne(-100).sum()

def compute_metrics(given):
    pids, counts = given.predictions
    return {"pid": int(pids.max()), "elsewhere": int(pids.max() != os.getpid()),
            "labels": int(counts.sum() - (given.label_ids != -100).sum())}
"""


@pytest.mark.long
def test_an_imported_file_makes_the_predictions_in_the_worker_that_has_the_logits(
    tmp_path, llama, texts
):
    training = {"max_steps": 2, "eval_strategy": "steps", "metric_for_best_model": "labels"}
    config = configuration(1, tmp_path, llama, texts, **training)
    file = tmp_path / "measuring.py"
    file.write_text(MEASURING)
    control.import_file(file)
    summary = train(Config.from_dict(config))
    assert summary.metrics["eval_elsewhere"] == 1
    assert summary.metrics["eval_labels"] == 0


def test_worker_without_the_handler_is_an_error_that_names_it(configured):
    answers: list[object] = []

    def ask(step: int, cluster: control.WorkerControl) -> None:
        assert cluster.workers == [1]
        with pytest.raises(UserError, match="there is no worker 9 to ask"):
            cluster.control(9, "x")
        answers.append(cluster.control(1, "not_there"))

    control.after_step(ask)
    with pytest.raises(UserError, match="not_there: no handler for 'not_there'") as caught:
        train(configured([3], training={"max_steps": 2}))
    assert "--import" in str(caught.value)
    assert answers == []
