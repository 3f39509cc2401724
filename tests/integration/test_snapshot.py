"""The state of a step, read while later steps run in all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core.frames import DEFAULT_MAX_FRAME_BYTES
from hetero_framework.data.batches import MicroBatch
from hetero_framework.engine.stage_api import StatePart, StepInfo
from tests.pools import Pool
from tests.samples import plan_of

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.xdist_group("pool")]

PLAN = plan_of(("local", 1), (1, 2), (2, 3), (1, 4), ("local", 6))
State = dict[tuple[int, str], torch.Tensor]


@contextmanager
def cluster_of(pool: Pool, llama: Path, output: Path) -> Iterator[Cluster]:
    sections = {"model": {"name_or_path": str(llama)}, "shard_plan": PLAN}
    config = Config.from_dict(pool.config(output, [], **sections))
    with Cluster(config, max_frame_bytes=DEFAULT_MAX_FRAME_BYTES) as cluster:
        cluster.start()
        cluster.assemble(config)
        yield cluster


def batches(step: int) -> list[MicroBatch]:
    draw = torch.Generator().manual_seed(step)
    found = []
    for _ in range(4):
        ids = torch.randint(3, 60, (2, 12), generator=draw)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return found


def take_step(cluster: Cluster, number: int) -> None:
    def gradients() -> None:
        cluster.begin(StepInfo(number, 0, True, 4, 88))
        cluster.pipeline.run(batches(number))
        cluster.pipeline.report_gradients()

    cluster.retrying(gradients)
    cluster.pipeline.commit(1e-2, 1.0, cluster.recovery.recover)


def collector(state: State, seen: list[int], now: Callable[[], int]):
    """Puts the parts into `state`, and into `seen` the step in which each came."""

    def take(stage: int, number: int, part: StatePart) -> None:
        seen.append(now())
        state.update({(stage, name): tensor.clone() for name, tensor in part.tensors.items()})

    return take


def test_snapshot_is_the_state_of_its_step_in_every_process(pool, llama, tmp_path):
    """Two workers and the coordinator, with two stages each but one: the state after step 1 is
    read during step 2 and after step 3, and equals what a run that stops there has."""
    with cluster_of(pool, llama, tmp_path / "stops") as cluster:
        for number in range(2):
            take_step(cluster, number)
        expected: State = {}
        cluster.pipeline.snapshot(collector(expected, [], lambda: 1))
        cluster.pipeline.finish_snapshot()
    found: State = {}
    seen: list[int] = []
    step = 0
    with cluster_of(pool, llama, tmp_path / "goes on") as cluster:
        for step in range(2):
            take_step(cluster, step)
        cluster.pipeline.snapshot(collector(found, seen, lambda: step))
        for step in range(2, 4):
            take_step(cluster, step)
        step = 4
        cluster.pipeline.finish_snapshot()
        last: State = {}
        cluster.pipeline.snapshot(collector(last, [], lambda: step))
        cluster.pipeline.finish_snapshot()
    assert seen[0] == 2  # while the next step was running
    assert len(seen) == len(PLAN)
    assert found.keys() == expected.keys() == last.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not any(
        torch.equal(last[key], expected[key]) for key in expected if "norm" not in key[1]
    )


def test_a_snapshot_is_dropped_if_its_receiver_fails(pool, llama, tmp_path):
    """As where the disk is full: steps go on, and nothing goes to who has failed any more."""
    with cluster_of(pool, llama, tmp_path / "run") as cluster:
        take_step(cluster, 0)
        asked: list[int] = []

        def refuse(stage: int, number: int, part: StatePart) -> None:
            asked.append(stage)
            raise OSError

        cluster.pipeline.snapshot(refuse)
        with pytest.raises(OSError):
            cluster.pipeline.finish_snapshot()
        given_up: list[int] = []
        cluster.pipeline.snapshot(collector({}, given_up, lambda: 0))  # and replaced at once
        take_step(cluster, 1)
        seen: list[int] = []
        found: State = {}
        cluster.pipeline.snapshot(collector(found, seen, lambda: 1))
        cluster.pipeline.finish_snapshot()
        assert (len(asked), len(seen)) == (1, len(PLAN))
        assert {stage for stage, _ in found} == set(range(len(PLAN)))
