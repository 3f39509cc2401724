"""Rows of a stream, one after another, from any place on.

A place is a small state of JSON types. A resume reads only one shard from its beginning again: the
one that it stopped in. One pass over the data is an epoch, with its own order of shards and blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hetero_framework.config import Config
from hetero_framework.data.files.parquet import row_converter, with_class_names
from hetero_framework.data.sources import Record, Source, find_sources, read_file
from hetero_framework.data.splits import SplitReader
from hetero_framework.errors import DataError

BLOCK_ROWS = 10_000
BLOCK_CHARACTERS = 64 * 2**20
_CHECKED_ROWS = 1000
_DRAWS = 1000  # as `datasets` draws sources
_SAMPLED = 16, 4096  # pieces of a shard that its digest covers, and bytes of each
_PUT_BACK = "a resume reads the files of a stream again: put it back as it was, or begin a new run"

Facts = dict[str, list[Any]]
"""Size, time of change in nanoseconds, digest and source of each shard, in the order of shards."""
Row = tuple[int, Record]
"""The number of the source, and the row."""
Place = Callable[[], Any]
"""Returns the state after a row; to be called before the next row is read."""
Rows = Iterator[tuple[Row, Place]]
Reader = Callable[[int, Any], Rows]
"""The rows of an epoch from a state on, None for the beginning."""


def permutation(count: int, seed: int | None, *more: int) -> np.ndarray:
    """A permutation by a seed and a place (`more`); the order itself without a seed."""
    if seed is None:
        return np.arange(count)
    return np.random.default_rng([seed, *more]).permutation(count)


def _stat(file: Source) -> list[int]:
    assert file.path is not None
    try:
        found = file.path.stat()
    except OSError as error:
        text = f"{file.name} has vanished: {error.strerror or error}"
        raise DataError(text, hint=_PUT_BACK) from error
    return [found.st_size, found.st_mtime_ns]


def _digest(path: Path, size: int) -> str:
    """A digest of evenly spaced pieces of a file, which may be too large to read at each start."""
    digest = hashlib.sha256()
    count, length = _SAMPLED
    try:
        with path.open("rb") as file:
            for k in range(count):
                file.seek(max(0, (size - length) * k // (count - 1)))
                digest.update(file.read(length))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def contents(facts: Facts) -> list[list[Any]]:
    """The facts that are the same wherever the files are."""
    return [[size, *about] for size, _, *about in facts.values()]


def compare(known: Facts, now: Facts) -> None:
    """Raise DataError for a shard that is not as it was when the run began."""
    whole = len(known) == len(now)
    for (name, was), (there, found) in zip(known.items(), now.items(), strict=False):
        # An older checkpoint has no digests.
        if whole and contents({name: was}) != [contents({there: found})[0][: len(was) - 1]]:
            raise DataError(f"{there} has changed since the run began", hint=_PUT_BACK)
    if not whole:
        names = [{Path(name).name: name for name in facts} for facts in (known, now)]
        gone = [f"{names[0][name]} has vanished" for name in names[0].keys() - names[1]]
        new = [f"{names[1][name]} has appeared" for name in names[1].keys() - names[0]]
        what = min(gone + new, default=f"there are {len(now)} shards, and there were {len(known)}")
        raise DataError(f"{what} since the run began", hint=_PUT_BACK)


def _shards(
    number: int, files: Sequence[Source], facts: Facts, names: Any, seed: int | None
) -> Reader:
    """The rows of files, in the epoch's order of files. `names` are the names of classes."""

    def check(file: Source) -> None:
        if _stat(file) != facts[file.name][:2]:
            raise DataError(f"{file.name} has changed since the run began", hint=_PUT_BACK)

    def read(epoch: int, state: Any) -> Rows:
        begun, done = state or (0, 0)
        for at, k in enumerate(permutation(len(files), seed, epoch, number).tolist()):
            if at < begun:
                continue
            check(files[k])
            for row, record in enumerate(read_file(files[k]), 1):
                if row % _CHECKED_ROWS == 0:
                    check(files[k])
                if names:
                    record = replace(record, fields=with_class_names(record.fields, names))
                if at > begun or row > done:
                    yield (number, record), partial(list, [at, row])
            check(files[k])

    return read


def _table(number: int, name: str, base: Any, seed: int | None) -> Reader:
    """The rows of a dataset that `datasets` streams. Right after `load_state_dict` its `state_dict`
    is the beginning's, so it is asked for only once a row has been read."""
    convert = row_converter(base.features.arrow_schema if base.features else None)

    def read(epoch: int, state: Any) -> Rows:
        first, inner = state or (0, None)
        dataset = deepcopy(base)
        if seed is not None:  # a buffer of one row shuffles the shards alone
            dataset = dataset.shuffle(seed=seed, buffer_size=1)
            dataset.set_epoch(epoch)
        if inner is not None:
            dataset.load_state_dict(deepcopy(inner))
        row = first

        def place() -> Any:
            return [row, deepcopy(dataset.state_dict())]

        for fields in dataset:
            row += 1
            yield (number, Record(f"{name} row {row}", convert(fields))), place

    return read


