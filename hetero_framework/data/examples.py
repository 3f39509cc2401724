"""Tokenised examples in compact form: 5 bytes per token instead of a Python list of ints."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

IGNORE_INDEX = -100
LARGEST = float(np.finfo(np.float32).max)
"""The largest number that can be learned from an example."""


class ExampleSet(Protocol):
    """A set of examples, by number. An example that is not text counts as one token."""

    def __len__(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def longest(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...


class Rows(ExampleSet, Protocol):
    """Tokenised rows: token ids and labels, both int64."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...


class StreamedRows(ABC):
    """Rows that are made during a run, whose state is part of the run's state."""

    @abstractmethod
    def state(self) -> Any:
        """What `restore` needs to go on here, as JSON types. Any thread may call this."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Go on from a `state`, before any row is asked for. Raises DataError for changed data."""

    @abstractmethod
    def close(self) -> None:
        """Stop making rows. Asking for a row begins anew."""


@dataclass(frozen=True)
class Examples:
    """All rows end to end. ids: int32 [tokens]. trained: bool [tokens], true where the token is a
    label. offsets: int64 [rows + 1]; row i is ids[offsets[i]:offsets[i + 1]]. targets: float32
    [examples, targets of an example], numbers to be learned beside the tokens, if any."""

    ids: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels (-100 where the loss ignores the token), both int64."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        ids = self.ids[span].astype(np.int64)
        return ids, np.where(self.trained[span], ids, IGNORE_INDEX)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example."""
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        """Tokens in the longest example."""
        return int(self.lengths.max(initial=0))

    @staticmethod
    def joined(sets: Sequence[Examples]) -> Examples:
        """The rows of some sets one after another."""
        ends = np.cumsum([0, *(examples.tokens for examples in sets)])
        moved = [part.offsets[1:] + end for part, end in zip(sets, ends[:-1], strict=True)]
        targets = [part.targets for part in sets if part.targets is not None]
        return Examples(
            np.concatenate([part.ids for part in sets]),
            np.concatenate([part.trained for part in sets]),
            np.concatenate([np.zeros(1, np.int64), *moved]),
            np.concatenate(targets) if targets else None,
        )

    def taken(self, numbers: np.ndarray, each: int = 1) -> Examples:
        """The examples with these numbers, in this order. An example has `each` rows."""
        rows = (numbers[:, None] * each + np.arange(each)).ravel()
        begins, lengths = self.offsets[rows], self.lengths[rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        ids = np.empty(offsets[-1], self.ids.dtype)
        trained = np.empty(offsets[-1], self.trained.dtype)
        for begin, length, at in zip(
            *map(np.ndarray.tolist, (begins, lengths, offsets[:-1])), strict=True
        ):
            ids[at : at + length] = self.ids[begin : begin + length]
            trained[at : at + length] = self.trained[begin : begin + length]
        targets = None if self.targets is None else self.targets[numbers]
        return Examples(ids, trained, offsets, targets)

    @cached_property
    def fingerprint(self) -> str:
        """sha256, in hex, of token ids, labels, the bounds of the rows and targets."""
        digest = hashlib.sha256(b"examples 1")
        for part in (self.offsets.astype("<i8"), self.ids.astype("<i4"), np.packbits(self.trained)):
            digest.update(part.tobytes())
        if self.targets is not None:
            digest.update(self.targets.astype("<f4").tobytes())
        return digest.hexdigest()


class ExamplesBuilder:
    """Collects examples one by one in growing arrays, not in Python lists."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._trained = bytearray()
        self._ends = array("q", [0])
        self.targets: list[Sequence[float]] = []
        """The targets of each example, equally many; empty for examples without any."""

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, ids: list[int], trained: list[bool]) -> None:
        self._ids.extend(ids)
        self._trained.extend(trained)
        self._ends.append(len(self._ids))

    def build(self) -> Examples:
        return Examples(
            ids=np.array(self._ids, dtype=np.int32),
            trained=np.array(self._trained, dtype=np.bool_),
            offsets=np.array(self._ends, dtype=np.int64),
            targets=np.array(self.targets, np.float32) if self.targets else None,
        )
