"""The parts of a model that islands average one after the other in a round. Pure.

A round is `sync_steps` steps of one island. Fragments are cut by layers, so that they are the same
on every island, whatever its plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hetero_framework.errors import ConfigError
from hetero_framework.models.files.fingerprint import layer_group


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
