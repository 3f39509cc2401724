"""Models that train with pictures: TRL's SFTTrainer and its collator are the oracle."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, BatchFeature, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from hetero_framework.data.batches import PICTURES
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.trainer.coordinator import train
from tests.cases import seldom, spread
from tests.extras.vision.seeing import FAMILIES, LAYERS, NAMES, processor_of, save_rows
from tests.integration.oracles import _arguments, _logged, assert_agree, read_rows, save_adapter
from tests.integration.test_parity import assert_same, assert_same_runs, weights
from tests.integration.test_resume import SAVING, evals, stop_after
from tests.samples import config_for, plan_of

pytestmark = pytest.mark.xdist_group("pool2")

TRAINING = {
    **{"objective": "image-text-to-text", "max_steps": 4, "warmup_steps": 0},
    **{"gradient_accumulation_steps": 2, "learning_rate": 1e-2},
}
CASES = [f"{family} {how}" for family in FAMILIES for how in ("full", "lora")]
OFTEN = {"qwen3_vl full"}
RUNS = seldom(CASES, *(case for case in CASES if case not in OFTEN))
TEXTS = ("input_ids", "attention_mask", "labels")
OF_TEXT = ("language_model", "text_model", "lm_head")
FORMS = {
    "messages": (False, {}, {"assistant_only_loss": True}),
    "all tokens": (False, {"assistant_only_loss": False}, {}),
    "padded": (False, {"pad_to_multiple_of": 8}, {"assistant_only_loss": True}),
    "pairs": (True, {}, {"completion_only_loss": True}),
    "whole pairs": (True, {"completion_only_loss": False}, {"completion_only_loss": False}),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return {pairs: save_rows(folder / str(pairs), pairs=pairs) for pairs in (False, True)}


def data_of(model: Path, path: Path | None, **data: Any) -> TrainData:
    sections: dict[str, Any] = {"model": {"name_or_path": str(model)}}
    sections["training"] = data.pop("training", TRAINING)
    sections["data"] = {"train": str(path), **data}
    config = config_for(("local", LAYERS), **sections)
    return load_data(config, load_tokenizer(config))


def with_pictures(path: Path) -> datasets.Dataset:
    """The rows as TRL's users have them, with pictures that `datasets` decodes."""
    found = datasets.Dataset.from_list(read_rows(path))
    return found.cast_column("images", datasets.List(datasets.Image()))


@pytest.mark.parametrize(("family", "form"), spread([*FAMILIES], [*FORMS]))
def test_a_micro_batch_is_that_of_trls_collator(family, form, models, rows):
    pairs, ours, theirs = FORMS[form]
    model, path = models(family), rows[pairs]
    data = data_of(model, path, **ours)
    shared = {k: v for k, v in ours.items() if k == "pad_to_multiple_of"}
    processor = processor_of(model)
    collator = DataCollatorForVisionLanguageModeling(
        processor, max_length=1024, **{"completion_only_loss": False, **theirs, **shared}
    )
    numbers = [0, 1, 2, 4]
    expected = collator([with_pictures(path)[k] for k in numbers])
    assert torch.any(expected["labels"] == -100)
    found = data.micro_batch(np.array(numbers))
    said = processor.tokenizer.decode(found["labels"][found["labels"] != -100])
    assert any(name in said for name in NAMES)  # the tokenizer that is loaded knows the words
    assert {n.removeprefix(PICTURES) for n in found} - {"position_ids"} == expected.keys()
    for name, tensor in found.items():
        if name != "position_ids":
            torch.testing.assert_close(
                tensor, expected[name.removeprefix(PICTURES)], rtol=0, atol=0, msg=name
            )
    plain = data.micro_batch(np.array([2]))
    assert plain.keys() <= {*TEXTS, "token_type_ids", f"{PICTURES}mm_token_type_ids"}


def frozen(model: Path, adapter: Path | None, trained: str | None = None) -> Any:
    """The stock model, its towers frozen but for modules with `trained` in their names, with an
    adapter that is to be trained."""
    whole: Any = AutoModelForImageTextToText.from_pretrained(model)
    parts = OF_TEXT if trained is None else (*OF_TEXT, trained)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    if adapter is not None:
        whole = PeftModel.from_pretrained(whole, adapter, is_trainable=True)
    return whole


def trl_run(
    model: Path,
    path: Path,
    output: Path,
    adapter: Path | None = None,
    trained: str | None = None,
    *,
    whole: Any = None,
    **settings: Any,
) -> Any:
    """TRL's SFTTrainer over `whole`, or the model that `frozen` gives."""
    # Some processors make tensors of what says where pictures are, and fail at a row without any.
    tensors = functools.partialmethod(
        BatchFeature.convert_to_tensors, skip_tensor_conversion=["text_replacement_offsets"]
    )
    with patch.object(BatchFeature, "convert_to_tensors", tensors):
        trainer = SFTTrainer(
            whole or frozen(model, adapter, trained),
            _arguments(SFTConfig, output, {**TRAINING, **settings}),
            train_dataset=with_pictures(path),
            processing_class=processor_of(model),
        )
        trainer.train()
    return _logged(trainer)


