"""Preference training of one process beside TRL's trainers: losses, rewards and weights."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.trainer.coordinator import train
from tests.extras.reporting.test_callbacks import Recorder
from tests.integration.oracles import (
    assert_close,
    read_rows,
    save_adapter,
    stock_model,
    trained_weights,
)
from tests.integration.test_parity import weights
from tests.samples import plan_of, save_tiny

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


def save_ratings(path: Path, count: int = 11) -> Path:
    """Rated answers; of some micro-batches all are of one kind."""
    pairs = read_rows(save_pairs(path, count))
    labels = [number % 5 < 3 for number in range(count)]
    rows = [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": label}
        for pair, label in zip(pairs, labels, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trl_classes(objective: str) -> tuple[Any, Any]:
    """The trainer of an objective, and its arguments."""
    if objective == "dpo":
        return DPOTrainer, DPOConfig
    if objective == "kto":
        return KTOTrainer, KTOConfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL calls them experimental
        from trl.experimental.cpo import CPOConfig, CPOTrainer
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer
    return (ORPOTrainer, ORPOConfig) if objective == "orpo" else (CPOTrainer, CPOConfig)


def trl(config: Config, output: Path, adapter: Path | None = None) -> Any:
    training, data = config.training, config.data
    trainer_class, config_class = trl_classes(training.objective)
    known = {field.name for field in fields(config_class)}
    told = {
        name: getattr(training, name)
        for name in (
            *("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "beta"),
            *("learning_rate", "label_smoothing", "use_weighting", "ld_alpha", "discopop_tau"),
            *("precompute_ref_log_probs", "max_grad_norm", "cpo_alpha", "simpo_gamma"),
            *("desirable_weight", "undesirable_weight", "train_sampling_strategy"),
            *("logging_steps",),
        )
        if name in known
    }
    losses, given = list(training.losses), training.loss_weights
    if training.rpo_alpha:
        given = [*(given or [1.0] * len(losses)), training.rpo_alpha]
        losses.append("sft")
    if "loss_weights" in known:
        told |= {"loss_type": losses, "loss_weights": None if given is None else list(given)}
    elif "loss_type" in known:
        told["loss_type"] = losses[0]
    rows = datasets.Dataset.from_list(read_rows(Path(str(data.train))))
    off = "activation_checkpointing"  # the name since transformers 5.20
    told[off if off in known else "gradient_checkpointing"] = False
    model = str(config.model.name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if training.objective in ("orpo", "cpo"):
        tokenizer.bos_token = None  # else those trainers begin each prompt with it
    arguments = config_class(
        str(output),
        **{**told, "max_length": data.max_length, "eval_strategy": "epoch" if data.eval else "no"},
        **{"per_device_eval_batch_size": training.per_device_eval_batch_size, "bf16": False},
        **{"lr_scheduler_type": "linear", "save_strategy": "no", "optim": "adamw_torch"},
        **{"report_to": "none", "use_cpu": True, "disable_tqdm": True},
        dataloader_pin_memory=False,
    )
    sets = {"train_dataset": rows, "eval_dataset": rows if data.eval else None}
    whole = stock_model(Path(model), adapter)
    trainer = trainer_class(whole, args=arguments, processing_class=tokenizer, **sets)
    trainer.train()
    return trainer


KTO = {"objective": "kto", "train_sampling_strategy": "sequential"}
PLAIN = (
    *("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
    *("discopop", "sigmoid_norm"),
)
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in PLAIN},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.1},
    "robust": {"loss_type": "robust", "label_smoothing": 0.1, "beta": 0.3},
    "several": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "all": {
        "loss_type": [*PLAIN, "exo_pair", "robust", "sft"],
        "loss_weights": [0.3 + 0.1 * number for number in range(len(PLAIN) + 3)],
        "label_smoothing": 0.1,
        "beta": 0.5,
    },
    "rpo": {"rpo_alpha": 0.5, "token_metrics": True},
    "weighted": {"use_weighting": True, "loss_chunk_tokens": 9},
    "shared_length": {"ld_alpha": 0.3},
    "in_chunks": {"loss_chunk_tokens": 7, "token_metrics": True},
    "whole_rows": {"loss_chunk_tokens": 60},
    "orpo": {"objective": "orpo", "beta": 0.3},
    "orpo_in_chunks": {"objective": "orpo", "loss_chunk_tokens": 7},
    "orpo_whole_rows": {"objective": "orpo", "loss_chunk_tokens": 130},
    "cpo": {"objective": "cpo", "label_smoothing": 0.1, "loss_chunk_tokens": 9},
    "cpo_hinge": {"objective": "cpo", "loss_type": "hinge", "cpo_alpha": 0.5},
    "cpo_ipo": {"objective": "cpo", "loss_type": "ipo"},
    **{
        f"cpo_simpo_{alpha}": {
            **{"objective": "cpo", "loss_type": "simpo", "simpo_gamma": 0.8},
            **{"cpo_alpha": alpha, "label_smoothing": 0.2, "beta": 2.0},
        }
        for alpha in (0.0, 1.0)
    },
    "kto": {**KTO, "beta": 0.5, "logging_steps": 2},
    "kto_weighted": {**KTO, "desirable_weight": 0.7, "undesirable_weight": 1.3},
    "kto_in_chunks": {**KTO, "loss_chunk_tokens": 7, "token_metrics": True},
    "kto_whole_rows": {**KTO, "loss_chunk_tokens": 60},
    "kto_of_pairs": {**KTO, "per_device_train_batch_size": 3, "logging_steps": 2},
    "apo_zero_unpaired": {**KTO, "loss_type": "apo_zero_unpaired", "loss_chunk_tokens": 9},
}


# Each has code of its own.
OFTEN = (
    *("sigmoid", "all", "weighted", "shared_length", "in_chunks", "orpo", "cpo", "cpo_simpo_1.0"),
    *("kto", "apo_zero_unpaired"),
)


@pytest.mark.parametrize(
    ("case", "lora"),
    [
        pytest.param(case, lora, marks=() if case in often else pytest.mark.long)
        for lora, often in ((False, OFTEN), (True, ("in_chunks",)))
        for case in CASES
    ],
)
def test_losses_rewards_and_weights_are_those_of_trl(case, lora, alone, alone_model, tmp_path):
    adapter = save_adapter(alone_model, tmp_path / "adapter") if lora else None
    sections = {"adapter": {"init_from": str(adapter)}} if lora else {}
    training = {"objective": "dpo", "eval_strategy": "epoch", "learning_rate": 1e-3, **CASES[case]}
    # Only DPOTrainer leaves out pairs whose prompt fills max_length.
    most = 40 if training["objective"] in ("orpo", "cpo") else 20
    is_rated = training["objective"] == "kto" and case != "kto_of_pairs"
    pairs = str((save_ratings if is_rated else save_pairs)(tmp_path / "pairs.jsonl"))
    data = {"train": pairs, "eval": pairs, "max_length": most}
    other = agreeing(alone(training=training, data=data, **sections), tmp_path, adapter)
    assert_close(weights(tmp_path / "run"), trained_weights(other.model), atol=1e-5)


def agreeing(config: Config, folder: Path, adapter: Path | None = None) -> Any:
    """TRL's trainer, after both runs have logged the same."""
    ours = Recorder()
    train(config, callbacks=[ours])
    other = trl(config, folder / "trl", adapter)
    history, metrics = other.state.log_history, objective_of(config.training).metric_names
    assert len(ours.state.log_history) == len(history)
    for one, two in zip(ours.state.log_history, history, strict=True):
        prefix = "eval_" if "eval_loss" in two else ""
        counted = ["num_tokens"] * (f"{prefix}num_tokens" in two)  # not in ORPO's and CPO's
        names = [f"{prefix}{name}" for name in ("loss", *metrics, *counted)]
        for name in names if f"{prefix}loss" in two else ():
            # KTO has no mean of answers that there were none of.
            other_value = two.get(name)
            if "accuracies" in name and abs(two[f"{prefix}rewards/margins"]) < 1e-6:
                continue  # before the first step the order of equal rewards is rounding's
            assert one.get(name) == pytest.approx(other_value, rel=1e-5, abs=1e-5), (name, two)
    return other


