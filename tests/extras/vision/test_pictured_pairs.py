"""Pairs of answers, and rated ones, with pictures: TRL's DPOTrainer and KTOTrainer, and their
collators, are the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.data_utils import unpair_preference_dataset
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference

from hetero_framework.data.batches import PICTURES
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.errors import DataError
from tests.cases import seldom, spread
from tests.extras.vision.seeing import FAMILIES, LAYERS, processor_of, save_pairs, save_rated
from tests.extras.vision.test_vision import data_of, frozen, with_pictures
from tests.integration.oracles import _arguments, read_rows, save_adapter
from tests.integration.test_parity import assert_same, weights

pytestmark = pytest.mark.xdist_group("pool2")

TRAINING = {
    **{"objective": "image-dpo", "max_steps": 3, "warmup_steps": 0, "max_grad_norm": 1.0},
    **{"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "beta": 0.5},
}
KTO = {"objective": "image-kto", "train_sampling_strategy": "sequential", "learning_rate": 1e-3}
WITHOUT_KL = {**KTO, "train_sampling_strategy": "random", "loss_type": "apo_zero_unpaired"}
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


RATED = ["llava", "idefics3", "gemma3", "qwen2_5_vl"]
FORMS = ["messages", "texts", "pairs", "without KL"]


@pytest.mark.parametrize(("family", "form"), spread(RATED, FORMS))
def test_rated_answers_and_their_neighbours_are_those_of_trls_collator(
    family, form, models, tmp_path
):
    """TRL does not read pairs with pictures, and says how to take them apart."""
    model, is_text, has_kl = models(family), form == "texts", form != "without KL"
    processor = processor_of(model)
    where = getattr(processor, "boi_token", processor.image_token)  # Gemma's placeholder
    rows = (save_pairs if form == "pairs" else save_rated)(tmp_path, where if is_text else None)
    training = {**TRAINING, **(KTO if has_kl else WITHOUT_KL), "per_device_train_batch_size": 4}
    data, given = data_of(model, rows, training=training, add_eos=not is_text), with_pictures(rows)
    given = unpair_preference_dataset(given) if form == "pairs" else given
    collator = DataCollatorForVisionUnpairedPreference(processor, 1024, calculate_kl=has_kl)
    parts = ("", "KL_")[: 1 + has_kl]
    assert len(data.examples) == len(given)
    for first in (0, 4, len(given) - len(given) % 4):
        numbers = np.arange(first, min(first + 4, len(given)))
        expected, found = collator([given[int(k)] for k in numbers]), data.micro_batch(numbers)
        found = {name.removeprefix(PICTURES): tensor for name, tensor in found.items()}
        assert found.pop("desirable").tolist() == expected.pop("label").tolist()
        for part, *of_part in zip(
            parts, *(t.chunk(len(parts)) for t in found.values()), strict=True
        ):
            own = dict(zip(found, of_part, strict=True))
            mask = expected.pop(f"{part}completion_mask").bool()
            ids = expected[f"{part}input_ids"].where(expected[f"{part}attention_mask"].bool(), 0)
            expected |= {f"{part}input_ids": ids, f"{part}labels": ids.where(mask, IGNORE_INDEX)}
            width = mask.shape[1]
            assert not own["attention_mask"][:, width:].any()
            for name in own.keys() - {"position_ids"}:
                told = expected[part + name] if part + name in expected else expected[name]
                if f"{name}".endswith(("ids", "mask", "labels")) and own[name].dim() == 2:
                    own[name] = own[name][:, :width]
                torch.testing.assert_close(own[name], told, rtol=0, atol=0, msg=name)
        assert {name.removeprefix("KL_") for name in expected} == found.keys() - {"position_ids"}


def rewards(output: Path) -> list[dict[str, float]]:
    """The logged metrics of answers, of each step."""
    lines = [line for line in read_rows(output / "metrics.jsonl") if "loss" in line]
    kinds = ("rewards/", "logps/", "logits/", "kl")
    return [{n: v for n, v in line.items() if n.startswith(kinds)} for line in lines]


def trl_run(model: Path, path: Path, output: Path, how: Any, **settings: Any) -> Any:
    """TRL's trainer over the model that `frozen` gives."""
    is_rated = settings.get("objective") == "image-kto"
    trainer_of, config_of = (KTOTrainer, KTOConfig) if is_rated else (DPOTrainer, DPOConfig)
    trainer = trainer_of(
        frozen(model, *how),
        args=_arguments(config_of, output, {**TRAINING, **settings}),
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
    "llava full rated": KTO,
    "llava towers rated": {**KTO, "desirable_weight": 0.5},
    "llava lora rated": {**KTO, "learning_rate": 1e-2},
    "qwen2_5_vl full rated": {**KTO, "undesirable_weight": 1.5},
    "qwen2_5_vl lora rated": {**KTO, "loss_chunk_tokens": 9, "per_device_train_batch_size": 4},
    "gemma3 full rated": WITHOUT_KL,
}
OFTEN = {"qwen2_5_vl full", "llava lora rated"}


@pytest.mark.parametrize("case", seldom([*CASES], *CASES.keys() - OFTEN))
def test_losses_norms_and_rewards_are_trls_under_any_cut(case, models, rows, losses, tmp_path):
    family, how, *kind = case.split()
    rows = save_rated(tmp_path / "rated") if kind else rows
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
        assert len(found) == 8 or kind
        told = {name: other[name] for name in found}
        if kind and "kl" in found:  # a difference of sums of about 50
            assert found.pop("kl") == pytest.approx(told.pop("kl"), rel=1e-5, abs=5e-5)
        if "rewards/accuracies" in other and abs(other["rewards/margins"]) < 1e-6:
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


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_answers_with_pictures_are_refused_for_those_of_texts(objective, models, rows, tmp_path):
    path = rows if objective == "dpo" else save_rated(tmp_path)
    with pytest.raises(DataError) as error:
        data_of(models("llava"), path, training={**KTO, "objective": objective})
    assert f'set "training.objective": "image-{objective}"' in str(error.value.hint)


def test_an_answer_may_be_good_beside_one_picture_and_bad_beside_another(models, tmp_path):
    """The tokens are the same; those of one picture that are rated both ways teach nothing."""
    path = save_rated(tmp_path)
    first, second, third, *_ = read_rows(path)
    asked = {**first, "images": [first["images"][0]], "label": True}
    for other, said in ((second["images"][0], False), (first["images"][0], True)):
        given = [asked, {**asked, "images": [other], "label": False}, third]
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        report = data_of(models("llava"), path, training={**TRAINING, **KTO}).report
        assert any("rated desirable and undesirable" in line for line in report) == said
