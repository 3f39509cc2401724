"""The cost of a model's parts on this machine, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_framework.config import Config
from hetero_framework.core.devices import Device, open_device
from hetero_framework.extras.planner import measuring
from hetero_framework.extras.planner.measuring import ModelCost, measure
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.files.source import ModelSource
from tests.samples import machines_here, plan_of, save_llama

ROWS, TOKENS = 2, 16
LAYERS, HIDDEN = 3, 32
LLAMA = {
    **{"model_type": "llama", "vocab_size": 99, "hidden_size": HIDDEN, "intermediate_size": 64},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": 4},
}
LORA = {"target_modules": "all-linear", "r": 4}


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(measuring, "_LEAST_RUNS", 1)


def cost(
    tmp_path: Path, model: dict[str, Any], owner: int | str = "local", **sections: Any
) -> ModelCost:
    training = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1}
    data = {"train": "none.jsonl", "max_length": TOKENS}
    raw = {**machines_here(("local", LAYERS)), "model": model, "data": data, "training": training}
    config = Config.from_dict({**raw, **sections}, tmp_path)
    model_config = ModelSource.of(config).config
    found = measure(config.held_by(owner), model_config, open_device("cpu"), part_s=0.0)
    assert ModelCost.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    return found


def plain() -> dict[str, Any]:
    return {"from_config": LLAMA, "tokenizer": "none"}


def test_every_part_of_a_model_that_is_trained_has_its_times_and_bytes(tmp_path):
    found = cost(tmp_path, plain())
    hidden = ROWS * TOKENS * HIDDEN * 4
    assert found.hidden_bytes == hidden
    assert found.kinds == [0] * LAYERS
    [layer] = found.layers.values()
    for part in (found.embedding, layer, found.head):
        assert part.forward_s > 0
    for part in (found.embedding, layer):  # the head's is a difference
        assert part.backward_s > 0
    assert layer.recomputed_bytes == hidden  # what came in, and nothing else
    assert layer.kept_bytes > 5 * hidden
    assert found.head.kept_bytes == 0


@pytest.mark.parametrize("objective", ["dpo", "orpo", "cpo"])
def test_training_of_pairs_is_measured_without_a_reference(objective, tmp_path):
    training = {"objective": objective, "per_device_train_batch_size": ROWS}
    found = cost(tmp_path, plain(), training=training)
    assert found.head.forward_s > 0
    assert found.hidden_bytes == 2 * ROWS * TOKENS * HIDDEN * 4


def test_layers_that_receive_more_than_the_hidden_state_are_measured(tmp_path):
    fields = {**tiny_config("gemma3n_text").to_dict(), "dtype": "float32"}
    sections = {"shard_plan": plan_of(("local", 6)), "adapter": LORA}
    found = cost(tmp_path, {"from_config": fields, "tokenizer": "none"}, **sections)
    assert all(layer.backward_s > 0 for layer in found.layers.values())


def test_kept_bytes_are_those_that_autograd_keeps(tmp_path):
    """Counted by hand for one product: its input and the weight, which does not count."""
    stage: Any = type("One", (), {})()
    weight_DD = torch.nn.Parameter(torch.ones(8, 8))
    stage.is_first = stage.is_last = False
    stage.differentiates = True
    stage.side_gradients = ()
    stage.begin = lambda info: None
    stage.all_weights = lambda: iter([weight_DD])
    stage.forward = lambda k, batch, received: (received[0].exp() @ weight_DD,)
    hidden_BSD = torch.ones(1, 4, 8, requires_grad=True)
    part = measuring._MeasuredPart(stage, {"labels": torch.ones(1, 4)}, Device(), 0.0)
    # exp keeps what it gives, which is the product's input: once; the hidden state that came in.
    assert part._kept_bytes((hidden_BSD,)) == 2 * hidden_BSD.numel() * 4


def test_frozen_embedding_has_no_backward_pass(tmp_path):
    found = cost(tmp_path, plain(), adapter=LORA)
    assert found.embedding.backward_s == 0
    assert found.layers[0].backward_s > 0


@pytest.mark.long
def test_quantised_layers_are_measured_as_such_without_the_models_weights(tmp_path, monkeypatch):
    folder = save_llama(tmp_path / "model", layers=LAYERS, hidden_size=64)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    seen = []
    load = measuring.load_stages

    def watched(config: Config, *more: Any) -> Any:
        stages = load(config, *more)
        seen.extend(p.dtype for stage in stages for p in stage.all_weights())
        return stages

    monkeypatch.setattr(measuring, "load_stages", watched)
    model = {"name_or_path": str(folder), "quantization": "nf4"}
    found = cost(tmp_path, model, adapter=LORA)
    assert found.layers[0].forward_s > 0
    assert torch.uint8 in seen
    machine = {"ip": "127.0.0.1", "quantization": "none"}
    plan = plan_of(("local", 1), (1, LAYERS))
    mixed = {"adapter": LORA, "coordinator": machine, "shard_plan": plan}
    seen.clear()
    cost(tmp_path, model, workers=[{"id": 1, "ip": "b"}], **mixed)
    # In full precision; the adapter's type follows from the others.
    assert {*seen} == {torch.float32, torch.bfloat16}
    seen.clear()
    workers = [{"id": 1, "ip": "b", "quantization": "nf4"}]
    alone = {**model, "quantization": None}
    cost(tmp_path, alone, 1, workers=workers, **mixed)
    assert torch.uint8 in seen
