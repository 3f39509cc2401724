"""The parts of examples that make a row: a function of the examples' lengths alone.

The rows are those of TRL's `pack_dataset` (1.16), which packs each 1,000 examples of a data set by
themselves. "bfd" and "bfd_split" are Best Fit Decreasing: the longest part first, each into the row
with the least room that holds it. "wrapped" cuts one stream of tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Any

import numpy as np

_TOGETHER = 1000  # batch_size of Dataset.map

Parts = np.ndarray
"""int64 [parts, 4]: the row of each part, its example, and its first token and end in it; sorted by
row."""


def parts_of(lengths: np.ndarray, most: int, strategy: str) -> Parts:
    """The parts of rows of at most `most` tokens, for examples of these lengths. "bfd" takes only
    the first `most` tokens of a longer example."""
    found: list[tuple[int, int, int, int]] = []
    for first in range(0, len(lengths), _TOGETHER):
        group = np.asarray(lengths[first : first + _TOGETHER], np.int64)
        rows = (
            _wrapped(group, most)
            if strategy == "wrapped"
            else _best_fit(group, most, splits=strategy == "bfd_split")
        )
        start = found[-1][0] + 1 if found else 0
        found += [
            (start + number, first + example, begin, end)
            for number, row in enumerate(rows)
            for example, begin, end in row
        ]
    return np.array(found, np.int64).reshape(-1, 4)


def _best_fit(lengths: np.ndarray, most: int, *, splits: bool) -> list[list[tuple[int, int, int]]]:
    parts = []
    for example, length in enumerate(lengths.tolist()):
        ends = range(0, length, most) if splits else range(0, min(length, 1))
        parts += [(example, begin, min(begin + most, length)) for begin in ends]
    rows: list[list[tuple[int, int, int]]] = []
    rooms: list[int] = []  # the different rooms of rows that are not full, in order
    with_room: dict[int, deque[int]] = {}
    for part in map(parts.__getitem__, _descending([end - begin for _, begin, end in parts])):
        size = part[2] - part[1]
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = with_room[room].popleft()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, row = most, len(rows)
            rows.append([])
        rows[row].append(part)
        if left := room - size:
            if left not in with_room:
                with_room[left] = deque()
                insort(rooms, left)
            with_room[left].append(row)
    return rows


def _descending(sizes: list[int]) -> Any:
    """The numbers of the parts, the largest first. Equal parts have the order of Arrow's sort."""
    import pyarrow
    import pyarrow.compute

    table = pyarrow.compute.make_struct(
        pyarrow.array(sizes, pyarrow.int64()), np.arange(len(sizes))
    )
    return table.sort("descending", by=0).field(1).to_numpy()


def _wrapped(lengths: np.ndarray, most: int) -> list[list[tuple[int, int, int]]]:
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    rows = []
    for begin in range(0, int(bounds[-1]), most):
        end = min(begin + most, int(bounds[-1]))
        first, last = np.searchsorted(bounds, begin, "right") - 1, np.searchsorted(bounds, end)
        rows.append(
            [
                (
                    k,
                    int(max(begin, bounds[k]) - bounds[k]),
                    int(min(end, bounds[k + 1]) - bounds[k]),
                )
                for k in range(int(first), int(last))
                if bounds[k] < bounds[k + 1]
            ]
        )
    return rows
