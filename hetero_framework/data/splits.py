"""Splits and slices of a source: `train`, `train[:10%]`, `train+validation`, as in `datasets`.

A folder has the splits that `datasets` finds in it, by the names of its files or by its README. A
file is one split, `train`; the files of a list that follow one another are one split together.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from hetero_framework.data.files.parquet import class_names, table_records, with_class_names
from hetero_framework.data.sources import (
    TEXTS,
    Numeric,
    Record,
    Source,
    listed,
    open_source,
    read_file,
    visible_files,
)
from hetero_framework.errors import DataError

_NAME = re.compile(r"[\w.-]+")
_SHARDS = 64  # shards of a saved dataset, which are shuffled as files are
_ONE_SPLIT = "it is one split; name train, or a slice of it such as train[:100] or train[10%:]"


@dataclass(frozen=True)
class Split:
    """One split of a dataset; `names` are the names of classes, by column."""

    read: Callable[[], Iterator[Record]]
    count: Callable[[], int]
    files: Sequence[Source] = ()
    names: Mapping[str, tuple[str, ...]] | None = None
    stream: Callable[[], Any] | None = None
    """Makes a dataset that `datasets` streams, for a split without files."""


@dataclass(frozen=True)
class SplitReader:
    """Reads a split of data; `whole` are the names that mean all of a file."""

    split: str
    whole: tuple[str, ...] = ("train",)
    dataset_config: str | None = None
    columns: Mapping[str, str] | None = None
    """The old name of each renamed column, by its new name."""
    numeric: Numeric = TEXTS

    @property
    def _numeric(self) -> Numeric:
        """`numeric` with the names that the columns have in the files."""
        old = self.columns or {}
        there = (old.get(n, n) for n in self.numeric.columns if n in old or n not in old.values())
        return replace(self.numeric, columns=tuple(there))

    def read(self, sources: Sequence[Source], say: Callable[[str], None]) -> Iterator[Record]:
        """Stream the examples; `say` is told of files that are not read. Raises DataError, with
        file and line, for anything that is not an example."""
        records = self._records(sources, say)
        if not self.columns:
            return records
        return (renamed(record, self.columns) for record in records)

    def whole_split(self, source: Source) -> Split:
        """The split of one source, for a stream. Raises DataError for a slice."""
        if not _NAME.fullmatch(self.split):
            text = f"a stream of {source.name} has no slices: the split is {self.split!r}"
            raise DataError(
                text, hint="name one split; max_samples of a source takes its first rows"
            )
        splits: Mapping[str, Split] = dict.fromkeys(self.whole, _files([source]))
        if source.path is None:
            dataset = partial(_from_hub, source.name, self.split, self.dataset_config, True)
            return Split(lambda: iter(()), lambda: 0, stream=dataset)
        if not source.is_file:
            splits = self._splits(source.name, source.path, source.kind, lambda note: None)
        self._check_names(source.name, [self.split], splits, _ONE_SPLIT)
        return splits[self.split]

    def _records(self, sources: Sequence[Source], say: Callable[[str], None]) -> Iterator[Record]:
        for are_files, group in groupby(sources, key=lambda source: source.is_file):
            if are_files:
                files = list(group)
                names = ", ".join(source.name for source in files[:3])
                whole = _files(files, self._numeric)
                yield from self._select(names, dict.fromkeys(self.whole, whole), _ONE_SPLIT)
                continue
            for source in group:
                if source.path is None:
                    dataset = _from_hub(source.name, self.split, self.dataset_config)
                    yield from _rows(dataset, f"{source.name}[{self.split}]").read()
                else:
                    splits = self._splits(source.name, source.path, source.kind, say)
                    hint = "set data.train_split or data.eval_split"
                    yield from self._select(source.name, splits, hint)

    def of_rows(self, name: str, count: int) -> range:
        """The rows of the split in data of `count` rows. Raises DataError for several slices."""
        splits = dict.fromkeys(self.whole, Split(lambda: iter(()), lambda: count))
        [(_, begin, end), *others] = self._slices(name, splits, _ONE_SPLIT)
        rows = range(count)[begin:end]
        if others or not rows:
            raise DataError(f"{name}: the split {self.split} is not one slice with examples in it")
        return rows

    def _splits(
        self, name: str, path: Path, kind: str, say: Callable[[str], None]
    ) -> Mapping[str, Split]:
        if kind == "saved":
            return _saved_splits(path, self.whole)
        return _folder_splits(name, path, self.dataset_config, say, self._numeric)

    def _select(self, name: str, splits: Mapping[str, Split], hint: str) -> Iterator[Record]:
        """The rows of the split, one slice after another."""
        record = None
        for split, begin, end in self._slices(name, splits, hint):
            for record in islice(splits[split].read(), begin, end):
                yield record
        if record is None:
            raise DataError(f"{name}: the split {self.split} holds no example")

    def _slices(
        self, name: str, splits: Mapping[str, Split], hint: str
    ) -> list[tuple[str, int, int | None]]:
        """Split, first row and end of each part, with the same rows as `datasets` takes."""
        if _NAME.fullmatch(self.split):
            self._check_names(name, [self.split], splits, hint)
            return [(self.split, 0, None)]
        from datasets import ReadInstruction  # slow

        try:
            instruction = ReadInstruction.from_spec(self.split)
            parts = instruction.to_spec().split("+")
            names = [re.split(r"[\[(]", part)[0] for part in parts]
            self._check_names(name, names, splits, hint)
            counts = {split: splits[split].count() for split in set(names)}
            slices = instruction.to_absolute(counts)
        except (ValueError, AssertionError) as error:
            raise DataError(
                f"the split {self.split!r} of {name} cannot be taken: {error}",
                hint='write "train", "train[:100]", "train[10%:]" or "train+validation"',
            ) from error
        return [(part.splitname, part.from_, part.to) for part in slices]

    def _check_names(
        self, name: str, names: list[str], splits: Mapping[str, Split], hint: str
    ) -> None:
        for split in names:
            if split not in splits:
                raise DataError(
                    f"{name} has no split {split!r}, only {listed(map(repr, splits))}", hint=hint
                )


def renamed(record: Record, columns: Mapping[str, str]) -> Record:
    fields = dict(record.fields)
    found = {}
    for new, old in columns.items():
        if old not in fields:
            raise DataError(
                f"{record.where}: data.columns names the column {old}, and the columns are"
                f" {listed(record.fields)}"
            )
        found[new] = fields.pop(old)
    if both := sorted(found.keys() & fields.keys()):
        raise DataError(
            f"{record.where}: data.columns calls {columns[both[0]]} {both[0]}, and there is such a"
            " column",
            hint="give that column another name in data.columns, too",
        )
    return replace(record, fields={**fields, **found})


def _files(
    sources: Sequence[Source],
    numeric: Numeric = TEXTS,
    names: Mapping[str, tuple[str, ...]] | None = None,
) -> Split:
    """One split of all files; `names` are the names of classes, by column."""

    def read() -> Iterator[Record]:
        records = chain.from_iterable(read_file(source, numeric) for source in sources)
        if not names:
            return records
        return (replace(each, fields=with_class_names(each.fields, names)) for each in records)

    return Split(read, lambda: sum(1 for _ in read()), sources, names)


def _rows(dataset: Any, name: str) -> Split:
    def tables(schema: list[Any]) -> Iterator[Any]:
        schema.append(dataset.features.arrow_schema)
        yield from dataset.with_format("arrow").iter(1000)  # pictures stay undecoded

    def read() -> Iterator[Record]:
        return table_records(name, tables, "data set")

    def stream() -> Any:
        return dataset.to_iterable_dataset(num_shards=min(len(dataset), _SHARDS))

    return Split(read, lambda: len(dataset), stream=stream)


def _folder_splits(
    name: str, path: Path, config: str | None, say: Callable[[str], None], numeric: Numeric
) -> dict[str, Split]:
    """The splits that `load_dataset` finds in a folder of files."""
    import datasets

    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            builder = datasets.load_dataset_builder(str(path), config, cache_dir=cache)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"the folder {name} cannot be read as a dataset: {error}",
            hint="name the files one by one or by a pattern; data.dataset_config names a subset",
        ) from error
    splits = {
        str(split): list(map(Path, files)) for split, files in builder.config.data_files.items()
    }
    used = {file.resolve() for files in splits.values() for file in files}
    files = (file for file in visible_files(path) if file.resolve() not in used)
    if unused := [file.relative_to(path).as_posix() for file in files]:
        shown = ", ".join(unused[:3]) + f" and {len(unused) - 3} more" * (len(unused) > 3)
        say(f"warning: {name} also holds {shown}, in no split, which is not read")
    names = class_names(builder.info.features)  # as the folder's README has them
    return {
        split: _files([open_source(str(file), file) for file in files], numeric, names)
        for split, files in splits.items()
    }


def _saved_splits(path: Path, whole: tuple[str, ...]) -> dict[str, Split]:
    import datasets
    import pyarrow

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a folder of datasets.save_to_disk ({error})") from error
    if isinstance(dataset, datasets.DatasetDict):
        return {str(split): _rows(part, str(path)) for split, part in dataset.items()}
    names = () if dataset.split is None else (str(dataset.split),)
    return dict.fromkeys((*whole, *names), _rows(dataset, str(path)))


def _from_hub(name: str, split: str, dataset_config: str | None, streams: bool = False) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, dataset_config, split=split, streaming=streams)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"{name!r} is neither a file or folder here nor a dataset on the hub ({error})",
            hint="check the path (relative paths count from the configuration file's folder)",
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # ConnectionError and the offline mode's error are OSErrors.
        raise DataError(
            f"cannot load the dataset {name!r}, split {split!r}, from the hub: {error}",
            hint="set data.train_split or data.eval_split"
            if "Unknown split" in str(error)
            else "without a network, give local files or a folder of datasets.save_to_disk",
        ) from error
