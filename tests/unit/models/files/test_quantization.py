"""Quantised shards against the whole model as transformers and bitsandbytes load it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel

from hetero_framework.config import AdapterConfig, Config
from hetero_framework.core.devices import Device, Support, open_device
from hetero_framework.engine.loading import load_stages
from hetero_framework.errors import ConfigError, DeviceError, ModelError
from hetero_framework.models.adapters.trainable import attach_adapter
from hetero_framework.models.files.quantization import (
    modules_left_alone,
    quantization_config,
    stored_quantization,
)
from hetero_framework.models.files.weights import check_quantizer
from tests.samples import config_for
from tests.unit.adapter_helpers import (
    chain_logits,
    check_gradients,
    randomise,
    save_model,
    shards,
    stock,
    stock_logits,
    write,
)

SETTINGS = {
    "nf4": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}


def quantised(base: Path, kind: str) -> PreTrainedModel:
    return stock(base, quantization_config=SETTINGS[kind], device_map={"": "cpu"})


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["nf4", "int8"])
def stored(request, llama, tmp_path_factory):
    """A checkpoint that bitsandbytes quantised before it was saved."""
    folder = tmp_path_factory.mktemp(request.param)
    quantised(llama, request.param).save_pretrained(folder)
    return request.param, folder


def trained(base: PreTrainedModel, adapter: Path, dtype: torch.dtype) -> PeftModel:
    """By stock PEFT, with its trained parameters in this type."""
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    model.train(False)
    return model


def test_shards_of_a_quantised_checkpoint_equal_the_whole(stored):
    kind, folder = stored
    whole = stock(folder, device_map={"": "cpu"})
    parts = shards(folder, 0, 1, 3, 4, attach=False)
    assert torch.equal(chain_logits(parts), stock_logits(whole))
    assert stored_quantization(AutoConfig.from_pretrained(folder)) == kind


def test_quantising_in_loading_equals_the_checkpoint(stored, llama):
    kind, folder = stored
    parts = shards(llama, 0, 2, 4, quantization=kind, attach=False)
    assert torch.equal(chain_logits(parts), stock_logits(stock(folder, device_map={"": "cpu"})))


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("autocast", [None, True, pytest.param(False, marks=pytest.mark.long)])
def test_qlora_loss_and_gradients_equal_the_whole_models(stored, autocast, tmp_path):
    _, folder = stored
    settings = AdapterConfig(target_modules="all-linear", autocast_adapter_dtype=autocast)
    parts = shards(folder, 0, 1, 3, 4, adapter=settings)
    randomise(parts)
    adapter = write(tmp_path / "adapter", parts, folder)
    base = stock(folder, device_map={"": "cpu"})
    # By default as TRL's SFTTrainer does over a quantised base.
    model = trained(base, adapter, torch.float32 if autocast else torch.bfloat16)
    check_gradients(parts, model)


def test_every_shard_leaves_the_same_modules_unquantised(llama):
    whole = quantised(llama, "nf4")
    types = {n: type(m).__name__ for n, m in whole.named_modules()}
    assert modules_left_alone(AutoConfig.from_pretrained(llama)) == ["lm_head"]
    for part in shards(llama, 0, 1, 3, 4, quantization="nf4", attach=False):
        linear = {
            n: type(m).__name__ for n, m in part.model.named_modules() if "Linear4" in str(type(m))
        }
        assert linear
        assert all(types[name] == kind for name, kind in linear.items())
        plain = [n for n, m in part.model.named_modules() if type(m) is torch.nn.Linear]
        assert plain in ([], ["lm_head"])


def test_full_training_of_a_quantised_model_is_refused(llama):
    (shard,) = shards(llama, 0, 4, quantization="nf4", attach=False)
    with pytest.raises(ConfigError, match="cannot be trained in full"):
        attach_adapter(shard, None, 0)


def test_nf4_is_qloras_recipe(llama):
    config = AutoConfig.from_pretrained(llama)
    settings = quantization_config("nf4", config, torch.bfloat16, open_device("cpu"))
    assert (settings.bnb_4bit_quant_type, settings.bnb_4bit_use_double_quant) == ("nf4", True)
    assert settings.bnb_4bit_compute_dtype == torch.bfloat16


class NoFourBit(Device):
    def four_bit(self) -> Support:
        return Support(False, "no kernels for this device")


def test_device_without_bitsandbytes_is_refused(llama, stored):
    device = NoFourBit()
    with pytest.raises(DeviceError, match="no kernels for this device"):
        quantization_config("nf4", AutoConfig.from_pretrained(llama), torch.float32, device)
    config = AutoConfig.from_pretrained(stored[1])
    with pytest.raises(DeviceError, match="no kernels for this device"):
        quantization_config(None, config, torch.float32, device)


def test_other_or_foreign_quantisation_is_refused(stored, llama):
    kind, folder = stored
    other: Any = "int8" if kind == "nf4" else "nf4"
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(ConfigError, match="quantised already"):
        quantization_config(other, config, torch.float32, open_device("cpu"))
    with pytest.raises(ModelError, match="'hqq'"):
        check_quantizer({"quant_method": "hqq", "bits": 4}, str(llama))


def mixed(base: Path, *, worker: str | None = "none") -> Config:
    """Layers 0 and 1 in nf4, 2 and 3 as the worker says."""
    return config_for(
        *(("local", 2), (1, 4)),
        workers=[{"id": 1, "ip": "127.0.0.1", "device": "cpu", "port": 2, "quantization": worker}],
        model={"name_or_path": str(base), "quantization": "nf4"},
        adapter={"target_modules": "all-linear"},
    )


def test_layers_by_machine_equal_a_model_that_quantises_these(llama, tmp_path):
    config = mixed(llama)
    stages = load_stages(config, config.plan.stages, open_device("cpu"))
    parts = [stage._shard for stage in stages]
    for part in parts:
        part.train(False)
    randomise(parts)
    adapter = write(tmp_path / "adapter", parts, llama)

    settings = copy.deepcopy(SETTINGS["nf4"])
    settings.llm_int8_skip_modules = ["lm_head", "model.layers.2", "model.layers.3"]
    base = stock(llama, quantization_config=settings, device_map={"": "cpu"})
    # As TRL's SFTTrainer does where any of the base is quantised.
    check_gradients(parts, trained(base, adapter, torch.bfloat16))

    everything = load_stages(mixed(llama, worker=None), config.plan.stages, open_device("cpu"))
    kinds = [
        type(s._shard.model.model.layers[3].mlp.up_proj.base_layer)
        for s in (stages[1], everything[1])
    ]
    assert [kind.__name__ for kind in kinds] == ["Linear", "Linear4bit"]
