"""Whole steps of a pipeline: the product beside torch.distributed.pipelining and a naive star.

    python -m benchmarks.pipeline --stages 4 --micro-batches 16 --forward-ms 20 --backward-ms 40 \\
        --activation-mb 2.1 --chunks 1 --links relay --network loopback \\
        --peers torch-1f1b,torch-interleaved,serial

Everything but the stages is what training uses: `Cluster`, its coordinator's links, schedule and
relay, and worker processes that run `worker.serve`. Stages sleep, which costs no CPU, so that two
cores can play any number of devices; `--devices cpu` computes a small Llama instead, one thread
for each process. benchmarks/README.md explains the parameters and figures.

Prints one JSON object per engine. `--slow-ms` makes every forward slower than the bound is told,
to see that the measurement notices; `--save NAME` keeps the result under benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from benchmarks import environment, torch_peers
from benchmarks.machines import Machines, run_program
from benchmarks.network import RATES_BIT_S, Counters, Network, carried, flows_of, open_network
from benchmarks.stages import Llama, Load, slept
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.cluster.worker import serve
from hetero_framework.config import Config
from hetero_framework.core import link, send_queue
from hetero_framework.core.codecs import CODECS
from hetero_framework.core.frames import DEFAULT_MAX_FRAME_BYTES
from hetero_framework.core.send_queue import CHECKSUM_BYTES
from hetero_framework.engine.pipeline import StageStatistics
from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.engine.stage_api import StepInfo, Tensors
from hetero_framework.errors import HeteroError, UserError
from hetero_framework.security.access import Access, KeyOptions, Plaintext, access_of

_START_S = 120.0
_SLOWEST = 20.0
_COMPUTING_LIMIT_S = 180.0
_WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Engine:
    """One way to have the product run a case. `leak_bytes` are kept in every step, to see that
    a measurement of memory notices."""

    links: str = "relay"
    activations: str = "none"
    gradients: str = "none"
    max_in_flight: int | None = None
    leak_bytes: int = 0

    def wire_share(self, load: Load) -> tuple[float, float]:
        """Bytes of an activation and a gradient on the wire, as a share of those of the tensor."""
        dtype = torch.float32 if load.llama is not None else torch.bfloat16
        shape = (max(1, load.activation_bytes // dtype.itemsize),)
        whole = shape[0] * dtype.itemsize
        names = (self.activations, self.gradients)
        forward, backward = (CODECS[name].nbytes(shape, dtype) / whole for name in names)
        return forward, backward

    @property
    def name(self) -> str:
        if self.max_in_flight == 1:
            return "serial"
        codecs = dict.fromkeys((self.activations, self.gradients))
        parts = ["hetero", self.links, *(c for c in codecs if (c != "none"))]
        return "-".join(parts)


@dataclass
class Samples:
    """What the steps of one engine took.

    `seconds[n]` lasts from the end of step n - 1 to the end of step n, one right after the other,
    so that work which one step leaves to the next is counted. `forward_s` and `backward_s` are what
    each stage computed, or really slept, in all of them. `bytes` is what all machines sent in them,
    None where nobody counts. `began_at` is by time.perf_counter().
    """

    seconds: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    bytes: int | None = None
    began_at: float = 0.0


class Product:
    """The processes of the product for one case; a context manager.

    `run` starts a run over them, through the same classes as training does, and has it do steps.
    """

    def __init__(
        self,
        network: Network,
        load: Load,
        *,
        verbose: bool = False,
        share: bool = True,
        checked: bool = True,
        keys: str | None = None,
        lead: Callable[..., None] | None = None,
    ) -> None:
        """`verbose`: what the coordinator notes goes to the screen. `share`: see `Machines`.
        `checked`: frames carry a checksum. `keys`: a directory with keys of all of them; without,
        nothing is encrypted. `lead` is what the coordinator's process does (`coordinate`)."""
        self.network = network
        self._load = load
        self._machines = Machines(share=share)
        self._workers = [
            self._machines.start(
                place,
                work,
                make_config(network, load, Engine(), listener=k).to_dict(),
                k,
                load,
                checked,
                keys,
            )
            for k, place in enumerate(network.places[1:], start=1)
        ]
        self._coordinator = self._machines.start(
            network.places[0], lead or coordinate, load, network.counters, verbose, checked, keys
        )

    @property
    def pids(self) -> list[int]:
        """Process ids: the coordinator's, then the workers'."""
        return [child.pid for child in (self._coordinator, *self._workers)]

    def __enter__(self) -> Product:
        for worker in self._workers:
            worker.receive(_START_S)
        return self

    def __exit__(self, *error: Any) -> None:
        self._machines.__exit__(*error)

    def run(self, engine: Engine, steps: int, timeout_s: float) -> Samples:
        """`steps` steps after those that warm up. Raises HeteroError when the run fails."""
        config = make_config(self.network, self._load, engine)
        self._coordinator.send((config.to_dict(), steps, engine.leak_bytes))
        samples: Samples = self._coordinator.receive(timeout_s)
        return samples


