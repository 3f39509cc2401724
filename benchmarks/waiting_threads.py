"""The cost of waiting: threads of torch that spin or sleep, alone and beside a busy program.

    python -m benchmarks.waiting_threads --rounds 3

Two threads train a small Llama (6 layers of width 64, and one of width 512), each in a process of
its own, in turn with OMP_WAIT_POLICY unset and PASSIVE, as the package sets it. `alone` nothing
else is started; `beside` as many programs as there are cores but one are busy. Prints one JSON
object: milliseconds of a step, medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

from benchmarks.machines import run_program

STEPS = """
import statistics, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
for width, layers, tokens, count in (64, 6, 256, 12), (512, 1, 512, 6):
    more = {"num_hidden_layers": layers, "num_attention_heads": 8}
    sizes = {"vocab_size": 1024, "hidden_size": width, "intermediate_size": 3 * width}
    model, ids = LlamaForCausalLM(LlamaConfig(**sizes, **more)), torch.arange(tokens)[None]
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        taken.append(1000 * (time.perf_counter() - began))
    print(round(statistics.median(taken), 1))
"""


def step_ms(policy: str | None) -> list[float]:
    told = {**os.environ, "OMP_NUM_THREADS": "2"}
    told.pop("OMP_WAIT_POLICY", None)
    if policy is not None:
        told["OMP_WAIT_POLICY"] = policy
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=told, check=True, capture_output=True, text=True
    )
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    rounds, found = parser.parse_args().rounds, dict[str, dict[str, list[float]]]()
    for where, others in ("alone", 0), ("beside", max(1, (os.cpu_count() or 2) - 1)):
        with ExitStack() as running:
            for _ in range(others):
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                running.callback(busy.wait)
                running.callback(busy.kill)
            taken = [{name: step_ms(name) for name in (None, "PASSIVE")} for _ in range(rounds)]
        found[where] = {
            str(name): [statistics.median(each[name][k] for each in taken) for k in (0, 1)]
            for name in (None, "PASSIVE")
        }
    print(json.dumps({"threads": 2, "step_ms": found}))


if __name__ == "__main__":
    run_program(main)
