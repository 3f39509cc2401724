"""A long run that is disturbed again and again, and the same run undisturbed.

    python -m tests.faults.soak --steps 8640 --kills 24 --drops 6 --coordinator-kills 2 \\
        --full-disks 1 --sleep 0.03 --seed 7 --save

The commands are those that a user gives: `hetero worker` for worker 2, behind a proxy that breaks
its link, and `hetero train`, which starts worker 1 itself and is given again when it was killed,
as a service manager would. The run's directory is a small disk of its own where that can be
mounted. What happens when follows from the seed alone; the moment within a step does not. `--sleep`
has every forward and backward sleep, so that a step takes its time without the CPU.

Prints a JSON object at the end: whether both runs came to the same, to the last bit, what the
disturbances cost, and whether descriptors, threads and memory of the processes stayed flat.
Goodput is the share of the whole time, starts included, that went into the steps which count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import environment
from hetero_framework.core import messages as m
from tests.fault_proxy import FaultProxy, FrameCut
from tests.faults import final_state
from tests.integration.test_parity import LORA
from tests.samples import free_ports, save_llama, save_texts

SILENT_S = 300.0
STOPPED_S = 1.0
POLL_S = 0.05
DISK = "48m"
SAVE_STEPS = 30
SAMPLE_S = 2.0
WARM_UP_STEPS = 100
KINDS = ("kills", "drops", "coordinator_kills", "full_disks")


def schedule(steps: int, counts: dict[str, int], seed: int) -> list[tuple[int, str]]:
    """What happens after which step: evenly spread, each some time within its share."""
    dice = random.Random(seed)
    others = [f"drop {('in order', 'by reset')[k % 2]}" for k in range(counts["drops"])]
    others += ["kill coordinator"] * counts["coordinator_kills"]
    others += ["fill disk"] * counts["full_disks"]
    dice.shuffle(others)
    kills: list[str] = []
    while len(kills) < counts["kills"]:  # in pairs: no worker gets more than its share of a while
        kills += dice.sample(["kill 1", "kill 2"], 2)[: counts["kills"] - len(kills)]
    turns = [kills] * len(kills) + [others] * len(others)
    dice.shuffle(turns)
    events = [turn.pop(0) for turn in turns]
    share = (steps - 2) / max(1, len(events))
    return [(2 + int((k + dice.uniform(0.2, 0.8)) * share), what) for k, what in enumerate(events)]


def configuration(at: Path, name: str, steps: int, ports: Sequence[int] = ()) -> Path:
    """A run in one process, or with ports those of the coordinator and of workers 1 and 2."""
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu", "num_threads": 1}
    ends = [("local", 0, 2), (1, 2, 4), (2, 4, 6)] if ports else [("local", 0, 6)]
    raw = {
        "coordinator": {**machine, "port": ports[0] if ports else free_ports(1)[0]},
        "workers": [{**machine, "id": id, "port": ports[id]} for id, _, _ in ends[1:]],
        "shard_plan": [{"id": id, "start": start, "end": end} for id, start, end in ends],
        "model": {"name_or_path": str(at / "llama")},
        "data": {"train": str(at / "texts.jsonl"), "max_length": 32},
        "adapter": LORA,
        "training": {
            **{"output_dir": str(at / name), "max_steps": steps, "num_train_epochs": 10_000},
            **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
            **{"learning_rate": 1e-3, "logging_steps": 100, "save_strategy": "steps"},
            **{"save_steps": SAVE_STEPS, "save_total_limit": 2, "report_to": "none"},
            **{"visualize": False, "verify_architecture": False},
        },
    }
    file = at / f"{name}.json"
    file.write_text(json.dumps(raw))
    return file


class Command:
    """A `hetero` command, given again whenever its process was killed."""

    def __init__(self, config: Path, *words: str, name: str, environment: dict[str, str]) -> None:
        self._command = [sys.executable, "-m", "hetero_framework", *words, "--config", str(config)]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._log = config.with_name(f"{name}.log")
        self.given = 0
        self.process = self._give()

    def _give(self) -> subprocess.Popen[bytes]:
        self.given += 1
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def is_over(self) -> bool:
        """Whether it has ended in order; AssertionError where it ended otherwise."""
        code = self.process.poll()
        if code == -signal.SIGKILL:
            self.process = self._give()
            return False
        assert code in (None, 0), f"it ended with {code}:\n{self.said()[-4000:]}"
        return code == 0

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children()
        return []

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@dataclass
class Soak:
    """The disturbed run's processes and what can be done to them."""

    train: Command
    serve: Command
    proxy: FaultProxy
    output: Path
    dice: random.Random

    def step(self) -> int:
        """The last step that was written down."""
        with suppress(OSError, IndexError, ValueError, KeyError):  # none yet, or half a line
            data = tail(self.output / "metrics.jsonl", 8192)
            return int(json.loads(data.splitlines()[-1])["step"])
        return 0

    def processes(self) -> dict[str, psutil.Process]:
        """Those that are there now."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            found["coordinator"] = psutil.Process(self.train.process.pid)
        for name, parent in (("worker 1", self.train), ("worker 2", self.serve)):
            for child in parent.children():
                found[name] = child
        return found

    def act(self, what: str) -> None:
        """Do it now."""
        if what == "kill coordinator":
            self.train.process.kill()
            self.train.process.wait()
        elif what.startswith("drop"):
            kinds = {"up": (m.Inputs, m.Commit, m.Step), "down": (m.GradientNorms, m.Committed)}
            way = self.dice.choice(list(kinds))
            kind, where = self.dice.choice(kinds[way]), self.dice.choice(("before", "middle"))
            self.proxy.cuts.append(FrameCut(way, kind, where, reset="reset" in what))
        elif what == "fill disk":
            self._fill_disk()
        else:
            process = self.processes().get(f"worker {what[-1]}")
            with suppress(psutil.NoSuchProcess, AttributeError):
                if what.startswith("kill"):
                    process.kill()
                else:
                    process.suspend()
                    time.sleep(STOPPED_S)  # the fault itself
                    process.resume()

    def _failed(self) -> int:
        """Checkpoints that could not be written so far."""
        return len(re.findall(r"checkpoint \d+ could not be written", self.train.said()))

    def _fill_disk(self) -> None:
        """Until a checkpoint could not be written."""
        failed = self._failed()
        ballast = self.output / "ballast"
        try:
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 12)):
                    pass
            self.until(lambda: self._failed() > failed)
        finally:
            ballast.unlink()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it; AssertionError where nothing is done for too long meanwhile."""
        step, since = -1, time.monotonic()
        while not condition():
            if self.step() != step:
                step, since = self.step(), time.monotonic()
            assert time.monotonic() - since < SILENT_S, (
                f"nothing happens any more after step {step}:\n{self.train.said()[-4000:]}"
            )
            time.sleep(POLL_S)  # nothing announces what another process writes


