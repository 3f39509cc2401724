"""Key directories: refused and kept files, and the operations of the authority's machine."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from hetero_framework.core import files, timeouts
from hetero_framework.core.identity import Identity
from hetero_framework.errors import IdentityError, ResourceError
from hetero_framework.security import authority as x509
from hetero_framework.security import certificates
from hetero_framework.security.keys import LOCK, MAX_REVOKED, REVOKED, KeyDirectory, serials, texts
from tests.cases import raising
from tests.certificates import keys_of

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


@posix
def test_keys_are_for_this_user_alone(tmp_path):
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
def test_key_that_others_can_reach_is_refused_with_the_chmod(place, mode, tmp_path):
    keys = keys_of(tmp_path / "keys", 1)
    wrong = keys.bundle(1) if place == "the file" else keys.path
    wrong.chmod(mode | 0o700 if place == "the directory" else mode)
    with pytest.raises(IdentityError, match="other users of this machine can read") as found:
        keys.identity(1)
    assert found.value.hint == f"chmod {'600' if place == 'the file' else '700'} {wrong}"
    assert found.value.exit_code == 3


def test_key_under_another_name_is_refused(tmp_path):
    keys = keys_of(tmp_path / "keys", 1)
    keys.bundle(1).rename(keys.bundle(2))
    with pytest.raises(IdentityError, match=r"worker-2\.pem is the key of worker 1"):
        keys.identity(2)
    keys.write("worker-3.pem", b"\xff\xff")
    with pytest.raises(IdentityError, match="does not say whose key it is"):
        keys.identity(3)
    with pytest.raises(IdentityError, match=r"cannot read .*worker-4\.pem: No such file"):
        keys.identity(4)


def test_revoked_numbers_stay_and_are_bounded(tmp_path):
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
def test_other_json_is_no_list_of_serial_numbers(found):
    with pytest.raises(ValueError):
        serials(found)
    assert serials(texts([255, 1])) == {255, 1}


def test_certificates_pass_strict_verification(tmp_path):
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


@pytest.mark.parametrize("host", ["box.local", "192.0.2.1", "2001:db8::1"])
def test_a_certificate_of_a_host_is_of_no_process(host):
    made = x509.Authority.make()
    pem = made.issue_for_host(host)
    own = x509.x509.load_pem_x509_certificates(pem)[0]
    names = own.extensions.get_extension_for_class(x509.x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [host]
    assert "names nobody" in str(x509.bundle_problem(pem, Identity.of(made.cluster, 1)))


def test_authority_is_made_once(tmp_path):
    keys = KeyDirectory(tmp_path / "keys")
    made, is_new = certificates.ensure_authority(keys)
    again, is_new_again = certificates.ensure_authority(keys)
    assert (is_new, is_new_again) == (True, False)
    assert again.cluster == made.cluster == keys.identity("local").cluster
    certificates.issue_missing(keys, [1, "two"])
    assert keys.processes() == ["local", "1", "two"]


def test_machine_that_has_joined_makes_no_authority_of_its_own(tmp_path):
    keys = keys_of(tmp_path / "keys", 1)
    with pytest.raises(IdentityError, match="not the authority that made them"):
        certificates.ensure_authority(keys)
    with pytest.raises(IdentityError, match=r"there is no .*authority\.pem"):
        certificates.revoke(keys, 2)


def test_revoking_takes_back_all_that_a_process_got(tmp_path):
    keys = KeyDirectory(tmp_path / "keys")
    made, _ = certificates.ensure_authority(keys)
    numbers = {x509.serial_of(certificates.issue_pem(keys, made, 1)) for _ in range(2)}
    other = x509.serial_of(certificates.issue_pem(keys, made, 2))
    assert {int(entry.serial, 16) for entry in certificates.revoke(keys, 1)} == numbers
    assert keys.revoked() == numbers
    assert other not in keys.revoked()
    with pytest.raises(IdentityError, match="no certificate of worker 1 counts"):
        certificates.revoke(keys, 1)


def test_rotating_makes_a_new_cluster_and_lists_members_to_rejoin(tmp_path):
    keys = KeyDirectory(tmp_path / "keys")
    before, _ = certificates.ensure_authority(keys)
    certificates.issue_missing(keys, [1])
    certificates.issue_pem(keys, before, 7)
    certificates.revoke(keys, 7)
    assert certificates.rotate(keys) == ["7"]
    cluster = certificates.read_authority(keys).cluster
    assert cluster != before.cluster
    assert {keys.identity(process).cluster for process in ("local", 1)} == {cluster}
    assert keys.revoked() == frozenset()


def test_keys_of_islands_are_independent_of_those_of_workers(tmp_path):
    workers = KeyDirectory(tmp_path / "keys")
    islands = workers.of_islands
    own, _ = certificates.ensure_authority(workers)
    other, _ = certificates.ensure_authority(islands)
    assert own.cluster != other.cluster
    certificates.issue_missing(workers, ["garage"])
    certificates.issue_missing(islands, ["garage", "attic"])
    assert workers.processes() == ["local", "garage"]
    assert islands.processes() == ["local", "attic", "garage"]
    assert str(islands.identity("garage")) == "island garage"
    certificates.revoke(islands, "garage")
    assert workers.revoked() == frozenset()
    with pytest.raises(IdentityError, match="no certificate of island garage counts"):
        certificates.revoke(islands, "garage")
    islands.write("island-barn.pem", workers.read("worker-garage.pem"))
    with pytest.raises(IdentityError, match=r"island-barn\.pem is the key of worker garage"):
        islands.identity("barn")
    islands.write("island-barn.pem", b"nothing")
    with pytest.raises(IdentityError, match="does not say") as found:
        islands.identity("barn")
    assert "hetero invite --island NAME on the lighthouse's machine" in str(found.value.hint)


def rotated_in_another_process(keys: KeyDirectory, ready: Path) -> subprocess.Popen[bytes]:
    """Rotates again and again until it is killed; `ready` is there after the first time."""
    program = (
        "import sys; from pathlib import Path\n"
        "from hetero_framework.security import certificates, keys\n"
        "while True:\n"
        "    certificates.rotate(keys.KeyDirectory(Path(sys.argv[1]))); Path(sys.argv[2]).touch()\n"
    )
    return subprocess.Popen([sys.executable, "-c", program, str(keys.path), str(ready)])


def test_keys_of_islands_survive_repeated_rotations_of_worker_keys(tmp_path):
    keys, ready = KeyDirectory(tmp_path / "keys"), tmp_path / "ready"
    certificates.ensure_authority(keys)
    made, _ = certificates.ensure_authority(keys.of_islands)
    with rotated_in_another_process(keys, ready) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.01)
            serials = [
                x509.serial_of(certificates.issue_pem(keys.of_islands, made, n)) for n in "abcde"
            ]
        finally:
            process.kill()
    listed = [int(entry.serial, 16) for entry in certificates.issued(keys.of_islands)]
    assert listed[1:] == serials


def test_certificates_that_several_processes_issue_at_once_are_all_listed(tmp_path):
    """r10: one that is not listed cannot be revoked."""
    keys = KeyDirectory(tmp_path / "keys")
    certificates.ensure_authority(keys)
    program = (
        "import sys; from pathlib import Path\n"
        "from hetero_framework.security import authority, certificates, keys\n"
        "here = keys.KeyDirectory(Path(sys.argv[1]))\n"
        "made = certificates.read_authority(here)\n"
        "for _ in range(8):\n"
        "    print(authority.serial_of(certificates.issue_pem(here, made, 2)), flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(keys.path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    made = {
        int(line) for process in processes for line in process.communicate(timeout=60)[0].split()
    }
    assert len(made) == 24
    assert made == {int(e.serial, 16) for e in certificates.issued(keys) if e.process == "2"}
    certificates.revoke(keys, 2)
    assert keys.revoked() == made


def test_process_that_keeps_the_lock_is_waited_for_and_named(tmp_path, monkeypatch):
    keys = KeyDirectory(tmp_path / "keys")
    certificates.ensure_authority(keys)
    monkeypatch.setattr(timeouts, "KEYS_S", 0.1)
    with FileLock(keys.path / LOCK):
        for change in (
            lambda: certificates.rotate(keys),
            lambda: certificates.revoke(keys, "local"),
            lambda: certificates.issue_missing(keys, [1]),
            lambda: keys.learn_revoked(frozenset([1])),
            lambda: certificates.ensure_authority(keys.of_islands),
        ):
            with pytest.raises(IdentityError, match="another process has been changing keys"):
                change()


def test_disk_that_is_full_leaves_the_revoked_machine_revoked(tmp_path, monkeypatch):
    """r01, r12."""
    keys = KeyDirectory(tmp_path / "keys")
    made, _ = certificates.ensure_authority(keys)
    certificates.issue_pem(keys, made, 2)
    certificates.revoke(keys, 2)
    before = {file.name: file.read_bytes() for file in keys.path.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(ResourceError, match=r"cannot write .*keys: No space left"):
            certificates.rotate(keys)
    assert {file.name: file.read_bytes() for file in keys.path.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["keys"]
    with pytest.raises(IdentityError, match="no certificate of worker 2 counts"):
        certificates.revoke(keys, 2)
    certificates.rotate(keys)
    assert keys.revoked() == frozenset()


def test_keys_that_are_half_replaced_are_finished_by_the_next_user(tmp_path, monkeypatch):
    keys = KeyDirectory(tmp_path / "keys")
    made, _ = certificates.ensure_authority(keys)
    certificates.issue_pem(keys, made, 2)
    certificates.revoke(keys, 2)
    with monkeypatch.context() as patched:
        patched.setattr(files, "finish_replacing", lambda directory: None)
        certificates.rotate(keys)
    assert certificates.read_authority(keys).cluster == made.cluster
    assert keys.revoked()
    keys.settle()
    cluster = certificates.read_authority(keys).cluster
    assert cluster != made.cluster
    assert keys.identity("local").cluster == cluster
    assert keys.revoked() == frozenset()
    assert not (keys.path / "rotated").exists()


@posix
def test_directory_may_be_a_link(tmp_path):
    (tmp_path / "disk" / "k").mkdir(mode=0o700, parents=True)
    (tmp_path / "hetero_keys").symlink_to(tmp_path / "disk" / "k")
    keys = KeyDirectory(tmp_path / "hetero_keys")
    before, _ = certificates.ensure_authority(keys)
    certificates.rotate(keys)
    assert (tmp_path / "hetero_keys").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["k"]
    assert certificates.read_authority(keys).cluster != before.cluster


@posix
@pytest.mark.parametrize("umask", [0, 0o022, 0o777 & ~0o700])
def test_every_directory_that_is_made_is_for_this_user_alone_and_ignored_by_git(umask, tmp_path):
    """r07: the first key may be one of islands."""
    keys = KeyDirectory(tmp_path / "hetero_keys")
    before = os.umask(umask)
    try:
        certificates.ensure_authority(keys.of_islands)
    finally:
        os.umask(before)
    for folder in (keys.path, keys.of_islands.path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / ".gitignore").read_text() == "*\n"
    certificates.ensure_authority(keys)
    assert keys.identity("local").keeps


@posix
def test_directory_that_others_can_read_is_closed_to_them_or_refused(tmp_path, logged):
    usual, other = KeyDirectory(tmp_path / "hetero_keys"), KeyDirectory(tmp_path / "mine")
    for keys in (usual, other):
        keys.path.mkdir()
        keys.path.chmod(0o755)
    certificates.ensure_authority(usual.of_islands)
    assert stat.S_IMODE(usual.path.stat().st_mode) == 0o700
    assert logged == [f"other users could read {usual.path} (mode 755); its mode is 700 now"]
    assert (usual.path / ".gitignore").exists()
    with pytest.raises(IdentityError, match=r"can read .*mine \(mode 755\)") as found:
        certificates.ensure_authority(other)
    assert found.value.hint == f"chmod 700 {other.path}"
    assert not list(other.path.iterdir())


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
@pytest.mark.parametrize("place", ["the file", "the directory"])
def test_key_that_another_user_owns_is_refused(place, tmp_path):
    keys = keys_of(tmp_path / "keys", 1)
    wrong = keys.bundle(1) if place == "the file" else keys.path
    os.chown(wrong, 12345, -1)
    with pytest.raises(IdentityError, match="belongs to user 12345, and this is user 0"):
        keys.identity(1)


def test_authority_that_was_rotated_meanwhile_signs_nothing(tmp_path):
    keys = KeyDirectory(tmp_path / "keys")
    made, _ = certificates.ensure_authority(keys)
    certificates.rotate(keys)
    with pytest.raises(IdentityError, match="the authority was changed"):
        certificates.issue_pem(keys, made, 3)
    assert [entry.process for entry in certificates.issued(keys)] == ["local"]
