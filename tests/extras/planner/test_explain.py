from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_framework.errors import PlanError
from hetero_framework.extras.planner import FleetProfile, explain, plan
from hetero_framework.extras.planner.layout import Evaluated, Fleet, Layout, Part, Rules, evaluated
from hetero_framework.extras.planner.layout_search import Search
from tests.extras.planner.fleets import GB, card, device, fleet_of, raw_fleet, rules_of

HALVES = (Part(0, 0, 4), Part(1, 4, 8))
PROFILE = fleet_of(
    device("local", head_forward_s=0.004),
    device(1),
    device(2, layer_forward_s=[0.001, 0.003] * 4),
    direct=False,
)
CUT = (Part(0, 0, 2), Part(1, 2, 5), Part(2, 5, 8))


def found_of(profile: FleetProfile, layout: Layout) -> Evaluated:
    found = evaluated(Fleet(profile), layout)
    assert found is not None
    return found


def advice_of(profile: FleetProfile, layout: Layout) -> tuple[str, ...]:
    found = found_of(profile, layout)
    return explain.advice(found, rules_of(profile), explain.device_uses(found))


# ---- what each device does


def test_use_of_a_device() -> None:
    profile = fleet_of(
        device("local", embedding_bytes=2 * GB, memory_bytes=20 * GB, reserved_bytes=GB),
        device(1, head_bytes=3 * GB, memory_bytes=30 * GB),
        speed=1e12,
    )
    found = found_of(profile, HALVES)
    local, one = explain.device_uses(found)
    assert (local.id, local.layers, local.limit) == ("local", 4, "compute")
    assert (one.id, one.layers, one.limit) == (1, 4, "compute")
    for use in (local, one):
        assert use.busy == pytest.approx(8 * 0.012 / found.seconds)
    held = found.schedule.forecast.peak_in_flight
    assert local.memory_bytes == pytest.approx((1 + 2 + 4 + 0.4 * held[0]) * GB)
    assert one.memory_bytes == pytest.approx((3 + 4 + 0.4 * held[1]) * GB)
    assert local.memory_bytes + local.free_bytes == pytest.approx(20 * GB, abs=2)
    assert one.memory_bytes + one.free_bytes == pytest.approx(30 * GB, abs=2)


def test_several_stages_of_a_device_are_reported_together() -> None:
    layout = (Part(0, 0, 3), Part(1, 3, 5), Part(0, 5, 8))
    local, one = explain.device_uses(found_of(fleet_of(device("local"), device(1)), layout))
    assert (local.layers, one.layers) == (6, 2)
    assert local.busy == pytest.approx(3 * one.busy)


def test_a_device_with_little_work_is_limited_by_memory_or_link() -> None:
    uneven = (Part(0, 0, 6), Part(1, 6, 8))
    limits = []
    for worker, speed in (
        ({}, 1e12),
        ({"memory_bytes": 2.5 * GB}, 1e12),  # for two layers of 1 GB, and not for three
        ({}, 1e7),  # 10 ms for a tensor, 6 ms for its layers
        ({"memory_bytes": 2.5 * GB}, 1e7),
    ):
        uses = explain.device_uses(
            found_of(fleet_of(device("local"), device(1, **worker), speed=speed), uneven)
        )
        assert uses[0].limit == "compute"
        limits.append(uses[1].limit)
    assert limits == ["compute", "memory", "link", "memory"]


def test_full_memory_does_not_hide_the_limit_of_compute() -> None:
    full = {"memory_bytes": 4.5 * GB}
    uses = explain.device_uses(
        found_of(fleet_of(device("local", **full), device(1, **full), speed=2e7), HALVES)
    )
    assert [use.limit for use in uses] == ["compute", "compute"]


def test_links_of_others_limit_no_device() -> None:
    raw = raw_fleet([device("local"), device(1), device(2)])
    for link in raw["links"]:
        if "local" in (link["from"], link["to"]):
            link["bytes_per_s"] = 1e7
    layout = (Part(0, 0, 4), Part(1, 4, 7), Part(2, 7, 8, direct=True))
    uses = explain.device_uses(found_of(FleetProfile.from_dict(raw), layout))
    assert uses[2].limit == "compute"


