"""Keys for `hetero invite`, `join` and `keys`: makes, transfers, lists and revokes them."""

from __future__ import annotations

import copy
import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_framework.cluster.roles import devices_here
from hetero_framework.commands.options import DEFAULT_CONFIG
from hetero_framework.commands.preflight import raise_all
from hetero_framework.config import LIGHTHOUSE_PORT, Config, host_and_port, split_address
from hetero_framework.config.cards import ALL
from hetero_framework.config.strict_json import YAML_ENDINGS, parse_object, read_object
from hetero_framework.core import addresses, timeouts, tls
from hetero_framework.core.dial import Listener
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.files import refuse_output, rename, write_file, write_json
from hetero_framework.core.identity import Identity, key_owner
from hetero_framework.core.stream import Stream
from hetero_framework.core.threads import in_background
from hetero_framework.errors import IdentityError, UserError, in_words, of_disk
from hetero_framework.extras.pairing.pairing import (
    GOOD_FOR_S,
    Configuration,
    Configure,
    Inviting,
    PairedMachine,
    Token,
    join,
)
from hetero_framework.security import authority as x509
from hetero_framework.security import certificates
from hetero_framework.security.acceptor import Acceptor
from hetero_framework.security.access import Keyed
from hetero_framework.security.keys import AUTHORITY, ISSUED, REVOKED, KeyDirectory

if TYPE_CHECKING:
    from hetero_framework.commands.diagnosis import MachineView

_log = logging.getLogger(__name__)
Say = Callable[[str], None]
_print = partial(print, flush=True)


def prepare_keys(config: Config, keys: KeyDirectory) -> bool:
    """Make the authority and the coordinator's key on the coordinator's machine, where they are
    needed and missing. Returns whether they were made."""
    here = addresses.is_local_address(config.coordinator.ip)
    remote = [w for w in config.planned_workers if not addresses.is_loopback(w.ip)]
    if not here or not remote or keys.processes():
        return False
    return certificates.ensure_authority(keys)[1]


def invite(
    config: Config,
    file: Path,
    keys: KeyDirectory,
    workers: Sequence[str],
    port: int | None = None,
    say: Say = _print,
) -> None:
    """Print for each worker the line to paste on its machine, and wait until all have joined. What
    `file` lacks of them is added. Raises IdentityError for workers that did not join, UserError,
    and NetworkError for a port in use."""
    known = {str(worker.id): worker for worker in config.workers}
    asked, home = [*dict.fromkeys(workers)], config.coordinator.ip
    new = [worker for worker in asked if worker not in known]
    remote = new or not all(addresses.is_loopback(known[worker].ip) for worker in asked)
    if remote and addresses.is_loopback(home):
        home = addresses.primary_address()
    if new and config.is_planned:
        text = f"{file} has no worker {new[0]} (workers: {', '.join(known) or 'none'})"
        raise UserError(text, hint='add it, or set "shard_plan": "auto" to have it planned in')
    _check_growth(file, home, asked)
    if home != config.coordinator.ip:
        others = ", ".join({*addresses.addresses_for_others()} - {home}) or "it has no other"
        text = "others reach this machine at %s; for another address, --set coordinator.ip=HOST: %s"
        _log.info(text, home, others)
    facts: dict[WorkerId, str] = dict.fromkeys(new, "")
    for machine in (known[worker] for worker in asked if worker in known):
        facts[machine.id] = f" ({', '.join(filter(None, (machine.hostname, machine.ip)))})"
    place = (home, config.coordinator.port)
    _invite(keys, facts, partial(_joining, file, home), file.name, place, port, say)
    if not config.is_planned:
        _log.info("the next `hetero train --config %s` plans for all machines in it", file)


def _check_growth(file: Path, home: str, asked: Sequence[str]) -> None:
    """Raise UserError where `file` cannot take what it lacks of the workers that are invited."""
    raw = read_object(file)
    grown = copy.deepcopy(raw)
    for worker in asked:
        if (owner := key_owner(worker)) != worker:
            text = f"{worker} is one device of worker {owner}, and all of them have one key"
            raise UserError(text, hint=f"hetero invite {owner}")
        _grow(grown, home, worker, home, ["cpu"])
    if grown != raw and file.suffix in YAML_ENDINGS:
        raise UserError(
            f"{file} lacks what others need to know, and no program keeps its comments",
            hint=f"write it there: coordinator.ip {home}, and workers with id, hostname, devices",
        )
    Config.from_dict(grown, file.absolute().parent, name=file.name)


