"""What islands cost and gain: real processes of this machine, and torchft's lighthouse.

    python -m benchmarks.islands goodput
    python -m benchmarks.islands speeds
    python -m benchmarks.islands bytes
    python -m benchmarks.islands hidden
    python -m benchmarks.islands overlap
    python -m benchmarks.islands loss

`goodput`: three islands sum the gradients of every step; one of them, another each time, is killed
at every `--every` steps and started again with the same command. Printed are the steps per second,
against those of the steps that all three took one after the other without a kill, and the seconds
from each kill until the others' next step. A kill costs about two seconds and half a step, so steps
must be as long as those of a training are, or --every is not a rate of failures that one has: the
default makes steps of about 1.6 s.

`speeds`: two islands, one twice as fast as the other (layers that sleep), with shares by measured
speed against equal shares: the steps per second once they are tuned.

`bytes`: what an island sends to another one for each step of its own, in rounds of 100 steps, two
fragments and int8, against the gradients of every step. All rows of the embedding are in use.

`hidden`: two islands on a shaped network (Linux, as root), adapters, rounds of 100 steps: which
part of the time went by while a synchronisation was waited for, and while the slower island was.

`overlap`: two islands on a shaped network (Linux, as root) sum all gradients in every step: which
part of the time that these need on the link goes by while layers still compute. Each island is one
process (`--stages 1`), or has so many, a stage each.

`loss`: two islands in rounds of 20 steps against two that sum the gradients of every step, both
with the same tokens; the loss on data that neither has trained.

With `--sleep` a layer sleeps so many seconds for each micro-batch, so that cores do not limit.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, machines
from benchmarks.codecs import save_texts, save_tokenizer
from benchmarks.machines import Child, Machines, Room, run_program
from benchmarks.network import DATA_SHARE, DelayLine, open_network
from benchmarks.replanning import LAYERS, Here, save_model
from hetero_framework.cluster.worker import serve
from hetero_framework.config import LIGHTHOUSE_PORT, Config, StageSpec
from hetero_framework.core.devices import Device
from hetero_framework.core.dial import Listener, connect
from hetero_framework.engine.loading import BuildStages, load_stages
from hetero_framework.engine.stage import Stage
from hetero_framework.errors import HeteroError
from hetero_framework.extras.islands import lighthouse_client, links
from hetero_framework.extras.islands.lighthouse import Lighthouse
from hetero_framework.extras.islands.quorums import Quorums
from hetero_framework.models.cut.reuse import ReusePool
from hetero_framework.security.access import Plaintext
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress

NEEDED = ["transformers.models.llama.modeling_llama", "peft"]
SILENT_S = 120.0
SAMPLES = 6
"""Of a step."""


class Tell(Progress):
    """Sends what a user would see."""

    def __init__(self, connection: Any) -> None:
        super().__init__(io.StringIO())
        self._connection = connection

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._connection.send(("step", metrics))

    def message(self, text: str) -> None:
        self._connection.send(("said", text))


def live(
    connection: Any, raw: dict[str, Any], failpoint: str, sleep_s: float, round_trip_s: float
) -> None:
    """One island's coordinator, until it is killed or the run is over: without torchft, which the
    lighthouse's machine alone needs. What it dials of other islands and the lighthouse is as far
    away as `round_trip_s` says."""
    sys.modules["torchft"] = None  # type: ignore[assignment]
    if failpoint:
        os.environ["HETERO_FAILPOINT"] = failpoint
    if round_trip_s:
        links.connect = lighthouse_client.connect = partial(_dial_from_afar, round_trip_s / 2)
    config = Config.from_dict(raw)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    with (config.output_dir / "stderr.log").open("ab", buffering=0) as said:
        os.dup2(said.fileno(), sys.stderr.fileno())
    build = sleeping(sleep_s) if sleep_s else load_stages
    train(config, progress=Tell(connection), build=build, islands=Plaintext(everywhere=True))
    connection.send(("done", None))


def _dial_from_afar(one_way_s: float, host: str, port: int, timeout_s: float, **more: Any) -> Any:
    """As `connect`, by a proxy of this process that is slow to pass things on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection((host, port), timeout_s)
        far.settimeout(None)
        stream = connect("127.0.0.1", listener.getsockname()[1], timeout_s, **more)
        near, _ = listener.accept()
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    DelayLine(near, far, one_way_s, 0.0)
    DelayLine(far, near, one_way_s, 0.0)
    return stream


