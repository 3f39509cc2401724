"""Permitted connections of islands and their lighthouse."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_framework.config import Config
from hetero_framework.core.identity import ISLANDS
from hetero_framework.errors import IdentityError
from hetero_framework.security import authority as x509
from hetero_framework.security.access import (
    Keyed,
    KeyOptions,
    Plaintext,
    island_access,
    lighthouse_access,
)
from hetero_framework.security.keys import FOLDER, KeyDirectory
from tests.certificates import keys_of
from tests.unit.security.test_access import config, outcome, process

__all__ = ["process"]  # a fixture


def island(folder: Path, lighthouse: str = "192.0.2.1:29510") -> Config:
    raw = config(folder, "127.0.0.1").to_dict()
    return Config.from_dict({**raw, "island": {"name": "garage", "lighthouse": lighthouse}}, folder)


@pytest.fixture
def islands(tmp_path):
    """As islands, and "local" as the lighthouse, each on a machine of its own."""

    def made(process: str) -> Keyed:
        base = tmp_path / f"at-{process}"
        keys = keys_of(base / FOLDER / "islands", process, kind=ISLANDS)
        if process == "local":
            found = lighthouse_access(keys, "192.0.2.1", KeyOptions())
        else:
            raw = {**island(base).to_dict(), "island": {"name": process, "lighthouse": "x:1"}}
            found = island_access(Config.from_dict(raw, base))
        assert isinstance(found, Keyed)
        return found

    return made


def test_islands_and_their_lighthouse_know_each_other(islands):
    garage, attic = islands("garage"), islands("attic")
    assert outcome(garage, "attic", attic) == ("welcome", "island garage")
    assert outcome(garage, "local", islands("local")) == ("welcome", "island garage")
    assert outcome(islands("local"), "attic", attic) == ("welcome", "the lighthouse")


def test_another_island_is_not_taken_for_the_one_that_was_dialled(islands):
    said, _ = outcome(islands("garage"), "barn", islands("attic"))
    assert said == (
        "island barn is not who it should be: its certificate is that of island attic,"
        " expected island barn"
    )
    said, _ = outcome(islands("garage"), "local", islands("attic"))
    assert "that of island attic, expected the lighthouse" in said


def test_worker_of_the_same_authority_is_no_island(islands, process):
    """No machine makes such keys; each side would refuse them."""
    said, _ = outcome(process(1), "local", islands("local"))
    assert "its certificate is that of the lighthouse, expected the coordinator" in said
    worker, attic = process(1), islands("attic")
    worker.keys.bundle(1).rename(worker.keys.path / "island-1.pem")
    file = worker.keys.path / "island-1.pem"
    file.write_text(file.read_text().replace("/worker/1", "/island/1", 1))
    forged = Keyed(KeyDirectory(worker.keys.path, ISLANDS), "1", None)
    said, seen = outcome(forged, "attic", attic)
    assert seen == "its certificate is that of worker 1, expected island attic"
    assert said == f"island attic refused this machine: {seen}"


def test_revoked_island_counts_nowhere_once_the_others_have_heard(islands):
    garage, attic, lighthouse = islands("garage"), islands("attic"), islands("local")
    serial = x509.serial_of(attic.keys.read("island-attic.pem"))
    lighthouse.keys.revoke([serial])
    assert "its certificate was revoked" in outcome(attic, "local", lighthouse)[0]
    assert outcome(attic, "garage", garage)[0] == "welcome"  # it has not heard of it yet
    assert outcome(garage, "local", lighthouse)[0] == "welcome"
    assert "its certificate was revoked" in outcome(attic, "garage", garage)[0]
    # What an island says of certificates counts for nobody.
    garage.keys.revoke([1234])
    assert outcome(garage, "local", lighthouse)[0] == "welcome"
    assert lighthouse.keys.revoked() == {serial}


def test_islands_without_keys_stay_on_this_machine(tmp_path, logged):
    own = island_access(island(tmp_path, "127.0.0.1:29510"))
    assert isinstance(own, Plaintext)
    for check in (
        lambda: island_access(island(tmp_path)),
        lambda: own.check_address("192.0.2.2", "this island"),
        lambda: lighthouse_access(keys_of(tmp_path / "none"), "0.0.0.0", KeyOptions()),
    ):
        with pytest.raises(IdentityError, match="where others reach it") as found:
            check()
        assert "hetero invite --island NAME" in str(found.value.hint)
    assert not logged
    island_access(island(tmp_path), KeyOptions(insecure=True)).check_address("192.0.2.2", "this")
    assert "NO ENCRYPTION" in logged[0]


def test_a_missing_key_of_an_island_is_named(tmp_path):
    with pytest.raises(IdentityError, match=r"island-garage\.pem, the key of island garage"):
        island_access(island(tmp_path), KeyOptions(tmp_path))


def test_keys_of_workers_are_not_those_of_an_island(tmp_path):
    keys_of(tmp_path / FOLDER, "local", "garage")
    with pytest.raises(IdentityError, match="no key for it"):
        island_access(island(tmp_path))
