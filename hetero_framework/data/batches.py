"""The order of examples, the batches of a step, and their tensors; a run can start at any step.

The order is transformers.Trainer's: one permutation per epoch by accelerate's
SeedableRandomSampler, or examples of similar length together. An epoch's last micro-batch may be
smaller, and its last step may have fewer micro-batches.
Shapes: B examples in a micro-batch, S tokens in its longest example, T tokens in all its examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from hetero_framework.config import TrainingConfig
from hetero_framework.data.examples import IGNORE_INDEX, Rows
from hetero_framework.errors import DataError

MicroBatch = dict[str, torch.Tensor]
PICTURES = "pictures."
"""Begins the names of a model's inputs that are made of pictures; only its first stage has them."""
_LOOK_AT = 2_000_000


class LazyBatches(Sequence[MicroBatch]):
    """`count` micro-batches, each made by `make(index)` when it is asked for, and not kept."""

    def __init__(self, count: int, make: Callable[[int], MicroBatch]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._make(index)


@dataclass
class SampleOrder:
    """Chooses the examples of each step by the settings of `training`. group_by_length needs
    `lengths`, the tokens of each example. Raises DataError when an epoch has no micro-batch."""

    num_examples: int
    training: TrainingConfig
    lengths: np.ndarray | None = field(default=None, repr=False, compare=False)
    _cached: tuple[int, np.ndarray] | None = field(default=None, repr=False, compare=False)
    # The number of epochs drawn so far, and the generator that draws the next.
    _drawn: tuple[int, torch.Generator] | None = field(default=None, repr=False, compare=False)

    mixes_epochs: ClassVar[bool] = False
    """Whether the order of a step's samples depends on the run's number of steps."""

    def __post_init__(self) -> None:
        if self.batches_per_epoch == 0:
            raise DataError(
                f"{self.num_examples} examples do not fill one micro-batch of {self._rows}, "
                "and training.dataloader_drop_last drops smaller ones",
                hint="set it to false, or lower training.per_device_train_batch_size",
            )

    @property
    def _rows(self) -> int:
        return self.training.per_device_train_batch_size

    @property
    def seed(self) -> int:
        """The seed of the samples' order."""
        return self.training.order_seed

    @property
    def samples_per_step(self) -> int:
        """Samples of a step that is not cut short by the end of an epoch."""
        return self._rows * self.training.gradient_accumulation_steps

    @property
    def samples_per_epoch(self) -> int:
        """Samples in an epoch: all, unless dataloader_drop_last drops some."""
        return min(self.num_examples, self.batches_per_epoch * self._rows)

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of an epoch."""
        if self.training.dataloader_drop_last:
            return self.num_examples // self._rows
        return math.ceil(self.num_examples / self._rows)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.batches_per_epoch / self.training.gradient_accumulation_steps)

    @property
    def total_steps(self) -> int:
        if self.training.max_steps > 0:
            return self.training.max_steps
        return math.ceil(self.training.num_train_epochs * self.steps_per_epoch)

    def epoch_of(self, step: int) -> float:
        """`state.epoch` of the Trainer once `step` (from 0) is done."""
        epoch, within = divmod(step, self.steps_per_epoch)
        accumulation = self.training.gradient_accumulation_steps
        done = min((within + 1) * accumulation, self.batches_per_epoch)
        return epoch + done / self.batches_per_epoch

    def gathered(self, step: int) -> int | None:
        """Examples of each micro-batch of `step` (from 0) that accelerate's gather_for_metrics
        keeps; None: all. In an epoch's last step, the number of a smaller last micro-batch."""
        rest = 0 if self.training.dataloader_drop_last else self.num_examples % self._rows
        return rest if rest and (step + 1) % self.steps_per_epoch == 0 else None

    def step_indices(self, step: int) -> list[np.ndarray]:
        """Example numbers of each micro-batch of `step` (from 0)."""
        if step < 0:
            raise IndexError(f"step {step} is negative")
        epoch, within = divmod(step, self.steps_per_epoch)
        order, accumulation = self._epoch(epoch), self.training.gradient_accumulation_steps
        first = within * accumulation
        last = min(first + accumulation, self.batches_per_epoch)
        return [order[k * self._rows : (k + 1) * self._rows] for k in range(first, last)]

    def largest(
        self, tokens: np.ndarray, first_step: int, *, packed: bool = False, multiple: int = 1
    ) -> tuple[int, int] | None:
        """The first micro-batch with the most tokens, padding included, from `first_step` on:
        (step, number in it); None where no step is left. `tokens` are the lengths of the examples.
        With `packed`, all examples of a micro-batch are one row.

        The search ends with the epoch in which it has looked at `_LOOK_AT` examples.
        """
        rows, accumulation = self._rows, self.training.gradient_accumulation_steps
        lengths = np.asarray(tokens, np.int64)
        if not packed:
            lengths = -(-lengths // multiple) * multiple
        most = int(np.sort(lengths)[-rows:].sum() if packed else lengths.max() * rows)
        best, place, looked = -1, None, 0
        for epoch in range(first_step // self.steps_per_epoch, self._epochs):
            batches = self.batches_per_epoch
            sizes = self._sizes(lengths, epoch, packed)
            steps = epoch * self.steps_per_epoch + np.arange(batches) // accumulation
            sizes[(steps < first_step) | (steps >= self.total_steps)] = -1
            at = int(sizes.argmax())
            if sizes[at] > best:
                best, place = int(sizes[at]), (int(steps[at]), at % accumulation)
            looked += batches * rows
            if best >= most or looked >= _LOOK_AT:
                break
        return place

    def _sizes(self, lengths: np.ndarray, epoch: int, packed: bool) -> np.ndarray:
        """The tokens of each micro-batch of an epoch, padding included."""
        rows, batches = self._rows, self.batches_per_epoch
        ordered = np.zeros(batches * rows, np.int64)
        taken = lengths[self._epoch(epoch)[: batches * rows]]
        ordered[: len(taken)] = taken
        grid = ordered.reshape(batches, rows)
        sizes: np.ndarray = grid.sum(1) if packed else grid.max(1) * (grid > 0).sum(1)
        return sizes

    def padded(self, tokens: np.ndarray, multiple: int = 1) -> float:
        """The share of padding among the tokens of the first epoch. `tokens` are the lengths of the
        examples; rows are padded to a multiple of `multiple`."""
        lengths = -(-np.asarray(tokens, np.int64) // multiple) * multiple
        taken = np.asarray(tokens)[self._epoch(0)[: self.batches_per_epoch * self._rows]]
        return float(1 - taken.sum() / max(1, self._sizes(lengths, 0, False).sum()))

    @property
    def _epochs(self) -> int:
        return math.ceil(self.total_steps / self.steps_per_epoch)

    def _epoch(self, epoch: int) -> np.ndarray:
        training = self.training
        if training.train_sampling_strategy == "sequential":
            return np.arange(self.num_examples)
        if self._cached is None or self._cached[0] != epoch:
            # Each way has its own generator: the training's random state is not touched.
            if training.train_sampling_strategy == "group_by_length":
                self._cached = epoch, self._grouped(epoch)
                return self._cached[1]
            sampler = SeedableRandomSampler(range(self.num_examples), data_seed=self.seed)
            sampler.set_epoch(epoch)
            self._cached = epoch, np.fromiter(sampler, np.int64, self.num_examples)
        return self._cached[1]

    def _grouped(self, epoch: int) -> np.ndarray:
        """The order of an epoch, as in a Trainer that draws nothing else. There each epoch draws
        from the process's generator: first a DataLoader's seed for workers, then the order."""
        assert self.lengths is not None
        if self._drawn is None or self._drawn[0] > epoch:
            self._drawn = 0, torch.Generator().manual_seed(self.seed)
        first, generator = self._drawn
        for number in range(first, epoch + 1):
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            if number < epoch:
                torch.randperm(self.num_examples, generator=generator)
        order = get_length_grouped_indices(
            self.lengths.tolist(), self.samples_per_step, generator=generator
        )
        self._drawn = epoch + 1, generator
        return np.array(order, np.int64)


def collate(
    examples: Rows,
    indices: Sequence[int] | np.ndarray,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> MicroBatch:
    """A micro-batch padded on the right: input_ids_BS, attention_mask_BS, and labels_BS with -100
    on padding, all int64."""
    rows = [examples[int(index)] for index in indices]
    length = max(len(ids) for ids, _ in rows)
    if pad_to_multiple_of:
        length = math.ceil(length / pad_to_multiple_of) * pad_to_multiple_of
    shape = (len(rows), length)
    input_ids_BS = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask_BS = torch.zeros(shape, dtype=torch.int64)
    labels_BS = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
    for row, (ids, labels) in enumerate(rows):
        input_ids_BS[row, : len(ids)] = torch.from_numpy(ids)
        attention_mask_BS[row, : len(ids)] = 1
        labels_BS[row, : len(ids)] = torch.from_numpy(labels)
    return {"input_ids": input_ids_BS, "attention_mask": attention_mask_BS, "labels": labels_BS}


def padded_left(batch: MicroBatch) -> MicroBatch:
    """A micro-batch of `collate` with the padding of each integer tensor [B, S] moved to the left.
    Labels of whole texts, [B] or floating-point, stay as they are."""
    mask_BS = batch["attention_mask"]
    pads = mask_BS.eq(0).sum(1).tolist()
    return {
        name: torch.stack([row.roll(count) for row, count in zip(tensor, pads, strict=True)])
        if tensor.shape == mask_BS.shape and not tensor.is_floating_point()
        else tensor
        for name, tensor in batch.items()
    }


def pack(examples: Rows, indices: Sequence[int] | np.ndarray) -> MicroBatch:
    """One row with all examples end to end: input_ids_1T, position_ids_1T, labels_1T, int64.

    The tensors equal those of transformers' DataCollatorWithFlattening and TRL's `padding_free`.
    Without an attention mask, a model tells the examples apart by positions that begin at 0. The
    first label of each example is -100: the token before it belongs to another example.
    """
    of_row = getattr(examples, "pieces", lambda index: [examples[index]])
    rows = [piece for index in indices for piece in of_row(int(index))]
    for _, labels in rows:
        labels[0] = IGNORE_INDEX
    return {
        "input_ids": _one_row([ids for ids, _ in rows]),
        "position_ids": _one_row([np.arange(len(ids)) for ids, _ in rows]),
        "labels": _one_row([labels for _, labels in rows]),
    }


def _one_row(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))[None]


def token_count(batch: MicroBatch) -> int:
    """Tokens in a micro-batch without padding. An example that is not text counts as one token."""
    mask = _own_mask(batch)
    return padded_count(batch) if mask is None else int(mask.sum())


def padded_count(batch: MicroBatch) -> int:
    """Tokens in a micro-batch with padding. An example that is not text counts as one token."""
    ids, mask = batch.get("input_ids"), _own_mask(batch)
    if ids is None:
        return len(next(iter(batch.values())))
    return (
        ids.numel() if mask is None or len(mask) == len(ids) else int(mask.any(0).sum()) * len(mask)
    )


def _own_mask(batch: MicroBatch) -> torch.Tensor | None:
    """The attention mask without rows of another example's answer ("mismatched"), which are not
    counted, as in TRL."""
    mask, rated = batch.get("attention_mask"), batch.get("desirable")
    return mask if mask is None or rated is None else mask[: len(rated)]


def num_items(batches: Iterable[MicroBatch], *, first: int = 1) -> int:
    """Tokens that the loss of a step is divided by, as in the Trainer: the labels other than -100,
    from number `first` of each row on. The first label of a row has no prediction."""
    return sum(int(batch["labels"][..., first:].ne(IGNORE_INDEX).sum()) for batch in batches)
