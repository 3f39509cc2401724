"""The checks of `python -m benchmarks.gpu` that try one feature of training each on a GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.gpu_checks import (
    Bench,
    Quiet,
    Result,
    Skip,
    cuts_of,
    equal,
    loss_difference,
    needs_bitsandbytes,
    needs_hardware,
    parity,
    save_tokenizer,
    small_run,
    verdict,
)
from hetero_framework.config import Config
from hetero_framework.core.codecs import CODECS
from hetero_framework.core.devices import Device
from hetero_framework.core.spans import WEIGHTS
from hetero_framework.errors import HeteroError, ResourceError
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.memory import estimate_memory

_ADAPTER = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1}
_NEAR = 1e-3
_MICRO_BATCHES = 4
_RETURNED = 256 * 2**20
_ESTIMATE = (0.6, 1.7)


def fp16(bench: Bench) -> Result:
    """Autocast to float16 with one loss scale."""
    return parity(bench, tolerance=2e-2, training={"fp16": True}, adapter=_ADAPTER)


def padding_free(bench: Bench) -> Result:
    """Samples one after another in a row, with the attention that keeps them apart."""
    model = {"attn_implementation": None}
    data = {"padding_free": True}
    return parity(bench, tolerance=1e-4, training={}, model=model, data=data)


def loss_chunks(bench: Bench) -> Result:
    """The logits of 16 tokens at a time."""
    return parity(bench, tolerance=1e-5, training={"loss_chunk_tokens": 16})


def compiled(bench: Bench) -> Result:
    """torch.compile on every layer."""
    needs_hardware(bench, "kernels of torch.compile")
    return parity(bench, tolerance=_NEAR, training={"torch_compile": True})


def lora_int8(bench: Bench) -> Result:
    """8-bit weights under an adapter."""
    needs_bitsandbytes(bench)
    model = {"quantization": "int8"}
    return parity(bench, tolerance=5e-2, training={}, adapter=_ADAPTER, model=model)


def optimizer_8bit(bench: Bench) -> Result:
    """bitsandbytes' paged 8-bit AdamW."""
    needs_bitsandbytes(bench)
    return parity(bench, tolerance=_NEAR, training={"optim": "paged_adamw_8bit"})


