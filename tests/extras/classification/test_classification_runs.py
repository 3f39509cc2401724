"""Classifiers and reward models of one process beside transformers' Trainer and TRL's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)
from trl import RewardConfig, RewardTrainer

from hetero_framework.config import Config, TrainingConfig
from hetero_framework.trainer.coordinator import train
from tests.extras.preferences.test_preference_runs import WORDS, save_pairs
from tests.extras.reporting.test_callbacks import Recorder
from tests.integration.oracles import assert_close, read_rows, stock_model, trained_weights
from tests.integration.test_parity import weights
from tests.samples import save_tokenizer
from tests.unit.data_helpers import write_jsonl

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4},
    "bert": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
}
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bert": ["query", "value"]}
CLASSES = {
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
}


def save_classifier(
    folder: Path, model_type: str = "llama", task: str = "SEQ_CLS", **settings: Any
) -> Path:
    """A tiny random classifier without dropout, and its tokenizer, which pads for GPT-2, whose
    positions depend on it, on the left."""
    save_tokenizer(folder)
    if model_type == "gpt2":
        AutoTokenizer.from_pretrained(folder, padding_side="left").save_pretrained(folder)
    sizes: dict[str, Any] = {**SIZES[model_type], "vocab_size": 320, "num_attention_heads": 4}
    if model_type == "llama":
        sizes |= {"num_key_value_heads": 2}
    config = AutoConfig.for_model(
        model_type, **{**sizes, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **settings}
    )
    for name in vars(config):
        if name.endswith(("dropout", "pdrop", "dropout_prob")):
            setattr(config, name, 0.0)
    config.classifier_dropout = 0.0
    torch.manual_seed(4)
    CLASSES[task].from_config(config).save_pretrained(folder)
    return folder


def save_adapter(model: Path, folder: Path, task: str) -> Path:
    """Both matrices random, the head as it is."""
    model_type = json.loads((model / "config.json").read_text())["model_type"]
    torch.manual_seed(5)
    settings: Any = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": task}
    settings |= {"fan_in_fan_out": model_type == "gpt2", "target_modules": TARGETS[model_type]}
    get_peft_model(stock_model(model), LoraConfig(**settings)).save_pretrained(folder)
    return folder


def save_rows(path: Path, label: Callable[[int, random.Random], Any], count: int = 12) -> Path:
    draw = random.Random(1)
    rows = [
        {"text": " ".join(draw.choices(WORDS, k=draw.randint(1, 12))), "label": label(k, draw)}
        for k in range(count)
    ]
    return write_jsonl(path, rows)


def save_tagged(path: Path, count: int = 12) -> Path:
    draw, rows = random.Random(2), []
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(1, 9))
        rows.append({"tokens": words, "tags": draw.choices(["O", "B-LOC", "I-LOC"], k=len(words))})
    return write_jsonl(path, rows)


KINDS: dict[str, tuple[Callable[[int, random.Random], Any], dict[str, Any]]] = {
    "classes": (lambda k, draw: draw.choice(["sad", "glad", "so-so"]), {"num_labels": 3}),
    "several": (
        lambda k, draw: [draw.randint(0, 1) for _ in range(4)],
        {"num_labels": 4, "problem_type": "multi_label_classification"},
    ),
    "measure": (lambda k, draw: draw.uniform(-1, 1), {"num_labels": 1}),
}
NAMES = {"classes": ["glad", "sad", "so-so"], "tags": ["B-LOC", "I-LOC", "O"]}


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    if labels.dtype.kind == "f":
        return {"away": float(np.abs(logits.squeeze() - labels).mean())}
    right = (logits.argmax(-1) == labels)[labels != -100]
    return {"share": float(right.mean()), "spread": float(logits[labels != -100].std())}


def arguments_of(cls: Any, output: Path, training: TrainingConfig, **more: Any) -> Any:
    """Those of a trainer of transformers or TRL for a run with these settings."""
    names = ["max_steps", "per_device_train_batch_size", "per_device_eval_batch_size"]
    names += ["gradient_accumulation_steps", "learning_rate"]
    return cls(
        str(output),
        **{name: getattr(training, name) for name in names},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": "none"},
        **{"optim": "adamw_torch", "use_cpu": True, "disable_tqdm": True},
        **{"eval_strategy": "epoch", "dataloader_pin_memory": False, **more},
    )


def trainer_of(config: Config, output: Path, kind: str, adapter: Path | None) -> Trainer:
    place = Path(config.model.name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(place)
    found = []
    for row in read_rows(Path(config.data.train)):
        how: Any = {"truncation": True, "max_length": config.data.max_length}
        if kind == "tags":
            made = tokenizer(row["tokens"], is_split_into_words=True, **how)
            words = made.word_ids()
            made["labels"] = [
                -100 if w is None or w == before else NAMES[kind].index(row["tags"][w])
                for before, w in zip([None, *words], words, strict=False)
            ]
        else:
            made = tokenizer(row["text"], **how)
            label = row["label"]
            label = NAMES[kind].index(label) if kind == "classes" else label
            made["labels"] = [*map(float, label)] if kind == "several" else label
        found.append(dict(made))
    rows: Any = datasets.Dataset.from_list(found)
    collator = DataCollatorForTokenClassification if kind == "tags" else DataCollatorWithPadding
    trainer = Trainer(
        stock_model(place, adapter),
        args=arguments_of(TrainingArguments, output, config.training),
        data_collator=collator(tokenizer),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=accuracy,
    )
    # Otherwise the means of a step's micro-batches are added up and not divided.
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    return trainer


def compare(ours: Recorder, theirs: list[dict[str, Any]], metrics: list[str]) -> None:
    assert len(ours.state.log_history) == len(theirs)
    for one, two in zip(ours.state.log_history, theirs, strict=True):
        prefix = "eval_" if "eval_loss" in two else ""
        for name in (f"{prefix}{name}" for name in ("loss", *metrics)):
            if name in two:
                assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-5), (name, two)


LONG = pytest.mark.long
OFTEN = [
    *[("classes", "llama", True), ("classes", "bert", False), ("several", "gpt2", False)],
    *[("measure", "bert", False), ("tags", "llama", False)],
]
CASES = [
    pytest.param(*case, marks=() if case in OFTEN else LONG)
    for case in product((*KINDS, "tags"), SIZES, (False, True))
]


@pytest.mark.parametrize(("kind", "model_type", "lora"), CASES)
def test_losses_and_weights_are_those_of_the_trainer(kind, model_type, lora, alone, tmp_path):
    task = "TOKEN_CLS" if kind == "tags" else "SEQ_CLS"
    label, settings = KINDS.get(kind, (None, {"num_labels": 3}))
    if kind in NAMES:
        names = dict(enumerate(NAMES[kind]))
        settings = {"id2label": names, "label2id": {name: k for k, name in names.items()}}
    model = save_classifier(tmp_path / "model", model_type, task, **settings)
    rows = tmp_path / "rows.jsonl"
    rows = save_tagged(rows) if label is None else save_rows(rows, label)
    adapter = save_adapter(model, tmp_path / "start", task) if lora else None
    sections = {} if adapter is None else {"adapter": {"init_from": str(adapter)}}
    config = alone(
        training={
            "objective": "token-classification" if kind == "tags" else "classification",
            "gradient_accumulation_steps": 1 if kind == "tags" else 2,
            **{"learning_rate": 1e-3, "eval_strategy": "epoch"},
        },
        data={"train": str(rows), "eval": str(rows), "max_length": 12},
        model={"name_or_path": str(model)},
        **sections,
    )
    ours = Recorder()
    summary = train(config, callbacks=[ours], compute_metrics=accuracy)
    other = trainer_of(config, tmp_path / "other", kind, adapter)
    compare(ours, other.state.log_history, ["share", "spread", "away"])
    if kind in NAMES:
        found = ours.state.log_history[-2]
        assert found["eval_accuracy"] == pytest.approx(found["eval_share"])
    assert_close(weights(tmp_path / "run"), trained_weights(other.model), atol=1e-5)
    loaded = summary.load()
    assert type(loaded).__name__ == type(other.model).__name__
    problems = {"several": "multi_label_classification", "measure": "regression"}
    assert loaded.config.problem_type == problems.get(kind, "single_label_classification")
    if kind in NAMES:
        assert list(loaded.config.id2label.values()) == NAMES[kind]


@pytest.mark.parametrize(
    ("model_type", "lora", "training", "margin"),
    [
        ("llama", True, {"center_rewards_coefficient": 0.02}, True),
        pytest.param("llama", False, {}, False, marks=LONG),
        ("gpt2", False, {}, False),
        pytest.param("gpt2", True, {}, True, marks=LONG),
        pytest.param("bert", False, {"center_rewards_coefficient": 0.1}, False, marks=LONG),
        pytest.param("bert", True, {}, False, marks=LONG),
    ],
)
def test_rewards_are_those_of_trl(model_type, lora, training, margin, alone, tmp_path):
    model = save_classifier(tmp_path / "model", model_type, num_labels=1)
    adapter = save_adapter(model, tmp_path / "start", "SEQ_CLS") if lora else None
    sections = {} if adapter is None else {"adapter": {"init_from": str(adapter)}}
    pairs = save_pairs(tmp_path / "pairs.jsonl", 13)
    rows = read_rows(pairs)
    if margin:
        rows = [{**row, "margin": 0.1 * k} for k, row in enumerate(rows)]
        write_jsonl(pairs, rows)
    config = alone(
        training={
            **{"objective": "reward", "learning_rate": 1e-3, "eval_strategy": "epoch"},
            **{"per_device_eval_batch_size": 5, "max_steps": 5},
            **training,
        },
        data={"train": str(pairs), "eval": str(pairs), "max_length": 22},
        model={"name_or_path": str(model)},
        **sections,
    )
    ours = Recorder()
    train(config, callbacks=[ours])
    off = "activation_checkpointing"  # the name since transformers 5.20
    known = off in RewardConfig.__dataclass_fields__
    own = {"max_length": 22, "bf16": False, off if known else "gradient_checkpointing": False}
    own["center_rewards_coefficient"] = config.training.center_rewards_coefficient
    arguments = arguments_of(RewardConfig, tmp_path / "trl", config.training, **own)
    data: Any = datasets.Dataset.from_list(rows)
    other = RewardTrainer(
        stock_model(model, adapter),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    other.train()
    names = ["accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens"]
    compare(ours, other.state.log_history, names)
    assert_close(weights(tmp_path / "run"), trained_weights(other.model), atol=1e-5)
