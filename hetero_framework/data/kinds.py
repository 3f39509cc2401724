"""The kinds of examples that objectives are trained on: how they are read, kept and put together.

`config/objectives.py` has their names, and the rows that an example of each makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero_framework.config import DataConfig, TrainingConfig
from hetero_framework.config.objectives import DataKind
from hetero_framework.data.batches import MicroBatch, collate, pack
from hetero_framework.data.examples import Examples, Rows
from hetero_framework.data.formats import Formatter, detect_format
from hetero_framework.data.pairs import AnswerRows, PairFormatter, collate_answers
from hetero_framework.data.ratings import RatingFormatter, unpaired, with_neighbours
from hetero_framework.data.sources import Record
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Collate = Callable[[Any, Sequence[int] | np.ndarray, int, int | None], MicroBatch]


@dataclass(frozen=True)
class ExampleKind:
    """`formats` are the values of data.format beside "auto", `formatter` reads records, `kept`
    makes examples of tokenised rows, and `collate` a micro-batch of those with some numbers, padded
    with a token to a multiple. `records` makes those of this kind of the records of a file."""

    noun: str
    formats: tuple[str, ...]
    formatter: Callable[[Record, PreTrainedTokenizerBase, DataConfig], Formatter]
    kept: Callable[[Examples, DataConfig, TrainingConfig], Rows]
    collate: Collate
    records: Callable[[Iterator[Record]], Iterator[Record]] = iter


def _text_formatter(
    first: Record, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> Formatter:
    """By the first record of a set of examples."""
    kind: str = data.format
    if kind == "auto":
        kind = detect_format(first.fields, first.where, data.dataset_text_field)
    return Formatter(kind, tokenizer, data)


def _pair_formatter(
    first: Record, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> Formatter:
    return PairFormatter("preference", tokenizer, data)


def _unchanged(examples: Examples, data: DataConfig, training: TrainingConfig) -> Rows:
    return examples


def _answers(examples: Examples, data: DataConfig, training: TrainingConfig) -> AnswerRows:
    return AnswerRows(examples, training.data_kind)


def _mismatched(examples: Examples, data: DataConfig, training: TrainingConfig) -> AnswerRows:
    return with_neighbours(examples, data.max_length, training.per_device_train_batch_size)


def _rated(kind: DataKind, kept: Any) -> ExampleKind:
    def formatter(first: Record, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Formatter:
        return RatingFormatter(kind, tokenizer, data)

    return ExampleKind("rated answers", ("preference",), formatter, kept, collate_answers, unpaired)


_SFT_FORMATS = ("text", "prompt_completion", "messages", "alpaca")
KINDS: dict[DataKind, ExampleKind] = {
    "text": ExampleKind("examples", _SFT_FORMATS, _text_formatter, _unchanged, collate),
    "pairs": ExampleKind("pairs", ("preference",), _pair_formatter, _answers, collate_answers),
    "ratings": _rated("ratings", _answers),
    "mismatched": _rated("mismatched", _mismatched),
}


def formatter_for(
    kind: DataKind, first: Record, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> Formatter:
    """The formatter of a set of examples, by the first of them. Raises DataError where they are
    not of the kind that the objective is trained on."""
    examples = KINDS[kind]
    if data.format not in ("auto", *examples.formats):
        raise DataError(
            f"data.format is {data.format!r}, but the objective is trained on {examples.noun}",
            hint="leave it out, or choose another training.objective; docs/objectives.md has the"
            " data of each",
        )
    return examples.formatter(first, tokenizer, data)


def collated(
    kind: DataKind,
    examples: Rows,
    indices: Sequence[int] | np.ndarray,
    pad_token_id: int,
    data: DataConfig,
) -> MicroBatch:
    """The micro-batch of these examples, by their numbers."""
    if data.padding_free:
        return pack(examples, indices)
    return KINDS[kind].collate(examples, indices, pad_token_id, data.pad_to_multiple_of)
