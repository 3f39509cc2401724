"""Classifiers and reward models whatever the cut: the same bits, also resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hetero_framework.config import Config
from hetero_framework.errors import CallbackError
from hetero_framework.extras.exporting.merge import merge_adapter
from hetero_framework.models.files.export import OutputDirectory
from hetero_framework.trainer.coordinator import train
from tests.cases import seldom
from tests.extras.classification.test_classification_runs import (
    KINDS,
    save_classifier,
    save_pairs,
    save_rows,
    save_tagged,
)
from tests.extras.preferences.test_preference_processes import INTERLEAVED
from tests.integration.test_best_model import Ending
from tests.integration.test_parity import LORA, assert_same, weights
from tests.pools import read_metrics

pytestmark = pytest.mark.xdist_group("pool")

TRAINING = {
    **{"objective": "classification", "max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0},
    **{"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 3},
}
BERT_LORA = {"target_modules": ["query", "value"], "r": 4, "lora_dropout": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "reward_lora": {"adapter": LORA, "training": {"objective": "reward"}},
    "reward": {"training": {"objective": "reward", "gradient_checkpointing": True}},
    "classes": {},
    "classes_lora_checkpointing_bf16": {
        "adapter": LORA,
        "training": {"gradient_checkpointing": True, "bf16": True},
    },
    "classes_of_bert": {"model": "bert", "adapter": BERT_LORA},
    "tags": {"training": {"objective": "token-classification"}},
    "tags_of_bert": {"model": "bert", "training": {"objective": "token-classification"}},
}


@pytest.fixture
def configured(pool, llama, tmp_path, verdicts):
    rows = {
        "reward": save_pairs(tmp_path / "pairs.jsonl"),
        "classification": save_rows(tmp_path / "rows.jsonl", KINDS["classes"][0]),
        "token-classification": save_tagged(tmp_path / "tagged.jsonl"),
    }
    bert = tmp_path / "bert"

    def config(name: str, cuts: list[int], model: str = "llama", **sections: Any) -> Config:
        if model == "bert" and not bert.exists():
            save_classifier(bert, "bert", num_hidden_layers=6, num_labels=3)
        sections["training"] = {**TRAINING, **sections.get("training", {})}
        sections["model"] = {"name_or_path": str(bert if model == "bert" else llama)}
        data = str(rows[sections["training"]["objective"]])
        sections["data"] = {"train": data, "eval": data, "max_length": 40}
        return Config.from_dict(pool.config(tmp_path / name, cuts, **sections))

    return config


@pytest.mark.parametrize("case", seldom(CASES, *[*CASES][1:]))
def test_labels_and_rewards_do_not_depend_on_the_cut(case, configured, tmp_path):
    """The head begins at random, since the checkpoint has another one."""
    sections = CASES[case]
    whole = train(configured("whole", [], **sections))
    assert len(set(whole.losses)) == 3
    assert "accuracy" in whole.metrics
    assert "eval_accuracy" in whole.metrics
    ways: dict[str, dict[str, Any]] = {
        "two": {"cuts": [3]},
        "three": {"cuts": [2, 4]},
        "interleaved": {"cuts": [], "shard_plan": INTERLEAVED},
    }
    for name, way in ways.items():
        cut = train(configured(name, way.pop("cuts"), **way, **sections))
        assert cut.losses == whole.losses
        assert read_metrics(tmp_path / name) == read_metrics(tmp_path / "whole")
        assert cut.metrics["eval_accuracy"] == whole.metrics["eval_accuracy"]
        assert_same(weights(tmp_path / name), weights(tmp_path / "whole"))


@pytest.mark.long
@pytest.mark.parametrize("sections", [{}, {"adapter": LORA}], ids=["full", "lora"])
def test_a_run_that_was_ended_goes_on_under_another_plan(sections, configured, tmp_path):
    whole = train(configured("whole", [], **sections))
    with pytest.raises(CallbackError):
        train(configured("ended", [3], **sections), callbacks=[Ending(2)])
    assert train(configured("ended", [2, 4], **sections)).losses == whole.losses[2:]
    assert_same(weights(tmp_path / "ended"), weights(tmp_path / "whole"))


@pytest.mark.long
def test_the_result_is_loaded_by_its_class(configured, llama, tmp_path):
    """The adapter over the base, which has no head, gives what the whole result gives."""
    adapted = train(configured("lora", [3], adapter=LORA)).load().train(False)
    full = train(configured("full", [2, 4])).load().train(False)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "full" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "lora" / "adapter")
    inputs = tokenizer(["the door", "a small house and the window"], padding=True)
    inputs = {name: torch.tensor(value) for name, value in inputs.items()}
    with torch.no_grad():
        assert adapted(**inputs).logits.shape == (2, 3)
        assert torch.equal(full(**inputs).logits, again.train(False)(**inputs).logits)
    names = dict(enumerate(["glad", "sad", "so-so"]))
    assert adapted.config.id2label == again.config.id2label == names
    saved = weights(tmp_path / "lora")
    (head,) = (name for name in saved if "score" in name)
    of_peft = head.replace("score.weight", "score.modules_to_save.default.weight")
    assert torch.equal(saved[head], adapted.state_dict()[of_peft])
    merge_adapter(tmp_path / "lora" / "adapter", str(llama), OutputDirectory(tmp_path / "merged"))
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").train(False)
    with torch.no_grad():
        torch.testing.assert_close(whole(**inputs).logits, adapted(**inputs).logits)
    assert whole.config.id2label == adapted.config.id2label
