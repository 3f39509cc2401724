"""`hetero invite`, `join` and `keys`: making keys, carrying them to machines, taking them back."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hetero_framework.commands.init import parse_address
from hetero_framework.config import LIGHTHOUSE_PORT, Config, host_and_port, island_name
from hetero_framework.core import addresses, timeouts
from hetero_framework.core.background import in_background
from hetero_framework.core.dial import Listener
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.files import rename, write_file
from hetero_framework.core.identity import Identity
from hetero_framework.core.stream import Stream
from hetero_framework.errors import IdentityError, UserError
from hetero_framework.security import authority as x509
from hetero_framework.security import issuing
from hetero_framework.security.door import Door
from hetero_framework.security.keys import KeyDirectory
from hetero_framework.security.pairing import (
    GOOD_FOR_S,
    Configuration,
    Inviting,
    Joined,
    Token,
    join,
)

_log = logging.getLogger(__name__)
Say = Callable[[str], None]


def prepare_keys(config: Config, keys: KeyDirectory) -> bool:
    """On the coordinator's machine: the authority and the coordinator's key, where they are needed
    and missing; whether they were made."""
    here = addresses.is_local_address(config.coordinator.ip)
    remote = [w for w in config.planned_workers if not addresses.is_loopback(w.ip)]
    if not here or not remote or keys.processes():
        return False
    return issuing.ensure_authority(keys)[1]


def invite(
    config: Config,
    file: Path,
    keys: KeyDirectory,
    workers: Sequence[str],
    port: int | None = None,
    say: Say = print,
) -> None:
    """Print for each worker the line to be pasted on its machine, and wait until they have joined.
    Raises IdentityError for one that did not, UserError, and NetworkError for a port in use."""
    known = {str(worker.id): worker.id for worker in config.workers}
    for worker in workers:
        if worker not in known:
            listed = ", ".join(known) or "none"
            raise UserError(f"{file} has no worker {worker} (workers: {listed})")
    invited: list[WorkerId] = [known[worker] for worker in dict.fromkeys(workers)]
    given = Configuration(file.name, file.read_text(encoding="utf-8-sig"))
    place = Place(config.coordinator.ip, config.coordinator.port, port)
    _invite(keys, invited, given, place, say)


def invite_islands(
    keys: KeyDirectory,
    names: Sequence[str],
    address: tuple[str, int],
    port: int | None = None,
    say: Say = print,
) -> None:
    """`invite` for islands, on the machine of the lighthouse, which has this address; `keys` are
    those of the islands."""
    for name in names:
        checked_name(name)
    _invite(keys, list(dict.fromkeys(names)), None, Place(*address, port), say)


def lighthouse_address(config: Config | None, host: str | None) -> tuple[str, int]:
    """Where islands reach this machine: at `host`, if it is given."""
    if config is not None and config.island is not None:
        own, port = config.island.lighthouse_address
        return host or own, port
    return host or addresses.primary_address(), LIGHTHOUSE_PORT


def checked_name(name: str) -> str:
    """The name of an island. Raises UserError."""
    try:
        return island_name(name)
    except ValueError as error:
        raise UserError(f"no island can be called {name!r}: {error}") from None


@dataclass(frozen=True)
class Place:
    """Where an invitation waits: at the port that is wanted, else at the usual one, or where a run
    has that at any free one."""

    host: str
    usual: int
    wanted: int | None

    def listener(self) -> Listener:
        port = self.wanted or self.usual
        if self.wanted is None and not addresses.port_is_free(self.host, port):
            _log.info("port %d is in use, by a run perhaps; the line names another one", port)
            port = 0
        return Listener(self.host, port)


def _invite(
    keys: KeyDirectory,
    invited: Sequence[WorkerId],
    given: Configuration | None,
    place: Place,
    say: Say,
) -> None:
    authority, made = issuing.ensure_authority(keys)
    if made:
        _log.info("made the authority of a new cluster: %s", keys.path)
    inviting = Inviting(keys, authority, invited, given)
    with closing(place.listener()) as listener:
        for entry in inviting.invitations:
            say(f"hetero join {host_and_port(place.host, listener.port)} {entry.token}")
        one = "that line" if len(invited) == 1 else "each line"
        _log.info(
            "run %s on the machine of its %s (%s); each is good once, for %.0f minutes. "
            "Waiting here; Ctrl-C takes them back",
            one,
            keys.kind.member,
            ", ".join(map(str, invited)),
            GOOD_FOR_S / 60,
        )
        _wait(inviting, listener)
    lost = [entry for entry in inviting.invitations if entry.outcome != "used"]
    if lost:
        texts = "; ".join(f"{keys.kind.called(entry.process)}: {entry.outcome}" for entry in lost)
        raise IdentityError(f"not joined: {texts}", hint="invite again")


def _wait(inviting: Inviting, listener: Listener) -> None:
    def joined(stream: Stream, identity: Identity | None) -> None:
        _log.info("%s has joined from %s", identity, stream.peer)
        door.gone(stream)
        stream.close()

    door = Door(inviting, joined)
    accepting = in_background(lambda: door.run(listener), "accept")
    try:
        while not inviting.over and not accepting.done():
            time.sleep(timeouts.ANSWER_TICK_S)
    finally:
        door.close()
        listener.close()
        accepting.result(timeouts.EXIT_S)


def join_cluster(address: str, token: str, file: Path, keys: KeyDirectory) -> Joined:
    """Make this machine what it was invited as. Of a worker, write the key, and the configuration
    as `file`; what stood there and differs is kept beside it. Of an island, write the key."""
    parsed, found = parse_address(address), Token.parse(token)
    if parsed.port is None:
        raise UserError(f'"{address}" has no port', hint="paste the whole line of `hetero invite`")

    def keep(joined: Joined) -> None:
        given = joined.configuration
        if joined.identity.island is not None:
            keys.of_islands.write_bundle(joined.identity, joined.bundle)
            return
        if given is None:
            raise ValueError("the configuration is missing")
        config = Config.from_dict(json.loads(given.text), file.absolute().parent, name=given.name)
        config.worker(str(joined.identity.worker))
        keys.write_bundle(joined.identity, joined.bundle)
        _write_configuration(file, given.text)

    return join(parsed.ip, parsed.port, found, keep)


def _write_configuration(file: Path, text: str) -> None:
    try:
        if file.exists() and file.read_text(encoding="utf-8-sig") != text:
            before = file.with_name(f"{file.name}.before")
            rename(file, before)
            _log.info("the %s that was here is now %s", file.name, before.name)
        write_file(file, text.encode())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {file}: {error}") from error


def listing(keys: KeyDirectory) -> str:
    """What is here, and what was given out."""
    lines = [f"keys in {keys.path}"]
    for process in keys.processes():
        lines.append(f"  {keys.bundle(process).name}: {keys.identity(process).uri}")
    gone = keys.revoked()
    if keys.has_authority:
        lines.append(f"the authority is here; certificates of {_cluster(keys)}:")
        for entry in issuing.issued(keys):
            state = "revoked" if int(entry.serial, 16) in gone else "good"
            who = keys.kind.called(entry.process)
            lines.append(f"  {who}: {state}, made {entry.made}, {entry.serial}")
    elif gone:
        lines.append(f"{len(gone)} certificates are revoked")
    return "\n".join(lines)


def check(config: Config | None, keys: KeyDirectory) -> str:
    """All that is wrong with the keys here, as IdentityError, or what they are good for; whether
    they are those of this configuration's workers, too."""
    processes = keys.processes()
    if not processes:
        raise IdentityError(
            f"there are no keys in {keys.path}",
            hint=f"{keys.kind.invite} prints the line that makes them",
        )
    known = {"local", *(str(w.id) for w in config.workers)} if config is not None else None
    lines = []
    for process in processes:
        identity, file = keys.identity(process), keys.bundle(process)
        pem = keys.read(file.name)
        problem = x509.bundle_problem(pem, identity)
        if problem is None and x509.serial_of(pem) in keys.revoked():
            problem = "it was revoked"
        if problem is None and known is not None and process not in known:
            listed = ", ".join(sorted(known - {"local"}))
            problem = f"the configuration has no such worker (workers: {listed})"
        if problem is not None:
            raise IdentityError(
                f"{file}: {problem}", hint="have it invited again, or remove the file"
            )
        lines.append(f"{file.name}: the key of {identity}, cluster {identity.cluster}")
    if keys.has_authority:
        lines.append(f"the authority of {_cluster(keys)} is here")
    return "\n".join([*lines, "all good"])


