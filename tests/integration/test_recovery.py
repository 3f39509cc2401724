"""Processes that die in a run and come back: the result is the undisturbed run's, to the last bit.

The workers are this machine's own, which the coordinator starts, and starts again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hetero_framework.config import Config
from hetero_framework.core import timeouts
from hetero_framework.errors import OutOfMemory, PeerLostError
from hetero_framework.trainer.coordinator import train
from tests.integration.test_parity import LORA, assert_same, assert_same_runs, weights
from tests.pools import TRAINING, Notes, hetero
from tests.samples import DEVICE, free_ports, plan_of, read_jsonl

pytestmark = [pytest.mark.usefixtures("nothing_left_here")]

SETTINGS = {**TRAINING, "verify_architecture": False, "replicate_steps": 2, "max_steps": 9}


THREE: list[tuple[str | int, int]] = [("local", 2), (1, 4), (2, 6)]


def configuration(
    output: Path,
    llama: Path,
    texts: Path,
    parts: Sequence[tuple[str | int, int]] = THREE,
    **training: Any,
) -> Config:
    ports = free_ports(len(parts))
    data = {"train": str(texts), "max_length": 64}
    if "eval_strategy" in training:
        data["eval"] = str(texts)
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": DEVICE}
    return Config.from_dict(
        {
            "coordinator": {**machine, "port": ports[0]},
            "workers": [{**machine, "id": i, "port": ports[i]} for i in range(1, len(parts))],
            "shard_plan": plan_of(*parts),
            "model": {"name_or_path": str(llama)},
            "data": data,
            "adapter": LORA,
            "training": {**SETTINGS, "output_dir": str(output), **training},
        }
    )


def alone(config: Config) -> Config:
    """The same in one process."""
    plan = [{"id": "local", "start": 0, "end": 6}]
    return Config.from_dict({**config.to_dict(), "workers": [], "shard_plan": plan})


class Killer(Notes):
    """Kills worker processes after steps: `at[step]` are the workers that die then, once."""

    def __init__(self, at: Mapping[int, tuple[int, ...]]) -> None:
        super().__init__()
        self.at = dict(at)

    def pid(self, worker: int) -> int:
        pattern = rf"worker {worker}: .*as process (\d+)"
        found = (re.search(pattern, line) for line in self.lines)
        return int([match[1] for match in found if match][-1])

    def step(self, metrics: Mapping[str, Any]) -> None:
        super().step(metrics)
        for worker in self.at.pop(metrics["step"], ()):
            os.kill(self.pid(worker), signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(llama, texts, tmp_path_factory):
    """The undisturbed run, in one process."""
    output = tmp_path_factory.mktemp("whole") / "run"
    train(alone(configuration(output, llama, texts)))
    return output


TOLD = """
from pathlib import Path

from transformers import TrainerCallback


class Told(TrainerCallback):
    def __init__(self, file):
        self.file = file


def teller(event):
    def tell(self, args, state, control, **kwargs):
        with self.file.open("a") as file:
            file.write(f"{state.global_step} {event}\\n")

    return tell


for event in ("train_begin", "train_end", "step_begin", "step_end", "log", "evaluate", "save"):
    setattr(Told, f"on_{event}", teller(event))
callbacks = [Told(Path(__file__).with_name("told.txt"))]
"""
REPORTED: dict[str, Any] = {
    **{"logging_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"},
    **{"save_steps": 2, "save_total_limit": 2, "load_best_model_at_end": True},
    **{"token_metrics": True, "early_stopping_patience": 4},
    "learning_rate": 5.0,  # so large that the best is not last
}


def told(place: Path) -> list[str]:
    return (place / "told.txt").read_text().splitlines()


def recorded(output: Path) -> tuple[list[Any], dict[str, Any]]:
    """log_history.jsonl and trainer_state.json without times, the run's name and its place."""
    lines = [untimed(line) for line in read_jsonl(output / "log_history.jsonl")]
    state = json.loads((output / "trainer_state.json").read_text())
    state["log_history"] = [untimed(line) for line in state["log_history"]]
    state["best_model_checkpoint"] = Path(state["best_model_checkpoint"]).name
    return [line for line in lines if "remote_run" not in line], state


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if "runtime" not in k and "per_second" not in k}