def told(file: Path) -> Iterator[dict[str, Any]]:
    """The lines that were written whole: a full disk and a kill may each cut one off."""
    for line in file.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def tail(file: Path, nbytes: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - nbytes))
        return opened.read()


class Watch:
    """Reads descriptors, threads and memory of the run's processes until the block ends."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._lives: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._over.wait(SAMPLE_S):
            step = self._soak.step()
            for name, process in self._soak.processes().items():
                with suppress(psutil.Error):
                    own = process.memory_full_info().uss
                    sample = (step, process.num_fds(), process.num_threads(), own)
                    if own:  # else it has ended just now
                        self._lives.setdefault((name, process.pid), []).append(sample)

    def flatness(self) -> dict[str, dict[str, Any]]:
        """Of each process's longest life: descriptors and threads, medians of its first and last
        third, and how its own memory grew, in MiB in 1,000 steps."""
        found: dict[str, dict[str, Any]] = {}
        for (name, _), samples in self._lives.items():
            settled = [s for s in samples if s[0] >= samples[0][0] + WARM_UP_STEPS]
            third = len(settled) // 3
            steps = settled[-1][0] - settled[0][0] if third else 0
            if not third or steps <= found.get(name, {"steps": 0})["steps"]:
                continue
            ends = settled[:third], settled[-third:]
            found[name] = {
                "steps": steps,
                "descriptors": [statistics.median(s[1] for s in end) for end in ends],
                "threads": [statistics.median(s[2] for s in end) for end in ends],
                "memory_mib": round(settled[-1][3] / (1 << 20), 1),
                "mib_per_1000_steps": round(slope(settled) * 1000 / (1 << 20), 2),
            }
        return found


def slope(samples: Sequence[tuple[int, int, int, int]]) -> float:
    """Bytes of memory per step, by least squares."""
    steps, memory = [s[0] for s in samples], [s[3] for s in samples]
    return statistics.linear_regression(steps, memory).slope if len(set(steps)) > 1 else 0.0


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """A file system of its own, in memory; whether there is one."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def soak(steps: int, counts: dict[str, int], seed: int, sleep_s: float, at: Path) -> dict[str, Any]:
    save_llama(at / "llama")
    save_texts(at / "texts.jsonl", 40)
    failpoint = f"forward@*:sleep:{sleep_s},backward@*:sleep:{sleep_s}" if sleep_s else ""
    slow = {"HETERO_FAILPOINT": failpoint}
    near, first, far = free_ports(3)
    with ExitStack() as stack:
        if not stack.enter_context(small_disk(at / "cut")):
            counts = {**counts, "full_disks": 0}
        plan = schedule(steps, counts, seed)
        print(f"seed {seed}: {plan}", flush=True)
        calm = Command(configuration(at, "whole", steps), "train", name="whole", environment={})
        stack.callback(calm.end)
        proxy = stack.enter_context(FaultProxy(("127.0.0.1", far)))
        served = configuration(at, "served", steps, (near, first, far))
        config = configuration(at, "cut", steps, (near, first, proxy.port))
        began = time.monotonic()
        words = ("worker", "--keep", "--worker-id", "2")
        serve = Command(served, *words, name="worker-2", environment=slow)
        stack.callback(serve.end)
        train = Command(config, "train", name="train", environment=slow)
        stack.callback(train.end)
        run = Soak(train, serve, proxy, at / "cut", random.Random(seed))
        with Watch(run) as watch:
            for step, what in plan:
                run.until(lambda: train.is_over() or run.step() >= step)  # noqa: B023
                time.sleep(run.dice.uniform(0, 0.3))  # somewhere in the next step or two
                run.act(what)
                print(f"{time.monotonic() - began:.0f} s, after step {step}: {what}", flush=True)
            run.until(train.is_over)
        seconds = time.monotonic() - began
        while not calm.is_over():
            time.sleep(POLL_S)  # as above
        step_s = [line["step_seconds"] for line in told(at / "cut" / "metrics.jsonl")]
        happened = Counter(event["what"] for event in told(at / "cut" / "events.jsonl"))
        return {
            "differences": final_state.differences(at / "cut", at / "whole"),
            "steps": run.step(),
            **{kind: counts[kind] for kind in KINDS},
            "cuts_left": len(proxy.cuts),
            "commands": train.given,
            "seconds": round(seconds, 1),
            "step_s": round(statistics.median(step_s), 4),
            "goodput": round(sum(step_s) / seconds, 4),
            "flatness": watch.flatness(),
            "events": dict(happened),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8640)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    for kind in KINDS:
        parser.add_argument(f"--{kind.replace('_', '-')}", type=int, default=0)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds per forward, backward")
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    options = parser.parse_args()
    counts = {kind: getattr(options, kind) for kind in KINDS}
    described = environment.describe()
    with tempfile.TemporaryDirectory(prefix="hetero-soak-") as at:
        found = soak(options.steps, counts, options.seed, options.sleep, Path(at))
    print(json.dumps(found), flush=True)
    if options.save:
        settings = {name: value for name, value in vars(options).items() if name != "save"}
        whole = {"figures": found, "settings": settings, "environment": described}
        print(f"saved {environment.save('faults-soak', whole)}", file=sys.stderr)
    sys.exit(1 if found["differences"] else 0)


if __name__ == "__main__":
    main()
