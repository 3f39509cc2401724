"""Megatron's files, written by hand, and the rows that they give."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_framework.data.train_data import load_data
from hetero_framework.errors import DataError
from hetero_framework.extras.foreign_formats.megatron import IndexedFile
from hetero_framework.extras.islands.ledger import split_step
from hetero_framework.extras.observe.example_view import shown_examples
from tests.unit.data_helpers import make_config, tiny_tokenizer, write_jsonl

LENGTHS = [5, 0, 3, 8, 2, 6]  # 24 tokens, each its own number


def present(lengths: list[int], code: int = 4, item: int = 4, modes: bytes = b"") -> bytes:
    """An index of Megatron's."""
    starts = [0, *accumulate(length * item for length in lengths)][:-1]
    count = len(lengths)
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, count, count + 1)
        + struct.pack(f"<{count}i", *lengths)
        + struct.pack(f"<{count}q", *starts)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
        + modes
    )


def write(folder: Path, index: bytes = b"", tokens: bytes = b"", name: str = "corpus") -> Path:
    (folder / f"{name}.bin").write_bytes(tokens or struct.pack("<24i", *range(24)))
    (folder / f"{name}.idx").write_bytes(index or present(LENGTHS))
    return folder / f"{name}.idx"


def load(folder: Path, spec: Any = "corpus", most: int | None = None, **changes: Any) -> Any:
    training = {"max_steps": 2, "per_device_train_batch_size": 1, "seed": 7}
    training |= changes.pop("training", {})
    config = make_config(folder, {"train": spec, "max_length": 4, **changes}, **training)
    return load_data(config, tiny_tokenizer(), vocab_size=300, most=most)


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_sequences_are_read_in_place(tmp_path, code, letter):
    item = struct.calcsize(letter)
    path = write(tmp_path, present(LENGTHS, code, item), struct.pack(f"<24{letter}", *range(24)))
    file = IndexedFile(path)
    assert [file.tokens(k, 0, 99).tolist() for k in range(6)] == [
        *([0, 1, 2, 3, 4], [], [5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15], [16, 17]),
        [18, 19, 20, 21, 22, 23],
    ]
    part = file.tokens(3, 2, 3)
    assert part.tolist() == [10, 11, 12]
    assert part.base is not None
    assert not part.flags.owndata


@pytest.mark.parametrize("spec", ["corpus", "corpus.bin", "corpus.idx", ["corpus.bin"]])
def test_rows_follow_the_shuffled_documents(tmp_path, spec):
    """Five samples of four predictions are in 24 tokens; the row after begins with the label."""
    write(tmp_path)
    (tmp_path / "corpus").mkdir()  # Megatron keeps its caches there
    state = np.random.RandomState(7)
    documents = np.arange(6, dtype=np.int32)
    state.shuffle(documents)
    places = np.split(np.arange(24), np.cumsum(LENGTHS)[:-1])
    stream = np.concatenate([places[k] for k in documents])
    order = np.arange(5, dtype=np.uint32)
    state.shuffle(order)
    data = load(tmp_path, spec, training={"max_steps": 5})
    rows = [data.step_batches(step)[0] for step in range(5)]
    assert [row["input_ids"][0].tolist() for row in rows] == [
        stream[4 * k : 4 * k + 5].tolist() for k in order
    ]
    assert all(row["labels"].equal(row["input_ids"]) for row in rows)
    assert (data.longest, data.steps_per_epoch, data.total_steps) == (5, 5, 5)


def test_epochs_are_whole_steps_without_a_gap(tmp_path):
    write(tmp_path)
    training = {"max_steps": -1, "num_train_epochs": 4, "per_device_train_batch_size": 2}
    data = load(tmp_path, training=training)
    assert (data.steps_per_epoch, data.total_steps) == (2, 8)
    assert [data.epoch_of(step) for step in (0, 1, 7)] == [0.5, 1.0, 4.0]
    assert all(len(data.step_batches(step)[0]["input_ids"]) == 2 for step in range(8))
    assert data.largest_batch(3)[0] == 3
    assert data.largest_batch(8) is None


