"""Permitted connections, with keys and without."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.core.stream import PlainStream
from hetero_framework.core.threads import in_background
from hetero_framework.errors import IdentityError
from hetero_framework.security import authority as x509
from hetero_framework.security.access import Keyed, KeyOptions, Plaintext, access_of
from hetero_framework.security.keys import FOLDER
from tests.certificates import YEARS, keys_of, keys_of_year
from tests.samples import plan_of
from tests.waiting import WAIT_S


def config(folder: Path, ip: str) -> Config:
    raw = {
        "coordinator": {"ip": "127.0.0.1"},
        "workers": [{"id": 1, "ip": ip, "port": 9000}, {"id": 2, "ip": "127.0.0.1", "port": 9001}],
        "shard_plan": plan_of(("local", 1), (1, 2), (2, 3)),
    }
    return Config.from_dict(raw, folder)


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(ip, tmp_path):
    for process in ("local", 1):
        access = access_of(config(tmp_path, ip), process)
        assert access == Plaintext()
        assert access.arguments([1]) == []


@pytest.mark.parametrize("ip", ["192.0.2.7", "2001:db8::1", "box.invalid"])
def test_address_that_others_reach_needs_keys(ip, tmp_path):
    for process in ("local", 1):
        with pytest.raises(IdentityError, match=r"worker 1 is at .*no key for it") as found:
            access_of(config(tmp_path, ip), process)
        assert found.value.exit_code == 3
        assert "hetero invite" in str(found.value.hint)
    assert access_of(config(tmp_path, ip), 2) == Plaintext()  # it listens on the loopback


def test_for_a_worker_that_dials_the_coordinators_address_counts(tmp_path):
    raw = config(tmp_path, "laptop").to_dict()
    del raw["workers"][0]["port"]
    assert access_of(Config.from_dict(raw, tmp_path), 1) == Plaintext()
    raw["coordinator"]["ip"] = "192.0.2.7"
    for process in ("local", 1):
        with pytest.raises(IdentityError, match=r"the coordinator is at .*no key for it"):
            access_of(Config.from_dict(raw, tmp_path), process)


def test_insecure_mode_is_logged_at_every_start(tmp_path, logged):
    keys_of(tmp_path / FOLDER, "local")
    access = access_of(config(tmp_path, "192.0.2.7"), "local", KeyOptions(insecure=True))
    assert access == Plaintext(everywhere=True)
    assert access.arguments([1]) == ["--insecure-plaintext"]
    assert "NO ENCRYPTION" in logged[0]


def test_keys_beside_the_configuration_are_used_on_the_loopback_too(tmp_path):
    keys = keys_of(tmp_path / FOLDER, "local", 1, with_authority=True)
    access = access_of(config(tmp_path, "127.0.0.1"), "local")
    assert isinstance(access, Keyed)
    assert access.arguments([1, 2]) == ["--keys", str(keys.path)]
    assert keys.has(2)  # made by the way
    with pytest.raises(IdentityError, match=r"there is no .*worker-1\.pem"):
        access_of(config(tmp_path, "127.0.0.1"), 1, KeyOptions(tmp_path / "elsewhere"))


def outcome(dialler: Keyed, who: int | str, listener: Keyed) -> tuple[str, str]:
    """What each side of a handshake says: whom it sees, or why not."""
    near, far = socket.socketpair()

    def accepted() -> str:
        stream, identity = listener.accepted(PlainStream(near))
        stream.close()
        return str(identity)

    found = in_background(accepted, "accept")
    try:
        dialler.dialled(PlainStream(far), who).close()
        said = "welcome"
    except IdentityError as error:
        said = error.message
    error = found.exception(WAIT_S)
    return said, found.result() if error is None else str(error).split("\n")[0]


@pytest.fixture
def process(tmp_path):
    def made(process: int | str, *, workers: Any = (1, 2), name: str | None = None) -> Keyed:
        folder = tmp_path / (name or f"machine-{process}")
        keys = keys_of(folder, process)
        return Keyed(keys, process, workers)

    return made


def test_coordinator_and_workers_of_the_plan_come_in(process):
    assert outcome(process("local"), 1, process(1)) == ("welcome", "the coordinator")
    assert outcome(process(2), 1, process(1)) == ("welcome", "worker 2")


@pytest.mark.parametrize("wrong", ["dialled", "dialling"])
@pytest.mark.parametrize(("year", "here", "there"), YEARS)
def test_a_wrong_clock_is_reported_on_both_sides_and_not_as_wrong_keys(
    year, here, there, wrong, process, monkeypatch
):
    """r11. The side that looks at such a certificate is the one whose clock is off."""
    if wrong == "dialled":
        dialling = process("local")
        keys_of_year(monkeypatch, year)
        said, seen = outcome(dialling, 1, process(1))
    else:
        dialled = process(1)
        keys_of_year(monkeypatch, year)
        seen, said = outcome(process("local"), 1, dialled)
    assert re.search(here, said)
    assert re.search(there, seen)


def test_worker_that_is_not_in_the_plan_is_told(process):
    said, seen = outcome(process(7), 1, process(1))
    assert said == f"worker 1 refused this machine: {seen}"
    assert seen == "worker 7 is not in this machine's configuration (workers: 1, 2)"


def test_other_worker_at_an_address_is_not_taken_for_the_one_that_was_dialled(process):
    said, _ = outcome(process("local"), 2, process(1))
    assert said == (
        "worker 2 is not who it should be: its certificate is that of worker 1, expected worker 2"
    )


def test_revoked_certificate_counts_nowhere(process):
    """The coordinator refuses it, and tells the workers when it connects to them."""
    coordinator, one, two = process("local"), process(1), process(2)
    serial = x509.serial_of(two.keys.read("worker-2.pem"))
    assert outcome(two, 1, one)[0] == "welcome"
    coordinator.keys.revoke([serial])
    assert "its certificate was revoked" in outcome(coordinator, 2, two)[0]
    assert outcome(two, 1, one)[0] == "welcome"  # it has not heard of it yet
    assert outcome(coordinator, 1, one)[0] == "welcome"
    assert one.keys.revoked() == {serial}
    assert "its certificate was revoked" in outcome(two, 1, one)[0]


def test_worker_that_dials_hears_of_a_revocation_from_the_coordinator(process):
    coordinator, one = process("local"), process(1)
    coordinator.keys.revoke([1234])
    assert outcome(one, "local", coordinator)[0] == "welcome"
    assert one.keys.revoked() == {1234}


def test_worker_cannot_revoke(process):
    one, two = process(1), process(2)
    two.keys.revoke([1234])
    assert outcome(two, 1, one)[0] == "welcome"
    assert one.keys.revoked() == frozenset()


def test_new_key_counts_from_the_next_connection_on(process):
    coordinator, one = process("local"), process(1)
    foreign = keys_of(one.keys.path, 1, of="other")
    assert "keys of another cluster" in outcome(coordinator, 1, one)[0]
    keys_of(foreign.path, 1)
    assert outcome(coordinator, 1, one)[0] == "welcome"
