"""A machine's keys: the directory `hetero_keys` beside the configuration.

    coordinator.pem, worker-ID.pem   a private key, its certificate, the authority's certificate
    authority.pem                    on the coordinator's machine: the key that signs certificates
    issued.json                      beside it: all certificates that were made
    revoked.json                     serial numbers of revoked certificates
    islands/                         the same for the cluster of coordinators that train one model:
                                     lighthouse.pem, island-NAME.pem
    .lock                            held by the process that changes any of these
    .gitignore                       keeps all of it out of repositories

No other user may read any of it. The first line of a key's file names its owner. Every writer holds
`locked`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from hetero_framework.core import timeouts
from hetero_framework.core.files import (
    WRITTEN,
    finish_replacing,
    is_half_replaced,
    replace_files,
    write_private,
)
from hetero_framework.core.identity import ISLANDS, STAR, ClusterKind, Identity, key_owner
from hetero_framework.errors import HeteroError, IdentityError, of_disk

_log = logging.getLogger(__name__)
FOLDER = "hetero_keys"
ISLANDS_FOLDER = "islands"
AUTHORITY = "authority.pem"
ISSUED = "issued.json"
REVOKED = "revoked.json"
LOCK = ".lock"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
MAX_REVOKED = 1000
"""Most revoked certificates: all are sent with every connection. A cluster with more of them needs
a new authority."""


@dataclass(frozen=True)
class KeyDirectory:
    """A directory of keys. Reading damaged files, or files open to others, raises IdentityError."""

    path: Path
    kind: ClusterKind = STAR
    around: Path | None = None
    """The directory that this one lies in, if it is an islands' directory."""

    @property
    def of_islands(self) -> KeyDirectory:
        """The directory for the cluster of islands that this machine takes part in."""
        return KeyDirectory(self.path / ISLANDS_FOLDER, ISLANDS, around=self.path)

    def bundle(self, process: int | str) -> Path:
        """The file with the key of "local", the keeper of the authority, or of a member."""
        member = key_owner(process)
        name = self.kind.keeper if process == "local" else f"{self.kind.member}-{member}"
        return self.path / f"{name}.pem"

    def has(self, process: int | str) -> bool:
        return self.holds(self.bundle(process).name)

    def holds(self, name: str) -> bool:
        """Whether there is a file of this name. Raises IdentityError when that cannot be told."""
        return name in self._names()

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _cannot("read", self.path, error) from error

    @property
    def again(self) -> str:
        """Hint for an unusable key here."""
        return f"have this machine invited again: {self.kind.invite}"

    @property
    def has_authority(self) -> bool:
        return self.holds(AUTHORITY)

    def processes(self) -> list[str]:
        """Owners of the keys here: "local" and names of members."""
        names, prefix = self._names(), f"{self.kind.member}-"
        owners = ["local"] if self.bundle("local").name in names else []
        members = [name for name in names if name.startswith(prefix) and name.endswith(".pem")]
        return owners + [name.removeprefix(prefix).removesuffix(".pem") for name in members]

    def identity(self, process: int | str) -> Identity:
        """The owner of a key here, by the first line of its file."""
        file = self.bundle(process)
        line = self.read(file.name).split(b"\n", 1)[0]
        try:
            identity = Identity.parse(line.decode("ascii", "replace").strip().removeprefix("# "))
        except ValueError as error:
            raise IdentityError(f"{file} does not say whose key it is", hint=self.again) from error
        if identity != Identity.of(identity.cluster, process, self.kind):
            raise IdentityError(f"{file} is the key of {identity}", hint="do not rename key files")
        return identity

    def read(self, name: str) -> bytes:
        """A file of the directory that only this user can read."""
        file = self.path / name
        try:
            for place, mode in ((self.path, "700"), (file, "600")):
                status = place.stat()
                if sys.platform == "win32":
                    continue
                if status.st_mode & _OTHERS:
                    text = f"other users of this machine can read {place}"
                    raise IdentityError(text, hint=f"chmod {mode} {place}")
                if status.st_uid not in (0, user := os.geteuid()):
                    raise IdentityError(
                        f"{place} belongs to user {status.st_uid}, and this is user {user}",
                        hint=f"if its content is yours all the same: chown {user} {place}",
                    )
            return file.read_bytes()
        except OSError as error:
            raise _cannot("read", file, error) from error

    # -- writing ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Within the block, only this process changes keys here and of islands. Makes the
        directory, and finishes or removes what a crash has left. Must not be nested. Raises
        IdentityError."""
        with _explained(self.path):
            for folder in self._folders():
                _prepare(folder, named=self._outer.name == FOLDER)
            lock = FileLock(self._outer / LOCK, mode=0o600)
            try:
                lock.acquire(timeout=timeouts.KEYS_S)
            except Timeout:
                raise IdentityError(
                    f"another process has been changing keys in {self._outer} for "
                    f"{timeouts.KEYS_S:.0f} s",
                    hint="let it end, or stop it",
                ) from None
        try:
            with _explained(self.path):
                finish_replacing(self.path)
                for left_over in self._unfinished():
                    left_over.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    @property
    def _outer(self) -> Path:
        return self.around or self.path

    def _folders(self) -> Iterator[Path]:
        return filter(None, (self.around, self.path))

    def settle(self) -> None:
        """Finish an interrupted `replace`, if there was one."""
        if is_half_replaced(self.path):
            with self.locked():
                pass

    def left_overs(self) -> list[Path]:
        """Leftovers of a crash, without effect; the next change removes them."""
        written = self.path / WRITTEN
        return [*([written] if written.exists() else []), *self._unfinished()]

    def _unfinished(self) -> list[Path]:
        names = self._names()
        return [self.path / n for n in names if n.startswith(".") and n.endswith(".tmp")]

    def write(self, name: str, content: bytes) -> Path:
        """Write a file that only this user can read. Raises IdentityError."""
        file = self.path / name
        with _explained(file):
            for folder in self._folders():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(file, content)
        return file

    def replace(self, contents: Mapping[str, bytes]) -> None:
        """Write several files in one step: after a crash there are all of the old ones or all of
        the new ones. Within `locked`. Raises IdentityError."""
        with _explained(self.path):
            replace_files(self.path, contents)

    def write_bundle(self, identity: Identity, pem: bytes) -> Path:
        assert identity.kind == self.kind
        return self.write(self.bundle(identity.process).name, bundle_text(identity, pem))

    def revoked(self) -> frozenset[int]:
        """Serial numbers of certificates that count no more."""
        if not self.holds(REVOKED):
            return frozenset()
        try:
            return serials(json.loads(self.read(REVOKED)))
        except ValueError as error:
            raise IdentityError(
                f"{self.path / REVOKED} is damaged: {error}",
                hint=f"copy it from the {self.kind.keeper}'s machine",
            ) from error

    def learn_revoked(self, numbers: frozenset[int]) -> None:
        """Add serial numbers that a peer reports as revoked."""
        if not numbers <= self.revoked():
            with self.locked():
                self.revoke(numbers)

    def revoke(self, numbers: Iterable[int]) -> None:
        """Add serial numbers to the revoked ones. Within `locked`."""
        before = self.revoked()
        every = before | frozenset(numbers)
        if len(every) > MAX_REVOKED:
            raise IdentityError(
                f"more than {MAX_REVOKED} certificates are revoked", hint="use hetero keys rotate"
            )
        if every != before:
            self.write(REVOKED, revoked_text(every))


def bundle_text(identity: Identity, pem: bytes) -> bytes:
    """The content of a key's file."""
    return f"# {identity.uri}\n".encode() + pem