# ---- who could do it alone


def test_alone_names_the_fastest_device_that_holds_the_model() -> None:
    rules = rules_of(
        fleet_of(
            device("local", layer_forward_s=0.004),
            device(1, layer_forward_s=0.0001, memory_bytes=7 * GB),
            device(2, head_forward_s=0.01),
        )
    )
    best = explain.alone(rules.fleet, rules.devices)
    assert best is not None
    assert best.id == 2
    assert best.step_s == pytest.approx(8 * (8 * 0.003 + 0.01))
    other = explain.alone(rules.fleet, [0, 1])
    assert other is not None
    assert other.id == "local"
    assert explain.alone(rules.fleet, [1]) is None


def test_recomputation_makes_a_device_alone_slower() -> None:
    """8 GB of layers, 0.8 GB of a micro-batch, and 0.08 GB and a layer's 0.1 GB if it does."""
    fleet = Fleet(fleet_of(device("local", memory_bytes=8.2 * GB)))
    found = explain.alone(fleet, [0])
    assert found is not None
    assert found.step_s == pytest.approx(8 * 8 * 0.004)


# ---- who is left out


@pytest.mark.parametrize(
    ("changes", "speed", "said"),
    [
        ({"memory_bytes": 1.005 * GB}, 1e9, "worker 2 has no memory for a layer"),
        ({}, 1e5, "worker 2 would receive a micro-batch in 1.00 s, longer than all stages take"),
        ({"layer_forward_s": 0.5}, 1e9, "worker 2 takes 502 ms for a layer, longer than others"),
        ({}, 1e9, "worker 2 is slower than the link to it pays for"),
    ],
)
def test_why_a_device_is_left_out(changes: dict[str, Any], speed: float, said: str) -> None:
    raw = raw_fleet([device("local"), device(1), device(2, **changes)])
    for link in raw["links"]:
        if 2 in (link["from"], link["to"]):
            link["bytes_per_s"] = speed
    profile = FleetProfile.from_dict(raw)
    found = found_of(profile, HALVES)
    assert explain.left_out(found, rules_of(profile)).startswith(said)
    excluded = Rules(found.fleet, (0, 1), {}, checkpointing=True, chunks=False)
    assert explain.left_out(found, excluded) == ""


def test_only_the_first_of_many_devices_are_named() -> None:
    profile = fleet_of(*(device(k or "local") for k in range(8)))
    said = explain.left_out(found_of(profile, HALVES), rules_of(profile)).split("; ")
    assert [text.split(" is ")[0] for text in said[:4]] == [f"worker {k}" for k in (2, 3, 4, 5)]
    assert said[4:] == ["and 2 more"]


def test_a_link_that_is_too_slow_is_reported() -> None:
    profile = fleet_of(device("local"), device(1), speed=1e5)
    found = plan(profile)
    assert found.unused == (1,)
    assert "would receive a micro-batch in 1.00 s" in found.why


# ---- what would help


def test_advice_has_a_gain_and_comes_best_first() -> None:
    """A relayed boundary that takes longer than the stages."""
    profile = fleet_of(device("local"), device(1), device(2), direct=False, speed=2e7)
    layout = (Part(0, 0, 3), Part(1, 3, 6), Part(2, 6, 8))
    said = advice_of(profile, layout)
    assert any(text.startswith("a direct link of 160 Mbit/s between worker 1") for text in said)
    assert any(text.startswith("wire.activations and wire.gradients") for text in said)
    assert not any(text.startswith("a card") for text in said)  # there is memory enough
    gains = [float(text.split(": about ")[1].split("%")[0]) for text in said]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 2


def test_a_link_that_is_slower_than_the_relay_is_not_taken() -> None:
    layout = (Part(0, 0, 3), Part(1, 3, 6), Part(2, 6, 8))
    raw = raw_fleet([device("local"), device(1), device(2)])
    for speed, direct in ((2e9, True), (5e8, False)):
        for link in raw["links"]:
            if "local" not in (link["from"], link["to"]):
                link["bytes_per_s"] = speed
        changed = explain._with_direct(Fleet(FleetProfile.from_dict(raw)), layout)
        assert changed == (*layout[:2], layout[2]._replace(direct=direct))


