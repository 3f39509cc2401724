from __future__ import annotations

import pytest

from hetero_framework.extras.planner import FleetProfile, what_if
from hetero_framework.extras.planner.layout import Fleet, Part
from tests.extras.planner.fleets import GB, device, fleet_of, raw_fleet

PROFILE = fleet_of(
    device("local", head_forward_s=0.004),
    device(1),
    device(2, layer_forward_s=[0.001, 0.003] * 4),
    direct=False,
)
CUT = (Part(0, 0, 2), Part(1, 2, 5), Part(2, 5, 8))


def test_int8_is_a_little_more_than_half_of_the_bytes() -> None:
    codec, _ = what_if.settings(PROFILE)
    assert codec.allowed_by == what_if.CODEC
    assert codec.changes == {"wire": {"activations": "int8", "gradients": "int8"}}
    assert codec.profile.activation_bytes == pytest.approx(0.52 * PROFILE.activation_bytes)
    assert codec.profile.gradient_bytes == pytest.approx(0.52 * PROFILE.gradient_bytes)
    assert codec.profile.devices == PROFILE.devices
    assert codec.profile.links == PROFILE.links


def test_a_codec_is_not_proposed_without_tensors_to_send() -> None:
    silent = PROFILE.model_copy(update={"activation_bytes": 0.0, "gradient_bytes": 0.0})
    assert [one.allowed_by for one in what_if.settings(silent)] == [what_if.MICRO_BATCH]


def test_twice_as_many_micro_batches_have_half_of_everything_but_weights() -> None:
    _, halved = what_if.settings(PROFILE)
    assert halved.allowed_by == what_if.MICRO_BATCH
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
    (direct,) = what_if.direct_links(fleet, CUT)
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
    assert not list(what_if.direct_links(fleet, (Part(0, 0, 4), Part(1, 4, 8))))
    linked = Fleet(fleet_of(device("local"), device(1), device(2)))
    direct = (*CUT[:2], CUT[2]._replace(direct=True))
    assert not list(what_if.direct_links(linked, direct))
    (relayed,) = what_if.direct_links(linked, CUT)
    assert len(relayed.profile.links) == len(linked.profile.links)


def test_a_larger_card_is_one_devices_memory() -> None:
    fleet = Fleet(fleet_of(device(1, memory_bytes=4 * GB), device("local"), device(2)))
    small, middle, large = what_if.cards(fleet, 1)
    assert small.text == "a card with 4 GiB more for worker 1"
    assert large.text == "a card with 16 GiB more for worker 1"
    memory = {one.id: one.memory_bytes for one in middle.profile.devices}
    assert memory == {1: 4 * GB + 8 * 2**30, "local": 1000 * GB, 2: 1000 * GB}
