"""Memory that each stage is estimated to need, beside what its tensors really take.

    python -m benchmarks.stage_memory
    python -m benchmarks.stage_memory --only lora --stages

The stages of a plan are loaded as a run loads them, one process's after the other, and do two steps
each: as many forwards as their in-flight limit, their backwards, the optimizer. What is compared is
the most bytes that tensors have held at once in the second step: weights, gradients, optimizer,
what autograd keeps, logits, and everything that exists for a moment only. `PeakMemory` counts
them, so neither the allocator nor the load of the machine plays a part; what torch's kernels take
inside is not seen. `ratio` is estimate / measured. Prints one JSON object per case; `--save`
keeps all under results/.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.machines import run_program
from hetero_framework.config import Config, StageSpec
from hetero_framework.core.devices import Device, open_device
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.models.cut.side import Bundle
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.footprint import PeakMemory
from hetero_framework.models.sizing.memory import StageMemory, estimate_memory

GOAL = 0.10
_IN_FLIGHT = 3
_ROWS = 2
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 6,
    "n_head": 4,
    "vocab_size": 4096,
    "n_positions": 2048,
}
_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 688,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
_ALL_LINEAR = {"r": 16, "target_modules": "all-linear"}
_ATTENTION = {"r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
_CHUNKS = [("local", 0, 1), (1, 1, 3), ("local", 3, 5), (1, 5, 6)]


@dataclass(frozen=True)
class Case:
    """One model and its settings. `cuts` are (owner, start, end) of each stage."""

    name: str
    model: Mapping[str, Any] = field(default_factory=lambda: _LLAMA)
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    tokens: int = 128
    padded: bool = True
    cuts: Sequence[tuple[int | str, int, int]] = (("local", 0, 2), (1, 2, 4), (2, 4, 6))

    def config(self) -> Config:
        workers = sorted({owner for owner, *_ in self.cuts if owner != "local"}, key=str)
        address = {"ip": "127.0.0.1", "device": "cpu"}
        return Config.from_dict(
            {
                "coordinator": address,
                "workers": [{**address, "id": k, "port": 9000 + int(k)} for k in workers],
                "shard_plan": [{"id": o, "start": a, "end": b} for o, a, b in self.cuts],
                "model": {"from_config": dict(self.model), "tokenizer": "none", **self.settings},
                "adapter": self.adapter,
                "training": {
                    "per_device_train_batch_size": _ROWS,
                    "gradient_accumulation_steps": 2 * _IN_FLIGHT,
                    **self.training,
                },
            }
        )


CASES = (
    Case("full"),
    Case("full, gpt2", model=_GPT2),
    Case("full, experts", model=_MOE),
    Case("full, checkpointing", training={"gradient_checkpointing": True}, tokens=256),
    Case("full, long sequences", tokens=768),
    Case("full, large vocabulary", model={**_LLAMA, "vocab_size": 32768}),
    Case("full, two chunks", cuts=_CHUNKS),
    Case("full, bf16 autocast", training={"bf16": True}, tokens=256),
    Case("lora", adapter=_ALL_LINEAR),
    Case("lora on attention, bfloat16", adapter=_ATTENTION, settings={"dtype": "bfloat16"}),
    Case(
        "lora, checkpointing, long sequences",
        adapter=_ALL_LINEAR,
        training={"gradient_checkpointing": True},
        tokens=768,
    ),
    Case(
        "lora, large vocabulary, bfloat16",
        model={**_LLAMA, "vocab_size": 32768},
        adapter=_ALL_LINEAR,
        settings={"dtype": "bfloat16"},
        tokens=256,
    ),
    Case(
        "lora, two chunks, long sequences",
        adapter=_ALL_LINEAR,
        settings={"dtype": "bfloat16"},
        tokens=512,
        cuts=_CHUNKS,
    ),
    Case("lora, dropout, two chunks", adapter={**_ALL_LINEAR, "lora_dropout": 0.1}, cuts=_CHUNKS),
    Case("full, no padding", padded=False),
    Case("lora, no padding, long sequences", adapter=_ALL_LINEAR, tokens=512, padded=False),
)


class Process:
    """The stages of one owner, in this process, doing steps by themselves."""

    def __init__(self, config: Config, specs: Sequence[StageSpec], device: Device) -> None:
        self._stages = load_stages(config, specs, device)
        for stage in self._stages:
            stage.input_requires_grad = not stage.is_first
        assert config.model is not None
        model = ModelSource(config.model, Path()).config.get_text_config()
        self._vocabulary, self._hidden = int(model.vocab_size), int(model.hidden_size)
        dtype = config.model.dtype
        self._dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
        self._attempt = 0

    def step(self, tokens: int, in_flight: int, padded: bool) -> None:
        """Forwards of all stages, then their backwards, the deepest first, and the optimizer."""
        count, self._attempt = 2 * in_flight, self._attempt + 1
        ids_BS = torch.randint(self._vocabulary, (_ROWS, tokens))
        mask_BS = torch.ones_like(ids_BS)
        if padded:
            mask_BS[-1, -tokens // 4 :] = 0
        inputs = {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": ids_BS}
        info = StepInfo(0, self._attempt, True, count, count * ids_BS.numel())
        for stage in self._stages:
            stage.begin(info)
        for first in range(0, count, in_flight):
            numbers = range(first, first + in_flight)
            for stage in self._stages:
                for k in numbers if not stage.is_last else ():
                    stage.forward(k, inputs, () if stage.is_first else self._arriving(tokens))
            for stage in reversed(self._stages):
                for k in numbers:
                    if stage.is_last:
                        stage.forward_backward(k, inputs, self._arriving(tokens))
                    else:
                        stage.backward(k, self._arriving(tokens))
        for stage in self._stages:
            stage.report_gradients()
            stage.commit(1e-4, 0.5)

    def _arriving(self, tokens: int) -> Bundle:
        """What crosses a boundary."""
        return (torch.randn(_ROWS, tokens, self._hidden, dtype=self._dtype),)


def most_bytes(case: Case, config: Config, specs: Sequence[StageSpec]) -> int:
    """The most that the tensors of one process hold in a step after the first."""
    with PeakMemory() as peak:
        process = Process(config, specs, open_device("cpu"))
        process.step(case.tokens, 1, case.padded)
        gc.collect()
        peak.most = peak.now
        process.step(case.tokens, _IN_FLIGHT, case.padded)
        return peak.most


def run(case: Case) -> dict[str, Any]:
    """One case: each process's estimated and measured bytes."""
    torch.manual_seed(0)
    config, stages = case.config(), []
    assert config.model is not None
    specs = config.plan.stages
    estimates = estimate_memory(
        config,
        ModelSource(config.model, Path()).config,
        tokens=case.tokens,
        in_flight=[_IN_FLIGHT] * len(specs),
    )
    for owner in config.plan.owners:
        own = [spec for spec in specs if spec.owner == owner]
        estimated: list[StageMemory] = [estimates[spec.index] for spec in own]
        total = sum(memory.total for memory in estimated)
        measured = most_bytes(case, config, own)
        gc.collect()
        stages.append(
            {
                "process": owner,
                "stages": [spec.index for spec in own],
                "estimated_bytes": total,
                "kept_bytes": sum(memory.kept for memory in estimated),
                "measured_bytes": measured,
                "ratio": round(total / measured, 3),
            }
        )
    ratios = [stage["ratio"] for stage in stages]
    return {
        "case": case.name,
        "tokens": case.tokens,
        "padded": case.padded,
        "within_goal": all(abs(ratio - 1) <= GOAL for ratio in ratios),
        "ratios": ratios,
        "processes": stages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        if options.only is None or options.only in case.name:
            rows.append(run(case))
            print(json.dumps(rows[-1]), flush=True)
    every = [ratio for row in rows for ratio in row["ratios"]]
    summary = {
        "cases": len(rows),
        "within_goal": sum(row["within_goal"] for row in rows),
        "least": min(every),
        "median": statistics.median(every),
        "most": max(every),
    }
    print(json.dumps(summary), file=sys.stderr)
    if options.save:
        saved = {"benchmark": "stage_memory", **summary, "goal": GOAL, "rows": rows}
        saved["environment"] = environment.describe()
        print(f"saved {environment.save('stage_memory', saved)}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
