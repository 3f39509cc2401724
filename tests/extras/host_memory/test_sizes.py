"""Sizes that are told before a run, against those of stages that are loaded."""

from __future__ import annotations

import pytest

from hetero_framework.engine.stage import Stage
from hetero_framework.extras.host_memory.residence import HostMemory
from hetero_framework.extras.host_memory.streamed_layers import StreamedLayers
from hetero_framework.models.adapters.trainable import adapter_plan_of
from hetero_framework.models.cut.shard import load_model_config
from hetero_framework.models.sizing.memory import StageMemory, estimate_memory
from tests.extras.host_memory.stages import LORA, MODEL, configuration, load, own_memory

__all__ = ["own_memory"]

# Each tensor fills whole blocks of the device's allocator.
WIDE = {"from_config": {**MODEL, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}}


def held_bytes(stage: Stage) -> int:
    tensors = [*stage._shard.model.parameters(), *stage._shard.model.buffers()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("offload", [0, 2, 4, 5, 6, 7])
def test_a_stage_holds_the_bytes_that_are_told(offload: int, own_memory: None) -> None:
    config = configuration(({"end": 7, "offload": offload},), adapter=LORA, model=WIDE)
    config = config.with_changes(coordinator={"ip": "127.0.0.1", "device": "cuda:0"})
    assert config.model is not None
    model = load_model_config(config.model, config.base_dir)
    told: StageMemory = estimate_memory(config, model, plan=adapter_plan_of(config, model))[0]
    stage = load(config)[0]
    assert held_bytes(stage) == told.weights
    if offload:
        assert isinstance(stage.residence, HostMemory)
        assert isinstance(stage.residence._layers, StreamedLayers)
        assert sum(layer.nbytes for layer in stage.residence._layers._layers) == told.host
