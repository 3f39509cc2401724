"""Pairs of answers with pictures: TRL's DPOTrainer and its collator are the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

from hetero_framework.data.batches import PICTURES
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.errors import DataError
from tests.cases import seldom, spread
from tests.extras.vision.seeing import FAMILIES, LAYERS, processor_of, save_pairs
from tests.extras.vision.test_vision import data_of, frozen, with_pictures
from tests.integration.oracles import _arguments, read_rows, save_adapter
from tests.integration.test_parity import assert_same, weights

pytestmark = pytest.mark.xdist_group("pool2")

TRAINING = {
    **{"objective": "image-dpo", "max_steps": 3, "warmup_steps": 0, "max_grad_norm": 1.0},
    **{"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "beta": 0.5},
}
TOWER = ".*(vision|visual|projector|connector|merger).*"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return save_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize(("family", "texts"), spread([*FAMILIES], [False, True]))
def test_a_micro_batch_is_that_of_trls_collator(family, texts, models, rows, tmp_path):
    model = models(family)
    processor = processor_of(model)
    if texts:
        where = getattr(processor, "boi_token", processor.image_token)  # Gemma's placeholder
        rows = save_pairs(tmp_path, where)
    data = data_of(model, rows, training=TRAINING, add_eos=not texts)
    numbers = [0, 1, 2, 4]
    given = with_pictures(rows)
    expected = DataCollatorForVisionPreference(processor, max_length=1024)(
        [given[k] for k in numbers]
    )
    found = data.micro_batch(np.array(numbers))
    ids = expected["input_ids"].where(expected["attention_mask"].bool(), 0)  # TRL also pads by EOS
    mask = expected.pop("completion_mask").bool()
    expected |= {"input_ids": ids, "labels": ids.where(mask, IGNORE_INDEX)}
    assert {n.removeprefix(PICTURES) for n in found} - {"position_ids"} == expected.keys()
    for name, tensor in found.items():
        if name != "position_ids":
            torch.testing.assert_close(
                tensor, expected[name.removeprefix(PICTURES)], rtol=0, atol=0, msg=name
            )


def rewards(output: Path) -> list[dict[str, float]]:
    """The logged metrics of pairs, of each step."""
    lines = [line for line in read_rows(output / "metrics.jsonl") if "loss" in line]
    kinds = ("rewards/", "logps/", "logits/")
    return [{n: v for n, v in line.items() if n.startswith(kinds)} for line in lines]


def trl_run(model: Path, path: Path, output: Path, how: Any, **settings: Any) -> Any:
    """TRL's DPOTrainer over the model that `frozen` gives."""
    trainer = DPOTrainer(
        frozen(model, *how),
        args=_arguments(DPOConfig, output, {**TRAINING, **settings}),
        train_dataset=with_pictures(path),
        processing_class=processor_of(model),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


CASES: dict[str, dict[str, Any]] = {
    "llava full": {},
    "llava towers": {},
    "llava lora": {"loss_type": ["sigmoid", "bco_pair", "sft"]},
    "qwen2_5_vl full": {"loss_type": "ipo"},
    "qwen2_5_vl lora": {"loss_chunk_tokens": 9},
    "gemma3 full": {"loss_type": "sigmoid_norm", "ld_alpha": 0.3},
    "gemma3 lora": {"use_weighting": True},
}


@pytest.mark.parametrize(
    "case", seldom([*CASES], *CASES.keys() - {"qwen2_5_vl full", "llava towers"})
)
def test_losses_norms_and_rewards_are_trls_under_any_cut(case, models, rows, losses, tmp_path):
    family, _, how = case.partition(" ")
    model, training = models(family), {**TRAINING, **CASES[case]}
    sections: dict[str, Any] = {"model": {"name_or_path": str(model)}, "layers": LAYERS}
    sections |= {"data": {"train": str(rows)}, "training": training}
    start = None
    if how == "towers":
        sections["model"]["train_towers"] = True
    if how == "lora":
        told = {"target_modules": ["q_proj", "v_proj"], "exclude_modules": TOWER}
        start = save_adapter(model, tmp_path / "start", **told)
        sections["adapter"] = {"init_from": str(start)}
    whole = losses([], "whole", **sections)
    for cuts in ([2], [1, 3]):
        assert losses(cuts, "cut", **sections) == whole
        assert rewards(tmp_path / "cut") == rewards(tmp_path / "whole")
        assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    given = start, "" if how == "towers" else None
    theirs = trl_run(model, rows, tmp_path / "trl", given, **CASES[case], max_length=1024)
    for one, found, other in zip(whole, rewards(tmp_path / "whole"), theirs, strict=True):
        expected = other["loss"], other["grad_norm"], other["learning_rate"]
        assert one == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert len(found) == 8
        told = {name: other[name] for name in found}
        if abs(other["rewards/margins"]) < 1e-6:
            told["rewards/accuracies"] = found["rewards/accuracies"]  # equal but for rounding
        assert found == pytest.approx(told, rel=1e-5, abs=1e-5)


def test_the_reference_sees_the_same_before_and_in_each_step(models, rows, losses):
    sections: dict[str, Any] = {"model": {"name_or_path": str(models("llava"))}, "layers": LAYERS}
    sections |= {"data": {"train": str(rows)}, "adapter": {"target_modules": ["q_proj", "v_proj"]}}
    # Of more steps the rows beside a pair, and so its padding, would differ.
    training = {**TRAINING, "train_sampling_strategy": "sequential", "max_steps": 1}
    once = losses([2], "once", **sections, training=training)
    training["precompute_ref_log_probs"] = False
    assert losses([1], "often", **sections, training=training) == once


def test_pairs_with_pictures_are_refused_for_pairs_of_texts(models, rows):
    with pytest.raises(DataError) as error:
        data_of(models("llava"), rows, training={"objective": "dpo"})
    assert 'set "training.objective": "image-dpo"' in str(error.value.hint)
