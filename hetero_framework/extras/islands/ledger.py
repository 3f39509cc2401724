"""The samples that each island trains: computed alike by every member, and each sample once.

The steps of the run, numbered over all epochs as in `SampleOrder`, are dealt to the islands. Step k
is a batch of the whole group, with the same samples on every island; an epoch's last step may be
short. Islands that sum their gradients in every step share the samples of a step. Islands that
train alone for a while take whole steps of their own. A step counts once the group has committed
it. A step that was dealt but not committed, since an island died or a reduction failed, is dealt
again. So each sample of an epoch is trained once, whichever islands join, leave or return.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hetero_framework.data.batches import SampleOrder
from hetero_framework.extras.islands.shares import apportion

Steps = tuple[tuple[int, int], ...]
"""Steps in order, as ranges [first, after the last)."""


@dataclass(frozen=True)
class Ledger:
    """The steps that are committed: a value that each commit replaces, the same on all islands."""

    committed: Steps = ()

    def open_steps(self, count: int, total: int) -> Steps:
        """The first `count` steps of a run of `total` that are not committed; fewer at its end."""
        ends = [0, *(end for _, end in self.committed)]
        starts = [*(start for start, _ in self.committed), total]
        free = [(a, min(b, total)) for a, b in zip(ends, starts, strict=True) if a < min(b, total)]
        return steps_between(free, 0, count)

    def deal(self, counts: Mapping[str, int], total: int) -> dict[str, Steps]:
        """Each island's part of the open steps, one part after the other in the order of names.
        A part has as many steps as `counts` says, or, when fewer are left, a proportion of them."""
        open_steps = self.open_steps(sum(counts.values()), total)
        left = count_steps(open_steps)
        if left < sum(counts.values()):
            counts = apportion(left, counts)
        ends = list(accumulate((counts[name] for name in sorted(counts)), initial=0))
        parts = [steps_between(open_steps, start, end) for start, end in pairwise(ends)]
        return dict(zip(sorted(counts), parts, strict=True))

    def commit(self, steps: Iterable[tuple[int, int]]) -> Ledger:
        """The ledger with these steps, too. Raises ValueError for a step that it has already."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self.committed, *steps]):
            if not 0 <= start < end:
                raise ValueError(f"[{start}, {end}) is not a range of steps")
            if merged and start < merged[-1][1]:
                raise ValueError(f"step {start} was committed before")
            if merged and start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        return Ledger(tuple(merged))

    @property
    def count(self) -> int:
        """The number of committed steps."""
        return count_steps(self.committed)

    def state_dict(self) -> dict[str, Any]:
        """The ledger as JSON data, for a checkpoint and for an island that joins."""
        return {"committed": [list(steps) for steps in self.committed]}

    @classmethod
    def load_state_dict(cls, state: Mapping[str, Any]) -> Ledger:
        return cls().commit((int(start), int(end)) for start, end in state["committed"])


def count_steps(steps: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in steps)


def steps_between(steps: Iterable[tuple[int, int]], first: int, last: int) -> Steps:
    """The steps at places `first` to `last` - 1 of these steps."""
    parts, before = [], 0
    for start, end in steps:
        a, b = max(start, start + first - before), min(end, start + last - before)
        if a < b:
            parts.append((a, b))
        before += end - start
    return tuple(parts)


def split_step(
    order: SampleOrder, step: int, shares: Mapping[str, float]
) -> dict[str, list[np.ndarray]]:
    """Each island's samples of a step that all take together, as micro-batches.

    The parts follow each other in the order of names and are as large as their shares say, by
    largest remainder; a part may be empty. `order` is this island's own: micro-batches have the
    size of its `per_device_train_batch_size`, which may differ from other islands'.
    """
    samples = np.concatenate(order.step_indices(step))
    rows = order.training.per_device_train_batch_size
    parts = apportion(len(samples), shares)
    ends = list(accumulate(parts.values(), initial=0))
    return {
        name: [samples[k : min(k + rows, end)] for k in range(start, end, rows)]
        for name, (start, end) in zip(parts, pairwise(ends), strict=True)
    }


def order_facts(order: SampleOrder, fingerprint: str) -> dict[str, Any]:
    """The facts that must be equal on all islands for a step to have the same samples on each, by
    the names that errors use. `fingerprint` is the examples' own."""
    training = order.training
    return {
        "data": fingerprint,
        "samples of a step": order.samples_per_step,
        "samples of an epoch": order.samples_per_epoch,
        "steps": order.total_steps,
        "train_sampling_strategy": training.train_sampling_strategy,
        "data_seed": order.seed,
    }
