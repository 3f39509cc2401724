"""Labelled texts and words, as tokenizers and transformers' examples of training read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import BertTokenizer, LlamaConfig
from trl import RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

from hetero_framework.config import TrainingConfig
from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.errors import DataError
from hetero_framework.extras.classification.labels import Stated
from hetero_framework.extras.observe.example_view import shown_examples
from hetero_framework.models.cut.objectives import objective_of
from tests.unit.data_helpers import CHATML_MARKED, make_config, tiny_tokenizer, write_jsonl


def load(
    folder: Path,
    rows: list[dict[str, Any]],
    objective: str = "classification",
    stated: Stated | None = None,
    tokenizer: Any = None,
    **data: Any,
) -> TrainData:
    write_jsonl(folder / "train.jsonl", rows)
    config = make_config(folder, {"train": "train.jsonl", **data}, objective=objective)
    return load_data(config, tokenizer or tiny_tokenizer(CHATML_MARKED), stated=stated)


FOLLOWED = [
    ("classification", {"content": "The fox", "label": "a"}),
    ("classification", {"text": "The fox", "sentiment": "a"}),
    ("classification", {"review": "The fox", "rating": 2}),
    ("classification", {"premise": "The fox", "hypothesis": "It runs", "gold_label": "a"}),
    ("classification", {"sentence1": "The fox", "sentence2": "It runs", "target": 1}),
    ("classification", {"sentence1": "The fox", "sentence2": "It runs", "label": 1}),
    ("classification", {"Text": "The fox", "Label": 1}),
    ("classification", {"TEXT": "The fox", "label": 1}),
    ("token-classification", {"words": ["The", "fox"], "labels": ["a", "b"]}),
    ("token-classification", {"tokens": ["The", "fox"], "pos_tags": ["a", "b"]}),
    ("token-classification", {"words": ["The", "fox"], "pos_tags": ["a", "b"]}),
]


@pytest.mark.parametrize(("objective", "fields"), FOLLOWED, ids=str)
def test_a_hint_on_columns_works_as_it_is_written(tmp_path, objective, fields):
    with pytest.raises(DataError) as refusal:
        load(tmp_path, [fields], objective)
    columns = json.loads(re.search(r"data\.columns (\{.*\})", str(refusal.value))[1])
    assert len(load(tmp_path, [fields], objective, columns=columns).examples) == 1


def test_the_labels_are_those_of_all_examples(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", texts(*"aaab"))
    config = make_config(tmp_path, {"train": "train.jsonl"}, objective="classification")
    assert load_data(config, tiny_tokenizer(), most=2).labels.names == ("a", "b")


CLASS = "single_label_classification"


def labels(data: TrainData) -> torch.Tensor:
    return data.micro_batch(range(len(data.examples)))["labels"]


def texts(*given: Any) -> list[dict[str, Any]]:
    return [{"text": f"The fox{' runs' * k}", "label": label} for k, label in enumerate(given)]


@pytest.mark.parametrize(
    ("given", "stated", "problem", "names", "expected"),
    [
        (["b", "a", "b"], None, "single", "a b", [1, 0, 1]),
        ([2, 0, 1], None, "single", "LABEL_0 LABEL_1 LABEL_2", [2, 0, 1]),
        ([True, False], None, "single", "LABEL_0 LABEL_1", [1, 0]),
        ([0.5, 1, -2], None, "regression", "LABEL_0", [0.5, 1.0, -2.0]),
        ([3, 1], Stated(problem="regression"), "regression", "LABEL_0", [3.0, 1.0]),
        ([[0, 1], [1, 1]], None, "multi", "LABEL_0 LABEL_1", [[0.0, 1.0], [1.0, 1.0]]),
        ([["b"], ["b", "a"], []], None, "multi", "a b", [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]),
        ([[0.5, 2.5]], Stated(problem="regression"), "regression", "LABEL_0 LABEL_1", [[0.5, 2.5]]),
        (["b"], Stated(names=("c", "b")), "single", "c b", [1]),
        ([1, "c"], Stated(names=("c", "b"), problem=CLASS), "single", "c b", [1, 0]),
        ([1], Stated(count=5), "single", "LABEL_0 LABEL_1 LABEL_2 LABEL_3 LABEL_4", [1]),
        ([4, 1], Stated(count=1), "regression", "LABEL_0", [4.0, 1.0]),  # as in transformers
        ([9000, 1], Stated(count=1, names=("stars",)), "regression", "stars", [9000.0, 1.0]),
        ([9000, 0.5], None, "regression", "LABEL_0", [9000.0, 0.5]),
    ],
)
def test_labels_are_told_by_how_they_look(given, stated, problem, names, expected, tmp_path):
    data = load(tmp_path, texts(*given), stated=stated)
    assert data.labels.problem.startswith(problem)
    assert " ".join(data.labels.names) == names
    found = labels(data)
    assert found.tolist() == expected
    assert found.dtype == (torch.int64 if problem == "single" else torch.float32)


@pytest.mark.parametrize(
    ("given", "stated", "problem"),
    [
        ([0, -1], None, r"jsonl:2: the label -1 is none of the 2 classes"),
        ([0, 5], Stated(count=3), r"jsonl:2: the label 5 is none of the 3 classes"),
        (["a", "z"], Stated(names=("a", "b"), problem=CLASS), r'jsonl:2: the label "z" is none'),
        ([0.5, 1e39], None, r"jsonl:2: 1e\+39 is no label for regression"),
        ([0, 0.5], Stated(count=2, problem=CLASS), r"jsonl:2: the label 0.5 is none"),
        ([0, 1], Stated(count=1, problem=CLASS), r"jsonl:2: the label 1 is none of the 1 classes"),
        (["a", None], None, r"jsonl:2: no label among its fields: text, label"),
        (["a", 1], None, r"jsonl:2: label is of another kind"),
        ([1, [1]], None, r"jsonl:2: label is of another kind"),
        ([[0, 1], [1]], None, r"jsonl:2: 1 numbers for the 2 labels"),
        ([[0, 1], [1, 3]], None, r"jsonl:2: \[1, 3\] is no label for multi_label"),
        ([0.5, float("nan")], None, r"jsonl:2: NaN is no label for regression"),
        (["a", "b"], Stated(count=3), r"have 2 labels, and the model has 3: a, b"),
        ([0, 1_000_000], None, r"jsonl:2: the label 1,000,000 would be one of 1,000,001; .* 4,096"),
        ([0, 4096, 1], None, r"jsonl:2: the label 4,096 would be one of 4,097; .* at most 4,096"),
        (list(map(str, range(4097))), None, r"have 4,097 labels: 0, 1, .*; .* at most 4,096"),
        ([[0] * 4097, [1] * 4097], None, r"would be one of 4,097; .* at most 4,096"),
        (["a", ""], None, r"jsonl:2: label is empty"),
    ],
)
def test_a_label_that_is_none_is_refused(given, stated, problem, tmp_path):
    with pytest.raises(DataError, match=problem):
        load(tmp_path, texts(*given), stated=stated)


NAMES = ["neg", "pos", "mixed"]
README = """---
dataset_info:
  features:
  - {name: text, dtype: string}
  - name: label
    dtype:
      class_label: {names: {"0": neg, "1": pos, "2": mixed}}
