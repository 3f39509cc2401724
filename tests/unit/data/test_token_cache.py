from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from hetero_framework.data import token_cache
from hetero_framework.data.examples import Examples, ExamplesBuilder
from hetero_framework.data.token_cache import Entry
from hetero_framework.data.train_data import Reader, TrainData, load_data
from tests.planting import plant
from tests.unit.data_helpers import CHATML_MARKED, make_config, tiny_tokenizer, write_jsonl

ROWS = [{"text": "The fox " * (index % 7 + 1)} for index in range(40)] + [{"text": ""}]
CHAT = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]


@pytest.fixture(autouse=True)
def tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "WORTH_BYTES", 0)
    return tmp_path / "cache" / "tokens"


def load(folder: Path, rows: Any = ROWS, tokenizer: Any = None, **data: Any) -> TrainData:
    write_jsonl(folder / "train.jsonl", rows)
    config = make_config(folder, {"train": "train.jsonl", "max_length": 8, **data})
    return load_data(config, tokenizer or tiny_tokenizer())


def entries(tokens: Path) -> list[Path]:
    return sorted(tokens.iterdir()) if tokens.is_dir() else []


def some(count: int) -> Examples:
    builder = ExamplesBuilder()
    for index in range(count):
        builder.add([index, 1, 2], [False, True, True])
    return builder.build()


def test_second_load_tokenises_nothing_and_is_equal_to_the_bit(tmp_path, monkeypatch):
    first = load(tmp_path)
    monkeypatch.setattr(Reader, "_make", None)
    second = load(tmp_path)
    assert isinstance(second.examples.ids, np.memmap)
    assert second.fingerprint == first.fingerprint
    for step in range(first.total_steps):
        for one, other in zip(first.step_batches(step), second.step_batches(step), strict=True):
            assert all(one[name].equal(other[name]) for name in one)
    cached = "train: tokenised before, taken from the cache"
    assert [line for line in second.report if line != cached] == first.report
    assert cached in second.report


def test_a_change_of_what_the_tokens_depend_on_renews_them(tmp_path, tokens):
    load(tmp_path)
    for changed in (
        {"rows": ROWS[1:]},
        {"max_length": 7},
        {"truncation_mode": "keep_end"},
        {"add_eos": False},
        {"tokenizer": tiny_tokenizer(eos_token="<s>")},
        {"tokenizer": tiny_tokenizer(CHATML_MARKED)},
    ):
        before = len(entries(tokens))
        load(tmp_path, **changed)  # type: ignore[arg-type]
        assert len(entries(tokens)) == before + 1, changed


@pytest.mark.parametrize("name", ["ids.npy", "trained.npy", "offsets.npy", "entry.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damaged_entry_is_made_anew(tmp_path, tokens, name, damage):
    first = load(tmp_path)
    file = entries(tokens)[0] / name
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[-3] ^= 1
        file.write_bytes(content)
    assert load(tmp_path).fingerprint == first.fingerprint
    (entry,) = entries(tokens)
    again = Entry(entry).read()
    assert again[0].fingerprint == first.fingerprint


def test_several_writers_leave_one_whole_entry(tokens):
    entry, examples = Entry(tokens / "x"), some(1000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: entry.write(examples, ["said"]), range(16)))
    found = entry.read()
    assert found[0].fingerprint == examples.fingerprint
    assert found[1] == ["said"]
    assert entries(tokens) == [entry.path]


def test_examples_that_are_not_cached(tmp_path, tokens, monkeypatch):
    dated = CHATML_MARKED + "{{ strftime_now('%d') }}"
    load(tmp_path, CHAT, tiny_tokenizer(dated), max_length=None)
    load(tmp_path, tokenizer=ByT5Tokenizer(), add_eos=False)
    monkeypatch.setattr(token_cache, "WORTH_BYTES", 2**20)
    load(tmp_path)
    assert entries(tokens) == []


def test_unwritable_cache_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "file"))
    first = load(tmp_path)
    monkeypatch.setenv("HETERO_CACHE", "")
    assert load(tmp_path).fingerprint == first.fingerprint


def test_entries_used_longest_ago_make_room(tokens, monkeypatch):
    size = sum(getattr(some(1000), name).nbytes for name in ("ids", "trained", "offsets"))
    monkeypatch.setattr(token_cache, "MOST_BYTES", 3 * size + 4096)
    for index in range(4):
        Entry(tokens / f"{index}").write(some(1000), [])
        os.utime(tokens / f"{index}", (index, index))
        if index == 2:
            assert Entry(tokens / "0").read() is not None  # used now
    assert [path.name for path in entries(tokens)] == ["0", "2", "3"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such owners and modes")
@pytest.mark.parametrize("how", ["owner", "mode", "link"])
@pytest.mark.parametrize("name", [".", "entry.json", "ids.npy"])
def test_entry_that_another_user_may_have_written_is_not_read(name, how, tmp_path, logged):
    entry = Entry(tmp_path / "entry")
    entry.write(some(3), ["a line"])
    assert entry.read() is not None
    wrong = entry.path / name
    plant(wrong, how, tmp_path / "elsewhere")
    assert entry.read() is None
    assert [line for line in logged if f"{wrong} " in line]
    assert wrong.exists()
