from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.planner import FleetProfile
from hetero_framework.planner.bounds import step_bound
from hetero_framework.planner.enumeration import Enumeration
from hetero_framework.planner.evaluated import evaluated
from hetero_framework.planner.layout import Part
from hetero_framework.planner.moves import closed, interleaved
from hetero_framework.planner.relaxation import least_step
from tests.unit.planner.fleets import device, fleet_of, profiles_of_fleets, rules_of


def test_least_step_of_equal_devices_is_that_of_the_best_plan() -> None:
    profile = fleet_of(*(device(k or "local") for k in range(4)), speed=1e12)
    step_s = (3 + 8) * 0.006
    assert 0.98 * step_s < least_step(rules_of(profile), 2 * step_s) <= step_s + 1e-4


def test_least_step_knows_that_memory_keeps_devices_from_layers() -> None:
    ample = fleet_of(device("local"), device(1))
    tight = fleet_of(device("local"), device(1, memory_bytes=3.05e9))
    most_s = 8 * 8 * 0.003
    # Six of eight layers are the coordinator's.
    assert least_step(rules_of(tight), most_s) > 0.98 * 8 * 6 * 0.003
    assert least_step(rules_of(ample), most_s) < 8 * 6 * 0.003


def test_least_step_knows_what_a_star_relays() -> None:
    devices = [device(k or "local") for k in range(8)]
    direct, star = (
        fleet_of(*devices, speed=2e7, direct=direct, micro_batches=32) for direct in (True, False)
    )
    most_s = 32 * 8 * 0.003
    assert least_step(rules_of(star), most_s) > 1.2 * least_step(rules_of(direct), most_s)


def test_least_step_knows_that_more_stages_load_the_links() -> None:
    """A tensor takes 5 ms and a layer 3, so no device can have a stage more."""
    profile = fleet_of(*(device(k or "local") for k in range(4)), speed=2e7, micro_batches=32)
    single, several = (least_step(rules_of(profile, chunks=on), 1.0) for on in (False, True))
    assert several > 0.96 * single
    quick = fleet_of(*(device(k or "local") for k in range(4)), micro_batches=32)
    single, several = (least_step(rules_of(quick, chunks=on), 1.0) for on in (False, True))
    assert several < 0.96 * single


@settings(max_examples=15, deadline=None)
@given(profiles_of_fleets(most_devices=3, most_layers=4, tight=True), st.booleans())
def test_no_layout_is_below_the_least_step(profile: FleetProfile, chunks: bool) -> None:
    """All layouts of one stage per device, simulated; with `chunks` interleaved ones too."""
    rules = rules_of(profile, chunks=chunks)
    layouts = set(Enumeration(rules, 1e9, nodes=10**6).layouts())
    if chunks:
        others = [interleaved(rules, layout, 2) for layout in layouts]
        others += [other for layout in layouts for other in closed(rules, layout)]
        layouts.update(layout for layout in others if layout is not None)
    steps = [
        found.seconds for layout in layouts if (found := evaluated(rules.fleet, layout)) is not None
    ]
    if steps:
        assert least_step(rules, 2 * min(steps)) <= min(steps) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(profiles_of_fleets(most_devices=5, most_layers=7, tight=True, uneven=True), st.data())
def test_no_bound_of_a_layout_is_below_the_least_step(
    profile: FleetProfile, data: st.DataObject
) -> None:
    """Layouts at random, larger than can be enumerated, with layers that differ and links too."""
    rules = rules_of(profile)
    order = [0, *data.draw(st.permutations(rules.devices[1:]))]
    order = order[: data.draw(st.integers(1, min(len(order), profile.layers + 2)))]
    inner = data.draw(
        st.sets(
            st.integers(1, max(1, profile.layers)),
            min_size=max(0, len(order) - 2),
            max_size=max(0, len(order) - 2),
        )
        if len(order) - 2 <= profile.layers
        else st.nothing()
    )
    first = data.draw(st.integers(0, min(inner, default=profile.layers) - bool(inner)))
    ends = [first, *sorted(inner), profile.layers][-len(order) :]
    starts = [0, *ends[:-1]]
    again = data.draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    layout = tuple(
        Part(d, start, end, on and end > start)
        for d, start, end, on in zip(order, starts, ends, again, strict=True)
    )
    limits = rules.fleet.memory_limits(layout)
    if limits is not None:
        bound = step_bound(rules.fleet.pipeline(layout), profile.micro_batches, limits)
        assert least_step(rules, 3 * bound) <= bound * (1 + 1e-6)


def test_a_quick_device_that_can_hold_nothing_does_not_stand_in_the_way() -> None:
    """Found by the property above: the coordinator alone is the only layout."""
    slow = {"layer_forward_s": 0.002, "layer_backward_s": 0.004}
    profile = fleet_of(
        device("local", **slow), device(1, memory_bytes=0.5e9), layers=1, micro_batches=1
    )
    assert least_step(rules_of(profile, chunks=False), 0.012) <= 0.006 * (1 + 1e-9)


def test_a_single_micro_batch_has_no_backwards_behind_the_first() -> None:
    """Found by the property above: the layer on one device, the head alone on the other."""
    head = {"head_forward_s": 0.001, "head_backward_s": 0.002, "memory_bytes": 1.2e9}
    profile = fleet_of(
        device("local", **head), device(1, memory_bytes=0.5e9), layers=1, micro_batches=1, speed=1e8
    )
    assert least_step(rules_of(profile, chunks=False), 0.012) <= 0.00502 * (1 + 1e-9)
