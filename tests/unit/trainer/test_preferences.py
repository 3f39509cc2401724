"""Preference training of one process beside TRL's DPOTrainer: losses, rewards and weights."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from hetero_framework.models.cut.preferences import METRICS
from hetero_framework.trainer.coordinator import train
from tests.integration.oracles import (
    assert_close,
    read_rows,
    save_adapter,
    stock_model,
    trained_weights,
)
from tests.integration.test_parity import weights
from tests.unit.trainer.conftest import Alone
from tests.unit.trainer.test_callbacks import Recorder

WORDS = ("red", "green", "old", "house", "keeps", "the", "small", "door", "and", "window", "light")


def save_pairs(path: Path, count: int = 11) -> Path:
    draw = random.Random(0)

    def text(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    rows = [
        {"prompt": text(6), "chosen": f" {text(9)}", "rejected": f" {text(9)}"}
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dpo(config: Any, output: Path, adapter: Path | None = None) -> DPOTrainer:
    training = config.training
    told = {
        name: getattr(training, name)
        for name in (
            *("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "beta"),
            *("learning_rate", "label_smoothing", "use_weighting", "ld_alpha", "discopop_tau"),
            *("precompute_ref_log_probs", "max_grad_norm"),
        )
    }
    losses, given = list(training.losses), training.loss_weights
    if training.rpo_alpha:
        given = [*(given or [1.0] * len(losses)), training.rpo_alpha]
        losses.append("sft")
    rows = datasets.Dataset.from_list(read_rows(Path(str(config.data.train))))
    known = {field.name for field in fields(DPOConfig)}
    off = "activation_checkpointing"  # the name since transformers 5.20
    told[off if off in known else "gradient_checkpointing"] = False
    model = str(config.model.name_or_path)
    arguments = DPOConfig(
        str(output),
        **told,
        loss_type=losses,
        loss_weights=None if given is None else list(given),
        max_length=config.data.max_length,
        logging_steps=1,
        lr_scheduler_type="linear",
        save_strategy="no",
        report_to="none",
        bf16=False,
        optim="adamw_torch",
        use_cpu=True,
        disable_tqdm=True,
        eval_strategy="epoch" if config.data.eval else "no",
        per_device_eval_batch_size=training.per_device_eval_batch_size,
        dataloader_pin_memory=False,
    )
    trainer = DPOTrainer(
        stock_model(Path(model), adapter),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows if config.data.eval else None,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return trainer


CASES: dict[str, dict[str, Any]] = {
    **{
        name: {"loss_type": name}
        for name in (
            *("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero"),
            *("apo_down", "discopop", "sigmoid_norm"),
        )
    },
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.1},
    "robust": {"loss_type": "robust", "label_smoothing": 0.1, "beta": 0.3},
    "several": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "rpo": {"rpo_alpha": 0.5},
    "weighted": {"use_weighting": True, "loss_chunk_tokens": 9},
    "shared_length": {"ld_alpha": 0.3},
    "in_chunks": {"loss_chunk_tokens": 7},
    "whole_rows": {"loss_chunk_tokens": 60},
}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("case", CASES)
def test_losses_rewards_and_weights_are_those_of_dpo_trainer(
    case: str, lora: bool, alone: Alone, alone_model: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {}
    adapter = save_adapter(alone_model, tmp_path / "adapter") if lora else None
    if adapter is not None:
        sections["adapter"] = {"init_from": str(adapter)}
    pairs = str(save_pairs(tmp_path / "pairs.jsonl"))
    training = {"objective": "dpo", "eval_strategy": "epoch", "learning_rate": 1e-3, **CASES[case]}
    config = alone(
        training=training, data={"train": pairs, "eval": pairs, "max_length": 20}, **sections
    )
    ours = Recorder()
    train(config, callbacks=[ours])
    other = dpo(config, tmp_path / "trl", adapter)
    assert ours.state is not None
    history = other.state.log_history
    assert len(ours.state.log_history) == len(history)
    for one, two in zip(ours.state.log_history, history, strict=True):
        prefix = "eval_" if "eval_loss" in two else ""
        names = [f"{prefix}loss", *(f"{prefix}{name}" for name in METRICS)]
        for name in names if f"{prefix}loss" in two else ():
            assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-5), (name, two)
    assert_close(weights(tmp_path / "run"), trained_weights(other.model), atol=1e-5)
