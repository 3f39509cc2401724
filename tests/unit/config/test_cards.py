"""A machine with several devices, named once."""

from __future__ import annotations

import json

import pytest

from hetero_framework.cluster import roles
from hetero_framework.cluster.roles import MachineNames, decide_role, with_own_devices
from hetero_framework.config import PLAN_FILE, Config, with_saved_plan
from hetero_framework.config.load import devices_of
from hetero_framework.errors import ConfigError


def config_of(coordinator=None, workers=(), plan="auto"):
    home = {"ip": "127.0.0.1", "hostname": "desk", **(coordinator or {})}
    return Config.from_dict({"coordinator": home, "workers": [*workers], "shard_plan": plan})


def entries(config):
    return [(worker.id, worker.ip, worker.port, worker.device) for worker in config.workers]


def test_each_device_has_an_entry():
    box = {"id": 1, "ip": "10.0.0.2", "port": 9999, "devices": ["cuda:0", "cuda:1", "cuda:2"]}
    dials = {"id": "mac", "ip": "10.0.0.3", "devices": ["mps"]}
    config = config_of({"devices": ["rocm:0", "rocm:1"]}, [box, dials])
    assert config.coordinator.device == "rocm:0"
    assert entries(config) == [
        (1, "10.0.0.2", 9999, "cuda:0"),
        ("mac", "10.0.0.3", None, "mps"),
        ("coordinator@2", "127.0.0.1", None, "rocm:1"),
        ("1@2", "10.0.0.2", 10000, "cuda:1"),
        ("1@3", "10.0.0.2", 10001, "cuda:2"),
    ]
    assert Config.from_dict(config.to_dict()) == config


def test_a_plan_names_the_cards():
    box = {"id": 1, "ip": "10.0.0.2", "port": 9999, "devices": ["cuda:0", "cuda:1"]}
    plan = [{"id": owner, "start": k, "end": k + 1} for k, owner in enumerate(["local", "1@2", 1])]
    assert [stage.owner for stage in config_of(None, [box], plan).plan.stages] == [
        "local",
        "1@2",
        1,
    ]


def test_all_cards_of_a_machine_have_its_role():
    box = {"id": 1, "ip": "10.0.0.2", "port": 9999, "devices": ["cuda:0", "cuda:1"]}
    config = config_of({"ip": "10.0.0.1", "devices": ["mps", "cpu"]}, [box])
    there = MachineNames.of(["box"], ["10.0.0.2"])
    assert decide_role(config, identity=there).ids == (1, "1@2")
    elsewhere = MachineNames.of(["moved"], ["10.9.9.9"])
    assert decide_role(config, identity=elsewhere, keys=["1"]).ids == (1, "1@2")
    assert decide_role(config, identity=elsewhere, worker_id="1").ids == (1, "1@2")
    assert decide_role(config, identity=elsewhere, worker_id="1@2").ids == ("1@2",)
    here = MachineNames.of(["desk"], ["10.0.0.1"])
    assert decide_role(config, identity=here).ids == ("local", "coordinator@2")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"devices": []}, "names no device"),
        ({"devices": "cuda:0"}, "devices"),
        ({"devices": ["cuda:0", 1]}, "devices"),
        ({"devices": ["cuda:0", "nvidia"]}, "nvidia"),
        ({"devices": ["cuda:0", "cuda:1"], "device": "cpu"}, "goes without device"),
        ({"devices": "all", "device": "cpu"}, "goes without device"),
    ],
)
def test_what_names_no_devices_is_refused(entry, said):
    for config in (
        lambda: config_of(entry),
        lambda: config_of(None, [{"id": 1, "ip": "h", **entry}]),
    ):
        with pytest.raises(ConfigError, match=said):
            config()


@pytest.mark.parametrize("name", ["box@", "box@1", "box@x", "box@-2", "@2", "b@o@2"])
def test_an_id_that_names_no_card_is_refused(name):
    with pytest.raises(ConfigError):
        config_of(None, [{"id": name, "ip": "10.0.0.2"}])


def test_two_entries_do_not_stand_for_one_card():
    box = {"id": "box", "ip": "10.0.0.2", "devices": ["cuda:0", "cuda:1"]}
    with pytest.raises(ConfigError, match="box@2"):
        config_of(None, [box, {"id": "box@2", "ip": "10.0.0.3"}])


def test_all_devices_of_this_machine_are_found_here(monkeypatch):
    monkeypatch.setattr(roles, "devices_here", lambda: ["cuda:0", "cuda:1"])
    config = config_of({"devices": "all"})
    assert config.coordinator.devices == "all"
    found = with_own_devices(config)
    assert found.coordinator.device == "cuda:0"
    assert [worker.id for worker in found.workers] == ["coordinator@2"]
    elsewhere = config_of({"ip": "203.0.113.9", "devices": "all"})
    assert with_own_devices(elsewhere) == elsewhere


def test_all_devices_of_a_worker_are_unknown_until_it_joins():
    with pytest.raises(ConfigError, match="only its machine knows") as raised:
        with_own_devices(config_of(None, [{"id": "box", "ip": "h", "devices": "all"}]))
    assert "hetero invite box" in raised.value.hint


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ({"device": "cpu", "workers": [1, "a"]}, None),
        ({"device": "cpu", "workers": [1]}, "worker a is new"),
        ({"device": "cpu", "workers": [1, "a", "b"]}, "worker b is gone"),
        ({"device": "cuda", "workers": [1, "a"]}, "other devices"),
    ],
)
def test_a_saved_plan_counts_for_the_machines_that_it_was_made_for(then, said, tmp_path, caplog):
    def made(device, workers):
        entries = [{"id": id, "ip": "127.0.0.1"} for id in workers]
        config = config_of({"device": device}, entries)
        return config.with_changes(training={"output_dir": str(tmp_path)})

    plan = [{"id": "local", "start": 0, "end": 1}]
    kept = {"shard_plan": plan, "planned_for": devices_of(made(**then))}
    (tmp_path / PLAN_FILE).write_text(json.dumps(kept))
    with caplog.at_level("INFO"):
        assert with_saved_plan(made("cpu", [1, "a"])).is_planned == (said is None)
    assert said is None or f"{PLAN_FILE} is not used: {said}" in caplog.text
