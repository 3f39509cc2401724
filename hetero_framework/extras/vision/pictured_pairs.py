"""Pairs of answers to prompts with pictures, as TRL's DPOTrainer (1.16) reads them.

The pictures of a prompt are shown twice: a pair's chosen and rejected row each have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_framework.config import DataConfig, TrainingConfig
from hetero_framework.data.batches import MicroBatch
from hetero_framework.data.examples import Examples
from hetero_framework.data.formats import Tokens
from hetero_framework.data.kinds import ExampleKind
from hetero_framework.data.sources import Record
from hetero_framework.extras.preferences.pairs import (
    AnswerRows,
    PairFormatter,
    collate_answers,
    with_prompt,
)
from hetero_framework.extras.preferences.preferences import Preferences
from hetero_framework.extras.vision.pictured_data import (
    COLUMNS,
    PicturedRows,
    PictureFormatter,
    counted,
    with_pictures,
)
from hetero_framework.extras.vision.pictures import PictureStore, pictures_of

__all__ = ["PICTURED_PAIRS", "Preferences"]  # the objective is that of pairs of texts


class PicturedPairFormatter(PictureFormatter, PairFormatter):
    """Tokenises pairs with pictures."""

    def told(self, first: Record) -> str:
        return "preference"

    def made(self, record: Record) -> list[Tokens]:
        asked, *answers = self.apart(with_prompt(record), *self.answers)
        return [([*asked, *ids], [False] * len(asked) + [True] * len(ids)) for ids in answers]


@dataclass(frozen=True)
class PicturedAnswers(AnswerRows):
    """Pairs whose rows have pictures."""

    rows: PicturedRows

    def shown(self, indices: Sequence[int] | np.ndarray) -> list[range]:
        """The numbers of the pictures of each row of a micro-batch."""
        return [self.rows.numbers(int(index)) for index in indices] * self.each

    def most_seen(self, count: int) -> np.ndarray:
        """The `count` pairs with the most tokens of pictures."""
        return self.rows.most_seen(count)

    def soon(self, batches: Sequence[np.ndarray]) -> None:
        """Prepare the pictures of these micro-batches ahead of time, and no others."""
        self.rows.pictures.soon([*map(self.shown, batches)])

    def close(self) -> None:
        """Prepare no more."""
        self.rows.close()


def _kept(
    examples: Examples, data: DataConfig, training: TrainingConfig, pictures: PictureStore
) -> PicturedAnswers:
    return PicturedAnswers(with_pictures(examples, data, training, pictures), training.data_kind)


def collate_pictured(
    pairs: PicturedAnswers,
    indices: Sequence[int] | np.ndarray,
    pad_token_id: int,
    multiple: int | None,
) -> MicroBatch:
    """`collate_answers`, and what the processor makes of the pictures of all rows."""
    batch = collate_answers(pairs, indices, pad_token_id, multiple)
    return batch | pairs.rows.pictures.inputs(pairs.shown(indices), batch)


def _remarks(pairs: PicturedAnswers, training: TrainingConfig) -> Iterator[str]:
    return counted(pairs.rows, training)


PICTURED_PAIRS = ExampleKind(
    *("pairs with pictures", ("preference",), PicturedPairFormatter, _kept, collate_pictured),
    needs=(COLUMNS, ("chosen",), ("rejected",)),
    beside=pictures_of,
    remarks=_remarks,
)
