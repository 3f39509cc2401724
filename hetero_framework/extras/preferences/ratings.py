"""Rated answers: one answer to a prompt, and whether it is desirable.

Examples, their order and token ids equal those of TRL's KTOTrainer (1.16). For the estimate of how
far the model is from the reference, each prompt is also put before another answer of its
micro-batch: the answer of the example before it, and for the first example the last answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero_framework.config import DataConfig, TrainingConfig
from hetero_framework.config.strict_json import json_type
from hetero_framework.data.conversations import as_messages, check_media
from hetero_framework.data.examples import Examples
from hetero_framework.data.formats import Formatter, Tokens, columns_hint, parts
from hetero_framework.data.kinds import ExampleKind
from hetero_framework.data.sources import Numeric, Record, listed
from hetero_framework.errors import DataError
from hetero_framework.extras.preferences.pairs import (
    PAIR,
    AnswerRows,
    PairFormatter,
    answer_rows,
    collate_answers,
    with_prompt,
)
from hetero_framework.extras.preferences.settings import PreferenceSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AT_ONCE = 1000  # pairs that TRL takes apart in one call: first all chosen answers
_HINT = "rated answers need prompt, completion and label; pairs of answers chosen and rejected"


def unpaired(records: Iterator[Record]) -> Iterator[Record]:
    """The records, where each pair becomes two examples, if the first record is a pair."""
    first = next(records, None)
    if first is None:
        return
    records = chain([first], records)
    if not {"chosen", "rejected"} <= first.fields.keys():
        yield from records
        return
    while pairs := [with_prompt(record) for record in islice(records, _AT_ONCE)]:
        for name in ("chosen", "rejected"):
            for pair in pairs:
                if pair.fields.get("completion") is not None:
                    raise DataError(
                        f"{pair.where}: holds a pair of answers and a completion", hint=_HINT
                    )
                fields = {**pair.fields, "completion": pair.fields[name], "label": name == "chosen"}
                repeated = [part for part, is_repeated in parts(pair, PAIR) if is_repeated]
                for gone in ("chosen", "rejected", *repeated):
                    del fields[gone]
                yield Record(pair.where, fields)


class RatingFormatter(PairFormatter):
    """Tokenises rated answers, a row each."""

    alone = False
    """Whether an example also has a row of the answer alone, to be put behind other prompts."""

    def __init__(
        self, first: object, tokenizer: PreTrainedTokenizerBase, options: DataConfig
    ) -> None:
        super().__init__("preference", tokenizer, options)
        self.answers = ("completion",)
        self._rated: set[int] = set()
        if options.truncation_mode != "keep_start":
            raise DataError(
                f"data.truncation_mode is {options.truncation_mode!r}, but rated answers keep their"
                " start",
                hint="leave it out",
            )

    def rows(self, records: list[Record]) -> list[list[Tokens]]:
        return [*map(self.made, records)]

    def made(self, record: Record) -> list[Tokens]:
        """The rows of one example, not yet truncated."""
        record = as_messages(record, "completion")
        for name in ("prompt", "completion"):
            if record.fields.get(name) is None:
                shown = listed(record.fields)
                advice = columns_hint(record.fields, ("prompt", "completion", "label"))
                raise DataError(
                    f"{record.where}: no field {name} among its fields: {shown}",
                    hint=f"{_HINT}; {advice}",
                )
        check_media(record.fields, record.where)
        fields = {name: value for name, value in record.fields.items() if name != "label"}
        [(ids, trained)] = self._behind_prompt(Record(record.where, fields), "completion")
        answer = [token for token, is_trained in zip(ids, trained, strict=True) if is_trained]
        return [(ids, trained), (answer, [True] * len(answer))][: 1 + self.alone]

    def targets(self, records: list[Record]) -> list[Sequence[float]]:
        """Whether each answer is desirable, as 1 or 0."""
        for record in records:
            label = record.fields.get("label")
            names = getattr(label, "names", ())  # of classes, which may be in any order
            if label not in (True, False) or names:
                found = "there is none" if label is None else f"found {json_type(label)}"
                found = f"found one of the classes {listed(names)}" if names else found
                raise DataError(
                    f"{record.where}: label must be true or false, {found}",
                    hint="it says whether the completion is desirable",
                )
        return [(float(record.fields["label"]),) for record in records]

    def judge(self, record: Record, rows: list[Tokens], targets: Sequence[float]) -> None:
        Formatter.judge(self, record, rows, targets)
        row = tuple(rows[0][0]), sum(rows[0][1]), self.beside(targets)
        good = bool(targets[0])
        self._rated.add(hash((row, good)))
        if hash((row, not good)) in self._rated:
            for _ in range(2):
                self.idle.add("the same answer is rated desirable and undesirable", record.where)

    def beside(self, targets: Sequence[float]) -> Any:
        """What an example with these targets asks about, apart from its tokens."""

    def teaches(self, rows: list[Tokens]) -> bool:
        return super().teaches(rows[:1])


class MismatchFormatter(RatingFormatter):
    """Tokenises rated answers for `with_neighbours`."""

    alone = True


def with_neighbours(examples: Examples, data: DataConfig, training: TrainingConfig) -> AnswerRows:
    """Build KTO's "mismatched" examples, each an answer and the same prompt with another answer of
    its micro-batch; cut to max_length."""
    most, size = data.max_length, training.per_device_train_batch_size
    offsets, count = examples.offsets, len(examples) // 2
    ids, trained, ends = [], [], [0]
    for number in range(count):
        other = number - 1 if number % size else min(number + size, count) - 1
        row, answer = (slice(*offsets[k : k + 2]) for k in (2 * number, 2 * other + 1))
        prompt = examples.ids[row][~examples.trained[row]]
        moved = np.concatenate([prompt, examples.ids[answer]])[:most]
        ids += [examples.ids[row], moved]
        trained += [examples.trained[row], np.arange(len(moved)) >= len(prompt)]
        ends += [ends[-1] + len(ids[-2]), ends[-1] + len(ids[-2]) + len(moved)]
    joined = np.concatenate(ids), np.concatenate(trained), np.array(ends, np.int64)
    return AnswerRows(Examples(*joined, examples.targets), training.data_kind)


def balance(answers: AnswerRows, training: TrainingConfig) -> Iterator[str]:
    """Lines on the share of desirable answers, with the weights that TRL recommends for it."""
    assert answers.rows.targets is not None
    good = int(answers.rows.targets.sum())
    bad, line = len(answers) - good, f"train: {good:,} of {len(answers):,} answers are desirable"
    if not (good and bad):
        yield f"warning: {line}; KTO learns from both kinds"
        return
    own = PreferenceSettings.of(training)
    ratio = good * own.desirable_weight / (bad * own.undesirable_weight or 1e-9)
    hint = "; weights (desirable_weight, undesirable_weight) that make it 1 to 1.33 are recommended"
    fits = good == bad or 0.995 <= ratio <= 1.335
    yield line if fits else f"warning: {line}, {ratio:.2f} to 1 by their weights{hint}"


RATINGS = ExampleKind(
    *("rated answers", ("preference",), RatingFormatter, answer_rows, collate_answers, unpaired),
    needs=(("prompt", "chosen"), ("completion", "chosen"), ("label", "rejected")),
    numeric=Numeric(("label",)),
    remarks=balance,
)
MISMATCHED = replace(RATINGS, formatter=MismatchFormatter, kept=with_neighbours)