def make_config(
    network: Network, load: Load, engine: Engine, listener: int | None = None
) -> Config:
    """The configuration of a case. The machines reach each other where the network says; machine
    `listener` is given the address that it listens at itself.
    """
    addresses = list(network.reach)
    if listener is not None:
        addresses[listener] = (network.places[listener].address, network.places[listener].port)
    entries = [
        {"hostname": f"machine-{k}", "ip": ip, "port": port, "device": "cpu", "num_threads": 1}
        for k, (ip, port) in enumerate(addresses)
    ]
    model = {"from_config": load.llama.settings(), "dtype": "float32"} if load.llama else None
    adapter = {"r": 1, "target_modules": ["q_proj"]} if load.state_bytes else None
    return Config.from_dict(
        {
            "coordinator": entries[0],
            "workers": [{**entry, "id": k} for k, entry in enumerate(entries) if k],
            "shard_plan": load.plan(),
            "model": model,
            "adapter": adapter,
            "links": engine.links,
            "wire": {"activations": engine.activations, "gradients": engine.gradients},
            "training": {
                "connect_timeout_s": 30.0,
                "step_timeout_s": 60.0,
                "max_in_flight": engine.max_in_flight,
                "log_level": "ERROR",
            },
        }
    )


class _NoHasher:
    """In the place of the checksum's, to see what that costs."""

    def __init__(self, data: bytes = b"") -> None: ...
    def update(self, data: bytes | memoryview) -> None: ...
    def digest(self) -> bytes:
        return bytes(CHECKSUM_BYTES)


def do_without_checksums() -> None:
    """From here on, in this process. Both ends of a link must."""
    link.Hasher = send_queue.Hasher = _NoHasher  # type: ignore[attr-defined]


def access(config: Config, process: int | str, keys: str | None) -> Access:
    """With keys TLS, without them plaintext on any address."""
    if keys is None:
        return Plaintext(everywhere=True)
    return access_of(config, process, KeyOptions(Path(keys)))


def work(
    connection: Connection,
    config: dict[str, Any],
    worker: int,
    load: Load,
    checked: bool,
    keys: str | None = None,
) -> None:
    """A worker process: serves one run after the other until it is ended."""
    if not checked:
        do_without_checksums()
    logging.getLogger("hetero_framework").addHandler(_FirstLine(connection))
    made = Config.from_dict(config)
    serve(made, worker, build=load.build, keep=True, access=access(made, worker, keys))


class _FirstLine(logging.Handler):
    """Sends the first line of the log, which says that the worker listens."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection: Connection | None = connection

    def emit(self, record: logging.LogRecord) -> None:
        if self._connection is not None:
            self._connection.send(record.getMessage())
            self._connection = None


def coordinate(
    connection: Connection,
    load: Load,
    counters: Counters,
    verbose: bool,
    checked: bool,
    keys: str | None = None,
) -> None:
    """The coordinator's process: one run after the other, as it is told."""
    if not checked:
        do_without_checksums()
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    while True:
        raw, steps, leak_bytes = connection.recv()
        config = Config.from_dict(raw)
        with Cluster(
            config,
            max_frame_bytes=DEFAULT_MAX_FRAME_BYTES,
            build=load.build,
            access=access(config, "local", keys),
        ) as cluster:
            cluster.start()
            cluster.assemble(config)
            samples = measure(cluster, load, counters, steps, leak_bytes)
        connection.send(samples)


