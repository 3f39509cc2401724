"""The examples of a stream, from real processes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import datasets
import msgpack
import numpy as np
import psutil
import pyarrow
import pytest

from hetero_framework.config import Config
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.errors import ConfigError, DataError
from hetero_framework.extras.observe.example_view import shown_examples
from hetero_framework.extras.streams import child
from hetero_framework.extras.streams import rows as rows_module
from tests.unit.data_helpers import make_config, tiny_tokenizer, write_jsonl
from tests.waiting import is_running, wait_until

STEPS, OF_STEP = 120, 8
Settings, Load = Callable[..., Config], Callable[..., TrainData]


@pytest.fixture
def settings(tmp_path):
    """The configuration of a stream of five shards of 40 rows, in steps of 8."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for shard in range(5):
        found = [{"text": f"row {shard * 100 + k} of the fox"} for k in range(40)]
        write_jsonl(tmp_path / f"s{shard}.jsonl", found)

    def make(*, training: dict[str, Any] | None = None, **data: Any) -> Config:
        given = {
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "model": {"name_or_path": "none", "tokenizer": str(tmp_path / "tokenizer")},
        }
        about = {"train": "s*.jsonl", "streaming": True, "max_length": 32}
        return make_config(tmp_path, {**about, **data}, **{**given, **(training or {})})

    return make


class _Here:
    """What the process says, without one."""

    def __init__(self, job: Any) -> None:
        self._frames = child._frames(json.loads(json.dumps(job)))

    def next(self) -> dict[str, Any]:
        frame: dict[str, Any] = msgpack.unpackb(msgpack.packb(next(self._frames)))
        return frame

    def close(self) -> None:
        self._frames.close()


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(rows_module, "_ReadingProcess", _Here)


@pytest.fixture
def load(settings):
    """Streams of such a configuration, to end after the test."""
    found: list[TrainData] = []

    def made(*, vocab_size: int | None = None, **changes: Any) -> TrainData:
        config = settings(**changes)
        found.append(load_data(config, load_tokenizer(config), vocab_size=vocab_size))
        return found[-1]

    yield made
    for data in found:
        data.close()


def pid_of(data: TrainData) -> int:
    rows: Any = data.examples
    return rows._child._process.pid


def same(one: TrainData, other: TrainData, steps: Any) -> bool:
    return all(
        a[name].equal(b[name])
        for step in steps
        for a, b in zip(one.step_batches(step), other.step_batches(step), strict=True)
        for name in a
    )


def test_examples_are_those_of_the_files(load):
    stream = load()
    whole = load(streaming=False)
    epoch = [stream.examples[k] for k in range(200)]
    assert sorted((ids.tolist(), labels.tolist()) for ids, labels in epoch) == sorted(
        (ids.tolist(), labels.tolist())
        for ids, labels in map(whole.examples.__getitem__, range(200))
    )
    assert stream.report[0].startswith("train: a stream of 5 files (")
    assert stream.report[1] == "train: format text (fields text)"
    assert (stream.total_steps, stream.steps_per_epoch, stream.row_tokens) == (STEPS, STEPS, 32)
    stream.close()
    wait_until(lambda: all(thread.name != "stream" for thread in threading.enumerate()))


@pytest.mark.usefixtures("here")
def test_a_step_is_a_function_of_its_number(load, monkeypatch):
    whole = load()
    other = load()
    assert same(whole, other, range(40))
    rows: Any = other.examples
    before = rows._child
    assert same(other, whole, [39, 38, 20, 39])
    assert rows._child is before
    monkeypatch.setattr(rows_module, "_KEPT_TOKENS", 100)
    assert same(other, whole, [40, 70, 30, 31, 71])
    assert rows._child is not before


@pytest.mark.usefixtures("here")
def test_a_state_of_any_step_goes_on_there(load):
    whole = load()
    states = {0: json.loads(json.dumps(whole.state))}
    for step in range(90):
        whole.step_batches(step)
        states[step + 1] = json.loads(json.dumps(whole.state))
    for step in (0, 17, 55, 90):
        resumed = load()
        resumed.restore(states[step])
        assert same(resumed, whole, range(step, step + 20))
        rows: Any = resumed.examples
        assert rows._counts["read"] <= 20 * OF_STEP + 128  # not from the beginning
        resumed.close()
    assert len(json.dumps(states[90])) < 10_000


