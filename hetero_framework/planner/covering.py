"""The most work that stages one behind the other can cover in the parts of a step that are left,
where what they use has a price: one dynamic programme, as large arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_BLOCK = 64  # rows that are computed together


class Stages(NamedTuple):
    """What may come next where so many parts are left (rows): the work of each stage (columns) if
    others follow, and if it is the last one, minus infinity where it cannot; the parts that each
    takes from those behind it; and how much it uses of what has a price (`uses`, by columns)."""

    middle: Floats
    last: Floats
    parts: Integers
    uses: Floats


class Programme:
    """`starts` is the work in front of each row of `first`, what comes first there; these are so
    many `rows` of the stages'."""

    def __init__(
        self, stages: Stages, starts: Floats, rows: Integers, first: Stages, most_stages: int
    ) -> None:
        stages, first = _without_the_impossible(stages), _without_the_impossible(first)
        self._stages, self._first, self._starts = stages, first, starts
        self._most_stages = most_stages
        # Behind what takes more than there is comes minus infinity, at place 0 and after.
        self._pad = 1 + int(max(stages.parts.max(initial=0), first.parts.max(initial=0)))
        every = np.arange(len(stages.middle))
        self._behind = np.maximum(0, every[:, None] + (self._pad - stages.parts))
        self._behind_first = np.maximum(0, rows[:, None] + (self._pad - first.parts))
        near = stages.parts < _BLOCK
        self._near, self._far = (
            (self._behind[:, chosen].copy(), stages.middle[:, chosen].copy(), chosen)
            for chosen in (near, ~near)
        )

    def best(self, prices: Floats) -> tuple[float, Floats]:
        """The most work less what it costs, and how much of what has a price that uses."""
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
        """The best of what comes behind for each row, after a margin of minus infinity; and of what
        ends there."""
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
        """Add up what the best stages behind a place use."""
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
    """The best that comes next among these columns."""
    behind, middle, chosen = columns
    found = values[behind[rows]]
    found += middle[rows]
    found -= cost[chosen]
    return found.max(axis=1, initial=-np.inf)  # type: ignore[no-any-return]


def _without_the_impossible(stages: Stages) -> Stages:
    """Only columns that are possible somewhere."""
    most = np.maximum(
        stages.middle.max(axis=0, initial=-np.inf), stages.last.max(axis=0, initial=-np.inf)
    )
    some = most > -np.inf
    return Stages(
        stages.middle[:, some], stages.last[:, some], stages.parts[some], stages.uses[:, some]
    )
