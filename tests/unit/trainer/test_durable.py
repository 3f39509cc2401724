"""The durable step, with a pipeline whose snapshots the test controls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_framework.config import Config
from hetero_framework.engine.hosts import LinkLost
from hetero_framework.engine.stage_api import StatePart
from hetero_framework.engine.state_snapshot import digest
from hetero_framework.trainer.checkpoint import durable_store
from hetero_framework.trainer.durable import MAX_STEPS, DurableSteps, interval_steps
from hetero_framework.trainer.train_state import TrainState
from tests.samples import plan_of


@pytest.mark.parametrize(
    ("copy_s", "step_s", "steps"),
    [
        (0.5, 10.0, 1),  # exactly 5 %
        (0.51, 10.0, 2),
        (4.3, 10.0, 9),
        (0.001, 10.0, 1),
        (100.0, 0.01, MAX_STEPS),
        (100.0, 20.0, 15),  # 300 s of work
        (100.0, 900.0, 1),
    ],
)
def test_copies_are_as_frequent_as_their_share_of_the_time_allows(copy_s, step_s, steps):
    assert interval_steps(copy_s, step_s) == steps


class Pipeline:
    """Two stages; `finish_snapshot` hands their parts out."""

    def __init__(self) -> None:
        self.committed: int | None = None
        self.weights = [torch.ones(3), torch.zeros(2)]
        self.take: Callable[..., None] | None = None
        self.breaks = False
        self.is_copied = False
        self.rewound: list[Any] = []

    def snapshot(self, take: Callable[..., None]) -> None:
        if self.breaks:
            raise LinkLost(1, "reset")
        self.take, self.is_copied = take, True

    def finish_snapshot(self) -> None:
        self.is_copied = False
        for stage, weight in enumerate(self.weights):
            self.take(stage, 0, StatePart({f"weights/{stage}": weight}, {"n": stage}, last=True))

    def rewind(self, step: int | None, state: Any) -> None:
        self.rewound.append((step, {k: held.digest for k, held in state.items()}))


def machine() -> dict[str, Any]:
    return {"ip": "127.0.0.1", "device": "cpu", "port": 9999}


@pytest.fixture
def config(tmp_path):
    return Config.from_dict(
        {
            "coordinator": machine(),
            "workers": [{**machine(), "id": 1, "port": 9998}],
            "shard_plan": plan_of(("local", 1), (1, 2)),
            "adapter": {"r": 2},
            "training": {"output_dir": str(tmp_path / "run"), "replicate_steps": 2},
        }
    )


@pytest.fixture
def pipeline():
    return Pipeline()


@pytest.fixture
def durable(config, pipeline):
    return DurableSteps(
        config,
        SimpleNamespace(pipeline=pipeline),  # type: ignore[arg-type]
        lambda state, values: {"position": state.state_dict(), "values": values},
    )


def test_a_copied_step_is_in_memory_and_on_the_disk(durable, config, pipeline):
    state = TrainState(step=4)
    stages = durable.take(state)
    assert durable.newest.state == state
    assert stages[0].digest == digest(stages[0].parts)
    reader = durable_store(config).resolve("latest")
    assert reader.step == 4
    assert reader.manifest["values"] == {"n": 1}
    assert dict(reader.read(["weights/0"]))["weights/0"].tolist() == [1, 1, 1]
    durable.remove()
    assert not durable_store(config).root.exists()


def test_a_copied_step_has_its_own_memory(durable, pipeline):
    stages = durable.take(TrainState())
    pipeline.weights[0].fill_(7)
    assert stages[0].parts[0].tensors["weights/0"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_does_not_replace_the_one_before(durable, pipeline, bad, caplog):
    durable.take(TrainState(step=1))
    pipeline.weights[1][0] = bad
    with caplog.at_level(logging.WARNING, "hetero_framework"):
        assert durable.take(TrainState(step=2)) is None
    assert durable.newest.state.step == 1
    assert "weights/1 of stage 1 is not finite after step 2" in caplog.text


def test_going_back_gives_the_step_and_the_state_of_its_stages(durable, pipeline):
    assert durable.rewind() is None
    pipeline.committed = 3
    stages = durable.take(TrainState(step=4))
    pipeline.committed = 8
    assert durable.rewind() == TrainState(step=4)
    assert pipeline.rewound == [(3, {k: held.digest for k, held in stages.items()})]


def test_a_copy_that_changed_in_memory_is_not_used(durable, pipeline, caplog):
    stages = durable.take(TrainState(step=4))
    stages[1].parts[0].tensors["weights/1"][0] = 1.0
    with caplog.at_level(logging.WARNING, "hetero_framework"):
        assert durable.rewind() is None
    assert pipeline.rewound == []
    assert "the copy of stage 1 after step 4 has changed here" in caplog.text


def test_a_link_that_breaks_when_a_copy_begins_costs_no_later_copy(durable, pipeline):
    durable.after_step(TrainState(step=1), 0.1)
    pipeline.breaks = True
    with pytest.raises(LinkLost):
        durable.after_step(TrainState(step=3), 0.1)
    pipeline.breaks = False
    durable.after_step(TrainState(step=3), 0.1)
    pipeline.finish_snapshot()
    assert durable.newest.state.step == 3


def test_copies_are_made_at_their_interval(durable, pipeline):
    made = []
    for step in range(1, 8):
        pipeline.take = None
        durable.after_step(TrainState(step=step), 0.1)
        if pipeline.take is not None and step > 1:
            pipeline.finish_snapshot()
        made.append(durable.newest.state.step)
    assert made == [1, 1, 3, 3, 5, 5, 7]


def test_a_copy_that_another_reader_of_the_state_replaced_is_begun_again(durable, pipeline):
    durable.after_step(TrainState(step=1), 0.1)
    durable.after_step(TrainState(step=3), 0.1)
    pipeline.is_copied = False  # as where an island reads the state
    durable.after_step(TrainState(step=5), 0.1)
    pipeline.finish_snapshot()
    assert durable.newest.state.step == 5
