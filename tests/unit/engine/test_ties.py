"""Weights of several stages: the order in which their gradients are added, and the stages that are
asked."""

from __future__ import annotations

import torch

from hetero_framework.engine.ties import TiedGradients, Ties

# A lies in layers of stages 0, 1 (twice) and 3, B in stages 1 and 2.
TRAINED = {0: ["a"], 1: ["b"], 2: ["w"], 3: []}
TARGETS = {3: {"a3": "a"}, 1: {"a1": "a", "a2": "a"}, 2: {"b2": "b"}, 0: {}}


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


def test_ties_know_holders_sources_and_followers():
    ties = Ties(TARGETS, TRAINED)
    assert list(ties.targets) == [1, 2, 3]
    assert ties.holders == [1, 0]
    assert (ties.sources(0), ties.sources(1), ties.sources(2)) == (["a"], ["b"], [])
    assert ties.followers(["a"]) == {1: ["a"], 3: ["a"]}
    assert ties.followers(["a", "b"]) == {1: ["a"], 2: ["b"], 3: ["a"]}
    assert Ties({0: {}, 1: {}}, {0: ["a"], 1: []}).holders == []


def test_gradients_are_added_from_the_last_place_in_any_arrival_order():
    """In float32 the other orders give other sums."""
    for order in ([1, 2, 3], [3, 2, 1]):
        tied = TiedGradients(Ties(TARGETS, TRAINED))
        given = {1: {"a1": one(-1e8), "a2": one(1e8)}, 2: {"b2": one(5.0)}, 3: {"a3": one(1.0)}}
        for stage in order:
            assert stage in tied.waiting
            tied.take(stage, given[stage], last=True)
        assert tied.waiting == []
        assert tied.sums(0) == {"a": one(0.0)}  # (1 + 1e8) - 1e8
        assert tied.sums(1) == {"b": one(5.0)}


def test_weights_without_gradient_and_untied_ones_are_left_out():
    tied = TiedGradients(Ties(TARGETS, TRAINED))
    tied.take(1, {"b": one(7.0)}, last=False)
    tied.take(1, {"a2": one(2.0)}, last=True)
    tied.take(2, {}, last=True)
    assert tied.waiting == [3]
    tied.take(3, {}, last=True)
    assert (tied.sums(0), tied.sums(1)) == ({"a": one(2.0)}, {})


def test_gradients_are_copied_out_of_the_message():
    tied, gradient = TiedGradients(Ties(TARGETS, TRAINED)), one(2.0)
    tied.take(3, {"a3": gradient}, last=True)
    gradient.zero_()
    assert tied.sums(0) == {"a": one(2.0)}
