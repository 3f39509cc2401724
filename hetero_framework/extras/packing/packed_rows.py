"""Rows of several examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetero_framework.config import DataConfig
from hetero_framework.data.examples import Examples
from hetero_framework.data.train_data import nothing_to_learn
from hetero_framework.extras.packing.bins import Parts, parts_of


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
        """The number of labels in each part that are predicted: all but the first of a part, or, if
        a row's examples see each other (`wraps`), all but the first of a row."""
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