def test_a_slice_takes_documents_as_megatrons_split_does(tmp_path):
    write(tmp_path)
    data = load(tmp_path, train_split="train[:50%]", eval="corpus", eval_split="train[50%:]")
    both = [{*rows[0][0]} for rows in (data.examples, data.eval_sets[""])]
    assert both[0] <= set(range(8)) and both[1] <= set(range(8, 24))  # noqa: PT018
    assert len(data.eval_sets[""]) == 3
    with pytest.raises(DataError, match="not one slice"):
        load(tmp_path, train_split="train[:1]+train[3:]")


def test_an_index_in_files_gives_the_rows_of_one_in_memory(tmp_path, monkeypatch):
    write(tmp_path)
    rows = []
    for place in ("", str(tmp_path / "cache")):
        monkeypatch.setenv("HETERO_CACHE", place)
        data = load(tmp_path, training={"max_steps": 20})
        rows.append([data.examples[k][0].tolist() for k in range(20)])
    assert rows[0] == rows[1]
    assert list((tmp_path / "cache").iterdir()) == []


TOKENS = struct.pack("<24i", *range(24))


@pytest.mark.parametrize(
    ("index", "tokens", "message"),
    [
        (present(LENGTHS), TOKENS[:-4], r"idx lists 24 tokens .* 96 bytes, but .*bin has 92"),
        (present([5, 0, 3]), TOKENS, r"idx lists 8 tokens .* 32 bytes, but .*bin has 96"),
        (b"MMIDIDX\1" + present(LENGTHS)[8:], TOKENS, r"idx is not an index of Megatron's"),
        (present(LENGTHS)[:20], TOKENS, r"idx ends within its header"),
        (present(LENGTHS)[:-3], TOKENS, r"idx has 159 bytes, but 6 sequences .* take 162"),
        (present(LENGTHS, code=9), TOKENS, r"idx: its type of tokens has the code 9, not one of"),
        (present(LENGTHS, code=7), TOKENS, r"idx: its type of tokens has the code 7, not one of"),
        (present(LENGTHS, modes=b"\0\0\1\0\0\0"), TOKENS, r"idx: sequence 2 has mode 1"),
        (b"TNTIDX\0\0" + bytes(48), TOKENS, r"idx is not an index of Megatron's.*TNTIDX"),
    ],
)
def test_files_that_contradict_each_other_are_named(tmp_path, index, tokens, message):
    write(tmp_path, index, tokens)
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_a_multimodal_index_of_text_is_read(tmp_path):
    assert len(IndexedFile(write(tmp_path, present(LENGTHS, modes=bytes(6))))) == 6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({9: 2}, "has version 2"),
        ({34 + 24 + 8: 1 << 40}, "sequence 1, 0 tokens from byte 1,099,511,627,776 on"),
        ({34 + 24 + 8: (1 << 63) - 1}, "sequence 1, 0 tokens from byte 9,223,372,036,854"),
        ({34 + 24 + 24: 80}, "sequence 3, 8 tokens from byte 80 on, is outside"),
        ({34 + 24 + 48: 1}, "documents do not go from sequence 0 to 6"),
    ],
)
def test_a_number_of_the_index_that_is_wrong_is_refused(tmp_path, values, message):
    index = bytearray(present(LENGTHS))
    for place, value in values.items():
        index[place : place + 8] = struct.pack("<q", value)
    write(tmp_path, bytes(index))
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_islands_divide_a_step_among_them(tmp_path):
    write(tmp_path)
    order = load(tmp_path, training={"max_steps": 3, "per_device_train_batch_size": 3}).order
    parts = split_step(order, 2, {"a": 0.5, "b": 0.5})
    assert [k for rows in parts.values() for part in rows for k in part] == [6, 7, 8]
    assert all(parts.values())


