"""The findings of `hetero doctor --config`: each check with the real thing where possible."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework import cli, versions
from hetero_framework.cluster import worker_info
from hetero_framework.cluster.link_probe import LinkSpeed
from hetero_framework.cluster.roles import Role
from hetero_framework.commands import diagnosis
from hetero_framework.commands.diagnosis import MachineView, WorkerAnswer
from hetero_framework.config import Config
from hetero_framework.core import addresses
from hetero_framework.core.devices import Device, Memory, Support
from hetero_framework.errors import NetworkError
from hetero_framework.security.access import KeyOptions
from tests.framed import answering
from tests.samples import free_ports

TINY = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 320}


def view(tmp_path: Path, role: Role | None = None, **sections: Any) -> MachineView:
    """The coordinator's; its one worker counts as another machine's."""
    machine = {"ip": "127.0.0.1", "device": "cpu"}
    worker = {**machine, "id": 1, "port": free_ports(1)[0], **sections.pop("worker", {})}
    coordinator = {**machine, **sections.pop("coordinator", {})}
    training = {"visualize": False, "output_dir": "run", **sections.pop("training", {})}
    plan = [{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 2}]
    fields = {"coordinator": coordinator, "workers": [worker], "shard_plan": plan}
    fields |= {"training": training, "model": {"from_config": TINY, "tokenizer": "t"}}
    return MachineView(Config.from_dict({**fields, **sections}, tmp_path), role or Role(True, ()))


def asked(made: MachineView, **said: Any) -> MachineView:
    """As if worker 1 had been asked."""
    made.__dict__["workers"] = {1: WorkerAnswer(**said)}
    return made


def found(check: Callable[[MachineView], diagnosis.Findings], made: MachineView) -> list[str]:
    return [f"{error.message} -> {error.hint}" for error in check(made)]


@contextlib.contextmanager
def listening(answer: bytes = b"") -> Iterator[int]:
    """A program at a port that is no worker."""

    def say(connection: socket.socket) -> None:
        connection.sendall(answer)
        connection.close()

    with answering(say) as port:
        yield port


@pytest.mark.parametrize("plan", [{}, {"shard_plan": "auto"}], ids=["planned", "without a plan"])
def test_a_working_configuration_has_no_findings(tmp_path, plan):
    made = asked(view(tmp_path, **plan))
    assert [found(check, made) for check in diagnosis.CHECKS] == [[]] * len(diagnosis.CHECKS)
    assert any("memory is not checked" in note for note in made.notes) == bool(plan)


# -- machines and names ---------------------------------------------------------------------------


def test_machine_without_a_role(tmp_path):
    made = view(tmp_path)
    made.role = None
    assert "names this machine" in found(diagnosis.role, made)[0]


def test_an_unknown_host_name_is_reported(tmp_path):
    (line,) = found(diagnosis.places, view(tmp_path, worker={"ip": "far.invalid"}))
    assert line.startswith("the name 'far.invalid' of worker 1 is not known here")


def test_own_name_that_is_a_loopback_address(tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "resolve", lambda name: ("127.0.1.1",))
    own = {"ip": "desk.lan", "hostname": "desk"}
    (line,) = found(diagnosis.places, view(tmp_path, coordinator=own, worker={"ip": "192.0.2.7"}))
    assert "'desk.lan' of coordinator is a loopback address" in line
    assert "/etc/hosts" in line


def test_address_that_this_machine_does_not_have(tmp_path):
    (line,) = found(diagnosis.places, view(tmp_path, coordinator={"ip": "198.51.100.7"}))
    assert "does not have its address 198.51.100.7" in line
    assert f"one of {addresses.addresses_for_others()[0]}" in line


def test_keys(tmp_path):
    far = view(tmp_path, worker={"ip": "192.0.2.7"})
    (line,) = found(diagnosis.keys, far)
    assert "192.0.2.7, where others reach it, and this machine has no key for it" in line
    assert "hetero invite" in line
    far.options = KeyOptions(insecure=True)
    del far.__dict__["access"]
    assert found(diagnosis.keys, far) == []
    absent = MachineView(far.config, far.role, KeyOptions(tmp_path / "none"))
    assert "there is no " in found(diagnosis.keys, absent)[0]


def test_port_of_a_worker_here_that_another_program_has(tmp_path):
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        (line,) = found(diagnosis.port, view(tmp_path, Role(True, (1,)), worker={"port": port}))
        there = view(tmp_path, Role(False, (1,)), worker={"port": port})
        assert found(diagnosis.port, there) == []
        assert f"port {port} of worker 1 is used by" in there.notes[0]
    assert f"port {port} of worker 1 is used by" in line
    assert str(os.getpid()) in line or "another program" in line


# -- reaching the others --------------------------------------------------------------------------


def test_a_port_without_a_listener_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "_DIAL_S", 0.5)
    for made in (view(tmp_path), view(tmp_path, Role(False, ()))):
        (line,) = found(diagnosis.reach, made)
        assert "nothing listens on that port" in line
        assert "-> start the worker there" in line


def test_port_of_another_program(tmp_path):
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        (line,) = found(diagnosis.reach, view(tmp_path, worker={"port": port}))
    assert "does not behave like a worker" in line


def test_address_of_another_network(tmp_path, monkeypatch):
    networks = [ipaddress.IPv4Network("192.168.1.0/24")]
    monkeypatch.setattr(addresses, "local_networks", lambda: networks)
    error = NetworkError("cannot reach worker 1 at 10.9.0.7:1: no answer", hint="the firewall")
    made = asked(view(tmp_path, worker={"ip": "10.9.0.7"}), problem=error)
    (line,) = found(diagnosis.reach, made)
    assert "this machine is in 192.168.1.0/24 only" in line
    made = asked(view(tmp_path, worker={"ip": "192.168.1.9"}), problem=error)
    assert found(diagnosis.reach, made)[0].endswith("-> the firewall")


def test_worker_that_is_busy_is_only_noted(tmp_path):
    made = asked(view(tmp_path), busy="busy with the run of desk")
    assert found(diagnosis.reach, made) == []
    assert made.notes == ["busy with the run of desk"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": "2.0.0"}, "worker 1 has torch 2.0.0, this machine"),
        ({"transformers": None}, "worker 1 has transformers None, this machine"),
    ],
)
def test_other_versions(changes, said, tmp_path):
    facts = worker_info.facts()
    same = {**facts, "versions": {**facts["versions"], "torch": f"{facts['versions']['torch']}+x"}}
    for alike in (facts, same):
        assert found(diagnosis.version, asked(view(tmp_path), facts=alike)) == []
    facts["versions"].update(changes)
    (line,) = found(diagnosis.version, asked(view(tmp_path), facts=facts))
    assert line.startswith(said)


def test_versions_that_are_too_old_here(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "too_old", lambda: [("torch", ">=2.11", "2.9")])
    (line, *_) = found(diagnosis.version, asked(view(tmp_path)))
    assert "torch 2.9 (needed: >=2.11) -> pip install" in line


@pytest.mark.parametrize(("seconds", "way"), [(60.0, "ahead of"), (-60.0, "behind")])
def test_clock(seconds, way, tmp_path):
    facts = worker_info.facts()
    made = asked(view(tmp_path), facts=facts, clock_s=seconds)
    assert way in found(diagnosis.clock, made)[0]
    assert found(diagnosis.clock, asked(view(tmp_path), facts=facts, clock_s=1.0)) == []


@pytest.mark.parametrize("speed", [LinkSpeed(0.001, 1e6, 1e9), LinkSpeed(0.2, 1e9, 1e9)])
def test_slow_link(speed, tmp_path):
    assert "is slow" in found(diagnosis.link, asked(view(tmp_path), speed=speed))[0]
    assert found(diagnosis.link, asked(view(tmp_path), speed=LinkSpeed(0.001, 1e9, 1e9))) == []


# -- what is here ---------------------------------------------------------------------------------


def test_model_and_data_that_are_not_here(tmp_path):
    made = view(tmp_path, model={"name_or_path": "./none"}, data={"train": "none.jsonl"})
    assert "no model directory" in found(diagnosis.model, made)[0]
    said = " ".join(found(diagnosis.configuration, made))
    assert "no model directory" in said
    assert "data file not found: none.jsonl" in said
    large = {"from_config": {**TINY, "num_hidden_layers": 9}, "tokenizer": "t"}
    assert "the model has 9" in found(diagnosis.model, view(tmp_path, model=large))[0]


def welcome(**said: Any) -> SimpleNamespace:
    """The answer of a worker with room for all."""
    much = {"memory_total": 1 << 40, "memory_free": 1 << 40, "host_free": 1 << 40}
    device = {"device": "cpu", "device_label": "a CPU", "no_four_bit": None}
    return SimpleNamespace(**{**much, **device, **said})


def test_memory_and_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(Device, "memory", lambda self: Memory(1 << 10, 1 << 10))
    (line,) = found(diagnosis.devices, asked(view(tmp_path)))
    assert line.startswith("the coordinator has 1.00 KiB free, ")
    assert "-> give it fewer layers in shard_plan" in line
    small = welcome(device="cuda:0", memory_free=1)
    lines = found(diagnosis.devices, asked(view(tmp_path), welcome=small))
    assert lines[1].startswith("worker 1 has 1 B free, ")
    absent = view(tmp_path, coordinator={"device": "cuda:77"})
    assert "cuda:77" in found(diagnosis.devices, asked(absent))[0]


def test_four_bits_on_a_device_without_them(tmp_path, monkeypatch):
    monkeypatch.setattr(Device, "four_bit", lambda self: Support(False, "bitsandbytes is absent"))
    made = asked(view(tmp_path))
    assert found(diagnosis.devices, made) == []
    made.model.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}  # type: ignore[union-attr]
    line = found(diagnosis.devices, made)[0]
    assert "coordinator cannot hold quantised weights: bitsandbytes is absent" in line


def test_a_worker_that_was_asked_knows_its_4_bits_best(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "devices_known", lambda *_: {1: "assumed to have none"})
    made = view(tmp_path)
    made.model.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}  # type: ignore[union-attr]
    text = "worker 1 cannot hold quantised weights: assumed"
    assert text in " ".join(found(diagnosis.devices, asked(made)))
    assert text not in " ".join(found(diagnosis.devices, asked(made, welcome=welcome())))


def test_attention_that_a_device_does_not_train_with(tmp_path):
    flex = {"from_config": TINY, "tokenizer": "t", "attn_implementation": "flex_attention"}
    made = asked(view(tmp_path, model=flex), welcome=welcome(device="mps"))
    (line,) = found(diagnosis.devices, made)
    assert "coordinator (127.0.0.1, cpu) cannot train with 'flex_attention'" in line
    assert "worker 1 (127.0.0.1, mps)" in line
    assert found(diagnosis.devices, asked(view(tmp_path))) == []


# -- the command ----------------------------------------------------------------------------------


def test_command_says_two_lines_for_each_and_ends_with_2(tmp_path, capsys):
    made = view(tmp_path, data={"train": "none\u202e.jsonl"}, worker={"ip": "127.0.0.1"})
    file = tmp_path / "c.json"
    file.write_text(json.dumps(made.config.to_dict()))
    assert cli.main(["doctor", "--config", str(file)]) == 2
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "this machine is coordinator and worker 1"
    assert shown[1] == "wrong: data file not found: none\\u202e.jsonl"
    assert shown[2].startswith("    do: looked at ")
    assert cli.main(["doctor", "--config", str(file), "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["check"] == "configuration"
    file.write_text(json.dumps({**made.config.to_dict(), "data": None}))
    assert cli.main(["doctor", "--config", str(file)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
