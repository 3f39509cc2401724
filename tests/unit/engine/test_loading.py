"""What is checked before a stage is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_framework.config import Config
from hetero_framework.core.devices import Device, Support
from hetero_framework.engine.loading import check_types
from hetero_framework.errors import DeviceError


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
    return Config.from_dict(
        {
            "coordinator": {"ip": "127.0.0.1"},
            "shard_plan": [{"id": "local", "start": 0, "end": 2}],
            "model": {
                "from_config": {"model_type": "llama", "dtype": "bfloat16"},
                "tokenizer": "t",
                "dtype": dtype,
            },
            "training": training,
        }
    )


@pytest.mark.parametrize(
    ("chosen", "setting"),
    [
        (config("bfloat16"), "model.dtype"),
        (config("auto"), "model.dtype"),
        (config(bf16=True), "training.bf16"),
    ],
)
def test_a_type_that_the_device_lacks_is_refused_before_loading(
    chosen: Config, setting: str
) -> None:
    with pytest.raises(DeviceError, match=f"Old GPU cannot compute in bfloat16 .{setting}"):
        check_types(chosen, Old(emulates=False))


def test_a_type_that_is_emulated_is_said(caplog: pytest.LogCaptureFixture) -> None:
    check_types(config(bf16=True), Old(emulates=True))
    assert "training.bf16 is emulated on Old GPU" in caplog.text


@pytest.mark.parametrize("chosen", [config(), config(fp16=True)])
def test_types_that_the_device_has_pass(chosen: Config) -> None:
    check_types(chosen, Old(emulates=False))
