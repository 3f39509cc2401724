"""The time of a stage whose layers visit the device, beside that of the stage that holds them all.

    python -m tests.emulated_device.streaming DEVICE LAYERS_THAT_VISIT [MICRO_BATCHES] [trained]

For a process with HETERO_EMULATED_COPY_RATE and HETERO_EMULATED_KERNEL_US. Prints one JSON object:
`resident_s` and `streamed_s` of a step, `bound_s` of copying what has to be copied, `copied_s` of
all copies to the device, `equal` whether losses and norms have the same bits, the prefetch
`misses`, and the most device memory of each. `trained`: all weights are, there is no adapter.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from hetero_framework.config import Config
from hetero_framework.core.devices import Device, open_device
from hetero_framework.core.planned_order import BACKWARD, FORWARD
from hetero_framework.core.spans import WEIGHTS
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.extras.host_memory import optimizer_states
from hetero_framework.extras.host_memory.residence import HostMemory

LAYERS = 16
_STEPS = 3


def configuration(offload: int, *, trained: bool = False) -> Config:
    """Two stages of one process: the first has all layers, the last one the head alone."""
    plan = [
        {"id": "local", "start": 0, "end": LAYERS, "offload": offload},
        {"id": "local", "start": LAYERS, "end": LAYERS},
    ]
    model = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    return Config.from_dict(
        {
            "coordinator": {"ip": "127.0.0.1"},
            "model": {"from_config": model, "attn_implementation": "eager"},
            "shard_plan": plan,
            "adapter": None if trained else {"r": 4, "target_modules": ["q_proj"]},
        }
    )


def step(stages: list[Stage], device: Device, number: int, micro_batches: int) -> list[Any]:
    """One step: forwards until two wait, then backwards and forwards in turn."""
    found: list[Any] = []
    first, last = stages
    ids = torch.arange(16).view(1, 16) % 64
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    inputs = {name: tensor.to(device.torch_device) for name, tensor in inputs.items()}
    for stage in stages:
        stage.begin(StepInfo(number, 0, True, micro_batches, 15 * micro_batches))
    waiting: list[tuple[int, Any]] = []

    def back() -> None:
        k, gradients = waiting.pop(0)
        following = FORWARD if k + 2 < micro_batches else BACKWARD
        first.residence.begin(BACKWARD, k, following if waiting else FORWARD)
        first.backward(k, gradients)
        first.residence.end()

    for k in range(micro_batches):
        first.residence.begin(FORWARD, k, BACKWARD if k else FORWARD)
        left = first.forward(k, inputs, ())
        first.residence.end()
        entered = tuple(t.detach().requires_grad_(t.requires_grad) for t in left)
        outcome, gradients = last.forward_backward(k, inputs, entered)
        found.append(outcome.loss)
        waiting.append((k, gradients))
        if k:
            back()
    while waiting:
        back()
    found += [stage.report_gradients().norms for stage in stages]
    for stage in stages:
        stage.commit(1e-2, 1.0)
    return found


def measured(
    device: Device, offload: int, micro_batches: int, *, trained: bool
) -> tuple[float, list[Any], int, Any]:
    """Seconds of the shortest step but the first, all results, the most bytes, and the stage's
    residence."""
    config = configuration(offload, trained=trained)
    device.empty_cache()
    stages = load_stages(config, config.plan.stages, device)
    stages[1].input_requires_grad = True
    found, seconds = step(stages, device, 0, micro_batches), []
    device.reset_peak_memory()
    for number in range(1, _STEPS + 1):
        device.synchronize()
        began = device.record_event()
        found += step(stages, device, number, micro_batches)
        ended = device.record_event()
        ended.wait()
        seconds.append(began.until_s(ended))
    hosts = [device.to_host(tensor) for tensor in found]
    return min(seconds), hosts, device.peak_memory(), stages[0].residence


def main(name: str, offload: int, micro_batches: int, *, trained: bool) -> None:
    device = open_device(name)
    optimizer_states.STATES_GROUP_BYTES = 1 << 19  # of a layer's 1.3 MB
    resident_s, right, resident_bytes, _ = measured(device, 0, micro_batches, trained=trained)
    streamed_s, found, streamed_bytes, residence = measured(
        device, offload, micro_batches, trained=trained
    )
    layers = residence._layers if isinstance(residence, HostMemory) else None
    there = (WEIGHTS, "gradients in", "states in")
    copies = [(a, b) for kind, a, b in residence.transfers() if kind in there]
    copied = (layers._in_turn - layers._shared) * layers._layers[0].nbytes if layers else 0
    # All that is not there: forward and backward of each micro-batch, and at each further border
    # between two forwards or two backwards those that the turn of direction would have found.
    borders = 2 * layers._shared * layers._layers[0].nbytes if layers else 0
    rate = float(os.environ.get("HETERO_EMULATED_COPY_RATE", 0)) or float("inf")
    line = {
        "resident_s": resident_s,
        "streamed_s": streamed_s,
        "bound_s": (2 * micro_batches * copied + borders) / rate,
        "copied_s": sum(began.until_s(ended) for began, ended in copies) / (_STEPS + 1),
        "equal": all(map(torch.equal, right, found)),
        "misses": layers.misses if layers else 0,
        "resident_bytes": resident_bytes,
        "streamed_bytes": streamed_bytes,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[2:] if word.isdigit()]
    main(sys.argv[1], numbers[0], *numbers[1:] or [4], trained="trained" in sys.argv)