def light(connection: Any, host: str, port: int) -> None:
    """A lighthouse for others, until it is ended."""
    with lighthouse(host, port) as server:
        connection.send("it shines")
        while True:
            server.wait(1.0)


@contextmanager
def lighthouse(host: str = "127.0.0.1", port: int = 0) -> Iterator[Lighthouse]:
    """As `hetero lighthouse` has it."""
    with (
        closing(Quorums()) as quorums,
        closing(Listener(host, port)) as listener,
        closing(Lighthouse(listener, Plaintext(everywhere=True), quorums)) as server,
    ):
        yield server


def work(connection: Any, raw: dict[str, Any], worker: int, sleep_s: float) -> None:
    """A worker of an island."""
    serve(Config.from_dict(raw), worker, build=sleeping(sleep_s), keep=True)


def sleeping(seconds: float) -> BuildStages:
    """Makes real stages in which each layer sleeps so long in each of its backwards."""

    def build(
        config: Config, specs: Sequence[StageSpec], device: Device, pool: ReusePool
    ) -> list[Stage]:
        stages = load_stages(config, specs, device, pool)
        for stage in stages:
            for block in stage._shard._blocks:
                block.register_forward_hook(partial(_sleep_behind, seconds))
        return stages

    return build


def _sleep_behind(seconds: float, block: Any, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: time.sleep(seconds))
    return hidden


@dataclass
class Island:
    """One island's life: the process that is its coordinator now, and all that was heard."""

    raw: dict[str, Any]
    child: Child | None = None
    steps: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    is_done: bool = False

    @property
    def output(self) -> Path:
        return Path(self.raw["training"]["output_dir"])