---
"""


def named(folder: Path, form: str, rows: list[dict[str, Any]], names: Any = NAMES) -> str:
    """The rows as a data set whose labels (a number or a list of them) have names."""
    import datasets

    name, label = f"{form}_{len(list(folder.iterdir()))}", datasets.ClassLabel(names=names)
    columns = {column: datasets.Value("string") for column in rows[0]}
    for column in {"label", "tags"} & rows[0].keys():
        columns[column] = label if isinstance(rows[0][column], int) else datasets.List(label)
    if "tokens" in columns:
        columns["tokens"] = datasets.List(datasets.Value("string"))
    made = datasets.Dataset.from_list(rows, features=datasets.Features(columns))
    if form == "parquet":
        made.to_parquet(folder / f"{name}.parquet")
        return f"{name}.parquet"
    if form == "saved":
        made.save_to_disk(folder / name)
    else:
        (folder / name).mkdir()
        write_jsonl(folder / name / "train.jsonl", rows)
        (folder / name / "README.md").write_text(README)
    return name


def load_named(
    folder: Path, train: Any, held_out: Any = None, stated: Stated | None = None, **training: Any
) -> TrainData:
    data = {"train": train, "eval": held_out, "eval_split": "train"}
    config = make_config(folder, data, **{"objective": "classification", **training})
    return load_data(config, tiny_tokenizer(CHATML_MARKED), stated=stated)


@pytest.mark.parametrize("form", ["parquet", "saved", "readme"])
def test_names_of_labels_are_those_of_the_data_set(form, tmp_path):
    """As transformers' examples take them, also of classes that no row for training has."""
    train, held_out = (named(tmp_path, form, texts(*rows)) for rows in ([1, 0], [2, 1]))
    data = load_named(tmp_path, train, held_out)
    assert data.labels.names == ("neg", "pos", "mixed")
    assert data.labels.problem == CLASS
    assert labels(data).tolist() == [1, 0]
    assert data.eval_batches()[0]["labels"].tolist() == [2, 1]
    stars = load_named(tmp_path, train, stated=Stated(1, "regression"))
    assert labels(stars).tolist() == [1.0, 0.0]


