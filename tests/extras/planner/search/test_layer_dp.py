from __future__ import annotations

from hypothesis import given, settings

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.extras.planner.layout import Rules
from hetero_framework.extras.planner.layout_search import Search, beginnings
from hetero_framework.extras.planner.search.layer_dp import LayerProgramme
from tests.extras.planner.fleets import GB, card, device, fleet_of, profiles_of_fleets, rules_of


def test_layouts_of_equal_devices_are_even():
    rules = rules_of(fleet_of(*(device(k or "local") for k in range(4)), speed=1e12))
    programme = LayerProgramme(rules)
    # 3 in front, 8 micro-batches of 2 layers, and a little for the links.
    found = list(programme.layouts((3 + 8) * 0.006 + 1e-4))
    assert [[part.end for part in layout] for layout in found] == [[2, 4, 6, 8]]
    assert list(programme.layouts((3 + 8) * 0.006 - 1e-6)) == []


def test_a_pinned_device_takes_just_its_layers():
    profile = fleet_of(device("local"), device(1), device(2))
    base = rules_of(profile)
    rules = Rules(base.fleet, base.devices, {1: (2, 5)}, True, False)
    found = list(LayerProgramme(rules).layouts(1.0))
    assert found
    for layout in found:
        assert [(p.start, p.end) for p in layout if p.device == 1] == [(2, 5)]
        assert rules.permits(layout)


def test_along_keeps_the_order_of_devices():
    rules = rules_of(fleet_of(device("local"), device(1, layer_forward_s=0.01), device(2)))
    programme = LayerProgramme(rules)
    layout = programme.along([0, 2, 1], 0.2)
    assert [part.device for part in layout] == [0, 2, 1]
    assert layout[-1].end == 8
    assert programme.along([0, 2, 1], 0.05) is None


@settings(max_examples=60, deadline=None)
@given(profiles_of_fleets())
def test_layouts_are_whole_and_end_in_time(profile):
    rules = rules_of(profile)
    fleet, step_s = rules.fleet, 0.3
    for layout in LayerProgramme(rules).layouts(step_s):
        assert layout[0].device == 0
        ends = [0, *(part.end for part in layout)]
        assert [part.start for part in layout] == ends[:-1]
        assert ends[-1] == fleet.layers
        assert len({part.device for part in layout}) == len(layout)
        pipeline, wait_s = fleet.pipeline(layout), 0.0
        for k in range(len(layout)):
            work_s = pipeline.forward_s[k] + pipeline.backward_s[k]
            assert wait_s + fleet.micro_batches * work_s <= step_s + 1e-6
            wait_s += work_s
        assert step_bound(pipeline, 1) >= wait_s - 1e-9


def test_a_card_takes_more_layers_than_it_holds():
    small = {"memory_bytes": 6 * GB, "host_to_device_bytes_per_s": 200 * GB}
    rules = rules_of(fleet_of(card("local", **small), layers=24, micro_batches=1))
    programme = LayerProgramme(rules)
    assert {layout[0].end for layout in programme.layouts(1.0)} == {24}
    # 22 of them are streamed, of which 20 are fetched in each pass, in 5 ms each; 4 ms of a layer's
    # computing are for either end of the passes.
    both_s = 2 * 0.100 + 24 * 0.004 * (1 / 22 + 1 / 24)
    assert list(programme.layouts(both_s - 1e-4)) == []
    assert list(programme.layouts(both_s + 1e-4)) != []


def test_slots_may_take_less_than_few_layers():
    """One layer fits, or 24 in two slots; two or three do not."""
    tiny = {"memory_bytes": 2.4 * GB, "activation_bytes_recomputed": 0.001 * GB}
    profile = fleet_of(card("local", **tiny), layers=24)
    layouts = list(LayerProgramme(rules_of(profile)).layouts(1.0))
    assert [[part.end for part in layout] for layout in layouts] == [[24]]
    assert [layout[-1].end for layout in beginnings(rules_of(profile))][-1] == 24
    assert Search(rules_of(profile)).run() is not None
