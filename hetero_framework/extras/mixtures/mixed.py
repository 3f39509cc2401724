"""Examples of several sources in one order, as `datasets` makes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_framework.config import DataConfig
from hetero_framework.data.batches import MicroBatch
from hetero_framework.data.examples import Examples
from hetero_framework.errors import DataError, ProtocolError
from hetero_framework.extras.mixtures.source_losses import SOURCES, SUMS, TOTAL


@dataclass(frozen=True)
class Mixture:
    """The training examples and those held out, and of each the number of its source."""

    names: tuple[str, ...]
    train: Examples
    train_sources: np.ndarray
    held_out: Examples | None
    held_out_sources: np.ndarray | None
    lines: list[str]
    numbers: np.ndarray | None = None
    """Those of the training examples, each among the examples of its source."""

    def mark(self, batch: MicroBatch, of_train: bool, rows: Sequence[Sequence[Any]]) -> None:
        """Add to a micro-batch the source of each token, uint8 like input_ids. `rows` has the
        (example, tokens) that each row of it holds one after another, of one row for all. Data of
        data.eval are of no source."""
        sources = self.train_sources if of_train else self.held_out_sources
        if sources is None:
            return
        marks = torch.zeros(batch["input_ids"].shape, dtype=torch.uint8)
        for mark, parts in zip(marks, rows, strict=True):
            numbers, counts = zip(*parts, strict=True)
            told = np.repeat(sources[[*numbers]], counts)
            mark[: len(told)] = torch.from_numpy(told)
        batch[SOURCES] = marks

    @property
    def numbers_of_sources(self) -> list[set[int]]:
        """Of each source the numbers of its training examples."""
        assert self.numbers is not None
        sources = range(len(self.names))
        return [set(self.numbers[self.train_sources == k].tolist()) for k in sources]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Of the losses of the sources."""
        return tuple(f"loss/{name}" for name in self.names)

    def losses(self, named: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """The mean loss of the tokens of each source in some micro-batches, from what the last
        stage gave of each. Raises ProtocolError for what it does not make."""
        found = [tensors[SUMS] for tensors in named if SUMS in tensors]
        if any(sums.shape != TOTAL or sums.dtype != torch.float32 for sums in found):
            raise ProtocolError("the last stage gave no sums for the sources of the data")
        if not found:  # of a model whose tokens have several labels
            return {}
        sums, counts = torch.stack(found).double().cpu().sum(0)[:, : len(self.names)].tolist()
        told = zip(self.metric_names, sums, counts, strict=True)
        return {name: total / count for name, total, count in told if count}


def mix(
    sets: Sequence[Examples], names: Sequence[str], data: DataConfig, each: int, seed: int
) -> Mixture:
    """The mixture of some sets of examples, of `each` rows, as the settings have it. Those held out
    are drawn from all examples, before sources are interleaved, so that none is in both. Raises
    DataError where nothing is left to train on."""
    sizes = [len(examples) // each for examples in sets]
    sources = np.repeat(np.arange(len(sets), dtype=np.uint8), sizes)
    order, held_out = np.arange(len(sources)), np.arange(0)
    if data.val_set_size is not None:
        order, held_out = _split(len(sources), data.val_set_size, seed)
    if data.mixing == "interleave":
        kept = [order[sources[order] == k] for k in range(len(sets))]
        order = _interleaved(kept, names, data, seed)
    parts = _parts(names, sizes, sources[order]) if len(sets) > 1 else []
    lines = [f"train: {len(order):,} examples, {data.mixing}d: {', '.join(parts)}"] if parts else []
    if len(held_out):
        lines.append(f"eval: {len(held_out):,} examples that are held out of training")
    whole = Examples.joined(sets)
    out = whole.taken(held_out, each) if len(held_out) else None
    told = None if out is None else sources[held_out]
    numbers = np.concatenate([np.arange(size) for size in sizes])[order]
    train = whole.taken(order, each)
    return Mixture(tuple(names), train, sources[order], out, told, lines, numbers)


def _parts(names: Sequence[str], sizes: Sequence[int], taken: np.ndarray) -> list[str]:
    """Of each source its share, and how many of its examples that are."""
    counts = np.bincount(taken, minlength=len(names)).tolist()
    return [
        f"{name} {count / len(taken):.1%} ({count:,} of {size:,})"
        for name, count, size in zip(names, counts, sizes, strict=True)
    ]


def _split(count: int, size: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers to train on and those to hold out, as `Dataset.train_test_split`."""
    from datasets import Dataset

    numbers = Dataset.from_dict({"number": np.arange(count)})
    try:
        parts = numbers.train_test_split(size if size < 1 else int(size), seed=seed)
    except ValueError as error:
        raise DataError(f"data.val_set_size is {size:g} of {count:,} examples: {error}") from error
    return _numbers(parts["train"]), _numbers(parts["test"])


def _interleaved(
    numbers: Sequence[np.ndarray], names: Sequence[str], data: DataConfig, seed: int
) -> np.ndarray:
    """In the order of `interleave_datasets`."""
    from datasets import Dataset, interleave_datasets

    if empty := [name for name, found in zip(names, numbers, strict=True) if not len(found)]:
        raise DataError(f"data.val_set_size leaves no example of the source {empty[0]}")
    weights = [source.weight for source in data.sources if source.weight is not None]
    total = math.fsum(weights)
    shares = weights if total == 1 else [weight / total for weight in weights]
    mixed = interleave_datasets(
        [Dataset.from_dict({"number": found}) for found in numbers],
        probabilities=shares or None,
        seed=seed if shares else None,
        stopping_strategy=data.stopping_strategy,
    )
    return _numbers(mixed)


def _numbers(dataset: Any) -> np.ndarray:
    found: np.ndarray = dataset.with_format("arrow")[:]["number"].to_numpy()
    return found
