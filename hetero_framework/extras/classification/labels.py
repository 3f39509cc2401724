"""Labels of classifiers: what they are called, how many there are, and which number each has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from hetero_framework.config import Config
from hetero_framework.config.problems import shown
from hetero_framework.data.examples import IGNORE_INDEX, LARGEST
from hetero_framework.data.files.parquet import ClassNumber
from hetero_framework.data.formats import columns_hint
from hetero_framework.data.sources import Record, listed
from hetero_framework.errors import DataError
from hetero_framework.extras.classification.settings import MAX_LABELS, LabelSettings, ProblemType
from hetero_framework.models.cut.tiny import task_of
from hetero_framework.models.files.source import ModelSource

OF_TEXTS, OF_TOKENS = ("label", "labels"), ("labels", "tags", "ner_tags", "label")
"""Fields that may hold labels: the first field that a record has is taken."""
_LAYOUTS = {
    "label": (("text", "text_pair", "label"), ("text", "label"), ("label",)),
    "labels": (("tokens", "labels"), ("labels",)),
}
_UNNAMED = re.compile(r"LABEL_\d+")
_HINT = (
    "a label is a name, a number from 0 on, a list of names or of 0 and 1, or a measure (a decimal"
    " number or a list of them); model.problem_type chooses where several would fit"
)


@dataclass(frozen=True)
class Stated:
    """Facts about the labels before the data are read. None stands for an unknown fact."""

    count: int | None = None
    problem: ProblemType | None = None
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ClassLabels:
    """The names of the labels in the order of their numbers, and the kind of loss."""

    problem: ProblemType
    names: tuple[str, ...]

    def __str__(self) -> str:
        names = [*self.names[:8], *["..."] * (len(self.names) > 8)]
        return f"{len(self.names)} ({', '.join(names)}), {self.problem}"

    def number(self, value: Any, where: str) -> int:
        """The number of a class. Raises DataError for a value that is no class, or from a data
        set with other names of classes."""
        if isinstance(value, ClassNumber) and stated_names(self.names) not in (None, value.names):
            raise DataError(
                f"{where}: its classes are called {_listed(value.names)}, and those of the training"
                f" data or the model {_listed(self.names)}",
                hint="align_labels_with_mapping of `datasets` brings the data set's into the"
                " model's order; model.label_names names the model's",
            )
        if isinstance(value, str) and value in self.names:
            return self.names.index(value)
        if type(value) in (int, bool) and 0 <= value < len(self.names):
            own = {str(value), str(value).lower()}
            known = {*own, "True", "true", "False", "false"} if isinstance(value, bool) else own
            if known.intersection(self.names) and self.names[value] not in own:
                raise DataError(
                    f"{where}: the label {shown(value)} may be a class's number,"
                    f" {_listed(self.names[value : value + 1])}, or the name of another one",
                    hint="give the labels as texts (in .jsonl), or leave model.label_names out",
                )
        if isinstance(value, int) and 0 <= value < len(self.names):
            return int(value)
        raise DataError(
            f"{where}: the label {shown(value)} is none of the {len(self.names)} classes:"
            f" {_listed(self.names)}",
            hint="classes are those of the training data, unless model.label_names or num_labels"
            " says more; " + _HINT,
        )

    def target(self, value: Any, where: str) -> list[float]:
        """The targets of a text: the number of its class, numbers from 0 to 1, one for each
        label, or measures. Raises DataError."""
        if self.problem == "single_label_classification":
            return [float(self.number(value, where))]
        values = value if isinstance(value, (list, tuple)) else [value]
        multi = self.problem == "multi_label_classification"
        if multi and all(isinstance(item, (str, ClassNumber)) for item in values):
            found = {self.number(item, where) for item in values}
            return [float(number in found) for number in range(len(self.names))]
        fits = all(isinstance(item, (int, float)) and abs(item) <= LARGEST for item in values)
        if not fits or (multi and not all(0 <= item <= 1 for item in values)):
            raise DataError(f"{where}: {shown(value)} is no label for {self.problem}", hint=_HINT)
        if len(values) != len(self.names):
            raise DataError(
                f"{where}: {len(values)} numbers for the {len(self.names)} labels of the model",
                hint=_HINT,
            )
        return [float(item) for item in values]


def label_of(record: Record, fields: tuple[str, ...]) -> tuple[str, Any]:
    """The field that holds the label, and the label. Raises DataError where there is none."""
    for name in fields:
        if record.fields.get(name) is not None:
            return name, record.fields[name]
    raise DataError(
        f"{record.where}: no {fields[0]} among its fields: {listed(record.fields)}",
        hint=f"{_HINT}; {columns_hint(record.fields, *_LAYOUTS[fields[0]])}",
    )


@dataclass(frozen=True)
class LabelFields:
    """Reads the labels of texts, or of their words."""

    of_tokens: bool

    def stated(self, config: Config, model_config: PretrainedConfig) -> Stated:
        """The facts about a classifier's labels in its checkpoint or the settings."""
        section = config.model
        assert section is not None
        model = LabelSettings.of(section)
        names, written = model.label_names, ModelSource.of(config).stated
        if model.num_labels is None and names is None and task_of(written) == section.task:
            given = (model_config.id2label or {}).items()
            names = stated_names(name for _, name in sorted(given))
            return Stated(model_config.num_labels, model_config.problem_type, names)
        return Stated(len(names) if names else model.num_labels, model.problem_type, names)

    def find(self, records: Iterable[Record], stated: Stated | None = None) -> ClassLabels:
        """The labels of training data; stated facts are kept. Names keep the data set's order, else
        they are sorted. Numbers run from 0 to the largest. Raises DataError for labels of several
        kinds, for more than MAX_LABELS, and for another count than the stated one."""
        stated = stated or Stated()
        if stated.names is not None and (stated.problem is not None or self.of_tokens):
            return ClassLabels(stated.problem or "single_label_classification", stated.names)
        seen = _Seen(self.of_tokens, measures=stated.problem == "regression")
        for record in records:
            seen.add(record)
        problem, found = stated.problem, seen.given or tuple(sorted(seen.names))
        if self.of_tokens or problem is None:
            several = any(kind.endswith("s") for kind in seen.kinds)
            problem = "multi_label_classification" if several else "single_label_classification"
            # As in transformers, a model of one label learns a measure.
            is_one = stated.count == 1 and not (self.of_tokens or found)
            problem = "regression" if seen.kinds & {"measure"} or is_one else problem
        if stated.names is not None:
            return ClassLabels(problem, stated.names)
        if found and stated.count not in (None, len(found)):
            raise DataError(
                f"the training data have {len(found)} labels, and the model has {stated.count}:"
                f" {_listed(found)}",
                hint="name all labels of the model in model.label_names, in their order",
            )
        most, where = seen.largest
        count = max(2, most + 1) if problem == "single_label_classification" else seen.width
        count = len(found) or stated.count or count
        if count > MAX_LABELS:
            text = f"the training data have {len(found):,} labels: {_listed(found)}"
            text = text if found else f"{where}: the label {most:,} would be one of {count:,}"
            raise DataError(f"{text}; a model has at most {MAX_LABELS:,}", hint=_HINT)
        return ClassLabels(problem, found or tuple(f"LABEL_{number}" for number in range(count)))


