from __future__ import annotations

import pytest
import torch

from hetero_framework.data.batches import num_items
from hetero_framework.extras.verify.verification import verify_model
from hetero_framework.models.cut.codebooks import for_model, ids_per_token
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import build_shard
from hetero_framework.models.cut.tiny import probe_inputs, stock_class, tiny_config


def test_ids_of_a_token_become_rows_of_the_model():
    ids = torch.tensor([[10, 20, 11, 21, 12], [30, 40, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    found = for_model(inputs, 2)
    assert found["input_ids"].tolist() == [[10, 11, 12], [20, 21, 0], [30, 0, 0], [40, 0, 0]]
    labels = [[10, 11, 12], [20, 21, -100], [30, -100, -100], [40, -100, -100]]
    assert found["labels"].tolist() == labels
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert for_model(inputs, 1) == inputs


@pytest.mark.parametrize(("model_type", "count"), [("musicgen", 4), ("moshi", 1), ("llama", 1)])
def test_a_model_has_as_many_ids_a_token_as_embeddings_to_add_up(model_type, count):
    config = tiny_config(model_type)
    assert ids_per_token(stock_class(config)._from_config(config)) == count
    structure = introspect(config)
    assert structure.ids_per_token == count
    assert structure.hidden_tokens(4 * count + 1) == 5


@pytest.mark.parametrize("cuts", [[3], [0, 6]])
def test_every_codebook_trains_to_the_bit(cuts):
    assert verify_model(model_type="musicgen", cuts=cuts).verdict == "bit-equal"


def test_the_loss_is_the_mean_that_the_class_takes_of_its_codebooks():
    """The class wants labels [B, S, C] of the tokens that come next."""
    config = tiny_config("musicgen")
    layers, count = introspect(config).num_layers, introspect(config).ids_per_token
    shard = build_shard(config, None, ShardRange(0, layers, True, True), dtype=torch.float32)
    shard.train(False)
    batch = probe_inputs(config, ids_per_token=count)
    theirs = for_model(batch, count)
    labels = theirs["labels"].unflatten(0, (-1, count)).movedim(1, -1)
    following = torch.nn.functional.pad(labels[:, 1:], (0, 0, 0, 1), value=-100)
    expected = shard.model(**{**theirs, "labels": following}).loss
    loss = shard.loss(batch, (), torch.tensor(num_items([batch], first=count)))
    torch.testing.assert_close(loss, expected)
