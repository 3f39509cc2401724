from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.engine.schedule.simulator import Edge
from hetero_framework.extras.planner.layout import Fleet, Part, Rules, evaluated
from tests.extras.planner.fleets import GB, card, device, fleet_of, rules_of, with_link

ENDS = {"embedding_forward_s": 0.1, "head_forward_s": 0.2, "head_backward_s": 0.4}


def test_stages_take_their_layers_with_embedding_and_head():
    layers = {"layer_forward_s": [1, 2, 3, 4], "layer_backward_s": 10, "layer_recompute_s": 5}
    fleet = Fleet(fleet_of(device(1), device("local", **layers, **ENDS), layers=4))
    assert fleet.ids == ["local", 1]
    alone = fleet.pipeline((Part(0, 0, 4),))
    assert alone.forward_s == (pytest.approx(10.3),)
    assert alone.backward_s == (pytest.approx(40.4),)
    pipeline = fleet.pipeline((Part(0, 0, 3, recompute=True), Part(1, 3, 4)))
    assert pipeline.forward_s == pytest.approx((6.1, 0.001))
    assert pipeline.backward_s == pytest.approx((45, 0.002))
    assert pipeline.devices == (0, 1)


def test_boundaries_are_relayed_unless_both_ways_are_there():
    profile = fleet_of(device("local"), device(1), device(2), device(3), speed=1e6)
    profile = with_link(profile, ("local", 2), bytes_per_s=1e5, latency_s=0.5)
    links = tuple(link for link in profile.links if (link.sender, link.receiver) != (2, 1))
    fleet = Fleet(profile.model_copy(update={"links": links}))
    assert not fleet.can_go_direct(1, 2)
    assert fleet.can_go_direct(1, 3)
    assert not fleet.can_go_direct(0, 1)
    assert fleet.edge(1, 3, 4, True) == Edge(0.1, 0.1, pytest.approx(1e-5), None)
    assert fleet.edge(0, 1, 4, False).relay is None
    relayed = fleet.edge(1, 2, 4, False)
    assert (relayed.forward_s, relayed.backward_s, relayed.relay) == (1.0, 0.1, 0)
    assert relayed.latency_s == pytest.approx((0.5 + 3e-5) / 2)
    assert fleet.edge(1, 1, 4, False) == Edge()


def test_no_gradient_is_sent_below_the_lowest_trained_layer():
    lora = {"layer_backward_s": [0, 0, 0.001, 0.001]}
    fleet = Fleet(fleet_of(device("local", **lora), device(1, **lora), layers=4))
    layout = (Part(0, 0, 1), Part(1, 1, 2), Part(0, 2, 3), Part(1, 3, 4))
    assert [edge.backward_s > 0 for edge in fleet.pipeline(layout).edges] == [False, False, True]
    assert [fleet.activation_bytes(part) > 0 for part in layout] == [False, False, True, True]


def test_the_embedding_gets_a_gradient_unless_known_to_be_frozen():
    profile = fleet_of(device("local"), device(1), layers=4)
    assert Fleet(profile).goes_back(0)
    frozen = Fleet(profile.model_copy(update={"embedding_is_trained": False}))
    assert not frozen.goes_back(0)
    assert frozen.goes_back(1)


def test_memory_limits_follow_from_the_free_memory():
    """4 layers of 1 GB, 0.1 GB of each micro-batch; recomputed 0.01 GB, and one layer's whole."""
    settings = {"embedding_bytes": 2 * GB, "head_bytes": 3 * GB, "reserved_bytes": GB}
    small = device("local", memory_bytes=8.3 * GB, **settings)
    profile = fleet_of(small, device(1, memory_bytes=8.3 * GB, **settings), layers=8)
    fleet = Fleet(profile)
    assert fleet.memory_limits((Part(0, 0, 4), Part(1, 4, 8))) is None
    assert fleet.memory_limits((Part(0, 0, 5), Part(1, 5, 8))) is None
    assert fleet.memory_limits((Part(0, 0, 4), Part(1, 4, 7))) == (3, 1)
    again = Part(0, 0, 4, recompute=True)
    assert fleet.memory_limits((again, Part(1, 4, 7))) == (8, 1)
    assert fleet.memory_bytes((again, Part(1, 4, 7)), 0, (8, 1)) == pytest.approx(7.42 * GB)
    margin = Fleet(profile, margins={"local": 0.5 * GB})
    assert margin.memory_limits((Part(0, 0, 4), Part(1, 4, 7))) == (2, 1)


