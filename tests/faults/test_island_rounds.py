"""Islands in rounds, as real processes with torchft's lighthouse: any of them may end at any point.

In each run every step of the data counts once; islands that were away come back by the same
command; at the end all have the same bits.
"""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.islands import Islands
from benchmarks.machines import Machines
from benchmarks.replanning import Here
from tests.faults.test_islands import (
    DEATHS,
    NAMES,
    NUM_TEXTS,
    Deaths,
    Held,
    assert_each_sample_once,
    assert_same_result,
    cut,
    folder,
    go_on_in_other_plans,
    leave_one_after_the_other,
    live_through,
    raw_of,
    server,
    start,
    torchft,
    work,
)

__all__ = ["folder", "server", "torchft"]  # fixtures
pytestmark = pytest.mark.islands

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}
STREAMING = {"sync_steps": 4, "fragments": 2, "delay_steps": 1, "mixing": 0.5}


@pytest.fixture
def make(folder, tmp_path, server):
    """Configurations of islands with one-letter names, by name."""

    def raws(names: str, steps: int, adapter: dict[str, Any] | None, **section: Any) -> Any:
        made = {n: raw_of(folder, tmp_path, n, server.port, steps, **section) for n in names}
        for raw in made.values():
            raw["training"]["gradient_accumulation_steps"] = 2
            raw["adapter"] = adapter
        return made

    return raws


def counted(islands: Islands, *names: str) -> set[tuple[int, int]]:
    """The steps that count, as these islands told of them, one range for each synchronisation and
    island that took them."""
    lines = [line["island"] for name in names for _, line in islands.of[name].steps]
    return {tuple(steps) for line in lines for steps in line.get("counted", [])}


def assert_each_once(islands: Islands, steps: int, *names: str) -> None:
    """Of what these islands told of: each step counts by one synchronisation, and in each epoch
    each sample is in one of them."""
    found = sorted(counted(islands, *names))
    assert (found[0][0], found[-1][1]) == (0, steps), found
    assert all(before[1] == after[0] for before, after in pairwise(found)), found
    lines = [line["island"] for name in names for _, line in islands.of[name].steps]
    ids: dict[int, list[int]] = {}
    for line in lines:
        for step, own in line.get("sample_ids", {}).items():
            if "counted" in line:
                assert ids.setdefault(int(step), own) == own
    assert_each_sample_once(ids, steps, -(-NUM_TEXTS // 2))


POINTS: Deaths = [
    *(("c", "forward@4"), ("b", "island-changes"), ("a", "island-changes"), ("c", "island-vote")),
    *(("a", "island-decision"), ("a", "island-told"), ("b", "island-apply"), ("a", "island-apply")),
    *(("c", "load-state"), ("a", "commit-done")),  # the first while it takes over
    *(("b", "island-vote"), ("c", "island-vote")),  # at once
]


@DEATHS
@pytest.mark.parametrize(
    "adapter",
    [pytest.param(LORA, id="lora"), pytest.param(None, id="full", marks=pytest.mark.long)],
)
def test_every_point_at_which_an_island_dies_leaves_all_with_the_same_bits(adapter, make):
    section = STREAMING if adapter is not None else {"sync_steps": 4}
    raws = make("abc", 120, adapter, min_islands=3, **section)
    with Machines() as started:
        islands = Islands(started, raws)
        happened = live_through(islands, POINTS)
    assert len(happened) == len(POINTS)
    assert_each_once(islands, 120, *"abc")
    assert_same_result(raws)


@NAMES
def test_the_remaining_islands_go_on_while_others_are_away(names, make):
    """All but the last die, at once, in the middle of a round, and come back when rounds were made
    without them."""
    *dying, last = names
    raws = make(names, 150, LORA, **STREAMING)
    with Machines() as started:
        islands = Held(started, raws, dict.fromkeys(names, 0.02))
        start(islands, *names)
        islands.until_step(10, *names)
        for name in dying:
            islands.send(name, signal.SIGKILL)
        for name in dying:
            islands.await_end(name)
        islands.until_step(islands.reached(last) + 10, last)
        start(islands, *dying)
        islands.until_done(*names)
    who = ["".join(line["island"]["members"]) for _, line in islands.of[last].steps]
    assert who[0] == who[-1] == names
    assert last in who
    assert_each_once(islands, 150, *names)
    assert_same_result(raws)


def test_islands_join_late_and_leave_in_order_and_return(make):
    raws = make("abc", 240, LORA, **STREAMING)
    with Machines() as started:
        islands = Held(started, raws, dict.fromkeys("abc", 0.01))
        start(islands, "b", "c")
        islands.until_step(10, "b", "c")
        islands.start("a")
        islands.until_step(islands.reached("b") + 1, "a")
        islands.send("b", signal.SIGTERM)
        islands.await_end("b")
        assert "StoppedEarly" in islands.of["b"].said[-1]
        islands.until_step(islands.reached("a") + 8, "a", "c")
        islands.start("b")
        islands.until_done(*"abc")
    who = {"".join(line["island"]["members"]) for _, line in islands.of["c"].steps}
    assert {"bc", "abc", "ac"} <= who
    assert_each_once(islands, 240, *"abc")
    assert_same_result(raws)


def test_a_worker_lost_in_a_round_is_recovered_within_its_island(make):
    raws = make("ab", 120, LORA, **STREAMING)
    half = cut(raws["a"])
    with Machines() as started:
        islands = Held(started, raws, {"b": 0.01})
        worker = started.start(Here(), work, half)
        start(islands, *"ab")
        for step in (3, 21, 45):
            islands.until_step(step, *"ab")
            os.kill(worker.pid, signal.SIGKILL)
            worker = started.start(Here(), work, half)
        islands.until_done("a", "b")
    assert_each_once(islands, 120, "a", "b")
    assert_same_result(raws)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("abc", "ab", id="fewer"),
        pytest.param("ab", "abc", id="more", marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_with_other_islands_and_plans(before, after, make):
    raws = make("abc", 96, LORA, **STREAMING)
    with Machines() as started:
        islands = Held(started, raws, dict.fromkeys("abc", 0.01))
        leave_one_after_the_other(islands, 20, before)
        go_on_in_other_plans(started, islands, after)
    assert_each_once(islands, 96, *"abc")
    assert_same_result({name: raws[name] for name in after})


WARM: Deaths = [
    *(("c", "island-vote@4"), ("b", "island-vote@6"), ("a", "island-told@8")),
    *(("b", "island-changes"), ("a", "island-told"), ("c", "island-vote")),  # in the first rounds
]


@DEATHS
def test_deaths_around_the_end_of_the_warm_up_lose_nothing(make):
    """Steps that sum gradients are of all islands; they count as they are done."""
    section = {**STREAMING, "warmup_steps": 10, "min_islands": 3}
    raws = make("abc", 70, LORA, **section)
    with Machines() as started:
        islands = Islands(started, raws)
        happened = live_through(islands, WARM)
    assert len(happened) == len(WARM)
    warm: dict[int, list[int]] = {}
    for island in islands.of.values():
        for _, line in island.steps:
            if "samples" in line["island"]:
                own = [k for ids in line["island"]["sample_ids"].values() for k in ids]
                assert warm.setdefault(line["step"] - 1, own) == own
    assert sorted(warm) == list(range(10))
    assert_same_result(raws)
    rounds = sorted(counted(islands, *"abc"))
    assert (rounds[0][0], rounds[-1][1]) == (10, 70)
    assert all(before[1] == after[0] for before, after in pairwise(rounds)), rounds
