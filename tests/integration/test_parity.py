"""The promise: the result does not depend on the cut, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import EvalPrediction

from hetero_framework import control
from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.trainer.coordinator import train
from tests.cases import seldom
from tests.pools import read_metrics
from tests.samples import plan_of, read_jsonl, save_llama
from tests.unit.data_helpers import write_jsonl

pytestmark = pytest.mark.xdist_group("pool")

LORA = {
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}
PLANS = [[3], [2, 4], [1, 2, 3, 5]]


def weights(output: Path) -> dict[str, torch.Tensor]:
    folder = output / "adapter" if (output / "adapter").exists() else output / "model"
    return {
        k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()
    }


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_same_runs(a: Path, b: Path) -> None:
    """Their losses, norms and learning rates, and their weights."""
    assert read_metrics(a) == read_metrics(b)
    assert_same(weights(a), weights(b))


CASES = {
    "lora": {"adapter": LORA},
    "lora_checkpointing": {"adapter": LORA, "training": {"gradient_checkpointing": True}},
    "full": {},
    "full_bf16": {"training": {"bf16": True}},
    "full_fp16": {"training": {"fp16": True}},
    "lora_smoothing_noise": {
        "adapter": LORA,
        "training": {
            **{"label_smoothing_factor": 0.1, "loss_chunk_tokens": 16, "bf16": True},
            **{"neftune_noise_alpha": 5.0, "gradient_checkpointing": True},
        },
    },
    "lora_pure_bf16": {"adapter": LORA, "bfloat16": True},
}


SELDOM = ("full_fp16", "full_bf16", "lora_checkpointing", "lora_smoothing_noise", "lora_pure_bf16")


@pytest.mark.parametrize("case", seldom(CASES, *SELDOM))
def test_training_cut_into_stages_equals_one_process(case, losses, tmp_path, llama):
    sections = dict(CASES[case])
    if sections.pop("bfloat16", False):
        sections["model"] = {"name_or_path": str(llama), "dtype": "bfloat16"}
    assert len(losses([], "whole", **sections)) == 9
    for cuts in PLANS:
        name = "-".join(map(str, cuts))
        losses(cuts, name, **sections)
        assert_same_runs(tmp_path / name, tmp_path / "whole")


@pytest.mark.parametrize(
    "chunk", [None, pytest.param(16, marks=pytest.mark.long)], ids=["whole", "in_chunks"]
)
def test_metrics_of_tokens_are_those_of_one_process(chunk, losses, tmp_path, texts):
    def measured(cuts: list[int], name: str, **training) -> list[dict[str, float]]:
        training |= {"eval_strategy": "epoch", "loss_chunk_tokens": chunk}
        data = {"train": str(texts), "eval": str(texts), "max_length": 64}
        losses(cuts, name, data=data, training=training)
        return [
            {name: line[name] for name in line if name.removeprefix("eval_") in chosen}
            for line in read_jsonl(tmp_path / name / "metrics.jsonl")
        ]

    chosen = {"loss", "grad_norm"}
    plain = measured([], "plain")
    named = {"entropy", "mean_token_accuracy", "num_tokens"}
    chosen |= named
    whole = measured([], "whole", token_metrics=True)
    for cuts in PLANS:
        assert measured(cuts, "-".join(map(str, cuts)), token_metrics=True) == whole
    for line, other in zip(whole, plain, strict=True):
        assert {name.removeprefix("eval_") for name in line} >= named
        assert line.items() >= other.items()


@pytest.mark.long
def test_predictions_of_an_evaluation_are_those_of_one_process(pool, configured, texts):
    sections = {
        "data": {"train": str(texts), "eval": str(texts), "max_length": 64},
        "training": {"max_steps": 2, "eval_strategy": "steps", "loss_chunk_tokens": 16},
    }

    def evaluated(cuts: list[int]) -> list[np.ndarray]:
        name = "-".join(map(str, [0, *cuts]))
        seen: list[np.ndarray] = []

        def compute_metrics(given: EvalPrediction) -> dict[str, float]:
            seen.extend([given.predictions, given.label_ids])
            return {"hits": (given.predictions[:, :-1] == given.label_ids[:, 1:]).sum()}

        config = configured(cuts, name, **sections)
        summary = train(config, debug=True, compute_metrics=compute_metrics)
        return [*seen, np.array(summary.metrics["eval_hits"])]

    whole = evaluated([])
    assert len(whole) == 7  # two evaluations, and a micro-batch before the first step
    assert whole[0].shape == whole[1].shape
    for cuts in PLANS:
        for one, other in zip(evaluated(cuts), whole, strict=True):
            np.testing.assert_array_equal(one, other)
    config = configured([3], "lacking", **sections)
    with (
        control.having("preprocess_logits_for_metrics", lambda logits, labels: logits.argmax(-1)),
        pytest.raises(ConfigError, match="the process of the last stage has none"),
    ):
        train(config, compute_metrics=lambda given: {})
    pool.check()


def test_probing_the_longest_micro_batch_changes_no_bit(losses, tmp_path):
    rows = [{"text": "a model " * count} for count in (*[3] * 9, 9, 3)]
    data = {"train": str(write_jsonl(tmp_path / "late.jsonl", rows)), "max_length": 64}
    order = {"train_sampling_strategy": "sequential"}
    sections = {"adapter": LORA, "data": data}
    losses([2, 4], "plain", training={**order, "probe_longest_batch": False}, **sections)
    losses([2, 4], "probed", training=order, **sections)
    assert_same_runs(tmp_path / "probed", tmp_path / "plain")
    log = (tmp_path / "probed" / "logs" / "coordinator.log").read_text()
    assert "the longest micro-batch of the run, 2 x " in log


@pytest.mark.long
def test_tied_embeddings_under_full_training_stay_one_weight(losses, tmp_path):
    model = save_llama(tmp_path / "tied", tie_word_embeddings=True)
    sections = {"model": {"name_or_path": str(model)}}
    losses([], "whole", **sections)
    for cuts in PLANS:
        name = "-".join(map(str, cuts))
        losses(cuts, name, **sections)
        assert_same_runs(tmp_path / name, tmp_path / "whole")


@pytest.mark.parametrize(
    "ends",
    [(("local", 0), (1, 4), (2, 6)), (("local", 1), (1, 2), (2, 3), (1, 5), ("local", 6))],
    ids=["local has the embedding only", "a worker is listed twice and local comes last, too"],
)
def test_other_plans_equal_one_process(ends, losses):
    plan = plan_of(*ends)
    plan[-1]["is_last"] = True
    assert losses([], "cut", shard_plan=plan, adapter=LORA) == losses([], "whole", adapter=LORA)


@pytest.mark.parametrize(
    "adapter", [None, pytest.param(LORA, marks=pytest.mark.long)], ids=["full", "lora"]
)
def test_a_loss_in_pieces_and_stages_that_recompute_equal_one_process(adapter, losses, tmp_path):
    sections = {"adapter": adapter, "training": {"loss_chunk_tokens": 16}}
    whole = losses([], "whole", **sections)
    plan = plan_of(("local", 2), (1, 4), (2, 6))
    plan[0]["gradient_checkpointing"] = plan[2]["gradient_checkpointing"] = True
    assert losses([], "cut", shard_plan=plan, **sections) == whole
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    in_one = losses([], "in one", adapter=adapter, training={"loss_chunk_tokens": None})
    assert in_one != whole
    assert [loss for loss, _, _ in in_one] == pytest.approx(
        [loss for loss, _, _ in whole], rel=1e-4
    )


def test_adapter_to_start_from_is_needed_on_the_coordinator_only(pool, llama, texts, tmp_path):
    """The path is relative to the coordinator's configuration; no worker finds anything there."""

    def run(cuts: list[int], name: str, **adapter) -> None:
        data = {"train": str(texts), "max_length": 64}
        sections = {"model": {"name_or_path": str(llama)}, "data": data, "adapter": adapter}
        train(Config.from_dict(pool.config(tmp_path / name, cuts, **sections), tmp_path))

    run([], "first", **LORA, use_dora=True, modules_to_save=["lm_head"])
    run([], "whole", init_from="first/adapter")
    run([2, 4], "cut", init_from="first/adapter")
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")
    assert weights(tmp_path / "cut").keys() == weights(tmp_path / "first").keys()


