from __future__ import annotations

import pytest

from hetero_framework.errors import PlanError
from hetero_framework.extras.planner import FleetProfile, limits, plan, planning
from hetero_framework.extras.planner.layout import Evaluated, Fleet, Layout, Part, Rules, evaluated
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


def test_use_of_a_device():
    first = device("local", embedding_bytes=2 * GB, memory_bytes=20 * GB, reserved_bytes=GB)
    last = device(1, head_bytes=3 * GB, memory_bytes=30 * GB)
    found = found_of(fleet_of(first, last, speed=1e12), HALVES)
    local, one = limits.device_uses(found)
    assert (local.id, local.layers, local.limit) == ("local", 4, "compute")
    assert (one.id, one.layers, one.limit) == (1, 4, "compute")
    for use in (local, one):
        assert use.busy == pytest.approx(8 * 0.012 / found.seconds)
    held = found.schedule.forecast.peak_in_flight
    assert local.memory_bytes == pytest.approx((1 + 2 + 4 + 0.4 * held[0]) * GB)
    assert one.memory_bytes == pytest.approx((3 + 4 + 0.4 * held[1]) * GB)
    assert local.memory_bytes + local.free_bytes == pytest.approx(20 * GB, abs=2)
    assert one.memory_bytes + one.free_bytes == pytest.approx(30 * GB, abs=2)


def test_several_stages_of_a_device_are_reported_together():
    layout = (Part(0, 0, 3), Part(1, 3, 5), Part(0, 5, 8))
    local, one = limits.device_uses(found_of(fleet_of(device("local"), device(1)), layout))
    assert (local.layers, one.layers) == (6, 2)
    assert local.busy == pytest.approx(3 * one.busy)


def test_a_device_with_little_work_is_limited_by_memory_or_link():
    uneven = (Part(0, 0, 6), Part(1, 6, 8))
    found = []
    for worker, speed in (
        ({}, 1e12),
        ({"memory_bytes": 2.5 * GB}, 1e12),  # for two layers of 1 GB, and not for three
        ({}, 1e7),  # 10 ms for a tensor, 6 ms for its layers
        ({"memory_bytes": 2.5 * GB}, 1e7),
    ):
        profile = fleet_of(device("local"), device(1, **worker), speed=speed)
        uses = limits.device_uses(found_of(profile, uneven))
        assert uses[0].limit == "compute"
        found.append(uses[1].limit)
    assert found == ["compute", "memory", "link", "memory"]


def test_full_memory_does_not_hide_the_limit_of_compute():
    full = {"memory_bytes": 4.5 * GB}
    profile = fleet_of(device("local", **full), device(1, **full), speed=2e7)
    uses = limits.device_uses(found_of(profile, HALVES))
    assert [use.limit for use in uses] == ["compute", "compute"]


def test_links_of_others_limit_no_device():
    raw = raw_fleet([device("local"), device(1), device(2)])
    for link in raw["links"]:
        if "local" in (link["from"], link["to"]):
            link["bytes_per_s"] = 1e7
    layout = (Part(0, 0, 4), Part(1, 4, 7), Part(2, 7, 8, direct=True))
    uses = limits.device_uses(found_of(FleetProfile.from_dict(raw), layout))
    assert uses[2].limit == "compute"


def test_alone_names_the_fastest_device_that_holds_the_model():
    quick = device(1, layer_forward_s=0.0001, memory_bytes=7 * GB)
    slow, other = device("local", layer_forward_s=0.004), device(2, head_forward_s=0.01)
    rules = rules_of(fleet_of(slow, quick, other))
    best = planning.alone(rules.fleet, rules.devices)
    assert best.id == 2
    assert best.step_s == pytest.approx(8 * (8 * 0.003 + 0.01))
    assert planning.alone(rules.fleet, [0, 1]).id == "local"
    assert planning.alone(rules.fleet, [1]) is None


def test_recomputation_makes_a_device_alone_slower():
    """8 GB of layers, 0.8 GB of a micro-batch, and 0.08 GB and a layer's 0.1 GB if it does."""
    fleet = Fleet(fleet_of(device("local", memory_bytes=8.2 * GB)))
    found = planning.alone(fleet, [0])
    assert found.step_s == pytest.approx(8 * 8 * 0.004)


@pytest.mark.parametrize(
    ("changes", "speed", "limit", "figure"),
    [
        ({"memory_bytes": 1.005 * GB}, 1e9, "memory", "958 MiB in all, a layer takes 963"),
        ({}, 1e5, "link", "1.00 s a tensor, all stages take"),
        ({"layer_forward_s": 0.5}, 1e9, "compute", "502 ms a layer, all stages take"),
    ],
)
def test_why_a_device_is_left_out(changes, speed, limit, figure):
    raw = raw_fleet([device("local"), device(1), device(2, **changes)])
    for link in raw["links"]:
        if 2 in (link["from"], link["to"]):
            link["bytes_per_s"] = speed
    profile = FleetProfile.from_dict(raw)
    found = found_of(profile, HALVES)
    uses = limits.device_uses(found)
    *_, last = limits.limits_of(found, rules_of(profile), uses)
    assert (last.id, last.by) == (2, limit)
    assert last.figure.startswith(f"not used: {figure}")
    excluded = Rules(found.fleet, (0, 1), {}, checkpointing=True, chunks=False)
    assert [one.id for one in limits.limits_of(found, excluded, uses)] == ["local", 1]