def test_stages_of_one_device_share_its_memory():
    fleet = Fleet(fleet_of(device("local", memory_bytes=8 * GB), device(1), layers=8))
    layout = (Part(0, 0, 3), Part(1, 3, 5), Part(0, 5, 8))
    # 6 GB of weights; the last stage holds one micro-batch, the first one the rest.
    assert fleet.memory_limits(layout) == (5, 8, 1)


def test_devices_that_differ_in_nothing_are_one_kind():
    profile = fleet_of(device("local"), device(1), device(2), device(3, memory_bytes=1))
    assert rules_of(profile).kinds == {0: 0, 1: 1, 2: 1, 3: 3}
    other = with_link(profile, (2, "local"), latency_s=1.0)
    assert rules_of(other).kinds == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_boundary_is_direct_where_that_is_no_slower():
    profile = fleet_of(device("local"), device(1), device(2))
    rules = rules_of(profile)
    assert [direct for _, direct in rules.ways(1, 2, 4)] == [True]
    assert [direct for _, direct in rules.ways(0, 1, 4)] == [False]
    slow = rules_of(with_link(profile, (1, 2), bytes_per_s=1e6))
    assert [direct for _, direct in slow.ways(1, 2, 4)] == [False, True]


def test_pinned_layers_are_one_stage():
    base = rules_of(fleet_of(device("local"), device(1)))
    rules = Rules(base.fleet, base.devices, {1: (2, 8)}, True, False)
    assert rules.permits((Part(0, 0, 2), Part(1, 2, 8)))
    assert not rules.permits((Part(0, 0, 3), Part(1, 3, 8)))
    assert not rules.permits((Part(0, 0, 8),))


FLEET = Fleet(fleet_of(device("local"), device(1, memory_bytes=3.5e9), micro_batches=16))
FITS = (Part(0, 0, 6), Part(1, 6, 8, direct=False))


def test_a_layout_that_does_not_fit_is_evaluated_as_none():
    assert evaluated(FLEET, (Part(0, 0, 4), Part(1, 4, 8))) is None


def test_the_window_that_is_given_is_taken():
    found = evaluated(FLEET, FITS, max_in_flight=3)
    assert found.schedule.max_in_flight == 3
    assert found.seconds >= found.schedule.bound_s


def test_interleaved_plans_must_gain_enough():
    one, several = (
        evaluated(FLEET, layout) for layout in (FITS, (Part(0, 0, 3), Part(1, 3, 5), Part(0, 5, 8)))
    )
    assert 1 < one.preference / one.seconds < 1.001
    assert several.preference > 1.009 * several.seconds


def test_interleaved_plans_with_a_relay_must_gain_more():
    fleet = Fleet(fleet_of(device("local"), device(1), device(2), micro_batches=16))
    ends = Part(0, 0, 3), Part(1, 3, 5), Part(2, 5, 6, direct=False), Part(0, 6, 8)
    found = evaluated(fleet, ends)
    assert found.preference > 1.029 * found.seconds


def test_a_pass_takes_as_long_as_computing_or_fetching():
    fleet = Fleet(fleet_of(card("local", copy_slowdown=1.1), layers=12))
    # 3 ms of it six layers are on their way.
    assert fleet.seconds(Part(0, 0, 12, offload=8)) == pytest.approx((0.0123, 0.0243))
    slow = Fleet(fleet_of(card("local", host_to_device_bytes_per_s=400 * GB), layers=12))
    # Two slots' layers are there when the direction turns; an odd layer has one to itself.
    for offload in (8, 9):
        assert slow.fetch_s(Part(0, 0, 12, offload=offload)) == pytest.approx(0.015)
        # One layer is computed before the first fetch and one after the last, and half of those
        # between two streamed ones.
        longer_s = 0.015 + 0.012 * (1 / offload + 1 / 12)
        assert slow.seconds(Part(0, 0, 12, offload=offload)) == pytest.approx((longer_s, 0.024))
    assert slow.seconds(Part(0, 0, 12)) == pytest.approx((0.012, 0.024))


