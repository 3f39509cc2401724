from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings

from hetero_framework.errors import PlanError, UserError
from hetero_framework.extras.planner import FleetProfile, Result, evaluate, plan
from hetero_framework.extras.planner.planning import ALLOWED, compared
from tests.extras.planner.fleets import GB, card, device, fleet_of, profiles_of_fleets
from tests.samples import plan_of

NO_CHUNKS = ALLOWED - {"chunks"}
PLANS = settings(max_examples=12, deadline=None)


def layers_of(result: Result) -> dict[int | str, int]:
    return {use.id: use.layers for use in result.devices}


def test_equal_devices_take_equal_shares():
    profile = fleet_of(*(device(k or "local") for k in range(4)), speed=1e12)
    found = plan(profile, allow=NO_CHUNKS)
    assert layers_of(found) == {"local": 2, 1: 2, 2: 2, 3: 2}
    assert found.predicted_step_s == pytest.approx((3 + 8) * 0.006, rel=1e-3)
    assert found.unused == ()
    assert found.alone.step_s == pytest.approx(8 * 8 * 0.003)


def test_interleaving_fills_the_pipeline_sooner_where_links_are_fast():
    profile = fleet_of(*(device(k or "local") for k in range(2)), speed=1e12, micro_batches=4)
    simple, chunks = plan(profile, allow=NO_CHUNKS), plan(profile)
    assert len(simple.shard_plan) == 2
    assert len(chunks.shard_plan) > 2
    assert chunks.predicted_step_s < 0.93 * simple.predicted_step_s
    slow = plan(fleet_of(device("local"), device(1), speed=2e7, micro_batches=4))
    assert len(slow.shard_plan) == 2


@pytest.mark.parametrize(("micro_batches", "stages"), [(16, 3), (80, 2)])
def test_interleaving_has_to_win_a_percent(micro_batches, stages):
    """Here it saves half of a micro-batch's time, of 17 or of 81."""
    devices = [device(k or "local", layer_bytes=0, activation_bytes_per_layer=0) for k in range(2)]
    profile = fleet_of(*devices, layers=4, speed=1e12, micro_batches=micro_batches)
    assert len(plan(profile).shard_plan) == stages


def test_a_fast_device_gets_more_layers_and_a_slow_far_one_none():
    slow = device(2, layer_forward_s=0.02, layer_backward_s=0.04, head_forward_s=0.02)
    quick = device(1, layer_forward_s=0.0005, layer_backward_s=0.001)
    profile = fleet_of(device("local"), quick, slow, speed=1e8)
    found = plan(profile, allow=NO_CHUNKS)
    assert found.unused == (2,)
    *_, last = found.limits
    assert (last.id, last.by) == (2, "compute")
    assert layers_of(found)[1] > layers_of(found)["local"]


def test_memory_makes_stages_recompute_before_it_makes_them_smaller():
    small = {"memory_bytes": 4.4 * GB}
    profile = fleet_of(device("local", **small), device(1, **small), speed=1e12)
    found = plan(profile, allow=NO_CHUNKS)
    assert layers_of(found) == {"local": 4, 1: 4}
    assert found.shard_plan[0]["gradient_checkpointing"]
    assert all(use.free_bytes >= 0 for use in found.devices)
    without = plan(profile, allow=())
    assert without.predicted_step_s > found.predicted_step_s


def test_a_quick_coordinator_with_both_ends_recomputes_little():
    """Of its 15 layers those at the end store one forward each, so they are not computed again."""
    quick = device("local", memory_bytes=16.2 * GB)
    slow = device(1, layer_forward_s=0.012, layer_backward_s=0.024)
    profile = fleet_of(quick, slow, layers=16, micro_batches=16)
    simple, found = plan(profile, allow=NO_CHUNKS), plan(profile)
    assert [entry["id"] for entry in found.shard_plan] == ["local", 1, "local"]
    assert "gradient_checkpointing" not in found.shard_plan[2]
    assert found.predicted_step_s < 0.9 * simple.predicted_step_s


