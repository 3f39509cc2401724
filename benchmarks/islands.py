"""What islands cost and gain: real processes of this machine, and torchft's lighthouse.

    python -m benchmarks.islands goodput
    python -m benchmarks.islands speeds
    python -m benchmarks.islands bytes

`goodput`: three islands sum the gradients of every step; one of them, another each time, is killed
at every `--every` steps and started again with the same command. Printed are the steps per second
against those of the same islands undisturbed, from the first common step to the last, and the
seconds from each kill until the others' next step.

`speeds`: two islands, one twice as fast as the other (layers that sleep), with shares by measured
speed against equal shares: the steps per second once they are tuned.

`bytes`: what an island sends to another one for each step of its own, in rounds of 100 steps, two
fragments and int8, against the gradients of every step.

With `--sleep` a layer sleeps so many seconds for each micro-batch, so that cores do not limit.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from benchmarks import machines
from benchmarks.codecs import save_texts, save_tokenizer
from benchmarks.machines import Child, Machines, run_program
from benchmarks.replanning import LAYERS, Here, save_model
from hetero_framework.config import Config, StageSpec
from hetero_framework.core.devices import Device
from hetero_framework.engine.loading import BuildStages, load_stages
from hetero_framework.engine.stage import Stage
from hetero_framework.errors import HeteroError
from hetero_framework.islands.lighthouse import Lighthouse
from hetero_framework.models.remains import Remains
from hetero_framework.trainer.coordinator import train
from hetero_framework.visualizer.progress import Progress

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


def live(connection: Any, raw: dict[str, Any], failpoint: str, sleep_s: float) -> None:
    """One island's coordinator, until it is killed or the run is over."""
    if failpoint:
        os.environ["HETERO_FAILPOINT"] = failpoint
    config = Config.from_dict(raw)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    with (config.output_dir / "stderr.log").open("ab", buffering=0) as said:
        os.dup2(said.fileno(), sys.stderr.fileno())
    build = sleeping(sleep_s) if sleep_s else load_stages
    train(config, progress=Tell(connection), build=build)
    connection.send(("done", None))


def sleeping(seconds: float) -> BuildStages:
    """Makes real stages that also sleep so long for each layer and micro-batch."""

    def build(
        config: Config, specs: Sequence[StageSpec], device: Device, remains: Remains
    ) -> list[Stage]:
        stages = load_stages(config, specs, device, remains)
        for spec, stage in zip(specs, stages, strict=True):
            _slow_down(stage, (spec.end - spec.start) * seconds)
        return stages

    return build


def _slow_down(stage: Any, seconds: float) -> None:
    own = stage.forward_backward

    def slowed(*args: Any) -> Any:
        time.sleep(seconds)
        return own(*args)

    stage.forward_backward = slowed


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
    ) -> None:
        machines._PRELOAD += [name for name in NEEDED if name not in machines._PRELOAD]
        self._started = started
        self._sleep_s = dict(sleep_s or {})
        self.of = {name: Island(raw) for name, raw in raws.items()}
        self.ended: dict[str, int] = {}
        """How each one's last process did; minus a signal's number."""

    def start(self, name: str, failpoint: str = "") -> None:
        """Start the island's coordinator, always with the same configuration."""
        island = self.of[name]
        pause = self._sleep_s.get(name, 0.0)
        island.child = self._started.start(Here(), live, island.raw, failpoint, pause)

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


def _prepare(folder: Path) -> None:
    torch.manual_seed(0)
    save_model(folder / "model", 64)
    save_tokenizer(folder / "words")
    save_texts(folder / "texts.jsonl", 40 * SAMPLES)


def _rate(island: Island, first: int, last: int) -> float:
    """Steps per second from step `first` to step `last`."""
    at = {line["step"]: when for when, line in reversed(island.steps)}
    return (last - first) / (at[last] - at[first])


FIRST, TUNED = 5, 24
"""Steps before them are not counted: processes start, and shares are tuned."""


