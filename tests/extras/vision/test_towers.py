"""Towers and projectors that are trained: TRL's SFTTrainer over the whole model is the oracle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from hetero_framework.errors import ConfigError
from hetero_framework.extras.exporting.merge import merge_adapter
from hetero_framework.models.files.export import OutputDirectory
from hetero_framework.trainer.setup import prepare
from tests.cases import seldom
from tests.extras.vision.seeing import FAMILIES, LAYERS, save_llava, save_rows
from tests.extras.vision.test_vision import OF_TEXT, TRAINING, trl_run
from tests.integration.oracles import assert_agree, save_adapter
from tests.integration.test_parity import assert_same, weights
from tests.samples import config_for

pytestmark = pytest.mark.xdist_group("pool2")

CASES = [f"{family} {how}" for family in FAMILIES for how in ("full", "lora")]
PROJECTORS = {"llava": "multi_modal_projector", "qwen2_5_vl": "merger", "idefics3": "connector"}
CASES += ["llava decay", *(f"{family} projector" for family in PROJECTORS)]
# Adam would make full steps of gradients that are zero but for rounding, as of a key's bias; and
# Idefics3's own processor fails on a batch without pictures, which the fourth step has.
STEPS = {**TRAINING, "max_steps": 3, "adam_epsilon": 1e-4, "learning_rate": 1e-3}
# Steps of one row, some without a picture: they change no weight of the tower, by decay neither.
DECAY = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
DECAY |= {"weight_decay": 0.5, "max_steps": 9, "learning_rate": 1e-2}
OFTEN = {"llava decay", "qwen3_vl full"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return save_rows(tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("case", seldom(CASES, *(case for case in CASES if case not in OFTEN)))
def test_trained_towers_are_trls_under_any_cut_and_in_the_result(
    case, models, rows, losses, tmp_path
):
    family, _, how = case.partition(" ")
    model, only = models(family), PROJECTORS[family] if how == "projector" else ""
    sections: dict[str, Any] = {"layers": LAYERS, "data": {"train": str(rows)}}
    sections["model"] = {"name_or_path": str(model), "train_towers": [only] if only else True}
    sections["training"] = training = STEPS | (DECAY if how == "decay" else {})
    start = None
    if how == "lora":
        start = save_adapter(model, tmp_path / "start", target_modules="all-linear")
        sections["adapter"] = {"init_from": str(start)}
    whole = losses([], "whole", **sections)
    for cuts in ([2], [1, 3] if family != "qwen3_vl" else [2, 3]):
        assert losses(cuts, "cut", **sections) == whole
        assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    told = {**training, "assistant_only_loss": True, "max_length": 1024}
    assert_agree(whole, trl_run(model, rows, tmp_path / "trl", start, only, **told))
    result = tmp_path / "cut" / ("adapter" if start else "model")
    about = {path.name for path in model.glob("*processor_config.json")}
    assert about <= {path.name for path in result.iterdir()}
    before: Any = AutoModelForImageTextToText.from_pretrained(model)
    if start:
        after: Any = PeftModel.from_pretrained(before, result)
        assert {n for n, _ in after.named_parameters() if "lora" in n and not of_text(n)}
    else:
        after, report = AutoModelForImageTextToText.from_pretrained(
            result, output_loading_info=True
        )
        assert not any(report.values()), report
        assert not hasattr(after.config, "trained_towers")
    named = dict(before.named_parameters())
    moved = {n for n, p in after.named_parameters() if n in named and not p.equal(named[n])}
    seeing = {name for name in moved if not of_text(name)}
    assert bool(seeing) == (not start)
    assert all(only in name for name in seeing)


def of_text(name: str) -> bool:
    return any(part in name for part in OF_TEXT)


def prepared(model, rows, train_towers, **sections: Any) -> Any:
    sections["model"] = {"name_or_path": str(model), "train_towers": train_towers}
    sections |= {"data": {"train": str(rows)}, "training": TRAINING}
    return prepare(config_for(("local", 2), ("local", LAYERS), **sections))


def test_gradients_and_states_of_what_is_trained_are_counted(models, rows):
    model = models("llava")
    stock: Any = AutoModelForImageTextToText.from_pretrained(model).model
    projector = sum(p.nbytes for p in stock.multi_modal_projector.parameters())
    tower = sum(p.nbytes for p in stock.vision_tower.parameters())
    frozen = prepared(model, rows, False).memory
    for which, more in (["multi_modal_projector"], projector), (True, projector + tower):
        found = prepared(model, rows, which).memory
        differences = [
            (one.weights - other.weights, one.gradients - other.gradients)
            + (one.optimizer - other.optimizer,)
            for one, other in zip(found, frozen, strict=True)
        ]
        assert differences == [(0, more, 2 * more), (0, 0, 0)]


def test_what_no_module_or_adapter_can_mean_is_refused(models, rows, tmp_path):
    model, adapter = models("llava"), {"target_modules": ["q_proj"]}
    with pytest.raises(ConfigError, match=r"set it to true: adapter\.target_modules says"):
        prepared(model, rows, ["multi_modal_projector"], adapter=adapter)
    with pytest.raises(ConfigError, match="no module that sees is called 'projector'") as error:
        prepared(model, rows, ["projector"])
    assert "multi_modal_projector" in str(error.value.hint)
    start = save_adapter(model, tmp_path, target_modules="all-linear")
    with pytest.raises(ConfigError, match=r'a run with "model\.train_towers": true reads'):
        prepared(model, rows, False, adapter={"init_from": str(start)})


@pytest.mark.parametrize("family", seldom(["llava", "qwen2_5_vl"], "llava"))
def test_a_merged_adapter_is_what_peft_makes_of_it(family, models, tmp_path):
    model, merged = models(family), tmp_path / "merged"
    adapter = save_adapter(model, tmp_path / "adapter", target_modules="all-linear")
    merge_adapter(adapter, str(model), OutputDirectory(merged))
    whole: Any = AutoModelForImageTextToText.from_pretrained(model)
    expected = PeftModel.from_pretrained(whole, adapter).merge_and_unload()
    found = AutoModelForImageTextToText.from_pretrained(merged).state_dict()
    assert_same(found, expected.state_dict())
    about = {path.name for path in model.glob("*processor_config.json")}
    assert about <= {path.name for path in merged.iterdir()}


def test_the_dropout_of_a_tower_is_that_of_one_process(rows, losses, tmp_path):
    model = save_llava(tmp_path / "llava")
    sections: dict[str, Any] = {"layers": LAYERS, "data": {"train": str(rows)}}
    sections["model"] = {"name_or_path": str(model), "train_towers": True}
    sections["training"] = {**TRAINING, "gradient_checkpointing": True}
    without = losses([], "without", **sections)
    file = model / "config.json"
    about = json.loads(file.read_text())
    about["vision_config"]["attention_dropout"] = 0.3
    file.write_text(json.dumps(about))
    whole = losses([], "whole", **sections)
    assert whole != without
    assert losses([2], "cut", **sections) == whole
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