@pytest.mark.usefixtures("here")
def test_the_longest_example_is_made_up(load):
    data = load(pad_to_multiple_of=20)
    largest = data.largest_batch(3)
    assert largest[0] == STEPS
    assert largest[1]["input_ids"].shape == (4, 40)
    assert data.largest_batch(STEPS) is None


@pytest.mark.usefixtures("here")
def test_columns_and_completions_are_read_as_of_files(load, tmp_path):
    rows = [{"question": f"fox {k}", "completion": "over the dog"} for k in range(30)]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    about = {"train": "pairs.jsonl", "columns": {"prompt": "question"}}
    training = {"train_sampling_strategy": "sequential"}
    stream = load(**about, training=training)
    whole = load(**about, streaming=False)
    for k in range(30):
        for a, b in zip(stream.examples[k], whole.examples[k], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("here")
def test_rows_without_a_token_to_learn_are_left_out_and_counted(load, tmp_path, logged):
    rows = [{"text": "fox " * 40}, {"text": ""}, {"text": "dog"}]
    write_jsonl(tmp_path / "s0.jsonl", rows)
    data = load(train="s0.jsonl", add_eos=False)
    lengths = {len(data.examples[k][0]) for k in range(2)}
    assert 32 in lengths
    data.close()
    assert any("3 read" in line and "1 cut" in line and "1 dropped" in line for line in logged)


@pytest.mark.usefixtures("here")
def test_an_epoch_that_teaches_nothing_is_refused(load, tmp_path):
    write_jsonl(tmp_path / "s0.jsonl", [{"text": ""}] * 3)
    with pytest.raises(DataError, match="none of the 3 examples of an epoch has a token"):
        load(train="s0.jsonl")


def test_a_process_that_is_killed_is_a_data_error(load):
    data = load(training={"max_steps": 10**6})
    os.kill(pid_of(data), signal.SIGKILL)
    ended = r"the process that reads the stream ended \(signal SIGKILL"
    with pytest.raises(DataError, match=ended):
        all(data.step_batches(step) for step in range(10**6))


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="no SIGSTOP")
def test_a_process_that_does_nothing_is_a_data_error(load, monkeypatch):
    data = load(training={"max_steps": 10**6})
    os.kill(pid_of(data), signal.SIGSTOP)
    monkeypatch.setattr(rows_module, "_PATIENCE_S", 0.2)
    with pytest.raises(DataError, match=r"gave nothing for 0\.4 s"):
        all(data.step_batches(step) for step in range(10**6))


