"""A machine with several devices, named once."""

from __future__ import annotations

import pytest

from hetero_framework.cluster import roles
from hetero_framework.cluster.roles import MachineNames, decide_role, with_own_devices
from hetero_framework.config import Config
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
