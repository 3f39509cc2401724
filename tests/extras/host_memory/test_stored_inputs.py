"""Stored inputs in host memory: the same bits, and little of them on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hetero_framework.config import StageSpec
from hetero_framework.core.devices import Device
from hetero_framework.core.planned_order import BACKWARD, FORWARD
from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.host_memory.stored_inputs import StoredInputs, _Stored
from tests.cases import seldom, spread
from tests.extras.host_memory.training import LAYERS, LORA, Training, Watched, config, differences

pytestmark = pytest.mark.usefixtures("own_memory")
AGAIN = {"gradient_checkpointing": True}
OFFLOADING = {**AGAIN, "activation_offloading": True}
FIRST = StageSpec(index=0, owner="local", start=0, end=4, is_first=True, is_last=False)
CUTS: tuple[list[int], ...] = ([], [3], [1, 4], [2, 3, 4])


def inputs_of(training: Training) -> list[StoredInputs]:
    found = [stage.residence._inputs for stage in training.stages]  # type: ignore[union-attr]
    assert all(isinstance(inputs, StoredInputs) for inputs in found)
    return found


@pytest.mark.parametrize(("cuts", "adapter"), spread(CUTS, {"full": {}, "lora": LORA}))
def test_every_cut_gives_the_same_bits(cuts, adapter):
    resident = Training(config(cuts, **AGAIN, **adapter), Device())
    offloaded = Training(config(cuts, **OFFLOADING, **adapter), Device())
    for step, tokens in enumerate((20, 9, 31)):
        assert resident.step(step, tokens=tokens) == offloaded.step(step, tokens=tokens)
    assert differences(([], resident.state()), ([], offloaded.state())) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler
@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True, "loss_chunk_tokens": 16},
        pytest.param({"torch_compile_backend": "eager"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_other_ways_of_computing_give_the_same_bits(settings):
    resident = Training(config([3], **AGAIN, **settings), Device()).train()
    offloaded = Training(config([3], **OFFLOADING, **settings), Device()).train()
    assert differences(resident, offloaded) == []


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_one_tensor_of_a_layer_leaves_and_comes_back(adapter):
    """Not the received one, which is kept anyway, nor the last layer's, whose backward follows."""
    device = Watched()
    Training(config([2, 4], **OFFLOADING, **adapter), device).step(0, micro_batches=5)
    # Layers 0, 1 and 3 of six. The third stage has none that leaves.
    assert device.copies["inputs out"] == 5 * 3
    assert device.copies["inputs in"] <= 5 * 3


def test_what_is_still_there_is_not_fetched():
    device = Watched()
    training = Training(config(**OFFLOADING), device)
    training.step(0, micro_batches=5)
    assert device.copies == {"inputs out": 5 * (LAYERS - 1), "inputs in": 5 * (LAYERS - 3)}
    assert training.visits() == device.copies


def test_the_device_holds_few_at_once():
    device = Watched()
    Training(config([4], **OFFLOADING), device).step(0, micro_batches=6)
    # On their way out, and the one that the layer computes with; then one in use, one to come.
    assert device.most["inputs out"][0] <= 4
    assert device.most["inputs in"][0] <= 4


def test_all_are_on_their_way_before_they_are_needed(monkeypatch):
    taken: list[tuple[tuple[int, int], bool]] = []
    take = StoredInputs._take

    def noting(self: StoredInputs, stored: _Stored) -> Any:
        micro_batch, below_zero = stored.at
        taken.append(((micro_batch, -below_zero), bool(stored.there)))
        return take(self, stored)

    monkeypatch.setattr(StoredInputs, "_take", noting)
    Training(config([3], **OFFLOADING), Device()).step(0, micro_batches=4)
    of_first = [at for at, _ in taken if at[1] < 3]
    assert of_first == [(k, layer) for k in range(4) for layer in (2, 1, 0)]
    assert [at for at, was_there in taken if not was_there] == []


def test_host_memory_is_used_again():
    training = Training(config([3], **OFFLOADING), Device())
    sizes = []
    for step in range(3):
        training.step(step)
        sizes.append([inputs._memory.nbytes for inputs in inputs_of(training)])
    assert sizes[0] == sizes[1] == sizes[2]
    # Two micro-batches in flight, three layers; and one, of which the first and last stay.
    assert [len(inputs._free[5120]) for inputs in inputs_of(training)] == [6, 1]


def test_a_layer_that_runs_twice_and_another_layout_stay_on_the_device():
    device = Watched()
    inputs = StoredInputs(device, FIRST)
    first, second, turned = (torch.rand(3, 3).requires_grad_() for _ in range(3))
    inputs.begin(FORWARD, 0, BACKWARD)
    total = torch.zeros(3, 3)
    for index, hidden in ((0, first * 2.0), (0, second * 3.0), (1, (turned * 4.0).t())):
        with inputs.storing(index, hidden):
            total = total + checkpoint(torch.exp, hidden, use_reentrant=False)
    assert device.copies == {"inputs out": 1}
    inputs.begin(BACKWARD, 0, FORWARD)
    total.sum().backward()
    for leaf, factor in ((first, 2.0), (second, 3.0), (turned, 4.0)):
        assert torch.equal(leaf.grad, factor * torch.exp(leaf.detach() * factor))  # type: ignore[arg-type]


def test_nothing_comes_back_before_the_task_in_front_of_its_backward():
    device = Watched()
    inputs = StoredInputs(device, FIRST)
    leaf = torch.rand(3, 3).requires_grad_()

    def forward() -> torch.Tensor:
        hidden = leaf * 2.0
        for index in range(4):
            with inputs.storing(index, hidden):
                hidden = checkpoint(torch.sin, hidden, use_reentrant=False)
        return hidden.sum()

    inputs.begin(FORWARD, 0, FORWARD)
    total = forward()
    inputs.begin(FORWARD, 1, FORWARD)
    assert "inputs in" not in device.copies
    inputs.begin(FORWARD, 2, BACKWARD)
    assert device.copies["inputs in"] == 1
    inputs.begin(BACKWARD, 0, FORWARD)
    total.backward()
    assert device.copies["inputs in"] == 4


def test_an_input_that_its_layer_changes_is_refused():
    [inputs] = inputs_of(Training(config(**OFFLOADING), Device()))
    hidden = torch.ones(4).requires_grad_() * 1.0

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden) + hidden.add_(1.0)

    with (
        pytest.raises(ArchitectureError, match="layer 3 changes its input in place"),
        inputs.storing(3, hidden),
    ):
        checkpoint(layer, hidden, use_reentrant=False)


@pytest.mark.parametrize("tasks", seldom(range(1, 12), *range(2, 11, 2), 5, 9))
def test_an_aborted_attempt_leaves_nothing(tasks):
    whole = Training(config([2, 4], **OFFLOADING), Device())
    training = Training(config([2, 4], **OFFLOADING), Device())
    training.step(0, tasks=tasks)
    for inputs in inputs_of(training):
        assert not inputs._stored
        assert not inputs._leaving
    assert differences(whole.train(2), training.train(2)) == []
    for again, inputs in zip(inputs_of(training), inputs_of(whole), strict=True):
        assert again._memory.nbytes == inputs._memory.nbytes


def test_with_streamed_layers_and_states_the_bits_are_the_same():
    resident = Training(config([3], **AGAIN, **LORA), Device()).train()
    everything = {**OFFLOADING, "offload_optimizer": True}
    training = Training(config([3], {"offload": 2}, **everything, **LORA), Device())
    assert differences(resident, training.train()) == []
