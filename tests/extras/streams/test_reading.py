"""Rows of streams, against `datasets` and against themselves after resumes."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest

from hetero_framework.errors import DataError
from hetero_framework.extras.streams import reading
from hetero_framework.extras.streams.reading import batches, mixed, order_seed, source_readers
from tests.cases import spread
from tests.unit.data_helpers import make_config, write_jsonl

SHARDS = [40, 7, 25, 1, 33]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_ROWS", 16)
    for number, count in enumerate(SHARDS):
        rows = [{"text": f"{number}-{k}"} for k in range(count)]
        write_jsonl(tmp_path / f"s{number}.jsonl", rows)
    saved = datasets.Dataset.from_list([{"text": f"saved-{k}"} for k in range(70)])
    saved.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parted").mkdir()
    for number in range(3):
        rows = [{"text": f"p{number}-{k}"} for k in range(9)]
        write_jsonl(tmp_path / "parted" / f"train-{number}.jsonl", rows)
    return tmp_path


def rows(folder: Path, train: Any, state: Any = None, *, order: str = "random", **data: Any):
    """Batches of three rows, over and over: (state, texts)."""
    data = {"train": train, "streaming": True, **data}
    config = make_config(folder, data, max_steps=1, train_sampling_strategy=order)
    readers, _ = source_readers(config, seed := order_seed(config))
    for place, batch in batches(mixed(config, readers), seed, 3, state):
        yield place, [record.fields["text"] for _, record in batch]


def epochs(found: Any, count: int) -> list[list[str]]:
    ended: list[list[str]] = [[]]
    for _, batch in found:
        ended[-1] += batch
        if not batch:
            ended.append([])
        if len(ended) > count:
            return ended[:-1]
    raise AssertionError


SOURCES: dict[str, Any] = {
    "shards": "s*.jsonl",
    "saved": "saved",
    "folder": "parted",
    "one after another": ["s1.jsonl", "saved", "parted", "s2.jsonl"],
}
MIXED = [{"path": ["s0.jsonl", "s1.jsonl"], "name": "a"}, {"path": "saved"}, {"path": "parted"}]
WEIGHTS = (0.2, 0.5, 0.3)
MIXTURES: dict[str, Any] = {
    "first sources, then others": (MIXED, {}),
    **{
        f"{until} {'by weights' if weights else 'by turns'}": (
            [{**each, "weight": w} for each, w in zip(MIXED, WEIGHTS, strict=True)]
            if weights
            else MIXED,
            {"mixing": "interleave", "stopping_strategy": until},
        )
        for until in ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
        for weights in (False, True)
    },
    "first rows": ([{"path": "s*.jsonl", "name": "a", "max_samples": 44}, {"path": "saved"}], {}),
}
ALL = {**{name: (train, {}) for name, train in SOURCES.items()}, **MIXTURES}


@pytest.mark.parametrize(("name", "order"), spread([*ALL], ["random", "sequential"]))
def test_resumes_give_the_rows_of_a_run_without(name, order, folder):
    train, mixing = ALL[name]

    def from_state(state: Any) -> Any:
        found = rows(folder, train, state, order=order, **mixing)
        return (entry for entry in found if entry[1])

    # The state of `datasets` has another form after a resume, though it means the same row.
    whole = [(state[:3], texts) for state, texts in islice(from_state(None), 120)]
    assert whole[-1][0][0] > 0  # beyond an epoch
    for seed in range(2):
        found: list[Any] = []
        for stop in (*sorted(random.Random(seed).sample(range(120), 2)), 120):
            state = json.loads(json.dumps(found.pop()[0])) if found else None
            found += islice(from_state(state), stop + 1 - len(found))
        assert [(state[:3], texts) for state, texts in found[:120]] == whole


def test_rows_in_order_are_those_of_datasets(folder):
    files, cache = str(folder / "s*.jsonl"), str(folder / "cache")
    how = {"split": "train", "streaming": True, "cache_dir": cache}
    there = datasets.load_dataset("json", data_files=files, **how)
    [found] = epochs(rows(folder, "s*.jsonl", order="sequential"), 1)
    assert found == [row["text"] for row in there]


@pytest.mark.parametrize("name", SOURCES)
def test_each_epoch_has_each_row_once_in_an_order_of_its_own(name, folder):
    one, two = epochs(rows(folder, SOURCES[name]), 2)
    [plain] = epochs(rows(folder, SOURCES[name], order="sequential"), 1)
    assert sorted(one) == sorted(two) == sorted(plain)
    assert len({tuple(one), tuple(two), tuple(plain)}) == 3


@pytest.mark.parametrize("until", [name for name, about in MIXTURES.items() if about[1]])
def test_mixtures_are_those_of_interleave_datasets(until, folder):
    train, mixing = MIXTURES[until]
    [found] = epochs(rows(folder, train, order="sequential", **mixing), 1)
    texts = [[f"0-{k}" for k in range(40)] + [f"1-{k}" for k in range(7)]]
    texts += [[f"saved-{k}" for k in range(70)], [f"p{n}-{k}" for n in range(3) for k in range(9)]]
    there = datasets.interleave_datasets(
        [datasets.Dataset.from_dict({"text": each}).to_iterable_dataset() for each in texts],
        probabilities=list(WEIGHTS) if "weights" in until else None,
        seed=42,
        stopping_strategy=mixing["stopping_strategy"],
    )
    assert found == [row["text"] for row in there]


def test_the_first_rows_of_a_source_are_the_same_in_each_epoch(folder):
    one, two = epochs(rows(folder, *MIXTURES["first rows"][:1]), 2)
    assert sorted(one) == sorted(two)
    assert len(one) == 44 + 70


def test_rows_are_shuffled_within_blocks(folder):
    [found] = epochs(rows(folder, "s0.jsonl"), 1)
    blocks = [found[:16], found[16:32], found[32:]]
    numbers = [[int(text.partition("-")[2]) for text in block] for block in blocks]
    assert [*map(sorted, numbers)] == [[*range(16)], [*range(16, 32)], [*range(32, 40)]]
    assert all(block != sorted(block) for block in numbers)
    assert [k - 16 for k in numbers[1]] != numbers[0]


def test_a_block_ends_where_its_text_is_long(folder, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_CHARACTERS", 50)
    write_jsonl(folder / "long.jsonl", [{"text": "x" * 60}, {"text": "y"}, {"text": "z" * 60}])
    states = [state for state, _ in islice(rows(folder, "long.jsonl"), 3)]
    assert [(epoch, block) for epoch, block, *_ in states] == [(0, 0), (0, 1), (1, 0)]


def test_the_state_of_a_dataset_before_a_row_is_the_loaded_one(folder):
    state = list(islice(rows(folder, "saved"), 8))[-1][0]
    assert state[3] is not None  # beyond the first block
    assert next(rows(folder, "saved", state))[0] == state


def test_a_name_on_the_hub_is_streamed(folder, monkeypatch):
    asked = []
    load = datasets.load_dataset

    def from_hub(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        files = str(folder / "parted" / "*.jsonl")
        return load("json", data_files=files, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    [found] = epochs(rows(folder, "some/name", dataset_config="main", train_split="train"), 1)
    assert sorted(found) == [f"p{n}-{k}" for n in range(3) for k in range(9)]
    assert asked == [("some/name", "main", "train", True)]
    state = [state for state, _ in islice(rows(folder, "some/name"), 7)][-1]
    rest = islice(rows(folder, "some/name", state), 4)  # the second block
    assert [text for _, batch in rest for text in batch] == found[16:]


@pytest.mark.parametrize(
    ("deed", "word"),
    [(lambda file: file.write_text('{"text": "x"}\n' * 25), "changed"), (Path.unlink, "vanished")],
    ids=["changed", "vanished"],
)
def test_a_shard_that_is_not_as_it_was_is_named(deed, word, folder):
    found = rows(folder, "s*.jsonl", order="sequential")
    next(found)
    deed(folder / "s2.jsonl")
    with pytest.raises(DataError, match=rf"s2\.jsonl has {word}"):
        epochs(found, 1)


def test_slices_are_refused(folder):
    with pytest.raises(DataError, match="has no slices"):
        next(rows(folder, "s0.jsonl", train_split="train[:10]"))
    with pytest.raises(DataError, match="only 'train'"):
        next(rows(folder, "saved", train_split="dev"))
