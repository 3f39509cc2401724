"""Checkpoints in every layout that transformers reads: shards hold what from_pretrained gives them.

A layout is the names and shapes of a checkpoint's tensors: as a tiny random model is saved, under
the names of its class, and as the conversions of transformers have it published (experts one by
one, projections fused, prefixes and names of older versions).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from hetero_framework.config.objectives import Task
from hetero_framework.errors import ArchitectureError
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import lies_in, towers
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import Shard, build_shard
from hetero_framework.models.cut.tiny import architecture_names, stock_class, tiny_config
from hetero_framework.models.files.weights import Checkpoint
from hetero_framework.models.library import LIBRARY_ERRORS, quiet_library
from tests.installed import needs

Tensors = dict[str, torch.Tensor]

# Of each kind of conversion at least one: names alone, prefixes that come and go, the names of
# LayerNorm in old versions, experts merged, transposed, interleaved or in the order of another
# list, parts put together, projections taken apart.
SHORT: list[tuple[Task, str]] = [
    *(("causal-lm", name) for name in ("gpt2", "qwen3_5_text", "qwen3_moe", "deepseek_v4")),
    *(("causal-lm", name) for name in ("inkling2_text", "kimi_linear", "qwen4_exp_text")),
]
MORE: list[tuple[Task, str]] = [
    ("token-classification", "nomic_bert"),
    ("causal-lm", "Qwen3VLMoeForConditionalGeneration"),
    ("causal-lm", "LlavaForConditionalGeneration"),
]
TASKS: tuple[Task, ...] = ("causal-lm", "sequence-classification", "token-classification")


def layouts(model: Any) -> Iterator[Tensors]:
    """The model's tensors in every layout that its class may be found in."""
    left_out = {*(model._keys_to_ignore_on_save or ()), *(model.all_tied_weights_keys or ())}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    published = get_model_conversion_mapping(model, add_legacy=False)
    for conversions in (None, [], published, get_model_conversion_mapping(model)):
        model._weight_conversions = conversions
        try:
            yield revert_weight_conversion(model, dict(state))
        except (ValueError, RuntimeError):
            continue  # not every conversion can be undone
    prefix = f"{model.base_model_prefix}."
    yield {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def with_later_layers(config: PretrainedConfig, tensors: Tensors) -> Tensors:
    """A block behind the model's, as checkpoints have one that predicts later tokens."""
    structure = introspect(config)
    name, count = structure.blocks.rpartition(".")[2], structure.num_layers
    last, behind = re.compile(rf"(^|\.){name}\.{count - 1}\."), rf"\1{name}.{count}."
    return tensors | {last.sub(behind, n): t for n, t in tensors.items() if last.search(n)}


def write(folder: Path, tensors: Tensors) -> None:
    """Two files that hold every other tensor, with an index in an order of its own."""
    names = sorted(tensors)
    files = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in files.items():
        parts = {name: tensors[name].contiguous().clone() for name in held}
        save_file(parts, folder / file, metadata={"format": "pt"})
    where = {name: file for file, held in files.items() for name in reversed(held)}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def problems(shard: Shard, whole: Any, read: int) -> Iterator[str]:
    """The tensors of a shard that differ from those of the whole; tensors read for nothing."""
    expected = {**dict(whole.named_buffers()), **whole.state_dict()}
    held = shard.model.state_dict()
    buffers = {name: b for name, b in shard.model.named_buffers() if name in expected}
    for name, tensor in {**buffers, **held, **dict(shard.model.named_parameters())}.items():
        other = expected[name]
        if tensor.dtype != other.dtype or not torch.equal(tensor, other):
            yield f"{name} differs"
    numbers = sum({t.data_ptr(): t.numel() for t in held.values()}.values())
    if read > numbers:
        yield f"{read} numbers were read for {numbers}"


def check(config: PretrainedConfig, tensors: Tensors, folder: Path) -> bool:
    """Whether transformers reads this layout; asserts that shards then hold the same."""
    tensors = with_later_layers(config, tensors)
    write(folder, tensors)
    layers = introspect(config).num_layers
    for dtype, parts in ((torch.float32, 3), (torch.bfloat16, 2)):
        try:
            whole, info = stock_class(config).from_pretrained(
                folder, config=config, dtype=dtype, output_loading_info=True
            )
        except LIBRARY_ERRORS:
            return False
        if info["missing_keys"] or info["mismatched_keys"]:
            return False
        names: set[str] = set()
        for rng in ranges_between([layers * part // parts for part in range(parts + 1)]):
            checkpoint = Checkpoint(str(folder))
            shard = build_shard(config, checkpoint, rng, dtype=dtype)
            read = sum(tensors[name].numel() for name in checkpoint.used)
            assert not list(problems(shard, whole, read))
            names |= {*shard.model.state_dict()}
        gone = towers(config)
        assert not [n for n in whole.state_dict() if n not in names and not lies_in(n, gone)]
    return True


def check_all(task: Task, name: str, folder: Path) -> None:
    config = tiny_config(name, task)
    towers(config)  # has parts stood in for whose package is not here
    seen: list[set[str]] = []
    read = []
    with quiet_library():
        torch.manual_seed(0)
        model: Any = stock_class(config)._from_config(config, dtype=torch.float32)
        for tensor in model.state_dict().values():  # buffers too
            if tensor.is_floating_point():
                tensor.normal_()
        config.save_pretrained(folder)
        for tensors in layouts(model):
            if {*tensors} not in seen:
                seen.append({*tensors})
                read.append(check(config, tensors, folder))
    assert read[0], "transformers does not read what it has saved"


PARTS = needs("multimodal", "classification")


@pytest.mark.parametrize(("task", "name"), [*SHORT, *(pytest.param(*m, marks=PARTS) for m in MORE)])
def test_shards_read_layouts_as_from_pretrained_does(task, name, tmp_path):
    check_all(task, name, tmp_path)


@pytest.mark.long
@PARTS
@pytest.mark.parametrize(
    ("task", "name"),
    [(t, n) for t in TASKS for n in architecture_names(t) if (t, n) not in (*SHORT, *MORE)],
)
def test_shards_of_any_architecture_read_all_layouts(task, name, tmp_path):
    try:
        introspect(tiny_config(name, task))
    except (ArchitectureError, *LIBRARY_ERRORS) as error:
        pytest.skip(f"refused: {error}")
    check_all(task, name, tmp_path)