def test_memory_for_one_micro_batch_in_flight_is_enough():
    tight = {"memory_bytes": 2.2 * GB}
    fleet = fleet_of(*(device(k or "local", **tight) for k in range(3)), layers=6)
    found = plan(fleet, allow=())
    assert layers_of(found) == {"local": 2, 1: 2, 2: 2}
    assert found.in_flight == (1, 1, 1)


def test_boundaries_go_directly_where_that_is_faster():
    devices = [device(k or "local", layer_forward_s=0.0011 if k else 0.001) for k in range(3)]
    for direct, way in ((True, "direct"), (False, "relay")):
        found = plan(fleet_of(*devices, direct=direct, speed=1e8), allow=NO_CHUNKS)
        assert [entry.get("links") for entry in found.shard_plan] == [None, None, way]


def test_pins_exclusions_and_margins_are_kept():
    profile = fleet_of(device("local"), device(1), device(2), device(3))
    found = plan(profile, pins={2: (3, 5)}, excluded=[1])
    assert [(e["start"], e["end"]) for e in found.shard_plan if e["id"] == 2] == [(3, 5)]
    assert all(entry["id"] != 1 for entry in found.shard_plan)
    assert 1 not in found.unused
    full = fleet_of(device("local", memory_bytes=5 * GB), device(1, memory_bytes=6 * GB))
    kept = plan(full, margins={1: 1 * GB})
    assert kept.devices[1].id == 1
    assert kept.devices[1].memory_bytes <= 5 * GB


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pins": {7: (0, 2)}}, '--pin: 7 is not a device; there are: "local", 1, 2'),
        ({"pins": {1: (4, 12)}}, "--pin: worker 1 at 4:12 is not a range within the 8 layers"),
        ({"pins": {1: (3, 3)}}, "--pin: worker 1 at 3:3 is not a range"),
        ({"pins": {"local": (2, 4)}}, "the coordinator holds the first layers"),
        ({"pins": {"local": (0, 4), 1: (3, 6)}}, "overlaps with the coordinator's layers"),
        ({"pins": {1: (2, 5), 2: (4, 6)}}, "worker 1 and worker 2 overlap"),
        ({"pins": {1: (2, 5)}, "excluded": [1]}, "worker 1 is excluded too"),
        ({"excluded": ["local"]}, "--exclude: the coordinator holds the first stage"),
        ({"margins": {1: -1}}, "--margin: of worker 1 must not be negative"),
        ({"allow": ["magic"]}, '--allow: "magic" is none of checkpointing, chunks, codec'),
    ],
)
def test_options_that_no_plan_meets_are_refused(options, said):
    with pytest.raises(UserError) as caught:
        plan(fleet_of(device("local"), device(1), device(2)), **options)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_settings_that_change_results_are_only_taken_when_allowed():
    profile = fleet_of(device("local"), device(1), speed=3e7)
    usual, codec = plan(profile), plan(profile, allow={*ALLOWED, "codec"})
    assert usual.changes == {}
    assert codec.changes == {"wire": {"activations": "int8", "gradients": "int8"}}
    assert codec.predicted_step_s < usual.predicted_step_s
    more = plan(profile, allow={*ALLOWED, "micro-batch"})
    assert more.changes == {"micro_batches": 16}