def test_advice_without_a_gain_is_not_given() -> None:
    alone = fleet_of(device("local"), micro_batches=64)
    assert advice_of(alone, (Part(0, 0, 8),)) == ()


def test_a_larger_card_is_advised_for_the_device_short_of_memory() -> None:
    """The second and third could compute four times what they have memory for."""
    quick = {"layer_forward_s": 0.0005, "layer_backward_s": 0.001}
    small = {"memory_bytes": 1.9 * GB, **quick}, {"memory_bytes": 2.9 * GB, **quick}
    profile = fleet_of(device("local"), device(1, **small[0]), device(2, **small[1]), speed=1e12)
    said = advice_of(profile, (Part(0, 0, 5), Part(1, 5, 6), Part(2, 6, 8)))
    cards = [text for text in said if text.startswith("a card")]
    assert len(cards) == 1
    assert "GiB more for worker 1: about " in cards[0]


def test_the_smallest_card_of_nearly_the_best_gain_is_named() -> None:
    small, middle, large = (0.02, "4"), (0.19, "8"), (0.2, "16")
    assert explain.cards_worth([small, middle, large]) == [middle]
    assert explain.cards_worth([(0.0, "4"), (0.0, "8")]) == [(0.0, "4")]
    assert explain.cards_worth([]) == []


# ---- changed profiles


def test_int8_is_a_little_more_than_half_of_the_bytes() -> None:
    codec, _ = explain.settings(PROFILE)
    assert codec.allowed_by == explain.CODEC
    assert codec.changes == {"wire": {"activations": "int8", "gradients": "int8"}}
    assert codec.profile.activation_bytes == pytest.approx(0.52 * PROFILE.activation_bytes)
    assert codec.profile.gradient_bytes == pytest.approx(0.52 * PROFILE.gradient_bytes)
    assert codec.profile.devices == PROFILE.devices
    assert codec.profile.links == PROFILE.links


def test_a_codec_is_not_proposed_without_tensors_to_send() -> None:
    silent = PROFILE.model_copy(update={"activation_bytes": 0.0, "gradient_bytes": 0.0})
    assert [one.allowed_by for one in explain.settings(silent)] == [explain.MICRO_BATCH]


def test_twice_as_many_micro_batches_have_half_of_everything_but_weights() -> None:
    _, halved = explain.settings(PROFILE)
    assert halved.allowed_by == explain.MICRO_BATCH
    assert halved.changes == {"micro_batches": 16}
    assert halved.profile.micro_batches == 16
    assert halved.profile.activation_bytes == pytest.approx(PROFILE.activation_bytes / 2)
    assert halved.profile.gradient_bytes == pytest.approx(PROFILE.gradient_bytes / 2)
    layout = CUT
    before, after = (Fleet(p).pipeline(layout) for p in (PROFILE, halved.profile))
    assert after.forward_s == pytest.approx([s / 2 for s in before.forward_s])
    assert after.backward_s == pytest.approx([s / 2 for s in before.backward_s])
    for old, new in zip(PROFILE.devices, halved.profile.devices, strict=True):
        assert new.layer_bytes == old.layer_bytes
        assert new.memory_bytes == old.memory_bytes
        for name in ("activation_bytes_per_layer", "activation_bytes_recomputed"):
            kept = zip(getattr(old, name), getattr(new, name), strict=True)
            assert all(b == a / 2 for a, b in kept)


