from __future__ import annotations

import pytest

from hetero_framework.config import Config
from hetero_framework.engine.pipeline import StageStatistics
from hetero_framework.trainer.straggler import STEPS, StragglerWatch, more_even


def seen(watch: StragglerWatch, *busy_s: float) -> None:
    for _ in range(STEPS + 5):
        watch.step({k: statistics(seconds) for k, seconds in enumerate(busy_s)})


def statistics(busy_s: float) -> StageStatistics:
    zeros = dict.fromkeys(StageStatistics.__dataclass_fields__, 0)
    return StageStatistics(**{**zeros, "forward_s": busy_s / 3, "backward_s": 2 * busy_s / 3})


@pytest.fixture
def watch() -> StragglerWatch:
    raw = {
        "coordinator": {"ip": "127.0.0.1", "port": 1},
        "workers": [{"id": k, "ip": "127.0.0.1", "port": 1 + k} for k in (1, 2)],
        "shard_plan": [
            {"id": id, "start": 2 * k, "end": 2 * k + 2} for k, id in enumerate(("local", 1, 2))
        ],
    }
    return StragglerWatch(Config.from_dict(raw).plan.stages)


def test_f18_a_stage_three_times_as_slow_is_said_once_with_a_better_split(
    watch: StragglerWatch, logged: list[str]
) -> None:
    seen(watch, 2.0, 6.0, 2.0)
    (line,) = logged
    assert "worker 1 holds up the others" in line
    assert "20%, 60%, 20%" in line
    assert "with layers 3, 1, 2 instead of 2, 2, 2 the slowest would take 50 %" in line


def test_even_stages_are_nothing_to_speak_of(watch: StragglerWatch, logged: list[str]) -> None:
    seen(watch, 2.0, 2.4, 2.0)
    assert logged == []


def test_a_heavy_head_is_not_promised_away() -> None:
    """Three stages of two layers; that with the head takes as long as five layers."""
    assert more_even([2, 2, 2], [2.0, 2.0, 5.0]) == ([3, 2, 1], 4.0)


def test_a_stage_keeps_a_layer() -> None:
    assert more_even([1, 4], [9.0, 4.0]) == ([1, 4], 9.0)


@pytest.mark.parametrize("layers", [[2, 2, 2], [1, 5, 3], [4, 4]])
def test_layers_are_moved_and_none_is_lost(layers: list[int]) -> None:
    counts, longest_s = more_even(layers, [1.0, 8.0, 3.0][: len(layers)])
    assert sum(counts) == sum(layers)
    assert longest_s <= 8.0


def test_stages_that_hold_no_layer_are_reckoned_with() -> None:
    """The ends may hold the embedding or the head alone."""
    counts, longest_s = more_even([0, 6, 0], [0.1, 9.0, 0.5])
    assert sum(counts) == 6
    assert counts[1] < 6
    assert longest_s < 9.0