def test_what_nothing_is_trained_in_or_below_is_fetched_whole_forward():
    frozen = {"layer_backward_s": [0] * 12 + [0.001], "host_to_device_bytes_per_s": 400 * GB}
    fleet = Fleet(fleet_of(card("local", **frozen), layers=13))
    assert fleet.seconds(Part(0, 0, 12, offload=8)) == pytest.approx((0.020, 0.0))
    assert [fleet.fetch_s(Part(0, 0, 12, offload=few)) for few in (1, 2, 3)] == [0.0] * 3


def test_streamed_layers_have_two_slots():
    fleet = Fleet(fleet_of(card("local", memory_bytes=9 * GB), layers=12))
    assert fleet.memory_limits((Part(0, 0, 12),)) is None
    assert fleet.memory_limits((Part(0, 0, 12, offload=4),)) is None
    assert fleet.memory_limits((Part(0, 0, 12, offload=8),)) == (1,)
    assert fleet.memory_bytes((Part(0, 0, 12, offload=8),), 0, (1,)) == pytest.approx(7.2 * GB)
    assert fleet.memory_bytes((Part(0, 0, 12, offload=9),), 0, (1,)) == pytest.approx(7.2 * GB)


def test_as_few_layers_are_streamed_as_make_room():
    cards = card("local", memory_bytes=6.15 * GB), card(1, memory_bytes=6.15 * GB)
    fleet = Fleet(fleet_of(*cards, layers=14))
    counts = [
        [part.offload for part in one] for one in fleet.streamed((Part(0, 0, 7), Part(1, 7, 14)))
    ]
    # For one micro-batch in flight (7 + 0.7 GB), two, and four in front.
    assert counts == [[4, 4], [6, 4]]
    easy = Part(0, 0, 3), Part(1, 3, 6)
    assert fleet.streamed(easy) == [easy]
    too_much = Part(0, 0, 14), Part(1, 14, 14)
    assert Fleet(fleet_of(*cards, layers=80)).streamed((Part(0, 0, 80),)) == [(Part(0, 0, 80),)]
    assert fleet.memory_limits(fleet.streamed(too_much)[0]) == (1, 1)


def test_stages_of_a_device_share_what_is_saved():
    fleet = Fleet(fleet_of(card("local", memory_bytes=13 * GB), card(1), layers=24))
    layout = (Part(0, 0, 12), Part(1, 12, 16), Part(0, 16, 24))
    (found, *_) = fleet.streamed(layout)
    assert [part.offload for part in found] == [8, 0, 6]
    assert fleet.memory_limits(found) is not None


def test_a_machine_holds_the_layers_of_all_its_cards():
    layout = (Part(0, 0, 8, offload=8), Part(1, 8, 16, offload=8))
    for machine, fits in (("pc-1", True), ("pc-local", False)):
        own = {"host_bytes": 10 * GB, "machine": machine}
        fleet = Fleet(fleet_of(card("local", host_bytes=10 * GB), card(1, **own), layers=16))
        assert (fleet.memory_limits(layout) is not None) == fits
        assert fleet.short_host(layout) == (None if fits else (1, 6 * GB))


def test_layers_of_which_weights_are_trained_stay():
    frozen = [GB] * 8 + [0] * 4
    fleet = Fleet(fleet_of(card("local", layer_frozen_bytes=frozen), layers=12))
    assert fleet.memory_limits((Part(0, 0, 8, offload=8),)) is not None
    assert fleet.memory_limits((Part(0, 0, 12, offload=8),)) is None
    assert fleet.costs[0].fewest_streamed(0, 12, 8 * GB) is None


def test_slots_are_as_large_as_the_largest_layer_in_them():
    fleet = Fleet(fleet_of(card("local", layer_frozen_bytes=[GB, 0.5 * GB] * 6), layers=12))
    assert fleet.costs[0].streamed_bytes(0, 12, 12) == (9 * GB, 7.5 * GB)
    assert fleet.costs[0].fewest_streamed(0, 12, 6 * GB) == 12


