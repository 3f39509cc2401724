"""The most work that stages one behind the other can cover in the ticks of a step that are left,
where what they use has a price: one dynamic programme, as large arrays.

R rows are the ticks that may be left in front of a stage, in ascending order, C columns the choices
of a stage. With cost_c = prices . uses_c the best from a row on is

    value(r) = max over c of  last[r, c] - cost_c,
                              middle[r, c] - cost_c + value(r - ticks_c),

and minus infinity below the first row. Rows are computed in blocks, one array operation for each:
first what leads out of the block, which is known, then what stays in it, again and again until
nothing changes (stages that take no tick lead to their own row), at most once for each stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_BLOCK = 64
"""Rows that are computed together. Half as many are twice the array operations; of twice as many
more stages stay inside a block, which takes more passes. The result is the same."""


class Stages(NamedTuple):
    """What may come next: the work of each choice if others follow, and if it is the last stage,
    both of shape (R, C), minus infinity where it cannot be; `ticks` (C), whole numbers from 0 on,
    that are less for those behind it; and `uses` (K, C), how much it uses of each of K things that
    have a price."""

    middle: Floats
    last: Floats
    ticks: Integers
    uses: Floats


class Programme:
    """`first` is what may come right behind the coordinator's stage, `stages` what may come behind
    others. `starts` (S) is the coordinator's work, one for each row of `first`, and `rows` (S) says
    which rows of `stages` have the same ticks left. At most `most_stages` follow each other."""

    def __init__(
        self, stages: Stages, starts: Floats, rows: Integers, first: Stages, most_stages: int
    ) -> None:
        stages, first = _possible_columns(stages), _possible_columns(first)
        self._stages, self._first, self._starts = stages, first, starts
        self._most_stages = most_stages
        # Values stand behind a margin of minus infinity, where a stage leads that takes more ticks
        # than are left; so no index has to be tested.
        self._pad = 1 + int(max(stages.ticks.max(initial=0), first.ticks.max(initial=0)))
        every = np.arange(len(stages.middle))
        self._behind = np.maximum(0, every[:, None] + (self._pad - stages.ticks))
        self._behind_first = np.maximum(0, rows[:, None] + (self._pad - first.ticks))
        near = stages.ticks < _BLOCK
        self._near, self._far = (
            (self._behind[:, chosen].copy(), stages.middle[:, chosen].copy(), chosen)
            for chosen in (near, ~near)
        )

    def best(self, prices: Floats) -> tuple[float, Floats]:
        """The most work less what it costs at these K prices, minus infinity where nothing is
        possible, and how much of each thing that uses."""
        cost, first_cost = prices @ self._stages.uses, prices @ self._first.uses
        values, ends = self._values(cost)
        last = self._first.last - first_cost
        middle = values[self._behind_first] + self._first.middle - first_cost
        total = np.maximum(last, middle) + self._starts[:, None]
        if total.max(initial=-np.inf) == -np.inf:
            return -np.inf, np.zeros(len(prices))
        row, column = np.unravel_index(int(total.argmax()), total.shape)
        used = self._first.uses[:, column].copy()
        if middle[row, column] > last[row, column]:
            self._follow(int(self._behind_first[row, column]), values, ends, cost, used)
        return float(total[row, column]), used

    def _values(self, cost: Floats) -> tuple[Floats, Floats]:
        """value(r) of each row, behind the margin; and the best of what ends the layout there."""
        ends = (self._stages.last - cost).max(axis=1, initial=-np.inf)
        values = np.full(self._pad + len(ends), -np.inf)
        for low in range(0, len(ends), _BLOCK):
            rows = slice(low, min(low + _BLOCK, len(ends)))
            here = values[self._pad :][rows]
            np.maximum(ends[rows], _through(self._far, rows, values, cost), out=here)
            for _ in range(self._most_stages):
                better = np.maximum(here, _through(self._near, rows, values, cost))
                if np.array_equal(better, here):
                    break
                here[:] = better
        return values, ends

    def _follow(self, at: int, values: Floats, ends: Floats, cost: Floats, used: Floats) -> None:
        """Add up what the best stages from a place in `values` on use."""
        for _ in range(self._most_stages):
            row = at - self._pad
            options = values[self._behind[row]] + self._stages.middle[row] - cost
            is_last = ends[row] >= options.max()
            column = int((self._stages.last[row] - cost if is_last else options).argmax())
            used += self._stages.uses[:, column]
            if is_last:
                return
            at = int(self._behind[row, column])


def _through(
    columns: tuple[Integers, Floats, NDArray[np.bool_]], rows: slice, values: Floats, cost: Floats
) -> Floats:
    """The best of these rows if one of these columns comes next and others follow."""
    behind, middle, chosen = columns
    found = values[behind[rows]]
    found += middle[rows]
    found -= cost[chosen]
    return found.max(axis=1, initial=-np.inf)  # type: ignore[no-any-return]


def _possible_columns(stages: Stages) -> Stages:
    """Only columns that are possible somewhere."""
    most = np.maximum(
        stages.middle.max(axis=0, initial=-np.inf), stages.last.max(axis=0, initial=-np.inf)
    )
    some = most > -np.inf
    return Stages(
        stages.middle[:, some], stages.last[:, some], stages.ticks[some], stages.uses[:, some]
    )