def test_names_of_several_labels_and_of_words_are_those_of_the_data_set(tmp_path):
    data = load_named(tmp_path, named(tmp_path, "parquet", texts([2, 0], [], [1])))
    assert data.labels.names == ("neg", "pos", "mixed")
    assert labels(data).tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    rows = [{"tokens": ["a", "b"], "tags": [2, 0]}]
    words = load_named(tmp_path, named(tmp_path, "saved", rows), objective="token-classification")
    assert words.labels.names == ("neg", "pos", "mixed")
    assert labels(words)[labels(words) >= 0].tolist() == [2, 0]


def test_names_of_labels_that_disagree_are_refused(tmp_path):
    train = named(tmp_path, "parquet", texts(1, 0))
    other = named(tmp_path, "parquet", texts(1, 0), ["pos", "neg", "mixed"])
    said = r"row 1: its classes are called pos, neg, mixed, and those .* neg, pos, mixed"
    for spec in ([train, other], train):
        with pytest.raises(DataError, match=said):
            load_named(tmp_path, spec, other)
    for stated in (Stated(names=("pos", "neg", "mixed")), Stated(names=("a",), problem=CLASS)):
        with pytest.raises(DataError, match=r"row 1: its classes are called neg, pos, mixed, and"):
            load_named(tmp_path, train, stated=stated)
    with pytest.raises(DataError, match=r"have 3 labels, and the model has 2: neg, pos, mixed"):
        load_named(tmp_path, train, stated=Stated(2))
    assert load_named(tmp_path, train, stated=Stated(3)).labels.names == ("neg", "pos", "mixed")
    unlabelled = named(tmp_path, "parquet", texts(-1, 1))
    with pytest.raises(DataError, match=r"row 1: the label -1 is none of the 3 classes: neg"):
        load_named(tmp_path, unlabelled)


def test_data_of_another_objective_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"jsonl:1: no label among its fields: text"):
        load(tmp_path, [{"text": "a"}])
    with pytest.raises(DataError, match=r"jsonl:1: no chosen answer among its fields: text"):
        load(tmp_path, [{"text": "a"}], "reward")
    with pytest.raises(DataError, match="trained on labelled texts"):
        load(tmp_path, texts("a"), format="preference")
    tagged = {"tokens": ["a", "b"], "tags": ["O"]}
    with pytest.raises(DataError, match=r"jsonl:1: 1 tags for 2 tokens"):
        load(tmp_path, [tagged], "token-classification")
    with pytest.raises(DataError, match=r"jsonl:1: tokens must be a list"):
        load(tmp_path, [{"tokens": "a", "tags": ["O"]}], "token-classification")


def test_texts_are_cut_as_the_tokenizer_cuts_pairs(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fox", "runs", "far", "dog"]
    tokenizer = BertTokenizer(vocab={word: k for k, word in enumerate(vocabulary)})
    rows = [
        {"text": "fox runs far", "text_pair": "dog", "label": 0},
        {"text": "fox runs far " * 4, "text_pair": "dog runs " * 3, "label": 1},
    ]
    data = load(tmp_path, rows, tokenizer=tokenizer, max_length=12)
    batch = data.micro_batch([0, 1])
    pairs = ([row[name] for row in rows] for name in ("text", "text_pair"))
    other = tokenizer(*pairs, truncation=True, max_length=12, padding=True, return_tensors="pt")
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], other[name]), name
    assert any("1 of 2 examples were longer than max_length=12" in line for line in data.report)
    single = load(tmp_path, [{"text": "fox", "label": 1}], tokenizer=tokenizer)
    assert "token_type_ids" not in single.micro_batch([0])


def test_messages_may_have_a_label(tmp_path):
    tokenizer = tiny_tokenizer(CHATML_MARKED)
    talk = [{"role": "user", "content": "The fox?"}, {"role": "assistant", "content": "It runs."}]
    data = load(tmp_path, [{"messages": talk, "label": "good"}], tokenizer=tokenizer)
    ids = tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
    assert data.micro_batch([0])["input_ids"].tolist() == [ids]


