"""The longest micro-batch comes first, without any effect except on a lack of memory."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero_framework.config import Config
from hetero_framework.core.devices import Device, Memory
from hetero_framework.engine.pipeline import Pipeline
from hetero_framework.engine.stage import Stage
from hetero_framework.errors import OutOfMemory
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.memory_probe import probe_longest_batch
from hetero_framework.trainer.train_state import TrainState
from tests.installed import needs
from tests.pools import read_metrics
from tests.samples import WORDS, read_jsonl, save_llama
from tests.unit.data_helpers import write_jsonl

SHAPES = {
    "torch": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.0 GiB"
    ),
    "MPS": RuntimeError(
        "MPS backend out of memory (MPS allocated: 17.90 GB, other allocations: 384 KB, max "
        "allowed: 18.13 GB). Tried to allocate 2.00 GB on private pool."
    ),
    "CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
    ),
}


def uneven(path: Path, lengths: list[int]) -> Path:
    draw = random.Random(0)
    return write_jsonl(
        path, [{"text": " ".join(draw.choices(WORDS, k=count))} for count in lengths]
    )


@pytest.fixture
def late(alone, tmp_path):
    """Runs in file order whose longest example is in the last of four steps."""
    model = save_llama(tmp_path / "model", layers=1, attention_dropout=0.3)
    texts = uneven(tmp_path / "late.jsonl", [4] * 14 + [20, 4])

    def config(name: str, **training: Any) -> Config:
        return alone(
            name,
            model={"name_or_path": str(model)},
            data={"train": str(texts), "max_length": 64},
            training={"train_sampling_strategy": "sequential", **training},
        )

    return config


def assert_same_results(run: Config, other: Config) -> None:
    assert read_metrics(run.output_dir) == read_metrics(other.output_dir)
    one, two = (load_file(config.result_dir / "model.safetensors") for config in (run, other))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def runs_of(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tokens of each micro-batch, by what the pipeline is given at once."""
    seen: list[list[int]] = []
    run = Pipeline.run

    def watched(self: Pipeline, batches: Any) -> list[float]:
        seen.append([batch["input_ids"].numel() for batch in batches])
        return run(self, batches)

    monkeypatch.setattr(Pipeline, "run", watched)
    return seen


def test_the_probe_changes_no_number_of_a_run(late, monkeypatch):
    seen = runs_of(monkeypatch)
    probed, plain = late("probed"), late("plain", probe_longest_batch=False)
    train(probed)
    assert len(seen) == 5
    assert seen[0] == [max(max(step) for step in seen[1:])]
    train(plain)
    assert seen[5:] == seen[1:5]
    assert_same_results(probed, plain)


def test_a_resumed_run_probes_the_remaining_micro_batches(late, monkeypatch):
    config = late("run", save_strategy="steps", save_steps=1)
    train(config)
    seen = runs_of(monkeypatch)
    train(config, resume=2)
    assert len(seen[0]) == 1
    assert seen[0][0] == max(seen[2])
    seen.clear()
    train(config, resume=3)  # the next step has it
    assert [len(run) for run in seen] == [2]
    seen.clear()
    train(config, resume="latest")
    assert seen == []


def test_steps_of_the_data_that_were_left_out_are_not_looked_at():
    asked: list[int] = []
    data: Any = SimpleNamespace(largest_batch=lambda first: asked.append(first) or (first, {}))
    training: Any = SimpleNamespace(probe_longest_batch=True)
    nothing: Any = None  # the next step has it, and so nothing runs
    probe_longest_batch(nothing, data, training, nothing, TrainState(step=1, jumped=2))
    assert asked == [3]


def test_a_first_step_with_the_longest_micro_batch_is_probe_enough(late, monkeypatch, tmp_path):
    uneven(tmp_path / "late.jsonl", [20] + [4] * 15)
    seen = runs_of(monkeypatch)
    train(late("run"))
    assert [len(run) for run in seen] == [2, 2, 2, 2]


