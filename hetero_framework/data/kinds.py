"""The kinds of examples that objectives are trained on: how they are read, kept and put together.

The registry's table `data` has the kinds by name, each with the number of rows of an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hetero_framework import registry
from hetero_framework.config import Config, DataConfig, TrainingConfig
from hetero_framework.config.objectives import needs_of, shows_pictures
from hetero_framework.data.batches import MicroBatch, collate
from hetero_framework.data.examples import Rows
from hetero_framework.data.formats import Formatter, detect_format
from hetero_framework.data.sources import TEXTS, Numeric, Record
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Collate = Callable[[Any, Sequence[int] | np.ndarray, int, int | None], MicroBatch]


class Labels(Protocol):
    """The names of the labels, in the order of their numbers, and the kind of loss (`problem`)."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def problem(self) -> str: ...


class LabelReader(Protocol):
    """Finds the labels of a kind of examples that has labels."""

    def stated(self, config: Config, model_config: PretrainedConfig) -> Any:
        """Facts about the labels that the settings or the model's checkpoint have."""

    def find(self, records: Iterator[Record], stated: Any) -> Labels:
        """The labels that are stated, or else found in the training data (None: not stated)."""


@dataclass(frozen=True)
class ExampleKind:
    """How one kind of examples is read, kept and put together. `formats` are the values of
    data.format beside "auto". `formatter` reads records, and `kept` makes examples of tokenised
    rows. `collate` makes a micro-batch of the examples with given numbers, padded to a multiple.
    `records` turns a file's records into records of this kind. A record has a field of each group
    of `needs`; `numeric` names columns of numbers. `labels` finds the labels, if there are any;
    `formatter` and `kept` then also take them, or what `beside` makes of the configuration, where
    a kind needs more than texts. `remarks` gives lines on all training examples."""

    noun: str
    formats: tuple[str, ...]
    formatter: Callable[..., Formatter]
    kept: Callable[..., Rows]
    collate: Collate
    records: Callable[[Iterator[Record]], Iterator[Record]] = iter
    needs: tuple[tuple[str, ...], ...] = ()
    labels: LabelReader | None = None
    beside: Callable[[Config, PreTrainedTokenizerBase], Any] | None = None
    numeric: Numeric = TEXTS
    remarks: Callable[[Any, TrainingConfig], Iterator[str]] = lambda examples, training: iter(())


def _formatter(first: Record, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Formatter:
    """The formatter of a set of examples, by its first record."""
    kind: str = data.format
    if kind == "auto":
        kind = detect_format(first.fields, first.where, data.dataset_text_field)
    return Formatter(kind, tokenizer, data)


_FORMATS = ("text", "prompt_completion", "messages", "alpaca", "tokens")
TEXT = ExampleKind("examples", _FORMATS, _formatter, lambda examples, *_: examples, collate)


def kind_of(name: str) -> ExampleKind:
    """The kind of this name."""
    found = registry.find("data", name)
    assert isinstance(found, ExampleKind), f"{name} are no records"
    return found


def objectives_of(first: Record) -> list[str]:
    """The objectives that may be trained on examples with this record's fields, likeliest first."""
    there = {name for name, value in first.fields.items() if value is not None}

    def suits(kind: str) -> bool:
        needs = getattr(registry.find("data", kind), "needs", ())  # a user's own data set has none
        with suppress(DataError):
            is_text = kind == "text" and bool(detect_format(first.fields, first.where, "text"))
            return is_text or (bool(needs) and all(there.intersection(group) for group in needs))
        return False

    known = {name: needs_of(name) for name in registry.names("objectives")}
    found = [name for name, needs in known.items() if suits(needs.data)]

    def rank(name: str) -> tuple[bool, ...]:
        """Those on texts come last, since texts may have other fields, too; pictures come first."""
        needs = known[name]
        return needs.data == "text", not shows_pictures(needs.data), needs.task != "causal-lm"

    return sorted(found, key=rank)


def formatter_for(
    kind: str,
    first: Record,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    more: Sequence[Any] = (),
) -> Formatter:
    """The formatter of a set of examples, by the first record. `more` is `Reader.more`. Raises
    DataError for examples that are not of the kind that the objective is trained on."""
    examples = kind_of(kind)
    if data.format not in ("auto", *examples.formats):
        raise DataError(
            f"data.format is {data.format!r}, but the objective is trained on {examples.noun}",
            hint="leave it out, or choose another training.objective; docs/objectives.md has the"
            " data of each",
        )
    return examples.formatter(first, tokenizer, data, *more)
