"""Preference training whatever the cut: the same bits, also resumed and after a loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import CallbackError, ConfigError
from hetero_framework.trainer.coordinator import train
from tests.extras.preferences.test_preference_runs import KTO, save_pairs, save_ratings
from tests.faults.final_state import assert_same_run
from tests.integration.test_best_model import Ending
from tests.integration.test_parity import LORA, assert_same, weights
from tests.pools import read_metrics
from tests.samples import plan_of, save_tiny

pytestmark = pytest.mark.xdist_group("pool")

TRAINING = {
    **{"objective": "dpo", "max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0},
    **{"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 3},
}
INTERLEAVED = plan_of(("local", 2), (1, 4), ("local", 6))
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora_dropout": {"adapter": LORA},
    "chunks_checkpointing_bf16": {
        "adapter": LORA,
        "training": {
            **{"loss_chunk_tokens": 16, "gradient_checkpointing": True, "bf16": True},
            **{"loss_type": ["sigmoid", "ipo"], "rpo_alpha": 0.3, "use_weighting": True},
        },
    },
    "orpo": {"adapter": LORA, "training": {"objective": "orpo", "loss_chunk_tokens": 16}},
    "cpo": {
        "training": {
            **{"objective": "cpo", "loss_type": "simpo", "gradient_checkpointing": True},
            "precompute_ref_log_probs": False,  # there is no reference to ask
        }
    },
    "asked_in_each_step": {"adapter": LORA, "training": {"precompute_ref_log_probs": False}},
    "kto": {"training": {**KTO, "loss_chunk_tokens": 16, "gradient_checkpointing": True}},
    "kto_dropout_bf16": {"adapter": LORA, "training": {**KTO, "bf16": True}},
    "routers": {"model_type": "mixtral", "training": {"gradient_checkpointing": True}},
    "apo_zero_unpaired": {
        "adapter": LORA,
        "training": {
            **{**KTO, "loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"},
            "precompute_ref_log_probs": False,
        },
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "two": {"cuts": [3]},
    "three": {"cuts": [2, 4]},
    "interleaved": {"cuts": [], "shard_plan": INTERLEAVED},
}


@pytest.fixture
def configured(pool, llama, tmp_path, verdicts):
    pairs = str(save_pairs(tmp_path / "pairs.jsonl"))
    ratings = str(save_ratings(tmp_path / "ratings.jsonl"))

    def config(name: str, cuts: list[int], **sections: Any) -> Config:
        sections["training"] = {**TRAINING, **sections.get("training", {})}
        model = llama
        if model_type := sections.pop("model_type", ""):
            model, routers = tmp_path / "model", {"router_aux_loss_coef": 0.5}
            if not model.exists():
                save_tiny(model_type, model, output_router_logits=True, **routers)
        sections["model"] = {"name_or_path": str(model)}
        rows = ratings if sections["training"]["objective"] == "kto" else pairs
        sections["data"] = {"train": rows, "eval": rows, "max_length": 40}
        return Config.from_dict(pool.config(tmp_path / name, cuts, **sections))

    return config


def trained_by_command(
    file: Path, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetero_framework", "train", "--config", str(file), *words]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, cwd=file.parent, env={**os.environ, **environment}, **how)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("chunks_checkpointing_bf16", ("three", "interleaved")),
        pytest.param("kto", ("interleaved",)),
        *(pytest.param(case, tuple(WAYS), marks=pytest.mark.long) for case in CASES),
    ],
)
def test_preferences_do_not_depend_on_the_cut(case, names, configured, tmp_path):
    sections = CASES[case]
    whole = train(configured("whole", [], **sections))
    assert len(set(whole.losses)) == 3
    for name in names:
        cut = train(configured(name, **WAYS[name], **sections))
        assert cut.losses == whole.losses
        assert read_metrics(tmp_path / name) == read_metrics(tmp_path / "whole")
        told, of_whole = (
            {k: v for k, v in run.metrics.items() if "rewards" in k or "logps" in k}
            for run in (cut, whole)
        )
        assert told == of_whole
        assert_same(weights(tmp_path / name), weights(tmp_path / "whole"))


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="full", marks=pytest.mark.long),
        pytest.param({"adapter": LORA}, id="lora"),
        pytest.param({"training": KTO}, id="kto", marks=pytest.mark.long),
    ],
)
def test_a_run_that_was_ended_goes_on_under_another_plan(
    sections, configured, tmp_path, monkeypatch
):
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    whole = train(configured("whole", [], **sections))
    with pytest.raises(CallbackError):
        train(configured("ended", [3], **sections), callbacks=[Ending(2)])
    ended = train(configured("ended", [2, 4], **sections))
    assert ended.losses == whole.losses[2:]
    assert_same(weights(tmp_path / "ended"), weights(tmp_path / "whole"))


@pytest.mark.long
@pytest.mark.parametrize("training", [{}, KTO], ids=["dpo", "kto"])
def test_a_run_that_is_killed_goes_on_with_the_same_command(
    training, configured, tmp_path, monkeypatch
):
    """While the reference is asked, and after a step, when the model that it was is gone."""
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    training = {**training, "save_strategy": "steps", "save_steps": 1}
    config = configured("killed", [], training=training)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    asked = "the reference is asked about 11 examples of train"
    for point in ("evaluation@0", "commit-done@2"):
        killed = trained_by_command(file, HETERO_FAILPOINT=f"coordinator/{point}")
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        assert asked in killed.stdout + killed.stderr
    again = trained_by_command(file)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "goes on after step" in again.stdout + again.stderr
    assert asked not in again.stdout + again.stderr
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "other"))
    train(configured("whole", [], training=training))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("training", [{}, KTO], ids=["dpo", "kto"])
def test_the_reference_says_the_same_before_and_in_each_step(training, configured, tmp_path):
    """With the adapter's dropout, which the reference has not."""
    for name, before in (("once", True), ("often", False)):
        told = {**training, "precompute_ref_log_probs": before}
        # Other rows are beside an example when all are asked in order, and so another padding.
        told |= {"train_sampling_strategy": "sequential", "max_steps": 1}
        train(configured(name, [], adapter=LORA, training=told))
    assert_same_run(tmp_path / "often", tmp_path / "once")


def test_without_a_new_adapter_no_step_can_ask_the_reference(configured):
    with pytest.raises(ConfigError, match="no step can ask the model that training began with"):
        train(configured("run", [], training={"precompute_ref_log_probs": False}))
