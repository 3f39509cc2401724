"""Peak memory of loading one shard, over an idle process, against the bytes of its own tensors.

    python -m benchmarks.shard_memory --layers 24 --start 6 --end 12

Writes a random Llama checkpoint to a temporary directory, then measures two children: one that
imports what a worker imports and looks at a tiny copy of the model, and one that also loads the
shard and touches every weight of it. The ratio is
(peak of the second - peak of the first) / bytes of the shard's tensors: 1 means that loading
costs what the tensors hold. Prints one JSON object; `--save` keeps it under benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

from benchmarks import environment
from hetero_framework.config import ModelConfig
from hetero_framework.core.devices import open_device
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.shard import ShardRange, load_shard
from hetero_framework.models.files.source import ModelSource


def peak_bytes() -> int:
    """Highest resident size of this process so far."""
    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):
        return int(info.peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write_model(folder: Path, layers: int, hidden: int, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=32000,
    )
    torch.set_default_dtype(dtype)
    logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")


def child(folder: str, start: int, end: int, load: bool) -> dict[str, int]:
    """What one process needs: idle (imports and the tiny probe) or with the shard loaded."""
    settings = ModelConfig(name_or_path=folder)
    config = ModelSource(settings, Path(folder)).config
    layers = introspect(config).num_layers
    own = 0
    if load:
        rng = ShardRange(start, end, start == 0, end == layers)
        shard = load_shard(settings, Path(folder), rng, open_device("cpu"), seed=0)
        own = sum(p.nbytes for p in shard.model.parameters())
        # Files are mapped: a weight takes memory once it is used.
        for parameter in shard.model.parameters():
            parameter.detach().sum()
    return {"peak_bytes": peak_bytes(), "own_bytes": own}


def run_child(mode: str, folder: str, options: argparse.Namespace) -> dict[str, int]:
    """One mode in a process of its own; this one stays small, children inherit its peak."""
    command = [sys.executable, "-m", "benchmarks.shard_memory", "--child", mode]
    command += ["--folder", folder, "--dtype", options.dtype]
    for name in ("layers", "hidden", "start", "end"):
        command += [f"--{name}", str(getattr(options, name))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--start", type=int, default=6)
    parser.add_argument("--end", type=int, default=12)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--child", choices=["write", "idle", "load"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "write":
        dtype = getattr(torch, options.dtype)
        write_model(Path(options.folder), options.layers, options.hidden, dtype)
        print("{}")
        return
    if options.child:
        load = options.child == "load"
        print(json.dumps(child(options.folder, options.start, options.end, load)))
        return
    with tempfile.TemporaryDirectory() as folder:
        run_child("write", folder, options)
        size = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        idle = run_child("idle", folder, options)
        loaded = run_child("load", folder, options)
    result: dict[str, Any] = {
        "benchmark": "shard_memory",
        "checkpoint_bytes": size,
        "layers": [options.start, options.end, options.layers],
        "dtype": options.dtype,
        "idle_peak_bytes": idle["peak_bytes"],
        "loaded_peak_bytes": loaded["peak_bytes"],
        "own_bytes": loaded["own_bytes"],
        "ratio": round((loaded["peak_bytes"] - idle["peak_bytes"]) / loaded["own_bytes"], 3),
        "environment": environment.describe(),
    }
    print(json.dumps(result))
    if options.save:
        environment.save("shard_memory", result)


if __name__ == "__main__":
    main()