@pytest.fixture(scope="module")
def reported(llama, texts, tmp_path_factory):
    """The undisturbed run of REPORTED."""
    output = tmp_path_factory.mktemp("reported") / "run"
    train(alone(configuration(output, llama, texts, **REPORTED)), callbacks=[TrainerCallback])
    return output


@pytest.fixture(scope="module")
def with_callbacks(llama, texts, tmp_path_factory):
    """The same as a command, with callbacks that write down what they are told."""
    place = tmp_path_factory.mktemp("callbacks")
    assert command(place, llama, texts).returncode == 0
    return place


def command(
    place: Path, llama: Path, texts: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`hetero train`, one process, with callbacks that write down what they are told."""
    config = alone(configuration(place / "run", llama, texts, **REPORTED))
    (place / "config.json").write_text(json.dumps(config.to_dict()))
    (place / "mine.py").write_text(TOLD)
    words = ["train", "--config", str(place / "config.json"), "--import", str(place / "mine.py")]
    return hetero(*words, env={**os.environ, **environment})


LONG = pytest.mark.long
POINTS = ["commit-done@5", "evaluation@4", "gather"]


@LONG
@pytest.mark.parametrize("point", POINTS)
def test_a_run_with_callbacks_that_is_killed_records_what_an_undisturbed_one_does(
    point, llama, texts, tmp_path, with_callbacks
):
    killed = command(tmp_path, llama, texts, HETERO_FAILPOINT=f"coordinator/{point}")
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    num_told = len(told(tmp_path))
    again = command(tmp_path, llama, texts)
    assert again.returncode == 0, again.stdout + again.stderr
    assert recorded(tmp_path / "run") == recorded(with_callbacks / "run")
    assert_same(weights(tmp_path / "run"), weights(with_callbacks / "run"))
    begin, *rest = told(tmp_path)[num_told:]
    assert begin.endswith(" train_begin")
    assert rest == told(with_callbacks)[-len(rest) :]


@pytest.mark.long
def test_steps_that_are_repeated_after_a_loss_are_recorded_once(llama, texts, tmp_path, reported):
    config = configuration(tmp_path / "run", llama, texts, **REPORTED)
    notes = Killer({3: (2,), 6: (1,)})
    train(config, progress=notes, callbacks=[TrainerCallback])
    assert len([line for line in notes.lines if "training goes on after step" in line]) == 2
    assert recorded(tmp_path / "run") == recorded(reported)
    assert_same(weights(tmp_path / "run"), weights(reported))


@LONG
@pytest.mark.parametrize("at", [{5: (1, 2)}, {1: (1,)}], ids=str)
def test_a_worker_that_is_killed_comes_back_and_the_result_is_the_same(
    at, llama, texts, tmp_path, whole
):
    notes = Killer(at)
    assert train(configuration(tmp_path / "run", llama, texts), progress=notes).steps == 9
    assert_same_runs(tmp_path / "run", whole)
    assert [line for line in notes.lines if "training goes on after step" in line]


@LONG
def test_a_worker_that_is_killed_in_a_backward_comes_back_and_the_result_is_the_same(
    llama, texts, tmp_path, whole, monkeypatch
):
    monkeypatch.setenv("HETERO_FAILPOINT", "worker-1/backward@4")
    monkeypatch.setenv("HETERO_FAILPOINT_ONCE", str(tmp_path))
    notes = Notes()
    train(configuration(tmp_path / "run", llama, texts), progress=notes)
    assert [line for line in notes.lines if "training goes on after step" in line]
    assert_same_runs(tmp_path / "run", whole)


@LONG
def test_a_stage_that_hangs_is_killed_and_the_result_is_the_same(
    llama, texts, tmp_path, whole, monkeypatch
):
    """Its heartbeats go on; only the thread that computes does not come back."""
    monkeypatch.setenv("HETERO_FAILPOINT", "worker-2/forward@4:sleep:600")
    monkeypatch.setenv("HETERO_FAILPOINT_ONCE", str(tmp_path))
    monkeypatch.setattr(timeouts, "ALIVE_S", 1.0)
    notes = Killer({})
    train(configuration(tmp_path / "run", llama, texts, step_timeout_s=3.0), progress=notes)
    assert any("worker 2 answers nothing and is ended" in line for line in notes.lines)
    assert_same_runs(tmp_path / "run", whole)


@LONG
def test_a_step_that_keeps_killing_its_worker_ends_the_run(llama, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_FAILPOINT", "worker-1/backward@3")
    config = configuration(tmp_path / "run", llama, texts, replicate_steps=1)
    with pytest.raises(PeerLostError, match="step 3 has ended a worker 3 times") as raised:
        train(config, progress=Notes())
    assert "samples of the step: " in str(raised.value.hint)
    assert raised.value.exit_code == 4


@LONG
def test_f30_out_of_memory_in_any_process_repeats_the_step_exactly(
    llama, texts, tmp_path, whole, monkeypatch
):
    """In all its shapes. Nobody ends, no link breaks, and no step but those is repeated."""
    lacks = {
        2: ("worker-1", "forward@2:oom:host"),
        3: ("coordinator", "backward@3:oom:cpu"),
        5: ("worker-2", "backward-done@5:oom:mps"),
        7: ("worker-1", "norms@7:oom:device"),
    }
    points = [f"{process}/{point}" for process, point in lacks.values()]
    monkeypatch.setenv("HETERO_FAILPOINT", ",".join(points))
    train(configuration(tmp_path / "run", llama, texts), progress=Notes())
    assert_same_runs(tmp_path / "run", whole)
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    told = [e for e in events if e["what"] == "memory ran out"]
    names = {"coordinator": "local", "worker-1": 1, "worker-2": 2}
    assert [(e["step"], e["worker"]) for e in told] == [
        (step, names[process]) for step, (process, _) in lacks.items()
    ]
    assert {e["action"] for e in told} == {"step repeated"}
    assert [e["what"] for e in events].count("step repeated") == len(lacks)
    assert not [e for e in events if e["what"] in ("worker lost", "went back")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("points", "said"),
    [
        ("forward@4:oom:host,worker-1/forward@4:oom:host", "step 4, whose largest micro-batch has"),
        ("optimizer-half@4:oom:host", "stage 1, step of the optimizer"),
    ],
)
def test_f30_memory_that_runs_out_again_or_in_a_commit_ends_the_run(
    points, said, llama, texts, tmp_path, monkeypatch
):
    monkeypatch.setenv("HETERO_FAILPOINT", f"worker-1/{points}")
    with pytest.raises(OutOfMemory, match=said) as raised:
        train(configuration(tmp_path / "run", llama, texts), progress=Notes())
    assert raised.value.exit_code == 6
    assert "memory ran out on cpu" in raised.value.message
    assert "fewer layers" in str(raised.value.hint)


def test_a_coordinator_that_is_killed_goes_on_with_the_same_command(llama, texts, tmp_path, whole):
    """At one place; faults/test_kill_matrix.py has all of them."""
    file = tmp_path / "config.json"
    config = configuration(tmp_path / "run", llama, texts, [("local", 3), (1, 6)])
    file.write_text(json.dumps(config.to_dict()))
    words, failpoint = ("train", "--config", str(file)), "coordinator/commit-done@5"
    killed = hetero(*words, env={**os.environ, "HETERO_FAILPOINT": failpoint})
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    again = hetero(*words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the run that was cut short here goes on after step" in again.stdout + again.stderr
    assert_same_runs(tmp_path / "run", whole)