def test_the_first_token_of_a_word_has_its_label(tmp_path):
    tokenizer = tiny_tokenizer(CHATML_MARKED)
    begin = "<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[begin]
    )
    rows = [
        {"tokens": ["foxes", "run", "faraway"], "ner_tags": ["B", "O", "I"]},
        {"tokens": ["x"], "ner_tags": [-100]},
    ]
    data = load(tmp_path, rows, "token-classification", tokenizer=tokenizer)
    assert len(data.examples) == 1
    made = tokenizer(rows[0]["tokens"], is_split_into_words=True)
    words = made.word_ids()
    assert words[0] is None
    assert len(words) > 4
    expected = [
        -100 if word is None or word == before else [0, 2, 1][word]
        for before, word in zip([None, *words], words, strict=False)
    ]
    batch = data.micro_batch([0])
    assert batch["input_ids"].tolist() == [made["input_ids"]]
    assert batch["labels"].tolist() == [expected]
    config = make_config(tmp_path, {"train": "train.jsonl"}, objective="token-classification")
    assert shown_examples(config, tokenizer, 1)[0].tokens == len(words)


@pytest.mark.parametrize("labels", [torch.ones(2, 5, dtype=torch.int64), torch.tensor([1, 2])])
def test_a_probe_has_a_label_for_each_text(labels):
    """Of made-up token ids, and of a micro-batch of the run."""
    objective = objective_of(TrainingConfig(objective="classification"))
    inputs = {"input_ids": torch.ones(2, 5, dtype=torch.int64), "labels": labels}
    assert objective.probe_inputs(LlamaConfig(), inputs)["labels"].tolist() == [0, 0]


TALK = {
    "prompt": [{"role": "user", "content": "Where?"}],
    "chosen": [{"role": "assistant", "content": "Here."}],
    "rejected": [{"role": "assistant", "content": "I run and run and run."}],
}
PAIRS: dict[str, list[dict[str, Any]]] = {
    "texts": [
        {"prompt": "The fox", "chosen": f" runs{' far' * k}", "rejected": " rests", "margin": k / 4}
        for k in range(5)
    ],
    "without_prompt": [
        {"chosen": "The fox runs", "rejected": "A dog" + " rests" * k} for k in (1, 9)
    ],
    "talks": [TALK],
    "whole_talks": [{n: TALK["prompt"] + TALK[n] for n in ("chosen", "rejected")}],
}


@pytest.mark.parametrize("case", PAIRS)
def test_pairs_are_those_of_the_reward_trainer(case, tmp_path):
    import datasets

    tokenizer, rows = tiny_tokenizer(CHATML_MARKED), PAIRS[case]
    data = load(tmp_path, rows, "reward", tokenizer=tokenizer, max_length=60)
    arguments: Any = type("Arguments", (), {"dataset_num_proc": None, "max_length": 60})
    stored = datasets.Dataset.from_list(rows)
    other = list(RewardTrainer._prepare_dataset(None, stored, tokenizer, arguments, "train"))  # type: ignore[arg-type]
    assert len(data.examples) == len(other)
    batch = data.micro_batch(range(len(other)))
    expected = DataCollatorForPreference(data.pad_token_id)(other)
    for name, value in expected.items():
        assert torch.equal(batch[name], value), name


def test_longer_pairs_are_left_out(tmp_path):
    data = load(tmp_path, PAIRS["texts"], "reward", max_length=17)
    assert 0 < len(data.examples) < 5
    assert any("are longer than max_length=17 and were left out" in x for x in data.report)


@pytest.mark.parametrize(
    ("margins", "problem"),
    [
        ([1, None], "jsonl:2: margin must be a finite number, found null"),
        ([None, 1], "jsonl:2: margin must be left out, as in the first pair, found 1"),
        ([1, "1"], "jsonl:2: margin must be a finite number, found"),
        ([True], "jsonl:1: margin must be a finite number, found true"),
        ([float("nan")], "jsonl:1: margin must be a finite number, found NaN"),
        ([1e39], r"jsonl:1: margin must be a finite number, found 1e\+39"),  # infinity in float32
    ],
)
def test_margins_are_finite_numbers_of_all_pairs(margins, problem, tmp_path):
    rows = [{"prompt": "", "chosen": "a", "rejected": "b", "margin": each} for each in margins]
    with pytest.raises(DataError, match=problem):
        load(tmp_path, rows, "reward")
