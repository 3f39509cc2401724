"""Data sets of a file of --import: examples that are tensors, for training.objective "sequential".

A data set has a length and takes an index: a torch Dataset or a list. An example is a pair: the
input of the chain, and the target that the loss compares with. Each of the two is a tensor, a
number, or a dictionary of these.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hetero_framework import control
from hetero_framework.config import Config
from hetero_framework.data.batches import MicroBatch, SampleOrder
from hetero_framework.data.examples import ExampleSet
from hetero_framework.data.train_data import TrainData
from hetero_framework.errors import DataError
from hetero_framework.models.rng import seed_cpu

_ROLES = ("input", "target")
_COMPARED = 256
Forms = dict[str, tuple[tuple[int, ...], str]]


class OwnExamples:
    """A user's data set as the rows of a run. Random numbers that it draws for an example depend on
    the seed, the example and its epoch alone, so that a step can be done again."""

    def __init__(self, name: str, spec: str | tuple[str, ...], seed: int) -> None:
        if not isinstance(spec, str):
            raise DataError(f"data.{name} is a list; a chain is trained on one data set")
        self._where = f"data.{name} {spec!r}"
        self._seed = seed
        found = control.named(spec)
        if callable(found) and not hasattr(found, "__getitem__"):
            with control.users_code(f"{self._where} fails", DataError):
                found = found()
        if not hasattr(found, "__getitem__") or not hasattr(found, "__len__"):
            raise DataError(
                f"{self._where}: no imported file has a data set of that name",
                hint="add --import FILE.py to the command, with a torch Dataset, a list, or a"
                " function that returns one",
            )
        self._examples: Any = found
        if not len(found):
            raise DataError(f"{self._where} is empty")

    def __len__(self) -> int:
        return len(self._examples)

    def example(self, index: int, epoch: int) -> dict[str, Any]:
        """The values of an example, by the names of a micro-batch's tensors."""
        with torch.random.fork_rng(devices=[]):
            states = random.getstate(), np.random.get_state()
            number = int(np.random.SeedSequence((self._seed, epoch, index)).generate_state(1)[0])
            seed_cpu(number)
            random.seed(number)
            np.random.seed(number)
            try:
                with control.users_code(f"{self._where}: example {index}", DataError):
                    pair = self._examples[index]
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])
        if not isinstance(pair, Sequence) or len(pair) != len(_ROLES):
            raise DataError(
                f"{self._where}: example {index} is no pair of input and target but a"
                f" {type(pair).__name__}"
            )
        parts: dict[str, Any] = {}
        for role, part in zip(_ROLES, pair, strict=True):
            if isinstance(part, Mapping):
                parts |= {f"{role}.{name}": value for name, value in part.items()}
            else:
                parts[role] = part
        return parts

    def collate(self, indices: Sequence[int] | np.ndarray, epoch: int = 0) -> MicroBatch:
        """The micro-batch of these examples: their tensors, stacked."""
        examples = [self.example(int(index), epoch) for index in indices]
        try:
            batch = default_collate(examples)
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            raise DataError(
                f"{self._where}: examples {', '.join(map(str, indices))} do not make a"
                f" micro-batch: {error}",
                hint="all examples have the same names, and tensors of one shape",
            ) from error
        for name, value in batch.items():
            if not isinstance(value, Tensor):
                raise DataError(f"{self._where}: {name} is a {type(value).__name__}, no tensor")
            if value.dtype == torch.float64:  # from Python's floats
                batch[name] = value.float()
        return {name: value.contiguous() for name, value in batch.items()}

    @property
    def forms(self) -> Forms:
        """Shapes and types of the first example's tensors."""
        batch = self.collate([0])
        kinds = {name: str(t.dtype).removeprefix("torch.") for name, t in batch.items()}
        return {name: (tuple(t.shape[1:]), kinds[name]) for name, t in batch.items()}

    @property
    def tokens(self) -> int:
        return len(self)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.ones(len(self), np.int64)

    @property
    def longest(self) -> int:
        return 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256, in hex, of the number of examples and of up to 256 evenly spaced examples."""
        digest = hashlib.sha256(f"own {len(self)}".encode())
        for index in np.unique(np.linspace(0, len(self) - 1, _COMPARED).astype(int)):
            for name, tensor in self.collate([index]).items():
                digest.update(name.encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class OwnData(TrainData):
    """Micro-batches of the data sets in a file of --import."""

    def step_batches(self, step: int) -> list[MicroBatch]:
        steps = max(1, self.steps_per_epoch)
        rows = self.order.step_indices(step)
        assert isinstance(self.examples, OwnExamples)
        return [self.examples.collate(numbers, step // steps) for numbers in rows]

    def collate(self, examples: Any, rows: np.ndarray) -> MicroBatch:
        batch: MicroBatch = examples.collate(rows)
        return batch


def load_own_data(config: Config) -> OwnData:
    """The data sets that `data.train` and `data.eval` name. Raises DataError."""
    data, seed = config.data, config.training.seed
    if data is None:
        raise DataError("the configuration has no data", hint='add "data": {"train": "..."}')
    if data.sources or data.val_set_size is not None:
        raise DataError(
            "data.train is one data set of a file of --import, which nothing is held out of",
            hint="mix and split the data in that file",
        )
    sets = {"train": data.paths, **{f"eval.{n}".rstrip("."): s for n, s in data.eval_sets.items()}}
    found = {name: OwnExamples(name, spec, seed) for name, spec in sets.items()}
    train = found.pop("train")
    report = [f"train: {len(train):,} examples, {shown_forms(train.forms)}"]
    report += [f"{name}: {len(rows):,} examples" for name, rows in found.items()]
    order = SampleOrder(len(train), config.training, train.lengths)
    evals: dict[str, ExampleSet] = {
        name.removeprefix("eval").removeprefix("."): rows for name, rows in found.items()
    }
    return OwnData(train, evals, order, data, 0, report)


def shown_forms(forms: Forms) -> str:
    """The forms as text: "input 3 x 32 x 32 of float32, target a number of int64"."""
    parts: Iterator[str] = (
        f"{name} {' x '.join(map(str, shape)) or 'a number'} of {dtype}"
        for name, (shape, dtype) in forms.items()
    )
    return ", ".join(parts)