def revoked_text(numbers: Iterable[int]) -> bytes:
    """The content of the file of revoked certificates."""
    return json.dumps(texts(numbers)).encode() + b"\n"


@contextlib.contextmanager
def _explained(place: Path) -> Iterator[None]:
    """Turns the disk's errors within the block into errors of this package."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter: no locks on this disk
        raise _cannot("write", place, error) from error


def _cannot(what: str, place: Path, error: Exception) -> HeteroError:
    reason = getattr(error, "strerror", None) or error
    return of_disk(error, IdentityError)(f"cannot {what} {place}: {reason}")


def _prepare(folder: Path, *, named: bool) -> None:
    """Make a directory of keys for this user alone, which no repository takes in. A directory that
    exists is closed to others if it has the usual name (`named`). Raises OSError, IdentityError."""
    made = not folder.is_dir()
    if made:
        folder.mkdir(mode=0o700, parents=True)
    elif sys.platform != "win32" and (mode := stat.S_IMODE(folder.stat().st_mode)) & _OTHERS:
        if not named:
            text = f"other users of this machine can read {folder} (mode {mode:o})"
            raise IdentityError(text, hint=f"chmod 700 {folder}")
        folder.chmod(0o700)
        _log.warning("other users could read %s (mode %o); its mode is 700 now", folder, mode)
    ignore = folder / ".gitignore"
    if (made or named) and not ignore.exists():
        write_private(ignore, b"*\n")


def texts(numbers: Iterable[int]) -> list[str]:
    """Serial numbers as JSON has them."""
    return [f"{number:x}" for number in sorted(numbers)]


def serials(values: object) -> frozenset[int]:
    """The inverse of `texts`. Raises ValueError."""
    if not isinstance(values, list) or len(values) > MAX_REVOKED:
        raise ValueError(f"not a list of at most {MAX_REVOKED} serial numbers")
    if not all(isinstance(text, str) and 0 < len(text) <= 40 for text in values):
        raise ValueError("a serial number has 1 to 40 digits")
    return frozenset(int(text, 16) for text in values)
