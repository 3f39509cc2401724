"""Gradients that are given while their backward runs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from hetero_framework.engine import early_gradients
from hetero_framework.engine.early_gradients import EarlyGradients
from hetero_framework.engine.stage_api import GradientPart, Tensors


class Model:
    """Three layers; `happened` is what was given, and when the backward came to the first layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
        self.early = EarlyGradients(
            3, [(name[0], p) for name, p in self.layers.named_parameters()], list
        )
        self.happened: list[object] = []
        self.room = True
        self.given: Tensors = {}

    def backward(self) -> None:
        hidden = self.layers[0](torch.randn(2, 4))
        hidden.register_hook(lambda gradient: self.happened.append("first layer"))
        self.layers[1:](hidden).sum().backward()

    def has_room(self) -> bool:
        return self.room

    def take(self, found: GradientPart) -> None:
        assert (found.stage, found.number, found.part.last) == (3, 0, False)
        self.happened.append(list(found.part.tensors))
        self.given |= {name: gradient.clone() for name, gradient in found.part.tensors.items()}

    def gradients(self) -> Tensors:
        return {name[0]: p.grad for name, p in self.layers.named_parameters() if p.grad is not None}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(early_gradients, "EARLY_PART_BYTES", 1)
    return Model()


def test_last_layers_gradients_are_given_before_the_first_layers_backward(model: Model) -> None:
    model.early.begin(model)
    model.backward()
    assert model.happened == ["first layer"]  # more is to come
    with model.early.last_backward():
        model.backward()
    assert model.happened[1:] == [["2"], ["1"], "first layer", ["0"]]
    assert model.early.given == {"0", "1", "2"}
    found = model.gradients()
    assert all(torch.equal(model.given[name], found[name]) for name in "012")
    model.early.begin(None)
    model.backward()  # of the next step
    assert len(model.happened) == 6


def test_small_gradients_are_given_together_in_full_parts_only(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_gradients, "EARLY_PART_BYTES", 2 * 4 * 4 * 4)
    for _ in range(2):
        model.early.begin(model)
        assert model.early.given == set()
        with model.early.last_backward():
            model.backward()
        assert model.early.given == {"1", "2"}
    assert model.happened == [["2", "1"], "first layer"] * 2


def test_gradients_wait_for_room_and_are_given_together(model: Model) -> None:
    model.room = False
    found = model.layers[0].weight.register_hook(lambda gradient: setattr(model, "room", True))
    model.early.begin(model)
    with model.early.last_backward():
        model.backward()
    assert model.happened == ["first layer", ["2", "1", "0"]]
    found.remove()
    model.room = False
    model.early.begin(model)
    with model.early.last_backward():
        model.backward()
    assert model.early.given == set()  # they are left for the stage's end


def test_late_gradients_are_not_given_early(model: Model) -> None:
    model.early.begin(model)
    with model.early.last_backward(late=["2"]):
        model.backward()
        model.layers[2](torch.randn(2, 4)).sum().backward()  # as chunks of the loss do
    assert model.given.keys() == {"0", "1"}


def test_a_gradient_that_changes_after_it_was_given_ends_the_step(model: Model) -> None:
    model.early.begin(model)
    with model.early.last_backward():
        model.backward()
    with pytest.raises(AssertionError, match="the gradient of 2 grows after others have it"):
        model.backward()  # of an earlier micro-batch


def test_early_gradients_are_optional(model: Model) -> None:
    model.early.begin(None)
    with model.early.last_backward():
        model.backward()
    assert model.early.given == set()
    assert not any(p._post_accumulate_grad_hooks for p in model.layers.parameters())


def test_a_backward_that_fails_leaves_nothing_behind(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    model.early.begin(model)
    hook = model.layers[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), model.early.last_backward():
        model.backward()
    hook.remove()
    assert model.happened == [["2"], ["1"], "first layer"]
    model.early.begin(model)
    model.backward()
    assert model.happened[3:] == ["first layer"]
    with model.early.last_backward():
        model.backward()
    assert model.happened[4:] == [["2"], ["1"], "first layer", ["0"]]


def test_closed_early_gradients_take_no_gradient(model: Model) -> None:
    model.early.begin(model)
    model.early.close()
    with model.early.last_backward():
        model.backward()
    assert model.given == {}


def test_hooks_keep_nothing_alive(model: Model) -> None:
    gc.disable()
    try:
        model.early.begin(Model())
        gone = weakref.ref(model.early)
        del model.early
        assert gone() is None
    finally:
        gc.enable()
