"""Side tensors: their places in a call, and their gradients."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from hetero_framework.models.cut.introspect import ModelStructure, introspect
from hetero_framework.models.cut.side import (
    as_leaves,
    crossing,
    differentiate,
    gradients_of,
    hollow,
    put_at,
    tensor_at,
    tensors_at,
)
from hetero_framework.models.cut.tiny import tiny_config


def call(key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    return (torch.zeros(1), [None]), {"shared": UserDict(full=(key, value)), "mask": None}


def test_put_at_and_tensor_at_use_the_same_path():
    key, value = torch.ones(2), torch.ones(3)
    places = {id(tensor): path for path, tensor in tensors_at(call(key, value))}
    path = places[id(value)]
    assert tensor_at(call(key, value), path) is value
    other = torch.zeros(3)
    changed = put_at(call(key, value), path, other)
    assert tensor_at(changed, path) is other
    assert tensor_at(changed, places[id(key)]) is key


def test_missing_entries_are_put_into_existing_containers():
    key, value = torch.ones(2), torch.ones(3)
    paths = [path for path, tensor in tensors_at(call(key, value)) if tensor.numel() > 1]
    shared: UserDict[str, Any] = UserDict()
    empty: Any = ((torch.zeros(1), [None]), {"shared": shared, "mask": None})
    for path, tensor in zip(paths, (key, value), strict=True):
        empty = put_at(empty, path, tensor)
    # The blocks that follow read this very mapping.
    assert shared["full"][0] is key
    assert shared["full"][1] is value
    with pytest.raises(LookupError, match="'mask'"):
        tensor_at(empty, (*paths[0][:1], (dict, "mask")))


def test_gradients_come_back_for_tensors_that_require_one():
    weight = torch.ones(3, requires_grad=True)
    hidden, side, index = weight * 2, weight * 3, torch.tensor([1])
    sent = crossing((hidden, side, index))
    assert [tensor.grad_fn for tensor in sent] == [None] * 3
    leaves = as_leaves(sent)
    assert [leaf.requires_grad for leaf in leaves] == [True, True, False]
    (leaves[0].sum() + (leaves[1] * 5)[leaves[2]].sum()).backward()
    gradients = gradients_of(leaves)
    assert [g.tolist() for g in gradients] == [[1, 1, 1], [0, 5, 0]]
    differentiate((hidden, side, index), gradients)
    assert weight.grad.tolist() == [2, 17, 2]


def test_gradients_of_tensors_without_a_graph_are_dropped():
    weight = torch.ones(3, requires_grad=True)
    left = (torch.ones(3), weight * 3)
    leaves = as_leaves(crossing(left))
    (leaves[0].sum() + (leaves[1] * 5).sum()).backward()
    differentiate(left, gradients_of(leaves))
    assert weight.grad.tolist() == [15, 15, 15]
    differentiate((torch.ones(3),), (torch.ones(3),))


def test_a_leaf_that_nothing_used_has_a_gradient_of_zeros():
    leaves = as_leaves((torch.ones(2), torch.ones(3).requires_grad_()))
    leaves[0].sum().backward()
    assert [g.tolist() for g in gradients_of(leaves)] == [[1, 1], [0, 0, 0]]


# ---- what introspection finds


def structure(model_type: str, **changes: Any) -> ModelStructure:
    config = tiny_config(model_type)
    config.update(changes)
    return introspect(config)


def bundles(found: ModelStructure) -> list[list[str]]:
    """Names of the side tensors in front of each layer."""
    return [[s.name for s in found.sides_at(k)] for k in range(found.num_layers)]


def test_a_model_without_side_paths_has_none():
    found = structure("llama")
    assert (found.sides, found.id_readers) == ((), frozenset())


def test_a_tensor_crosses_every_boundary_between_its_maker_and_its_last_reader():
    found = bundles(structure("gemma3n_text"))
    keys = "shared_kv_states.sliding_attention.0"  # made in layer 2, read in layer 4
    assert [keys in names for names in found] == [False] * 3 + [True, True, False]
    # One slice for every layer behind, whichever machine made them.
    assert [names.count("per_layer_input") for names in found] == [6, 5, 4, 3, 2, 1]


def test_a_tensor_that_is_received_but_not_read_does_not_cross():
    side, *others = structure("zamba2").sides
    assert others == []
    assert (side.name, side.maker) == ("original_hidden_states", -1)
    assert [block for block, _ in side.places] == [2, 5]  # the hybrid layers


def test_router_logits_cross_every_boundary_behind_their_layer():
    found = structure("mixtral", output_router_logits=True)
    assert found.loss_counts_items
    reports = [(report.block, report.module, report.form) for report in found.reports]
    assert reports == [(k, "mlp.gate", (None, None, None)) for k in range(6)]
    assert [len(found.sides_at(k)) for k in range(7)] == list(range(7))
    side = found.sides_at(2)[1]
    assert (side.name, side.maker, side.shape) == ("mlp.gate.0", 1, (24, 4))
    assert "model.layers.1.mlp.gate.weight" in side.weights
    assert not any(name.startswith("model.layers.2") for name in side.weights)
    assert structure("mixtral").reports == ()


def test_hollow_removes_tensors_from_outputs():
    filled = {"a": (torch.ones(1), [torch.ones(2)]), "b": 3}
    assert hollow(filled) == {"a": (None, [None]), "b": None}
    assert hollow(torch.ones(1)) is None


def test_numbers_without_gradients_cross_too():
    (side,) = structure("hy_v4").sides
    assert (side.name, side.dtype) == ("prev_topk_indices", torch.int32)


def test_tensors_made_from_token_ids_alone_do_not_cross():
    found = structure("deepseek_v4")
    assert found.sides == ()
    assert found.id_readers == {0, 1, 2}  # layers whose experts are chosen by a hash of the token
    assert found.reads_ids(2, 4)
    assert not found.reads_ids(3, 6)


def test_hidden_states_that_the_model_keeps_using_are_known():
    assert structure("llama").holders == frozenset()
    assert structure("xlm").holders == set(range(6))  # a residual around each feed-forward network
    inkling = structure("inkling2_text")
    assert [(side.name, side.is_held) for side in inkling.sides] == [("block_states", True)]


def test_the_widths_of_several_streams_and_of_added_tokens_are_known():
    names = ("llama", "qwen4_exp_text", "cpmant", "prophetnet")
    found = [
        (s.hidden_shape[-1] // s.tiny_width, s.token_factor, s.more_tokens)
        for s in map(structure, names)
    ]
    assert found == [(1, 1, 0), (4, 1, 0), (1, 1, 32), (1, 3, 0)]