def measure(
    cluster: Cluster, load: Load, counters: Counters, steps: int, leak_bytes: int = 0
) -> Samples:
    """`steps` steps, one right after the other, after those by which max_in_flight is sized."""
    batches = load.batches()
    for number in range(_WARM_UP_STEPS):
        run_step(cluster, number, batches)
    cluster.pipeline.drain_commits()
    slept_seconds(cluster)  # from here on
    samples = Samples()
    computed: list[dict[int, StageStatistics]] = []
    leaked: list[bytes] = []
    before, cpu = counters.read(), time.process_time()
    last = samples.began_at = time.perf_counter()
    for number in range(_WARM_UP_STEPS, _WARM_UP_STEPS + steps):
        stages = run_step(cluster, number, batches)
        leaked.append(random.randbytes(leak_bytes))
        if number == _WARM_UP_STEPS + steps - 1:
            cluster.pipeline.drain_commits()
        now = time.perf_counter()
        samples.seconds.append(now - last)
        last = now
        computed.append(stages)
    samples.cpu_s = time.process_time() - cpu
    after = counters.read()
    if before is not None and after is not None:
        samples.bytes = after - before
    asleep = slept_seconds(cluster)
    for k in range(load.stages):
        forward_s = sum(stages[k].forward_s for stages in computed)
        backward_s = sum(stages[k].backward_s for stages in computed)
        forward_s, backward_s = asleep.get(k, (forward_s, backward_s))
        samples.forward_s.append(forward_s)
        samples.backward_s.append(backward_s)
    return samples


def slept_seconds(cluster: Cluster) -> dict[int, tuple[float, float]]:
    """What each sleeping stage of all processes has slept since the last call, forward and
    backward; nothing of stages that compute."""
    answers = [slept()]
    answers += [cluster.control(worker, "slept") for worker in cluster.workers]
    return {int(k): (f, b) for answer in answers for k, (f, b) in answer.items()}


def run_step(
    cluster: Cluster, number: int, batches: Sequence[Tensors]
) -> dict[int, StageStatistics]:
    """One training step, as the training loop does it; what each stage did."""

    def gradients() -> dict[int, StageStatistics]:
        cluster.begin(StepInfo(number, 0, True, len(batches), 1))
        cluster.pipeline.run(batches)
        _, stages = cluster.pipeline.report_gradients()
        return stages

    stages = cluster.retrying(gradients)
    cluster.pipeline.commit(0.0, 1.0, cluster.recovery.recover)
    cluster.observe(len(batches), stages)
    return stages


# -- figures ------------------------------------------------------------------------------------


def summarise(
    name: str,
    load: Load,
    profiles: Profiles,
    seconds: Sequence[float],
    wire: int | None,
) -> dict[str, Any]:
    """The figures that every engine has: seconds, shares of 1, bytes of a step.

    `wire` are the bytes of all steps. The bound that counts is made from what the stages really
    took, since no schedule can do anything about sleep that lasts longer than asked; the one from
    the times that were asked for stands beside it.
    """
    median = statistics.median(seconds)
    bound_s = step_bound(profiles.taken, load.micro_batches)
    busy = [work / median for work in work_of(profiles.taken, load)]
    figures = {
        "engine": name,
        "step_s": round(median, 4),
        "step_s_min": round(min(seconds), 4),
        "step_s_max": round(max(seconds), 4),
        "step_s_mean": round(statistics.fmean(seconds), 4),
        "bound_s": round(bound_s, 4),
        "ratio": round(median / bound_s, 4),
        **profiles.asked_figures(load, median),
        "busy_share": round(statistics.fmean(busy), 4),
        "busy_by_device": [round(share, 3) for share in busy],
        "bytes": round(wire / len(seconds)) if wire is not None else None,
        "steps": len(seconds),
    }
    if load.llama is not None:
        figures["tokens_per_s"] = round(load.micro_batches * load.llama.tokens / median)
    return figures


@dataclass(frozen=True)
class Profiles:
    """A case by the times that its stages took, and by those that were asked for (None where
    nothing sleeps)."""

    taken: Profile
    asked: Profile | None

    @classmethod
    def of(
        cls,
        load: Load,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        make: Callable[[Load], Profile],
    ) -> Profiles:
        """`forward_s`, `backward_s`: mean seconds of each stage for a micro-batch."""
        mean = load.mean_length
        taken = load.timed([s / mean for s in forward_s], [s / mean for s in backward_s])
        return cls(make(taken), make(load) if load.llama is None else None)

    def asked_figures(self, load: Load, median_s: float) -> dict[str, float]:
        if self.asked is None:
            return {}
        bound_s = step_bound(self.asked, load.micro_batches)
        return {"asked_bound_s": round(bound_s, 4), "asked_ratio": round(median_s / bound_s, 4)}


def product_figures(
    engine: Engine, load: Load, network: Network, samples: Samples
) -> dict[str, Any]:
    """`summarise` for one of ours, and what its coordinator costs.

    `coordinator_cpu_ms` is the coordinator's CPU time for one tensor that it receives or sends or
    passes on, all it does counted in.
    """
    micro_batches = len(samples.seconds) * load.micro_batches
    profiles = Profiles.of(
        load,
        [seconds / micro_batches for seconds in samples.forward_s],
        [seconds / micro_batches for seconds in samples.backward_s],
        lambda case: case.profile(
            network, relayed=engine.links == "relay", wire_share=engine.wire_share(case)
        ),
    )
    profile = profiles.taken
    relayed = sum(edge.relay is not None for edge in profile.edges)
    handled = 2 * (relayed + sum(0 in pair for pair in pairwise(profile.devices)))
    return {
        **summarise(engine.name, load, profiles, samples.seconds, samples.bytes),
        "coordinator_cpu_ms": round(samples.cpu_s / micro_batches / max(1, handled) * 1e3, 3),
    }