def goodput(steps: int, every: int, sleep_s: float) -> dict[str, Any]:
    names = ("a", "b", "c")
    found: dict[str, Any] = {"case": "goodput", "steps": steps, "every": every, "sleep": sleep_s}
    for calm in (True, False):
        total = min(steps, 100) if calm else steps
        with tempfile.TemporaryDirectory() as at, Lighthouse() as lighthouse, Machines() as started:
            folder = Path(at)
            _prepare(folder)
            section = {"island": {"min_islands": 1}, "adapter": {"r": 4}}
            raws = {
                name: configuration(folder, name, lighthouse.port, max_steps=total, **section)
                for name in names
            }
            for raw in raws.values():
                raw["adapter"] = raw["training"].pop("adapter")
            islands = Islands(started, raws, dict.fromkeys(names, sleep_s))
            for name in names:
                islands.start(name)
            gaps = [] if calm else _with_kills(islands, names, total, every)
            islands.until_done(*names)
            survivor = next(name for name in names if len(islands.of[name].steps) >= total - FIRST)
            rate = _rate(_merged(islands), FIRST, total)
            found["calm" if calm else "disturbed"] = round(rate, 3)
            if not calm:
                found["kills"], found["gaps_s"] = len(gaps), [round(gap, 2) for gap in gaps]
                found["median_gap_s"] = round(statistics.median(gaps), 2) if gaps else None
                found["longest"] = survivor
    found["goodput"] = round(found["disturbed"] / found["calm"], 3)
    return found


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


def _with_kills(islands: Islands, names: Sequence[str], total: int, every: int) -> list[float]:
    """Kill one after the other; the seconds until the others' next step."""
    gaps = []
    for number, step in enumerate(range(every, total - FIRST, every)):
        victim = names[number % len(names)]
        others = [name for name in names if name != victim]
        islands.until_step(step, *names)
        islands.kill(victim)
        killed_at = time.monotonic()
        islands.start(victim)
        before = max(islands.reached(name) for name in others)
        islands.until_step(before + 1, *others)
        gaps.append(time.monotonic() - killed_at)
    return gaps


def speeds(steps: int, sleep_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"case": "speeds", "steps": steps, "sleep": sleep_s}
    for kind, share in (("equal", 1), ("auto", "auto")):
        with tempfile.TemporaryDirectory() as at, Lighthouse() as lighthouse, Machines() as started:
            folder = Path(at)
            _prepare(folder)
            raws = {
                name: configuration(
                    folder,
                    name,
                    lighthouse.port,
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


def sent_bytes(sync_steps: int) -> dict[str, Any]:
    """All weights are trained. The state that is given at the beginning is not counted. Rows of
    the embedding that no sample uses have not changed and cost nothing in rounds: a quarter of this
    small model, so a real one gains less."""
    found: dict[str, Any] = {"case": "bytes", "sync_steps": sync_steps}
    streaming = {"sync_steps": sync_steps, "fragments": 2, "compression": "int8"}
    for kind, section, steps, last in (
        ("every_step", {}, 8, 7),
        # In the run's last round one fragment goes out twice.
        ("rounds", streaming, 4 * sync_steps, 2 * sync_steps),
    ):
        with tempfile.TemporaryDirectory() as at, Lighthouse() as lighthouse, Machines() as started:
            folder = Path(at)
            _prepare(folder)
            raws = {
                name: configuration(
                    folder,
                    name,
                    lighthouse.port,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    kills = commands.add_parser("goodput")
    kills.add_argument("--steps", type=int, default=600)
    kills.add_argument("--every", type=int, default=30)
    kills.add_argument("--sleep", type=float, default=0.004)
    two = commands.add_parser("speeds")
    two.add_argument("--steps", type=int, default=40)
    two.add_argument("--sleep", type=float, default=0.03)
    sent = commands.add_parser("bytes")
    sent.add_argument("--sync-steps", type=int, default=100)
    options = parser.parse_args()
    if options.command == "goodput":
        found = goodput(options.steps, options.every, options.sleep)
    elif options.command == "bytes":
        found = sent_bytes(options.sync_steps)
    else:
        found = speeds(options.steps, options.sleep)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run_program(main)
