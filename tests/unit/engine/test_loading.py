"""Checks before a stage is loaded, and the memory that it frees."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from hetero_framework.config import Config
from hetero_framework.core.devices import Device, Support, open_device
from hetero_framework.engine import loading
from hetero_framework.engine.loading import check_types, load_stages, take_apart
from hetero_framework.errors import DeviceError, OutOfMemory
from tests.samples import config_for, save_llama


class Old(Device):
    """A device without bfloat16; with `emulates` torch computes it all the same."""

    label = "Old GPU"

    def __init__(self, *, emulates: bool) -> None:
        super().__init__()
        self._emulates = emulates

    def supports(self, dtype: torch.dtype) -> Support:
        if dtype == torch.bfloat16:
            return Support(False, "needs a newer one", emulated=self._emulates)
        return Support(True, "native")


def config(dtype: str = "float32", **training: Any) -> Config:
    fields = {"model_type": "llama", "dtype": "bfloat16"}
    model = {"from_config": fields, "tokenizer": "t", "dtype": dtype}
    return config_for(("local", 2), model=model, training=training)


@pytest.mark.parametrize(
    ("chosen", "setting"),
    [
        (config("bfloat16"), "model.dtype"),
        (config("auto"), "model.dtype"),
        (config(bf16=True), "training.bf16"),
    ],
)
def test_a_type_that_a_device_lacks_is_refused_before_loading(chosen, setting):
    with pytest.raises(DeviceError, match=f"Old GPU cannot compute in bfloat16 .{setting}"):
        check_types(chosen, Old(emulates=False))


def test_an_emulated_dtype_is_reported(caplog):
    check_types(config(bf16=True), Old(emulates=True))
    assert "training.bf16 is emulated on Old GPU" in caplog.text


@pytest.mark.parametrize("chosen", [config(), config(fp16=True)])
def test_types_that_the_device_has_pass(chosen):
    check_types(chosen, Old(emulates=False))


@pytest.mark.parametrize("adapter", [None, {"r": 2}], ids=["full", "lora"])
def test_memory_of_stages_is_freed_when_they_are_taken_apart(adapter, tmp_path):
    """Also while somebody holds the stages: an assembly goes when the collector comes by."""
    model = {"name_or_path": str(save_llama(tmp_path / "model", layers=2))}
    made = config_for(("local", 2), model=model, adapter=adapter)
    device = open_device("cpu")
    stages = load_stages(made, made.plan.stages, device)
    for parameter in stages[0].all_weights():
        if parameter.requires_grad:
            parameter.grad = parameter.detach().clone()
    stages[0].commit(0.1, 1.0)
    trained = [weakref.ref(p) for p in stages[0].all_weights() if p.requires_grad]
    frozen = [weakref.ref(p) for p in stages[0].all_weights() if not p.requires_grad]
    del parameter
    gc.disable()
    try:
        remains = take_apart(stages, made)
        assert not any(weight() is not None for weight in trained)
        assert all(weight() is not None for weight in frozen)
        remains.hand_out(None, [])
        assert not any(weight() is not None for weight in frozen)
    finally:
        gc.enable()


def test_a_model_that_does_not_fit_is_told_with_its_layers(monkeypatch):
    def load(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(loading, "load_shard", load)
    settings = config()
    with pytest.raises(OutOfMemory, match="loading layers 0-1: memory ran out on cpu, ") as raised:
        load_stages(settings, settings.plan.stages, open_device("cpu"))
    assert "fewer layers" in str(raised.value.hint)
