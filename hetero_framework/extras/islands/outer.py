"""Fragments of the model, and the arithmetic by which islands average their changes of them.

A round is `sync_steps` steps of one island, in which fragments are averaged one after the other.
They are cut by layers, so that they are the same on every island, whatever its plan.

The methods are DiLoCo (arXiv 2311.08105), with the delay and the mixing of Streaming DiLoCo
(2501.18512), and LocalSGD (1805.09767), as torchft computes them, but weighted by each island's
label tokens. Tensors are float32 on the CPU, by name. All islands compute the same bits, on any
hardware: IEEE 754 rounds each operation exactly, nothing is fused, and sums have one order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hetero_framework.errors import CheckpointError, ConfigError
from hetero_framework.extras.islands.settings import IslandConfig
from hetero_framework.models.files.fingerprint import layer_group

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Synchronisation:
    """A fragment's synchronisation: its change is sent after `sent_after` steps of a round, and the
    average is applied after `applied_after`."""

    fragment: int
    sent_after: int
    applied_after: int


def cut(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """The names of each of `count` fragments. `sizes` has the bytes of each trained parameter, in
    the order of the whole model. Fragments are as even as possible without cutting a layer or a
    tensor outside the layers. Raises ConfigError where there are too few of these."""
    groups: dict[str, list[str]] = {}
    for name in sizes:
        groups.setdefault(layer_group(name), []).append(name)
    if count > len(groups):
        raise ConfigError(
            f"island.fragments is {count}, but only {len(groups)} layers or tensors outside them"
            " are trained",
            hint="lower it",
        )
    members = list(groups.values())
    ends = _even_ends([sum(map(sizes.__getitem__, names)) for names in members], count)
    return tuple(
        tuple(name for names in members[start:end] for name in names)
        for start, end in pairwise((0, *ends))
    )


def _even_ends(weights: Sequence[int], count: int) -> list[int]:
    """The ends of the `count` runs of `weights` with the least sum of squared run totals."""
    before = list(accumulate(weights, initial=0))
    total = len(weights)
    best = [weight**2 for weight in before]  # of the first k weights in one run
    cuts: list[list[int]] = []
    for runs in range(2, count + 1):
        starts = [0] * (total + 1)
        longer = [0] * (total + 1)
        for end in range(runs, total + 1):
            longer[end], starts[end] = min(
                (best[start] + (before[end] - before[start]) ** 2, start)
                for start in range(runs - 1, end)
            )
        cuts.append(starts)
        best = longer
    ends = [total]
    for starts in reversed(cuts):
        ends.append(starts[ends[-1]])
    return ends[::-1]


def schedule(sync_steps: int, fragments: int, delay_steps: int) -> tuple[Synchronisation, ...]:
    """The synchronisations of one round: one for each fragment, evenly spread, one at a time."""
    ends = [sync_steps * (i + 1) // fragments for i in range(fragments)]
    return tuple(Synchronisation(i, end - delay_steps, end) for i, end in enumerate(ends))


def weighted_mean(parts: Sequence[tuple[int, Tensors]]) -> dict[str, Tensor]:
    """The mean of what islands sent, weighted by the label tokens that each has trained. `parts`
    have the order of the islands' names; parts of weight 0 are left out. Raises ValueError where
    no part has a weight.

    Products with a weight below 2**29 are exact in float64, so the mean of equal tensors is that
    tensor, to the bit.
    """
    parts = [(weight, tensors) for weight, tensors in parts if weight > 0]
    if not parts:
        raise ValueError("no island has trained on a label token")
    together = sum(weight for weight, _ in parts)
    mean = {}
    for name in parts[0][1]:
        products = [tensors[name].double() * weight for weight, tensors in parts]
        mean[name] = (sum(products[1:], products[0]) / together).float()
    return mean


class OuterFragment:
    """The weights of one fragment that the islands agreed on, and the outer optimizer's momentum.

    At a synchronisation `change` is sent. `step` takes the mean of all changes once every island
    has it, and the island trains on with `mixed`. After a failure it trains on with `weights`.
    """

    def __init__(self, weights: Tensors, settings: IslandConfig) -> None:
        self.weights = {name: _held(tensor) for name, tensor in weights.items()}
        averages = settings.method == "local_sgd"
        self._rate = 1.0 if averages else settings.outer_learning_rate
        self._decay = 0.0 if averages else settings.outer_momentum
        self._mixing = settings.mixing
        # At rate 1 without momentum the outer step leads to the mean of the weights. So weights
        # are sent, since old - (old - new) is not always new: one island alone keeps its bits.
        plain = (self._rate, self._decay) == (1.0, 0.0)
        self._sends_weights = plain and settings.compression == "none"
        names = self.weights if self._decay else ()
        self._momentum = {name: torch.zeros_like(self.weights[name]) for name in names}

    def copy(self) -> OuterFragment:
        """A copy whose steps leave this fragment as it is."""
        made = copy.copy(self)
        made.weights, made._momentum = dict(self.weights), dict(self._momentum)
        return made

    def change(self, local: Tensors) -> dict[str, Tensor]:
        """The tensors that this island sends: the outer gradient, agreed - local, or the local
        weights where only their mean is needed."""
        if self._sends_weights:
            return {name: _held(local[name]) for name in self.weights}
        return {name: old - _held(local[name]) for name, old in self.weights.items()}

    def step(self, mean: Tensors) -> None:
        """Take the outer optimizer's step (torch.optim.SGD's) with the mean of all changes."""
        if self._sends_weights:
            self.weights = {name: mean[name] for name in self.weights}
            return
        self.weights = {
            name: old - self._direction(name, mean[name]) * self._rate
            for name, old in self.weights.items()
        }

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        if not self._decay:
            return gradient
        self._momentum[name] = self._momentum[name] * self._decay + gradient
        return gradient + self._momentum[name] * self._decay

    def mixed(self, local: Tensors, *, agreed: bool = False) -> dict[str, Tensor]:
        """The weights to go on with, in the dtype of `local`: the agreed weights mixed with the
        share `mixing` of `local`, or, if `agreed`, without `local`."""
        if agreed or not self._mixing:
            return {name: new.to(local[name].dtype) for name, new in self.weights.items()}
        return {
            name: torch.lerp(new, _held(local[name]), self._mixing).to(local[name].dtype)
            for name, new in self.weights.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors "weights/<parameter>", "momentum/<parameter>", which no later step changes."""
        kinds = {"weights": self.weights, "momentum": self._momentum}
        return {f"{kind}/{name}": t for kind, held in kinds.items() for name, t in held.items()}

    def load_state_dict(self, state: Tensors) -> None:
        """Load a member's or a checkpoint's state. Raises CheckpointError where the state is of
        another fragment or of other settings."""
        shapes = {key: tuple(tensor.shape) for key, tensor in self.state_dict().items()}
        if shapes != {key: tuple(tensor.shape) for key, tensor in state.items()}:
            raise CheckpointError(
                "the outer optimizer's state is of other parameters or of another kind",
                hint="model, adapter and the island section must be those of the run it comes from",
            )
        self.weights = {name: _held(state[f"weights/{name}"]) for name in self.weights}
        self._momentum = {name: _held(state[f"momentum/{name}"]) for name in self._momentum}


def _held(tensor: Tensor) -> Tensor:
    """A copy that no later change of `tensor` reaches."""
    return tensor.detach().to("cpu", torch.float32, copy=True)
