"""Preferences: a chosen and a rejected answer to the same prompt.

Token ids and labels equal those of TRL's DPOTrainer (1.16): each answer of a record is tokenised
together with the prompt. All answers begin at the first token where one of these rows differs from
the prompt alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetero_framework.config import DataConfig, TrainingConfig
from hetero_framework.config.objectives import rows_of
from hetero_framework.config.problems import shown
from hetero_framework.data.batches import MicroBatch, collate
from hetero_framework.data.conversations import CONVERSATION_FIELDS, as_messages, texts_of
from hetero_framework.data.examples import LARGEST, Examples
from hetero_framework.data.formats import Formatter, Tokens, columns_hint, common, string_field
from hetero_framework.data.kinds import ExampleKind
from hetero_framework.data.sources import Record, listed
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFERENCE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("pairs", "pictured-pairs"), ("ref_chosen_logps", "ref_rejected_logps")),
    **dict.fromkeys(("ratings", "pictured-ratings"), ("ref_logps",)),
    **dict.fromkeys(("mismatched", "pictured-mismatched"), ("ref_logps", "ref_KL_logps")),
}
"""Inputs of the last stage: log-probabilities of an example's rows by the reference."""
MARGIN = "margin"
PAIR = ("prompt", "chosen", "rejected")
_HINT = "they need chosen and rejected, as texts or messages, and a prompt unless both begin alike"


@dataclass(frozen=True)
class AnswerRows:
    """Examples of `kind`, with R rows each. Example i has the rows from R i (a pair's chosen row)
    up to R i + R. `reference` holds the REFERENCE of each, float32 [examples, R]."""

    rows: Examples
    kind: str = "pairs"
    reference: np.ndarray | None = None

    @property
    def each(self) -> int:
        """The number of rows of an example."""
        return rows_of(self.kind)

    def __len__(self) -> int:
        return len(self.rows) // self.each

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The first row of an example: token ids and labels."""
        return self.rows[self.each * index]

    @property
    def tokens(self) -> int:
        return self.rows.tokens

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longest row of each example."""
        longest: np.ndarray = self.rows.lengths.reshape(-1, self.each).max(axis=1)
        return longest

    @property
    def longest(self) -> int:
        return self.rows.longest

    @property
    def fingerprint(self) -> str:
        return self.rows.fingerprint


def collate_answers(
    answers: AnswerRows,
    indices: Sequence[int] | np.ndarray,
    pad_token_id: int,
    multiple: int | None,
) -> MicroBatch:
    """`collate` of the first row of each example, then of the second rows in the same order. Rated
    answers get a column "desirable", 0 or 1; compared answers get "margin", if they have it."""
    numbers = np.asarray(indices, np.int64)
    rows = np.concatenate([answers.each * numbers + row for row in range(answers.each)])
    batch = collate(answers.rows, rows, pad_token_id, multiple)
    columns = {}
    if answers.rows.targets is not None:
        name = "margin" if answers.kind == "compared" else "desirable"
        columns[name] = answers.rows.targets[numbers, 0]
    if answers.reference is not None:
        columns |= zip(REFERENCE[answers.kind], answers.reference[numbers].T, strict=True)
    for name, column in columns.items():
        batch[name] = torch.from_numpy(np.ascontiguousarray(column))
    return batch


class PairFormatter(Formatter):
    """Tokenises pairs."""

    weighs = False

    def rows(self, records: list[Record]) -> list[list[Tokens]]:
        """The chosen and the rejected row of each record, not yet truncated."""
        return [self._pair(record) for record in records]

    def judge(self, record: Record, rows: list[Tokens], targets: Sequence[float]) -> None:
        if rows[0] == rows[1]:
            self.idle.add("chosen and rejected are the same tokens", record.where)
        else:
            super().judge(record, rows, targets)

    def _pair(self, record: Record) -> list[Tokens]:
        return self._behind_prompt(with_prompt(record), *self.answers)

    def _behind_prompt(self, record: Record, *names: str) -> list[Tokens]:
        """The rows of the prompt with each of the answers under these names."""
        if self._are_messages(record, names[0]):
            self.use(record, "prompt", *names, *CONVERSATION_FIELDS)
            prompt, dialogues = self._dialogues(record, *names)
            begun = self.chat.ids(prompt, generation_prompt=True)
            whole = [self.chat.ids(dialogue) for dialogue in dialogues]
        else:
            self.use(record, "prompt", *names)
            *answers, text = (string_field(record, name) for name in (*names, "prompt"))
            self.note_prompt(text, answers, record.where)
            whole_texts = [text + self._with_eos(answer) for answer in answers]
            begun, *whole = self._tokenize([text, *whole_texts])
        same = min(common(begun, ids) for ids in whole)
        self.changed_prompts += same < len(begun)
        return [(ids, [False] * same + [True] * (len(ids) - same)) for ids in whole]


