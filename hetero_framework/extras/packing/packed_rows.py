"""Rows of several examples, and the parts of examples that make a row."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hetero_framework.config import DataConfig
from hetero_framework.data.examples import Examples
from hetero_framework.data.train_data import nothing_to_learn

_TOGETHER = 1000  # batch_size of Dataset.map
Parts = np.ndarray
"""int64 [parts, 4]: the row of each part, its example, and its first token and end in it; sorted by
row."""


@dataclass(frozen=True)
class PackedRows:
    """Rows that are put together from parts of examples."""

    examples: Examples
    found: Parts
    ends: np.ndarray
    """int64 [rows + 1]: row i has the parts ends[i]:ends[i + 1]."""

    def __len__(self) -> int:
        return len(self.ends) - 1

    def pieces(self, index: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Token ids and labels of each part of a row."""
        for _, example, begin, end in self.found[self.ends[index] : self.ends[index + 1]].tolist():
            ids, labels = self.examples[example]
            yield ids[begin:end], labels[begin:end]

    def parts(self, index: int) -> list[tuple[int, int]]:
        """The example and the number of tokens of each part of a row."""
        found = self.found[self.ends[index] : self.ends[index + 1]].tolist()
        return [(example, end - begin) for _, example, begin, end in found]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels of a whole row."""
        ids, labels = zip(*self.pieces(index), strict=True)
        return np.concatenate(ids), np.concatenate(labels)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        sizes = self.found[:, 3] - self.found[:, 2]
        return np.add.reduceat(sizes, self.ends[:-1]) if len(self) else sizes

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max(initial=0))

    def labels(self, wraps: bool) -> np.ndarray:
        """The number of predicted labels in each part. The first token of a part is not predicted,
        or, if a row's examples see each other (`wraps`), only the first token of a row."""
        trained, begins = self.examples.trained, self.examples.offsets[self.found[:, 1]]
        sums = np.concatenate([[0], np.cumsum(trained)])
        firsts, ends = begins + self.found[:, 2], begins + self.found[:, 3]
        alone = self.ends[:-1] if wraps else slice(None)
        found: np.ndarray = sums[ends] - sums[firsts]
        found[alone] -= trained[firsts[alone]]
        return found

    @cached_property
    def fingerprint(self) -> str:
        """sha256, in hex, of the examples and of the parts."""
        parts = np.ascontiguousarray(self.found.astype("<i8"))
        digest = hashlib.sha256(b"packed 1" + self.examples.fingerprint.encode())
        digest.update(parts.tobytes())
        return digest.hexdigest()


def pack(name: str, examples: Examples, data: DataConfig) -> tuple[PackedRows, list[str]]:
    """The rows of a set's examples, and lines for the log. Raises DataError if none has a label."""
    assert data.max_length is not None
    found = parts_of(examples.lengths, data.max_length, data.packing_strategy)
    starts = np.flatnonzero(np.diff(found[:, 0], prepend=-1))
    rows = PackedRows(examples, found, np.append(starts, len(found)))
    labels = rows.labels(data.packing_strategy == "wrapped")
    if not labels.any():
        raise nothing_to_learn(name, len(examples), data if examples.trained.any() else None)
    filled = rows.tokens / max(1, len(rows) * data.max_length)
    line = f"{name}: packed into {len(rows):,} rows ({data.packing_strategy}), {filled:.1%} filled"
    long = examples.lengths > data.max_length
    if data.packing_strategy == "bfd" and (count := int(long.sum())):
        lost = examples.tokens - rows.tokens
        line += (
            f"; {count:,} examples were longer than max_length={data.max_length} and lost {lost:,}"
            ' tokens at their end (packing_strategy "bfd_split" keeps them)'
        )
    elif data.packing_strategy == "bfd_split" and (count := int(long.sum())):
        line += f"; {count:,} examples were longer than max_length={data.max_length} and were split"
    lines = [line]
    if idle := len(examples) - len(np.unique(found[labels > 0, 1])):
        empty = int((np.add.reduceat(labels, starts) == 0).sum())
        lines.append(
            f"{name}: {idle:,} of {len(examples):,} examples have no token to learn from (only a"
            f" prompt within max_length) and stay in their rows, as in TRL; {empty:,} of"
            f" {len(rows):,} rows have none"
        )
    return rows, lines


def parts_of(lengths: np.ndarray, most: int, strategy: str) -> Parts:
    """The parts of rows of at most `most` tokens, for examples of these lengths.

    The rows are those of TRL's `pack_dataset` (1.16), which packs each 1,000 examples of a data set
    by themselves. "bfd" and "bfd_split" are Best Fit Decreasing: the longest part first, each into
    the row with the least room that holds it; "bfd" takes only the first `most` tokens of a longer
    example. "wrapped" cuts one stream of tokens.
    """
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
