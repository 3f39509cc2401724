"""Whole runs on streams."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.trainer.coordinator import train
from tests.alone import Alone
from tests.pools import read_metrics
from tests.samples import save_texts
from tests.waiting import wait_until

STEPS = 24


def make(alone: Alone, tmp_path: Path, name: str) -> Config:
    shards = [save_texts(tmp_path / f"s{k}.jsonl", 11, seed=k) for k in range(3)]
    training = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 7, "seed": 5}
    data = {"train": [str(shard) for shard in shards], "max_length": 32, "streaming": True}
    return alone(name, training=training, data=data)


def result(config: Config) -> tuple[Any, bytes]:
    [weights] = config.result_dir.glob("*.safetensors")
    return read_metrics(config.output_dir), weights.read_bytes()


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again_is_the_whole_run(alone, tmp_path):
    whole, parts = make(alone, tmp_path, "whole"), make(alone, tmp_path, "parts")
    train(whole)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(parts.to_dict()))
    metrics = parts.output_dir / "metrics.jsonl"
    drawn = random.Random(1)
    # The first end is before anything is saved.
    for least in (1, drawn.randrange(8, 20)):
        command = [sys.executable, "-m", "hetero_framework", "train", "--config", str(file)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:

            def reached(least: int = least, run: subprocess.Popen[bytes] = run) -> bool:
                lines = metrics.read_text().splitlines() if metrics.exists() else []
                steps = [json.loads(line).get("step", 0) for line in lines if line.endswith("}")]
                return run.poll() is not None or max(steps, default=0) >= least

            wait_until(reached, f"step {least}")
            run.kill()
        assert run.returncode < 0
    train(parts)
    assert result(parts) == result(whole)
    assert_has_places(parts, 21)


def assert_has_places(config: Config, step: int) -> None:
    manifest = json.loads((config.checkpoints / f"step_{step}" / "manifest.json").read_text())
    assert manifest["stream"]["places"][0] == [0, None]
    assert len(manifest["stream"]["shards"]) == 3


@pytest.mark.long
@pytest.mark.parametrize("step", [7, 21])
def test_a_checkpoint_has_the_place_of_the_stream(step, alone, tmp_path):
    config = make(alone, tmp_path, "run")
    train(config)
    before = result(config)
    train(config, resume=step)
    assert result(config) == before
    assert_has_places(config, step)


def test_a_stream_in_order_trains_as_the_file_does(alone, tmp_path):
    texts = save_texts(tmp_path / "texts.jsonl", 16)
    training = {"train_sampling_strategy": "sequential"}
    found = []
    for streaming in (False, True):
        data = {"train": str(texts), "max_length": 32, "streaming": streaming}
        train(config := alone(f"run {streaming}", training=training, data=data))
        found.append(result(config))
    assert found[0] == found[1]
