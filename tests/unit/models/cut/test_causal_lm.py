from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from hetero_framework.config import StageSpec, TrainingConfig
from hetero_framework.errors import ArchitectureError
from hetero_framework.models.cut.causal_lm import CausalLM
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import towers
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.cut.shard import ShardRange, build_shard
from hetero_framework.models.cut.tiny import causal_lm_types, probe_inputs, stock_class, tiny_config
from hetero_framework.models.sizing.footprint import Setting, head_footprint
from tests.installed import needs

ITEMS = torch.tensor(7.0)


@pytest.mark.parametrize(
    ("is_first", "is_last", "names"),
    [
        (True, False, ["input_ids", "attention_mask"]),
        (False, False, ["attention_mask"]),
        (False, True, ["attention_mask", "labels"]),
        (True, True, ["input_ids", "attention_mask", "labels"]),
    ],
)
def test_stage_inputs_are_tokens_in_front_and_labels_at_the_end(
    is_first: bool, is_last: bool, names: list[str]
) -> None:
    spec = StageSpec(0, "local", 0, 1, is_first, is_last)
    batch = ("input_ids", "attention_mask", "labels")
    assert CausalLM(None).stage_inputs(spec, batch) == names


@pytest.mark.parametrize("limit", [None, 5], ids=["whole", "in chunks"])
def test_loss_is_the_shards_own_divided_by_the_items(limit: int | None) -> None:
    config = tiny_config("llama")
    layers = introspect(config).num_layers
    shard = build_shard(config, None, ShardRange(0, layers, True, True), dtype=torch.float32)
    shard.train(False)
    objective = CausalLM(limit)
    batch = probe_inputs(config)
    expected = shard.loss(batch, (), ITEMS)
    (gradient,) = torch.autograd.grad(expected, [next(shard.model.parameters())])
    loss, _ = objective.loss(
        shard, batch, (), ITEMS, running=nullcontext, backward=torch.Tensor.backward
    )
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    found = next(shard.model.parameters()).grad
    assert found is not None
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("model_type", "first_labels"), [("llama", 0), ("gpt2", 2)])
def test_item_counter_counts_first_labels_where_the_trainer_does(
    model_type: str, first_labels: int
) -> None:
    """The Trainer knows the loss of LlamaForCausalLM by its name, and not GPT2LMHeadModel's."""
    batch = {"labels": torch.tensor([[1, 2, -100], [3, 4, 5]])}
    objective = objective_of(TrainingConfig())
    assert objective.prediction_counter(tiny_config(model_type))([batch, batch]) == 6
    count = objective.item_counter(tiny_config(model_type))
    assert count([batch, batch]) == 6 + 2 * first_labels


# Their own loss takes labels that are shifted already; ProphetNet's is of several tokens each.
SHIFTED = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart"),
    *("mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper", "xlm", "xlnet"),
}
# None at all on text alone, or outside training.
WITHOUT_LOSS = ["git", "reformer"]


@pytest.mark.long
@pytest.mark.parametrize("model_type", causal_lm_types())
def test_a_class_trains_the_next_token_and_nothing_else(model_type: str) -> None:
    """No head for later tokens, as some checkpoints have them; routers add nothing by default."""
    config = tiny_config(model_type)
    inputs = probe_inputs(config)
    labels = inputs.pop("labels")
    try:
        towers(config)  # has parts stood in for whose package is not here
        model = stock_class(config)._from_config(config).train(False)
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
    except (ArchitectureError, RuntimeError):
        pytest.skip("it does not run on text")
    assert not [name for name, _ in model.named_modules() if "mtp" in name]
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    if model_type in WITHOUT_LOSS:
        return
    with torch.no_grad():
        loss = model(**inputs, labels=labels, use_cache=False).loss
    assert torch.isclose(loss, expected, rtol=1e-5) == (model_type not in SHIFTED)


@needs("preferences")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_preferences_need_the_memory_of_next_token_training(dtype: torch.dtype) -> None:
    """Of the last stage, for the same rows in loss chunks."""
    config = AutoConfig.for_model(
        "llama",
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 8192},
    )
    most = {}
    for name in ("sft", "dpo"):
        objective = objective_of(TrainingConfig(objective=name, loss_chunk_tokens=256))
        found = head_footprint(Setting(config, None, objective, dtype, None, 4, 256))
        assert found is not None
        most[name] = found.passing
    assert most["dpo"] <= 1.05 * most["sft"]
