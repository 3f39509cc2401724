"""Preferences: an answer that was chosen and one that was rejected, for the same prompt.

Token ids and labels equal those of TRL's DPOTrainer (1.16): all answers of a record are tokenised
together with the prompt and begin where one of them parts from the prompt alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetero_framework.config import DataConfig
from hetero_framework.config.objectives import ROWS, DataKind
from hetero_framework.config.strict_json import json_type
from hetero_framework.data.batches import MicroBatch, collate
from hetero_framework.data.conversations import CONVERSATION_FIELDS
from hetero_framework.data.examples import Examples
from hetero_framework.data.formats import Formatter, Tokens, string_field
from hetero_framework.data.sources import Record
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFERENCE: Mapping[DataKind, tuple[str, ...]] = {
    "pairs": ("ref_chosen_logps", "ref_rejected_logps"),
    "ratings": ("ref_logps",),
    "mismatched": ("ref_logps", "ref_KL_logps"),
}
"""Inputs of the last stage: log-probabilities of an example's rows by the reference."""
MARGIN = "margin"
_HINT = "they need chosen and rejected, as texts or messages, and a prompt unless both begin alike"


@dataclass(frozen=True)
class AnswerRows:
    """Of `kind`, with R rows each: example i is rows R i (of a pair the chosen one) and those up to
    R i + R. `reference` are the REFERENCE of each, float32 [examples, R]."""

    rows: Examples
    kind: DataKind = "pairs"
    reference: np.ndarray | None = None

    @property
    def each(self) -> int:
        """Rows of an example."""
        return ROWS[self.kind]

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
        return self.rows.lengths.reshape(-1, self.each).max(axis=1)

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
    """As `collate`, the first row of each example, then their second ones, in the same order; for
    rated answers with a column "desirable", 0 or 1, for compared ones "margin", if they have it."""
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

    def rows(self, records: list[Record]) -> list[list[Tokens]]:
        """The chosen and the rejected row of each record, not yet truncated."""
        return [self._pair(record) for record in records]

    def _pair(self, record: Record) -> list[Tokens]:
        return self._behind_prompt(with_prompt(record), "chosen", "rejected")

    def _behind_prompt(self, record: Record, *names: str) -> list[Tokens]:
        """The prompt with each of the answers under these names."""
        self._use(record, "prompt", *names, *CONVERSATION_FIELDS)
        if isinstance(record.fields.get("prompt"), list):
            prompt = self._conversation(record, "prompt")
            begun = self.chat.ids(prompt, generation_prompt=True)
            answers = [self._conversation(record, name, system=False) for name in names]
            whole = [
                self.chat.ids(replace(prompt, messages=prompt.messages + answer.messages))
                for answer in answers
            ]
        else:
            texts = [string_field(record, name) for name in ("prompt", *names)]
            whole_texts = [texts[0] + self._with_eos(answer) for answer in texts[1:]]
            begun, *whole = self._tokenize([texts[0], *whole_texts])
        same = min(_common(begun, ids) for ids in whole)
        self.changed_prompts += same < len(begun)
        return [(ids, [False] * same + [True] * (len(ids) - same)) for ids in whole]


class ComparisonFormatter(PairFormatter):
    """Tokenises pairs as TRL's RewardTrainer (1.16) does: all of both answers counts. A pair that
    has one longer than max_length is left out."""

    keeps_whole = True

    def __init__(
        self, first: Record, tokenizer: PreTrainedTokenizerBase, options: DataConfig
    ) -> None:
        super().__init__("preference", tokenizer, options)
        self._has_margin = first.fields.get(MARGIN) is not None

    def _pair(self, record: Record) -> list[Tokens]:
        pair, names = with_prompt(record), ("chosen", "rejected")
        plain = {name: value for name, value in pair.fields.items() if name != MARGIN}
        if record.fields.get("prompt") is not None:
            rows = self._behind_prompt(Record(record.where, plain), *names)
            return [(ids, [True] * len(ids)) for ids, _ in rows]
        record = Record(record.where, {**plain, **{n: record.fields[n] for n in names}})
        self._use(record, "prompt", *names, *CONVERSATION_FIELDS)
        if isinstance(record.fields["chosen"], list):
            whole = [self.chat.ids(self._conversation(record, name)) for name in names]
        else:
            whole = self._tokenize([self._with_eos(string_field(record, n)) for n in names])
        return [(ids, [True] * len(ids)) for ids in whole]

    def targets(self, records: list[Record]) -> list[Sequence[float]]:
        """The margin of each, if they have one."""
        for record in records:
            margin = record.fields.get(MARGIN)
            is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
            if is_number != self._has_margin or (margin is not None and not is_number):
                raise DataError(
                    f"{record.where}: margin must be a number, found {json_type(margin)}",
                    hint="give one for each pair, or for none",
                )
        return [(float(r.fields[MARGIN]),) if self._has_margin else () for r in records]

    def teaches(self, rows: list[Tokens]) -> bool:
        return all(ids for ids, _ in rows)


def with_prompt(record: Record) -> Record:
    """A pair with the prompt that it has or implies. Raises DataError for one without answers."""
    fields = {name: value for name, value in record.fields.items() if value is not None}
    for name in ("chosen", "rejected"):
        if name not in fields:
            shown = ", ".join(fields) or "none"
            raise DataError(
                f"{record.where}: no {name} answer among its fields: {shown}", hint=_HINT
            )
    if "prompt" not in fields:
        fields |= _split(fields["chosen"], fields["rejected"])
    return Record(record.where, fields)


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _split(chosen: Any, rejected: Any) -> dict[str, Any]:
    """The prompt that two answers begin with, and the rest of each, as TRL finds it."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, (str, list)):
        return {"prompt": ""}  # refused where they are read
    index = 0
    for index in range(min(len(chosen), len(rejected))):
        if chosen[index] != rejected[index]:
            if chosen[index - 1] == " ":  # part of the answer's first token
                index -= 1
            break
    return {"prompt": chosen[:index], "chosen": chosen[index:], "rejected": rejected[index:]}
