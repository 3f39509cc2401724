"""Trains small models on the emulated device, cut in several ways, and the same cuts on the CPU.

    python -m tests.emulated_device.parity

Prints one JSON object for each run on the device: its case, its plan, and whether its losses,
gradient norms and weights have the bits of the CPU's run.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_checks import TINY, Bench, Run, small_run
from hetero_framework.core.devices import open_device

_LORA = {"adapter": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}}
_INT8 = {"activations": "int8", "gradients": "int8"}
CASES: dict[str, dict[str, Any]] = {
    "full": {"training": {}},
    "lora": {"training": {}, **_LORA},
    "bf16": {"training": {"bf16": True}, **_LORA},
    "fp16": {"training": {"fp16": True}},
    "sdpa": {"training": {}, "model": {"attn_implementation": "sdpa"}},
    "checkpointing": {"training": {"gradient_checkpointing": True}, **_LORA},
    "activation_offloading": {
        "training": {"gradient_checkpointing": True, "activation_offloading": True},
        **_LORA,
    },
    "offload_optimizer": {"training": {"offload_optimizer": True}},
    "int8": {"training": {}, "wire": _INT8},
    "padding_free": {
        "training": {"loss_chunk_tokens": 16},
        "data": {"padding_free": True},
        "model": {"attn_implementation": None},
    },
}
_AGAIN = {"gradient_checkpointing": True}
_AWAY = {"offload_optimizer": True, "activation_offloading": True}
DEEP: dict[str, dict[str, Any]] = {
    "streamed": {"training": {}, **_LORA, "entry": {"offload": 4}},
    "all away": {"training": {"bf16": True, **_AGAIN, **_AWAY}, **_LORA, "entry": {"offload": 4}},
    "full, away": {"training": {**_AGAIN, **_AWAY}},
}
"""Cases of host memory: of a deeper model, against runs that hold everything."""
WORKERS = ("cuda:0", "cuda:1", "cpu", "cpu")
_ON_CPU = {"local": "local", 1: 3, 2: 4, 3: 4}
PLANS: dict[str, tuple[list[int], list[int | str]]] = {
    "one": ([], ["local"]),
    "two": ([2], ["local", 1]),
    "three": ([1, 3], ["local", 1, 2]),
    "mixed": ([1, 3], ["local", 3, 1]),
    "interleaved": ([1, 2, 3], ["local", 1, "local", 2]),
}
"""Where the model is cut, and the workers of the stages; the deeper one four times as far up."""
_BESIDE_CPU = ("bf16", "fp16", "int8")
"""Cases whose tensors are of another type where a CPU holds the next stage."""


def pairs() -> list[tuple[str, str]]:
    """The cases and plans that are run: "interleaved" has what the other plans have."""
    shallow = [(case, plan) for case in CASES for plan in PLANS if _is_run(case, plan)]
    return shallow + [(case, plan) for case in DEEP for plan in ("one", "interleaved")]


def _is_run(case: str, plan: str) -> bool:
    if case in ("full", "lora") or plan == "interleaved":
        return True
    return plan == "mixed" and case in _BESIDE_CPU


def digest(run: Run) -> str:
    """Of the losses, gradient norms and weights."""
    found = hashlib.sha256(repr(run.steps).encode())
    for name, tensor in sorted(run.weights.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    digests: dict[str, str] = {}
    for cases, times in ((CASES, 1), (DEEP, 4)):
        size = replace(TINY, layers=TINY.layers * times)
        with (
            tempfile.TemporaryDirectory() as folder,
            Bench(open_device("cuda:1"), size, Path(folder), WORKERS) as bench,
        ):
            for case, plan in ((c, p) for c, p in pairs() if c in cases):
                settings, owners = dict(cases[case]), PLANS[plan][1]
                cuts = [times * cut for cut in PLANS[plan][0]]
                name, entry = f"{case} {cuts}", settings.pop("entry", None)
                if name not in digests:
                    there = [_ON_CPU[owner] for owner in owners]
                    held = {"owners": there, "coordinator": "cpu"}
                    digests[name] = digest(small_run(bench, "cpu", cuts, **held, **settings))
                run = small_run(bench, "device", cuts, owners=owners, entry=entry, **settings)
                line = {"case": case, "plan": plan, "equal": digest(run) == digests[name]}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
