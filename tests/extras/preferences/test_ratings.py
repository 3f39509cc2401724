"""Rated answers beside TRL's KTOTrainer: examples, their order, tokens, and neighbours' answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from trl import KTOTrainer
from trl.data_utils import unpair_preference_dataset
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from hetero_framework.data.batches import padded_count, token_count
from hetero_framework.data.sources import Record
from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.errors import DataError
from hetero_framework.extras.observe.example_view import shown_examples
from hetero_framework.extras.preferences.ratings import unpaired
from tests.unit.data_helpers import CHATML_MARKED, make_config, tiny_tokenizer, write_jsonl


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def rated(prompt: Any, completion: Any, label: bool) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


SAID = [("The fox" * (k % 4), f" runs{' far' * (k * 5 % 7)}", k % 3 > 0) for k in range(11)]
TEXTS = [rated(*row) for row in SAID]
TALKS = [rated(said("user", f"{a}?"), said("assistant", b), label) for a, b, label in SAID]
PAIRS = [
    {"chosen": f"The fox runs{' a' * k}", "rejected": f"The fox rests{' b' * (k % 3)}"}
    for k in range(7)
]


def load(folder: Path, rows: list[dict[str, Any]], loss: str = "kto", **data: Any) -> TrainData:
    write_jsonl(folder / "train.jsonl", rows)
    training = {"objective": "kto", "loss_type": loss, "per_device_train_batch_size": 4}
    training["train_sampling_strategy"] = "sequential"
    config = make_config(folder, {"train": "train.jsonl", **data}, **training)
    return load_data(config, tiny_tokenizer(CHATML_MARKED))


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize(
    ("rows", "most"),
    [(TEXTS, None), (TALKS, None), (PAIRS, None), (TEXTS, 6), (TALKS, 23), (PAIRS, 14)],
)
def test_batches_are_those_of_trl(rows, loss, most, tmp_path):
    ours = load(tmp_path, rows, loss, max_length=most)
    tokenizer = tiny_tokenizer(CHATML_MARKED)
    trainer = KTOTrainer.__new__(KTOTrainer)
    trainer._tokenizer, trainer.calculate_KL = tokenizer, loss == "kto"
    trainer.desirable_weight = trainer.undesirable_weight = 1.0
    told = {"per_device_train_batch_size": 4, "max_length": most, "dataset_num_proc": None}
    table, arguments = datasets.Dataset.from_list(rows), SimpleNamespace(**told)
    theirs = trainer._prepare_dataset(table, tokenizer, arguments, "train")
    assert len(ours.examples) == len(theirs)
    if most in (6, 23):
        assert len(theirs) < len(rows)  # a prompt fills max_length
    collator = DataCollatorForUnpairedPreference(ours.pad_token_id, most)
    for first in range(0, len(theirs), 4):
        numbers = np.arange(first, min(first + 4, len(theirs)))
        batch = ours.collate(ours.examples, numbers)
        expected = collator([theirs[int(number)] for number in numbers])
        for part, prefix in enumerate(["", "KL_"][: len(batch["labels"]) // len(numbers)]):
            rows_of = slice(part * len(numbers), (part + 1) * len(numbers))
            width = expected[f"{prefix}input_ids"].shape[1]
            mask = expected[f"{prefix}completion_mask"].bool()
            labels = expected[f"{prefix}input_ids"].where(mask, -100)
            assert torch.equal(batch["labels"][rows_of, :width], labels)
            for name in ("input_ids", "attention_mask"):
                assert torch.equal(batch[name][rows_of, :width], expected[prefix + name])
            assert not batch["attention_mask"][rows_of, width:].any()
        assert batch["desirable"].tolist() == expected["label"].tolist()
        assert ours.examples.lengths[numbers].max() == batch["input_ids"].shape[1]
        assert token_count(batch) == expected["attention_mask"].sum()
        assert padded_count(batch) == expected["input_ids"].numel()


def test_pairs_come_apart_in_trls_order():
    rows = [{"prompt": "a", "chosen": str(k), "rejected": str(-k)} for k in range(1003)]
    ours = unpaired(Record(f"row {k}", row) for k, row in enumerate(rows))
    theirs = unpair_preference_dataset(datasets.Dataset.from_list(rows))
    assert [record.fields for record in ours] == list(theirs)


def test_the_first_examples_are_shown(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", PAIRS)
    training = {"objective": "kto", "train_sampling_strategy": "sequential"}
    config = make_config(tmp_path, {"train": "train.jsonl"}, **training)
    shown = shown_examples(config, tiny_tokenizer(), 1)
    assert "".join(text for text, _ in shown[0].pieces).startswith("The fox runs")


def test_the_balance_is_said(tmp_path):
    def line(rows: list[dict[str, Any]]) -> str:
        return next(line for line in load(tmp_path, rows).report if "desirable" in line)

    assert line(PAIRS) == "train: 7 of 14 answers are desirable"
    assert line(TEXTS).startswith("warning: train: 7 of 11 answers are desirable, 1.75 to 1")
    assert line([row for row in TEXTS if row["label"]]).endswith("KTO learns from both kinds")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([rated("a", "b", "yes")], "label must be true or false, found"),
        ([{"prompt": "a", "completion": "b"}], "label must be true or false, there is none"),
        ([rated("a", "b", None)], "there is none"),
        ([rated("a", "b", 2)], "label must be true or false"),
        ([{"completion": "b", "label": True}], "no field prompt"),
        ([{"prompt": "a", "label": True}], "no field completion"),
        ([rated("a", ["b"], True)], r"completion\[0\] must be an"),
        ([rated("a", 7, True)], "completion must be a string"),
        ([{"text": "a"}], "no field prompt"),
        ([*PAIRS, {"chosen": "a", "rejected": None}], "no rejected answer"),
    ],
)
def test_bad_answers_are_refused(rows, problem, tmp_path):
    with pytest.raises(DataError, match=problem):
        load(tmp_path, rows)


def test_their_end_is_cut(tmp_path):
    with pytest.raises(DataError, match="rated answers keep their start"):
        load(tmp_path, TEXTS, truncation_mode="keep_end")


def test_numbers_of_classes_do_not_say_which_answer_is_desirable(tmp_path):
    label = datasets.ClassLabel(names=["good", "bad"])
    text = datasets.Value("string")
    features = datasets.Features({"prompt": text, "completion": text, "label": label})
    columns = {"prompt": ["a"], "completion": ["b"], "label": [0]}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="found one of the classes good, bad"):
        load(tmp_path, [], train="rows.parquet")
