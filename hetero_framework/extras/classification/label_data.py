"""Texts and words with labels, for classifiers.

The tokenizer makes the token ids, with its own special tokens and its own truncation. The label of
a word stands at the word's first token, as in transformers' run_ner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetero_framework.config import DataConfig, TrainingConfig
from hetero_framework.data.batches import MicroBatch, collate
from hetero_framework.data.conversations import CONVERSATION_FIELDS
from hetero_framework.data.examples import IGNORE_INDEX, Examples
from hetero_framework.data.formats import (
    Formatter,
    Tokens,
    columns_hint,
    field_of,
    string_field,
)
from hetero_framework.data.kinds import ExampleKind
from hetero_framework.data.sources import Numeric, Record, check_unicode, listed
from hetero_framework.errors import DataError
from hetero_framework.extras.classification.labels import (
    OF_TEXTS,
    OF_TOKENS,
    ClassLabels,
    LabelFields,
    label_of,
)
from hetero_framework.extras.preferences.pairs import (
    MARGIN,
    AnswerRows,
    ComparisonFormatter,
    answer_rows,
    collate_answers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAIR, WORDS = "text_pair", "tokens"
_HINT = "an example has tokens (its words) and as many labels (or tags, ner_tags)"


class TextFormatter(Formatter):
    """Tokenises labelled texts. A token's flag says whether it is in a pair's second text."""

    weighs = False

    def __init__(
        self,
        first: Record,
        tokenizer: PreTrainedTokenizerBase,
        options: DataConfig,
        labels: ClassLabels,
    ) -> None:
        is_chat = options.format == "auto" and first.fields.get("messages") is not None
        name = "messages" if is_chat or options.format == "messages" else "text"
        super().__init__("tokens" if self.label_rows else name, tokenizer, options)
        self._labels = labels
        if options.truncation_mode == "keep_end":
            tokenizer.truncation_side = "left"

    def rows(self, records: list[Record]) -> list[list[Tokens]]:
        names = [label_of(record, OF_TEXTS)[0] for record in records]
        if self.name == "messages":
            found = []
            for record, name in zip(records, names, strict=True):
                self.use(record, "messages", name, *CONVERSATION_FIELDS)
                ids = self.chat.ids(self._conversation(record, "messages"))
                found.append([(ids, [False] * len(ids))])
            return found
        field = self.options.dataset_text_field
        for record, name in zip(records, names, strict=True):
            if field not in record.fields:
                shown, layouts = listed(record.fields), ((field, PAIR, name), (field, name))
                text = f"{record.where}: no field {field}; its fields are {shown}"
                raise DataError(text, hint=columns_hint(record.fields, *layouts))
            self.use(record, field, PAIR, name)
        parts = [[string_field(record, field) for record in records]]
        if any(record.fields.get(PAIR) is not None for record in records):
            parts.append([string_field(record, PAIR) for record in records])
        made = self._cut(*parts)
        # A tokenizer that returns no token_type_ids has one kind of token.
        kinds = made.get("token_type_ids") or [[0] * len(ids) for ids in made["input_ids"]]
        if any(kind > 1 for row in kinds for kind in row):
            raise DataError(
                f"{records[0].where}: the tokenizer makes more than two kinds of tokens, which the"
                " model would not get",
                hint="choose another model",
            )
        both = zip(made["input_ids"], kinds, strict=True)
        return [[(ids, [bool(kind) for kind in row])] for ids, row in both]

    def _cut(self, *texts: Any, **how: Any) -> Any:
        """The tokenizer's result, which the tokenizer itself cuts to max_length."""
        most = self.options.max_length
        made = self.tokenizer(
            *texts, truncation=most is not None, max_length=most, verbose=False, **how
        )
        self.num_cut += sum(bool(encoding.overflowing) for encoding in made.encodings or ())
        return made

    def targets(self, records: list[Record]) -> list[Sequence[float]]:
        given = [(label_of(record, OF_TEXTS)[1], record.where) for record in records]
        return [self._labels.target(label, where) for label, where in given]

    def teaches(self, rows: list[Tokens]) -> bool:
        return bool(rows[0][0])