def _grow(
    raw: dict[str, Any], home: str, worker: WorkerId, host: str, devices: Sequence[str]
) -> None:
    """Add to a configuration what it lacks: a worker that joins from `host`, its devices if they
    are "all", and this machine's address `home` in place of loopback."""
    entries = raw.setdefault("workers", [])
    entry = next((one for one in entries if str(one.get("id")) == str(worker)), None)
    if entry is None:
        number = int(worker) if isinstance(worker, str) and worker.isdecimal() else worker
        entry = {"id": number, "ip": host, "devices": ALL}  # without a port it dials
        entries.append(entry)
    if addresses.is_loopback(raw["coordinator"]["ip"]):
        raw["coordinator"]["ip"] = home
    if entry.get("devices") == ALL and devices:
        entry["devices"] = [*devices]


def _joining(
    file: Path, home: str, worker: WorkerId, host: str, devices: Sequence[str]
) -> Configuration:
    """Note in `file` what a worker told that joins from `host`, and return the file for it. An
    entry that names its device stays as it is. Raises ConfigError and OSError."""
    raw = read_object(file)
    _grow(raw, home, worker, host, devices)
    config = Config.from_dict(raw, file.absolute().parent, name=file.name)
    if raw != read_object(file):
        write_json(file, raw)
    text = file.read_text(encoding="utf-8-sig")
    if config.coordinator.devices == ALL:  # of this machine, not of the one that joins
        text = json.dumps({**raw, "coordinator": {**raw["coordinator"], "devices": devices_here()}})
    return Configuration(file.name, text)


def invite_islands(
    keys: KeyDirectory,
    names: Sequence[str],
    address: tuple[str, int],
    port: int | None = None,
    say: Say = _print,
) -> None:
    """`invite` for islands, on the lighthouse's machine, which has this `address`. `keys` is the
    key directory of the islands."""
    for name in names:
        checked_name(name)
    _invite(keys, dict.fromkeys(names, ""), None, DEFAULT_CONFIG, address, port, say)


def lighthouse_address(config: Config | None, host: str | None) -> tuple[str, int]:
    """The address at which islands reach this machine, with `host` if it is given."""
    if config is not None and (island := config.setting("island")) is not None:
        configured, port = island.lighthouse_address
        return host or configured, port
    return host or addresses.primary_address(), LIGHTHOUSE_PORT


def checked_name(name: str) -> str:
    """The name of an island. Raises UserError."""
    from hetero_framework.extras.islands.settings import island_name

    try:
        return island_name(name)
    except ValueError as error:
        raise UserError(f"no island can be called {name!r}: {error}") from None


def _listener(host: str, usual: int, wanted: int | None) -> Listener:
    """Listen at the wanted port, else at the usual port or, if that is in use, at a free port."""
    port = wanted or usual
    if wanted is None and not addresses.port_is_free(host, port):
        _log.info("port %d is in use, by a run perhaps; the line names another one", port)
        port = 0
    return Listener(host, port)