@pytest.mark.long
@pytest.mark.parametrize("objective", ["dpo", "cpo"])
def test_the_loss_of_routers_is_that_of_trl(objective, alone, tmp_path):
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = save_tiny("mixtral", tmp_path / "model", **routers)
    pairs = str(save_pairs(tmp_path / "pairs.jsonl", 12))
    sections: dict[str, Any] = {
        "model": {"name_or_path": str(model)},
        "shard_plan": plan_of(("local", tiny_config("mixtral").num_hidden_layers)),
        "data": {"train": pairs, "eval": pairs, "max_length": 40},
    }
    training = {"objective": objective, "eval_strategy": "epoch", "learning_rate": 1e-3}
    other = agreeing(alone(training=training, **sections), tmp_path)
    # A checkpoint holds each expert by itself, the model all of a layer in one tensor.
    result = stock_model(tmp_path / "run" / "model")
    assert_close(trained_weights(result), trained_weights(other.model), atol=1e-5)
    with pytest.raises(ConfigError, match="leaves out the load-balancing loss of the routers"):
        train(alone("kto", training=KTO, **sections))


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"objective": "cpo", "loss_type": "robust"}, "robust.* is none of sigmoid, hinge, ipo,"),
        ({"objective": "orpo", "loss_type": "hinge"}, "hinge.* is none of sigmoid"),
        ({"objective": "dpo", "loss_type": "simpo"}, "simpo.* is none of sigmoid, hinge, ipo, exo"),
        ({"objective": "cpo", "loss_type": ["sigmoid", "ipo"]}, "takes one loss"),
        ({"objective": "orpo", "loss_weights": [0.5]}, "takes no loss_weights"),
        ({**KTO, "loss_type": "sigmoid"}, "sigmoid.* is none of kto, apo_zero_unpaired"),
        ({"objective": "kto"}, 'kto needs train_sampling_strategy "sequential"'),
        ({**KTO, "per_device_train_batch_size": 1}, "kto needs .* at least 2"),
    ],
)
def test_a_loss_that_the_objective_does_not_have_is_refused(training, problem, alone):
    with pytest.raises(ConfigError, match=problem):
        alone(training=training)
