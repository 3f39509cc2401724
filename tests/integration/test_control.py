"""User messages over real sockets: the shipped example, and workers without it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hetero_framework import control
from hetero_framework.cli import main
from hetero_framework.config import Config
from hetero_framework.errors import UserError
from hetero_framework.trainer.coordinator import train
from tests.pools import TRAINING
from tests.samples import free_ports

pytestmark = pytest.mark.xdist_group("pool")

EXAMPLE = Path(__file__).parents[2] / "examples" / "watch_machines.py"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_handlers", {})
    monkeypatch.setattr(control, "_watchers", [])
    monkeypatch.setattr(control, "_imported", [])
    monkeypatch.setattr(control, "_functions", {})


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
) -> None:
    ports = free_ports(2)
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
    config = {
        "coordinator": {**machine, "port": ports[0]},
        "workers": [{**machine, "id": "box", "port": ports[1]}],
        "shard_plan": [{"id": "local", "start": 0, "end": 3}, {"id": "box", "start": 3, "end": 6}],
        "model": {"name_or_path": str(llama)},
        "data": {"train": str(texts), "max_length": 64},
        "training": {**TRAINING, "max_steps": 4, "output_dir": str(tmp_path / "run")},
    }
    file = tmp_path / "hetero_config.json"
    file.write_text(json.dumps(config))
    saving = tmp_path / "saving.py"
    saving.write_text(SAVING)
    imports = ["--import", str(EXAMPLE), "--import", str(saving)]
    directory = ["--checkpoint_dir", str(tmp_path / "saved")]
    assert main(["train", "--config", str(file), *imports, *directory, "--debug"]) == 0
    lines = re.findall(r"step (\d), worker box: processor \d+ % busy", capsys.readouterr().out)
    assert lines == ["1", "2", "3", "4"]
    saved = sorted(path.name for path in (tmp_path / "saved").glob("step_*"))
    assert saved == ["step_1", "step_3"]


MEASURING = """
import os

def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(-1) * 0 + os.getpid(), labels.ne(-100).sum()

def compute_metrics(given):
    pids, counts = given.predictions
    return {"pid": int(pids.max()), "elsewhere": int(pids.max() != os.getpid()),
            "labels": int(counts.sum() - (given.label_ids != -100).sum())}
"""


def test_an_imported_file_makes_the_predictions_in_the_worker_that_has_the_logits(
    tmp_path, llama, texts
) -> None:
    ports = free_ports(2)
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
    config = Config.from_dict(
        {
            "coordinator": {**machine, "port": ports[0]},
            "workers": [{**machine, "id": 1, "port": ports[1]}],
            "shard_plan": [{"id": "local", "start": 0, "end": 3}, {"id": 1, "start": 3, "end": 6}],
            "model": {"name_or_path": str(llama)},
            "data": {"train": str(texts), "eval": str(texts), "max_length": 64},
            "training": {
                **{**TRAINING, "max_steps": 2, "output_dir": str(tmp_path / "run")},
                **{"eval_strategy": "steps", "metric_for_best_model": "labels"},
            },
        }
    )
    file = tmp_path / "measuring.py"
    file.write_text(MEASURING)
    control.import_file(file)
    summary = train(config)
    assert summary.metrics["eval_elsewhere"] == 1
    assert summary.metrics["eval_labels"] == 0


def test_worker_without_the_handler_is_an_error_that_names_it(pool, llama, texts, tmp_path) -> None:
    answers: list[object] = []

    def ask(step: int, cluster: control.WorkerControl) -> None:
        assert cluster.workers == [1]
        with pytest.raises(UserError, match="there is no worker 9 to ask"):
            cluster.control(9, "x")
        answers.append(cluster.control(1, "not_there"))

    control.after_step(ask)
    sections = {
        "model": {"name_or_path": str(llama)},
        "data": {"train": str(texts), "max_length": 64},
        "training": {"max_steps": 2},
    }
    with pytest.raises(UserError, match="not_there: no handler for 'not_there'") as caught:
        train(Config.from_dict(pool.config(tmp_path / "run", [3], **sections)))
    assert "--import" in str(caught.value)
    assert answers == []
