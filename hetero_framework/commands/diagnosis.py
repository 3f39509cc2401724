"""`hetero doctor --config`: finds what would stop a run, as seen from here, and says what to do.

Each check is a function that yields an error for each obstacle in a `MachineView`; the error's hint
says what to do. `CHECKS` lists the checks here, and the registry's table "findings" lists the
checks of extras. The coordinator's machine asks the workers that are up and lets them go again. A
worker that serves a run is left alone.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from transformers import PretrainedConfig

from hetero_framework import control, registry, versions
from hetero_framework.cluster import link_probe, worker_info
from hetero_framework.cluster.cluster import MachineFacts
from hetero_framework.cluster.roles import Role, machine_of
from hetero_framework.cluster.worker_links import WorkerLinks
from hetero_framework.commands.options import role_here
from hetero_framework.commands.preflight import raised, refusals
from hetero_framework.config import Config, Machine, WorkerConfig, process_name
from hetero_framework.core import addresses, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.devices import open_device
from hetero_framework.core.dial import DROPS_LARGE, MTU_ADVICE, connect
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Message
from hetero_framework.core.threads import in_background
from hetero_framework.engine.hosts import LinkLost
from hetero_framework.errors import (
    ConfigError,
    HeteroError,
    NetworkError,
    PeerLostError,
    UserError,
    attempt,
)
from hetero_framework.models.cut.attention import check_attention
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.files.quantization import check_devices, devices_known
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.memory import estimate_memory, recomputing
from hetero_framework.security.access import Access, KeyOptions, access_of
from hetero_framework.tables import lines, one_line
from hetero_framework.trainer.memory_checks import Facts, check_memory
from hetero_framework.units import bit_rate, seconds

_DIAL_S = 4.0
_CALL_S = 12.0  # a worker that dials does so every few seconds
_ANSWER_S = 20.0
_PROBE_BYTES = 1 << 20
_SLOW_BITS_PER_S = 100e6
_SLOW_ROUND_TRIP_S = 0.05
_CLOCK_S = 10.0
"""Most seconds that another machine's clock may be off."""


@dataclass(frozen=True)
class WorkerAnswer:
    """A worker's answer, or the reason why it gave none."""

    problem: HeteroError | None = None
    busy: str | None = None
    welcome: m.Welcome | None = None
    facts: dict[str, Any] | None = None
    speed: link_probe.LinkSpeed | None = None
    clock_s: float = 0.0  # the worker's clock minus ours
    drops_large: bool = False  # the worker answers only in small packets