def test_a_direct_link_is_as_quick_as_the_slower_half_of_the_way() -> None:
    raw = raw_fleet([device("local"), device(1), device(2)], direct=False)
    for link in raw["links"]:
        link["bytes_per_s"] = 2e8 if 2 in (link["from"], link["to"]) else 5e8
        link["latency_s"] = 0.003 if 2 in (link["from"], link["to"]) else 0.001
    fleet = Fleet(FleetProfile.from_dict(raw))
    (direct,) = explain.direct_links(fleet, CUT)
    assert "direct link of 1.60 Gbit/s between worker 1 and worker 2" in direct.text
    assert direct.allowed_by is None
    assert direct.changes == {}
    links = {(link.sender, link.receiver): link for link in direct.profile.links}
    assert len(links) == len(fleet.profile.links) + 2
    for pair in ((1, 2), (2, 1)):
        assert links[pair].bytes_per_s == 2e8
        assert links[pair].latency_s == pytest.approx(0.002)
    assert Fleet(direct.profile).can_go_direct(1, 2)


def test_only_relayed_boundaries_get_a_link() -> None:
    fleet = Fleet(PROFILE)
    assert not list(explain.direct_links(fleet, (Part(0, 0, 4), Part(1, 4, 8))))
    raw = raw_fleet([device("local"), device(1), device(2)])
    for link in raw["links"]:
        if "local" not in (link["from"], link["to"]):
            link["bytes_per_s"] = 1.0
    linked = Fleet(FleetProfile.from_dict(raw))
    direct = (*CUT[:2], CUT[2]._replace(direct=True))
    assert not list(explain.direct_links(linked, direct))
    (relayed,) = explain.direct_links(linked, CUT)
    assert len(relayed.profile.links) == len(linked.profile.links)
    assert {link.bytes_per_s for link in relayed.profile.links} == {1e9}


def test_a_larger_card_is_one_devices_memory() -> None:
    fleet = Fleet(fleet_of(device(1, memory_bytes=4 * GB), device("local"), device(2)))
    small, middle, large = explain.cards(fleet, 1)
    assert small.text == "a card with 4 GiB more for worker 1"
    assert large.text == "a card with 16 GiB more for worker 1"
    memory = {one.id: one.memory_bytes for one in middle.profile.devices}
    assert memory == {1: 4 * GB + 8 * 2**30, "local": 1000 * GB, 2: 1000 * GB}


# ---- why nothing fits


def refusal(profile: FleetProfile, margins: Any = None, **changes: Any) -> PlanError:
    rules = rules_of(profile, **changes)
    fleet = Fleet(profile, margins=margins)
    return explain.nothing_fits(replace(rules, fleet=fleet), margins or {})


def test_margins_are_named_where_nothing_fits() -> None:
    small = {"memory_bytes": 5 * GB}
    profile = fleet_of(device("local", **small), device(1, **small))
    said = str(refusal(profile, {1: 2 * GB}))
    assert "worker 1 has 4.66 GiB, 1.86 GiB of it kept free: room for 2 of 8 layers" in said
    assert "coordinator has 4.66 GiB: room for 4 of 8 layers, 963 MiB each" in said


def test_checkpointing_is_advised_where_it_was_not_allowed() -> None:
    profile = fleet_of(device("local", memory_bytes=3 * GB))
    for checkpointing in (False, True):
        said = refusal(profile, checkpointing=checkpointing)
        # With what is kept of a micro-batch, which is less if it is computed again.
        assert ("963 MiB each" if checkpointing else "1.02 GiB each") in str(said)
        hint = said.hint
        assert hint is not None
        assert hint.startswith("allow checkpointing") != checkpointing


def test_the_plan_error_names_the_missing_memory() -> None:
    profile = fleet_of(device("local", memory_bytes=3 * GB), device(1, memory_bytes=3 * GB))
    with pytest.raises(PlanError) as caught:
        plan(profile)
    said = str(caught.value)
    # One of them could hold six layers, and has room for two and what one keeps.
    missing = "2.94 GiB are missing on coordinator, embedding and head included"
    assert f"no plan fits into memory: {missing}" in said
    assert "worker 1 has 2.79 GiB: room for 2 of 8 layers" in said