def tied(bench: Bench) -> Result:
    """All weights of a GPT-2, whose head and embedding are one weight."""
    torch.manual_seed(0)
    folder = bench.folder / "gpt2"
    config = GPT2Config(
        vocab_size=128,
        n_positions=256,
        n_embd=bench.size.hidden,
        n_layer=bench.size.layers,
        n_head=8,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return parity(bench, tolerance=1e-5, training={}, model={"name_or_path": str(folder)})


def recompute(bench: Bench) -> Result:
    """Layers computed again in the backward, against layers kept, with dropout."""
    runs = {
        name: small_run(
            bench,
            f"recompute-{name}",
            cuts_of(bench.size.layers)["cut_2"],
            training={"gradient_checkpointing": name == "cut"},
            adapter=_ADAPTER,
        )
        for name in ("uncut", "again", "cut")
    }
    return verdict(runs, 1e-5)


def several_stages(bench: Bench) -> Result:
    """Two stages in each of two processes."""
    layers = bench.size.layers
    cuts = [layers // 4, layers // 2, 3 * layers // 4]
    runs = {
        "uncut": small_run(bench, "stages-uncut", [], training={}),
        "again": small_run(bench, "stages-again", [], training={}),
        "cut": small_run(bench, "stages-cut", cuts, training={}, owners=["local", 1, "local", 1]),
    }
    return verdict(runs, 1e-5)


def cpu_coordinator(bench: Bench) -> Result:
    """The first stage on the CPU, the others on the card: near one process, since kinds of device
    round differently."""
    plans = cuts_of(bench.size.layers)
    whole = small_run(bench, "mixed-uncut", [], training={})
    mixed = small_run(bench, "mixed-cut", plans["cut_2"], training={}, coordinator="cpu")
    difference = loss_difference(whole, mixed)
    return {"ok": difference <= _NEAR, "max_relative_loss_difference": difference}


def wire_codecs(bench: Bench) -> Result:
    """int8 activations and gradients: the loss stays near that without."""
    cuts = cuts_of(bench.size.layers)["cut_4"]
    plain = small_run(bench, "wire-none", cuts, training={})
    wire = {"activations": "int8", "gradients": "int8"}
    coded = small_run(bench, "wire-int8", cuts, training={}, wire=wire)
    difference = loss_difference(plain, coded)
    return {"ok": difference <= 5e-2, "max_relative_loss_difference": difference}


def resume(bench: Bench) -> Result:
    """A run that goes on from a checkpoint under another plan, and its evaluation loss."""
    plans, half = cuts_of(bench.size.layers), bench.size.steps // 2
    every = {"save_strategy": "steps", "save_steps": half}
    whole = small_run(bench, "resume", plans["cut_2"], training=every, keep=True)
    again = small_run(bench, "resume", plans["cut_4"], training=every, resume=half)
    return {"ok": equal(whole, again), "from_step": half, "steps": len(again.steps)}


def codecs(bench: Bench) -> Result:
    """Every codec gives the same bits on the device as on the CPU, there and back."""
    draw = torch.Generator().manual_seed(0)
    device, wrong = bench.device.torch_device, []
    for name, codec in CODECS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for scale in (1.0, 1e-30, 1e3):
                if not codec.supports(dtype) or not bench.device.supports(dtype):
                    continue
                tensor = (torch.randn(3, 777, generator=draw) * scale).to(dtype)
                here, there = codec.encode(tensor), codec.encode(tensor.to(device))
                back = codec.decode(there, tensor.shape, dtype).cpu()
                same = all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
                if not same or not torch.equal(codec.decode(here, tensor.shape, dtype), back):
                    wrong.append(f"{name} {dtype} {scale:g}")
    return {"ok": not wrong, "different": wrong}


def stream_frozen(bench: Bench) -> Result:
    """Frozen layers that visit the device against layers that are held there: the same bits, and on
    a card tokens per second and the peak of memory, by the tokens of a micro-batch."""
    result = _streamed(bench, "stream", _ADAPTER)
    if bench.device.label.startswith("Emulated"):
        return result
    kinds = [None, *(["nf4"] if bench.device.four_bit() else [])]
    return {**result, "speeds": {str(k): stream_speeds(bench, "big", k) for k in kinds}}


def stream_trained(bench: Bench) -> Result:
    """Trained layers that visit the device, with their gradients and states, against layers that
    are held there: the same bits."""
    return _streamed(bench, "trained", None)


def _streamed(bench: Bench, name: str, adapter: dict[str, Any] | None) -> Result:
    if bench.device.one_memory:
        raise Skip(f"{bench.device.name} shares the machine's memory")
    entries = {"uncut": None, "again": None, "streamed": {"offload": bench.size.layers}}
    runs = {
        kind: small_run(bench, f"{name}-{kind}", [], training={}, adapter=adapter, entry=entry)
        for kind, entry in entries.items()
    }
    peaks = {f"{kind}_mib": run.peak_bytes >> 20 for kind, run in runs.items()}
    return {**verdict(runs, 1e-5), **peaks}


def stream_8b(bench: Bench) -> Result:
    """The figures of `stream_frozen` of 8 billion weights in 4 bits."""
    if bench.device.one_memory:
        raise Skip(f"{bench.device.name} shares the machine's memory")
    needs_bitsandbytes(bench)
    speeds = stream_speeds(bench, "huge", "nf4")
    return {"ok": all(math.isfinite(found["ratio"]) for found in speeds.values()), "speeds": speeds}


def stream_speeds(
    bench: Bench, model: str, quantization: str | None
) -> dict[int, dict[str, float]]:
    """By the tokens of a micro-batch: tokens per second of a large model under an adapter with its
    layers held and streamed, their ratio, the share of the copies' time that costs nothing, and the
    peaks of memory in MiB."""
    shape = bench.size.big if model == "big" else bench.size.huge
    place, length = str(bench.model_of(model, shape)), bench.size.big_length // 2
    settings, layers = bench.big_settings(), shape["num_hidden_layers"]
    settings["model"] |= {"name_or_path": place, "quantization": quantization}
    settings["data"]["max_length"] = length
    found: dict[int, dict[str, float]] = {}
    for rows in (1, 2, 4, 8):
        settings["training"] |= {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": _MICRO_BATCHES,
            "gradient_checkpointing": True,
        }
        runs = {
            name: bench.run(f"stream-{name}", [], layers, entry=entry, adapter=_ADAPTER, **settings)
            for name, entry in (("held", {}), ("streamed", {"offload": layers}))
        }
        speeds = {name: statistics.median(run.speeds[2:]) for name, run in runs.items()}
        trace = runs["streamed"].trace
        copied_s = sum(e.seconds for e in trace.events if e.kind == WEIGHTS) if trace else math.nan
        copied_s /= settings["training"]["timeline_steps"]
        tokens = rows * length
        longer_s = tokens * _MICRO_BATCHES * (1 / speeds["streamed"] - 1 / speeds["held"])
        found[tokens] = {
            **speeds,
            "ratio": speeds["streamed"] / speeds["held"],
            "hidden_share": 1 - max(0.0, longer_s) / copied_s if copied_s else math.nan,
            **{f"{name}_mib": run.peak_bytes >> 20 for name, run in runs.items()},
        }
    return found


def offload_optimizer(bench: Bench) -> Result:
    """Optimizer states and stored inputs in host memory against all on the device."""
    training = {"gradient_checkpointing": True}
    away = {"offload_optimizer": True, "activation_offloading": True}
    cuts = cuts_of(bench.size.layers)["cut_2"]
    runs = {
        name: small_run(
            bench, f"away-{name}", cuts, training=training | (away if name == "away" else {})
        )
        for name in ("uncut", "again", "away")
    }
    peaks = {f"{name}_mib": run.peak_bytes >> 20 for name, run in runs.items()}
    return {**verdict(runs, 1e-5), **peaks}


def memory_returns(bench: Bench) -> Result:
    """Workers that are kept give a run's memory back before the next one asks."""
    if bench.device.kind == "cpu":
        raise Skip("other programs use the CPU's memory too")
    cuts = cuts_of(bench.size.layers)["cut_4"]
    free = []
    for number in range(3):
        small_run(bench, f"memory-{number}", cuts, training={})
        bench.device.empty_cache()
        free.append(bench.device.memory().free)
    lost = free[0] - free[-1]
    return {"ok": lost <= _RETURNED, "lost_bytes": lost}


class Filling(Quiet):
    """Takes all of a device's memory after the first step, down to pieces of 512 bytes."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.ballast: list[torch.Tensor] = []

    def step(self, metrics: Mapping[str, Any]) -> None:
        if self.ballast:
            return
        self._device.empty_cache()
        size = self._device.memory().free
        while size >= 512:
            try:
                ballast = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
            except torch.OutOfMemoryError:
                size //= 2
            else:
                self.ballast.append(ballast)


def out_of_memory(bench: Bench) -> Result:
    """A card that gets full between two steps is told as that: exit code 6, the place in the step,
    and no word of the network."""
    if bench.device.kind not in ("cuda", "rocm", "xpu"):
        raise Skip("only where a device has memory of its own")
    filling, cuts = Filling(bench.device), cuts_of(bench.size.layers)["cut_2"]
    try:
        small_run(bench, "full", cuts, training={}, progress=filling)
    except HeteroError as error:
        told = isinstance(error, ResourceError) and "of micro-batch" in error.message
        return {"ok": told, "exit_code": error.exit_code, "said": str(error)}
    finally:
        filling.ballast.clear()
        bench.device.empty_cache()
    return {"ok": False, "reason": "it ran with a full card"}


def estimate(bench: Bench) -> Result:
    """What the largest process is predicted to need against what it needed."""
    ratios = {}
    for name, ways in (("uncut", 1), ("cut_2", 2), ("cut_4", 4)):
        run = bench.big_runs()[name]
        predicted = predicted_peak(bench, ways)
        ratios[name] = round(run.peak_bytes / predicted, 3)
    low, high = _ESTIMATE
    on_card = bench.device.kind != "cpu"
    return {
        "ok": all(math.isfinite(r) and (not on_card or low <= r <= high) for r in ratios.values()),
        "peak_over_estimate": ratios,
    }


def predicted_peak(bench: Bench, ways: int) -> int:
    """Bytes that the estimate gives for the largest process of the run of 1.1 billion weights."""
    config: Config = bench.big_config(ways)
    assert config.model is not None
    model_config = ModelSource.of(config).config
    memory = estimate_memory(config, model_config, tokens=bench.size.big_length)
    return max(stage.total for stage in memory)


CHECKS: tuple[Callable[[Bench], Result], ...] = (
    *(fp16, padding_free, loss_chunks, compiled, lora_int8, optimizer_8bit, tied, recompute),
    *(several_stages, cpu_coordinator, wire_codecs, resume, codecs),
    *(stream_frozen, stream_trained, stream_8b),
    *(offload_optimizer, memory_returns),
    *(out_of_memory, estimate),
)
