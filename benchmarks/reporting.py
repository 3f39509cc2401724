"""What reporters cost a run: its steps with two of them and with none, in turn.

    python -m benchmarks.reporting
    python -m benchmarks.reporting --reporters tensorboard,trackio --save

Trains a tiny model in one process and logs every step. The model computes next to nothing; a step
takes its time because every forward sleeps, as the training thread waits for a device elsewhere.
TensorBoard writes files, wandb is offline, trackio has its local database. Every run has a process
of its own; the pairs begin with either in turn. Prints one JSON object: `ratio` of the medians of
all steps, that of each pair, and `mean_ratio`, in which rare pauses show. `after_ms` is the median
time from the end of a step to the next one, in which the training thread writes and reports, with
none and with them; `added_share` is what they add, as a share of a step. It says more than the
ratio where much else runs, since a step's own time is not in it. `least_after_ms` and
`least_added_share` are the same of the quickest tenth, which what else the machine does disturbs
less.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.machines import run_program
from hetero_framework.config import load_config
from hetero_framework.errors import HeteroError
from hetero_framework.extras.demo.commands import demo
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress

MICRO_BATCHES = 4
WARM_UP_STEPS = 10
LIMIT_S = 300.0


@dataclass
class Taken:
    """Seconds from each step to the next, and those between the two."""

    step_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)

    def add(self, other: Taken) -> None:
        self.step_s += other.step_s
        self.after_s += other.after_s


class Clock(Progress):
    """Notes when each step has ended, and how long it took by itself."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self._told: list[tuple[float, float]] = []

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._told.append((time.perf_counter(), metrics["step_seconds"]))

    def taken(self) -> Taken:
        taken = Taken()
        for (begin, _), (end, own) in pairwise(self._told[WARM_UP_STEPS:]):
            taken.step_s.append(end - begin)
            taken.after_s.append(end - begin - own)
        return taken


def make_model(folder: Path) -> None:
    """The demonstration's tokenizer and data with a model that takes hardly any time."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    files = demo.sources()
    demo.make_model(folder / "model", files[:40])
    demo.write_samples(folder / "data.jsonl", demo.pieces(files))
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig.from_pretrained(folder / "model")
    config.update({**small, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")


def configuration(folder: Path, name: str, steps: int, reporters: Sequence[str]) -> Path:
    training = {
        "output_dir": str(folder / name),
        "max_steps": WARM_UP_STEPS + steps + 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "save_strategy": "no",
        "visualize": False,
        "report_to": list(reporters) or "none",
    }
    config = {
        "coordinator": {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"},
        "workers": [],
        "shard_plan": [{"id": "local", "start": 0, "end": 1}],
        "model": {"name_or_path": str(folder / "model")},
        "data": {"train": str(folder / "data.jsonl"), "max_length": 16},
        "training": training,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def timed(config: Path, sleep_s: float) -> Taken:
    """A run in a process of its own."""
    folder = str(config.parent)
    places = {"WANDB_DIR": folder, "TRACKIO_DIR": folder, "HETERO_CACHE": f"{folder}/cache"}
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}
    sleeps = {"HETERO_FAILPOINT": f"coordinator/forward@*:sleep:{sleep_s:g}"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.reporting", "--run", str(config)],
        env={**os.environ, **places, **quiet, **sleeps, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise HeteroError(f"the run {config.stem} failed: {done.stderr[-2000:]}")
    return Taken(**json.loads(done.stdout.splitlines()[-1]))


def compare(reporters: Sequence[str], pairs: int, steps: int, sleep_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder)
        each, ratios = {True: Taken(), False: Taken()}, []
        for number in range(pairs):
            medians = {}
            for reports in (number % 2 == 0, number % 2 == 1):
                name = f"{number}-{'reporting' if reports else 'silent'}"
                config = configuration(folder, name, steps, reporters if reports else ())
                taken = timed(config, sleep_s)
                each[reports].add(taken)
                medians[reports] = statistics.median(taken.step_s)
            ratios.append(medians[True] / medians[False])
    return figures(reporters, each[True], each[False], ratios)


def figures(
    reporters: Sequence[str], reporting: Taken, silent: Taken, ratios: Sequence[float]
) -> dict[str, Any]:
    mean, median = statistics.mean, statistics.median
    after_s = [median(taken.after_s) for taken in (silent, reporting)]
    least_s = [statistics.quantiles(taken.after_s, n=10)[0] for taken in (silent, reporting)]
    return {
        "reporters": list(reporters),
        "steps": len(silent.step_s),
        "step_s": round(median(silent.step_s), 4),
        "ratio": round(median(reporting.step_s) / median(silent.step_s), 4),
        "pairs": [round(ratio, 4) for ratio in ratios],
        "mean_ratio": round(mean(reporting.step_s) / mean(silent.step_s), 4),
        "after_ms": [round(1000 * seconds, 3) for seconds in after_s],
        "added_share": round((after_s[1] - after_s[0]) / median(silent.step_s), 4),
        "least_after_ms": [round(1000 * seconds, 3) for seconds in least_s],
        "least_added_share": round((least_s[1] - least_s[0]) / median(silent.step_s), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reporters", default="tensorboard,wandb")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="measured in each run")
    parser.add_argument("--step-ms", type=float, default=100.0, help="slept in a step")
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        clock = Clock()
        train(load_config(options.run), progress=clock)
        print(json.dumps(asdict(clock.taken())))
        return
    sleep_s = options.step_ms / 1000 / MICRO_BATCHES
    stolen = environment.Stolen()
    found = compare(options.reporters.split(","), options.pairs, options.steps, sleep_s)
    found["stolen_share"] = stolen.share()
    print(json.dumps(found))
    if options.save:
        whole = {**found, "environment": environment.describe()}
        print(f"saved {environment.save('reporting', whole)}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