@dataclass
class MachineView:
    """A configuration as this machine sees it; slow look-ups are made once. `port_in_use` guards
    the coordinator's port, where workers that dial are awaited one after the other."""

    config: Config
    role: Role | None
    options: KeyOptions | None = None
    notes: list[str] = field(default_factory=list)
    port_in_use: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_coordinator(self) -> bool:
        return "local" in self.local_ids

    @property
    def local_ids(self) -> tuple[WorkerId, ...]:
        """The processes of this machine."""
        return () if self.role is None else self.role.ids

    @property
    def remote_workers(self) -> list[WorkerConfig]:
        return [worker for worker in self.config.planned_workers if worker.id not in self.local_ids]

    @cached_property
    def access(self) -> Access | UserError:
        """The credentials of a run here, or the reason why there are none."""
        process = (*self.local_ids, "local")[0]
        return attempt(lambda: access_of(self.config, process, self.options))

    @cached_property
    def model(self) -> PretrainedConfig | UserError | None:
        """The model's configuration, or its error; None without a `model` section."""
        if self.config.model is None:
            return None
        return attempt(lambda: ModelSource.of(self.config).config)

    @cached_property
    def workers(self) -> dict[WorkerId, WorkerAnswer]:
        """Answers of the workers on other machines, all asked at once."""
        asked = {
            worker.id: in_background(partial(ask_worker, self, worker), "ask")
            for worker in self.remote_workers
        }
        calls_s = _CALL_S * sum(worker.dials for worker in self.remote_workers)
        deadline = time.monotonic() + calls_s + 2 * (_DIAL_S + timeouts.HANDSHAKE_S) + _ANSWER_S
        answers = {}
        for id, future in asked.items():
            try:
                answers[id] = future.result(max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                answers[id] = WorkerAnswer(NetworkError(f"worker {id} does not answer in time"))
        return answers


# -- asking ---------------------------------------------------------------------------------------


def ask_worker(view: MachineView, worker: WorkerConfig) -> WorkerAnswer:
    """Greet a worker as a run would, ask for its facts, measure its link, and let it go. A machine
    that is not the coordinator's, or has no access, only opens and closes a connection."""
    access, who = view.access, f"worker {worker.id}"
    if (port := worker.port) is not None:
        knock = attempt(lambda: connect(worker.ip, port, _DIAL_S, who=who).close())
        if isinstance(knock, UserError):
            return WorkerAnswer(knock)
    if not view.is_coordinator or isinstance(access, UserError):
        return WorkerAnswer()
    if worker.dials:
        with view.port_in_use:
            return _greet(view, worker, access, _CALL_S)
    answer = _greet(view, worker, access, _DIAL_S)
    if not isinstance(answer.problem, (NetworkError, PeerLostError)):
        return answer
    again = _greet(view, worker, access, _DIAL_S, small_packets=True)
    return answer if again.problem is not None else replace(again, drops_large=True)


def _greet(
    view: MachineView,
    worker: WorkerConfig,
    access: Access,
    patience_s: float,
    small_packets: bool = False,
) -> WorkerAnswer:
    """Hold a run that consists only of a greeting and two questions."""
    plan = [{"id": "local", "start": 0, "end": 1}, {"id": worker.id, "start": 1, "end": 2}]
    times = {"connect_timeout_s": patience_s, "liveness_timeout_s": _DIAL_S}
    alone = view.config.with_changes(shard_plan=plan, training=times)
    run, most = secrets.token_hex(8), 16 * _PROBE_BYTES
    links = WorkerLinks(
        alone, run, most, access=access, small_packets=small_packets, session="measurement"
    )
    farewell = m.Error("UserError", "hetero doctor has looked at it", None)
    try:
        links.listen()
        welcome = links.connect_all()[worker.id]
        ask = partial(_answer, links, worker.id)
        began = time.time()
        answer = ask(control.request(1, worker_info.ABOUT, None))
        trip_s = time.time() - began
        facts = control.result(answer)
        answer.release()
        clock_s = facts["clock"] - began - trip_s / 2
        speed = link_probe.measure(ask, _PROBE_BYTES)
        return WorkerAnswer(None, None, welcome, facts, speed, clock_s)
    except HeteroError as error:
        busy = isinstance(error, NetworkError) and " refused: it " in error.message
        return WorkerAnswer(busy=error.message) if busy else WorkerAnswer(error)
    except (LinkLost, KeyError, TypeError) as error:
        return WorkerAnswer(PeerLostError(f"worker {worker.id} gave no answer ({error})"))
    finally:
        links.close(Message(farewell), timeouts.STOP_S)


def _answer(
    links: WorkerLinks, worker: WorkerId, question: Message, then: Message | None = None
) -> Message:
    links.send(worker, question)
    if then is not None:
        links.send(worker, then)
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        event = links.receive(timeouts.ANSWER_TICK_S)
        if event is not None and event.message is not None:
            if isinstance(event.message.body, m.Control):
                return event.message
            event.message.release()
    raise PeerLostError(f"worker {worker} has not answered in {_ANSWER_S:.0f} s")


# -- checks ---------------------------------------------------------------------------------------

Findings = Iterator[HeteroError]


def version(view: MachineView) -> Findings:
    yield from raised(versions.check)
    here = worker_info.facts()["versions"]
    for id, asked in view.workers.items():
        there = here if asked.facts is None else asked.facts.get("versions", {})
        for name in here:
            if _release(there.get(name)) != _release(here[name]):
                yield UserError(
                    f"worker {id} has {name} {there.get(name)}, this machine {here[name]}",
                    hint="install the same version on both; results are equal to the bit only then",
                )


def _release(text: Any) -> str:
    return str(text).partition("+")[0]


def role(view: MachineView) -> Findings:
    if view.role is None:
        yield ConfigError(
            "nothing in the configuration names this machine",
            hint="correct hostname or ip of its entry, or start it with --role or --worker-id",
        )


def places(view: MachineView) -> Findings:
    """Names unknown here, names that mean loopback on their machine (Debian's 127.0.1.1), and
    addresses that this machine does not have."""
    machines: dict[WorkerId, Machine] = {"local": view.config.coordinator}
    machines |= {worker.id: worker for worker in view.config.planned_workers}
    alone = len({machine_of(view.config, machine) for machine in machines.values()}) == 1
    for id, machine in machines.items():
        if isinstance(machine, WorkerConfig) and machine.dials:
            continue  # nobody needs its address
        ip, who, is_here = machine.ip, process_name(id), id in view.local_ids
        is_name = addresses.parsed(ip) is None
        if is_name and not addresses.resolve(ip):
            hint = "check the spelling, or give the machine's IP address"
            yield NetworkError(f"the name {ip!r} of {who} is not known here", hint=hint)
        elif is_name and is_here and not alone and addresses.is_loopback_by_name(ip):
            yield NetworkError(
                f"the name {ip!r} of {who} is a loopback address on this machine, which no other"
                " one can reach",
                hint=f"give its ip as {addresses.primary_address()}, or correct /etc/hosts",
            )
        elif is_here and not addresses.is_local_address(ip):
            yield NetworkError(
                f"{who} is on this machine, which does not have its address {ip}",
                hint=f"give its ip as one of {', '.join(addresses.addresses_for_others()[:6])}",
            )


def keys(view: MachineView) -> Findings:
    if isinstance(view.access, UserError):
        yield view.access


def port(view: MachineView) -> Findings:
    """Ports of this machine's workers that another program uses."""
    for worker in (view.config.worker(id) for id in view.local_ids if id != "local"):
        ip, number = worker.ip, worker.port
        if number is None or not addresses.is_local_address(ip):
            continue
        if addresses.port_is_free(ip, number):
            continue
        asked = ask_worker(view, worker)
        holder = addresses.port_holder(number) or "another program"
        used = f"port {number} of worker {worker.id} is used by {holder}"
        if not view.is_coordinator:
            view.notes.append(used)
        elif asked.problem is not None:
            hint = f'stop it, or change "port" of worker {worker.id} on all machines'
            yield NetworkError(f"{used}, which is not a worker", hint=hint)


def reach(view: MachineView) -> Findings:
    """Workers out of reach. For a silent worker in another network the finding says so."""
    for id, asked in view.workers.items():
        if asked.busy is not None:
            view.notes.append(asked.busy)
        if asked.problem is None:
            continue
        text, hint = asked.problem.message, asked.problem.hint or "look at its screen or log"
        networks = addresses.local_networks()
        away = "no route" in text or "no answer" in text
        if away and addresses.in_none(view.config.machine(id).ip, networks):
            text += f"; this machine is in {', '.join(map(str, networks))} only"
            hint = f"put both into one network, or give the address of worker {id} in this one"
        yield NetworkError(text, hint=hint)


def clock(view: MachineView) -> Findings:
    for id, asked in view.workers.items():
        yield from wrong_clock(f"worker {id}", asked.clock_s)


def wrong_clock(where: str, off_s: float) -> Findings:
    """Yield an error if the clock of `where`, `off_s` seconds ahead of ours, is too far off."""
    if abs(off_s) > _CLOCK_S:
        way = "ahead of" if off_s > 0 else "behind"
        yield UserError(
            f"the clock of {where} is {seconds(abs(off_s))} {way} this machine's",
            hint="set both by the network (timedatectl set-ntp true); certificates and logs need"
            " it",
        )


def link(view: MachineView) -> Findings:
    for id, asked in view.workers.items():
        if asked.drops_large:
            text = f"worker {id} answers in small packets only: {DROPS_LARGE}"
            yield NetworkError(text, hint=MTU_ADVICE)
        if (speed := asked.speed) is None:
            continue
        slowest = min(speed.up_bytes_per_s, speed.down_bytes_per_s)
        if 8 * slowest < _SLOW_BITS_PER_S or speed.round_trip_s > _SLOW_ROUND_TRIP_S:
            yield NetworkError(
                f"the link to worker {id} is slow: {bit_rate(slowest)}, round trip"
                f" {seconds(speed.round_trip_s)}",
                hint='take a cable instead of Wi-Fi, or set wire to "bf16" or "int8"; hetero plan'
                " --measure tells what a step takes",
            )


def configuration(view: MachineView) -> Findings:
    """Problems for which `hetero train` would not start a process."""
    yield from refusals(view.config, data=view.is_coordinator, writes=view.is_coordinator)


def model(view: MachineView) -> Findings:
    """A model that cannot be loaded, or whose layers the plan does not cover."""
    loaded = view.model
    if isinstance(loaded, UserError):
        yield loaded
    elif loaded is not None and view.config.is_planned:
        yield from raised(lambda: view.config.plan.covers(introspect(loaded).num_layers))
    if not view.config.is_planned:
        view.notes.append(
            'shard_plan is "auto" and no plan has been made yet: memory is not checked'
        )


def devices(view: MachineView) -> Findings:
    """Devices that are absent, or that cannot hold or train their process's part of the model."""
    facts, absent = facts_here(view.config, view.local_ids)
    yield from absent
    if not isinstance(view.model, PretrainedConfig):
        return
    answers = view.workers.items()
    facts |= {id: MachineFacts.of(asked.welcome) for id, asked in answers if asked.welcome}
    reasons = devices_known(view.config) | {id: fact.no_four_bit for id, fact in facts.items()}
    checks: list[Callable[[], object]] = [partial(check_devices, view.config, view.model, reasons)]
    if view.config.is_planned:
        names = {id: fact.device for id, fact in facts.items()}
        checks.append(partial(check_attention, view.config, names))
        checks.append(partial(_fit, recomputing(view.config), view.model, facts))
    for error in (error for check in checks for error in raised(check)):
        for line in error.message.splitlines():
            yield type(error)(line, hint=error.hint)


def facts_here(
    config: Config, local: Iterable[WorkerId]
) -> tuple[dict[WorkerId, MachineFacts], list[UserError]]:
    """The facts of the `local` processes, which this machine runs, and an error for each device
    that cannot be opened."""
    facts: dict[WorkerId, MachineFacts] = {}
    errors: list[UserError] = []
    for owner in local:
        device = attempt(partial(open_device, config.machine(owner).device))
        if isinstance(device, UserError):
            text = f"{process_name(owner)}: {device.message}"
            errors.append(type(device)(text, hint=device.hint))
            continue
        memory, more = device.memory(), (device.no_four_bit, device.host_free)
        about = (device.name, device.label, memory.total, memory.free)
        facts[owner] = MachineFacts(*about, *more)
    return facts, errors


def _fit(config: Config, model: PretrainedConfig, facts: Facts) -> None:
    """Raise PlanError if stages do not fit the devices that are known."""
    memory = [
        stage.placed(facts[owner].device, one_memory=facts[owner].host_free is None)
        for stage in estimate_memory(config, model)
        if (owner := stage.stage.owner) in facts
    ]
    check_memory(config, memory, facts, model)


CHECKS: tuple[Callable[[MachineView], Findings], ...] = (
    *(version, role, places, keys, port, reach, clock, link, configuration, model),
    devices,
)


def diagnose(
    config: Config, *, worker_id: WorkerId | None = None, options: KeyOptions | None = None
) -> dict[str, Any]:
    """All findings, as JSON types; `worker_id` is the worker of this machine."""
    view = MachineView(config, role_here(config, worker_id, options), options)
    checks = [(check.__name__, check) for check in CHECKS]
    checks += [(name, registry.find("findings", name)) for name in registry.installed("findings")]
    found: dict[str, dict[str, str]] = {}  # by `what`, since two checks may find the same
    for name, check in checks:
        for error in check(view):
            what = error.message
            found.setdefault(what, {"check": name, "what": what, "fix": error.hint or ""})
    here = " and ".join(map(process_name, view.local_ids)) or "nothing in this configuration"
    return {"this_machine": here, "findings": list(found.values()), "notes": view.notes}


def text(result: dict[str, Any]) -> str:
    """The report for a person: two lines for each finding, what is wrong and what to do."""
    found = [(one_line(f["what"]), one_line(f["fix"])) for f in result["findings"]]
    return lines(
        f"this machine is {result['this_machine']}",
        *(f"wrong: {what}" + f"\n    do: {fix}" * bool(fix) for what, fix in found),
        *(f"note: {one_line(note)}" for note in result["notes"]),
        None if found else "nothing is wrong",
    )