def storing(name: int | str, **changes: Any) -> dict[str, Any]:
    """A card of which host memory has the 10 MB that a recomputed layer stores; they come back in
    1 ms, and leave in 2."""
    rates = {"host_to_device_bytes_per_s": 10 * GB, "device_to_host_bytes_per_s": 5 * GB}
    return card(name, **rates, layer_input_bytes=0.01 * GB, **changes)


def test_stored_inputs_leave_but_for_those_at_the_ends():
    fleet = Fleet(fleet_of(storing("local"), storing(1), layers=24))
    for recompute, here, away in ((False, 1.2 * GB, 0.0), (True, 0.0, 0.12 * GB)):
        first, last = Part(0, 0, 12, recompute), Part(1, 12, 24, recompute)
        assert fleet.activation_bytes(first) == pytest.approx(here)
        assert fleet.inputs_away(first) == pytest.approx(away)
        assert fleet.activation_bytes(last) == pytest.approx(here + 0.02 * GB * recompute)
        assert fleet.inputs_away(last) == pytest.approx(max(0.0, away - 0.02 * GB))
    # All the inputs of the first stage, three of which visit while a layer is computed again.
    assert fleet.kept_bytes((first, last), 0) == pytest.approx(12.13 * GB)


def test_a_pass_takes_as_long_as_the_copies_of_stored_inputs():
    fleet = Fleet(fleet_of(storing("local"), layers=12))
    assert fleet.seconds(Part(0, 0, 12)) == pytest.approx((0.012, 0.024))
    # 11 inputs leave in 22 ms; they return in 11, while 36 are computed.
    assert fleet.seconds(Part(0, 0, 12, True)) == pytest.approx((0.022, 0.036))


def test_host_memory_limits_the_micro_batches_of_which_it_has_inputs():
    layout = Part(0, 0, 12, True), Part(1, 12, 24, True)
    for host_gb, limits in ((100, (8, 1)), (0.4, (3, 1)), (0.1, None)):
        cards = storing("local", host_bytes=host_gb * GB), storing(1)
        fleet = Fleet(fleet_of(*cards, layers=24, micro_batches=8))
        assert fleet.memory_limits(layout) == limits


def test_cards_that_share_a_machine_are_another_kind():
    cards = card("local"), card(1), card(2), card(3, machine="two"), card(4, machine="two")
    kinds = rules_of(fleet_of(*cards)).kinds
    assert kinds == {0: 0, 1: 1, 2: 1, 3: 3, 4: 3}


def test_sets_of_layouts_are_in_the_order_that_they_have_without_streaming():
    assert hash(Part(1, 2, 9, True, False, 4)) == hash((1, 2, 9, True, False))
    assert Part(1, 2, 9, True, False, 4) != Part(1, 2, 9, True, False)


def test_all_states_of_a_stage_follow_its_trained_layers_into_host_memory():
    states = {"layer_host_bytes": GB / 4, "embedding_host_bytes": 2 * GB, "states_follow": True}
    fleet = Fleet(fleet_of(card("local", layer_step_bytes=7 * GB, **states), layers=12))
    assert fleet.stored_bytes((Part(0, 0, 12),), 0, 1) == 0
    assert fleet.stored_bytes((Part(0, 0, 12, offload=8),), 0, 1) == 4 * GB / 4 + 2 * GB
    assert fleet.short_host((Part(0, 0, 12, offload=8),)) is None
    short = Fleet(fleet_of(card("local", host_bytes=10 * GB, **states), layers=12))
    assert short.short_host((Part(0, 0, 12, offload=8),)) == (0, pytest.approx(GB))


def test_what_moves_for_trained_layers_counts_in_all_passes():
    trained = card("local", layer_step_bytes=7 * GB, host_to_device_bytes_per_s=700 * GB)
    fleet = Fleet(fleet_of(trained, layers=12))
    # 8 layers of 7 GB in a step, half of it forward, for each micro-batch.
    assert fleet.fetch_s(Part(0, 0, 12, offload=8)) == pytest.approx(
        8 * 7 / 700 / 2 / fleet.micro_batches
    )
    assert fleet.fetch_s(Part(0, 0, 12)) == 0
