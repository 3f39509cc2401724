from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical
from transformers import AutoConfig

from hetero_framework.config import StageSpec, TrainingConfig
from hetero_framework.errors import ArchitectureError, ProtocolError
from hetero_framework.models.cut import causal_lm
from hetero_framework.models.cut.causal_lm import SUMS, CausalLM, TokenSums
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import towers
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.cut.shard import ShardRange, build_shard
from hetero_framework.models.cut.tiny import causal_lm_types, probe_inputs, stock_class, tiny_config
from hetero_framework.models.sizing.footprint import Setting, head_footprint
from tests.installed import needs

ITEMS = torch.tensor(7.0)
LABELS = torch.tensor([[3, 1, -100, 2], [0, -100, 4, 4]])


@pytest.mark.parametrize(
    ("is_first", "is_last", "names"),
    [
        (True, False, ["input_ids", "attention_mask"]),
        (False, False, ["attention_mask"]),
        (False, True, ["attention_mask", "labels"]),
        (True, True, ["input_ids", "attention_mask", "labels"]),
    ],
)
def test_stage_inputs_are_tokens_in_front_and_labels_at_the_end(is_first, is_last, names):
    spec = StageSpec(0, "local", 0, 1, is_first, is_last)
    batch = ("input_ids", "attention_mask", "labels")
    assert CausalLM(None).stage_inputs(spec, batch) == names


@pytest.mark.parametrize("limit", [None, 5], ids=["whole", "in chunks"])
def test_loss_is_the_shards_own_divided_by_the_items(limit):
    config = tiny_config("llama")
    layers = introspect(config).num_layers
    shard = build_shard(config, None, ShardRange(0, layers, True, True), dtype=torch.float32)
    shard.train(False)
    objective = CausalLM(limit)
    batch = probe_inputs(config)
    expected = shard.loss(batch, (), ITEMS)
    (gradient,) = torch.autograd.grad(expected, [next(shard.model.parameters())])
    how = {"running": nullcontext, "backward": torch.Tensor.backward}
    loss, _ = objective.loss(shard, batch, (), ITEMS, **how)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    found = next(shard.model.parameters()).grad
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("model_type", "first_labels"), [("llama", 0), ("gpt2", 2)])
def test_item_counter_has_first_labels_as_the_trainer(model_type, first_labels):
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
def test_a_class_trains_the_next_token_and_nothing_else(model_type):
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
def test_preferences_need_the_memory_of_next_token_training(dtype):
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
        most[name] = found.passing
    assert most["dpo"] <= 1.05 * most["sft"]


def sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counted = TokenSums()
    counted.look(logits, labels)
    return counted.total


@pytest.mark.parametrize("at_once", [1, 10, 1000])
def test_sums_are_of_the_tokens_with_labels(at_once, monkeypatch):
    monkeypatch.setattr(causal_lm, "_LOGITS", at_once)
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    places = [(row, token) for row in range(2) for token in range(3) if LABELS[row, token + 1] >= 0]
    entropy = sum(float(Categorical(logits=logits[place]).entropy()) for place in places)
    hits = sum(int(logits[r, t].argmax()) == int(LABELS[r, t + 1]) for r, t in places)
    assert sums(logits, LABELS).tolist() == pytest.approx([entropy, hits, 4])


def test_tokens_that_the_model_rules_out_add_nothing():
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, -math.inf, -math.inf]]])
    found = sums(logits, torch.tensor([[0, 1]]))
    assert found.tolist() == pytest.approx([math.log(2), 0, 1])


def test_metrics_are_means_over_micro_batches_each_a_mean_over_its_tokens():
    named = [{SUMS: torch.tensor(values)} for values in ([6.0, 1.0, 2.0], [1.0, 1.0, 1.0])]
    metrics = CausalLM(None, token_metrics=True).metrics
    assert metrics(named) == {"entropy": 2.0, "mean_token_accuracy": 0.75}
    assert metrics([{SUMS: torch.zeros(3)}]) == {"entropy": 0, "mean_token_accuracy": 0}
    assert metrics([]) == {}


@pytest.mark.parametrize("named", [{}, {SUMS: torch.zeros(2)}, {SUMS: torch.zeros(3).long()}])
def test_other_tensors_of_a_peer_are_refused(named):
    with pytest.raises(ProtocolError, match="the last stage gave no sums"):
        CausalLM(None, token_metrics=True).metrics([{SUMS: torch.zeros(3)}, named])


def test_logits_that_are_no_rows_of_tokens_are_refused():
    with pytest.raises(ArchitectureError, match="no prediction for each token"):
        TokenSums().look(torch.zeros(2, 3, 5), LABELS)