@pytest.mark.long
def test_a_damaged_shard_is_named(load, tmp_path):
    packed = gzip.compress((tmp_path / "s0.jsonl").read_bytes() * 50)
    (tmp_path / "t0.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"t0\.jsonl\.gz: damaged gzip file"):
        load(train="t0.jsonl.gz")


@pytest.mark.usefixtures("here")
def test_a_bad_row_is_named(load, tmp_path):
    write_jsonl(tmp_path / "s0.jsonl", [{"text": "fox"}, {"text": 3}])
    with pytest.raises(DataError, match=r"s0\.jsonl:2"):
        load(train="s0.jsonl")
    with pytest.raises(DataError, match=r"has the id \d+, but the model has only 20 embeddings"):
        load(train="s1.jsonl", vocab_size=20)


@pytest.mark.usefixtures("here")
def test_a_resume_with_another_shard_is_refused(load, tmp_path):
    state = load().state
    os.utime(tmp_path / "s3.jsonl", ns=(0, 0))  # a copy elsewhere, say
    load().restore(state)
    content = (tmp_path / "s3.jsonl").read_text()
    (tmp_path / "s3.jsonl").write_text(content.replace("fox", "dog"))
    with pytest.raises(DataError, match=r"s3\.jsonl has changed since the run began"):
        load().restore(state)
    write_jsonl(tmp_path / "s9.jsonl", [{"text": "fox"}])
    with pytest.raises(DataError, match=r"s9\.jsonl has appeared"):
        load(train=["s0.jsonl", "s9.jsonl"]).restore(
            {**state, "shards": {"s0.jsonl": state["shards"]["s0.jsonl"]}}
        )


@pytest.mark.usefixtures("here")
def test_the_fingerprint_is_that_of_the_settings(load):
    one = load().fingerprint
    assert load(pad_to_multiple_of=8).fingerprint == one
    assert load(max_length=31).fingerprint != one


@pytest.mark.usefixtures("here")
def test_files_count_by_their_content_wherever_they_are(load, tmp_path):
    whole = load()
    state = json.loads(json.dumps(whole.state))
    (tmp_path / "moved").mkdir()
    for shard in tmp_path.glob("s*.jsonl"):
        shard.rename(tmp_path / "moved" / shard.name)
    for train in ("moved/*.jsonl", str(tmp_path / "moved")):
        moved = load(train=train)
        assert moved.fingerprint == whole.fingerprint
        moved.restore(state)
    content = (tmp_path / "moved" / "s3.jsonl").read_text()
    (tmp_path / "moved" / "s3.jsonl").write_text(content.replace("fox", "dog"))
    assert load(train="moved/*.jsonl").fingerprint != whole.fingerprint


@pytest.mark.long
def test_a_file_that_expands_without_end_takes_little_memory(load, tmp_path):
    """20 GB of rows with a long field that is not used, as far as 2,000 steps come."""
    row = json.dumps({"text": "the fox jumps over the dog", "notes": "and two " * 12_500})
    part = pyarrow.compress(f"{row}\n".encode() * 640, codec="zstd", asbytes=True)
    with (tmp_path / "all.jsonl.zst").open("wb") as file:
        file.writelines([part] * 312)
    data = load(train="all.jsonl.zst", training={"max_steps": 10**6})
    process = psutil.Process()
    before, most = process.memory_info().rss, 0
    for step in range(2000):
        data.step_batches(step)
        if step % 100 == 0:
            most = max(most, process.memory_info().rss)
    assert most - before < 100 * 2**20


_OWNER = """
import json, sys, time
from hetero_framework.config import Config
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import load_data
config = Config.from_dict(json.load(open(sys.argv[1])), sys.argv[2])
data = load_data(config, load_tokenizer(config))
print(data.examples._child._process.pid, flush=True)
time.sleep(600)
"""


def test_no_process_outlives_its_owner(settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings().to_dict()))
    command = [sys.executable, "-c", _OWNER, str(tmp_path / "config.json"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
    wait_until(lambda: not is_running(pid), "the end of the stream's process")


@pytest.mark.parametrize(
    ("data", "training", "words"),
    [
        ({}, {"max_steps": -1}, "is needed with data.streaming"),
        ({}, {"train_sampling_strategy": "group_by_length"}, "needs all lengths"),
        ({"max_length": None}, {}, "streaming needs max_length"),
        ({"packing": True}, {}, "streaming goes without packing"),
        ({"val_set_size": 0.1}, {}, "streaming holds nothing out"),
    ],
)
def test_settings_that_do_not_go_with_a_stream(data, training, words, settings):
    with pytest.raises(ConfigError, match=words):
        settings(**data, training=training)


@pytest.mark.usefixtures("here")
def test_samples_of_several_sources_know_theirs(load, tmp_path):
    pairs = [{"prompt": f"fox {k}", "completion": " over the dog"} for k in range(30)]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    train = [{"path": "s0.jsonl", "weight": 3}, {"path": "pairs.jsonl", "weight": 1}]
    data = load(train=train, mixing="interleave")
    assert data.mixture.metric_names == ("loss/s0", "loss/pairs")
    counts = [0, 0]
    for step in range(4):
        for batch in data.step_batches(step):
            for ids, labels, sources in zip(
                batch["input_ids"], batch["labels"], batch["sources"], strict=True
            ):
                is_pair = bool(labels[0] < 0)  # a prompt is not trained
                assert sources[ids.ne(data.pad_token_id)].eq(is_pair).all()
                counts[is_pair] += 1
    assert counts[0] > counts[1] > 0
    assert data.largest_batch(0) is not None


def test_streams_are_for_texts(load):
    with pytest.raises(DataError, match=r"data\.streaming is for texts"):
        load(training={"objective": "dpo"})


@pytest.mark.usefixtures("here")
def test_the_first_rows_are_shown(settings):
    config = settings(training={"train_sampling_strategy": "sequential"})
    shown = shown_examples(config, load_tokenizer(config), 3)
    assert [example.where.rpartition(":")[2] for example in shown] == ["1", "2", "3"]
    assert "".join(text for text, _ in shown[1].pieces).startswith("row 1 of the fox")


@pytest.mark.usefixtures("here")
def test_a_dataset_without_rows_is_named(settings, monkeypatch):
    empty = datasets.IterableDataset.from_generator(lambda: iter(()))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **how: empty)
    config = settings(train=["s*.jsonl", {"path": "some/name", "name": "empty"}])
    with pytest.raises(DataError, match="some/name holds no example"):
        load_data(config, load_tokenizer(config))
