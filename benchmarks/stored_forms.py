"""Time and peak memory of loading a shard in FP8, beside the same bytes in bfloat16.

    python -m benchmarks.stored_forms --gigabytes 2

Writes two Llama checkpoints of that size to a temporary directory, one in FP8 (blocks of 128 x 128)
with twice as many layers, and loads the layers of each in turn in processes of their own, several
times, files in the system's cache. A time is that of `load_shard`, fingerprint included. The peak
is over a process that has imported the same and looked at a tiny copy of the model.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks import environment
from benchmarks.shard_memory import peak_bytes
from hetero_framework.config import ModelConfig
from hetero_framework.core.devices import open_device
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model
from hetero_framework.models.cut.shard import ShardRange, load_shard
from hetero_framework.models.files.source import ModelSource

_HIDDEN, _BLOCK = 2048, 128
_FP8 = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
FORMS = {"bfloat16": None, "fp8": _FP8}


def write(folder: Path, form: str, size: float) -> None:
    """A checkpoint of about `size` bytes, a file for each layer."""
    width = 2 if form == "bfloat16" else 1
    of_layer = (4 * _HIDDEN + 9 * _HIDDEN) * _HIDDEN * width
    config = LlamaConfig(
        hidden_size=_HIDDEN,
        intermediate_size=3 * _HIDDEN,
        num_hidden_layers=max(2, round(size / of_layer)),
        num_attention_heads=16,
        vocab_size=1024,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    if (settings := FORMS[form]) is not None:
        about = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(about | {"quantization_config": settings}))
    files: dict[str, dict[str, torch.Tensor]] = {}
    drawn: dict[torch.Size, torch.Tensor] = {}  # layers may be alike, files have their own bytes
    for name, weight in meta_model(config).named_parameters():
        where = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "ends"
        if weight.shape not in drawn:
            drawn[weight.shape] = torch.randn(weight.shape).to(torch.bfloat16)
        made = drawn[weight.shape].clone()
        tensors = {name: made}
        if form == "fp8" and where != "ends" and made.dim() == 2:
            blocks = torch.full([-(-n // _BLOCK) for n in made.shape], 2**-6)
            tensors = {name: made.to(torch.float8_e4m3fn), f"{name}_scale_inv": blocks}
        files.setdefault(f"model-{where}.safetensors", {}).update(tensors)
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def child(folder: str, *, load: bool) -> dict[str, float]:
    """The peak of one process, and with `load` the time for all layers and their bytes."""
    settings = ModelConfig(name_or_path=folder)
    layers = introspect(ModelSource(settings, Path(folder)).config).num_layers
    rng, seconds, own = ShardRange(0, layers, is_first=True, is_last=True), 0.0, 0
    if load:
        began = time.perf_counter()
        shard = load_shard(settings, Path(folder), rng, open_device("cpu"), seed=0)
        for parameter in shard.model.parameters():  # mapped files take memory once they are used
            parameter.detach().view(torch.int64).sum()
        seconds = time.perf_counter() - began
        own = sum(parameter.nbytes for parameter in shard.model.parameters())
    cpu_s = sum(os.times()[:2])  # of other programs only the first figure speaks
    return {"peak_bytes": peak_bytes(), "seconds": seconds, "cpu_s": cpu_s, "own_bytes": own}


def run_child(folder: Path, mode: str) -> dict[str, float]:
    """A process of its own; this one stays small, as children inherit its peak."""
    command = [sys.executable, "-m", "benchmarks.stored_forms", "--child", mode, str(folder)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        mode, folder = options.child
        if mode in FORMS:
            write(Path(folder), mode, options.gigabytes * 1e9)
            print("{}")
        else:
            print(json.dumps(child(folder, load=mode == "load")))
        return
    result: dict[str, Any] = {"benchmark": "stored_forms"}
    with tempfile.TemporaryDirectory() as folder:
        folders = {form: Path(folder, form) for form in FORMS}
        for form, place in folders.items():
            place.mkdir()
            command = [sys.executable, "-m", "benchmarks.stored_forms"]
            command += ["--gigabytes", str(options.gigabytes), "--child", form, str(place)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            idle = run_child(place, "idle")
            result[form] = {
                "checkpoint_bytes": sum(f.stat().st_size for f in place.glob("*.safetensors")),
                "idle_peak_bytes": idle["peak_bytes"],
                "seconds": [],
            }
        for _ in range(options.times):
            for form, place in folders.items():
                found = run_child(place, "load")
                result[form]["seconds"].append(round(found["seconds"], 2))
                result[form] |= {k: found[k] for k in ("peak_bytes", "own_bytes", "cpu_s")}
    for form in FORMS:
        peak = result[form]["peak_bytes"] - result[form]["idle_peak_bytes"]
        result[form]["over_own_bytes"] = peak - result[form]["own_bytes"]
    fastest = {form: min(result[form]["seconds"]) for form in FORMS}
    result["ratio"] = round(fastest["fp8"] / fastest["bfloat16"], 3)
    result["environment"] = environment.describe()
    print(json.dumps(result))
    if options.save:
        environment.save("stored_forms", result)


if __name__ == "__main__":
    main()
