"""Examples of several sources in one order, as `datasets` makes it, and the loss of each source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from hetero_framework.config import MOST_SOURCES, DataConfig
from hetero_framework.data.batches import MicroBatch
from hetero_framework.data.examples import IGNORE_INDEX, Examples
from hetero_framework.errors import DataError, ProtocolError
from hetero_framework.models.cut.chunked_loss import Span

SOURCES, SUMS = "sources", "source_sums"
TOTAL = (2, MOST_SOURCES)
"""The shape of SUMS: losses and numbers of tokens by source."""
_LOGITS = 1 << 24  # in float32 at once


@dataclass(frozen=True)
class Mixture:
    """The training examples and the held-out examples, with each example's source number."""

    names: tuple[str, ...]
    train: Examples
    train_sources: np.ndarray
    held_out: Examples | None
    held_out_sources: np.ndarray | None
    lines: list[str]
    numbers: np.ndarray | None = None
    """The number of each training example among the examples of its source."""

    def mark(self, batch: MicroBatch, of_train: bool, rows: Sequence[Sequence[Any]]) -> None:
        """Add the source of each token to a micro-batch, uint8 in the shape of input_ids. `rows`
        has one list for each row of the micro-batch: (example, number of tokens), one after
        another. Data of data.eval have no source."""
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
        """For each source, the numbers of its training examples."""
        assert self.numbers is not None
        sources = range(len(self.names))
        return [set(self.numbers[self.train_sources == k].tolist()) for k in sources]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the losses by source."""
        return tuple(f"loss/{name}" for name in self.names)

    def losses(self, named: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """The mean loss of each source's tokens in some micro-batches, from the last stage's
        tensors. Raises ProtocolError for tensors that a last stage does not make."""
        found = [tensors[SUMS] for tensors in named if SUMS in tensors]
        if any(sums.shape != TOTAL or sums.dtype != torch.float32 for sums in found):
            raise ProtocolError("the last stage gave no sums for the sources of the data")
        if not found:  # each token of the model has several labels
            return {}
        sums, counts = torch.stack(found).double().cpu().sum(0)[:, : len(self.names)].tolist()
        told = zip(self.metric_names, sums, counts, strict=True)
        return {name: total / count for name, total, count in told if count}


def mix(
    sets: Sequence[Examples], names: Sequence[str], data: DataConfig, each: int, seed: int
) -> Mixture:
    """The mixture that the settings make of some sets, whose examples have `each` rows. Held-out
    examples are drawn from all examples before sources are interleaved, so that none is in both
    parts. Raises DataError where nothing is left to train on."""
    sizes = [len(examples) // each for examples in sets]
    sources = np.repeat(np.arange(len(sets), dtype=np.uint8), sizes)
    order, held_out = np.arange(len(sources)), np.arange(0)
    if data.val_set_size is not None:
        order, held_out = _split(len(sources), data.val_set_size, seed)
    if data.mixing == "interleave":
        kept = [order[sources[order] == k] for k in range(len(sets))]
        order = _interleaved(kept, names, data, seed)
    lines = list[str]()
    if len(sets) > 1:  # each source's share of the order, and how many of its examples that is
        counts = np.bincount(sources[order], minlength=len(names)).tolist()
        parts = (
            f"{name} {count / len(order):.1%} ({count:,} of {size:,})"
            for name, count, size in zip(names, counts, sizes, strict=True)
        )
        lines.append(f"train: {len(order):,} examples, {data.mixing}d: {', '.join(parts)}")
    if len(held_out):
        lines.append(f"eval: {len(held_out):,} examples that are held out of training")
    whole = Examples.joined(sets)
    out = whole.taken(held_out, each) if len(held_out) else None
    told = None if out is None else sources[held_out]
    numbers = np.concatenate([np.arange(size) for size in sizes])[order]
    train = whole.taken(order, each)
    return Mixture(tuple(names), train, sources[order], out, told, lines, numbers)


def _split(count: int, size: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers to train on and the numbers to hold out, by `Dataset.train_test_split`."""
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
    """The numbers in the order of `interleave_datasets`."""
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


class SourceLosses:
    """Keeps the loss of each token of a micro-batch, and adds them up by source: on the last stage.

    Shapes: B rows of a micro-batch, S tokens, V vocabulary, T tokens of one part.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._fits = True

    @torch.no_grad()
    def look(self, logits_BSV: Tensor, labels_BS: Tensor) -> None:
        """Take a part of a micro-batch. A row predicts all its labels except the first."""
        if logits_BSV.shape[:-1] != labels_BS.shape:
            self._fits = False  # each token has several labels
            return
        next_BS = pad(labels_BS[..., 1:], (0, 1), value=IGNORE_INDEX)
        at_once = max(1, _LOGITS // logits_BSV.shape[-1])
        parts = logits_BSV.flatten(0, -2).split(at_once)
        losses = [
            cross_entropy(logits_TV.float(), label_T, reduction="none")
            for logits_TV, label_T in zip(parts, next_BS.flatten().split(at_once), strict=True)
        ]
        self._found.append(torch.cat(losses).view(next_BS.shape))

    def named(
        self, sources_BS: Tensor, labels_BS: Tensor, chunks: Sequence[Span] = ()
    ) -> dict[str, Tensor]:
        """SUMS, where there is a loss for each token; `chunks` are the places of the parts."""
        if not self._fits:
            return {}
        losses_BS = torch.zeros(labels_BS.shape, device=labels_BS.device)
        whole = slice(None), slice(None)
        for place, part in zip(chunks or [whole], self._found, strict=True):
            losses_BS[place] += part  # the last token of a chunk has its loss in the next one
        counted_BS = pad(labels_BS[..., 1:], (0, 1), value=IGNORE_INDEX) != IGNORE_INDEX
        source_BS = pad(sources_BS[..., 1:], (0, 1)).long()
        told = torch.stack([losses_BS.flatten(), counted_BS.float().flatten()])
        sums = told.new_zeros(TOTAL).index_add_(1, source_BS.flatten(), told)
        return {SUMS: sums}
