"""Whole runs that keep a part of the model in host memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero_framework.config import Config
from hetero_framework.core.devices import Device, Memory
from hetero_framework.errors import PlanError
from hetero_framework.security.access import LOOPBACK_ONLY
from hetero_framework.trainer.coordinator import train
from tests.installed import needs
from tests.samples import save_llama


@pytest.fixture
def adapted(alone, tmp_path):
    model = save_llama(tmp_path / "model", hidden_size=128)

    def config(name: str, offload: int | str, **training: Any) -> Config:
        return alone(
            name,
            model={"name_or_path": str(model)},
            shard_plan=[{"id": "local", "start": 0, "end": 6, "offload": offload}],
            adapter={"r": 2},
            coordinator={"hostname": "localhost", "ip": "127.0.0.1", "device": "auto"},
            training={"max_steps": 2, **training},
        )

    return config


def stages_of(config: Config) -> list[dict[str, Any]]:
    lines = (config.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [stage for line in lines for stage in json.loads(line)["stages"]]


def limited(monkeypatch: pytest.MonkeyPatch, free: int, host: int = 1 << 40) -> None:
    """Device and host have these free bytes."""
    monkeypatch.setattr(Device, "memory", lambda self: Memory(free, free))
    monkeypatch.setattr(Device, "host_free", host)


def test_a_run_streams_as_few_layers_as_it_takes(adapted, own_memory, monkeypatch, capsys):
    plain, streamed = adapted("plain", 0), adapted("streamed", "auto")
    limited(monkeypatch, 1 << 40)
    train(plain)
    assert all("prefetch_misses" not in stage for stage in stages_of(plain))
    needed = stages_of(plain)[0]["predicted"]["memory"]
    limited(monkeypatch, needed - 1)
    with pytest.raises(PlanError, match=r"(?s)1 MiB too little.*keep 4 of its layers in host"):
        train(adapted("refused", 0))
    train(streamed)
    said = "offload, to fit the memory: stage 0 streams 4 of its 6 layers"
    assert said in capsys.readouterr().out
    stages = stages_of(streamed)
    assert [stage["prefetch_misses"] for stage in stages] == [0, 0]
    assert stages[0]["predicted"]["memory"] < needed
    one, other = (load_file(c.result_dir / "adapter_model.safetensors") for c in (plain, streamed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_needs_more_host_memory_than_there_is_is_refused(
    adapted, own_memory, monkeypatch
):
    limited(monkeypatch, 1 << 40, host=10)
    with pytest.raises(PlanError, match="the coordinator has 10 B of host memory free, 2 MiB"):
        train(adapted("run", 4))


@needs("talking")
def test_a_model_that_is_talked_to_streams_its_layers_too(adapted, own_memory, monkeypatch):
    from hetero_framework.extras.talking.result_model import Talk

    def answer(offload: int | str) -> tuple[str, int | str]:
        config = adapted("run", offload)
        talk = Talk(config)
        with talk.loaded(LOOPBACK_ONLY, "chat") as cluster:
            prompts = talk.reader.read(["red"], config.base_dir, "prompts")
            [sample] = talk.answer(cluster, prompts, talk.choice(temperature=0.0, max_tokens=5))
            return sample.text, cluster._config.shard_plan[0].offload

    right, _ = answer(0)
    limited(monkeypatch, 1 << 20)
    assert answer("auto") == (right, 6)