def run_case(
    load: Load,
    network: Network,
    engines: Sequence[Engine],
    peers: Sequence[str],
    steps: int,
    show: Callable[[dict[str, Any]], None],
    *,
    verbose: bool = False,
) -> list[dict[str, Any]]:
    """Every engine in turn on one network; their figures, shown as they come."""
    results: list[dict[str, Any]] = []

    def add(figures: dict[str, Any]) -> None:
        results.append(figures)
        show(figures)

    def run_engine(product: Product, engine: Engine) -> dict[str, Any]:
        limit_s = time_limit(load.profile(network, relayed=True), load, steps)
        return product_figures(engine, load, network, product.run(engine, steps, limit_s))

    def run_peer(ranks: torch_peers.Ranks, name: str) -> dict[str, Any]:
        cut = torch_peers.load_for(torch_peers.PEERS[name], load)
        devices = torch_peers.devices_for(torch_peers.PEERS[name], cut)
        limit_s = time_limit(cut.profile(network, relayed=False, devices=devices), cut, steps)
        times = ranks.run(name, steps, limit_s)
        profiles = Profiles.of(
            cut,
            *torch_peers.stage_seconds(times, steps * cut.micro_batches),
            lambda case: case.profile(network, relayed=False, devices=devices),
        )
        return summarise(name, cut, profiles, times[0].seconds, times[0].bytes)

    run_all(
        [(engine.name, engine) for engine in engines],
        lambda: Product(network, load, verbose=verbose),
        run_engine,
        add,
    )
    obstacle = peer_obstacle(network)
    if obstacle is None:
        run_all(
            [(name, name) for name in peers],
            lambda: torch_peers.Ranks(network, load),
            run_peer,
            add,
        )
    else:
        for name in peers:
            add({"engine": name, "skipped": obstacle})
    return results


Processes = TypeVar("Processes", bound=AbstractContextManager[Any])
Job = TypeVar("Job")


def run_all(
    jobs: Sequence[tuple[str, Job]],
    start: Callable[[], Processes],
    run: Callable[[Processes, Job], dict[str, Any]],
    add: Callable[[dict[str, Any]], None],
) -> None:
    """Run named jobs in turn in the same processes; after one that fails, in new ones."""
    left = list(jobs)
    while left:
        with start() as processes:
            failed = False
            while left and not failed:
                name, job = left.pop(0)
                try:
                    stolen = environment.Stolen()
                    figures = run(processes, job)
                    add({**figures, "stolen_share": stolen.share()})
                except HeteroError as error:
                    failed = True
                    add({"engine": name, "error": error.message})


def work_of(profile: Profile, load: Load) -> list[float]:
    """Seconds that each device computes in a step: what its stages take, without any overhead."""
    both_s = [f + b for f, b in zip(profile.forward_s, profile.backward_s, strict=True)]
    return [
        load.micro_batches * sum(s for s, d in zip(both_s, profile.devices, strict=True) if d == k)
        for k in range(load.devices)
    ]


def time_limit(profile: Profile, load: Load, steps: int) -> float:
    """Seconds after which an engine is given up: one micro-batch at a time, twice as slow."""
    if load.llama is not None:
        return _COMPUTING_LIMIT_S
    alone = step_bound(profile, 1) + load.slow_s * load.stages
    return _SLOWEST + 2 * (steps + _WARM_UP_STEPS) * load.micro_batches * alone


def peer_obstacle(network: Network) -> str | None:
    """Why torch's peers cannot run on this network; None when they can."""
    if network.delay_s or network.jitter_s:
        return "gloo's connections cannot be sent through the delaying proxy"
    if network.places[0].pacing_bytes_s is not None:
        return "gloo's connections cannot be paced without root"
    if not torch.distributed.is_gloo_available():
        return "this torch has no gloo"
    return None


# -- the command line ---------------------------------------------------------------------------


