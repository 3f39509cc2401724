from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import StageSpec
from hetero_framework.config.plan import Plan, PlanEntry
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.extras.planner import FleetProfile
from hetero_framework.extras.planner.measured_fleet import LayerWork, Observed, median

WORK = LayerWork((1.0, 1.0, 1.0, 3.0), 2.0)
PARTS = {
    "layer_bytes": [10.0, 20.0, 30.0, 40.0],
    "embedding_bytes": 5.0,
    "head_bytes": 6.0,
    "activation_bytes_per_layer": [1.0, 2.0, 3.0, 4.0],
}
MEMORY: dict[int | str, float] = {"local": 100.0, 1: 200.0, 2: 300.0}


def stages_of(*cut: tuple[int | str, int, int]) -> tuple[StageSpec, ...]:
    return Plan(tuple(PlanEntry(id=d, start=a, end=b) for d, a, b in cut)).stages


STAGES = stages_of(("local", 0, 2), (1, 2, 3), (2, 3, 4))
SEEN = Profile.of(
    [0.2, 0.3, 0.0], [0.6, 0.9, 5.0], edges=[Edge(0.01, 0.02, 0.003), Edge(0.04, 0.05)]
)


def fleet(observed: Observed, *, relayed: bool = False, memory: Any = MEMORY) -> FleetProfile:
    return observed.fleet(memory, dict.fromkeys(memory, PARTS), 8, relayed=relayed)


def seen(*notes: tuple[tuple[StageSpec, ...], Profile]) -> Observed:
    observed = Observed(WORK)
    for stages, profile in notes:
        observed.note(stages, profile)
    return observed


def wires(profile: FleetProfile) -> dict[tuple[Any, Any], float]:
    """Seconds of a tensor on each link."""
    return {
        (one.sender, one.receiver): profile.activation_bytes / one.bytes_per_s
        for one in profile.links
    }


def test_the_work_of_the_last_stage_has_the_head():
    assert [WORK.of(stage) for stage in STAGES] == [2.0, 1.0, 5.0]


def test_a_layers_time_is_its_work_at_the_devices_pace():
    """The forward is a quarter on those that tell; the last stage does both at once."""
    local, one, two = fleet(seen((STAGES, SEEN))).devices
    for device, pace_s in ((local, 0.4), (one, 1.2), (two, 1.0)):
        assert device.layer_forward_s == pytest.approx([pace_s / 4 * w for w in WORK.layer_work])
        assert device.layer_backward_s == pytest.approx(
            [pace_s * 3 / 4 * w for w in WORK.layer_work]
        )
        assert device.head_forward_s == pytest.approx(pace_s / 4 * 2)
        assert device.head_backward_s == pytest.approx(pace_s * 3 / 4 * 2)


def test_several_stages_of_a_device_give_one_pace():
    stages = stages_of(("local", 0, 1), (1, 1, 3), ("local", 3, 4))
    times = Profile.of([0.1, 1, 0], [0.2, 1, 2.7], devices=[0, 1, 0], edges=[Edge(), Edge()])
    local, one = fleet(seen((stages, times)), memory={"local": 1.0, 1: 1.0}).devices
    both_s = local.layer_forward_s[0] + local.layer_backward_s[0]
    assert both_s == pytest.approx((0.1 + 0.2 + 2.7) / (1 + 3 + 2))
    assert one.layer_forward_s[0] + one.layer_backward_s[0] == pytest.approx(2 / 2)


def test_without_measured_shares_a_third_is_forward():
    alone = stages_of(("local", 0, 4))
    (local,) = fleet(seen((alone, Profile.of([0.0], [8.0]))), memory={"local": 1.0}).devices
    assert local.layer_forward_s[0] == pytest.approx(1 / 3)
    assert local.layer_backward_s[0] == pytest.approx(2 / 3)


def test_unmeasured_devices_count_as_the_median():
    devices = fleet(seen((STAGES, SEEN)), memory={**MEMORY, 3: 1.0}).devices
    assert sum(devices[3].layer_forward_s) == pytest.approx(1.0 / 4 * 6)
    fresh = Observed(WORK)
    assert fresh.is_empty
    assert all(d.layer_forward_s[0] == pytest.approx(1 / 3) for d in fleet(fresh).devices)
    assert not seen((STAGES, SEEN)).is_empty


