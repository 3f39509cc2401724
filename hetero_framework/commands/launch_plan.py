"""The processes of a configuration for `hetero launch`: their places, commands and keys."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_framework.cluster.roles import MachineNames, local_worker_ids, this_machine
from hetero_framework.commands.options import key_directory
from hetero_framework.config import Config, Machine
from hetero_framework.core import addresses
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.files import discard, replace_directory, write_private
from hetero_framework.errors import IdentityError, UserError
from hetero_framework.security import certificates
from hetero_framework.security.keys import ISLANDS_FOLDER, REVOKED, KeyDirectory

_MARK = b"# Made by hetero launch, which replaces this directory as a whole; it may hold keys.\n*\n"


@dataclass(frozen=True)
class Launched:
    """A process to start. `host`: where ssh reaches its machine; None: it is this machine."""

    id: WorkerId
    entry: Machine
    host: str | None
    beside: tuple[WorkerId, ...] = ()
    """Workers that the coordinator starts itself, on its own machine."""

    @property
    def is_coordinator(self) -> bool:
        return self.id == "local"

    @property
    def name(self) -> str:
        return "coordinator" if self.is_coordinator else f"worker {self.id}"

    @property
    def file_name(self) -> str:
        """A name that is one for files, services and jobs: of letters, digits and "-"."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())


@dataclass(frozen=True)
class Launch:
    """What is to be launched, and the options of the command line that reach the processes."""

    config: Config
    arguments: argparse.Namespace
    keys: KeyDirectory | None
    processes: tuple[Launched, ...]
    """The coordinator, then the workers that it does not start itself."""

    @property
    def file(self) -> Path:
        """The configuration."""
        return Path(self.arguments.config).absolute()

    def words(self, process: Launched, file: str, imports: Sequence[str] = ()) -> list[str]:
        """The words behind `hetero` that start a process with the configuration `file`."""
        given = self.arguments
        words = ["train", "--role", "coordinator"]
        if not process.is_coordinator:
            words = ["worker", "--worker-id", str(process.id)]
        words += ["--config", file, *(word for text in given.set for word in ("--set", text))]
        words += [word for path in imports for word in ("--import", path)]
        words += ["--insecure-plaintext"] * given.insecure_plaintext
        return words + list(given.train_options) * process.is_coordinator

    def key_files(self, process: Launched) -> dict[str, bytes]:
        """The files of the key directory that this process's machine needs: keys of its own
        processes, and on the coordinator's the revoked certificates. Never the authority's key."""
        if self.keys is None:
            return {}
        names = [self.keys.bundle(owner).name for owner in (process.id, *process.beside)]
        names += [REVOKED] * (process.is_coordinator and self.keys.holds(REVOKED))
        files = {name: self.keys.read(name) for name in names}
        if process.is_coordinator and self.config.island is not None:
            islands = self.keys.of_islands
            names = [islands.bundle(self.config.island.name).name, REVOKED]
            held = [name for name in names if islands.holds(name)]
            files |= {f"{ISLANDS_FOLDER}/{name}": islands.read(name) for name in held}
        return files


def planned(
    config: Config, arguments: argparse.Namespace, *, together: bool, hosts: Mapping[str, str]
) -> Launch:
    """The launch of this configuration. `together`: its addresses count, so the coordinator starts
    the workers of its own machine; otherwise each process gets a place of its own. `hosts`: where
    ssh reaches a process ("local", the coordinator, or a worker's id) instead of at its address.
    Raises UserError for unknown ids, IdentityError for keys that cannot be made here."""
    workers = {str(worker.id): worker for worker in config.planned_workers}
    if unknown := hosts.keys() - workers.keys() - {"local"}:
        listed = ", ".join(["local", *workers])
        raise UserError(f"there is no process {', '.join(sorted(unknown))} (there are: {listed})")

    def host(owner: str, entry: Machine) -> str | None:
        here = addresses.is_local_address(entry.ip)
        return hosts.get(owner, None if here else entry.ip)

    home = host("local", config.coordinator)
    nobody = MachineNames(frozenset(), frozenset())
    beside: Collection[WorkerId] = ()
    if together:
        beside = local_worker_ids(config, nobody if home else this_machine())
        if placed := [str(worker) for worker in beside if str(worker) in hosts]:
            raise UserError(
                f"--host {placed[0]}=...: by its ip, worker {placed[0]} is on the coordinator's"
                " machine, and hetero train starts it there",
                hint="give it the ip at which the coordinator reaches it",
            )
    processes = [Launched("local", config.coordinator, home, tuple(beside))]
    processes += [
        Launched(worker.id, worker, host(name, worker))
        for name, worker in workers.items()
        if worker.id not in beside
    ]
    if len(processes) == 1:
        raise UserError(
            "every process of this configuration is on the coordinator's machine",
            hint="hetero train starts them all",
        )
    if len({process.file_name for process in processes}) < len(processes):
        raise UserError("two workers have ids that differ in signs only, and files cannot")
    keys = None if arguments.insecure_plaintext else key_directory(arguments)
    if keys is not None:
        _make_missing(keys, [owner for p in processes for owner in (p.id, *p.beside)])
    return Launch(config, arguments, keys, tuple(processes))


def _make_missing(keys: KeyDirectory, owners: Sequence[WorkerId]) -> None:
    if not keys.processes():
        certificates.ensure_authority(keys)
    certificates.issue_missing(keys, owners)
    if missing := [keys.kind.called(owner) for owner in owners if not keys.has(owner)]:
        raise IdentityError(
            f"{keys.path} has no key of {', '.join(missing)}, and not the authority to make one",
            hint="launch on the machine that has the authority",
        )


def write(folder: Path, files: Mapping[str, bytes], *, force: bool) -> None:
    """Make `folder` hold exactly these files, for this user alone, in one step. Raises UserError
    where another content is there, unless `force`d and an earlier launch has written it."""
    files = {".gitignore": _MARK, **files}
    before = folder.rglob("*") if folder.is_dir() else ()
    there = {p.relative_to(folder).as_posix(): p.read_bytes() for p in before if p.is_file()}
    differing = sorted(name for name in there | files if there.get(name) != files.get(name))
    if folder.exists() and not differing:
        return
    if there and there.get(".gitignore") != _MARK:
        raise UserError(f"{folder} has files of others", hint="choose another --output DIR")
    if there and not force:
        raise UserError(
            f"{folder} differs from what would be written: {', '.join(differing[:5])}",
            hint="--force replaces the whole directory; --output DIR chooses another",
        )
    new, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    try:
        for leftover in (new, old):
            discard(leftover)
        for name, content in files.items():
            (new / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(new / name, content)
        replace_directory(new, folder, old)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error}") from error


def by_id(given: Sequence[str], option: str) -> dict[str, str]:
    """The values of a repeated option ID=VALUE, by id. Raises UserError."""
    values = {}
    for text in given:
        owner, _, value = text.partition("=")
        if not owner or not value or value.startswith("-"):
            raise UserError(f"{option} {text} is not of the form ID=VALUE")
        values[owner] = value
    return values