def _invite(
    keys: KeyDirectory,
    invited: Mapping[WorkerId, str],
    configure: Configure | None,
    file: str,
    place: tuple[str, int],
    port: int | None,
    say: Say,
) -> None:
    """Invite members and wait for them. `invited` has the known facts of each one's machine, and
    `file` is the name of the configuration there."""
    authority, made = certificates.ensure_authority(keys)
    if made:
        _log.info("made the authority of a new cluster: %s", keys.path)
    inviting = Inviting(keys, authority, invited, configure)
    more = "" if file == DEFAULT_CONFIG else f" --config {shlex.quote(file)}"
    with closing(_listener(*place, port)) as listener:
        address = host_and_port(place[0], listener.port)
        for entry in inviting.invitations:
            say(f"on the machine of {keys.kind.called(entry.process)}{invited[entry.process]}:")
            say(f"hetero join {address} {entry.token}{more}")
        _log.info(
            "each line is good once, for %.0f minutes. Waiting here; Ctrl-C takes them back",
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
        acceptor.gone(stream)
        stream.close()

    acceptor = Acceptor(inviting, joined)
    accepting = in_background(lambda: acceptor.run(listener), "accept")
    try:
        while not inviting.over and not accepting.done():
            time.sleep(timeouts.ANSWER_TICK_S)
    finally:
        acceptor.close()
        listener.close()
        accepting.result(timeouts.EXIT_S)


def join_cluster(address: str, token: str, file: Path, keys: KeyDirectory) -> PairedMachine:
    """Make this machine the worker or island that it was invited as: write its key, and a worker's
    configuration to `file`. An earlier file with other content is kept beside it."""
    try:
        host, port = split_address(address.strip())
    except ValueError as error:
        hint = "paste the whole line of `hetero invite`"
        raise UserError(f"the address {error}", hint=hint) from None
    parsed = Token.parse(token)

    def keep(joined: PairedMachine) -> None:
        given, is_worker = joined.configuration, joined.identity.island is None
        if is_worker:
            if given is None:
                raise ValueError("the configuration is missing")
            raw = parse_object(given.text.encode(), name=file.name)
            config = Config.from_dict(raw, file.absolute().parent, name=given.name)
            config.worker(str(joined.identity.worker))
        place = keys if is_worker else keys.of_islands
        with place.locked():
            place.write_bundle(joined.identity, joined.bundle)
        if is_worker and given is not None:
            _write_configuration(file, given.text)

    return join(host, port, parsed, keep, devices_here())


def _write_configuration(file: Path, text: str) -> None:
    try:
        if file.exists() and file.read_text(encoding="utf-8-sig") != text:
            before, number = file.with_name(f"{file.name}.before"), 1
            while os.path.lexists(before):
                before, number = file.with_name(f"{file.name}.before.{number}"), number + 1
            rename(file, before)
            _log.info("the %s that was here is now %s", file.name, before.name)
        write_file(file, text.encode())
    except (OSError, ValueError) as error:
        raise of_disk(error, UserError)(f"cannot write {file}: {in_words(error)}") from error


def listing(keys: KeyDirectory) -> str:
    """A list of the keys in the directory and of the certificates that it has issued."""
    keys.settle()
    lines = [f"keys in {keys.path}"]
    for process in keys.processes():
        lines.append(f"  {keys.bundle(process).name}: {keys.identity(process).uri}")
    gone = keys.revoked()
    if keys.has_authority:
        lines.append(f"the authority is here; certificates of {_cluster(keys)}:")
        for entry in certificates.issued(keys):
            state = "revoked" if int(entry.serial, 16) in gone else "good"
            who = keys.kind.called(entry.process)
            lines.append(f"  {who}: {state}, made {entry.made}, {entry.serial}")
    elif gone:
        lines.append(f"{len(gone)} certificates are revoked")
    return "\n".join(lines)


def check(config: Config | None, keys: KeyDirectory) -> str:
    """Check the keys; return a text with the processes that have keys. Raises IdentityError that
    lists every problem."""
    keys.settle()
    raise_all(f"the key directory {keys.path}", problems(config, keys), IdentityError)
    lines = []
    for process in keys.processes():
        identity, file = keys.identity(process), keys.bundle(process)
        lines.append(f"{file.name}: the key of {identity}, cluster {identity.cluster}")
    if keys.has_authority:
        lines.append(f"the authority of {_cluster(keys)} is here")
    return "\n".join([*lines, "all good"])


def findings(view: MachineView) -> Iterator[UserError]:
    """The problems of this machine's keys, for `hetero doctor`."""
    try:
        if isinstance(view.access, Keyed):
            yield from problems(view.config, view.access.keys)
    except UserError as error:
        yield error


def problems(config: Config | None, keys: KeyDirectory) -> Iterator[IdentityError]:
    """All problems of the keys here. A key may be damaged, revoked, out of its time, missing from
    the list of certificates, of another authority, or of no worker in the configuration."""
    for left_over in keys.left_overs():
        text = f"{left_over} was left by a change of keys that was interrupted"
        hint = "delete it; the next change of keys does so, too. The other files are whole"
        yield IdentityError(text, hint=hint)
    processes = keys.processes()
    if not processes:
        again = f"{keys.kind.invite} prints the line that makes them"
        yield IdentityError(f"there are no keys in {keys.path}", hint=again)
        return
    try:
        ours = certificates.read_authority(keys).cluster if keys.has_authority else None
        listed = {int(entry.serial, 16): entry for entry in certificates.issued(keys)}
        gone = keys.revoked()
    except IdentityError as error:
        anew = error.hint or "hetero keys rotate makes all of it anew"
        yield IdentityError(error.message, hint=anew)
        return
    cluster = ours
    for process in processes:
        file = keys.bundle(process)
        try:
            identity, pem = keys.identity(process), keys.read(file.name)
        except IdentityError as error:
            yield IdentityError(error.message, hint=error.hint or "have it invited again")
            continue
        problem = x509.bundle_problem(pem, identity)
        cluster = cluster or identity.cluster
        if problem is None and identity.cluster != cluster:
            other = "the authority here" if ours else "another key here"
            problem = f"it is of cluster {identity.cluster}, and {other} of {cluster}"
        elif problem is None and (serial := x509.serial_of(pem)) in gone:
            problem = "it was revoked"
        elif problem is None and ours and serial not in listed:
            problem = f"{ISSUED} lacks its certificate, which cannot be revoked by name"
        problem = problem or _not_configured(config, process)
        if problem is not None:
            remedy = "have it invited again, or remove the file"
            if process == "local" and keys.has_authority:
                remedy = "remove the file; the next `hetero invite` makes another one"
            yield IdentityError(f"{file}: {problem}", hint=remedy)
        elif (late := tls.clock_problem(tls.context(file, server=False))) is not None:
            yield IdentityError(f"{file.name}: {late}", hint=tls.SET_CLOCK)
    yield from _wrong_lists(keys, ours, listed, gone)


def _not_configured(config: Config | None, process: str) -> str | None:
    workers = [str(worker.id) for worker in config.workers] if config is not None else []
    if config is None or process in ("local", *workers):
        return None
    return f"the configuration has no such worker (workers: {', '.join(sorted(workers))})"


def _wrong_lists(
    keys: KeyDirectory, ours: str | None, listed: Mapping[int, certificates.Issued], gone: Set[int]
) -> Iterator[IdentityError]:
    """Contradictions between the lists and the authority here, whose cluster is `ours`."""
    path = keys.path / ISSUED
    if ours is None:
        if listed:
            text = f"{path} is here without the {AUTHORITY} that it belongs to"
            yield IdentityError(text, hint=f"copy {AUTHORITY} here from where you keep it")
        return
    if not keys.has("local"):
        text = f"there is no {keys.bundle('local')}, the key of {keys.kind.called('local')}"
        yield IdentityError(text, hint="the next `hetero invite` makes it")
    anew = "restore the list, or replace the authority and all keys: hetero keys rotate"
    if others := {entry.cluster for entry in listed.values()} - {"", ours}:
        text = f"{path} is the list of cluster {', '.join(others)}; the authority is of {ours}"
        yield IdentityError(text, hint=anew)
    if missing := gone - listed.keys():
        text = f"{len(missing)} of the certificates in {keys.path / REVOKED} are not in {ISSUED}"
        text += ": one of the two is of another authority, or has lost entries"
        yield IdentityError(text, hint=anew)


def revoke(keys: KeyDirectory, process: str) -> str:
    """Revoke the certificates of a member, or of "coordinator", or "lighthouse"."""
    kind, keeper = keys.kind, keys.kind.called("local")
    process = "local" if process == kind.keeper else process
    taken = certificates.revoke(keys, process)
    more = f"; {keeper} has a new key" if process == "local" else ""
    return (
        f"{kind.called(process)}: {len(taken)} revoked{more}. {kind.member.capitalize()}s hear of "
        f"it with their next connection to {keeper}; links that are open stay until then"
    )


def rotate(keys: KeyDirectory) -> str:
    """Make a new authority; return a text with the processes that have to join again."""
    elsewhere = certificates.rotate(keys)
    if not elsewhere:
        return "there is a new authority, and new keys for the processes of this machine"
    return (
        "there is a new authority; the keys of other machines are no longer valid. Have "
        f"them join again: hetero invite {' '.join(keys.kind.option + who for who in elsewhere)}"
    )


def export(
    config: Config | None,
    keys: KeyDirectory,
    names: Sequence[str],
    folder: Path,
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Write keys as files to be copied by hand instead of pairing: keys of workers, or of islands
    where `config` is None."""
    known = [str(worker.id) for worker in config.workers] if config is not None else []
    if config is None and not names:
        raise UserError("hetero keys export --islands needs the islands' names")
    for name in names:
        if config is None:
            checked_name(name)
        elif name not in known:
            raise UserError(f"there is no worker {name} (workers: {', '.join(known)})")
    processes = names or known
    target = KeyDirectory(folder, keys.kind)
    for process in processes:
        refuse_output(target.bundle(process), overwrite=overwrite, inputs=[keys.path])
    authority, _ = certificates.ensure_authority(keys)
    files = []
    for process in processes:
        identity = Identity.of(authority.cluster, process, keys.kind)
        pem = certificates.issue_pem(keys, authority, process)
        files.append(target.write_bundle(identity, pem))
    return files


def _cluster(keys: KeyDirectory) -> str:
    return f"cluster {certificates.read_authority(keys).cluster}"