@pytest.mark.parametrize(
    ("local", "worker", "options", "said"),
    [
        (
            {"memory_bytes": 1 * GB, "embedding_bytes": 2 * GB},
            {},
            {},
            "the coordinator holds the embedding, for which it is short of 954 MiB",
        ),
        (
            {"memory_bytes": 20 * GB, "head_bytes": 30 * GB},
            {"memory_bytes": 22 * GB, "head_bytes": 30 * GB},
            {},
            "the head fits on no process; the nearest one is short of 7.45 GiB",
        ),
        ({}, {}, {"pins": {1: (4, 5)}, "excluded": [2]}, "--pin: no plan keeps worker 1 layer 4"),
        ({}, {}, {"pins": {1: (1, 2), 2: (6, 8)}}, "keeps worker 1 layer 1, worker 2 layers 6-7"),
    ],
)
def test_the_plan_error_names_the_obstacle(
    local: dict[str, Any], worker: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    heads = device("local", **local), device(1, **worker), device(2, **worker)
    with pytest.raises(PlanError) as caught:
        plan(fleet_of(*heads), allow={"checkpointing"}, **options)
    assert said in str(caught.value)


def test_the_missing_memory_is_what_is_missing() -> None:
    """To a MiB, with embedding and head, for a card alone and for one of two."""
    ends = {"embedding_bytes": GB, "head_bytes": 2 * GB}
    one = card("local", memory_bytes=4 * GB, host_bytes=20 * GB, **ends)
    two = card("local", memory_bytes=4 * GB, host_bytes=5 * GB, **ends), card(1, memory_bytes=GB)
    for devices in ((one,), two):
        profile = fleet_of(*devices, layers=20)
        found = explain._short_of(rules_of(profile))
        assert found is not None
        missing, d = found
        assert explain.size(missing) in str(refusal(profile))
        for more, fits in ((missing, True), (missing - 2 * 2**20, False)):
            grown = list(profile.devices)
            memory = grown[d].memory_bytes + more
            grown[d] = grown[d].model_copy(update={"memory_bytes": memory})
            rules = rules_of(profile.model_copy(update={"devices": tuple(grown)}))
            assert (Search(rules).run() is not None) == fits


def test_the_smallest_remedy_of_each_kind_is_found_by_halving() -> None:
    profile = fleet_of(device("local", memory_bytes=3 * GB))
    large = fleet_of(device("local", memory_bytes=30 * GB))
    tried = []

    def remedy(text: str, then: FleetProfile | None) -> explain.Remedy:
        return text[0], text, lambda: tried.append(text) or then

    remedies = [remedy("a1", profile), remedy("a2", large), remedy("a3", large)]
    remedies += [*(remedy(f"b{k}", None) for k in range(7)), remedy("c1", large)]
    rules = rules_of(profile)
    assert explain.nothing_fits(rules, {}, remedies).hint == "it would fit with a2, or c1"
    assert tried == ["a2", "a1", "b3", "b5", "b6", "c1"]


def test_sizes_that_cannot_be_set_are_not_advised() -> None:
    one = fleet_of(device("local", memory_bytes=3 * GB), rows=1)
    assert [variant.allowed_by for variant in explain.settings(one)] == ["codec"]
    assert "micro-batches" not in str(refusal(one).hint)
    two = fleet_of(device("local", memory_bytes=3 * GB), rows=2)
    assert [variant.allowed_by for variant in explain.settings(two)] == ["codec", "micro-batch"]
    assert "micro-batches" in str(refusal(two).hint)


def test_a_stage_that_waits_for_its_layers_is_limited_by_streaming() -> None:
    profile = fleet_of(card("local", memory_bytes=9 * GB), card(1), layers=16)
    layout = (Part(0, 0, 12, offload=8), Part(1, 12, 16))
    local, other = explain.device_uses(found_of(profile, layout))
    assert (local.limit, local.streamed, local.host_bytes) == ("compute", 8, 8 * GB)
    assert (other.streamed, other.host_bytes, other.streaming_s) == (0, 0, 0)
    slow = fleet_of(
        card("local", memory_bytes=9 * GB, host_to_device_bytes_per_s=100 * GB), card(1), layers=16
    )
    local, _ = explain.device_uses(found_of(slow, layout))
    assert local.limit == "streaming"
    assert local.streaming_s == pytest.approx(8 * (2 * 0.060 - 0.036 * (1 - 1 / 8 - 1 / 12)))
