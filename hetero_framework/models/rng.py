"""Partition-independent random seeds.

Every draw of a forward pass (dropout and its kin) comes after seeding with (run seed, step,
micro-batch, place). The place is a layer's global index, or a name outside the layers. No process
keeps a random state between steps, and a recomputed forward draws the same again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

Place = str | int


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2**63) that depends on every part and on their order."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_cpu(seed: int) -> None:
    """Seed draws on the CPU. `torch.manual_seed` also seeds all accelerators of this machine, even
    if others use them, and takes 2.5 ms where no accelerator is in use yet."""
    torch.default_generator.manual_seed(seed)


def forward_seed(seed: int, step: int, micro_batch: int, place: Place) -> int:
    """The seed of everything random that happens in `place` for one micro-batch of one step."""
    return derive_seed("forward", seed, step, micro_batch, place)


class ForwardSeeds:
    """Seeds every place of a run's forwards by `seed_device`, while it is `on`. `step` and
    `micro_batch` are the forward's, also while it is computed again."""

    def __init__(self, seed: int, seed_device: Callable[[int], object]) -> None:
        self._seed, self._seed_device = seed, seed_device
        self.on = True
        self.step = self.micro_batch = self.first_micro_batch = 0

    def enter(self, place: Place) -> None:
        """Called in front of each place that may draw random numbers."""
        if self.on:
            micro_batch = self.first_micro_batch + self.micro_batch
            self._seed_device(forward_seed(self._seed, self.step, micro_batch, place))
