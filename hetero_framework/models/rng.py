"""Partition-independent random seeds.

Every draw of a forward pass (dropout and its kin) comes after seeding with (run seed, step,
micro-batch, place): a layer's global index, or a name outside the layers. No process keeps a random
state between steps, and a recomputed forward draws the same again.
"""

from __future__ import annotations

import hashlib

Place = str | int


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2**63) that depends on every part and on their order."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def forward_seed(seed: int, step: int, micro_batch: int, place: Place) -> int:
    """The seed of everything random that happens in `place` for one micro-batch of one step."""
    return derive_seed("forward", seed, step, micro_batch, place)