class ComparisonFormatter(PairFormatter):
    """Tokenises pairs as TRL's RewardTrainer (1.16) does: all tokens of both rows count. A pair
    with a row longer than max_length is left out."""

    keeps_whole = True

    def __init__(
        self, first: Record, tokenizer: PreTrainedTokenizerBase, options: DataConfig
    ) -> None:
        super().__init__("preference", tokenizer, options)
        self._has_margin = first.fields.get(MARGIN) is not None

    def _pair(self, record: Record) -> list[Tokens]:
        pair = _given(record)
        pair.fields.pop(MARGIN, None)
        if pair.fields.get("prompt"):
            rows = [ids for ids, _ in self._behind_prompt(pair, *self.answers)]
        elif self._are_messages(pair, "chosen"):
            self.use(pair, *PAIR, *CONVERSATION_FIELDS)
            rows = [self.chat.ids(self._conversation(pair, name)) for name in self.answers]
        else:
            self.use(pair, *PAIR)
            rows = self._tokenize([self._with_eos(string_field(pair, n)) for n in self.answers])
        return [(ids, [True] * len(ids)) for ids in rows]

    def targets(self, records: list[Record]) -> list[Sequence[float]]:
        """The margin of each pair, if pairs have margins."""
        for record in records:
            margin: Any = record.fields.get(MARGIN)
            is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
            fits = is_number and abs(margin) <= LARGEST if self._has_margin else margin is None
            if not fits:
                wanted = "a finite number" if self._has_margin else "left out, as in the first pair"
                raise DataError(
                    f"{record.where}: margin must be {wanted}, found {shown(margin)}",
                    hint="give one for each pair, or for none",
                )
        return [(float(r.fields[MARGIN]),) if self._has_margin else () for r in records]

    def teaches(self, rows: list[Tokens]) -> bool:
        return all(ids for ids, _ in rows)


def with_prompt(record: Record) -> Record:
    """A pair with the prompt that it has or implies. Raises DataError for a pair without answers,
    or whose prompt would be lost."""
    pair = _given(record)
    fields = pair.fields
    texts = [fields[name] for name in PAIR[1:] if isinstance(fields[name], str)]
    if fields.get("prompt", []) == [] and len(texts) == 2:
        fields |= _split(*texts)
    if fields.get("prompt"):
        return pair
    others = {name: " ".join(texts_of(fields[name])).split() for name in fields.keys() - {*PAIR}}
    lost = sorted(name for name, words in others.items() if len(words) > 1)
    if isinstance(fields["chosen"], list) or (lost and record.fields.get("prompt") is None):
        raise DataError(
            f"{record.where}: there is no prompt: chosen and rejected begin differently"
            + f", and the fields {listed(lost)} are not learned from" * bool(lost),
            hint=columns_hint(lost, ["prompt"]),
        )
    return pair


def _given(record: Record) -> Record:
    """A pair without nulls; prompt and answers are texts, or all are messages."""
    fields = {name: value for name, value in record.fields.items() if value is not None}
    for name in ("chosen", "rejected"):
        if name not in fields:
            advice = columns_hint(fields, ("prompt", "chosen", "rejected"), ("chosen", "rejected"))
            raise DataError(
                f"{record.where}: no {name} answer among its fields: {listed(fields)}",
                hint=f"{_HINT}; {advice}",
            )
    return as_messages(Record(record.where, fields), "chosen", "rejected")


def _split(chosen: str, rejected: str) -> dict[str, str]:
    """The prompt that two texts begin with, and the rest of each. They are split as in TRL, except
    that the first letters of a word are no prompt."""
    most = max(min(len(chosen), len(rejected)) - 1, 0)
    index = next((k for k in range(most) if chosen[k] != rejected[k]), most)
    if not re.search(r"\S\s", chosen[:index]):
        index = 0
    elif chosen[index] != rejected[index] and chosen[index - 1] == " ":
        index -= 1  # part of the answer's first token
    return {"prompt": chosen[:index], "chosen": chosen[index:], "rejected": rejected[index:]}


def answer_rows(examples: Examples, data: DataConfig, training: TrainingConfig) -> AnswerRows:
    """Tokenised rows as examples of the objective's kind."""
    return AnswerRows(examples, training.data_kind)


def _formatter(
    first: Record, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> PairFormatter:
    return PairFormatter("preference", tokenizer, data)


PAIRS = ExampleKind(
    *("pairs", ("preference",), _formatter, answer_rows, collate_answers),
    needs=(("chosen",), ("rejected",)),
)