@dataclass
class _Seen:
    """The labels of the records so far. `given` holds the names that the data set lists."""

    of_tokens: bool
    measures: bool
    names: set[str] = field(default_factory=set)
    given: tuple[str, ...] = ()
    largest: tuple[int, str] = (0, "")  # the label and its place
    width: int = 1
    kinds: set[str] = field(default_factory=set)

    def add(self, record: Record) -> None:
        name, label = label_of(record, OF_TOKENS if self.of_tokens else OF_TEXTS)
        is_list = isinstance(label, (list, tuple))
        if is_list:
            self.width = max(self.width, len(label))
        for value in label if is_list else [label]:
            if self.of_tokens and value == IGNORE_INDEX:
                continue
            if isinstance(value, str) or (isinstance(value, ClassNumber) and not self.measures):
                kind = "name"
            else:
                kind = "measure" if isinstance(value, float) and not self.of_tokens else "number"
            self.kinds.add(f"{kind}s" if is_list and not self.of_tokens else kind)
            if isinstance(value, str):
                self.names.add(value)
            elif kind == "name":
                self.given = self.given or value.names
            elif isinstance(value, int) and value >= self.largest[0]:
                self.largest = value, record.where
        of_names = {kind.rstrip("s") == "name" for kind in self.kinds}
        if len(of_names) > 1 or len({kind.endswith("s") for kind in self.kinds}) > 1:
            raise DataError(f"{record.where}: {name} is of another kind than before", hint=_HINT)
        if "" in self.names:
            raise DataError(f"{record.where}: {name} is empty", hint=_HINT)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + ", ..." * (len(names) > 20)


def stated_names(names: Iterable[str]) -> tuple[str, ...] | None:
    """The names in a configuration, unless they only number the labels."""
    found = tuple(names)
    return None if all(map(_UNNAMED.fullmatch, found)) else found