HALF = plan_of(("local", 4), (1, 8))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "must not be empty"),
        (HALF[1:], 'must be "local"'),
        (HALF[:1], "the plan covers 4 layers, but the model has 8"),
        (plan_of(("local", 4), (9, 8)), "9 is not a worker"),
        ([HALF[0], {"id": 1, "start": 5, "end": 8}], "nobody holds layer 4"),
        ([HALF[0], {"id": 1, "start": "x"}], "shard_plan[1].start: must be a whole number"),
        ([HALF[0], {**HALF[1], "id": []}], "shard_plan[1].id: must be a whole number"),
        (plan_of(("local", 4), ("local", 8)), "shard_plan[1]: is on coordinator as the one before"),
        (
            [*plan_of(("local", 4), (1, 6)), {"id": 2, "start": 6, "end": 8, "links": "direct"}],
            "shard_plan[2].links: is direct, but the profile has no links between",
        ),
        (
            plan_of(("local", 7), (1, 8)),
            "coordinator needs 7.17 GiB with one micro-batch in flight and has 4.66 GiB",
        ),
    ],
)
def test_evaluate_refuses_an_invalid_plan_with_the_reason(entries, said):
    profile = fleet_of(device("local", memory_bytes=5 * GB), device(1), device(2), direct=False)
    with pytest.raises(PlanError) as caught:
        evaluate(profile, entries)
    assert said in str(caught.value)


@pytest.mark.parametrize("chunks", [True, False])
def test_the_first_stage_has_the_layers_that_take_pictures(chunks):
    """A slow coordinator takes three layers, and not less."""
    devices = device("local", layer_forward_s=0.1, layer_backward_s=0.2), device(1), device(2)
    for fewest in (0, 3):
        profile = fleet_of(*devices, first_layers=fewest)
        found = plan(profile, allow=ALLOWED if chunks else NO_CHUNKS)
        assert found.shard_plan[0]["end"] == fewest
    with pytest.raises(PlanError, match="end is 2: the model also adds pictures to layers 0-2"):
        evaluate(profile, plan_of(("local", 2), (1, 8)))
    tight = fleet_of({**devices[0], "memory_bytes": 2.5 * GB}, device(1), first_layers=3)
    with pytest.raises(PlanError, match=r"room for 2 of 8 layers.*, and needs 3"):
        plan(tight)


def test_evaluate_of_a_worse_plan_is_worse():
    profile = fleet_of(device("local"), device(1), speed=1e12)
    half, other = evaluate(profile, HALF), evaluate(profile, plan_of(("local", 7), (1, 8)))
    assert other.predicted_step_s > 1.5 * half.predicted_step_s


def test_each_machine_is_compared_with_the_fleet_without_it():
    profile = fleet_of(
        device("local", machine="a"),
        *(device(1, machine="b"), device(2, machine="b"), device(3, machine="c")),
        layers=12,
    )
    options: dict[str, Any] = {"pins": {}, "excluded": (), "margins": {}, "allow": ALLOWED}
    found = compared(profile, **options)
    ways = [(one["ids"], one["alone"]) for one in found]
    assert ways == [([1, 2], False), ([3], False), (["local"], True)]
    for one in found:
        left = [d.id for d in profile.devices if (d.id in one["ids"]) == one["alone"]]
        others = {d.id for d in profile.devices} - {*left}
        assert one["step_s"] == plan(profile, excluded=others).predicted_step_s
    pinned = compared(profile, **{**options, "pins": {3: (8, 12)}})
    assert [one["ids"] for one in pinned] == [[1, 2]]
    small = fleet_of(device("local", memory_bytes=6 * GB), device(1, memory_bytes=6 * GB))
    assert [one["step_s"] for one in compared(small, **options)] == [None, None]


SMALL = {"memory_bytes": 6 * GB, "activation_bytes_recomputed": 0.001 * GB}


def test_a_card_alone_streams_what_it_cannot_hold():
    profile = fleet_of(card("local", **SMALL), layers=24)
    found = plan(profile)
    assert found.shard_plan == ({"id": "local", "start": 0, "end": 24, "offload": 24},)
    (use,) = found.devices
    assert (use.streamed, use.host_bytes, use.limit) == (24, 24 * GB, "compute")
    assert use.streaming_s == 0
    assert found.alone.step_s == pytest.approx(found.predicted_step_s)
    with pytest.raises(PlanError):
        plan(fleet_of(card("local", **SMALL, host_bytes=19 * GB), layers=24))


