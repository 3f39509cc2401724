"""Answers to prompts with pictures, as TRL's DPOTrainer and KTOTrainer (1.16) read them.

The pictures of a prompt are shown with each row that has it: a pair's chosen and rejected one, and
the one in which a rated answer's prompt is put before another answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetero_framework.config import DataConfig, TrainingConfig
from hetero_framework.data.batches import MicroBatch
from hetero_framework.data.examples import Examples
from hetero_framework.data.formats import Tokens
from hetero_framework.data.kinds import ExampleKind
from hetero_framework.data.sources import Record
from hetero_framework.extras.preferences.pairs import AnswerRows, PairFormatter, collate_answers
from hetero_framework.extras.preferences.preferences import Preferences, Ratings
from hetero_framework.extras.preferences.ratings import (
    RATINGS,
    RatingFormatter,
    balance,
    with_neighbours,
)
from hetero_framework.extras.vision.pictured_data import (
    COLUMNS,
    PicturedRows,
    PictureFormatter,
    counted,
    with_pictures,
)
from hetero_framework.extras.vision.pictures import PictureStore, pictures_of

# The objectives are those of texts.
__all__ = ["PICTURED_MISMATCHED", "PICTURED_PAIRS", "PICTURED_RATINGS", "Preferences", "Ratings"]


class PicturedPairFormatter(PictureFormatter, PairFormatter):
    """Tokenises pairs with pictures."""

    def told(self, first: Record) -> str:
        return "preference"

    def made(self, record: Record) -> list[Tokens]:
        return self._pair(record)

    def _behind_prompt(self, record: Record, *names: str) -> list[Tokens]:
        asked, *answers = self.apart(record, *names)
        return [([*asked, *ids], [False] * len(asked) + [True] * len(ids)) for ids in answers]


class PicturedRatingFormatter(PicturedPairFormatter, RatingFormatter):
    """Tokenises rated answers with pictures; the label is the first target."""

    made = RatingFormatter.made

    def targets(self, records: list[Record]) -> list[Sequence[float]]:
        labels, shown = RatingFormatter.targets(self, records), super().targets(records)
        return [(*label, *numbers) for label, numbers in zip(labels, shown, strict=True)]

    def beside(self, targets: Sequence[float]) -> Any:
        first, count = map(int, targets[1:])
        return tuple(map(self._pictures.digest, range(first, first + count)))


class PicturedMismatchFormatter(PicturedRatingFormatter):
    """Tokenises them for `with_neighbours`."""

    alone = True


@dataclass(frozen=True)
class PicturedAnswers(AnswerRows):
    """Examples whose rows have pictures."""

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
    if training.data_kind == "pictured-mismatched":
        examples = with_neighbours(examples, data, training).rows
    return PicturedAnswers(with_pictures(examples, data, training, pictures), training.data_kind)


def collate_pictured(
    answers: PicturedAnswers,
    indices: Sequence[int] | np.ndarray,
    pad_token_id: int,
    multiple: int | None,
) -> MicroBatch:
    """`collate_answers`, and what the processor makes of the pictures of all rows."""
    batch = collate_answers(answers, indices, pad_token_id, multiple)
    return batch | answers.rows.pictures.inputs(answers.shown(indices), batch)


def _remarks(answers: PicturedAnswers, training: TrainingConfig) -> Iterator[str]:
    yield from counted(answers.rows, training)
    if answers.rows.targets is not None:
        yield from balance(answers, training)


PICTURED_PAIRS = ExampleKind(
    *("pairs with pictures", ("preference",), PicturedPairFormatter, _kept, collate_pictured),
    needs=(COLUMNS, ("chosen",), ("rejected",)),
    beside=pictures_of,
    remarks=_remarks,
)
PICTURED_RATINGS = replace(
    RATINGS,
    noun="rated answers with pictures",
    formatter=PicturedRatingFormatter,
    kept=_kept,
    collate=collate_pictured,
    needs=(COLUMNS, *RATINGS.needs),
    beside=pictures_of,
    remarks=_remarks,
)
PICTURED_MISMATCHED = replace(PICTURED_RATINGS, formatter=PicturedMismatchFormatter)
