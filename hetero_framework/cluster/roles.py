"""The processes of a plan that belong to this machine.

They are decided by --role and --worker-id, else by comparing the configuration with this machine's
addresses and host names, else by this machine's keys. No name is resolved.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hetero_framework.config import Config, Machine, WorkerConfig, normal_host
from hetero_framework.config.cards import ALL
from hetero_framework.core import addresses
from hetero_framework.core.identity import key_owner
from hetero_framework.errors import ConfigError, UserError


class Unnamed(ConfigError):
    """Nothing in the configuration names this machine."""


_ANY_MACHINE = {"", "localhost", "localhost.localdomain"}


@dataclass(frozen=True)
class MachineNames:
    """Names and addresses of one machine, in the spelling of `normal_host`."""

    names: frozenset[str]
    addresses: frozenset[str]

    @classmethod
    def of(cls, names: list[str], addresses: list[str]) -> MachineNames:
        return cls(
            frozenset(normal_host(name) for name in names if name),
            frozenset(normal_host(address) for address in addresses),
        )


@dataclass(frozen=True)
class Role:
    """The processes that a machine runs. The coordinator starts the workers of its own machine."""

    is_coordinator: bool
    worker_ids: tuple[int | str, ...]

    @property
    def ids(self) -> tuple[int | str, ...]:
        return (*("local",) * self.is_coordinator, *self.worker_ids)


def this_machine() -> MachineNames:
    """Names of the machine this process runs on."""
    return MachineNames.of(addresses.local_hostnames(), addresses.local_addresses())


def decide_role(
    config: Config,
    *,
    role: str | None = None,
    worker_id: int | str | None = None,
    identity: MachineNames | None = None,
    keys: Collection[str] = (),
) -> Role:
    """The role of this machine, by `role` ("coordinator" or "worker") and `worker_id`, a worker or
    all devices of one, if given. If the configuration does not name the machine, `keys`, the owners
    of its keys, decide. Raises ConfigError when these contradict each other or do not decide."""
    identity = identity or this_machine()
    if role == "coordinator":
        if worker_id is not None:
            raise ConfigError("--role coordinator and --worker-id exclude each other")
        return Role(True, local_worker_ids(config, identity))
    if worker_id is not None:
        all_cards = [w for w in config.workers if key_owner(w.id) == str(worker_id)]
        return Role(False, _planned(config, all_cards or [config.worker(worker_id)]))
    if role is None and _is_coordinator(config, identity):
        return Role(True, local_worker_ids(config, identity))
    here = [w for w in config.workers if _names_machine(config, w, identity)]
    if not here and "local" not in keys:
        here = [worker for worker in config.workers if key_owner(worker.id) in keys]
    if here:
        return Role(False, _planned(config, here))
    all_loopback = all(map(_is_loopback, (config.coordinator, *config.workers)))
    ids = local_worker_ids(config, identity) if role == "worker" and all_loopback else ()
    if not ids:
        raise Unnamed(_no_role(config, identity), hint=_HINT)
    return Role(False, ids)


def with_own_devices(config: Config) -> Config:
    """The configuration with the accelerators of this machine, else its CPU, in place of "all" of
    coordinator.devices. On another machine "all" stays. Raises ConfigError if a worker still has
    "all": its machine has not joined yet."""
    for worker in config.workers:
        if worker.devices == ALL:
            raise ConfigError(
                f'the devices of worker {worker.id} are "all", and only its machine knows which',
                hint=f"have it join (hetero invite {worker.id}), or list them in the file, as in"
                ' "devices": ["cuda:0", "cuda:1"]',
            )
    home = config.coordinator
    if home.devices != ALL or not addresses.is_local_address(home.ip):
        return config
    return config.with_changes(coordinator={"devices": devices_here()})


def devices_here() -> list[str]:
    """The accelerators of this machine by their names, else its CPU."""
    from hetero_framework.core.devices import list_devices  # imports torch

    return [device.name for device in list_devices() if device.kind != "cpu"] or ["cpu"]


def check_coordinator(role: Role, what: str) -> None:
    """Raise UserError on a machine that has workers alone; `what` runs on the coordinator's."""
    if not role.is_coordinator:
        names = " and ".join(f"worker {worker}" for worker in role.worker_ids)
        raise UserError(
            f"this machine is {names}; {what} runs on the coordinator's",
            hint="here, run hetero worker",
        )


