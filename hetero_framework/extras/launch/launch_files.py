"""The processes of a configuration for `hetero launch`, and its files for Slurm, Compose, SkyPilot.
There each process has a machine of its own and sees no key but its own."""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

from hetero_framework._version import __version__
from hetero_framework.cluster.roles import MachineNames, local_worker_ids, this_machine
from hetero_framework.commands.options import key_directory
from hetero_framework.config import Config, Machine, process_name
from hetero_framework.core import addresses
from hetero_framework.core.files import discard, replace_directory, write_private
from hetero_framework.errors import UserError, in_words, of_disk
from hetero_framework.security import certificates
from hetero_framework.security.keys import FOLDER, REVOKED

_DRI = Path("/dev/dri")
_REPOSITORY = Path(__file__).parents[3]
_MARK = b"# Made by hetero launch, which replaces this directory as a whole. It may hold keys.\n*\n"


@dataclass(frozen=True, eq=False)
class Launched:
    """A process to start: its entry in the configuration, where ssh reaches its machine (None: this
    machine), the value of --resources, and the key files of its machine's processes."""

    id: str
    entry: Machine
    path: str
    host: str | None
    needs: str | None
    keys: Sequence[Path]

    @property
    def name(self) -> str:
        """The name of the process in files, services and jobs."""
        return process_name(self.id).replace(" ", "-")

    def words(
        self, given: Namespace, file: str, keys: str, imports: Iterable[str], *settings: str
    ) -> list[str]:
        """The words after `hetero` that start the process, with paths of its own machine."""
        is_coordinator = self.id == "local"
        words = ["train", "--role=coordinator"] if is_coordinator else ["worker"]
        words += [f"--worker-id={self.id}"] * (not is_coordinator) + [f"--config={file}"]
        words += ["--insecure-plaintext"] if given.insecure_plaintext else [f"--keys={keys}"]
        words += [f"--set={setting}" for setting in (*given.set, *settings)]
        words += [f"--import={path}" for path in imports]
        return [*words, *given.train_options * is_coordinator]


def planned(config: Config, given: Namespace) -> list[Launched]:
    """The coordinator, then the workers that it does not start itself. Over ssh it starts the
    workers on its machine; otherwise each process gets a machine of its own. Makes missing keys.
    Raises UserError for wrong options, IdentityError for keys that cannot be made here."""
    here = addresses.is_local_address(config.coordinator.ip)
    here = here and not any(text.startswith("local=") for text in given.hosts)
    machine = this_machine() if here else MachineNames(frozenset(), frozenset())
    beside = local_worker_ids(config, machine) if given.how == "ssh" else ()
    if config.setting("island") is not None and not (given.how == "ssh" and here):
        text = "the key of an island stays with its coordinator"
        raise UserError(text, hint="launch it with --ssh on the coordinator's machine")
    owners = ["local", *(str(w.id) for w in config.planned_workers if w.id not in beside)]
    hosts, needs = _by_id(given.hosts, owners), _by_id(given.resources, owners)
    keys, held = key_directory(given), [*owners, *map(str, beside)]
    if not given.insecure_plaintext and not all(map(keys.has, held)):
        certificates.ensure_authority(keys)
        certificates.issue_missing(keys, held[1:])
    paths = {str(worker.id): f"workers[{k}]" for k, worker in enumerate(config.workers)}
    paths["local"] = "coordinator"
    given.port = config.coordinator.port
    processes = []
    for owner in owners:
        entry, files = config.machine(owner), [keys.bundle(owner)]
        if owner == "local":
            files += [*map(keys.bundle, beside), *[keys.path / REVOKED] * keys.holds(REVOKED)]
        files *= not given.insecure_plaintext
        host = hosts.get(owner, None if addresses.is_local_address(entry.ip) else entry.ip)
        processes.append(Launched(owner, entry, paths[owner], host, needs.get(owner), files))
    return processes