def _chain(readers: Sequence[Reader], most: int | None = None) -> Reader:
    """The rows of one reader after another, at most the first `most` rows."""

    def read(epoch: int, state: Any) -> Rows:
        begun, taken, inner = state or (0, 0, None)
        for at in range(begun, len(readers)):
            for row, place in readers[at](epoch, inner):
                if taken == most:
                    return
                taken += 1
                yield row, partial(_behind, at, taken, place)
            inner = None

    return read


def _behind(at: int, taken: int, place: Place) -> Any:
    return [at, taken, place()]


def _mix(readers: Sequence[Reader], weights: list[float], until: str, seed: int) -> Reader:
    """The rows of readers by turns, or drawn by weights: in the order, and up to the end, of
    `datasets.interleave_datasets`. One row of each reader is read ahead, so its end is known."""
    total = math.fsum(weights)
    shares = weights if total == 1 else [weight / total for weight in weights]
    again = until != "all_exhausted_without_replacement"
    ends = any if until == "first_exhausted" else all

    def draws(epoch: int) -> Iterator[int]:
        rng = np.random.default_rng([seed, epoch] if epoch else seed)
        while True:
            drawn = rng.choice(len(shares), size=_DRAWS, p=shares) if shares else None
            yield from range(len(readers)) if drawn is None else drawn.tolist()

    def read(epoch: int, state: Any) -> Rows:
        count, over, places = deepcopy(state) or (0, [False] * len(readers), [None] * len(readers))
        rows = [reader(epoch, place) for reader, place in zip(readers, places, strict=True)]
        ahead = [next(each, None) for each in rows]
        for number, k in enumerate(draws(epoch)):
            if ends(over):
                return
            if number < count or (over[k] and not again):
                continue
            if (found := ahead[k]) is not None:
                places[k] = found[1]()
            ahead[k] = next(rows[k], None)
            if ahead[k] is None:
                over[k] = True
                if again:
                    places[k], rows[k] = None, readers[k](epoch, None)
                    ahead[k] = next(rows[k], None)
            if found is not None:
                yield found[0], partial(deepcopy, [number + 1, over, places])

    return read


def order_seed(config: Config) -> int | None:
    """The seed of the order of shards and rows; None where they stay in order."""
    training = config.training
    if training.train_sampling_strategy == "sequential":
        return None
    return training.order_seed


def source_readers(config: Config, seed: int | None) -> tuple[list[Reader], Facts]:
    """The rows of each source of data.train, and the facts of its files."""
    assert config.data is not None
    facts = Facts()
    readers = []
    limits = [source.max_samples for source in config.data.sources] or [None]
    for number, (part, most) in enumerate(zip(config.data.parts, limits, strict=True)):
        split = SplitReader(part.train_split, ("train",), part.dataset_config)
        found: list[Reader] = []
        sources = find_sources(part.paths, config.base_dir)
        order = seed if most is None else None  # the first rows are the same in each epoch
        for is_file, group in groupby(sources, key=lambda source: source.is_file):
            listed = list(group)
            for each in listed[:1] if is_file else listed:
                whole = split.whole_split(each)
                files = listed if is_file else whole.files
                if whole.stream is not None and each.path is not None:
                    parts = sorted(each.path.rglob("*.arrow"))
                    files = [Source(f"{each.name}/{part.name}", ".arrow", part) for part in parts]
                for file in files:
                    assert file.path is not None
                    size, changed = _stat(file)
                    facts[file.name] = [size, changed, _digest(file.path, size), number]
                if whole.stream is not None:
                    found.append(_table(number, each.name, whole.stream(), order))
                    continue
                found.append(_shards(number, files, facts, whole.names, order))
        readers.append(_chain(found, most))
    return readers, facts


def mixed(config: Config, readers: list[Reader]) -> Reader:
    """The rows of all sources, as the settings mix them."""
    data, training = config.data, config.training
    assert data is not None
    if data.mixing == "concatenate":
        return _chain(readers)
    weights = [source.weight for source in data.sources if source.weight is not None]
    return _mix(readers, weights, data.stopping_strategy, training.order_seed)


def batches(
    reader: Reader, seed: int | None, count: int, state: Any
) -> Iterator[tuple[Any, list[Row]]]:
    """Batches of at most `count` rows, epoch after epoch, each with the state before it: epoch,
    number of the block, place in the block, and the reader's state where the block begins. The rows
    of a block are shuffled together. An empty batch ends an epoch."""
    epoch, number, place, begin = state or (0, 0, 0, None)
    while True:
        rows = reader(epoch, begin)
        while block := _block(rows):
            order = permutation(len(block), seed, epoch, number)
            for at in range(place, len(block), count):
                yield [epoch, number, at, begin], [block[k][0] for k in order[at : at + count]]
            number, place, begin = number + 1, 0, block[-1][1]()
        epoch, number, place, begin = epoch + 1, 0, 0, None
        yield [epoch, 0, 0, None], []


def _block(rows: Rows) -> list[tuple[Row, Place]]:
    block = []
    characters = 0
    for row, place in rows:
        block.append((row, place))
        characters += _characters(row[1].fields)
        if len(block) == BLOCK_ROWS or characters >= BLOCK_CHARACTERS:
            break
    return block


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 1