def local_worker_ids(config: Config, identity: MachineNames | None = None) -> tuple[int | str, ...]:
    """Workers of the plan on the coordinator's machine, if that is the machine of `identity`."""
    identity = identity or this_machine()
    return tuple(
        worker.id
        for worker in config.planned_workers
        if machine_of(config, worker) == machine_of(config, config.coordinator)
        or _names_machine(config, worker, identity)
    )


def machine_of(config: Config, machine: Machine) -> str:
    """A key that is equal for entries of the same machine; loopback is the coordinator's."""
    home = normal_host(config.coordinator.ip)
    host = home if _is_loopback(machine) else normal_host(machine.ip)
    return normal_host("localhost") if _is_loopback(config.coordinator) and host == home else host


def threads_for(
    config: Config,
    owner: int | str,
    *,
    cores: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """CPU threads of the process of `owner` ("local" or a worker id): OMP_NUM_THREADS, else the
    entry's num_threads, else an even share of this machine's cores; at least 1."""
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdigit() and int(given) > 0:
        return int(given)
    entry = config.machine(owner)
    if entry.num_threads is not None:
        return entry.num_threads
    here = machine_of(config, entry)
    everyone: list[Machine] = [config.coordinator, *config.planned_workers]
    sharers = sum(machine_of(config, other) == here for other in everyone)
    return max(1, (cores or available_cores()) // sharers)


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _planned(config: Config, workers: list[WorkerConfig]) -> tuple[int | str, ...]:
    ids = tuple(worker.id for worker in workers if worker in config.planned_workers)
    if not ids:
        names = " and ".join(f"worker {worker.id}" for worker in workers)
        raise ConfigError(
            f"{names} has no entry in shard_plan, so there is nothing to serve here",
            hint="add an entry for it to shard_plan on every machine, or leave this one out",
        )
    return ids


def _is_coordinator(config: Config, identity: MachineNames) -> bool:
    if _names_machine(config, config.coordinator, identity):
        return True
    # A loopback address means "this machine" everywhere: it counts only if no worker is here.
    return _is_loopback(config.coordinator) and not any(
        _names_machine(config, worker, identity)
        for worker in config.workers
        if not _is_loopback(worker)
    )


def _names_machine(config: Config, machine: Machine, identity: MachineNames) -> bool:
    """Whether an entry names this machine by its address, DNS name or host name."""
    if not _is_loopback(machine) and normal_host(machine.ip) in identity.addresses:
        return True
    if not _is_address(machine.ip) and not _is_loopback(machine):
        return _same_name(machine.ip, identity)
    hostname = normal_host(machine.hostname or "")
    if hostname in _ANY_MACHINE or _is_address(hostname) or not _same_name(hostname, identity):
        return False
    # Cloned machines share a host name; then it tells nothing and the addresses decide.
    everyone: list[Machine] = [config.coordinator, *config.workers]
    return all(
        machine_of(config, other) == machine_of(config, machine)
        for other in everyone
        if normal_host(other.hostname or "") == hostname
    )


def _same_name(name: str, identity: MachineNames) -> bool:
    """Compare host names; "box" and "box.lan" are the same, "box.lan" and "box.org" are not."""
    wanted = normal_host(name)
    return any(
        wanted == known
        or (("." in wanted) != ("." in known) and wanted.split(".")[0] == known.split(".")[0])
        for known in identity.names
    )


def _is_address(host: str) -> bool:
    return addresses.parsed(host) is not None


def _is_loopback(machine: Machine) -> bool:
    address = addresses.parsed(normal_host(machine.ip))
    return address is not None and address.is_loopback


_HINT = (
    "Correct hostname or ip of this machine's entry, or give its role: --role coordinator, or"
    " --worker-id ID."
)


def _no_role(config: Config, identity: MachineNames) -> str:
    entries = [("coordinator", config.coordinator)]
    entries += [(f"worker {worker.id}", worker) for worker in config.workers]  # type: ignore[misc]
    shown = [f"    {name}: {m.hostname or 'no host name'}, {m.ip}" for name, m in entries[:12]]
    if len(entries) > 12:
        shown.append(f"    ... and {len(entries) - 12} more")
    return (
        "nothing in the configuration names this machine\n"
        f"  this machine: {_few(identity.names)}; {_few(identity.addresses)}\n"
        "  the configuration:\n" + "\n".join(shown)
    )


def _few(names: frozenset[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "") or "nothing known"
