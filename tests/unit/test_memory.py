"""Memory estimates against what real shards hold and what autograd really stores."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetero_framework.config import AdapterConfig, Config
from hetero_framework.errors import PlanError
from hetero_framework.models.adapters import trainable_parameters
from hetero_framework.models.memory import GIB, StageMemory, check_fits, estimate_memory
from hetero_framework.models.shard import load_model_config
from hetero_framework.trainer.optimizer import build_optimizer
from tests.unit.adapter_helpers import batch, chain_backward, save_model, shards, stock


def config_of(
    base: Path, bounds: tuple[int, ...], adapter: AdapterConfig | None = None, **sections: Any
) -> Config:
    plan = [
        {"id": "local" if index == 0 else index, "start": start, "end": end}
        for index, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    address = {"ip": "127.0.0.1"}
    return Config.from_dict(
        {
            "coordinator": address,
            "workers": [{**address, "id": i, "port": 9000 + i} for i in range(1, len(plan))],
            "shard_plan": plan,
            "model": {"name_or_path": str(base), **sections.get("model", {})},
            "adapter": adapter.model_dump(mode="json") if adapter else None,
            "training": {"per_device_train_batch_size": 2, **sections.get("training", {})},
            "data": sections.get("data"),
        }
    )


def memory_of(config: Config, **kwargs: Any) -> list[StageMemory]:
    assert config.model is not None
    return estimate_memory(config, load_model_config(config.model, Path()), **kwargs)


def held_bytes(model: nn.Module) -> int:
    """Bytes of all distinct storages, statistics of quantised weights included."""
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        state = getattr(tensor, "quant_state", None)
        found = [tensor, getattr(tensor, "SCB", None)]
        if state is not None:
            found += [state.absmax, state.code]
            if state.nested:
                found += [state.offset, state.state2.absmax, state.state2.code]
        for item in found:
            if item is not None:
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


CASES: dict[str, tuple[str, dict[str, Any], AdapterConfig | None, dict[str, Any]]] = {
    "full": ("llama", {}, None, {}),
    "full tied": ("gemma", {}, None, {}),
    "full gpt2": ("gpt2", {}, None, {}),
    "lora bfloat16": ("llama", {}, AdapterConfig(), {"dtype": "bfloat16"}),
    "qlora": ("llama", {}, AdapterConfig(target_modules="all-linear"), {"quantization": "nf4"}),
    "int8": ("llama", {}, AdapterConfig(), {"quantization": "int8"}),
    "experts, saved head": (
        "qwen3_moe",
        {},
        AdapterConfig(target_modules=("q_proj",), modules_to_save=("lm_head",)),
        {},
    ),
}


@pytest.mark.parametrize("bounds", [(0, 1, 3, 4), (0, 4)])
@pytest.mark.parametrize("case", CASES)
def test_weights_gradients_and_optimizer_are_counted_exactly(
    case: str, bounds: tuple[int, ...], tmp_path: Path
) -> None:
    model_type, changes, adapter, model = CASES[case]
    base = save_model(tmp_path, model_type, **changes)
    parts = shards(base, *bounds, adapter=adapter, **model)
    config = config_of(base, bounds, adapter, model=model)
    estimates = memory_of(config, tokens=12)
    assert [m.weights for m in estimates] == [held_bytes(part.model) for part in parts]
    chain_backward(parts)
    for part, estimated in zip(parts, estimates, strict=True):
        named = trainable_parameters(part)
        assert estimated.gradients == sum(p.grad.nbytes for _, p in named if p.grad is not None)
        stepping = [p for n, p in named if not (part.tied and n == part.head_name)]
        optimizer = build_optimizer(config.training, part.model, stepping)
        optimizer.step()
        states = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
        assert estimated.optimizer == sum(t.nbytes for t in states)


def stored_for_backward(model: nn.Module) -> int:
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model(**batch(), use_cache=False)
    del output
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_of_the_right_size(model_type: str, dtype: str, tmp_path: Path) -> None:
    base = save_model(tmp_path, model_type)
    model = stock(base, dtype=getattr(torch, dtype)).train()
    config = config_of(base, (0, 4), model={"dtype": dtype})
    (estimated,) = memory_of(config, tokens=12)
    real = stored_for_backward(model)
    assert 0.6 < (estimated.activations + estimated.logits) / real < 1.4


def test_activations_grow_with_what_is_in_flight_and_shrink_with_checkpointing(
    tmp_path: Path,
) -> None:
    base = save_model(tmp_path)

    def activations(window: int, **training: Any) -> list[int]:
        config = config_of(base, (0, 2, 4), training=training)
        return [m.activations for m in memory_of(config, window=window, tokens=32)]

    one = activations(4)
    assert activations(4, gradient_accumulation_steps=8) == [4 * one[0], one[1]]
    assert activations(4, gradient_accumulation_steps=3) == [3 * one[0], one[1]]
    less = activations(4, gradient_accumulation_steps=8, gradient_checkpointing=True)
    assert less[0] < activations(4, gradient_accumulation_steps=8)[0] / 3


def test_optimizer_state_follows_the_optimizer(tmp_path: Path) -> None:
    base = save_model(tmp_path)
    found = {
        name: memory_of(config_of(base, (0, 4), training={"optim": name}))[0]
        for name in ("adamw_torch", "adamw_bnb_8bit", "lion_32bit", "sgd")
    }
    weights = found["sgd"].gradients
    sizes = {name: m.optimizer / weights for name, m in found.items()}
    assert sizes == {"adamw_torch": 2, "adamw_bnb_8bit": 0.5, "lion_32bit": 1, "sgd": 0}


def test_stages_that_do_not_fit_are_named_with_numbers_and_a_way_out(tmp_path: Path) -> None:
    base = save_model(tmp_path)
    memory = memory_of(config_of(base, (0, 1, 4)))
    need = memory[1].total
    check_fits(memory, {"local": 10 * GIB, 1: need})
    with pytest.raises(PlanError) as caught:
        check_fits(memory, {"local": 10 * GIB, 1: need - 1})
    text = str(caught.value)
    assert "worker 1 has" in text
    assert "stage 1 (layers 1-3) needs" in text
    assert "coordinator" not in text
    assert "fewer layers in shard_plan" in text


def test_stages_of_one_process_share_its_device(tmp_path: Path) -> None:
    base = save_model(tmp_path)
    config = config_of(base, (0, 1, 4))
    plan = [{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 3}]
    plan.append({"id": "local", "start": 3, "end": 4})
    config = Config.from_dict({**config.to_dict(), "shard_plan": plan})
    memory = memory_of(config)
    both = memory[0].total + memory[2].total
    check_fits(memory, {"local": both})
    with pytest.raises(PlanError, match=r"(?s)stage 0 .*stage 2 "):
        check_fits(memory, {"local": both - 1})


def test_stored_attention_in_one_row_is_over_all_its_tokens(tmp_path: Path) -> None:
    base = save_model(tmp_path)

    def stored(attention: str, padding_free: bool) -> int:
        model = {"attn_implementation": attention}
        data = {"train": "a.jsonl", "padding_free": padding_free}
        (memory,) = memory_of(config_of(base, (0, 4), model=model, data=data), tokens=12)
        return memory.activations

    assert stored("sdpa", True) == stored("sdpa", False)
    # 2 rows of 12 tokens: the matrices of 4 layers and 4 heads, 8 bytes an entry.
    more = 4 * 4 * 8 * (24 * 24 - 2 * 12 * 12)
    assert stored("eager", True) - stored("eager", False) == more