@pytest.mark.parametrize("case", RUNS)
def test_training_is_trls_under_any_cut_and_the_class_loads_the_result(
    case, models, rows, losses, tmp_path
):
    family, _, how = case.partition(" ")
    adapter = how == "lora"
    model, path = models(family), rows[False]
    sections: dict[str, Any] = {"model": {"name_or_path": str(model)}, "layers": LAYERS}
    sections |= {"data": {"train": str(path)}, "training": TRAINING}
    start = None
    if adapter:
        tower = ".*(vision|visual|projector|connector|merger).*"
        start = save_adapter(
            *(model, tmp_path / "start"),
            **{"target_modules": ["q_proj", "v_proj"], "exclude_modules": tower},
        )
        sections["adapter"] = {"init_from": str(start)}
    whole = losses([], "whole", **sections)
    for cuts in ([2], [1, 3]):
        assert losses(cuts, "cut", **sections) == whole
        assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    told = {"assistant_only_loss": True, "max_length": 1024}
    assert_agree(whole, trl_run(model, path, tmp_path / "trl", start, **told))
    result = tmp_path / "cut" / ("adapter" if adapter else "model")
    about = {path.name for path in model.glob("*processor_config.json")}
    assert about <= {path.name for path in result.iterdir()}
    if adapter:
        before = AutoModelForImageTextToText.from_pretrained(model)
        names = {n for n, _ in PeftModel.from_pretrained(before, result).named_parameters()}
        adapted = {name for name in names if "lora" in name}
        assert adapted
        assert all(any(part in name for part in OF_TEXT) for name in adapted)
    else:
        assert processor_of(result).image_token
        _, report = AutoModelForImageTextToText.from_pretrained(result, output_loading_info=True)
        assert not any(report.values()), report


@pytest.mark.parametrize(
    "how", seldom(["nf4", "towers", "stored", "int8"], "towers", "stored", "int8")
)
@pytest.mark.parametrize("family", seldom(["llava", "qwen2_5_vl"], "qwen2_5_vl"))
def test_quantised_models_are_trls_under_any_cut(family, how, models, rows, losses, tmp_path):
    model, path = models(family), rows[False]
    start = save_adapter(
        *(model, tmp_path / "start"),
        target_modules="all-linear" if how == "towers" else r".*language_model.*\.[qv]_proj",
    )
    kind = BitsAndBytesConfig(
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    )
    base = AutoModelForImageTextToText.from_pretrained(
        model, quantization_config=kind, device_map={"": "cpu"}
    )
    section = {"name_or_path": str(model), "quantization": "int8" if how == "int8" else "nf4"}
    if how == "stored":
        section = {"name_or_path": str(shutil.copytree(model, tmp_path / "stored"))}
        base.save_pretrained(tmp_path / "stored")
    # Unclipped: the Trainer's norm of gradients in bfloat16 is rounded to three digits. Adam would
    # make large steps of its other roundings.
    own = {"max_grad_norm": 0.0, "learning_rate": 1e-3, "adam_epsilon": 1e-4}
    training = {**TRAINING, **own}
    sections: dict[str, Any] = {"layers": LAYERS, "data": {"train": str(path)}}
    sections |= {"training": training, "adapter": {"init_from": str(start)}}
    sections["model"] = {**section, "train_towers": how == "towers"}
    whole = losses([], "whole", **sections)
    for cuts in ([2], [1, 3]):
        assert losses(cuts, "cut", **sections) == whole
        assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    if how == "int8":
        return
    told = {"assistant_only_loss": True, "max_length": 1024, **own}
    adapted = PeftModel.from_pretrained(base, start, is_trainable=True)
    theirs = trl_run(model, path, tmp_path / "trl", whole=adapted, **told)
    # Later, roundings of an adapter in bfloat16 over a tower differ.
    pairs = [*zip(whole, theirs, strict=True)][: 2 if how == "towers" else None]
    for (ours, *_), (loss, *_) in pairs:
        assert ours == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("family", seldom(["llava", "qwen2_5_vl"], "llava"))
def test_a_resumed_run_under_another_plan_is_the_whole_run(
    family, models, rows, configured, tmp_path
):
    model, path = models(family), rows[False]
    towers = family != "llava"
    sections: dict[str, Any] = {"layers": LAYERS, "data": {"train": str(path), "eval": str(path)}}
    sections["model"] = {"name_or_path": str(model), "train_towers": towers}
    sections["training"] = {**TRAINING, **SAVING, "eval_steps": 2, "bf16": family != "llava"}
    train(configured([2], "whole", **sections), debug=True)
    stop_after(configured([1, 3], "parts", **sections), 3)
    sections["shard_plan"] = plan_of(("local", 1), (1, 2), ("local", 3), (1, LAYERS))
    train(configured([], "parts", **sections), resume=2, debug=True)
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")
    assert evals(tmp_path / "parts") == evals(tmp_path / "whole")
