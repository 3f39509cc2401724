"""Mixtures against `datasets` and the Trainer's collator."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.errors import ConfigError, DataError
from tests.cases import spread
from tests.unit.data_helpers import make_config, tiny_tokenizer, write_jsonl

MIXED = {"mixing": "interleave"}
SIZES = {"chat": 7, "code": 23, "math": 12}
STOPS = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")


def loaded(folder: Path, data: dict[str, Any], **training: Any) -> TrainData:
    """Of sources whose texts are their names with numbers."""
    for name, size in SIZES.items():
        write_jsonl(folder / f"{name}.jsonl", rows(name, size))
    return load_data(make_config(folder, data, **training), tiny_tokenizer())


def rows(name: str, size: int) -> list[dict[str, Any]]:
    return [{"text": f"{name} number {k}"} for k in range(size)]


def sources(*weights: float) -> list[dict[str, Any]]:
    parts = [{"path": f"{name}.jsonl"} for name in SIZES]
    return [part | {"weight": w} for part, w in itertools.zip_longest(parts, weights)]


def texts(data: TrainData, examples: Any = None) -> list[str]:
    examples = data.examples if examples is None else examples
    decode = partial(tiny_tokenizer().decode, skip_special_tokens=True)
    return [decode(examples[k][0]).strip() for k in range(len(examples))]


def theirs() -> list[datasets.Dataset]:
    return [datasets.Dataset.from_list(rows(name, size)) for name, size in SIZES.items()]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("weights", [(), (1.0, 1.0, 1.0), (0.2, 0.5, 0.3), (3.0, 0.5, 11.0)])
@pytest.mark.parametrize("seed", [3, 42])
def test_order_is_that_of_interleave_datasets(tmp_path, stop, weights, seed):
    section = {"train": sources(*weights), "mixing": "interleave", "stopping_strategy": stop}
    data = loaded(tmp_path, section, seed=seed)
    shares = [weight / sum(weights) for weight in weights]
    expected = datasets.interleave_datasets(
        theirs(), probabilities=shares or None, seed=seed, stopping_strategy=stop
    )
    assert texts(data) == expected["text"][:]


@pytest.mark.parametrize("size", [0.25, 5])
def test_examples_are_held_out_as_by_train_test_split(tmp_path, size):
    data = loaded(tmp_path, {"train": sources(), "val_set_size": size}, data_seed=9)
    expected = datasets.concatenate_datasets(theirs()).train_test_split(size, seed=9)
    assert texts(data) == expected["train"]["text"][:]
    assert texts(data, data.eval_sets[""]) == expected["test"]["text"][:]


def test_no_example_is_both_trained_and_held_out(tmp_path):
    section = {"train": sources(), "mixing": "interleave", "stopping_strategy": "all_exhausted"}
    data = loaded(tmp_path, {**section, "val_set_size": 9})
    held_out = texts(data, data.eval_sets[""])
    assert len(held_out) == 9
    assert not set(held_out) & set(texts(data))
    assert len(set(held_out) | set(texts(data))) == sum(SIZES.values())


def test_a_source_has_settings_of_its_own(tmp_path):
    write_jsonl(tmp_path / "qa.jsonl", [{"q": f"Q{k}", "a": f" A{k}"} for k in range(5)])
    named = {"prompt": "q", "completion": "a"}
    train = [
        {"path": "qa.jsonl", "columns": named, "max_samples": 2},
        {"path": "chat.jsonl", "split": "train[1:3]", "name": "talk"},
        "code.jsonl",
    ]
    data = loaded(tmp_path, {"train": train})
    assert texts(data)[:4] == ["Q0 A0", "Q1 A1", "chat number 1", "chat number 2"]
    (line,) = [line for line in data.report if "concatenated" in line]
    assert line == (
        "train: 27 examples, concatenated: qa 7.4% (2 of 2), talk 7.4% (2 of 2),"
        " code 85.2% (23 of 23)"
    )


@pytest.mark.parametrize("packing", [{}, {"packing": True}, {"padding_free": True}])
def test_each_token_of_a_micro_batch_is_marked(tmp_path, packing):
    section = {"train": sources(), "max_length": 48, "val_set_size": 4, **packing}
    data = loaded(tmp_path, section, per_device_train_batch_size=4)
    tokenizer = tiny_tokenizer()
    found = set()
    batches = [batch for step in range(data.steps_per_epoch) for batch in data.step_batches(step)]
    for batch in (*batches, data.eval_batches()[0]):
        assert batch["sources"].shape == batch["input_ids"].shape
        for ids, marks in zip(batch["input_ids"], batch["sources"].tolist(), strict=True):
            tokens = tokenizer.convert_ids_to_tokens(ids)
            letters = [mark for mark, token in zip(marks, tokens, strict=True) for _ in token]
            for number, name in enumerate(SIZES):
                for match in re.finditer(name, "".join(tokens)):
                    assert {*letters[slice(*match.span())]} == {number}
                    found.add(name)
    assert found == {*SIZES}


@pytest.mark.parametrize(
    ("eval_sets", "streaming"),
    spread(["eval.jsonl", {"one": "eval.jsonl", "two": "code.jsonl"}], [False, True]),
)
def test_evaluation_files_are_of_no_source(tmp_path, eval_sets, streaming):
    write_jsonl(tmp_path / "eval.jsonl", rows("eval", 60))  # more than there are to train on
    tiny_tokenizer().save_pretrained(tmp_path / "model")  # which the stream's process reads
    section = {"train": sources(), "eval": eval_sets, "max_length": 48, "streaming": streaming}
    data = loaded(tmp_path, section, max_steps=4)
    try:
        for name in data.eval_sets:
            batches = [*data.eval_batches(name)]
            assert not any("sources" in batch for batch in batches)
            assert sum(len(batch["input_ids"]) for batch in batches) == len(data.eval_sets[name])
        assert "sources" in data.step_batches(0)[0]
    finally:
        data.close()


def test_a_tokenised_source_is_found_again(tmp_path):
    first = loaded(tmp_path, {"train": sources(), "val_set_size": 3})
    again = loaded(tmp_path, {"train": sources(), "val_set_size": 3})
    assert first.fingerprint == again.fingerprint
    other = loaded(tmp_path, {"train": sources(), "val_set_size": 3}, seed=8)
    assert other.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("train", "more", "message"),
    [
        ([{"path": "code.jsonl"}, {"path": "old/code.jsonl"}], {}, 'two sources are called "code"'),
        ([{"path": "code.jsonl", "weight": 0}, "chat.jsonl"], {}, r"data.train\[0\].weight"),
        ([{"path": "code.jsonl", "weight": float("nan")}], {}, r"data.train\[0\].weight"),
        ([{"path": "code.jsonl", "weight": -1}], {}, r"data.train\[0\].weight"),
        (
            [{"path": "code.jsonl", "wait": 1}],
            {},
            r"data.train\[0\].wait: unknown key; known are: path,",
        ),
        ([{"path": "code.jsonl", "weight": 1}, "chat.jsonl"], MIXED, "some sources have a weight"),
        ([{"path": "code.jsonl", "weight": 1}], {}, 'are for mixing "interleave"'),
        (["code.jsonl", "chat.jsonl"], MIXED, "needs two sources"),
        ("code.jsonl", {"val_set_size": 1.5}, "whole number of samples"),
        ("code.jsonl", {"val_set_size": 2, "eval": "chat.jsonl"}, "val_set_size holds out"),
        ("code.jsonl", {"val_set_size": 23}, "val_set_size is 23 of 23 examples"),
    ],
)
def test_what_cannot_be_mixed_is_refused(tmp_path, train, more, message):
    with pytest.raises((ConfigError, DataError), match=message):
        loaded(tmp_path, {"train": train, **more})


def test_a_source_without_a_token_to_learn_is_named(tmp_path):
    write_jsonl(tmp_path / "short.jsonl", [{"text": ""}] * 3)
    with pytest.raises(DataError, match=r"data.train \(empty\): none of the 3 examples"):
        loaded(tmp_path, {"train": ["code.jsonl", {"path": "short.jsonl", "name": "empty"}]})


def test_a_folder_has_several_configurations(tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    for name in ("easy", "hard"):
        write_jsonl(folder / f"{name}.jsonl", rows(name, 3))
    configs = "".join(
        f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("easy", "hard")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    train = [{"path": "both", "dataset_config": name, "name": name} for name in ("hard", "easy")]
    data = loaded(tmp_path, {"train": train})
    assert texts(data) == [f"{name} number {k}" for name in ("hard", "easy") for k in range(3)]


def test_pairs_are_mixed_too(tmp_path):
    for name, size in SIZES.items():
        pairs = [
            {"prompt": f"{name} {k}?", "chosen": " Yes.", "rejected": " No."} for k in range(size)
        ]
        write_jsonl(tmp_path / f"{name}-pairs.jsonl", pairs)
    section = {
        "train": [{"path": f"{name}-pairs.jsonl", "weight": 1.0} for name in SIZES],
        "mixing": "interleave",
        "val_set_size": 4,
    }
    data = loaded(tmp_path, section, objective="dpo", seed=5)
    parts = [
        datasets.Dataset.from_list([{"text": f"{name} {k}?"} for k in range(size)])
        for name, size in SIZES.items()
    ]
    whole = datasets.concatenate_datasets(parts).train_test_split(4, seed=5)
    of_source = [
        [text for text in whole["train"]["text"][:] if text.startswith(name)] for name in SIZES
    ]
    expected = datasets.interleave_datasets(
        [datasets.Dataset.from_dict({"text": found}) for found in of_source],
        probabilities=[1 / 3] * 3,
        seed=5,
    )
    assert [text.split("?")[0] + "?" for text in texts(data)] == expected["text"][:]
    batch = data.step_batches(0)[0]
    assert "sources" not in batch
    assert len(batch["input_ids"]) == 2 * min(8, len(data.examples))
    held_out = [text.split("?")[0] + "?" for text in texts(data, data.eval_sets[""])]
    assert held_out == whole["test"]["text"][:]