def test_an_id_beyond_the_embeddings_is_named_when_its_row_is_taken(tmp_path):
    write(tmp_path, tokens=struct.pack("<24i", *range(12), 300, *range(13, 24)))
    data = load(tmp_path)
    with pytest.raises(DataError, match=r"bin: document 3 has the token id 300, .* 300 embeddings"):
        [data.examples[k] for k in range(5)]
    with pytest.raises(DataError, match="document 3"):  # as `hetero check` looks at the first
        load(tmp_path, most=20_000, training={"max_steps": 5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 24}, "holds 24 tokens, and a sample takes 25"),
        ({"max_length": None}, "need data.max_length"),
        ({"format": "text"}, "data.format has no meaning"),
        ({"add_eos": False}, "data.add_eos has no meaning"),
        ({"training": {"train_sampling_strategy": "sequential"}}, "Megatron's own order"),
        ({"spec": ["corpus", "a.jsonl"]}, "mixes Megatron's files with others: a.jsonl"),
        ({"spec": ["0.5", "corpus", "0.5", "a.jsonl"]}, "a.jsonl has a weight"),
        ({"spec": ["0", "corpus"]}, "weight of a part of a blend is above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, message):
    write(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(DataError, match=message):
        load(tmp_path, **changes)


def test_one_file_of_a_pair_alone_is_refused(tmp_path):
    write(tmp_path).with_suffix(".bin").unlink()
    with pytest.raises(
        DataError, match=r"corpus.idx is a file of Megatron's without its corpus.bin"
    ):
        load(tmp_path, "corpus.idx")
    with pytest.raises(DataError, match="not found"):
        load(tmp_path, "corpus.bin")


def test_fingerprint_knows_files_length_and_epochs_but_not_the_number_of_steps(tmp_path):
    write(tmp_path)
    first = load(tmp_path).fingerprint
    assert load(tmp_path, training={"max_steps": 5}).fingerprint == first
    assert load(tmp_path, training={"max_steps": 6}).fingerprint != first
    assert load(tmp_path, max_length=3).fingerprint != first
    write(tmp_path, tokens=struct.pack("<24i", *range(23), 9))
    assert load(tmp_path).fingerprint != first


def test_a_list_without_weights_goes_on_beyond_one_pass(tmp_path):
    write(tmp_path)
    write(tmp_path, name="other", tokens=struct.pack("<24i", *range(24, 48)))
    data = load(tmp_path, ["corpus", "other"], training={"max_steps": 40})
    rows = [data.step_batches(step)[0]["input_ids"].min() for step in range(40)]
    assert sum(int(least) >= 24 for least in rows) == 20


def test_examples_are_shown_with_their_documents(tmp_path):
    write(tmp_path)
    config = make_config(tmp_path, {"train": "corpus", "max_length": 4}, max_steps=1)
    [first, _] = shown_examples(config, tiny_tokenizer(), 2)
    assert first.where.startswith(f"{tmp_path / 'corpus.bin'} document ")
    assert (first.tokens, first.trained, first.left_out) == (5, 5, [])


MEASURED = """
import json, resource, sys
from pathlib import Path
from hetero_framework.config import Config
from hetero_framework.data.train_data import load_data
from tests.unit.data_helpers import make_config, tiny_tokenizer
tokenizer = tiny_tokenizer()
data = {"train": "corpus", "max_length": 1024}
config = make_config(Path(sys.argv[1]), data, num_train_epochs=1, per_device_train_batch_size=64)
most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = most()
data = load_data(config, tokenizer, vocab_size=300)
for step in range(0, data.total_steps, data.total_steps // 200):
    data.step_batches(step)
print(json.dumps([before, most(), data.examples.tokens]))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="files with holes")
def test_a_corpus_of_20_gb_takes_less_than_200_mib(tmp_path):
    count, length = 5_000_000, 1000
    with (tmp_path / "corpus.idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, count, count + 1))
        np.full(count, length, "<i4").tofile(file)
        (np.arange(count, dtype="<i8") * 4 * length).tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)
    (tmp_path / "corpus.bin").touch()
    os.truncate(tmp_path / "corpus.bin", count * length * 4)
    place = {"HETERO_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    told = subprocess.run(command, env=os.environ | place, check=True, capture_output=True)
    before, most, tokens = json.loads(told.stdout)
    assert tokens == count * length
    assert most - before < 200 << 10  # KiB