def test_a_slow_way_from_host_memory_bounds_the_step():
    profile = fleet_of(card("local", **SMALL, host_to_device_bytes_per_s=100 * GB), layers=24)
    found = plan(profile)
    (use,) = found.devices
    assert use.limit == "streaming"
    assert found.predicted_step_s == pytest.approx(8 * (2 * 0.2 + 0.096 * (1 / 22 + 1 / 24)))
    assert use.streaming_s == pytest.approx(8 * (2 * 0.2 - 0.096 * (1 - 1 / 22 - 1 / 24)))


def test_streamed_layers_of_a_given_plan_are_predicted_and_refused():
    profile = fleet_of(card("local", memory_bytes=12 * GB), device(1), layers=24)
    entries = plan_of(("local", 12), (1, 24))

    def judged(local: Any, other: Any = 0) -> Any:
        offloads = zip(entries, (local, other), strict=True)
        found = evaluate(profile, [{**entry, "offload": n} for entry, n in offloads])
        return [entry.get("offload", 0) for entry in found.shard_plan]

    assert judged(8) == [8, 0]
    assert judged("auto", "auto") == [4, 0]
    for local, other, said in (
        (0, 0, "1.12 GiB are missing"),
        (13, 0, "is 13, but the stage has 12 layers"),
        (8, 8, "worker 1 cannot stream layers"),
    ):
        with pytest.raises(PlanError, match=said):
            judged(local, other)
    short = fleet_of(card("local", host_bytes=6 * GB), device(1), layers=24)
    with pytest.raises(PlanError, match=r"1\.86 GiB of host memory are missing"):
        evaluate(short, [{**entries[0], "offload": 8}, entries[1]])


@PLANS
@given(profiles_of_fleets(tight=True))
def test_without_host_memory_plans_are_as_they_were(profile):
    none = {"machine": "pc", "layer_frozen_bytes": (GB / 2,), "host_to_device_bytes_per_s": 1e9}
    devices = tuple(one.model_copy(update=none) for one in profile.devices)

    def planned(fleet: FleetProfile) -> Any:
        try:
            return {**plan(fleet).to_dict(), "seconds": 0}
        except PlanError as error:
            return str(error)

    assert planned(profile.model_copy(update={"devices": devices})) == planned(profile)


@PLANS
@given(profiles_of_fleets(tight=True))
def test_a_plan_fits_and_evaluate_agrees_with_it(profile):
    try:
        found = plan(profile)
    except PlanError:
        return
    assert found.lower_bound_s <= found.predicted_step_s
    memory = {one.id: one.memory_bytes for one in profile.devices}
    assert all(use.memory_bytes <= memory[use.id] + 1 for use in found.devices)
    for most in (found.max_in_flight, None):
        again = evaluate(profile, found.shard_plan, max_in_flight=most)
        assert again.predicted_step_s == found.predicted_step_s
        assert again.devices == found.devices


@PLANS
@given(profiles_of_fleets(most_devices=3, tight=True))
def test_another_machine_never_makes_a_plan_much_worse(profile):
    with_all = [one.id for one in profile.devices]
    assume(len(with_all) > 1)
    try:
        fewer = plan(profile, excluded=[with_all[-1]], allow=NO_CHUNKS)
    except PlanError:
        return
    more = plan(profile, allow=NO_CHUNKS)
    assert more.predicted_step_s <= 1.01 * fewer.predicted_step_s


def test_optimizer_states_in_host_memory_count_there():
    device = {"id": "local", "memory_bytes": 1e9, "layer_forward_s": 0.1, "layer_backward_s": 0.2}
    device |= {"layer_host_bytes": 100.0, "embedding_host_bytes": 30.0, "head_host_bytes": 20.0}
    raw = {"version": 1, "layers": 4, "micro_batches": 2, "devices": [device]}
    fits, short = (
        FleetProfile.from_dict({**raw, "devices": [{**device, "host_bytes": room}]})
        for room in (450.0, 449.0)
    )
    assert plan(fits).shard_plan == ({"id": "local", "start": 0, "end": 4},)
    with pytest.raises(PlanError, match="1 B of host memory are missing for the optimizer's"):
        plan(short)
