"""What a process shows on its connections, and whom it lets in.

With keys every connection is TLS with certificates on both sides. Without, only addresses are used
that nobody but this machine can reach, unless the user said otherwise on the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hetero_framework.config import Config
from hetero_framework.core import addresses, tls
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.identity import Identity
from hetero_framework.core.stream import Stream
from hetero_framework.core.tls import Certificate
from hetero_framework.errors import IdentityError
from hetero_framework.security.keys import FOLDER, KeyDirectory, serials, texts

_log = logging.getLogger(__name__)
_HOW = (
    "make keys: `hetero init` or `hetero invite ID` on the coordinator's machine, then the line "
    "that it prints on the worker's; --insecure-plaintext on all machines does without"
)


class Access(Protocol):
    """What a stream has to pass before anything is read from it. Both methods raise IdentityError
    for who is wrong and OSError for what may pass, and have closed the stream then."""

    @property
    def encrypts(self) -> bool:
        """Whether `accepted` takes its time."""

    def check_address(self, host: str, what: str) -> None:
        """Raise IdentityError when nothing may be sent to or taken at this address."""

    def arguments(self, processes: Iterable[WorkerId]) -> list[str]:
        """For the command line of workers of this machine: to use the same. Those that have no key
        get one where the authority is here."""

    def dialled(self, stream: Stream, process: WorkerId) -> Stream:
        """The stream to use with the worker that was dialled."""

    def accepted(self, stream: Stream) -> tuple[Stream, Identity | None]:
        """The stream to use with who dialled us, and who that is, if there are keys."""


@dataclass(frozen=True)
class Plaintext:
    """Without keys; `everywhere`: also where others can listen and connect."""

    everywhere: bool = False
    encrypts: ClassVar[bool] = False

    def check_address(self, host: str, what: str) -> None:
        own = addresses.is_loopback(host) or addresses.is_loopback_by_name(host)
        if not (own or self.everywhere):
            raise IdentityError(
                f"{what} is at {host}, where others reach it, and there is no key for that here",
                hint=_HOW,
            )

    def arguments(self, processes: Iterable[WorkerId]) -> list[str]:
        return ["--insecure-plaintext"] if self.everywhere else []

    def dialled(self, stream: Stream, process: WorkerId) -> Stream:
        return stream

    def accepted(self, stream: Stream) -> tuple[Stream, Identity | None]:
        return stream, None


LOOPBACK_ONLY = Plaintext()


@dataclass(frozen=True)
class Keyed:
    """With the key of `process` ("local": the coordinator). All of it is read for each connection,
    so that a new key or a revocation counts from the next one on. `workers` may come in."""

    keys: KeyDirectory
    process: WorkerId
    workers: Collection[WorkerId]
    encrypts: ClassVar[bool] = True

    def check_address(self, host: str, what: str) -> None:
        pass

    def arguments(self, processes: Iterable[WorkerId]) -> list[str]:
        if self.keys.has_authority:
            from hetero_framework.security.issuing import issue_missing

            issue_missing(self.keys, processes)
        return ["--keys", str(self.keys.path)]

    def dialled(self, stream: Stream, process: WorkerId) -> Stream:
        own, revoked = self.keys.identity(self.process), self.keys.revoked()
        expected = Identity.of(own.cluster, process)

        def admit(found: Certificate, note: dict[str, Any]) -> str | None:
            if found.identity != expected:
                return _other(found.identity, expected)
            self._learn(found.identity, note)
            return _REVOKED if found.serial in self.keys.revoked() else None

        made = tls.context(self.keys.bundle(self.process), server=False)
        return tls.dial(stream, made, admit, {"revoked": texts(revoked)}, str(expected))

    def accepted(self, stream: Stream) -> tuple[Stream, Identity | None]:
        own = self.keys.identity(self.process)

        def admit(found: Certificate, note: dict[str, Any]) -> str | None:
            who = found.identity
            if found.serial in self.keys.revoked():
                return _REVOKED
            if who.cluster != own.cluster:
                return _other(who, own)
            self._learn(who, note)
            if who.worker is not None and who.worker not in map(str, self.workers):
                known = ", ".join(map(str, self.workers))
                return f"{who} is not in this machine's configuration (workers: {known})"
            return None

        made = tls.context(self.keys.bundle(self.process), server=True)
        revoked = {"revoked": texts(self.keys.revoked())}
        encrypted, found = tls.accept(stream, made, admit, revoked)
        return encrypted, found.identity

    def _learn(self, who: Identity, note: dict[str, Any]) -> None:
        """Which certificates count no more the coordinator knows."""
        if who.worker is None:
            self.keys.revoke(serials(note.get("revoked", [])))


_REVOKED = "its certificate was revoked (hetero keys revoke)"


def _other(found: Identity, expected: Identity) -> str:
    if found.cluster != expected.cluster:
        return f"it belongs to cluster {found.cluster}, not {expected.cluster}"
    return f"its certificate is that of {found}, expected {expected}"


@dataclass(frozen=True)
class KeyOptions:
    """From the command line: `directory` instead of the one beside the configuration."""

    directory: Path | None = None
    insecure: bool = False


def key_directory(config: Config, options: KeyOptions | None = None) -> KeyDirectory:
    """Where this machine's keys for this configuration are, if it has any."""
    directory = options.directory if options is not None else None
    return KeyDirectory((directory or config.base_dir / FOLDER).absolute())


def access_of(config: Config, process: WorkerId, options: KeyOptions | None = None) -> Access:
    """What "local", the coordinator, or a worker uses. Raises IdentityError when it needs keys and
    has none, or they are damaged."""
    options = options or KeyOptions()
    if options.insecure:
        _log.warning(
            "--insecure-plaintext: NOTHING IS ENCRYPTED AND NOBODY IS ASKED WHO IT IS; whoever "
            "reaches a port of this run can read its data and give orders"
        )
        return Plaintext(everywhere=True)
    keys = key_directory(config, options)
    if keys.has(process):
        keys.identity(process)
        for server in (False, True):
            tls.context(keys.bundle(process), server=server)
        return Keyed(keys, process, [worker.id for worker in config.workers])
    who = "the coordinator" if process == "local" else f"worker {process}"
    if options.directory is not None:
        raise IdentityError(f"there is no {keys.bundle(process)}, the key of {who}", hint=_HOW)
    plain = LOOPBACK_ONLY
    own = [config.worker(process)] if process != "local" else config.planned_workers
    for worker in own:
        # Who dials shows where it is only when it comes; what counts is where it dials.
        host = config.coordinator.ip if worker.dials else worker.ip
        plain.check_address(host, "the coordinator" if worker.dials else f"worker {worker.id}")
    return plain
