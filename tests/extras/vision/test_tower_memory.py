"""What towers need of memory, against the same parts run with values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_framework.core.devices import Device
from hetero_framework.data.batches import PICTURES
from hetero_framework.extras.planner.measuring import _random_weights
from hetero_framework.extras.planner.planning import plan
from hetero_framework.extras.planner.profile import bytes_of_parts
from hetero_framework.extras.vision.pictures import usual
from hetero_framework.models.adapters.trainable import attach_adapter
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import build_shard, load_shard
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.footprint import PeakMemory, Setting, embedding_footprint
from hetero_framework.models.sizing.memory import (
    estimate_memory,
    memory_of_parts,
    shapes_of,
    uncounted_lines,
)
from hetero_framework.trainer.setup import Prepared, prepare
from tests.cases import seldom
from tests.extras.planner.fleets import fleet_of
from tests.extras.vision.seeing import FAMILIES, LAYERS, save_rows
from tests.samples import config_for

pytestmark = pytest.mark.xdist_group("pool2")
LORA = {"target_modules": "all-linear"}
WAYS: dict[str, tuple[bool | list[str], Any]] = {
    "frozen": (False, None),
    "trained": (True, None),
    "frozen, lora": (False, {"target_modules": ["q_proj"]}),
    "lora": (True, LORA),
}
COUNTED = [family for family in FAMILIES if family != "idefics3"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return save_rows(tmp_path_factory.mktemp("rows"))


def prepared(model: Any, rows: Any, way: str = "frozen", batch: int = 3) -> Prepared:
    towers, adapter = WAYS[way]
    training = {"objective": "image-text-to-text", "per_device_train_batch_size": batch}
    sections = {"data": {"train": str(rows)}, "training": training, "adapter": adapter}
    sections["model"] = {"name_or_path": str(model), "train_towers": towers}
    return prepare(config_for(("local", 2), (1, LAYERS), **sections))


def setting_of(made: Prepared) -> Setting:
    shapes = shapes_of(made.config, made.model_config, made.adapter_plan, None)
    setting = shapes.setting(made.config, made.data.row_tokens)
    return replace(setting, pictures=made.data.pictures)


def measured(made: Prepared, batch: dict[str, torch.Tensor]) -> tuple[int, int, int]:
    """(kept, most besides forward, most besides backward) of the first part, run on numbers."""
    setting, rng = setting_of(made), ShardRange(0, 0, True, False)
    shard = build_shard(made.model_config, None, rng, dtype=setting.dtype, sees=True)
    attach_adapter(shard, setting.plan, 0)
    shard.train()
    parts = [shard.model, *shard.tower_modules]
    modules = [module for part in parts for module in part.modules()]
    plain = [v for m in modules for v in vars(m).values() if isinstance(v, torch.Tensor)]
    own = [*plain, *(t for m in modules for t in (*m.parameters(False), *m.buffers(False)))]
    for parameter in [tensor for tensor in own if tensor.requires_grad]:
        parameter.grad = torch.zeros_like(parameter)
        own.append(parameter.grad)
    seen = {n for n in batch if n.startswith(PICTURES) and batch[n].is_floating_point()}
    with PeakMemory([*own, *(batch[name] for name in batch.keys() - seen)]) as peak:
        for name in seen:
            peak.add(batch[name].untyped_storage())
        (out, *_) = shard.forward(batch, ())
        batch.clear()
        kept, forward = peak.now, peak.most - peak.now
        if not out.requires_grad:
            return 0, peak.most, 0
        peak.most = kept
        torch.autograd.backward(out, torch.empty_like(out))
    return kept, forward, peak.most - kept


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", seldom(COUNTED, *{*COUNTED} - {"llava", "qwen2_5_vl"}))
def test_a_tower_is_counted_as_it_runs(family, way, models, rows, verdicts):
    made = prepared(models(family), rows, way)
    found = embedding_footprint(setting_of(made))
    numbers = made.data.examples.most_seen(3)
    batch = made.data._kind.collate(made.data.examples, numbers, 0, made.data.row_tokens)
    assert (found.kept, found.forward, found.backward) == measured(made, batch)


def test_check_and_run_count_it_on_the_first_stage(models, rows, verdicts):
    model = models("llava")
    memory = {way: prepared(model, rows, way).memory for way in WAYS}
    kept = {way: embedding_footprint(setting_of(prepared(model, rows, way))).kept for way in WAYS}
    more = [
        one.per_micro_batch - other.per_micro_batch
        for one, other in zip(memory["trained"], memory["frozen"], strict=True)
    ]
    assert more == [kept["trained"] - kept["frozen"], 0]
    assert more[0] > 0
    # Frozen, a large picture is the largest moment of the stage, and nothing of it stays.
    one, many = (prepared(model, rows, "frozen, lora", batch).memory[0] for batch in (1, 3))
    assert many.working > one.working


def test_without_data_each_row_has_a_picture_of_usual_size(models, rows, verdicts):
    made = prepared(models("llava"), rows, "trained", batch=1)
    tokens = made.data.row_tokens
    found = estimate_memory(made.config, made.model_config, max_in_flight=1, tokens=tokens)
    assert all(m.counted for m in found)
    [shape] = {t.shape for n, t in usual(made.config, tokens).items() if "pixel_values" in n}
    assert shape == (1, 3, 28, 28)


def test_what_cannot_be_counted_is_said(models, rows, verdicts):
    """Idefics3 leaves out pictures that are black."""
    memory = prepared(models("idefics3"), rows).memory
    assert [m.counted for m in memory] == [False, True]
    assert "stage 0 needs more memory than is said" in uncounted_lines(memory)[0]


def test_the_planner_gives_a_first_stage_that_sees_fewer_layers(models, rows, verdicts):
    made = prepared(models("qwen2_5_vl"), rows, "trained")
    about = (made.adapter_plan, made.data.row_tokens, made.data.pictures)
    memory = memory_of_parts(made.config, made.model_config, LAYERS, *about)
    parts = bytes_of_parts(memory, 4)
    stored, layer = parts["embedding_stored_bytes"], memory[1]
    assert stored == embedding_footprint(setting_of(made)).kept
    free = parts["embedding_bytes"] + 2 * (layer.kept + layer.per_micro_batch) + stored / 2
    each = {"layer_forward_s": 1.0, "layer_backward_s": 2.0, **parts}
    first = []
    for bytes_ in (0, stored):
        here = {**each, "memory_bytes": free, "embedding_stored_bytes": bytes_}
        devices = [{"id": "local", **here}, {"id": 1, "memory_bytes": 9 * free, **each}]
        fleet = fleet_of(*devices, layers=LAYERS, micro_batches=4)
        first.append(plan(fleet, allow=set()).shard_plan[0]["end"])
    assert first[1] < first[0]


def test_a_quantised_model_is_measured_with_its_towers(models, rows):
    """Weights that are quantised are read from files, which measuring writes."""
    section = {"name_or_path": str(models("llava")), "quantization": "nf4"}
    training = {"objective": "image-text-to-text"}
    about = {"data": {"train": str(rows)}, "adapter": {"target_modules": ["q_proj"]}}
    config = config_for(("local", LAYERS), model=section, training=training, **about)
    (spec,) = config.plan.stages
    with _random_weights(config, ModelSource.of(config).config, [spec]) as made:
        shard = load_shard(made.model, made.base_dir, ShardRange.of(spec), Device(), seed=0)
    assert "Linear4bit" in {type(m).__name__ for m in shard.tower_modules[0].modules()}
