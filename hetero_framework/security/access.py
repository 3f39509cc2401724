"""Credentials that a process shows on its connections, and the peers that it admits.

With keys every connection is TLS with certificates on both sides. Without them, only addresses that
no other machine can reach are used, unless the command line says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hetero_framework.config import Config
from hetero_framework.core import addresses, tls
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.identity import Identity, key_owner
from hetero_framework.core.stream import Stream
from hetero_framework.core.tls import Certificate
from hetero_framework.errors import IdentityError
from hetero_framework.security.keys import FOLDER, KeyDirectory, serials, texts

_log = logging.getLogger(__name__)
_HOW = (
    "make keys: `hetero init` or `hetero invite ID` on the coordinator's machine, then the line "
    "that it prints on the worker's; --insecure-plaintext on all machines does without"
)


@dataclass(frozen=True)
class Plaintext:
    """Access without keys. `everywhere`: also where others can connect. `how`: how to make keys."""

    everywhere: bool = False
    how: str = _HOW
    encrypts: ClassVar[bool] = False
    """Whether `accepted` shakes hands, which takes time."""

    def check_address(self, host: str, what: str) -> None:
        """Raise IdentityError when nothing may be sent to or accepted at this address."""
        local = addresses.is_loopback(host) or addresses.is_loopback_by_name(host)
        if not (local or self.everywhere):
            raise IdentityError(
                f"{what} is at {host}, where others reach it, and this machine has no key for it",
                hint=self.how,
            )

    def arguments(self, processes: Iterable[WorkerId]) -> list[str]:
        """The options that give workers of this machine the same access. If the authority is here,
        workers without a key get one."""
        return ["--insecure-plaintext"] if self.everywhere else []

    def dialled(self, stream: Stream, process: WorkerId) -> Stream:
        """The stream to use with the worker that was dialled. This and `accepted` raise
        IdentityError for a wrong peer and OSError for a passing failure, after closing the stream.
        """
        return stream

    def accepted(self, stream: Stream) -> tuple[Stream, Identity | None]:
        """The stream to use with the peer that dialled, and its identity, if there are keys."""
        return stream, None


LOOPBACK_ONLY = Plaintext()
_PLAIN_ISLANDS = Plaintext(
    how="make keys: `hetero invite --island NAME` on the lighthouse's machine, then the line that "
    "it prints on the island's coordinator; --insecure-plaintext on all of them does without"
)


@dataclass(frozen=True)
class Keyed:
    """Access with the key of `process` ("local": the keeper of the authority). The keys are read
    anew for each connection, so a new key or a revocation counts from the next connection on.
    `members` may connect; None: all members of the cluster."""

    keys: KeyDirectory
    process: WorkerId
    members: Collection[WorkerId] | None
    encrypts: ClassVar[bool] = True

    def check_address(self, host: str, what: str) -> None:
        pass

    def arguments(self, processes: Iterable[WorkerId]) -> list[str]:
        if self.keys.has_authority:
            from hetero_framework.security.certificates import issue_missing

            issue_missing(self.keys, processes)
        return ["--keys", str(self.keys.path)]

    def dialled(self, stream: Stream, process: WorkerId) -> Stream:
        identity, revoked = self.keys.identity(self.process), self.keys.revoked()
        expected = Identity.of(identity.cluster, process, identity.kind)

        def admit(certificate: Certificate, note: dict[str, Any]) -> str | None:
            if certificate.identity != expected:
                return _other(certificate.identity, expected)
            self._learn(certificate.identity, note)
            return _REVOKED if certificate.serial in self.keys.revoked() else None

        made = tls.context(self.keys.bundle(self.process), server=False)
        return tls.dial(stream, made, admit, {"revoked": texts(revoked)}, str(expected))

    def accepted(self, stream: Stream) -> tuple[Stream, Identity | None]:
        identity = self.keys.identity(self.process)

        def admit(certificate: Certificate, note: dict[str, Any]) -> str | None:
            peer = certificate.identity
            if certificate.serial in self.keys.revoked():
                return _REVOKED
            if (peer.cluster, peer.kind) != (identity.cluster, identity.kind):
                return _other(peer, identity)
            self._learn(peer, note)
            if self.members is None or peer.keeps or peer.process in map(key_owner, self.members):
                return None
            known = ", ".join(map(str, self.members))
            return f"{peer} is not in this machine's configuration ({peer.kind.member}s: {known})"

        made = tls.context(self.keys.bundle(self.process), server=True)
        revoked = {"revoked": texts(self.keys.revoked())}
        encrypted, certificate = tls.accept(stream, made, admit, revoked)
        return encrypted, certificate.identity

    def _learn(self, peer: Identity, note: dict[str, Any]) -> None:
        """Take over the revocations that the keeper of the authority reports."""
        if peer.keeps:
            self.keys.learn_revoked(serials(note.get("revoked", [])))


Access = Plaintext | Keyed
"""The checks of a stream before anything is read from it; `Plaintext` describes the methods."""
_REVOKED = "its certificate was revoked (hetero keys revoke)"


def _other(actual: Identity, expected: Identity) -> str:
    if actual.cluster != expected.cluster:
        return f"it belongs to cluster {actual.cluster}, not {expected.cluster}"
    return f"its certificate is that of {actual}, expected {expected}"


@dataclass(frozen=True)
class KeyOptions:
    """Options of the command line. `directory` has the keys, if not beside the configuration."""

    directory: Path | None = None
    insecure: bool = False


def key_directory(config: Config, options: KeyOptions | None = None) -> KeyDirectory:
    """The directory for this machine's keys; it may be absent."""
    directory = options.directory if options is not None else None
    return KeyDirectory((directory or config.base_dir / FOLDER).absolute())