class Islands:
    """Islands of this machine, by name. Nothing is left running where `started` ends."""

    def __init__(
        self,
        started: Machines,
        raws: Mapping[str, dict[str, Any]],
        sleep_s: Mapping[str, float] | None = None,
        rooms: Mapping[str, Room] | None = None,
        round_trip_s: float = 0.0,
    ) -> None:
        machines._PRELOAD += [name for name in NEEDED if name not in machines._PRELOAD]
        self._started = started
        self._sleep_s = dict(sleep_s or {})
        self._rooms = dict(rooms or {})
        self._round_trip_s = round_trip_s
        self.of = {name: Island(raw) for name, raw in raws.items()}
        self.ended: dict[str, int] = {}
        """How each one's last process did; minus a signal's number."""

    def start(self, name: str, failpoint: str = "") -> None:
        """Start the island's coordinator, always with the same configuration."""
        island = self.of[name]
        pause = self._sleep_s.get(name, 0.0)
        room = self._rooms.get(name, Here())
        island.child = self._started.start(
            room, live, island.raw, failpoint, pause, self._round_trip_s
        )

    def send(self, name: str, number: int) -> None:
        """A signal to the coordinator."""
        child = self.of[name].child
        assert child is not None
        os.kill(child.pid, number)

    def kill(self, name: str) -> None:
        """As if its machine had lost power."""
        self.send(name, signal.SIGKILL)
        self.await_end(name)

    def await_end(self, name: str) -> int:
        """Until its process has ended, whatever it still says; minus a signal's number."""
        island = self.of[name]
        deadline = time.monotonic() + SILENT_S
        while island.child is not None:
            if time.monotonic() > deadline:
                raise HeteroError(f"island {name} does not end")
            self.hear(1.0)
        return self.ended[name]

    def reached(self, name: str) -> int:
        """The last step that it has told of."""
        steps = self.of[name].steps
        return steps[-1][1]["step"] if steps else 0

    def until_step(self, step: int, *names: str) -> None:
        """Until each of these has done this step."""
        while any(self.reached(name) < step for name in names):
            self._hear_something(*names)

    def until_done(self, *names: str) -> None:
        while not all(self.of[name].is_done for name in names):
            self._hear_something(*names)

    def _hear_something(self, *awaited: str) -> None:
        """Raises HeteroError when one of these ends before it is done, or nothing happens."""
        if not self.hear(SILENT_S):
            raise HeteroError(f"nothing has happened for {SILENT_S} s: {self.last_words()}")
        for name in awaited:
            if self.of[name].child is None and not self.of[name].is_done:
                raise HeteroError(f"island {name} ended: {self.of[name].said[-3:]}")

    def last_words(self) -> dict[str, Any]:
        return {name: (self.reached(name), one.said[-3:]) for name, one in self.of.items()}

    def hear(self, timeout_s: float) -> bool:
        """Note what islands say; whether any said something, or ended, in time."""
        talking = {one.child: name for name, one in self.of.items() if one.child is not None}
        ready = wait(list(talking), timeout_s)
        for child in ready:
            assert isinstance(child, Child)
            self._hear(talking[child], child)
        return bool(ready)

    def _hear(self, name: str, child: Child) -> None:
        island = self.of[name]
        try:
            what, value = child.receive(0)
        except HeteroError as ended:
            island.said.append(str(ended))
            child.join()
            self.ended[name] = child.exit_code or 0
            island.child = None
            return
        if what == "step":
            island.steps.append((time.monotonic(), value))
        elif what == "said":
            island.said.append(value)
        else:
            island.is_done = True

    def committed(self) -> dict[int, dict[str, Any]]:
        """The line of each step that any island has told of. Raises HeteroError where two differ in
        what they trained or in the loss."""
        found: dict[int, dict[str, Any]] = {}
        for name, island in self.of.items():
            for _, line in island.steps:
                other = found.setdefault(line["step"], line)
                same = ("loss", "grad_norm", "learning_rate")
                if [other[key] for key in same] != [line[key] for key in same]:
                    raise HeteroError(f"step {line['step']} is another one on island {name}")
                if other["island"]["samples"] != line["island"]["samples"]:
                    raise HeteroError(f"step {line['step']} has other samples on island {name}")
        return found


