"""Profiles that the tests of the planner simulate."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from hetero_framework.engine.schedule.readiness import BACKWARD_FIRST, DueDates, Policy
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.engine.schedule.tuning import by_depth, forwards_ahead

SLOW = 70.26  # milliseconds on the wire, of an activation and of a gradient
_MOST_STAGES = 5
_DUE_DATES = st.builds(DueDates, *[st.integers(-9, 9), st.integers(0, 3)] * 2)
POLICIES = st.sampled_from(
    (BACKWARD_FIRST, forwards_ahead(_MOST_STAGES), by_depth(_MOST_STAGES))
) | st.tuples(*[_DUE_DATES] * _MOST_STAGES).map(Policy)
SIMULATIONS = settings(max_examples=150, deadline=None)


@st.composite
def profiles(draw: st.DrawFn, *, least: int = 0, free: bool = False) -> Profile:
    """Up to five stages on up to three devices; boundaries of every kind, or free ones."""
    p = draw(st.integers(1, _MOST_STAGES))
    times = st.lists(st.integers(least, 9), min_size=p, max_size=p)
    wire = st.integers(0, 0 if free else 30)
    edge = st.builds(Edge, wire, wire, wire, st.none() | st.integers(0, 3))
    devices = draw(st.lists(st.integers(0, 2), min_size=p, max_size=p) | st.just(list(range(p))))
    edges = draw(st.lists(edge, min_size=p - 1, max_size=p - 1))
    return Profile.of(draw(times), draw(times), devices=devices, edges=edges)


def equal(p: int, f: float = 20, b: float = 40, edge: Edge | None = None) -> Profile:
    return Profile.of([f] * p, [b] * p, edges=[edge or Edge()] * (p - 1))


def interleaved(p: int, v: int, f: float, b: float, edge: Edge | None = None) -> Profile:
    """p devices with v stages each, which take `f` and `b` together."""
    n = p * v
    edges = [edge or Edge()] * (n - 1)
    return Profile.of([f / v] * n, [b / v] * n, devices=list(range(p)) * v, edges=edges)


def work_of(profile: Profile, m: int) -> list[float]:
    """The seconds that each device has to compute, in the order in which stages name them."""
    work: dict[int, float] = {}
    times = zip(profile.devices, profile.forward_s, profile.backward_s, strict=True)
    for device, forward_s, backward_s in times:
        work[device] = work.get(device, 0.0) + m * (forward_s + backward_s)
    return list(work.values())
