"""Random lives of a run's workers against the table of `Membership`."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.membership_machine import World

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def test_random_event_sequences_of_workers_are_handled():
    run_state_machine_as_test(World, settings=settings(max_examples=30, **QUIET))


@pytest.mark.faults
def test_many_random_event_sequences_of_workers_are_handled(figure):
    runs = 200
    long = settings(max_examples=runs, stateful_step_count=100, **QUIET)
    run_state_machine_as_test(World, settings=long)
    figure("random lives of workers", f"{runs} runs of 100 events", "200 runs, all foreseen")
