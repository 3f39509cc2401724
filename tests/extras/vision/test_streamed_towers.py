"""Layers of a frozen tower that stay in host memory and visit."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.core.devices import Device
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.memory import estimate_memory
from hetero_framework.trainer.coordinator import train
from tests.extras.vision.seeing import LAYERS, save_llava, save_rows
from tests.installed import needs
from tests.integration.test_parity import assert_same_runs
from tests.samples import DEVICE, machines_here

SEEING = 5
TRAINING = {
    **{"objective": "image-text-to-text", "max_steps": 3, "learning_rate": 1e-2, "seed": 3},
    **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "report_to": "none"},
    **{"save_strategy": "no", "visualize": False},
}


@needs("host_memory")
@pytest.mark.parametrize("adapter", [{"target_modules": ["q_proj"]}, None], ids=["lora", "full"])
def test_they_change_no_bit_and_are_counted(adapter, tmp_path, monkeypatch, verdicts):
    from hetero_framework.extras.host_memory import residence

    towers: list[Any] = []
    monkeypatch.setattr(Device, "one_memory", False)  # the CPU counts as a device with its own
    stream = residence.stream_tower
    monkeypatch.setattr(
        residence, "stream_tower", lambda *about: towers.append(stream(*about)) or towers[-1]
    )
    model, rows = save_llava(tmp_path / "model", seeing=SEEING), save_rows(tmp_path / "rows")

    def config(offload: int, device: str = DEVICE) -> Config:
        raw = {**machines_here(("local", LAYERS), device=DEVICE), "data": {"train": str(rows)}}
        raw |= {"model": {"name_or_path": str(model)}, "adapter": adapter}
        raw["training"] = {**TRAINING, "output_dir": str(tmp_path / f"run-{offload}")}
        raw["shard_plan"][0]["offload"] = offload
        raw["coordinator"]["device"] = device
        return Config.from_dict(raw)

    for offload in (0, LAYERS):
        train(config(offload))
        assert len(towers) == (offload > 0)
    assert_same_runs(tmp_path / f"run-{LAYERS}", tmp_path / "run-0")
    (tower,) = towers
    assert len(tower._layers) == SEEING
    assert tower.misses <= 2  # the first two, as the run began
    about = ModelSource.of(config(0)).config
    stays, visits = (estimate_memory(config(k, "cuda:0"), about)[0] for k in (0, LAYERS))
    (counted,) = visits.tower_layers
    assert [layer.nbytes for layer in tower._layers] == pytest.approx(counted, rel=0.2)  # aligned
    assert visits.host >= sum(counted) + sum(visits._streamed(LAYERS))
    assert stays.weights - visits.weights == visits._saved(LAYERS) > 0.4 * sum(counted)
