"""Attention implementations that can train on a device: checked by all processes before weights are
read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers.utils import is_flash_attn_2_available

from hetero_framework.cli import main
from hetero_framework.config import Config
from hetero_framework.errors import DeviceError
from hetero_framework.models.cut.attention import KNOWN, attention_support, check_attention
from tests.samples import plan_of, save_llama, save_texts


def test_the_answers_are_those_of_torch_and_transformers():
    assert set(KNOWN) >= {"sdpa", "eager"}
    if not torch.cuda.is_available():
        assert bool(attention_support("flash_attention_2", "cpu")) == is_flash_attn_2_available()
    x = torch.randn(1, 1, 16, 16, requires_grad=True)
    with pytest.raises((NotImplementedError, RuntimeError)):
        flex_attention(x, x, x).sum().backward()
    assert not attention_support("flex_attention", "cpu")
    assert attention_support("flex_attention", "cuda")


def test_each_process_with_layers_is_named_with_its_machine_and_device():
    config = Config.from_dict(
        {
            "coordinator": {"ip": "10.0.0.1", "device": "cpu"},
            "workers": [
                {"id": 1, "hostname": "box", "ip": "10.0.0.2", "device": "auto"},
                {"id": 2, "ip": "10.0.0.3", "device": "cuda:1"},
            ],
            "shard_plan": plan_of(("local", 0), (1, 2), (2, 4)),
            "model": {"name_or_path": "m", "attn_implementation": "flex_attention"},
        }
    )
    check_attention(config)  # the coordinator holds no layer, and "auto" is not known yet
    with pytest.raises(DeviceError, match=r"worker 1 \(box, cpu\) cannot train with") as caught:
        check_attention(config, {"local": "cpu", 1: "cpu", 2: "cuda:1"})
    assert "worker 2" not in str(caught.value)
    assert '"sdpa"' in str(caught.value)


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_an_attention_that_cannot_train_ends_with_2(name, command, tmp_path, capsys):
    model: dict[str, Any] = {"name_or_path": str(save_llama(tmp_path / "model", layers=1))}
    raw = {
        "coordinator": {"ip": "127.0.0.1", "device": "cpu"},
        "shard_plan": [{"id": "local", "start": 0, "end": 1}],
        "model": {**model, "attn_implementation": name},
        "data": {"train": str(save_texts(tmp_path / "texts.jsonl", 2))},
        "training": {"max_steps": 1, "output_dir": str(tmp_path / "run")},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    role = ["--role", "coordinator"] if command == "train" else []
    assert main([command, "--config", str(file), *role]) == 2
    said = capsys.readouterr()
    assert "model.attn_implementation" in said.err + said.out
