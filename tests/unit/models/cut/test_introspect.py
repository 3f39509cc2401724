"""Layers that are alike, found without weights; and the origin of each tensor of a forward."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig

from hetero_framework.models.cut import introspect as module
from hetero_framework.models.cut.introspect import IDS, Provenance, introspect, layer_kinds
from hetero_framework.models.cut.partition import skeleton_of
from hetero_framework.models.cut.tiny import tiny_config
from tests.cases import raising
from tests.installed import needs

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 99}


def test_layers_of_a_plain_model_are_all_alike():
    assert layer_kinds(AutoConfig.for_model("llama", **SMALL, num_hidden_layers=3)) == [0, 0, 0]


@needs("classification")
def test_modules_that_print_their_values_are_compared_without_values():
    config = AutoConfig.for_model("ibert", **SMALL, num_hidden_layers=2)
    config.architectures = ["IBertForSequenceClassification"]
    assert layer_kinds(config) == [0, 0]


def test_kinds_of_attention_are_distinguished_despite_equal_weights():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    own = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3}
    config = AutoConfig.for_model("gemma3_text", **own, layer_types=types, sliding_window=8)
    assert layer_kinds(config) == [0, 1, 0]


def test_layers_of_experts_are_a_kind_of_their_own():
    own = {**SMALL, "num_key_value_heads": 2, "num_hidden_layers": 4, "moe_intermediate_size": 32}
    own |= {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 2]}
    config = AutoConfig.for_model("qwen3_moe", **own)
    assert layer_kinds(config) == [0, 1, 0, 1]


def test_what_is_known_of_a_model_is_found_by_all_of_its_settings(monkeypatch):
    config = tiny_config("llama")
    known, skeleton = introspect(config), skeleton_of(config)
    monkeypatch.setattr(module, "shrink", raising(AssertionError("it is known")))
    assert introspect(copy.deepcopy(config)) is known
    assert skeleton_of(copy.deepcopy(config)) is skeleton
    monkeypatch.undo()
    config.num_hidden_layers += 1
    assert introspect(config).num_layers == skeleton_of(config).structure.num_layers
    assert introspect(config).num_layers == known.num_layers + 1


# ---- the origin of each tensor, followed operation by operation


IDS_B = torch.tensor([1, 2, 3])
WEIGHT = torch.ones(4, 2, requires_grad=True)


@pytest.fixture
def provenance():
    return Provenance(IDS_B, [WEIGHT])


def test_a_tensors_level_is_the_last_part_it_depends_on(provenance):
    with provenance:
        hashed = IDS_B * 7 % 4
        mask = torch.ones(3)
        hidden = WEIGHT[hashed]
        like = torch.zeros_like(hidden)
        provenance.phase = 0
        made = hidden + 1
        own_mask = mask * 2
        chosen = made.argmax(-1)
        provenance.phase = 1
        both = made * hidden
    found = [hashed, mask, hidden, like, made, own_mask, chosen, both]
    assert [*map(provenance.level, found)] == [IDS, None, -1, None, 0, 0, 0, 0]


def test_a_tensor_made_of_a_blocks_hidden_state_belongs_to_it(provenance):
    with provenance:
        hidden, other = WEIGHT[IDS_B], WEIGHT * 2
        provenance.received(hidden, 0)
        provenance.phase = 1
        kept, apart = hidden[None] * 1, other * 1
    assert [provenance.level(t) for t in (hidden, kept, apart)] == [-1, 0, -1]


def test_writes_in_place_reach_all_views(provenance):
    with provenance:
        room = torch.zeros(2, 4)
        row, other = room[0], room[1]
        provenance.phase = 2
        row.copy_(WEIGHT[:, 0].detach())
        provenance.phase = 3
    assert (provenance.level(room), provenance.level(other)) == (1, 1)


def test_a_view_that_a_block_takes_of_a_mask_leaves_the_mask_alone(provenance):
    mask = torch.ones(3)
    with provenance:
        provenance.phase = 0
        mask[None, :2]
    assert provenance.level(mask) is None


def test_a_tensor_used_between_blocks_counts_as_held(provenance):
    with provenance:
        residual, sliced, argument = WEIGHT * 1, WEIGHT * 2, WEIGHT * 3
        provenance.phase = 0
        argument + 1
        provenance.phase = 1
        residual + 1
        sliced[:, 0]  # a view by itself is no use
    assert provenance.is_held(residual, 0)
    assert not provenance.is_held(sliced, 0)
    assert not provenance.is_held(argument, 0)
    assert not provenance.is_held(residual, 1)


def test_a_block_reads_the_inputs_of_its_operations(provenance):
    with provenance:
        first, second = WEIGHT[IDS_B], WEIGHT * 2
        provenance.phase = 0
        first + 1
    assert provenance.is_read(first, 0)
    assert not provenance.is_read(second, 0)
    assert not provenance.is_read(first, 1)
