"""How long until something happens: `hetero check` and a run's first step, beside the bare import.

    python -m benchmarks.startup --rounds 5

Uses the demonstration's model (12.6 million weights), data and configuration. In every round the
same four are timed, from the start of the command: a Python that imports torch and one architecture
of transformers; `hetero check`; the first step of three processes; of one process. The first
round, `cold`, finds nothing that earlier runs have kept (verdicts on an architecture, tokens); the
others find it. Prints one JSON object: medians, and their ratios to the bare import of the same
round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machines import run_program
from benchmarks.network import free_ports
from hetero_framework.errors import HeteroError
from hetero_framework.extras.demo.commands import demo

_LOOK_S = 0.01
_MOST_S = 300.0
_BARE = "import torch; from transformers import LlamaConfig, LlamaForCausalLM"


def timed(command: list[str], environment: dict[str, str], awaited: Path | None = None) -> float:
    """Seconds until a command has ended, or until `awaited` has a line; it may end meanwhile.

    Raises HeteroError when it fails or takes too long.
    """
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        seconds = None
        while awaited is not None and process.poll() is None and seconds is None:
            if awaited.exists() and awaited.stat().st_size:
                seconds = time.perf_counter() - began
            elif time.perf_counter() > began + _MOST_S:
                raise HeteroError(f"no first step in {_MOST_S:.0f} s: {' '.join(command)}")
            else:
                time.sleep(_LOOK_S)
        output, _ = process.communicate(timeout=_MOST_S)
        if process.returncode or (awaited is not None and seconds is None):
            raise HeteroError(f"{' '.join(command)}: {output[-2000:]}")
        return seconds if seconds is not None else time.perf_counter() - began
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def configuration(folder: Path, name: str, workers: int) -> Path:
    """The shipped configuration for a short run, with so many of its workers."""
    config: dict[str, Any] = json.loads(demo.CONFIG.read_text(encoding="utf-8"))
    config["model"] = {"name_or_path": str(folder / "model")}
    config["data"] = {**config["data"], "train": str(folder / "data.jsonl")}
    config["workers"] = config["workers"][:workers]
    for entry, port in zip(
        [config["coordinator"], *config["workers"]], free_ports(1 + workers), strict=True
    ):
        entry["port"] = port
    if not workers:
        config["shard_plan"] = [{"id": "local", "start": 0, "end": 6}]
    config["training"] = {
        **config["training"],
        "max_steps": 1,
        "save_strategy": "no",
        "visualize": False,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def jobs(folder: Path) -> dict[str, Callable[[dict[str, str]], float]]:
    """What is timed, by name."""
    hetero = [sys.executable, "-m", "hetero_framework"]
    three, one = configuration(folder, "three", 2), configuration(folder, "one", 0)

    def first_step(config: Path) -> Callable[[dict[str, str]], float]:
        def run(environment: dict[str, str]) -> float:
            output = Path(tempfile.mkdtemp(dir=folder)) / "run"
            command = [*hetero, "train", "--config", str(config)]
            command += ["--set", f"training.output_dir={output}"]
            return timed(command, environment, output / "metrics.jsonl")

        return run

    return {
        "import": lambda environment: timed([sys.executable, "-c", _BARE], environment),
        "check": lambda environment: timed([*hetero, "check", "--config", str(three)], environment),
        "three": first_step(three),
        "one": first_step(one),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="after the first, cold one")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = demo.sources()
        demo.make_model(folder / "model", files)
        demo.write_samples(folder / "data.jsonl", demo.pieces(files))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HETERO_CACHE": str(folder / "cache")}
        named = jobs(folder)
        named["import"](environment)  # what the system reads from the disk it keeps from here on
        seconds = [
            {name: run(environment) for name, run in named.items()} for _ in range(1 + rounds)
        ]
    ratios = [{name: s / each["import"] for name, s in each.items()} for each in seconds]

    def median(of: list[dict[str, float]]) -> dict[str, float]:
        return {name: round(statistics.median(each[name] for each in of), 2) for name in named}

    figures = {
        "cold_s": median(seconds[:1]),
        "cold_ratio": median(ratios[:1]),
        "seconds": median(seconds[1:]),
        "ratio": median(ratios[1:]),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    run_program(main)
