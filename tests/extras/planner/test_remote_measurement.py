"""A machine remembers its measurements, and measures anew when something changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.core.devices import Device
from hetero_framework.extras.planner import remote_measurement
from hetero_framework.extras.planner.measuring import ModelCost, PartCost
from hetero_framework.models.files.source import ModelSource

PART = PartCost(0.25, 0.5, 0.125, 7, 3)
COST = ModelCost(PART, {0: PART}, PART, [0, 0], 64, "float32")
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64}
LLAMA |= {"intermediate_size": 64, "num_attention_heads": 2}


class Counting:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self, *args: Any) -> ModelCost:
        self.times += 1
        return COST


@pytest.fixture
def measured(tmp_path, monkeypatch):
    found = Counting()
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_measurement, "measure", found)
    return found


def ask(
    *, anew: bool = False, model: dict[str, Any] = LLAMA, **sections: Any
) -> remote_measurement.Measurement:
    raw = {"coordinator": {"ip": "127.0.0.1"}, "shard_plan": "auto", **sections}
    config = Config.from_dict({**raw, "model": {"from_config": model, "tokenizer": "none"}})
    loaded = ModelSource(config.model, Path()).config
    return remote_measurement.model_costs(config, loaded, Device(), anew=anew)


def test_measured_costs_are_cached(measured):
    assert not ask().was_known
    again = ask()
    assert again.was_known
    assert again.cost == COST
    assert measured.times == 1
    assert not ask(anew=True).was_known
    assert measured.times == 2


def test_settings_without_effect_on_costs_are_ignored(measured):
    ask()
    assert ask(training={"learning_rate": 0.1, "gradient_accumulation_steps": 4}).was_known


@pytest.mark.parametrize(
    "changed",
    [
        {"training": {"per_device_train_batch_size": 3}},
        {"training": {"bf16": True}},
        {"adapter": {"r": 4}},
        {"data": {"train": "x", "max_length": 7}},
        {"data": {"train": "x", "padding_free": True}},
        {"model": {**LLAMA, "num_hidden_layers": 3}},
    ],
)
def test_costs_are_measured_anew_when_their_settings_change(changed, measured):
    ask()
    assert not ask(**changed).was_known


def test_another_version_measures_again(measured, monkeypatch):
    ask()
    monkeypatch.setattr(remote_measurement, "__version__", "0.0.0")
    assert not ask().was_known