def revoke(keys: KeyDirectory, process: str) -> str:
    """Take back the certificates of a member, or of "coordinator", or "lighthouse"."""
    kind, keeper = keys.kind, keys.kind.called("local")
    process = "local" if process == kind.keeper else process
    found = issuing.revoke(keys, process)
    more = ""
    if process == "local":
        issuing.issue(keys, issuing.read_authority(keys), "local")
        more = f"; {keeper} has a new key"
    return (
        f"{kind.called(process)}: {len(found)} revoked{more}. {kind.member.capitalize()}s hear of "
        f"it with their next connection to {keeper}; links that are open stay until then"
    )


def rotate(keys: KeyDirectory) -> str:
    """A new authority; who has to join again."""
    elsewhere = issuing.rotate(keys)
    if not elsewhere:
        return "there is a new authority, and new keys for the processes of this machine"
    return (
        "there is a new authority; the keys of other machines are good for nothing any more. Have "
        f"them join again: hetero invite {' '.join(keys.kind.option + who for who in elsewhere)}"
    )


def export(config: Config, keys: KeyDirectory, workers: Sequence[str], folder: Path) -> list[Path]:
    """Keys of workers as files, for who would rather copy than pair."""
    known = [str(worker.id) for worker in config.workers]
    for worker in workers:
        if worker not in known:
            raise UserError(f"there is no worker {worker} (workers: {', '.join(known)})")
    return _export(keys, workers or known, folder)


def export_islands(keys: KeyDirectory, names: Sequence[str], folder: Path) -> list[Path]:
    """The same of islands."""
    if not names:
        raise UserError("hetero keys export --islands needs the islands' names")
    return _export(keys, [checked_name(name) for name in names], folder)


def _export(keys: KeyDirectory, processes: Sequence[str], folder: Path) -> list[Path]:
    authority, _ = issuing.ensure_authority(keys)
    target = KeyDirectory(folder, keys.kind)
    files = []
    for process in processes:
        identity = Identity.of(authority.cluster, process, keys.kind)
        files.append(target.write_bundle(identity, issuing.issue_pem(keys, authority, process)))
    return files


def _cluster(keys: KeyDirectory) -> str:
    return f"cluster {issuing.read_authority(keys).cluster}"
