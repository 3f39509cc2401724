from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

from hetero_framework.errors import ConfigError
from hetero_framework.extras.planner import FleetProfile, load_profile, plan
from tests.extras.planner.fleets import device, raw_fleet

TWO = [device("local"), device(1)]
LINK = {"from": 1, "to": "local", "bytes_per_s": 1}


def problems(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        FleetProfile.from_dict(raw, name="fleet.json")
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_profile_is_read_from_a_file_and_written_back(tmp_path):
    raw = raw_fleet([device("local", layer_forward_s=[0.001] * 8), device("b-1")])
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps(raw), encoding="utf-8")
    profile = load_profile(file)
    assert profile.devices[0].layer_forward_s == (0.001,) * 8
    assert profile.devices[1].layer_forward_s == (0.001,)
    assert profile.links[0].sender == "local"
    assert FleetProfile.from_dict(profile.to_dict()) == profile


def test_omitted_fields_of_a_profile_are_zero():
    least = {"id": "local", "memory_bytes": 1, "layer_forward_s": 1, "layer_backward_s": 2}
    raw = {"version": 1, "layers": 3, "micro_batches": 1, "devices": [least]}
    profile = FleetProfile.from_dict(raw)
    one = profile.devices[0]
    assert (one.layer_recompute_s, one.head_forward_s, one.reserved_bytes) == ((0.0,), 0.0, 0.0)
    assert (profile.activation_bytes, profile.links) == (0.0, ())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version: must be 1, not 2"),
        ({"layers": 0}, "layers: must be at least 1"),
        ({"layers": 10**18}, "layers: must be at most 10000, not 1000000000000000000"),
        ({"micro_batches": 10**400}, "micro_batches: must be at most 100000, not 1000"),
        ({"micro_batches": 1.5}, "micro_batches: must be a whole number"),
        ({"devices": []}, 'devices: none has the id "local"'),
        ({"devices": [device(1)], "links": []}, 'devices: none has the id "local"'),
        ({"devices": [*TWO, device(1)]}, "devices[2].id: 1 is the id of devices[1] too"),
        ({"links": []}, 'links: none goes from "local" to 1'),
        ({"links": [{**LINK, "to": 7}]}, 'links[0].to: 7 is not a device; there are: "local", 1'),
        ({"links": [{"from": 1, "bytes_per_s": 1}]}, "links[0].to: is missing (The receiver)"),
        (
            {"links": [{**LINK, "bytes_per_s": 0}]},
            "links[0].bytes_per_s: must be at least 0.001, not 0",
        ),
        (
            {"links": [{**LINK, "bytes_per_s": 1e-300}]},
            "links[0].bytes_per_s: must be at least 0.001, not 1e-300",
        ),
        ({"links": [{**LINK, "to": 1}]}, "links[0]: goes from 1 to itself"),
        ({"links": [LINK, LINK]}, "links[1]: says the same direction as links[0]"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_path(change, said):
    assert said in problems({**raw_fleet(TWO), **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_forward_s": 1e308}, "layer_forward_s: must be at most 1000000000.0, not 1e+308"),
        (
            {"layer_backward_s": [1e-3] * 7 + [5e-324]},
            "layer_backward_s[7]: must be 0 or at least 1e-12, not 4.94066e-324",
        ),
        (
            {"activation_bytes_per_layer": 5e-324},
            "activation_bytes_per_layer: must be 0 or at least 1e-06",
        ),
        ({"memory_bytes": -1}, "memory_bytes: must be at least 0.0, not -1"),
        ({"layer_forward_s": -0.5}, "layer_forward_s: must be at least 0.0, not -0.5"),
        ({"layer_bytes": [1] * 7 + ["x"]}, 'layer_bytes[7]: must be a number, not the text "x"'),
        ({"layer_backward_s": [1, 2]}, "layer_backward_s: has 2 entries, but there are 8 layers"),
        ({"memory_bytes": math.nan}, "memory_bytes: must be a finite number"),
        ({"memori": 1}, "memori: unknown key"),
    ],
)
def test_a_wrong_device_is_refused_with_the_path(change, said):
    raw = {**raw_fleet(TWO), "devices": [device("local"), device(1, **change)]}
    assert f"devices[1].{said}" in problems(raw)


def test_all_problems_are_reported_at_once():
    raw = {**raw_fleet([device(1, layer_forward_s=[1])]), "version": 2, "links": [{}]}
    said = problems(raw)
    assert said.startswith("fleet.json has ")
    for part in ("version", "local", "layer_forward_s", "links[0].from", "links[0].bytes_per_s"):
        assert part in said


def test_a_file_that_is_absent_or_not_finite_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_profile(tmp_path / "none.json")
    file = tmp_path / "fleet.json"
    text = json.dumps(raw_fleet([device("local", memory_bytes=float("inf"))]))
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"devices\[0\].memory_bytes: the number is not finite"):
        load_profile(file)


def test_problems_of_ten_thousand_devices_are_found_at_once():
    """Each is looked up, none searched for: a search took more than a minute."""
    many = [device("local"), *(device(k) for k in range(1, 10_000))]
    links = [{"from": "x", "to": k, "bytes_per_s": 1e8} for k in range(1, 10_000)]
    raw = raw_fleet(TWO) | {"devices": many, "links": links}
    began = time.process_time()
    said = problems(raw)
    assert '"x" is not a device; there are: "local", 1, 2, 3, 4,' in said
    assert "15 and 9984 more" in said
    same = problems(raw | {"devices": [device(1)] * 10_000})
    assert "devices[9].id: 1 is the id of devices[0] too" in same
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    "change",
    [
        {"layer_forward_s": 1e-12, "layer_backward_s": 1e9},
        {"layer_forward_s": [0.0] * 7 + [1e9], "layer_backward_s": 0},
        {"memory_bytes": 1e24, "activation_bytes_per_layer": 1e-6},
        {"activation_bytes_per_layer": 1e24, "activation_bytes_recomputed": 0},
        {"layer_forward_s": 0, "layer_backward_s": 0, "head_forward_s": 0, "head_backward_s": 0},
    ],
)
def test_numbers_at_the_limits_can_be_planned(change):
    profile = FleetProfile.from_dict(raw_fleet([device("local"), device(1, **change)]))
    found = plan(profile)
    assert 0 <= found.predicted_step_s < math.inf
    json.dumps(found.to_dict(), allow_nan=False)