def numbers(text: str) -> list[float]:
    """ "20,35" as numbers."""
    return [float(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = made.add_argument
    add("--stages", type=int, default=4, help="devices, one process each")
    add("--chunks", type=int, default=1, help="stages on each device")
    add("--micro-batches", type=int, default=16)
    add("--forward-ms", type=numbers, default=[20.0], help="for all, per device or per stage")
    add("--backward-ms", type=numbers, default=[40.0])
    add("--activation-mb", type=float, default=2.1, help="10^6 bytes per boundary")
    add("--devices", choices=("sleep", "cpu"), default="sleep", help="cpu: compute a small Llama")
    add("--layers", type=int, default=4, help="of the Llama, on each device")
    add("--hidden-size", type=int, default=256, help="of the Llama")
    add("--tokens", type=int, default=256, help="of the Llama's micro-batches")
    add("--lengths", type=numbers, default=[1.0], help="relative lengths of the micro-batches")
    add("--links", default="relay", help="relay, direct, auto: one engine each")
    add("--codec", default="none", help="none, bf16, int8 or activations/gradients: one each")
    add("--max-in-flight", type=int, help="micro-batches in flight; default: sized by the product")
    add("--peers", default="torch-1f1b,serial", help=f"of {', '.join(torch_peers.PEERS)}, serial")
    add("--network", choices=list(RATES_BIT_S), default="loopback")
    add("--delay-ms", type=float, default=0.0, help="round trip that every link takes longer")
    add("--jitter-ms", type=float, default=0.0, help="most that a burst takes longer still")
    add("--steps", type=int, default=6, help="measured steps; a few more come before")
    add("--slow-ms", type=float, default=0.0, help="slow every forward")
    add("--verbose", action="store_true", help="show what the coordinator notes")
    add("--save", metavar="NAME", help="keep the result under benchmarks/results")
    return made


def engines_of(options: argparse.Namespace) -> tuple[list[Engine], list[str]]:
    """Our engines and torch's that the command line asks for. Raises UserError."""
    engines = []
    for links in filter(None, options.links.split(",")):
        for codec in options.codec.split(","):
            activations, _, gradients = codec.partition("/")
            engines.append(
                Engine(links, activations, gradients or activations, options.max_in_flight)
            )
    peers = list(filter(None, options.peers.split(",")))
    unknown = [name for name in peers if name != "serial" and name not in torch_peers.PEERS]
    if unknown:
        raise UserError(f"there is no peer {unknown[0]!r}")
    if "serial" in peers:
        engines.append(Engine(max_in_flight=1))
    return engines, [name for name in peers if name != "serial"]


def load_of(options: argparse.Namespace) -> Load:
    if options.devices == "cpu":
        layers = options.layers * options.stages
        llama = Llama(layers, options.hidden_size, options.tokens)
        return Load.computing(options.stages, options.micro_batches, llama, chunks=options.chunks)
    return Load.of(
        options.stages,
        options.micro_batches,
        [ms / 1e3 for ms in options.forward_ms],
        [ms / 1e3 for ms in options.backward_ms],
        int(options.activation_mb * 1e6),
        chunks=options.chunks,
        lengths=options.lengths,
        slow_s=options.slow_ms / 1e3,
    )


def run_options(
    options: argparse.Namespace, show: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The case that the command line describes: its figures, and on what they were measured."""
    load, (engines, peers) = load_of(options), engines_of(options)
    with open_network(
        options.network,
        load.devices,
        delay_s=options.delay_ms / 1e3,
        jitter_s=options.jitter_ms / 1e3,
    ) as network:
        shares = {}
        for links in dict.fromkeys(engine.links for engine in engines):
            share = carried(network, flows_of(links, load.devices))
            if share is not None:
                shares[links] = round(share, 3)
        results = run_case(
            load, network, engines, peers, options.steps, show, verbose=options.verbose
        )
    return {
        "engines": results,
        "load": asdict(load),
        "network": {
            "name": network.name,
            "how": network.how,
            "delay_s": network.delay_s,
            "jitter_s": network.jitter_s,
            "carried": shares,
        },
    }


def main() -> None:
    options = parser().parse_args()
    load_before = psutil.getloadavg()[0]
    result = run_options(options, lambda figures: print(json.dumps(figures), flush=True))
    if shares := result["network"]["carried"]:
        print(f"share of the rate that bare sockets carry: {shares}", file=sys.stderr)
    if options.save:
        whole = {
            **result,
            "load_average_before": round(load_before, 2),
            "environment": environment.describe(),
        }
        print(f"saved {environment.save(options.save, whole)}", file=sys.stderr)
    # A peer may fail: sizes that change, for one, torch's cannot do.
    if any("error" in f and f["engine"] not in torch_peers.PEERS for f in result["engines"]):
        sys.exit(1)


if __name__ == "__main__":
    run_program(main)
