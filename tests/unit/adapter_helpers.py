"""Tiny stock models, cut into shards and run as a chain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hetero_framework.config import AdapterConfig, ModelConfig
from hetero_framework.core.devices import open_device
from hetero_framework.models.adapters.lora import plan_adapter
from hetero_framework.models.adapters.trainable import (
    attach_adapter,
    export_parts,
    trainable_parameters,
)
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import Shard, ShardRange, load_shard
from hetero_framework.models.cut.side import (
    Bundle,
    as_leaves,
    crossing,
    differentiate,
    gradients_of,
)
from hetero_framework.models.files.export import OutputDirectory, write_adapter

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    "gemma": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "head_dim": 16,
    },
    "mixtral": {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_positions": 32},
    "zamba2": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
}
EXTRA: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    # Layers 1 to 3 have one transformer in common.
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "adapter_rank": 8,
        "mamba_d_state": 16,
        "chunk_size": 8,
    },
}


def save_model(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    """A random stock model of 4 layers on disk."""
    settings = {**SIZES[model_type], **EXTRA.get(model_type, {})}
    settings.update({"n_layer": 4} if model_type == "gpt2" else {"num_hidden_layers": 4})
    if model_type != "gpt2":
        settings.update(num_key_value_heads=2, max_position_embeddings=64)
    settings.update(vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    settings.update(changes)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def stock(folder: Path, **kwargs: Any) -> PreTrainedModel:
    """The whole model outside training mode, with 4-bit weights as training reads them.

    bitsandbytes would repack those for inference on CPUs that have AVX512-BF16.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs).train(False)
    keep_unpacked(model)
    return model


def keep_unpacked(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def ranges(*bounds: int) -> list[ShardRange]:
    """Shards between the layer numbers `bounds`, e.g. 0, 1, 4."""
    return list(ranges_between(bounds))


def shards(
    folder: Path,
    *bounds: int,
    adapter: AdapterConfig | None = None,
    seed: int = 7,
    attach: bool = True,
    **model: Any,
) -> list[Shard]:
    settings = ModelConfig(name_or_path=str(folder), **model)
    device = open_device("cpu")
    parts = []
    for span in ranges(*bounds):
        shard = load_shard(settings, folder, span, device, seed=seed)
        if attach:
            plan = plan_adapter(shard.config, adapter, folder) if adapter is not None else None
            attach_adapter(shard, plan, seed)
        shard.train(False)
        parts.append(shard)
    return parts


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def chain_logits(parts: list[Shard]) -> torch.Tensor:
    inputs = batch()
    received: Bundle = ()
    with torch.no_grad():
        for shard in parts[:-1]:
            received = shard.forward(inputs, received)
        return parts[-1]._run(inputs, received).logits


def chain_loss(
    parts: list[Shard],
    inputs: dict[str, torch.Tensor],
    last: Callable[[Bundle], torch.Tensor],
    half: torch.dtype | None = None,
) -> torch.Tensor:
    """Loss that `last` makes of what the last part receives, in autocast to `half`; leaves
    gradients on the parts' parameters."""
    autocast = torch.autocast("cpu", half, enabled=half is not None)
    boundaries: list[tuple[Bundle, Bundle]] = []
    received: Bundle = ()
    for shard in parts[:-1]:
        with autocast:
            left = shard.forward(inputs, received)
        received = as_leaves(crossing(left))
        boundaries.append((left, received))
    with autocast:
        loss = last(received)
    if loss.requires_grad:  # that of chunks is differentiated already
        loss.backward()
    for left, received in reversed(boundaries):
        differentiate(left, gradients_of(received))
    return loss.detach()


def chain_backward(parts: list[Shard]) -> torch.Tensor:
    """Loss of the chain over `batch()`; leaves gradients on the shards' parameters."""
    inputs = batch()
    items = (inputs["labels"][:, 1:] != -100).sum()
    return chain_loss(parts, inputs, lambda received: parts[-1].loss(inputs, received, items))


PREFIX = "base_model.model."
"""Of PEFT's names of parameters."""


def check_gradients(parts: list[Shard], model: torch.nn.Module) -> None:
    """Loss, trained parameters and their gradients are those of the whole model, to the bit."""
    expected_loss = model(**batch(), use_cache=False).loss
    expected_loss.backward()
    assert torch.equal(chain_backward(parts), expected_loss.detach())
    expected = {n.removeprefix(PREFIX): p for n, p in model.named_parameters() if p.requires_grad}
    found = dict(item for part in parts for item in trainable_parameters(part))
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.dtype == expected[name].dtype
        assert torch.equal(parameter.grad, expected[name].grad), name


def write(folder: Path, parts: list[Shard], base: Path) -> Path:
    """The adapter of these parts, as a run writes it."""
    adapter = parts[0].adapter
    assert adapter is not None
    exported = [dict(export_parts(part)) for part in parts]
    write_adapter(OutputDirectory(folder), exported, adapter.plan, str(base))
    return folder


def stock_logits(model: torch.nn.Module) -> torch.Tensor:
    inputs = batch()
    with torch.no_grad():
        return model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
        ).logits


def write_trained(parts: list[Shard], base: Path, folder: Path) -> Path:
    """The adapter of these shards of the model at `base`, as the result of a run."""
    tensors = [dict(export_parts(part)) for part in parts]
    write_adapter(OutputDirectory(folder), tensors, parts[0].adapter.plan, str(base))
    return folder


def randomise(parts: list[Shard]) -> None:
    """Give every trainable tensor a value of its own, as if it had been trained."""
    with torch.no_grad():
        for shard in parts:
            for name, parameter in trainable_parameters(shard):
                generator = torch.Generator().manual_seed(sum(name.encode()))
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((0.05 * noise).to(parameter.dtype))
