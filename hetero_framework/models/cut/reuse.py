"""Modules of a process's former shards, reused by the shards that it loads next.

Frozen blocks and frozen modules before and after the blocks are reused, quantised ones too.
Trained weights belong to a step of the run and are never taken from memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hetero_framework.models.cut.partition import ShardRange, Skeleton
from hetero_framework.models.files.fingerprint import Fingerprint


@dataclass(frozen=True)
class ReusableModules:
    """Modules that one shard already has: blocks by number, modules outside them by name, and the
    `fingerprint` of all that was read with them."""

    blocks: Mapping[int, nn.Module] = field(default_factory=dict)
    outside: Mapping[str, nn.Module] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=dict)

    def has(self, name: str, whole: Skeleton) -> bool:
        """Whether the block or the parameter of this name is among these modules."""
        return whole.layer_of(name) in self.blocks or name.rpartition(".")[0] in self.outside

    def put_into(self, model: Any, whole: Skeleton) -> None:
        """Put the modules into the model in place of their stand-ins."""
        blocks = model.get_submodule(whole.structure.blocks)
        for index, block in self.blocks.items():
            blocks[index] = block
        for name, module in self.outside.items():
            model.set_submodule(name, module)


class ReusePool:
    """Modules of former shards, by their ranges, all read from one `origin`."""

    def __init__(self, origin: object = None) -> None:
        self._origin = origin
        self._of: dict[ShardRange, ReusableModules] = {}

    def add(self, rng: ShardRange, kept: ReusableModules) -> None:
        self._of[rng] = kept

    def hand_out(self, origin: object, ranges: Sequence[ShardRange]) -> list[ReusableModules]:
        """For each new shard, the modules here that it can use; the others are freed. Modules
        outside the blocks go to a shard with the same ends of the model."""
        left = self._of if origin == self._origin else {}
        self._of = {}
        return [_taken(left, rng) for rng in ranges]


def _taken(left: Mapping[ShardRange, ReusableModules], rng: ShardRange) -> ReusableModules:
    blocks: dict[int, nn.Module] = {}
    outside: dict[str, nn.Module] = {}
    read: Fingerprint = {}
    for its, kept in left.items():
        inside = {k: block for k, block in kept.blocks.items() if rng.start <= k < rng.end}
        same_ends = (its.is_first, its.is_last) == (rng.is_first, rng.is_last)
        ends = kept.outside if same_ends else {}
        if inside or ends:
            blocks.update(inside)
            outside.update(ends)
            read.update(kept.fingerprint)
    return ReusableModules(blocks, outside, read)
