"""What another plan costs a run that is under way.

    python -m benchmarks.replanning
    python -m benchmarks.replanning --quantization nf4

A coordinator and two workers of this machine train an adapter over a random Llama of about 200 MB.
Boundaries move by one layer, there and back, and the seconds are printed that all processes took to
hold their new layers: `first_s` when nothing was loaded yet, `change_s` later. With
`--quantization` the frozen weights are quantised.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.machines import run_program
from benchmarks.network import free_ports
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core.frames import DEFAULT_MAX_FRAME_BYTES

LAYERS = 12
CUTS = ((4, 8), (5, 8), (4, 8), (4, 7))
"""Where stages meet, in turn."""
CHANGES = 7


def save_model(
    folder: Path, hidden_size: int = 640, *, vocab_size: int = 4096, layers: int = LAYERS
) -> int:
    """A Llama with random weights in float32; its bytes."""
    settings = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=int(2.75 * hidden_size),
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def config_of(
    model: Path, quantization: str | None, cut: Sequence[int], ports: Sequence[int]
) -> Config:
    """A coordinator and two workers of this machine."""
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"}
    bounds = [0, *cut, LAYERS]
    return Config.from_dict(
        {
            "coordinator": {**machine, "port": ports[0]},
            "workers": [{**machine, "id": k, "port": ports[k]} for k in (1, 2)],
            "shard_plan": [
                {"id": k or "local", "start": bounds[k], "end": bounds[k + 1]} for k in range(3)
            ],
            "model": {"name_or_path": str(model), "quantization": quantization},
            "adapter": {"r": 8},
            "training": {"output_dir": str(model.parent / "run")},
        }
    )


def change(hidden_size: int, quantization: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model, ports = Path(folder) / "model", free_ports(3)
        nbytes = save_model(model, hidden_size)
        seconds = []
        config = config_of(model, quantization, CUTS[0], ports)
        with Cluster(config, max_frame_bytes=DEFAULT_MAX_FRAME_BYTES) as cluster:
            cluster.start()
            for number in range(CHANGES + 1):
                plan = config_of(model, quantization, CUTS[number % len(CUTS)], ports)
                began = time.perf_counter()
                cluster.assemble(plan)
                seconds.append(time.perf_counter() - began)
    first, *later = seconds
    return {
        "case": "change of plan",
        "model_bytes": nbytes,
        "quantization": quantization,
        "first_s": round(first, 2),
        "change_s": round(statistics.median(later), 3),
        "each_s": [round(s, 3) for s in later],
    }


class Here:
    """No network of its own."""

    def enter(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden-size", type=int, default=640)
    parser.add_argument("--quantization", choices=("nf4", "int8"))
    options = parser.parse_args()
    print(json.dumps(change(options.hidden_size, options.quantization)), flush=True)


if __name__ == "__main__":
    run_program(main)
