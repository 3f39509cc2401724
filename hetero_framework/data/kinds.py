"""The kinds of examples that objectives are trained on: how they are read, kept and put together.

`config/objectives.py` has their names, and the rows that an example of each makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero_framework.config import DataConfig, TrainingConfig
from hetero_framework.config.objectives import NEEDS, DataKind
from hetero_framework.data.batches import MicroBatch, collate, pack
from hetero_framework.data.examples import Examples, Rows
from hetero_framework.data.formats import Formatter, detect_format
from hetero_framework.data.sources import Record
from hetero_framework.errors import DataError
from hetero_framework.extras.classification.labelled import (
    WORDS,
    LabelledTexts,
    LabelledWords,
    TextFormatter,
    WordFormatter,
    collate_texts,
)
from hetero_framework.extras.classification.labels import OF_TEXTS, OF_TOKENS, Labels
from hetero_framework.extras.preferences.pairs import (
    AnswerRows,
    ComparisonFormatter,
    PairFormatter,
    collate_answers,
)
from hetero_framework.extras.preferences.ratings import RatingFormatter, unpaired, with_neighbours

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Collate = Callable[[Any, Sequence[int] | np.ndarray, int, int | None], MicroBatch]


@dataclass(frozen=True)
class ExampleKind:
    """`formats` are the values of data.format beside "auto", `formatter` reads records, `kept`
    makes examples of tokenised rows, and `collate` a micro-batch of those with some numbers, padded
    with a token to a multiple. `records` makes those of this kind of the records of a file.
    `label_fields` hold labels, which `formatter` and `kept` are also told of. A record has one
    field of each group of `needs`."""

    noun: str
    formats: tuple[str, ...]
    formatter: Callable[..., Formatter]
    kept: Callable[..., Rows]
    collate: Collate
    records: Callable[[Iterator[Record]], Iterator[Record]] = iter
    label_fields: tuple[str, ...] = ()
    needs: tuple[tuple[str, ...], ...] = ()


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

    return ExampleKind(
        *("rated answers", ("preference",), formatter, kept, collate_answers, unpaired),
        needs=(("prompt", "chosen"), ("completion", "chosen"), ("label", "rejected")),
    )


def _labelled_formatter(
    first: Record, tokenizer: PreTrainedTokenizerBase, data: DataConfig, labels: Labels
) -> Formatter:
    is_chat = data.format == "auto" and first.fields.get("messages") is not None
    name = "messages" if is_chat or data.format == "messages" else "text"
    return TextFormatter(name, tokenizer, data, labels)


def _word_formatter(
    first: Record, tokenizer: PreTrainedTokenizerBase, data: DataConfig, labels: Labels
) -> Formatter:
    return WordFormatter("tokens", tokenizer, data, labels)


def _labelled(
    examples: Examples, data: DataConfig, training: TrainingConfig, labels: Labels
) -> LabelledTexts:
    parts = examples.ids, examples.trained, examples.offsets, examples.targets
    return LabelledTexts(*parts, is_class=labels.problem == "single_label_classification")


def _tagged(
    examples: Examples, data: DataConfig, training: TrainingConfig, labels: Labels
) -> LabelledWords:
    return LabelledWords(examples, "tagged")


_PAIR = (("chosen",), ("rejected",))
_SFT_FORMATS = ("text", "prompt_completion", "messages", "alpaca")
KINDS: dict[DataKind, ExampleKind] = {
    "text": ExampleKind("examples", _SFT_FORMATS, _text_formatter, _unchanged, collate),
    "pairs": ExampleKind(
        *("pairs", ("preference",), _pair_formatter, _answers, collate_answers), needs=_PAIR
    ),
    "ratings": _rated("ratings", _answers),
    "mismatched": _rated("mismatched", _mismatched),
    "compared": ExampleKind(
        *("pairs", ("preference",), ComparisonFormatter, _answers, collate_answers), needs=_PAIR
    ),
    "labelled": ExampleKind(
        *("labelled texts", ("text", "messages"), _labelled_formatter, _labelled, collate_texts),
        label_fields=OF_TEXTS,
        needs=(("text", "messages"), OF_TEXTS),
    ),
    "tagged": ExampleKind(
        *("texts of labelled words", (), _word_formatter, _tagged, collate),
        label_fields=OF_TOKENS,
        needs=((WORDS,), OF_TOKENS),
    ),
}


def objectives_of(first: Record) -> list[str]:
    """The objectives that may be trained on examples with the fields of this one, the likeliest
    first."""
    there = {name for name, value in first.fields.items() if value is not None}

    def suits(kind: DataKind) -> bool:
        if kind in KINDS and (needs := KINDS[kind].needs):
            return all(there.intersection(group) for group in needs)
        with suppress(DataError):
            return kind == "text" and bool(detect_format(first.fields, first.where, "text"))
        return False

    found = [name for name, needs in NEEDS.items() if suits(needs.data)]
    return sorted(found, key=lambda name: NEEDS[name].data == "text")  # it may have other fields


def formatter_for(
    kind: DataKind,
    first: Record,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    labels: Labels | None = None,
) -> Formatter:
    """The formatter of a set of examples, by the first of them; `labels` are those of a kind that
    has some. Raises DataError where they are not of the kind that the objective is trained on."""
    examples = KINDS[kind]
    if data.format not in ("auto", *examples.formats):
        raise DataError(
            f"data.format is {data.format!r}, but the objective is trained on {examples.noun}",
            hint="leave it out, or choose another training.objective; docs/objectives.md has the"
            " data of each",
        )
    return examples.formatter(first, tokenizer, data, *[labels] * bool(examples.label_fields))


def collated(
    kind: DataKind,
    examples: Any,
    indices: Sequence[int] | np.ndarray,
    pad_token_id: int,
    data: DataConfig,
) -> MicroBatch:
    """The micro-batch of these examples, by their numbers."""
    if data.padding_free:
        return pack(examples, indices)
    return KINDS[kind].collate(examples, indices, pad_token_id, data.pad_to_multiple_of)
