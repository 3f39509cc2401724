"""Models of several parts, cut and compared with the whole."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.verify.verification import verify_model
from hetero_framework.models.cut.causal_lm import CausalLM
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import ShardRange, ranges_between
from hetero_framework.models.cut.shard import build_shard
from hetero_framework.models.cut.tiny import probe_inputs, tiny_config
from hetero_framework.models.verify.equivalence import compare
from tests.samples import save_multimodal
from tests.unit.adapter_helpers import chain_logits, keep_unpacked, shards, stock_logits
from tests.unit.models.files.test_quantization import SETTINGS

QWEN, GEMMA = "Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration"


def test_the_loss_of_all_routers_passes_to_the_bit():
    config: Any = tiny_config("dbrx")
    config.output_router_logits = True
    config.router_aux_loss_coef = 0.5
    assert introspect(config).reports
    result = compare(config, ranges_between([0, 2, 5, 6]))
    assert (result.verdict, result.reason) == ("bit-equal", "")


def test_an_architecture_that_does_not_run_in_autocast_says_so():
    result = verify_model(model_type="dbrx")
    assert result.passed
    assert result.half.startswith("the whole model does not run (RuntimeError: index_add_()")


@pytest.mark.parametrize("cuts", [[3, 4], [2, 3]])
def test_blocks_that_text_does_not_reach_may_stand_anywhere(cuts):
    """Block 3 attends to images: a stage of it alone hands on what it gets."""
    config = tiny_config("mllama")
    structure = introspect(config)
    assert (structure.running, structure.num_layers) == ((0, 1, 2, 4, 5), 6)
    result = compare(config, ranges_between([0, *cuts, 6]))
    assert (result.verdict, result.reason) == ("bit-equal", "")


def test_a_loss_that_needs_images_is_replaced_by_the_next_token_loss():
    """GIT's begins behind the tokens of an image."""
    config = tiny_config("git")
    assert not introspect(config).loss_counts_items
    result = compare(config, ranges_between([0, 3, 6]))
    assert (result.verdict, result.reason) == ("bit-equal", "")


@pytest.mark.long
def test_positions_of_padding_that_embeddings_would_change_are_those_of_ids():
    """Without token ids this class gives padding other positions. No loss shows that, but the sizes
    of an expert's products do, and with them how their sums are rounded."""
    config = tiny_config("Qwen3OmniMoeThinkerForConditionalGeneration")
    assert not introspect(config).takes_embeddings
    assert introspect(tiny_config("llama")).takes_embeddings
    result = compare(config, ranges_between([0, 2, 5, 6]))
    assert (result.verdict, result.reason) == ("bit-equal", "")


@pytest.mark.parametrize("limit", [None, 5], ids=["whole", "in chunks"])
def test_classes_without_an_item_count_average_means_as_the_trainer(limit):
    config = tiny_config(QWEN)
    layers = introspect(config).num_layers
    shard = build_shard(config, None, ShardRange(0, layers, True, True), dtype=torch.float32)
    shard.train(False)
    batch = probe_inputs(config)
    objective = CausalLM(limit)
    micro_batches = objective.item_counter(config)([batch, batch, batch])
    assert micro_batches == 3
    expected = shard.model(**batch).loss / micro_batches  # of a class without a number: the mean
    (gradient,) = torch.autograd.grad(expected, [next(shard.model.parameters())])
    how: Any = {"running": nullcontext, "backward": torch.Tensor.backward}
    loss, _ = objective.loss(shard, batch, (), torch.tensor(float(micro_batches)), **how)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(next(shard.model.parameters()).grad, gradient)
    # An evaluation adds up the tokens' losses, whatever the class.
    how = {"running": torch.no_grad, "backward": None}
    total, _ = objective.loss(shard, batch, (), torch.tensor(1.0), **how)
    tokens = objective.prediction_counter(config)([batch])
    torch.testing.assert_close(total / tokens, 3 * expected.detach())


def test_noise_needs_one_embedding():
    config = tiny_config("musicgen")
    whole = ShardRange(0, introspect(config).num_layers, is_first=True, is_last=True)
    shard = build_shard(config, None, whole, dtype=torch.float32)
    with pytest.raises(ArchitectureError, match="no one embedding"):
        shard.add_noise(5.0)


@pytest.mark.long
@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_the_language_part_of_a_multimodal_class_is_quantised_as_in_the_whole(name, tmp_path):
    base = save_multimodal(tmp_path / "base", name)
    cls = getattr(transformers, name)
    settings = {"quantization_config": SETTINGS["nf4"], "device_map": {"": "cpu"}}
    whole = cls.from_pretrained(base, **settings).train(False)
    keep_unpacked(whole)
    expected = stock_logits(whole)
    cut = shards(base, 0, 2, 6, quantization="nf4", attach=False)
    assert torch.equal(chain_logits(cut), expected)
    whole.save_pretrained(tmp_path / "stored")
    stored = shards(tmp_path / "stored", 0, 1, 3, 6, attach=False)
    assert torch.equal(chain_logits(stored), expected)


@pytest.mark.long
def test_the_refusal_of_other_blocks_names_them():
    with pytest.raises(ArchitectureError, match="no one hidden size"):
        introspect(tiny_config("blt"))
