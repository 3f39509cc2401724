"""A plain torch loop over the whole stock model is equal to three stages, to the last bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.oracles import save_adapter, torch_run
from tests.integration.test_parity import assert_same, weights
from tests.samples import save_llama, save_texts

pytestmark = pytest.mark.xdist_group("pool2")


@pytest.mark.parametrize(
    "training",
    [pytest.param({}, marks=pytest.mark.long), {"weight_decay": 0.1}, {"fp16": True}],
    ids=["plain", "decay", "fp16"],
)
def test_full_training_equals_a_torch_loop(training, losses, llama, texts, tmp_path):
    ours = losses([2, 4], training=training)
    theirs, trained = torch_run(llama, texts, **training)
    assert ours == theirs
    assert_same(weights(tmp_path / "run"), trained)


def test_lora_equals_a_torch_loop(losses, llama, texts, tmp_path):
    adapter = save_adapter(llama, tmp_path / "adapter")
    ours = losses([2, 4], adapter={"init_from": str(adapter)})
    theirs, trained = torch_run(llama, texts, adapter)
    assert ours == theirs
    assert_same(weights(tmp_path / "run"), trained)


def test_skipped_steps_of_fp16_equal_gradscalers(losses, tmp_path):
    """Steep logits overflow at the first loss scales: skipped, schedule held, scale halved."""
    model, texts = steep_llama(tmp_path / "steep"), tmp_path / "short.jsonl"
    save_texts(texts, 9, longest=4)
    training = {
        "fp16": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
    }
    sections = {"model": {"name_or_path": str(model)}, "data": {"train": str(texts)}}
    ours = losses([2, 4], training=training, **sections)
    theirs, trained = torch_run(model, texts, **training)
    # JSON has no NaN; a norm that is not finite is null there.
    assert ours == [(a, norm if math.isfinite(norm) else None, rate) for a, norm, rate in theirs]
    assert 0 < sum(norm is None for _, norm, _ in ours) < len(ours)
    assert_same(weights(tmp_path / "run"), trained)


def steep_llama(directory: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(save_llama(directory))
    with torch.no_grad():
        model.model.norm.weight.mul_(8)
        model.lm_head.weight.mul_(8)
    model.save_pretrained(directory)
    return directory
