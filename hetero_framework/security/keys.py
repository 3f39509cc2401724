"""A machine's keys: the directory `hetero_keys` beside the configuration.

    coordinator.pem, worker-ID.pem   a private key, its certificate, the authority's certificate
    authority.pem                    on the coordinator's machine: what makes certificates
    issued.json                      beside it: all certificates that were made
    revoked.json                     serial numbers that count no more
    islands/                         the same of another cluster, that of the coordinators which
                                     train one model: lighthouse.pem, island-NAME.pem

No other user may read any of it. The first line of a key's file says whose it is.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hetero_framework.core.files import rename, sync_directory
from hetero_framework.core.identity import ISLANDS, STAR, Identity, Kind
from hetero_framework.errors import IdentityError

FOLDER = "hetero_keys"
ISLANDS_FOLDER = "islands"
AUTHORITY = "authority.pem"
ISSUED = "issued.json"
REVOKED = "revoked.json"
MAX_REVOKED = 1000
"""So many are sent with every connection; a cluster with more of them takes a new authority."""


@dataclass(frozen=True)
class KeyDirectory:
    """What is read raises IdentityError where it is damaged or readable by other users."""

    path: Path
    kind: Kind = STAR

    @property
    def of_islands(self) -> KeyDirectory:
        """The one for the cluster of islands that this machine takes part in."""
        return KeyDirectory(self.path / ISLANDS_FOLDER, ISLANDS)

    def bundle(self, process: int | str) -> Path:
        """Where the key of "local", who keeps the authority, or of a member is."""
        name = self.kind.keeper if process == "local" else f"{self.kind.member}-{process}"
        return self.path / f"{name}.pem"

    def has(self, process: int | str) -> bool:
        return self.bundle(process).is_file()

    @property
    def again(self) -> str:
        """What helps when a key here is no good."""
        return f"have this machine invited again: {self.kind.invite}"

    @property
    def has_authority(self) -> bool:
        return (self.path / AUTHORITY).is_file()

    def processes(self) -> list[str]:
        """Whose keys are here: "local" and names of members."""
        found = ["local"] if self.has("local") else []
        names = sorted(file.stem for file in self.path.glob(f"{self.kind.member}-*.pem"))
        return found + [name.removeprefix(f"{self.kind.member}-") for name in names]

    def identity(self, process: int | str) -> Identity:
        """Who a key here is, by its first line."""
        file = self.bundle(process)
        line = self.read(file.name).split(b"\n", 1)[0]
        try:
            found = Identity.parse(line.decode("ascii", "replace").strip().removeprefix("# "))
        except ValueError as error:
            raise IdentityError(f"{file} does not say whose key it is", hint=self.again) from error
        if found != Identity.of(found.cluster, process, self.kind):
            raise IdentityError(f"{file} is the key of {found}", hint="do not rename key files")
        return found

    def read(self, name: str) -> bytes:
        """A file of the directory that only this user can read."""
        file = self.path / name
        try:
            for place, mode in ((self.path, "700"), (file, "600")):
                others = place.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
                if others and sys.platform != "win32":
                    text = f"other users of this machine can read {place}"
                    raise IdentityError(text, hint=f"chmod {mode} {place}")
            return file.read_bytes()
        except OSError as error:
            raise IdentityError(f"cannot read {file}: {error.strerror or error}") from error

    def write(self, name: str, content: bytes) -> Path:
        """Write a file that only this user can read. Raises IdentityError."""
        file = self.path / name
        unfinished = file.with_name(f".{name}.{os.urandom(4).hex()}.tmp")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with os.fdopen(os.open(unfinished, flags, 0o600), "wb") as output:
                output.write(content)
                output.flush()
                os.fsync(output.fileno())
            rename(unfinished, file)
            sync_directory(self.path)
        except OSError as error:
            raise IdentityError(f"cannot write {file}: {error.strerror or error}") from error
        finally:
            unfinished.unlink(missing_ok=True)
        return file

    def write_bundle(self, identity: Identity, pem: bytes) -> Path:
        assert identity.kind == self.kind
        return self.write(self.bundle(identity.process).name, f"# {identity.uri}\n".encode() + pem)

    def revoked(self) -> frozenset[int]:
        """Serial numbers of certificates that count no more."""
        if not (self.path / REVOKED).exists():
            return frozenset()
        try:
            return serials(json.loads(self.read(REVOKED)))
        except ValueError as error:
            raise IdentityError(
                f"{self.path / REVOKED} is damaged: {error}",
                hint=f"copy it from the {self.kind.keeper}'s machine",
            ) from error

    def revoke(self, numbers: Iterable[int]) -> None:
        """Add to the revoked ones."""
        before = self.revoked()
        every = before | frozenset(numbers)
        if len(every) > MAX_REVOKED:
            raise IdentityError(
                f"more than {MAX_REVOKED} certificates are revoked", hint="use hetero keys rotate"
            )
        if every != before:
            self.write(REVOKED, json.dumps(texts(every)).encode() + b"\n")


def texts(numbers: Iterable[int]) -> list[str]:
    """Serial numbers as JSON has them."""
    return [f"{number:x}" for number in sorted(numbers)]


def serials(found: object) -> frozenset[int]:
    """What `texts` made. Raises ValueError."""
    if not isinstance(found, list) or len(found) > MAX_REVOKED:
        raise ValueError(f"not a list of at most {MAX_REVOKED} serial numbers")
    if not all(isinstance(text, str) and 0 < len(text) <= 40 for text in found):
        raise ValueError("a serial number has 1 to 40 digits")
    return frozenset(int(text, 16) for text in found)
