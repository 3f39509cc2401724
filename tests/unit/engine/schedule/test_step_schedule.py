from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD
from hetero_framework.engine.schedule.simulator import Edge, Profile, SimulatedSpan, simulate
from hetero_framework.engine.schedule.step_schedule import StepSchedule, Transfer
from tests.unit.engine.schedule.profiles import POLICIES, SIMULATIONS, profiles
from tests.unit.engine.schedule.retiming import retimed


def spans_of(profile: Profile, m: int, **settings: object) -> tuple[float, list[SimulatedSpan]]:
    spans: list[SimulatedSpan] = []
    done = simulate(profile, m, m, spans=spans, **settings)  # type: ignore[arg-type]
    return done.seconds, spans


@SIMULATIONS
@given(profiles(), POLICIES, st.integers(1, 6))
def test_retiming_the_same_times_gives_the_same_length(profile, policy, m):  # type: ignore[no-untyped-def]
    seconds, spans = spans_of(profile, m, policy=policy)
    assert retimed(profile, spans) == pytest.approx(seconds, abs=1e-9)


@SIMULATIONS
@given(profiles(), POLICIES, st.integers(1, 6), st.randoms())
def test_a_fixed_order_grows_no_more_than_its_times(profile, policy, m, dice):
    """As it may where a policy decides anew."""
    seconds, spans = spans_of(profile, m, policy=policy)

    times = ("forward_s", "backward_s", "latency_s")

    def longer(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(s * dice.uniform(1, 1.1) for s in times)

    edges = tuple(
        replace(edge, **dict(zip(times, longer(tuple(vars(edge)[n] for n in times)), strict=True)))
        for edge in profile.edges
    )
    forward_s, backward_s = longer(profile.forward_s), longer(profile.backward_s)
    slower = replace(profile, forward_s=forward_s, backward_s=backward_s, edges=edges)
    assert seconds - 1e-9 <= retimed(slower, spans) <= 1.1 * seconds + 1e-9


def test_the_order_of_a_process_has_its_own_tasks():
    """Stages 0 and 3 with the coordinator, 1 and 2 with workers, the boundary between these relayed
    by it: a forward enters and leaves it there."""
    profile = Profile.of(
        [1] * 4, [2] * 4, devices=[0, 1, 2, 0], edges=[Edge(1, 1), Edge(1, 1, relay=0), Edge(1, 1)]
    )
    _, spans = spans_of(profile, 1)
    order = StepSchedule((9,) * 4).in_order_of(spans)
    f1, f2, f3 = ((FORWARD, k) for k in (1, 2, 3))
    b0, b1, b2 = ((BACKWARD, k) for k in (0, 1, 2))
    assert order.tasks == ((FORWARD, 0), f1, f2, f3, b2, b1, b0)
    relayed = [Transfer(f2), Transfer(f2, 1)], [Transfer(b1), Transfer(b1, 1)]
    assert order.transfers == (
        *(Transfer(f1), *relayed[0], Transfer(f3), Transfer(b2), *relayed[1], Transfer(b0)),
    )
    here = order.for_process([0, 3], relays=True)
    assert here.tasks == ((FORWARD, 0), f3, b0)
    assert here.sends == (f1, f2, b2, b1)
    assert here.receives == (f2, f3, b1, b0)
    first, second = order.for_process([1]), order.for_process([2])
    assert (first.tasks, first.sends, first.receives) == ((f1, b1), (f2, b0), (f1, b1))
    assert (second.tasks, second.sends, second.receives) == ((f2, b2), (f3, b1), (f2, b2))


def test_transfers_without_bytes_are_not_waited_for():
    _, spans = spans_of(Profile.of([1, 1], [0, 1], edges=[Edge(1, 0)]), 2)
    ordered = StepSchedule((9, 9)).in_order_of(spans)
    assert ordered.transfers == (Transfer((FORWARD, 1)),) * 2