def access_of(config: Config, process: WorkerId, options: KeyOptions | None = None) -> Access:
    """The access of a worker or of "local", the coordinator. Raises IdentityError when it needs
    keys and has none, or they are damaged."""
    keys, workers = key_directory(config, options), [worker.id for worker in config.workers]
    access = _access(keys, process, workers, options or KeyOptions(), LOOPBACK_ONLY)
    if access is not LOOPBACK_ONLY:
        return access
    peers = [config.worker(process)] if process != "local" else config.planned_workers
    for worker in peers:
        # The address of a worker that dials is not known yet; the address that it dials counts.
        host = config.coordinator.ip if worker.dials else worker.ip
        access.check_address(host, "the coordinator" if worker.dials else f"worker {worker.id}")
    return access


def island_access(config: Config, options: KeyOptions | None = None) -> Access:
    """This coordinator's access to other islands, `dialled(stream, NAME)`, and the lighthouse,
    `dialled(stream, "local")`. Raises as `access_of`."""
    island = config.setting("island")
    keys, name = key_directory(config, options).of_islands, island.name
    if keys.has_authority and not keys.has(name):  # on the lighthouse's own machine
        from hetero_framework.security.certificates import issue_missing

        issue_missing(keys, [name])
    access = _access(keys, name, None, options or KeyOptions(), _PLAIN_ISLANDS)
    access.check_address(island.lighthouse_address[0], "the lighthouse")
    return access


def lighthouse_access(keys: KeyDirectory, host: str, options: KeyOptions) -> Access:
    """The access of a lighthouse that listens at `host`; `keys` are the islands'."""
    access = _access(keys, "local", None, options, _PLAIN_ISLANDS)
    access.check_address(host, "the lighthouse")
    return access


def _access(
    keys: KeyDirectory,
    process: WorkerId,
    members: Collection[WorkerId] | None,
    options: KeyOptions,
    plain: Plaintext,
) -> Access:
    """The access with the key of `process`, if it is there; else `plain`."""
    if options.insecure:
        _log.warning(
            "--insecure-plaintext: NO ENCRYPTION AND NO AUTHENTICATION; everybody who reaches a "
            "port of this run can read its data and give orders"
        )
        return replace(plain, everywhere=True)
    keys.settle()
    if keys.has(process):
        keys.identity(process)
        for server in (False, True):
            made = tls.context(keys.bundle(process), server=server)
        if (problem := tls.clock_problem(made)) is not None:
            _log.warning("%s: nobody can connect; %s", problem, tls.SET_CLOCK)
        return Keyed(keys, process, members)
    if options.directory is not None:
        raise IdentityError(
            f"there is no {keys.bundle(process)}, the key of {keys.kind.called(process)}",
            hint=plain.how,
        )
    return plain
