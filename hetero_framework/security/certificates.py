"""Operations of the authority: make keys, sign, keep the list, revoke, rotate."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from hetero_framework.core.fields import WorkerId
from hetero_framework.core.identity import Identity
from hetero_framework.errors import IdentityError
from hetero_framework.security import authority as x509
from hetero_framework.security.authority import Authority
from hetero_framework.security.keys import (
    AUTHORITY,
    ISSUED,
    REVOKED,
    KeyDirectory,
    bundle_text,
    revoked_text,
)


@dataclass(frozen=True)
class Issued:
    """One certificate that was made: for "local" or a member, its serial number and date, and the
    cluster of its authority (absent in lists of older versions)."""

    process: str
    serial: str
    made: str
    cluster: str = ""

    @classmethod
    def now(cls, identity: Identity, serial: int) -> Issued:
        made = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(identity.process, f"{serial:x}", made, identity.cluster)


def read_authority(keys: KeyDirectory) -> Authority:
    """The authority. Raises IdentityError when it is not on this machine."""
    if not keys.has_authority:
        raise IdentityError(
            f"there is no {keys.path / AUTHORITY} on this machine",
            hint="the authority is on the machine where `hetero init` or the first `hetero invite` "
            "was run; --keys says where its keys are",
        )
    return Authority.from_pem(keys.read(AUTHORITY))


def ensure_authority(keys: KeyDirectory) -> tuple[Authority, bool]:
    """The authority, made with its keeper's key if it is absent, and whether it was made."""
    with keys.locked():
        if new := not keys.has_authority:
            if keys.processes():
                raise IdentityError(
                    f"{keys.path} has keys, but not the authority that made them",
                    hint="invite on the machine that has it, or begin anew in another directory "
                    "(--keys)",
                )
            # Both or neither: an authority alone may be one whose keys were lost.
            keys.replace(_new_set(keys, Authority.make(), ["local"]))
        authority = read_authority(keys)
        if not keys.has("local"):
            _issue_here(keys, authority, "local")
    return authority, new


def issue_pem(keys: KeyDirectory, authority: Authority, process: WorkerId) -> bytes:
    """A new key with its certificates, for a process of any machine."""
    identity = Identity.of(authority.cluster, process, keys.kind)
    pem, serial = authority.issue(identity)
    with keys.locked():
        _note(keys, identity, serial)
    return pem


def issue_missing(keys: KeyDirectory, processes: Iterable[WorkerId]) -> None:
    """Make keys for those processes of this machine that have none."""
    wanted = [process for process in processes if not keys.has(process)]
    if wanted and keys.has_authority:
        with keys.locked():
            authority = read_authority(keys)
            for process in wanted:
                if not keys.has(process):
                    _issue_here(keys, authority, process)


def sign(keys: KeyDirectory, authority: Authority, process: WorkerId, request: bytes) -> bytes:
    """The certificate (PEM) for a signing request. Raises ValueError for an invalid request, and
    IdentityError when `authority` is not the authority any more."""
    key = x509.requested_key(request)
    identity = Identity.of(authority.cluster, process, keys.kind)
    certificate = authority.sign(identity, key)
    with keys.locked():
        _note(keys, identity, certificate.serial_number)
    return x509.certificate_pem(certificate)


def issued(keys: KeyDirectory) -> list[Issued]:
    """All certificates of this authority, the oldest first."""
    if not keys.holds(ISSUED):
        return []
    try:
        entries = [Issued(**entry) for entry in json.loads(keys.read(ISSUED))]
        return [entry for entry in entries if int(entry.serial, 16) >= 0]
    except (ValueError, TypeError) as error:
        raise IdentityError(
            f"{keys.path / ISSUED} is damaged: {error}",
            hint="without it no certificate can be taken back by name: delete it, then hetero keys "
            "rotate",
        ) from error


def revoke(keys: KeyDirectory, process: WorkerId) -> list[Issued]:
    """Revoke all certificates of a process, and return them. "local", the keeper of the authority,
    gets a new key. Raises IdentityError when there are none."""
    with keys.locked():
        authority, gone = read_authority(keys), keys.revoked()
        entries = [
            entry
            for entry in issued(keys)
            if entry.process == str(process) and int(entry.serial, 16) not in gone
        ]
        if not entries:
            raise IdentityError(
                f"no certificate of {keys.kind.called(process)} counts at present",
                hint="hetero keys list shows them",
            )
        if process == "local":
            _issue_here(keys, authority, process)  # first: the keeper always has a key that counts
        keys.revoke(int(entry.serial, 16) for entry in entries)
    return entries


def rotate(keys: KeyDirectory) -> list[str]:
    """Make a new authority, and new keys for the processes whose keys are here, in one step or not
    at all. Members of the new cluster refuse those of the old one. Returns the processes elsewhere
    that have to join again."""
    with keys.locked():
        read_authority(keys)
        before = keys.processes()
        elsewhere = {entry.process for entry in issued(keys)} - set(before) - {"local"}
        keys.replace(_new_set(keys, Authority.make(), dict.fromkeys(["local", *before])))
    return sorted(elsewhere)


def _new_set(
    keys: KeyDirectory, authority: Authority, processes: Iterable[WorkerId]
) -> dict[str, bytes]:
    """All files of a new authority, the list of revoked certificates last: while there are old
    keys, the list that they need is there, too."""
    files, entries = {}, []
    for process in processes:
        identity = Identity.of(authority.cluster, process, keys.kind)
        pem, serial = authority.issue(identity)
        files[keys.bundle(process).name] = bundle_text(identity, pem)
        entries.append(Issued.now(identity, serial))
    files |= {AUTHORITY: authority.to_pem(), ISSUED: _issued_text(entries)}
    return files | ({REVOKED: revoked_text([])} if keys.holds(REVOKED) else {})


def _issue_here(keys: KeyDirectory, authority: Authority, process: WorkerId) -> None:
    """Make a key here for a process of this machine. Within `locked`."""
    identity = Identity.of(authority.cluster, process, keys.kind)
    pem, serial = authority.issue(identity)
    _note(keys, identity, serial)
    keys.write_bundle(identity, pem)


def _note(keys: KeyDirectory, identity: Identity, serial: int) -> None:
    """List a certificate before it is handed out: an unlisted one cannot be revoked. Within
    `locked`. Raises IdentityError when another authority has been made since."""
    if (now := read_authority(keys).cluster) != identity.cluster:
        raise IdentityError(
            f"the authority was changed: it is that of cluster {now}, not {identity.cluster}",
            hint="invite again (hetero invite)",
        )
    keys.write(ISSUED, _issued_text([*issued(keys), Issued.now(identity, serial)]))


def _issued_text(entries: Iterable[Issued]) -> bytes:
    listed: list[dict[str, Any]] = [asdict(entry) for entry in entries]
    return json.dumps(listed, indent=1).encode() + b"\n"
