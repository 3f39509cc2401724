"""A configuration of one machine grows by the machines that are invited."""

from __future__ import annotations

import json

import pytest

from hetero_framework.config import load_config
from hetero_framework.core import addresses
from hetero_framework.core.threads import in_background
from hetero_framework.errors import UserError
from hetero_framework.extras.pairing import key_management
from hetero_framework.security.access import Keyed
from hetero_framework.security.keys import KeyDirectory
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """The folder of the coordinator, whose file has no other machine."""
    monkeypatch.setattr(addresses, "primary_address", lambda: "127.0.0.2")
    folder = tmp_path / "desk"
    folder.mkdir()
    file = folder / "hetero_config.json"
    file.write_text(json.dumps({"coordinator": {"ip": "127.0.0.1"}, "shard_plan": "auto"}))
    return folder


@pytest.fixture
def joined(desk, tmp_path, monkeypatch):
    """joined("box", ["cuda:0"]): the machine is invited and joins; its folder."""

    def run(name, devices):
        file, said = desk / "hetero_config.json", list[str]()
        monkeypatch.setattr(key_management, "devices_here", lambda: devices)
        config = load_config(file)
        keys = KeyDirectory(desk / "hetero_keys")
        inviting = in_background(
            lambda: key_management.invite(config, file, keys, [name], say=said.append), "invite"
        )
        wait_until(lambda: len(said) == 2 or inviting.done())
        _, _, address, token = said[1].split()
        there = tmp_path / name
        there.mkdir()
        key_management.join_cluster(
            address, token, there / "hetero_config.json", KeyDirectory(there / "hetero_keys")
        )
        inviting.result(WAIT_S)
        return there

    return run


def test_a_machine_that_is_invited_is_added_with_all_its_cards(desk, joined):
    there = joined("box", ["cuda:0", "cuda:1"])
    file = desk / "hetero_config.json"
    raw = json.loads(file.read_text())
    assert raw["coordinator"]["ip"] == "127.0.0.2"
    assert raw["workers"] == [{"id": "box", "ip": "127.0.0.1", "devices": ["cuda:0", "cuda:1"]}]
    assert (there / "hetero_config.json").read_text() == file.read_text()
    config = load_config(file)
    assert [(worker.id, worker.device, worker.dials) for worker in config.workers] == [
        ("box", "cuda:0", True),
        ("box@2", "cuda:1", True),
    ]


def test_all_cards_of_a_machine_have_one_key(desk, joined):
    there = joined("box", ["cuda:0", "cuda:1"])
    keys = KeyDirectory(there / "hetero_keys")
    assert keys.processes() == ["box"]
    assert keys.bundle("box@2") == keys.bundle("box")
    assert keys.identity("box@2") == keys.identity("box")
    members = ["box", "box@2"]
    assert Keyed(keys, "box@2", members).keys.has("box@2")


def test_a_second_machine_joins_the_first(desk, joined):
    joined("box", ["cuda:0"])
    joined("2", ["mps"])
    workers = load_config(desk / "hetero_config.json").workers
    assert [(worker.id, worker.device) for worker in workers] == [("box", "cuda:0"), (2, "mps")]


def test_an_entry_that_names_its_device_keeps_it(desk, joined):
    file = desk / "hetero_config.json"
    raw = json.loads(file.read_text())
    raw["workers"] = [{"id": 1, "ip": "10.0.0.2", "port": 9999, "device": "cuda:1"}]
    raw["coordinator"]["ip"] = "127.0.0.2"
    file.write_text(json.dumps(raw))
    before = file.read_text()
    joined("1", ["cuda:0", "cuda:1"])
    assert file.read_text() == before


def test_all_of_an_entry_become_the_devices_that_join(desk, joined):
    file = desk / "hetero_config.json"
    raw = json.loads(file.read_text())
    raw["workers"] = [{"id": 1, "ip": "127.0.0.3", "port": 9999, "devices": "all"}]
    raw["coordinator"] |= {"ip": "127.0.0.2", "devices": "all"}
    file.write_text(json.dumps(raw))
    there = joined("1", ["cuda:0", "cuda:1"])
    here, told = (json.loads((f / "hetero_config.json").read_text()) for f in (desk, there))
    assert here["workers"][0]["devices"] == told["workers"][0]["devices"] == ["cuda:0", "cuda:1"]
    assert here["coordinator"]["devices"] == "all"
    assert told["coordinator"]["devices"] == ["cuda:0", "cuda:1"]  # of the desk, as it is patched


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"shard_plan": [{"id": "local", "start": 0, "end": 1}]}, "hetero_config.json", "auto"),
        ({}, "c.yaml", "write it there"),
    ],
)
def test_a_file_that_cannot_grow_is_refused(changes, name, said, desk):
    raw = {"coordinator": {"ip": "127.0.0.1"}, "shard_plan": "auto", **changes}
    file = desk / name
    file.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"has no worker box|no program keeps") as raised:
        key_management.invite(load_config(raw), file, KeyDirectory(desk / "hetero_keys"), ["box"])
    assert said in raised.value.hint
    assert not (desk / "hetero_keys").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [("box@2", "box@2 is one device of worker box"), ("a b", "workers.0..id"), ("local", "names")],
)
def test_a_name_that_no_machine_can_have_is_refused_before_anything_is_made(name, said, desk):
    file = desk / "hetero_config.json"
    with pytest.raises(UserError, match=said):
        key_management.invite(load_config(file), file, KeyDirectory(desk / "hetero_keys"), [name])
    assert not (desk / "hetero_keys").exists()


def test_loopback_gives_way_to_an_address_for_workers_that_the_file_names(desk, joined):
    file = desk / "hetero_config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "workers": [{"id": "box", "ip": "10.0.0.2"}]}))
    joined("box", ["cuda:0"])
    assert json.loads(file.read_text())["coordinator"]["ip"] == "127.0.0.2"