def _by_id(given: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """The values of a repeated option ID=VALUE, by id. Raises UserError."""
    values = {owner: value for owner, _, value in (text.partition("=") for text in given)}
    for owner, value in values.items():
        if owner not in known or not value:
            raise UserError(f"{owner}={value} is not ID=VALUE with an ID of: {', '.join(known)}")
    return values


def named_paths(config: Config, *sections: str) -> dict[str, Path]:
    """Paths of this machine that strings of these sections (default: of all) name. These are paths
    that exist, and all paths outside the configuration's folder."""
    base, raw = config.base_dir.absolute(), config.to_dict()
    texts = {text for name in sections or raw for text in _texts(raw.get(name))}
    paths = {text: Path(os.path.normpath(base / text)) for text in sorted(texts)}
    return {text: p for text, p in paths.items() if p.exists() or not p.is_relative_to(base)}


def _texts(content: Any) -> Iterator[str]:
    """All strings within a value of the configuration that could be paths."""
    if isinstance(content, str):
        if content and "\n" not in content and len(content) < 1024:
            yield content
    elif isinstance(content, (dict, list, tuple)):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _texts(part)


def _mounts(config: Config, hidden: Iterable[Path]) -> dict[str, str]:
    """Named files and folders outside the configuration's folder, by their places in a container.
    Raises UserError for a path that does not exist, or that holds a `hidden` folder."""
    base, mounts = config.base_dir.resolve(), dict[str, str]()
    for text, path in named_paths(config).items():
        source = path.resolve()
        if path.exists() and source.is_relative_to(base):
            continue
        target = Path(os.path.normpath(Path("/project") / text))
        if target.is_relative_to("/project"):  # a link that leads out of the folder
            target = source
        shows = any(folder.resolve().is_relative_to(source) for folder in hidden)
        if not path.exists() or shows or ":" in f"{source}{target}":
            why = "it holds the keys" if shows else "it does not exist, or has a colon in its name"
            raise UserError(
                f"{text}, which the configuration names, cannot be mounted: {why}",
                hint="make it first, or put it beside the configuration",
            )
        mounts[str(target)] = str(source)
    return mounts


def imported(given: Namespace, folder: str) -> dict[str, str]:
    """The files of --import, by their places in a folder elsewhere."""
    return {f"{folder}/{k}.py": file for k, file in enumerate(given.imports)}


def slurm(config: Config, given: Namespace, processes: Sequence[Launched]) -> dict[str, bytes]:
    """A batch script: a heterogeneous job with a component for each process. Its nodes have to see
    the files of the machine where it is written."""
    components, nodes, starts = [], [], []
    for k, process in enumerate(processes):
        needs = process.needs or "--gpus-per-node=1" * (process.entry.device != "cpu")
        components.append(f"#SBATCH --nodes=1 --ntasks=1 {needs}".rstrip())
        nodes.append(f'node{k}=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{k}")')
        own_keys = f"{given.output}/keys/{process.name}"
        words = [given.hetero, *process.words(given, given.config, own_keys, given.imports)]
        log = f'--output="hetero-$SLURM_JOB_ID-{process.name}.log"'
        starts.append(f'srun --het-group={k} {log} {shlex.join(words)} "$@"')
    settings = _settings(processes, lambda process: f"$node{processes.index(process)}")
    script = template("slurm.sh").substitute(
        components="\n#SBATCH hetjob\n".join(components),
        nodes="\n".join(nodes),
        names=" ".join(f'"$node{k}"' for k in range(len(processes))),
        settings=" ".join(f'--set "{setting}"' for setting in settings),
        workers="".join(f"{start} &\n" for start in starts[1:]),
        coordinator=starts[0],
    )
    return {"slurm.sh": script.encode(), **_keys(processes)}


def compose(config: Config, given: Namespace, processes: Sequence[Launched]) -> dict[str, bytes]:
    """Services on one machine. They see the configuration's folder, but not keys and launches."""
    file, output = Path(given.config), Path(given.output)
    hidden = {output, *file.parent.glob(FOLDER), *(key.parent for key in processes[0].keys)}
    inside = sorted(p.relative_to(file.parent) for p in hidden if p.is_relative_to(file.parent))
    settings = _settings(processes, lambda process: process.name)
    imports, outside = imported(given, "/imports"), _mounts(config, hidden)
    service_of, user = template("compose.yaml"), "1000:1000"
    if sys.platform != "win32":
        user = f"{os.getuid()}:{os.getgid()}"
    groups = sorted({str(device.stat().st_gid) for device in _DRI.glob("render*")})
    services: dict[str, Any] = {}
    for process in processes:
        kind, _, index = process.entry.device.partition(":")
        kind = kind if kind in ("cuda", "rocm") else "cpu"
        filled = service_of.substitute(kind=kind, index=index or "0", user=user, groups=groups)
        service = services[process.name] = yaml.safe_load(filled)[kind]
        service["build"]["context"] = str(_REPOSITORY)
        words = process.words(given, f"/project/{file.name}", "/keys", imports, *settings)
        # The coordinator ends all.
        service["command"] = words if process.id == "local" else [*words, "--keep"]
        volumes = {"/project": file.parent, "/cache": "cache", **outside, **imports}
        volumes |= {"/keys": output / "keys" / process.name} if process.keys else {}
        service["volumes"] = [f"{source}:{target}" for target, source in volumes.items()]
        service["tmpfs"] = [f"/project/{path}" for path in inside]
    # Compose then stops the coordinator first, which saves while the workers are there.
    services["coordinator"]["depends_on"] = [process.name for process in processes[1:]]
    whole = {"services": services, "volumes": {"cache": {}}}
    text: str = yaml.safe_dump(whole, sort_keys=False, width=1000)
    return {"compose.yaml": text.replace("$", "$$").encode(), **_keys(processes)}


def sky(config: Config, given: Namespace, processes: Sequence[Launched]) -> dict[str, bytes]:
    """A task for each machine, and a script that launches them. Workers dial the coordinator. A
    coordinator on this machine has no task: the script ends by running it."""
    home, files, imports = processes[0], _keys(processes), imported(given, "imports")
    if addresses.is_loopback(home.entry.ip):
        text = f"rented machines cannot dial coordinator.ip, {home.entry.ip}"
        raise UserError(text, hint="write an address of this machine that they reach")
    named = named_paths(config, *["model"] * (home.host is None))
    if lacking := [t for t, p in named.items() if not p.is_relative_to(config.output_dir)]:
        text = f"the rented machines have no {', '.join(lacking)}, which the configuration names"
        raise UserError(text, hint="name it as the hub does, or train with --ssh or --compose")
    settings = _settings(processes, lambda p: home.entry.ip if p is home else p.name)
    settings += [f"{process.path}.port=null" for process in processes[1:]]
    settings += ["training.connect_timeout_s=3600"]  # machines are rented one after the other
    launches, last = [], ""
    for process in processes if home.host is not None else processes[1:]:
        if process.needs is None and process.entry.device != "cpu":
            text = f"--resources {process.id}=NAME:COUNT has to say which accelerator it gets"
            raise UserError(text, hint="or set its device to cpu")
        needs: dict[str, Any] = {"accelerators": process.needs} if process.needs else {"cpus": "4+"}
        mounts = {Path(given.config).name: given.config, **imports}
        mounts |= {f"{FOLDER}/{f.name}": f"keys/{process.name}/{f.name}" for f in process.keys}
        file, address = f"{process.name}.yaml", "$ADDRESS"
        task = f"hetero-{process.name}"
        launches.append(f'sky launch -y -d -c {task} {file} --env ADDRESS="$address"')
        if process is home:
            needs["ports"], address = given.port, "$(hostname -I | cut -d ' ' -f 1)"
            launches.append(f"address=$(sky status --ip {task})")
        words = process.words(given, Path(given.config).name, FOLDER, imports, *settings)
        start = f'exec hetero {shlex.join(words)} --set "coordinator.ip={address}"'
        filled = template("sky.yaml").substitute(
            task=task,
            resources=_json(needs),
            mounts=_json({f"~/hetero/{at}": source for at, source in mounts.items()}),
            version=__version__,
            run=_json(f"cd ~/hetero && chmod -R go= . && {start}"),
        )
        files[file] = filled.encode()
    if home.host is None:
        own_keys = f"{given.output}/keys/{home.name}"
        words = home.words(given, given.config, own_keys, given.imports, *settings)
        last = f"exec hetero {shlex.join(words)}\n"
    filled = template("sky.sh").substitute(
        address=home.entry.ip, launches="\n".join(launches), last=last
    )
    return {"sky.sh": filled.encode(), **files}


def _json(value: Any) -> str:
    """A value as JSON, which YAML reads, too."""
    return json.dumps(value, ensure_ascii=False)


def template(name: str) -> Template:
    return Template(Path(__file__).with_name(f"launch_{name}").read_text(encoding="utf-8"))


def _keys(processes: Sequence[Launched]) -> dict[str, bytes]:
    files = ((process, file) for process in processes for file in process.keys)
    return {f"keys/{process.name}/{file.name}": file.read_bytes() for process, file in files}


def _settings(processes: Sequence[Launched], address: Callable[[Launched], str]) -> list[str]:
    """Settings that say where the processes are. Each process sees one device, as the first."""
    found = []
    for process in processes:
        kind = process.entry.device.partition(":")[0]
        values = (f"ip={address(process)}", "hostname=null", f"device={kind}")
        found += [f"{process.path}.{value}" for value in values]
    return found


def write(folder: Path, files: Mapping[str, bytes], *, force: bool) -> None:
    """Make `folder` hold exactly these files, for this user alone, in one step. Raises UserError
    where it holds other files, unless `force`, and where no launch has made it."""
    files, mark = {".gitignore": _MARK, **files}, folder / ".gitignore"
    is_ours = mark.is_file() and mark.read_bytes() == _MARK
    if folder.exists() and not is_ours:
        raise UserError(f"{folder} is there already", hint="--output DIR chooses another")
    present = [path for path in folder.rglob("*") if path.is_file()]
    there = {path.relative_to(folder).as_posix(): path.read_bytes() for path in present}
    if there == files:
        return
    if there and not force:
        differing = sorted(name for name in there | files if there.get(name) != files.get(name))
        text = f"{folder} differs from what would be written: {', '.join(differing[:5])}"
        raise UserError(text, hint="--overwrite replaces it; --output DIR chooses another")
    new, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    try:
        discard(new)
        for name, content in files.items():
            (new / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(new / name, content)
        replace_directory(new, folder, old)
    except OSError as error:
        raise of_disk(error, UserError)(f"cannot write {folder}: {in_words(error)}") from error