@pytest.mark.long
def test_layers_below_the_adapter_get_no_gradient_and_change_nothing(losses):
    adapter = {**LORA, "layers_to_transform": [4, 5]}
    whole = losses([], "whole", adapter=adapter)
    assert losses([2, 4], "cut", adapter=adapter) == whole
    assert losses([1, 5], "within", adapter=adapter) == whole


def test_padding_free_equals_one_process_and_nearly_padded_rows(losses, texts, tmp_path):
    def run(cuts: list[int], name: str, **data: bool) -> list[tuple]:
        files = {"train": str(texts), "eval": str(texts), "max_length": 64}
        return losses(
            cuts,
            name,
            data={**files, **data},
            training={
                "gradient_checkpointing": True,
                "loss_chunk_tokens": 16,
                "eval_strategy": "epoch",
            },
        )

    whole = run([], "whole", padding_free=True)
    assert run([2, 4], "cut", padding_free=True) == whole
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert measured(tmp_path / "cut", "eval_loss") == measured(tmp_path / "whole", "eval_loss")

    for row, other in zip(whole, run([2, 4], "padded"), strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=0)
    for name in ("eval_loss", "tokens"):
        assert measured(tmp_path / "cut", name) == pytest.approx(
            measured(tmp_path / "padded", name)
        )


def measured(output: Path, name: str) -> list[float]:
    return [line[name] for line in read_jsonl(output / "metrics.jsonl") if name in line]


@pytest.mark.parametrize("padding_free", [False, True])
def test_every_micro_batch_may_have_another_length(losses, tmp_path, padding_free):
    lengths = [2, 61, 7, 40, 12, 3, 55, 23, 31, 5, 17, 48]
    file = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a" * length} for length in lengths])
    sections = {
        "data": {"train": str(file), "padding_free": padding_free},
        "training": {"per_device_train_batch_size": 1, "num_train_epochs": 1},
    }
    losses([], "whole", **sections)
    # One letter is one token; an end token follows.
    assert sum(measured(tmp_path / "whole", "tokens")) == sum(length + 1 for length in lengths)
    losses([1, 3, 4], "cut", **sections)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")