def test_a_stage_of_the_embedding_alone_gives_no_pace():
    stages = stages_of(("local", 0, 0), (1, 0, 4))
    times = Profile.of([0.5, 0.0], [0.5, 16.0], edges=[Edge()])
    local, one = fleet(seen((stages, times)), memory={"local": 1.0, 1: 1.0}).devices
    assert local.layer_forward_s == one.layer_forward_s  # the median of the only one that told
    assert one.layer_forward_s[0] + one.layer_backward_s[0] == pytest.approx(2.0)


def test_links_have_the_measured_speeds_of_both_directions():
    profile = fleet(seen((STAGES, SEEN)))
    found = wires(profile)
    assert found["local", 1] == pytest.approx(0.01)
    assert found[1, "local"] == pytest.approx(0.02)
    assert found[1, 2] == pytest.approx(0.04)
    assert found[2, 1] == pytest.approx(0.05)
    # Never used: as the slower of the two devices at its quickest.
    assert found["local", 2] == found[2, "local"] == pytest.approx(0.04)
    latency = {(one.sender, one.receiver): one.latency_s for one in profile.links}
    assert latency["local", 1] == latency[1, "local"] == 0.003
    assert latency["local", 2] == 0.0


def test_a_missing_direction_takes_the_speed_of_the_opposite_one():
    """Below the lowest trained layer nothing goes back."""
    first = Profile.of([1, 1, 1], [0, 0, 2], edges=[Edge(0.05), Edge(0.01)])
    second = Profile.of([1, 1], [0, 2], edges=[Edge(0.01)])
    found = wires(fleet(seen((STAGES, first), (stages_of(("local", 0, 2), (2, 2, 4)), second))))
    assert found["local", 1] == found[1, "local"] == pytest.approx(0.05)
    assert found["local", 2] == found[2, "local"] == pytest.approx(0.01)


def test_devices_without_links_so_far_count_as_the_quickest():
    found = wires(fleet(seen((STAGES, SEEN)), memory={**MEMORY, 3: 1.0, 4: 1.0}))
    assert found[3, 4] == pytest.approx(0.01)
    assert found[3, 2] == pytest.approx(0.04)


def test_a_relayed_tensor_measures_the_link_from_the_coordinator():
    edges = (Edge(0.01, 0.02), Edge(0.004, 0.05, relay=0))
    relay = Profile(SEEN.forward_s, SEEN.backward_s, SEEN.devices, edges)
    found = wires(fleet(seen((STAGES, relay)), relayed=True))
    assert set(found) == {("local", 1), (1, "local"), ("local", 2), (2, "local")}
    assert found["local", 2] == pytest.approx(0.004)
    assert found["local", 1] == pytest.approx(0.05)  # the gradient, which was the last to cross


def test_a_link_that_took_no_time_has_a_finite_rate():
    local_only = seen((stages_of(("local", 0, 4)), Profile.of([1.0], [2.0])))
    assert list(wires(fleet(local_only)).values()) == pytest.approx([1e-9] * 6)


def test_the_parts_and_their_memory_are_those_that_are_given():
    profile = fleet(seen((STAGES, SEEN)))
    assert (profile.layers, profile.micro_batches) == (4, 8)
    assert [device.memory_bytes for device in profile.devices] == [100.0, 200.0, 300.0]
    for device in profile.devices:
        assert list(device.layer_bytes) == PARTS["layer_bytes"]
        kept = list(device.activation_bytes_per_layer)
        assert kept == PARTS["activation_bytes_per_layer"]
        assert (device.embedding_bytes, device.head_bytes) == (5.0, 6.0)


def test_the_latest_measurement_counts_and_older_ones_stay():
    slower = Profile.of([0.4, 0.0], [1.2, 20.0], edges=[Edge(0.5, 0.6)])
    later = seen((STAGES, SEEN), (stages_of(("local", 0, 2), (2, 2, 4)), slower))
    local, one, two = fleet(later).devices
    pace_s = [d.layer_forward_s[0] + d.layer_backward_s[0] for d in (local, one, two)]
    assert pace_s == pytest.approx([0.8, 1.2, 20 / 6])
    assert wires(fleet(later))["local", 1] == pytest.approx(0.01)


def test_one_slow_step_of_five_tells_nothing():
    slow = Profile.of([9.0, 9.0, 9.0], [9.0, 9.0, 90.0], edges=SEEN.edges)
    assert median([SEEN, SEEN, slow, SEEN, SEEN]) == SEEN