def test_each_limit_has_its_figure():
    uneven = (Part(0, 0, 6), Part(1, 6, 8))
    said = []
    for worker, speed in (({}, 1e12), ({"memory_bytes": 2.5 * GB}, 1e12), ({}, 1e7)):
        profile = fleet_of(device("local"), device(1, **worker), speed=speed)
        found = found_of(profile, uneven)
        _, one = limits.limits_of(found, rules_of(profile), limits.device_uses(found))
        assert one.help == limits.HELP[one.by]
        said.append(one.figure)
    computes, left, sends = said
    assert computes.startswith("computes for 6.00 ms of the ")
    assert left == "286 MiB left, a layer takes 963 MiB"
    assert sends.startswith("sends or receives for 10.0 ms of the ")


def test_only_the_first_of_many_devices_are_named():
    profile = fleet_of(*(device(k or "local") for k in range(8)))
    found = found_of(profile, HALVES)
    every = limits.limits_of(found, rules_of(profile), limits.device_uses(found))
    assert [one.id for one in every] == ["local", 1, 2, 3, 4, 5]


def test_allowed_settings_change_the_profile():
    assert not list(planning.variants(PROFILE, planning.ALLOWED))
    (codec, wire), (halved, steps) = planning.variants(PROFILE, planning.CHOICES)
    assert wire == {"wire": {"activations": "int8", "gradients": "int8"}}
    assert steps == {"micro_batches": 16}
    assert halved.micro_batches == 16
    for name in ("activation_bytes", "gradient_bytes"):
        assert getattr(codec, name) == pytest.approx(0.52 * getattr(PROFILE, name))
        assert getattr(halved, name) == pytest.approx(getattr(PROFILE, name) / 2)
    assert (codec.devices, codec.links) == (PROFILE.devices, PROFILE.links)
    before, after = (Fleet(p).pipeline(CUT) for p in (PROFILE, halved))
    assert after.forward_s == pytest.approx([s / 2 for s in before.forward_s])
    assert after.backward_s == pytest.approx([s / 2 for s in before.backward_s])
    for old, new in zip(PROFILE.devices, halved.devices, strict=True):
        assert (new.layer_bytes, new.memory_bytes) == (old.layer_bytes, old.memory_bytes)
        for name in ("activation_bytes_per_layer", "activation_bytes_recomputed"):
            assert getattr(new, name) == tuple(nbytes / 2 for nbytes in getattr(old, name))


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"activation_bytes": 0.0, "gradient_bytes": 0.0}, ["micro_batches"]),
        ({"rows": 1}, ["wire"]),
        ({"rows": 2}, ["wire", "micro_batches"]),
    ],
)
def test_settings_that_cannot_be_changed_are_left(changes, kinds):
    profile = PROFILE.model_copy(update=changes)
    assert [[*needed] for _, needed in planning.variants(profile, planning.CHOICES)] == [
        [kind] for kind in kinds
    ]


def test_the_plan_error_names_the_room_of_each_process():
    small = {"memory_bytes": 5 * GB}
    heads = {"embedding_bytes": GB, "head_bytes": 6 * GB}
    profile = fleet_of(device("local", **small, **heads), device(1, **small, **heads))
    with pytest.raises(PlanError) as caught:
        plan(profile, margins={1: 2 * GB})
    *lines, alone = caught.value.message.splitlines()
    assert alone == "  the coordinator alone would need 14.1 GiB"
    assert lines == [
        "no plan fits into memory: all processes together have room for 5 of 8 layers",
        "  coordinator has 4.66 GiB: room for 3 of 8 layers, beside the embedding of 954 MiB, none"
        " with the head",
        "  worker 1 has 4.66 GiB, 1.86 GiB of it kept free: room for 2 of 8 layers, none with the"
        " head",
    ]


@pytest.mark.parametrize("pins", [{1: (4, 5)}, {1: (1, 2), 2: (6, 8)}])
def test_pins_that_no_plan_keeps_are_named(pins):
    fleet = fleet_of(device("local"), device(1), device(2))
    excluded = [2] if len(pins) == 1 else []
    with pytest.raises(PlanError, match="--pin: no plan keeps the pinned layers"):
        plan(fleet, allow={"checkpointing"}, pins=pins, excluded=excluded)


def test_a_stage_that_waits_for_its_layers_is_limited_by_streaming():
    profile = fleet_of(card("local", memory_bytes=9 * GB), card(1), layers=16)
    layout = (Part(0, 0, 12, offload=8), Part(1, 12, 16))
    local, other = limits.device_uses(found_of(profile, layout))
    assert (local.limit, local.streamed, local.host_bytes) == ("compute", 8, 8 * GB)
    assert (other.streamed, other.host_bytes, other.streaming_s) == (0, 0, 0)
    slow = fleet_of(
        card("local", memory_bytes=9 * GB, host_to_device_bytes_per_s=100 * GB), card(1), layers=16
    )
    local, _ = limits.device_uses(found_of(slow, layout))
    assert local.limit == "streaming"
    assert local.streaming_s == pytest.approx(8 * (2 * 0.060 - 0.036 * (1 - 1 / 8 - 1 / 12)))
