"""No recorded step is faster than its own bound."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.core.spans import COMPUTE
from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.extras.observe.bottleneck import diagnose, text
from hetero_framework.extras.observe.step_account import covered, recorded_bound
from hetero_framework.extras.observe.timeline import Trace
from tests.extras.observe.timeline_samples import record


def taken(trace: Trace, step: int) -> float:
    tasks = [event for event in trace.of_step(step) if event.kind in COMPUTE]
    return max(task.ended for task in tasks) - min(task.began for task in tasks)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    devices=st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 1, 0, 1], [0, 1, 2, 0], [0, 0, 1, 2, 2]]),
    micro_batches=st.integers(1, 9),
    wire_s=st.sampled_from([0.0, 0.001, 0.03]),
    relay=st.booleans(),
    turns=st.booleans(),
    clock_error_s=st.sampled_from([0.0, 0.004, -0.02]),
    seed=st.integers(0, 1000),
)
def test_no_step_is_faster_than_its_bound(
    tmp_path_factory, devices, seed, clock_error_s, **changes
):
    """Tasks and transfers take 0.5 to 1.5 times their time, so that steps differ from means."""
    chance = random.Random(seed)
    p = len(devices)
    spec: dict[str, Any] = {
        "devices": devices, "forward_s": [0.02] * p, "backward_s": [0.04] * p,
        "jitter": lambda: chance.uniform(0.5, 1.5), **changes,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("run")
    trace = record(folder, spec, steps=[1, 2, 3], clock_error_s=clock_error_s)
    for step in trace.steps:
        bound = recorded_bound(trace.stages, trace.of_step(step))
        busiest = max(
            sum(e.seconds for e in trace.of_step(step) if e.kind in COMPUTE and e.process == n)
            for n in range(len(trace.processes))
        )
        assert busiest - 1e-6 <= bound <= taken(trace, step) + 1e-9
    found = diagnose(trace)
    assert found.ratio >= 1
    assert f"{found.ratio:.2f} times that" in text(found)


def test_bound_of_equal_stages_is_that_of_1f1b(tmp_path):
    """(m + p - 1)(F + B), which a step of 1F1B takes."""
    spec: dict[str, Any] = {
        "devices": [0, 1, 2, 3], "micro_batches": 16, "forward_s": [0.02] * 4,
        "backward_s": [0.04] * 4,
    }  # fmt: skip
    trace = record(tmp_path, spec, steps=[1])
    bound = recorded_bound(trace.stages, trace.of_step(1))
    assert bound == pytest.approx(19 * 0.06)
    assert bound == pytest.approx(step_bound(Profile.of([0.02] * 4, [0.04] * 4), 16))
    assert taken(trace, 1) == pytest.approx(bound)


def test_the_bound_includes_one_slow_task_on_the_longest_chain(tmp_path):
    """A mean would hide it: one micro-batch's way is what the step cannot be shorter than."""
    slow = iter([1.0] * 2 + [50.0] + [1.0] * 100)
    spec: dict[str, Any] = {
        "devices": [0, 1, 2], "micro_batches": 2, "forward_s": [0.01] * 3, "backward_s": [0.01] * 3,
        "jitter": lambda: next(slow),
    }  # fmt: skip
    trace = record(tmp_path, spec, steps=[1])
    bound = recorded_bound(trace.stages, trace.of_step(1))
    assert bound > 0.5
    assert bound <= taken(trace, 1)


def test_a_step_without_tasks_has_no_bound(tmp_path):
    trace = record(tmp_path, {"devices": [0], "micro_batches": 1, "forward_s": [1],
                              "backward_s": [1]}, steps=[1])  # fmt: skip
    assert recorded_bound(trace.stages, []) == 0.0


def test_time_in_several_intervals_counts_once():
    assert covered([(7, 8), (0, 4), (1, 2), (3, 5)]) == 6
    assert covered([]) == 0
