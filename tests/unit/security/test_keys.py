"""Key directories: what is refused, what stays, and what the authority's machine does with it."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from hetero_framework.core.identity import Identity
from hetero_framework.errors import IdentityError
from hetero_framework.security import authority as x509
from hetero_framework.security import issuing
from hetero_framework.security.keys import MAX_REVOKED, REVOKED, KeyDirectory, serials, texts
from tests.certificates import keys_of

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


@posix
def test_keys_are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys = keys_of(tmp_path / "keys", 1, with_authority=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in keys.path.iterdir()} == {0o600}


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o644])
@pytest.mark.parametrize("place", ["the file", "the directory"])
def test_key_that_others_can_reach_is_refused_with_the_chmod(
    place: str, mode: int, tmp_path: Path
) -> None:
    keys = keys_of(tmp_path / "keys", 1)
    wrong = keys.bundle(1) if place == "the file" else keys.path
    wrong.chmod(mode | 0o700 if place == "the directory" else mode)
    with pytest.raises(IdentityError, match="other users of this machine can read") as found:
        keys.identity(1)
    assert found.value.hint == f"chmod {'600' if place == 'the file' else '700'} {wrong}"
    assert found.value.exit_code == 3


def test_key_under_another_name_is_refused(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys", 1)
    keys.bundle(1).rename(keys.bundle(2))
    with pytest.raises(IdentityError, match=r"worker-2\.pem is the key of worker 1"):
        keys.identity(2)
    keys.write("worker-3.pem", b"\xff\xff")
    with pytest.raises(IdentityError, match="does not say whose key it is"):
        keys.identity(3)
    with pytest.raises(IdentityError, match=r"cannot read .*worker-4\.pem: No such file"):
        keys.identity(4)


def test_revoked_numbers_stay_and_are_bounded(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path / "keys")
    assert keys.revoked() == frozenset()
    keys.revoke([1 << 158, 5])
    keys.revoke([5, 6])
    assert keys.revoked() == {5, 6, 1 << 158}
    with pytest.raises(IdentityError, match="hetero keys rotate"):
        keys.revoke(range(10, 10 + MAX_REVOKED))
    keys.write(REVOKED, b"[1]")
    with pytest.raises(IdentityError, match="is damaged"):
        keys.revoked()


@pytest.mark.parametrize("found", [None, {}, [1], [""], ["x"], ["f" * 41], ["1"] * 1001])
def test_other_json_is_no_list_of_serial_numbers(found: object) -> None:
    with pytest.raises(ValueError):
        serials(found)
    assert serials(texts([255, 1])) == {255, 1}


def test_certificates_are_as_strict_readers_want_them(tmp_path: Path) -> None:
    made = x509.Authority.make()
    identity = Identity.of(made.cluster, 1)
    pem, serial = made.issue(identity)
    assert x509.bundle_problem(pem, identity) is None
    assert x509.serial_of(pem) == serial
    own, signer = x509.x509.load_pem_x509_certificates(pem)
    for certificate in (own, signer):
        assert certificate.not_valid_before_utc.year == 2020
        assert certificate.not_valid_after_utc.year == 2049
    assert own.issuer == signer.subject
    assert "another" not in str(x509.bundle_problem(pem, identity))
    other = x509.Authority.make()
    assert x509.problem_of(own, other.certificate, identity) is not None
    wrong = Identity.of(made.cluster, 2)
    assert "not hetero://" in str(x509.bundle_problem(pem, wrong))
    assert "damaged" in str(x509.bundle_problem(pem[:200], identity))
    again = x509.Authority.from_pem(made.to_pem())
    assert again.cluster == made.cluster
    mixed = x509.private_pem(other.key) + made.certificate_pem
    with pytest.raises(IdentityError, match="do not belong together"):
        x509.Authority.from_pem(mixed)
    with pytest.raises(IdentityError, match="is damaged"):
        x509.Authority.from_pem(b"no key")


def test_authority_is_made_once(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path / "keys")
    made, is_new = issuing.ensure_authority(keys)
    again, is_new_again = issuing.ensure_authority(keys)
    assert (is_new, is_new_again) == (True, False)
    assert again.cluster == made.cluster == keys.identity("local").cluster
    issuing.issue_missing(keys, [1, "two"])
    assert keys.processes() == ["local", "1", "two"]


def test_machine_that_has_joined_makes_no_authority_of_its_own(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys", 1)
    with pytest.raises(IdentityError, match="not the authority that made them"):
        issuing.ensure_authority(keys)
    with pytest.raises(IdentityError, match=r"there is no .*authority\.pem"):
        issuing.revoke(keys, 2)


def test_revoking_takes_back_all_that_a_process_got(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path / "keys")
    made, _ = issuing.ensure_authority(keys)
    numbers = {x509.serial_of(issuing.issue_pem(keys, made, 1)) for _ in range(2)}
    other = x509.serial_of(issuing.issue_pem(keys, made, 2))
    assert {int(entry.serial, 16) for entry in issuing.revoke(keys, 1)} == numbers
    assert keys.revoked() == numbers
    assert other not in keys.revoked()
    with pytest.raises(IdentityError, match="no certificate of worker 1 counts"):
        issuing.revoke(keys, 1)


def test_rotating_makes_a_new_cluster_and_names_who_has_to_join_again(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path / "keys")
    before, _ = issuing.ensure_authority(keys)
    issuing.issue_missing(keys, [1])
    issuing.issue_pem(keys, before, 7)
    issuing.revoke(keys, 7)
    assert issuing.rotate(keys) == ["7"]
    cluster = issuing.read_authority(keys).cluster
    assert cluster != before.cluster
    assert {keys.identity(process).cluster for process in ("local", 1)} == {cluster}
    assert keys.revoked() == frozenset()


def test_keys_of_islands_lie_beside_those_of_workers_and_know_nothing_of_them(
    tmp_path: Path,
) -> None:
    workers = KeyDirectory(tmp_path / "keys")
    islands = workers.of_islands
    own, _ = issuing.ensure_authority(workers)
    other, _ = issuing.ensure_authority(islands)
    assert own.cluster != other.cluster
    issuing.issue_missing(workers, ["garage"])
    issuing.issue_missing(islands, ["garage", "attic"])
    assert workers.processes() == ["local", "garage"]
    assert islands.processes() == ["local", "attic", "garage"]
    assert str(islands.identity("garage")) == "island garage"
    issuing.revoke(islands, "garage")
    assert workers.revoked() == frozenset()
    with pytest.raises(IdentityError, match="no certificate of island garage counts"):
        issuing.revoke(islands, "garage")
    islands.write("island-barn.pem", workers.read("worker-garage.pem"))
    with pytest.raises(IdentityError, match=r"island-barn\.pem is the key of worker garage"):
        islands.identity("barn")
    islands.write("island-barn.pem", b"nothing")
    with pytest.raises(IdentityError, match="does not say") as found:
        islands.identity("barn")
    assert "hetero invite --island NAME on the lighthouse's machine" in str(found.value.hint)
