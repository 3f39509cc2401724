"""Preferences: an answer that was chosen and one that was rejected, for the same prompt.

Token ids and labels equal those of TRL's DPOTrainer (1.16): both answers are tokenised together
with the prompt and begin where one of them parts from the prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from hetero_framework.data.batches import MicroBatch, collate
from hetero_framework.data.conversations import CONVERSATION_FIELDS
from hetero_framework.data.examples import Examples
from hetero_framework.data.formats import Formatter, Tokens, string_field
from hetero_framework.data.sources import Record
from hetero_framework.errors import DataError

REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
"""Inputs of the last stage: the answers' log-probabilities by the reference, one for each pair."""
_HINT = "they need chosen and rejected, as texts or messages, and a prompt unless both begin alike"


@dataclass(frozen=True)
class Pairs:
    """Pair i is rows 2 i (chosen) and 2 i + 1 (rejected) of `rows`. `reference` are the REFERENCE
    of each, float32 [pairs, 2]."""

    rows: Examples
    reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The chosen one of a pair: token ids and labels."""
        return self.rows[2 * index]

    @property
    def tokens(self) -> int:
        return self.rows.tokens

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longer one of each pair."""
        return self.rows.lengths.reshape(-1, 2).max(axis=1)

    @property
    def longest(self) -> int:
        return self.rows.longest

    @property
    def fingerprint(self) -> str:
        return self.rows.fingerprint


def collate_pairs(
    pairs: Pairs, indices: Sequence[int] | np.ndarray, pad_token_id: int, multiple: int | None
) -> MicroBatch:
    """As `collate`, first the chosen ones, then the rejected ones, in the same order."""
    numbers = np.asarray(indices, np.int64)
    rows = np.concatenate([2 * numbers, 2 * numbers + 1])
    batch = collate(pairs.rows, rows, pad_token_id, multiple)
    if pairs.reference is not None:
        for name, column in zip(REFERENCE, pairs.reference[numbers].T, strict=True):
            batch[name] = torch.from_numpy(np.ascontiguousarray(column))
    return batch


class PairFormatter(Formatter):
    """Tokenises pairs."""

    def rows(self, records: list[Record]) -> list[list[Tokens]]:
        """The chosen and the rejected row of each record, not yet truncated."""
        return [self._pair(record) for record in records]

    def _pair(self, record: Record) -> list[Tokens]:
        fields = {name: value for name, value in record.fields.items() if value is not None}
        for name in ("chosen", "rejected"):
            if name not in fields:
                shown = ", ".join(fields) or "none"
                raise DataError(
                    f"{record.where}: no {name} answer among its fields: {shown}", hint=_HINT
                )
        if "prompt" not in fields:
            fields |= _split(fields["chosen"], fields["rejected"])
        record = Record(record.where, fields)
        self._use(record, "prompt", "chosen", "rejected", *CONVERSATION_FIELDS)
        if isinstance(fields["prompt"], list):
            prompt = self._conversation(record, "prompt")
            begun = self.chat.ids(prompt, generation_prompt=True)
            answers = [
                self._conversation(record, name, system=False) for name in ("chosen", "rejected")
            ]
            whole = [
                self.chat.ids(replace(prompt, messages=prompt.messages + answer.messages))
                for answer in answers
            ]
        else:
            texts = [string_field(record, name) for name in ("prompt", "chosen", "rejected")]
            whole_texts = [texts[0] + self._with_eos(answer) for answer in texts[1:]]
            begun, *whole = self._tokenize([texts[0], *whole_texts])
        same = min(_common(begun, ids) for ids in whole)
        self.changed_prompts += same < len(begun)
        return [(ids, [False] * same + [True] * (len(ids) - same)) for ids in whole]


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
