"""The findings of `hetero doctor --config` about islands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cluster.roles import Role
from hetero_framework.commands import diagnosis
from hetero_framework.config import Config
from hetero_framework.extras.islands import island_diagnosis
from tests.extras.islands.helpers import StandIn, serving
from tests.samples import free_ports, plan_of
from tests.unit.commands.test_diagnosis import listening


@pytest.fixture
def lighthouse():
    with serving(StandIn()) as made:
        yield made.port


def config_at(tmp_path: Path, lighthouse: str, **coordinator: Any) -> Config:
    raw = {"coordinator": {"ip": "127.0.0.1", "device": "cpu", **coordinator}}
    raw |= {"island": {"name": "attic", "lighthouse": lighthouse}}
    return Config.from_dict({**raw, "shard_plan": plan_of(("local", 2))}, tmp_path)


def problems(tmp_path: Path, lighthouse: str, **coordinator: Any) -> list[str]:
    config = config_at(tmp_path, lighthouse, **coordinator)
    made = diagnosis.MachineView(config, Role(True, ()))
    return [f"{error.message} -> {error.hint}" for error in island_diagnosis.findings(made)]


def test_a_working_lighthouse_has_no_findings(tmp_path, lighthouse):
    assert problems(tmp_path, f"127.0.0.1:{lighthouse}") == []


def test_a_run_without_islands_has_no_problem_with_them(tmp_path):
    alone = config_at(tmp_path, "127.0.0.1:1").with_changes(island=None)
    made = diagnosis.MachineView(alone, Role(True, ()))
    assert list(island_diagnosis.findings(made)) == []


def test_an_unreachable_lighthouse_is_reported(tmp_path):
    [port] = free_ports(1)
    [found] = problems(tmp_path, f"127.0.0.1:{port}")
    assert f"cannot reach the lighthouse at 127.0.0.1:{port}" in found


def test_another_program_in_place_of_a_lighthouse_is_reported(tmp_path):
    with listening(b"HTTP/1.1 400 Bad Request\r\n") as port:
        [found] = problems(tmp_path, f"127.0.0.1:{port}")
    assert f"no lighthouse answers at 127.0.0.1:{port}" in found


def test_missing_keys_and_an_unreachable_own_address_are_reported(tmp_path):
    address, keys = problems(tmp_path, "10.9.8.7:29510")
    assert "other islands are to reach this one at 127.0.0.1" in address
    assert "hetero invite" in keys


def test_a_wrong_clock_is_reported(tmp_path, lighthouse, monkeypatch):
    monkeypatch.setattr(island_diagnosis, "clock_at", lambda *_: time.time() + 3600)
    [found] = problems(tmp_path, f"127.0.0.1:{lighthouse}")
    assert "the clock of the lighthouse's machine is" in found
    assert "ahead of this machine's" in found


def test_doctor_includes_the_check_of_islands(tmp_path):
    [port] = free_ports(1)
    found = diagnosis.diagnose(config_at(tmp_path, f"127.0.0.1:{port}"))
    assert any(one["check"] == "islands" for one in found["findings"])