def short_of_memory(
    monkeypatch: pytest.MonkeyPatch, shape: Exception, tokens: int, times: int = 10**6
) -> None:
    """The stage has no memory for a micro-batch of so many tokens."""
    outcome, left = Stage._outcome, times

    def limited(self: Stage, micro_batch: int, inputs: Any, *args: Any) -> Any:
        nonlocal left
        if inputs["input_ids"].numel() >= tokens and left:
            left -= 1
            raise shape
        return outcome(self, micro_batch, inputs, *args)

    monkeypatch.setattr(Stage, "_outcome", limited)


@pytest.mark.parametrize("kind", SHAPES)
def test_f30_a_lack_of_memory_comes_before_the_first_step_with_numbers(kind, late, monkeypatch):
    short_of_memory(monkeypatch, SHAPES[kind], tokens=30)
    monkeypatch.setattr(Device, "memory", lambda self: Memory(22 << 30, 1 << 30))
    config = late("run")
    with pytest.raises(OutOfMemory) as raised:
        train(config)
    assert raised.value.exit_code == 6
    for text in (
        "the longest micro-batch of the run, 2 x ",
        "stage 0, forward of micro-batch 0: memory ran out on cpu, ",
        "it needs at least 23.0 GiB of 22.0 GiB",
        "try per_device_train_batch_size 1 with gradient_accumulation_steps 4",
    ):
        assert text in str(raised.value)
    assert not (config.output_dir / "metrics.jsonl").exists()


def test_a_lack_of_host_memory_names_that_and_not_the_device(late, monkeypatch):
    short_of_memory(monkeypatch, SHAPES["CPU"], tokens=30)
    monkeypatch.setattr(Device, "memory", lambda self: Memory(22 << 30, 1 << 30))
    monkeypatch.setattr(Device, "one_memory", False)
    with pytest.raises(OutOfMemory) as raised:
        train(late("run"))
    assert raised.value.exit_code == 6
    text = raised.value.message
    assert (
        "forward of micro-batch 0: host memory ran out on cpu, it needs at least 23.0 GiB" in text
    )
    assert raised.value.hint.startswith("keep less in this machine's host memory")
    short_of_memory(monkeypatch, SHAPES["torch"], tokens=30)
    with pytest.raises(OutOfMemory, match="forward of micro-batch 0: memory ran out on cpu"):
        train(late("other", gradient_checkpointing=True))


def test_f30_a_later_lack_of_memory_repeats_the_step_exactly(late, monkeypatch):
    plain, short = late("plain"), late("short", probe_longest_batch=False)
    train(plain)
    short_of_memory(monkeypatch, SHAPES["CPU"], tokens=30, times=1)
    train(short)
    assert_same_results(short, plain)
    events = read_jsonl(short.output_dir / "events.jsonl")
    [lack] = [event for event in events if event["what"] == "memory ran out"]
    assert (lack["step"], lack["worker"], lack["action"]) == (4, "local", "step repeated")
    assert "stage 0, forward of micro-batch 1: memory ran out on cpu" in lack["text"]


def test_f30_a_second_lack_of_memory_in_a_step_ends_the_run_with_numbers(late, monkeypatch):
    short_of_memory(monkeypatch, SHAPES["torch"], tokens=30, times=2)
    with pytest.raises(OutOfMemory, match=r"^step 4, whose largest micro-batch has 2 x ") as raised:
        train(late("run", probe_longest_batch=False))
    assert raised.value.exit_code == 6
    assert "try per_device_train_batch_size 1" in str(raised.value.hint)


@needs("preferences")
def test_it_does_without_the_reference_of_preferences(alone, tmp_path):
    words = ["fox"] * 7 + ["fox " * 20, "fox"]
    rows = [{"prompt": "The", "completion": f" {word}", "label": True} for word in words]
    file = write_jsonl(tmp_path / "rated.jsonl", rows)
    training = {"objective": "kto", "train_sampling_strategy": "sequential"}
    alone_settings: dict[str, Any] = {
        "data": {"train": str(file), "max_length": 64},
        "adapter": {"r": 2, "target_modules": "all-linear"},
        "training": {**training, "precompute_ref_log_probs": False, "max_steps": 2},
    }
    assert len(train(alone(**alone_settings)).losses) == 2
