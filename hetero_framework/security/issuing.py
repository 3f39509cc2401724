"""What the authority's machine does with it: make keys, sign, keep the list, revoke, rotate."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from hetero_framework.core.fields import WorkerId
from hetero_framework.core.identity import Identity
from hetero_framework.errors import IdentityError
from hetero_framework.security import authority as x509
from hetero_framework.security.authority import Authority
from hetero_framework.security.keys import AUTHORITY, ISSUED, REVOKED, KeyDirectory


@dataclass(frozen=True)
class Issued:
    """One certificate that was made: for "local" or a member, with which serial number, when."""

    process: str
    serial: str
    made: str


def read_authority(keys: KeyDirectory) -> Authority:
    """Raises IdentityError when it is not here."""
    if not keys.has_authority:
        raise IdentityError(
            f"there is no {keys.path / AUTHORITY} on this machine",
            hint="the authority is on the machine where `hetero init` or the first `hetero invite` "
            "was run; --keys says where its keys are",
        )
    return Authority.from_pem(keys.read(AUTHORITY))


def ensure_authority(keys: KeyDirectory) -> tuple[Authority, bool]:
    """The authority, with its keeper's own key; whether they had to be made."""
    if keys.has_authority:
        found = read_authority(keys)
        if not keys.has("local"):
            issue(keys, found, "local")
        return found, False
    if keys.has("local") or keys.processes():
        raise IdentityError(
            f"{keys.path} has keys, but not the authority that made them",
            hint="invite on the machine that has it, or begin anew in another directory (--keys)",
        )
    made = Authority.make()
    keys.write(AUTHORITY, made.to_pem())
    issue(keys, made, "local")
    return made, True


def issue(keys: KeyDirectory, authority: Authority, process: WorkerId) -> None:
    """Make a key here for a process of this machine."""
    identity = Identity.of(authority.cluster, process, keys.kind)
    keys.write_bundle(identity, issue_pem(keys, authority, process))


def issue_pem(keys: KeyDirectory, authority: Authority, process: WorkerId) -> bytes:
    """A new key with its certificates, for a process of any machine."""
    pem, serial = authority.issue(Identity.of(authority.cluster, process, keys.kind))
    _note(keys, process, serial)
    return pem


def issue_missing(keys: KeyDirectory, processes: Iterable[WorkerId]) -> None:
    """Make keys for those processes of this machine that have none."""
    missing = [process for process in processes if not keys.has(process)]
    if missing and keys.has_authority:
        authority = read_authority(keys)
        for process in missing:
            issue(keys, authority, process)


def sign(keys: KeyDirectory, authority: Authority, process: WorkerId, request: bytes) -> bytes:
    """The certificate, PEM, for a signing request. Raises ValueError for one that is none."""
    key = x509.requested_key(request)
    certificate = authority.sign(Identity.of(authority.cluster, process, keys.kind), key)
    _note(keys, process, certificate.serial_number)
    return x509.certificate_pem(certificate)


def issued(keys: KeyDirectory) -> list[Issued]:
    """All that was made by this authority, the oldest first."""
    if not (keys.path / ISSUED).exists():
        return []
    try:
        return [Issued(**entry) for entry in json.loads(keys.read(ISSUED))]
    except (ValueError, TypeError) as error:
        raise IdentityError(f"{keys.path / ISSUED} is damaged: {error}") from error


def revoke(keys: KeyDirectory, process: WorkerId) -> list[Issued]:
    """Take back all certificates of a process; which. Raises IdentityError when it has none."""
    read_authority(keys)
    gone = keys.revoked()
    found = [
        entry
        for entry in issued(keys)
        if entry.process == str(process) and int(entry.serial, 16) not in gone
    ]
    if not found:
        raise IdentityError(
            f"no certificate of {keys.kind.called(process)} counts at present",
            hint="hetero keys list shows them",
        )
    keys.revoke(int(entry.serial, 16) for entry in found)
    return found


def rotate(keys: KeyDirectory) -> list[str]:
    """A new authority in place of the old one, which nobody accepts any more who has joined the new
    one; new keys for the processes whose keys are here. The members elsewhere that have to join
    again."""
    read_authority(keys)
    before = keys.processes()
    elsewhere = {entry.process for entry in issued(keys)} - set(before) - {"local"}
    made = Authority.make()
    for name in (ISSUED, REVOKED):
        (keys.path / name).unlink(missing_ok=True)
    keys.write(AUTHORITY, made.to_pem())
    for process in dict.fromkeys(["local", *before]):
        issue(keys, made, process)
    return sorted(elsewhere)


def _note(keys: KeyDirectory, process: WorkerId, serial: int) -> None:
    """Before the certificate is handed out: one that is not on the list cannot be revoked."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    entries = [*issued(keys), Issued(str(process), f"{serial:x}", now)]
    listed: list[dict[str, Any]] = [asdict(entry) for entry in entries]
    keys.write(ISSUED, json.dumps(listed, indent=1).encode() + b"\n")
