from __future__ import annotations

from hetero_framework.extras.planner.evaluated import evaluated
from hetero_framework.extras.planner.layout import Fleet, Part
from tests.extras.planner.fleets import device, fleet_of

FLEET = Fleet(fleet_of(device("local"), device(1, memory_bytes=3.5e9), micro_batches=16))
FITS = (Part(0, 0, 6), Part(1, 6, 8, direct=False))


def test_a_layout_that_does_not_fit_is_evaluated_as_none() -> None:
    assert evaluated(FLEET, (Part(0, 0, 4), Part(1, 4, 8))) is None


def test_the_window_that_is_given_is_taken() -> None:
    found = evaluated(FLEET, FITS, max_in_flight=3)
    assert found is not None
    assert found.schedule.max_in_flight == 3
    assert found.seconds >= found.schedule.bound_s


def test_interleaved_plans_must_gain_enough() -> None:
    one, several = (
        evaluated(FLEET, layout) for layout in (FITS, (Part(0, 0, 3), Part(1, 3, 5), Part(0, 5, 8)))
    )
    assert one is not None
    assert several is not None
    assert 1 < one.preference / one.seconds < 1.001
    assert several.preference > 1.009 * several.seconds


def test_interleaved_plans_with_a_relay_must_gain_more() -> None:
    fleet = Fleet(fleet_of(device("local"), device(1), device(2), micro_batches=16))
    ends = Part(0, 0, 3), Part(1, 3, 5), Part(2, 5, 6, direct=False), Part(0, 6, 8)
    found = evaluated(fleet, ends)
    assert found is not None
    assert found.preference > 1.029 * found.seconds
