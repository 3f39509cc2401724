"""The result of a run that lost a worker at its end is made of the last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_framework.errors import PeerLostError
from hetero_framework.trainer import outputs
from hetero_framework.trainer.coordinator import Coordinator, train
from hetero_framework.trainer.run_checkpoint import RunCheckpoints

LORA = {"r": 4, "target_modules": "all-linear"}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def gone(monkeypatch):
    """No worker answers any more when the result is asked for."""

    def lost(*args: Any) -> None:
        raise PeerLostError("worker 1 is gone: signal SIGKILL", hint="start it again")

    monkeypatch.setattr(outputs, "export", lost)


@pytest.mark.parametrize(
    "adapter", [pytest.param(None, marks=pytest.mark.long), LORA], ids=["model", "adapter"]
)
def test_the_result_of_the_last_step_is_that_of_the_undisturbed_run(alone, request, adapter):
    training = {"save_strategy": "steps", "save_steps": 3}
    whole = alone("whole", adapter=adapter, training=training)
    train(whole)
    request.getfixturevalue("gone")
    config = alone("run", adapter=adapter, training=training)
    summary = train(config)  # as if nothing had been: exit code 0
    assert summary.steps == 4
    assert files(config.result_dir) == files(whole.result_dir)
    lines = (config.output_dir / "logs" / "coordinator.log").read_text().splitlines()
    [said] = [line for line in lines if "signal SIGKILL; " in line]
    assert said.endswith("is made of the checkpoint of step 4 of 4, the last one")


@pytest.mark.usefixtures("gone")
def test_an_older_checkpoint_makes_a_result_that_says_so_and_the_run_fails(alone, monkeypatch):
    save = RunCheckpoints.save

    def only_the_second(self: RunCheckpoints, state: Any) -> Any:
        if state.step == 2:
            return save(self, state)
        raise PeerLostError("worker 1 is gone: signal SIGKILL", hint="start it again")

    monkeypatch.setattr(RunCheckpoints, "save", only_the_second)
    config = alone(training={"save_strategy": "steps", "save_steps": 2, "max_steps": 3})
    with pytest.raises(PeerLostError) as raised:
        train(config)
    text = str(raised.value)
    assert raised.value.exit_code == 4
    assert f"{config.result_dir} is made of the checkpoint of step 2 of 3" in text
    assert "start it again. Then continue after step 2 with " in text
    assert "--resume latest" in text
    assert (config.result_dir / "model.safetensors").is_file()


@pytest.mark.usefixtures("gone")
def test_a_lost_worker_without_a_checkpoint_leaves_no_result(alone):
    config = alone()
    with pytest.raises(PeerLostError, match="worker 1 is gone: signal SIGKILL") as raised:
        train(config)
    assert "nothing has been saved yet" in str(raised.value)
    assert not config.result_dir.exists()


@pytest.mark.usefixtures("gone")
def test_a_damaged_last_checkpoint_is_passed_over(alone, monkeypatch):
    finish = Coordinator.finish

    def damaged(self: Coordinator) -> Any:
        (config.checkpoints / "step_4" / "stage-0.0.safetensors").write_bytes(b"")
        return finish(self)

    monkeypatch.setattr(Coordinator, "finish", damaged)
    config = alone(training={"save_strategy": "steps", "save_steps": 1})
    with pytest.raises(PeerLostError, match="is made of the checkpoint of step 3 of 4"):
        train(config)