def configuration(
    folder: Path, name: str, port: int, *, layers: int = LAYERS, **training: Any
) -> dict[str, Any]:
    """One island of one process: `folder` has the model, the tokenizer and the texts."""
    section = {"name": name, "lighthouse": f"127.0.0.1:{port}"}
    section |= training.pop("island", {})
    return {
        "coordinator": {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"},
        "shard_plan": [{"id": "local", "start": 0, "end": layers}],
        "model": {"name_or_path": str(folder / "model"), "tokenizer": str(folder / "words")},
        "data": {"train": str(folder / "texts.jsonl"), "max_length": 32},
        "island": section,
        "training": {
            "output_dir": str(folder / name),
            "num_train_epochs": 1000,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": SAMPLES,
            "save_strategy": "no",
            "report_to": "none",
            "visualize": False,
            "verify_architecture": False,
            "probe_longest_batch": False,
            "timeline_steps": 0,
            **training,
        },
    }


def _prepare(folder: Path, *, texts: int = 40 * SAMPLES, **model: int) -> None:
    torch.manual_seed(0)
    save_model(folder / "model", 64, **model)
    save_tokenizer(folder / "words")
    save_texts(folder / "texts.jsonl", texts)


def _rate(island: Island, first: int, last: int) -> float:
    """Steps per second from step `first` to step `last`."""
    at = {line["step"]: when for when, line in reversed(island.steps)}
    return (last - first) / (at[last] - at[first])


FIRST, TUNED = 5, 24
"""Steps before them are not counted: processes start, and shares are tuned."""


def goodput(steps: int, every: int, sleep_s: float) -> dict[str, Any]:
    names = ("a", "b", "c")
    with tempfile.TemporaryDirectory() as at, lighthouse() as light_here, Machines() as started:
        folder = Path(at)
        _prepare(folder)
        raws = {
            name: configuration(
                folder, name, light_here.port, max_steps=steps, island={"min_islands": 1}
            )
            for name in names
        }
        for raw in raws.values():
            raw["adapter"] = {"r": 4}
        islands = Islands(started, raws, dict.fromkeys(names, sleep_s))
        for name in names:
            islands.start(name)
        killed_at, gaps = _with_kills(islands, names, steps, every)
        islands.until_done(*names)
    merged = _merged(islands)
    calm_s = statistics.fmean(_calm_s(merged, len(names), killed_at))
    return {
        **{"case": "goodput", "steps": steps, "every": every, "sleep": sleep_s},
        **{"calm_step_s": round(calm_s, 3), "kills": len(gaps)},
        **{"gaps_s": [round(gap, 2) for gap in gaps], "median_gap_s": statistics.median(gaps)},
        "goodput": round(_rate(merged, FIRST, steps) * calm_s, 3),
    }


def _calm_s(merged: Island, islands: int, killed_at: Sequence[float]) -> list[float]:
    """The seconds of each step that all took, as the one before it, and nobody was killed in."""
    counted = [one for one in merged.steps if one[1]["step"] >= FIRST]
    return [
        when - before
        for (before, last), (when, line) in pairwise(counted)
        if len(last["island"]["members"]) == len(line["island"]["members"]) == islands
        and not any(before <= killed <= when for killed in killed_at)
    ]


def _merged(islands: Islands) -> Island:
    """Each step when the first island told of it."""
    merged = Island({})
    first: dict[int, tuple[float, dict[str, Any]]] = {}
    for island in islands.of.values():
        for when, line in island.steps:
            if line["step"] not in first or when < first[line["step"]][0]:
                first[line["step"]] = when, line
    merged.steps = [first[step] for step in sorted(first)]
    return merged


def _with_kills(
    islands: Islands, names: Sequence[str], total: int, every: int
) -> tuple[list[float], list[float]]:
    """Kill one after the other: when, and the seconds until the others' next step."""
    kills, gaps = [], []
    for number, step in enumerate(range(every, total - FIRST, every)):
        victim = names[number % len(names)]
        others = [name for name in names if name != victim]
        islands.until_step(step, *names)
        islands.kill(victim)
        kills.append(time.monotonic())
        islands.start(victim)
        before = max(islands.reached(name) for name in others)
        islands.until_step(before + 1, *others)
        gaps.append(time.monotonic() - kills[-1])
    return kills, gaps


def speeds(steps: int, sleep_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"case": "speeds", "steps": steps, "sleep": sleep_s}
    for kind, share in (("equal", 1), ("auto", "auto")):
        with tempfile.TemporaryDirectory() as at, lighthouse() as light_here, Machines() as started:
            folder = Path(at)
            _prepare(folder)
            raws = {
                name: configuration(
                    folder,
                    name,
                    light_here.port,
                    max_steps=steps,
                    island={"min_islands": 2, "share": share},
                )
                for name in ("fast", "slow")
            }
            islands = Islands(started, raws, {"fast": sleep_s, "slow": 2 * sleep_s})
            for name in raws:
                islands.start(name)
            islands.until_done(*raws)
            found[kind] = round(_rate(islands.of["fast"], TUNED, steps), 3)
            found[f"{kind}_samples"] = islands.of["fast"].steps[-1][1]["island"]["samples"]
    found["ratio"] = round(found["auto"] / found["equal"], 3)
    return found


VOCABULARY = 19
"""All tokens that the texts have: none has a row of the embedding that never changes."""


def sent_bytes(sync_steps: int) -> dict[str, Any]:
    """All weights are trained. The state that is given at the beginning is not counted."""
    found: dict[str, Any] = {"case": "bytes", "sync_steps": sync_steps}
    streaming = {"sync_steps": sync_steps, "fragments": 2, "compression": "int8"}
    for kind, section, steps, last in (
        ("every_step", {}, 8, 7),
        # In the run's last round one fragment goes out twice.
        ("rounds", streaming, 4 * sync_steps, 2 * sync_steps),
    ):
        with tempfile.TemporaryDirectory() as at, lighthouse() as light_here, Machines() as started:
            folder = Path(at)
            _prepare(folder, vocab_size=VOCABULARY)
            raws = {
                name: configuration(
                    folder,
                    name,
                    light_here.port,
                    max_steps=steps,
                    gradient_accumulation_steps=2,
                    island={"min_islands": 2, "share": 1, **section},
                )
                for name in ("a", "b")
            }
            islands = Islands(started, raws)
            for name in raws:
                islands.start(name)
            islands.until_done(*raws)
            lines = [line for _, line in islands.of["a"].steps[1:] if line["step"] <= last]
            sent = sum(line["island"]["bytes_out"] for line in lines)
            found[kind] = round(sent / (len(lines) + (kind == "rounds")))
    found["ratio"] = round(found["every_step"] / found["rounds"], 1)
    return found


_HELD = 200
"""Texts that nobody trains."""
_FEW = 2
"""Layers, where a step is to take what its layers sleep."""


def hidden(rounds: int, sleep_s: float, delay_steps: int, compression: str) -> dict[str, Any]:
    """10 Mbit/s each way at each island and at the lighthouse, 50 ms there and back. Sending takes
    a fortieth of a round, as of an adapter of 40 million values with steps of 12 s."""
    found: dict[str, Any] = {"case": "hidden", "sync_steps": 100, "delay_steps": delay_steps}
    found |= {"compression": compression, "sleep": sleep_s}
    names, steps = ("a", "b"), 200 * rounds
    with ExitStack() as stack:
        network = stack.enter_context(open_network("100mbit", 3, ports_bit_s=(1e7, 1e7, 1e7)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = stack.enter_context(Machines())
        _prepare(folder, vocab_size=VOCABULARY, layers=_FEW)
        *homes, sea = network.places
        started.start(sea, light, sea.address, LIGHTHOUSE_PORT).receive(SILENT_S)
        section = {"sync_steps": 100, "delay_steps": delay_steps, "compression": compression}
        raws = {}
        for name, home in zip(names, homes, strict=True):
            island = {"min_islands": 2, "share": 1, **section}
            raw = configuration(
                folder, name, LIGHTHOUSE_PORT, layers=_FEW, max_steps=steps, island=island
            )
            raw["training"]["gradient_accumulation_steps"] = 1
            raw["coordinator"] |= {"hostname": name, "ip": home.address}
            raw["island"]["lighthouse"] = f"{sea.address}:{LIGHTHOUSE_PORT}"
            raw["adapter"] = {"r": 160, "target_modules": "all-linear"}
            raws[name] = raw
        rooms = dict(zip(names, homes, strict=True))
        islands = Islands(started, raws, dict.fromkeys(names, sleep_s), rooms, 0.05)
        for name in names:
            islands.start(name)
        islands.until_done(*names)
    # The last round's fragments cannot be hidden: the run ends with them.
    for name, island in islands.of.items():
        lines = [line for _, line in island.steps if line["step"] < steps - 200]
        seconds = island.steps[len(lines) - 1][0] - island.steps[0][0]
        waited_s = sum(line["island"].get("waited_s", 0.0) for line in lines)
        step_s, waited = round(seconds / len(lines), 4), round(waited_s / seconds, 4)
        found[name] = {"step_s": step_s, "waited": waited}
        found["packed_bytes"] = max(line["island"].get("packed_bytes", 0) for line in lines)
    return found


_MICRO_BATCHES = 2
_TAKES_S = 1.5
"""What the gradients of a step need at the slow link's rate."""


def overlap(stages: int, steps: int, sleep_s: float) -> dict[str, Any]:
    """`not_hidden_s` is how much longer a step takes than where its gradients need no time. Of the
    last micro-batch's backward alone can go by meanwhile: what all layers sleep once."""
    found: dict[str, Any] = {"case": "overlap", "stages": stages, "steps": steps, "sleep": sleep_s}
    rate = 0.0
    for kind in ("fast", "slow"):
        lines = _summing(stages, steps, sleep_s, rate or 1e9)
        seconds = statistics.median(line["step_seconds"] for line in lines)
        sent = statistics.median(line["island"]["bytes_out"] for line in lines)
        waited = statistics.median(line["island"]["waited_s"] for line in lines)
        found[f"{kind}_step_s"], found["bytes"] = round(seconds, 3), sent
        found[f"{kind}_waited_s"] = round(waited, 3)
        rate = sent * 8 / DATA_SHARE / _TAKES_S
    found["link_s"] = _TAKES_S
    found["not_hidden_s"] = round(found["slow_step_s"] - found["fast_step_s"], 3)
    found["hidden"] = round(1 - found["not_hidden_s"] / _TAKES_S, 3)
    return found


def _summing(stages: int, steps: int, sleep_s: float, rate: float) -> list[dict[str, Any]]:
    """The lines of the steps of one of two islands, after the first ones."""
    names = ("a", "b")
    with ExitStack() as stack:
        ports = (rate, rate, 1e9)
        network = stack.enter_context(open_network("100mbit", 3, ports_bit_s=ports))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = stack.enter_context(Machines())
        _prepare(folder, vocab_size=VOCABULARY)
        *homes, sea = network.places
        started.start(sea, light, sea.address, LIGHTHOUSE_PORT).receive(SILENT_S)
        raws = {}
        for name, home in zip(names, homes, strict=True):
            raw = configuration(
                folder,
                name,
                LIGHTHOUSE_PORT,
                max_steps=steps,
                gradient_accumulation_steps=2 * _MICRO_BATCHES,
                island={"min_islands": 2, "share": 1},
            )
            raw["coordinator"] |= {"hostname": name, "ip": home.address}
            raw["island"]["lighthouse"] = f"{sea.address}:{LIGHTHOUSE_PORT}"
            _cut(raw, stages)
            for worker in range(1, stages):
                started.start(home, work, raw, worker, sleep_s)
            raws[name] = raw
        rooms = dict(zip(names, homes, strict=True))
        islands = Islands(started, raws, dict.fromkeys(names, sleep_s), rooms)
        for name in names:
            islands.start(name)
        islands.until_done(*names)
    return [line for _, line in islands.of["a"].steps[_UNCOUNTED:]]


_UNCOUNTED = 2


def _cut(raw: dict[str, Any], stages: int) -> None:
    """Into equal stages, one for each process of the island's machine."""
    layers = LAYERS // stages
    own = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
    raw["workers"] = [{**own, "id": k, "port": _WORKER_PORT + k} for k in range(1, stages)]
    raw["shard_plan"] = [
        {"id": k or "local", "start": k * layers, "end": (k + 1) * layers} for k in range(stages)
    ]


_WORKER_PORT = 29600


def loss(steps: int, sync_steps: int, warmup_steps: int, learning_rate: float) -> dict[str, Any]:
    """`steps` of each of two islands; those that sum their gradients take twice the samples. Rounds
    begin after so many `warmup_steps` of each."""
    found: dict[str, Any] = {"case": "loss", "steps": steps, "sync_steps": sync_steps}
    found |= {"warmup_steps": warmup_steps, "learning_rate": learning_rate}
    rounds = {"sync_steps": sync_steps, "warmup_steps": 2 * warmup_steps}
    for kind, section, accumulation in (("every_step", {}, 2), ("rounds", rounds, 1)):
        found[kind] = round(_loss_after(section, steps, accumulation, learning_rate), 5)
    found["ratio"] = round(found["rounds"] / found["every_step"], 4)
    return found


def _loss_after(
    section: dict[str, Any], steps: int, accumulation: int, learning_rate: float
) -> float:
    total = 2 * steps // accumulation
    with tempfile.TemporaryDirectory() as at, lighthouse() as light_here, Machines() as started:
        folder = Path(at)
        _prepare(folder, texts=16 * steps + _HELD, vocab_size=VOCABULARY, layers=_FEW)
        lines = (folder / "texts.jsonl").read_text().splitlines(keepends=True)
        (folder / "texts.jsonl").write_text("".join(lines[_HELD:]))
        (folder / "held.jsonl").write_text("".join(lines[:_HELD]))
        raws = {
            name: configuration(
                folder,
                name,
                light_here.port,
                layers=_FEW,
                max_steps=total,
                eval_steps=total,
                learning_rate=learning_rate,
                gradient_accumulation_steps=accumulation,
                per_device_train_batch_size=8,
                island={"min_islands": 2, "share": 1, **section},
            )
            for name in ("a", "b")
        }
        for raw in raws.values():
            raw["data"]["eval"] = str(folder / "held.jsonl")
        islands = Islands(started, raws)
        for name in raws:
            islands.start(name)
        islands.until_done(*raws)
        told = (folder / "a" / "metrics.jsonl").read_text().splitlines()
        [ending] = [line for line in map(json.loads, told) if "eval_loss" in line]
        return float(ending["eval_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--save", metavar="NAME", help="also write results/islands-NAME-DATE.json")
    commands = parser.add_subparsers(dest="command", required=True)
    kills = commands.add_parser("goodput")
    kills.add_argument("--steps", type=int, default=600)
    kills.add_argument("--every", type=int, default=30)
    kills.add_argument("--sleep", type=float, default=0.0625)
    two = commands.add_parser("speeds")
    two.add_argument("--steps", type=int, default=40)
    two.add_argument("--sleep", type=float, default=0.03)
    sent = commands.add_parser("bytes")
    sent.add_argument("--sync-steps", type=int, default=100)
    slow = commands.add_parser("hidden")
    slow.add_argument("--rounds", type=int, default=4)
    slow.add_argument("--sleep", type=float, default=0.05)
    slow.add_argument("--delay-steps", type=int, default=10)
    slow.add_argument("--compression", choices=("none", "bf16", "int8"), default="int8")
    while_computing = commands.add_parser("overlap")
    while_computing.add_argument("--stages", type=int, default=1)
    while_computing.add_argument("--steps", type=int, default=10)
    while_computing.add_argument("--sleep", type=float, default=0.1)
    tokens = commands.add_parser("loss")
    tokens.add_argument("--steps", type=int, default=400)
    tokens.add_argument("--sync-steps", type=int, default=20)
    tokens.add_argument("--warmup-steps", type=int, default=100)
    tokens.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    if options.command == "goodput":
        found = goodput(options.steps, options.every, options.sleep)
    elif options.command == "bytes":
        found = sent_bytes(options.sync_steps)
    elif options.command == "hidden":
        found = hidden(options.rounds, options.sleep, options.delay_steps, options.compression)
    elif options.command == "overlap":
        found = overlap(options.stages, options.steps, options.sleep)
    elif options.command == "loss":
        found = loss(options.steps, options.sync_steps, options.warmup_steps, options.learning_rate)
    else:
        found = speeds(options.steps, options.sleep)
    print(json.dumps(found), flush=True)
    if options.save:
        found["environment"] = environment.describe()
        found["environment"]["packages"]["torchft-nightly"] = metadata.version("torchft-nightly")
        print(f"saved {environment.save(f'islands-{options.save}', found)}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
