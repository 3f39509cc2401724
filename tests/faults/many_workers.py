"""A run over many real worker processes, one layer each, against the same run in one process.

    python -m tests.faults.many_workers WORKERS STEPS DIRECTORY

Prints a JSON object: whether the results are equal, seconds of the run, and by how much the memory
of the process grew that grew most after the first steps. A process of its own, for all others are
forked from one that has imported everything.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import machines

WARM_UP_STEPS = 8
NEEDED = ["tests.faults.networked", "transformers.models.llama.modeling_llama", "peft"]


def main(count: int, steps: int, at: Path) -> dict[str, Any]:
    machines._PRELOAD += NEEDED
    from tests.faults import networked
    from tests.integration.test_parity import weights
    from tests.pools import read_metrics
    from tests.samples import save_llama, save_texts

    model = save_llama(at / "llama", layers=count + 1)
    texts = save_texts(at / "texts.jsonl", 40)
    bounds = list(range(count + 2))
    options = {"max_steps": steps, "save_strategy": "no"}
    with networked.machines(model, texts, at, network="loopback", bounds=bounds) as cluster:
        began = time.monotonic()
        with cluster.run("cut", **options) as run:
            run.after_step(WARM_UP_STEPS)
            processes = [psutil.Process(pid) for pid in (run.child.pid, *cluster.pids)]
            before = [process.memory_full_info().uss for process in processes]
            run.after_step(steps)
            after = [process.memory_full_info().uss for process in processes]
            run.finish()
        took = time.monotonic() - began
        with cluster.run("whole", whole=True, **options) as run:
            run.finish()
    one, other = weights(at / "cut"), weights(at / "whole")
    same = one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    metrics = read_metrics(at / "cut")
    return {
        "equal": same and metrics == read_metrics(at / "whole"),
        "steps": len(metrics),
        "seconds": took,
        "grown_bytes": max(b - a for a, b in zip(before, after, strict=True)),
        "each_bytes": sum(after) / len(after),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