class WordFormatter(TextFormatter):
    """Tokenises labelled words: a row of tokens, and a row of their labels."""

    label_rows = 1

    def rows(self, records: list[Record]) -> list[list[Tokens]]:
        for record in records:
            name, labels = label_of(record, OF_TOKENS)
            self.use(record, WORDS, name, has_parts=False)
            words: Any = field_of(record, WORDS)
            for field, value in ((WORDS, words), (name, labels)):
                if not isinstance(value, list):
                    raise DataError(f"{record.where}: {field} must be a list", hint=_HINT)
            if len(words) != len(labels):
                raise DataError(
                    f"{record.where}: {len(labels)} {name} for {len(words)} {WORDS}", hint=_HINT
                )
            if not all(isinstance(word, str) for word in words):
                raise DataError(f"{record.where}: {WORDS} must be texts", hint=_HINT)
            check_unicode("".join(words), f"{record.where}: the field {WORDS}")
        if not self.tokenizer.is_fast:
            raise DataError(
                "this tokenizer does not say which word a token is of",
                hint="choose a model with a fast tokenizer (tokenizer.json)",
            )
        try:
            made = self._cut([record.fields[WORDS] for record in records], is_split_into_words=True)
        except AssertionError as error:
            raise DataError(
                f"the tokenizer takes no words: {error}",
                hint='set "add_prefix_space": true in its tokenizer_config.json',
            ) from error
        rows = enumerate(made["input_ids"])
        return [
            [(ids, [False] * len(ids)), self._labels_of(records[k], made.word_ids(k))]
            for k, ids in rows
        ]

    def _labels_of(self, record: Record, words: list[int | None]) -> Tokens:
        _, labels = label_of(record, OF_TOKENS)
        firsts = [
            w is not None and w != before for before, w in zip([None, *words], words, strict=False)
        ]
        classes = [
            label if label == IGNORE_INDEX else self._labels.number(label, record.where)
            for label in labels
        ]
        numbers = [
            classes[word] if first and word is not None else IGNORE_INDEX
            for first, word in zip(firsts, words, strict=True)
        ]
        return numbers, [number != IGNORE_INDEX for number in numbers]

    def targets(self, records: list[Record]) -> list[Sequence[float]]:
        return [()] * len(records)

    def teaches(self, rows: list[Tokens]) -> bool:
        return any(rows[1][1])


@dataclass(frozen=True)
class LabelledTexts(Examples):
    """Texts whose targets are class numbers (`is_class`) or other numbers."""

    is_class: bool = True

    @cached_property
    def has_pairs(self) -> bool:
        """Whether any token is in the second text of a pair."""
        return bool(self.trained.any())

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, and IGNORE_INDEX as the label of each."""
        ids, _ = super().__getitem__(index)
        return ids, np.full_like(ids, IGNORE_INDEX)


@dataclass(frozen=True)
class LabelledWords(AnswerRows):
    """Labelled words. The tokens of example i are row 2 i of `rows`, its labels row 2 i + 1."""

    each = 2

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.rows[2 * index][0], self.rows[2 * index + 1][1]

    @property
    def tokens(self) -> int:
        return self.rows.tokens // 2


def collate_texts(
    examples: LabelledTexts,
    indices: Sequence[int] | np.ndarray,
    pad_token_id: int,
    multiple: int | None,
) -> MicroBatch:
    """`collate` with labels: int64 [B] of classes, else float32 [B] or [B, labels]. Where there are
    pairs of texts, it adds token_type_ids [B, S]."""
    batch = collate(examples, indices, pad_token_id, multiple)
    targets = examples.targets
    assert targets is not None
    labels = torch.from_numpy(np.ascontiguousarray(targets[np.asarray(indices, np.int64)]))
    labels = labels[:, 0] if labels.shape[1] == 1 else labels
    batch["labels"] = labels.long() if examples.is_class else labels
    if examples.has_pairs:
        kinds = torch.zeros_like(batch["input_ids"])
        for row, index in enumerate(indices):
            span = slice(*examples.offsets[int(index) : int(index) + 2])
            kind = torch.from_numpy(examples.trained[span].astype(np.int64))
            kinds[row, : len(kind)] = kind
        batch["token_type_ids"] = kinds
    return batch


def _labelled(
    examples: Examples, data: DataConfig, training: TrainingConfig, labels: ClassLabels
) -> LabelledTexts:
    parts = examples.ids, examples.trained, examples.offsets, examples.targets
    return LabelledTexts(*parts, is_class=labels.problem == "single_label_classification")


COMPARED = ExampleKind(
    *("pairs", ("preference",), ComparisonFormatter, answer_rows, collate_answers),
    needs=(("chosen",), ("rejected",)),
    numeric=Numeric((MARGIN,)),
)
LABELLED = ExampleKind(
    *("labelled texts", ("text", "messages"), TextFormatter, _labelled, collate_texts),
    needs=(("text", "messages"), OF_TEXTS),
    labels=LabelFields(of_tokens=False),
    numeric=Numeric(OF_TEXTS, or_names=True),
)
TAGGED = ExampleKind(
    *("texts of labelled words", (), WordFormatter),
    *(lambda examples, *_: LabelledWords(examples, "tagged"), collate),
    needs=((WORDS,), OF_TOKENS),
    labels=LabelFields(of_tokens=True),
)
