"""`hetero invite`, `join` and `keys`: making keys, carrying them to machines, taking them back."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from hetero_framework.commands.init import parse_address
from hetero_framework.config import Config, host_and_port
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
    authority, made = issuing.ensure_authority(keys)
    if made:
        _log.info("made the authority of a new cluster: %s", keys.path)
    invited: list[WorkerId] = [known[worker] for worker in dict.fromkeys(workers)]
    given = Configuration(file.name, file.read_text(encoding="utf-8-sig"))
    inviting = Inviting(keys, authority, invited, given)
    host, usual = config.coordinator.ip, config.coordinator.port
    if port is None and not addresses.port_is_free(host, usual):
        _log.info("port %d is in use, by a run perhaps; the line names another one", usual)
        usual = 0
    with closing(Listener(host, port or usual)) as listener:
        for entry in inviting.invitations:
            say(f"hetero join {host_and_port(host, listener.port)} {entry.token}")
        one = "that line" if len(invited) == 1 else "each line"
        _log.info(
            "run %s on the machine of its worker (%s); each is good once, for %.0f minutes. "
            "Waiting here; Ctrl-C takes them back",
            one,
            ", ".join(map(str, invited)),
            GOOD_FOR_S / 60,
        )
        _wait(inviting, listener)
    lost = [entry for entry in inviting.invitations if entry.outcome != "used"]
    if lost:
        texts = "; ".join(f"worker {entry.worker}: {entry.outcome}" for entry in lost)
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
    """Make this machine a worker: write its key, and the configuration as `file`. What stood there
    and differs is kept beside it."""
    parsed, found = parse_address(address), Token.parse(token)
    if parsed.port is None:
        raise UserError(f'"{address}" has no port', hint="paste the whole line of `hetero invite`")

    def keep(joined: Joined) -> None:
        raw = json.loads(joined.configuration.text)
        config = Config.from_dict(raw, file.absolute().parent, name=joined.configuration.name)
        config.worker(str(joined.identity.worker))
        keys.write_bundle(joined.identity, joined.bundle)
        _write_configuration(file, joined.configuration.text)

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
            lines.append(f"  {_called(entry.process)}: {state}, made {entry.made}, {entry.serial}")
    elif gone:
        lines.append(f"{len(gone)} certificates are revoked")
    return "\n".join(lines)


def check(config: Config, keys: KeyDirectory) -> str:
    """All that is wrong with the keys here, as IdentityError, or what they are good for."""
    processes = keys.processes()
    if not processes:
        raise IdentityError(
            f"there are no keys in {keys.path}",
            hint="hetero invite ID on the coordinator's machine prints the line that makes them",
        )
    known = {"local", *(str(worker.id) for worker in config.workers)}
    lines = []
    for process in processes:
        identity, file = keys.identity(process), keys.bundle(process)
        pem = keys.read(file.name)
        problem = x509.bundle_problem(pem, identity)
        if problem is None and x509.serial_of(pem) in keys.revoked():
            problem = "it was revoked"
        if problem is None and process not in known:
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
    """Take back the certificates of a worker, or of "coordinator"."""
    process = "local" if process == "coordinator" else process
    found = issuing.revoke(keys, process)
    more = ""
    if process == "local":
        issuing.issue(keys, issuing.read_authority(keys), "local")
        more = "; the coordinator has a new key"
    return (
        f"{_called(process)}: {len(found)} revoked{more}. Workers hear of it when the coordinator "
        "next connects; links that are open stay until then"
    )


def rotate(keys: KeyDirectory) -> str:
    """A new authority; who has to join again."""
    elsewhere = issuing.rotate(keys)
    if not elsewhere:
        return "there is a new authority, and new keys for the processes of this machine"
    return (
        "there is a new authority; the keys of other machines are good for nothing any more. Have "
        f"them join again: hetero invite {' '.join(elsewhere)}"
    )


def export(config: Config, keys: KeyDirectory, workers: Sequence[str], folder: Path) -> list[Path]:
    """Keys of workers as files, for who would rather copy than pair."""
    known = {str(worker.id): worker.id for worker in config.workers}
    for worker in workers:
        if worker not in known:
            raise UserError(f"there is no worker {worker} (workers: {', '.join(known)})")
    authority, _ = issuing.ensure_authority(keys)
    target = KeyDirectory(folder)
    files = []
    for worker in workers or known:
        identity = Identity.of(authority.cluster, worker)
        files.append(target.write_bundle(identity, issuing.issue_pem(keys, authority, worker)))
    return files


def _cluster(keys: KeyDirectory) -> str:
    return f"cluster {issuing.read_authority(keys).cluster}"


def _called(process: str) -> str:
    return "the coordinator" if process == "local" else f"worker {process}"
