"""Many small frames for a long time: does memory stay flat, and how many frames pass a second?

    python -m benchmarks.soak --workers 8 --micro-batches 32 --steps 200

A coordinator and its workers run steps whose stages take no time. Meanwhile the memory that is
each process's own (unique set size) is read several times a second. `memory_growth` is that of
the last quarter of the run against the third quarter, the mean over time and the sum over all
processes; `worst_growth` is that of the process that grew most. `frames_per_s` counts the tensors
that arrived at a stage. Exit code 1 when a process grew by more than `--limit`.

`--leak-kb N` has the coordinator keep N KB for every step, to see that the measurement notices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil

from benchmarks import environment
from benchmarks.machines import run_program
from benchmarks.network import open_network
from benchmarks.pipeline import Engine, Product
from benchmarks.stages import Load
from hetero_framework.errors import UserError

_EVERY_S = 0.25
_LIMIT_S = 400.0


class MemoryWatch:
    """Reads the own memory of some processes until the block ends; `first` is set when it has
    read it once."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._over = threading.Event()
        self.first = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._samples: list[tuple[float, list[int]]] = []

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()

    def between(self, began: float, ended: float) -> list[list[int]]:
        """What was read in that time, by time.perf_counter(): bytes of each process."""
        return [own for at, own in self._samples if began <= at <= ended]

    def _read(self) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                own = [process.memory_full_info().uss for process in self._processes]
                self._samples.append((time.perf_counter(), own))
                self.first.set()
            except psutil.NoSuchProcess:
                return


def growth(samples: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Growth from the third quarter to the last one: of all processes together, and of the one
    that grew most, each as a share of what there was. Raises UserError for less than 8 samples.
    """
    if len(samples) < 8:
        raise UserError("the run was too short for its memory to be judged", hint="more --steps")
    quarter = len(samples) // 4
    third = [statistics.fmean(p) for p in zip(*samples[-2 * quarter : -quarter], strict=True)]
    last = [statistics.fmean(p) for p in zip(*samples[-quarter:], strict=True)]
    worst = max(b / a - 1 for a, b in zip(third, last, strict=True))
    return sum(last) / sum(third) - 1, worst


def soak(load: Load, links: str, steps: int, *, leak_bytes: int = 0) -> dict[str, Any]:
    """The figures of one run."""
    engine = replace(Engine(links), leak_bytes=leak_bytes)
    with (
        open_network("loopback", load.devices) as network,
        Product(network, load, share=False) as product,
        MemoryWatch(product.pids) as watch,
    ):
        samples = product.run(engine, steps, _LIMIT_S)
    memory = watch.between(samples.began_at, samples.began_at + sum(samples.seconds))
    both, worst = growth(memory)
    frames = 2 * (load.stages - 1) * load.micro_batches
    median = statistics.median(samples.seconds)
    return {
        "engine": engine.name,
        "steps": len(samples.seconds),
        "step_s": round(median, 4),
        "step_s_min": round(min(samples.seconds), 4),
        "step_s_max": round(max(samples.seconds), 4),
        "frames_per_s": round(frames / median),
        "coordinator_cpu_ms_per_frame": round(samples.cpu_s / steps / frames * 1e3, 4),
        "memory_mb": round(sum(memory[-1]) / 1e6, 1),
        "memory_growth": round(both, 4),
        "worst_growth": round(worst, 4),
        "seconds": round(sum(samples.seconds), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=8, help="besides the coordinator")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--activation-kb", type=float, default=16.0, help="10^3 bytes")
    parser.add_argument("--links", default="relay", choices=("relay", "direct", "auto"))
    parser.add_argument("--limit", type=float, default=0.02, help="largest growth of a process")
    parser.add_argument("--leak-kb", type=float, default=0.0, help="leak so much in every step")
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    options = parser.parse_args()
    nbytes = int(options.activation_kb * 1e3)
    load = Load.of(options.workers + 1, options.micro_batches, [0.0], [0.0], nbytes)
    figures = soak(load, options.links, options.steps, leak_bytes=int(options.leak_kb * 1e3))
    print(json.dumps(figures), flush=True)
    if options.save:
        whole = {
            "figures": figures,
            "settings": {k: v for k, v in vars(options).items() if k != "save"},
            "environment": environment.describe(),
        }
        print(f"saved {environment.save('soak', whole)}", file=sys.stderr)
    if figures["worst_growth"] > options.limit:
        sys.exit(1)


if __name__ == "__main__":
    run_program(main)
