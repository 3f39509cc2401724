"""A resumed run is the uninterrupted one, to the last bit, also under another plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hetero_framework.config import Config
from hetero_framework.data.batches import num_items
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import load_data
from hetero_framework.errors import CheckpointError
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress
from tests.integration.test_parity import LORA, assert_same_runs
from tests.pools import Pool, read_metrics
from tests.samples import read_jsonl

pytestmark = pytest.mark.xdist_group("pool")

SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}


def make(pool: Pool, llama: Path, texts: Path, output: Path, cuts: list[int], **sections) -> Config:
    training = {**SAVING, **sections.pop("training", {})}
    return Config.from_dict(
        pool.config(
            output,
            cuts,
            model={"name_or_path": str(llama)},
            data={"train": str(texts), "max_length": 64, "eval": str(texts)},
            training=training,
            **sections,
        )
    )


@pytest.fixture
def config(pool, llama, texts, tmp_path):
    """What `make` makes, into tmp_path / name."""
    return lambda name, cuts, **sections: make(
        pool, llama, texts, tmp_path / name, cuts, **sections
    )


def evals(output: Path) -> list[tuple]:
    lines = read_jsonl(output / "metrics.jsonl")
    return [
        (e["step"], e["eval_token_loss"], e["eval_perplexity"]) for e in lines if "eval_loss" in e
    ]


@pytest.mark.parametrize(
    "adapter", [LORA, pytest.param(None, marks=pytest.mark.long)], ids=["lora", "full"]
)
def test_resume_under_other_plans_equals_the_uninterrupted_run(adapter, config, tmp_path):
    sections = {"adapter": adapter, "training": {"eval_steps": 3}}
    train(config("whole", [3], **sections))
    # Stopped after step 5 (of 9, in the middle of the second epoch), then resumed from step 4.
    parts = tmp_path / "parts"
    stop_after(config("parts", [2, 4], **sections), 5)
    train(config("parts", [1, 2, 3, 5], **sections), resume=4)
    assert_same_runs(parts, tmp_path / "whole")
    assert evals(parts) == evals(tmp_path / "whole")
    assert [step for step, _, _ in evals(parts)] == [3, 6, 9]


def stop_after(config: Config, steps: int) -> None:
    """Train and die after so many steps, as a crash would: nothing is saved on the way out."""

    class Crash(Exception):
        pass

    class Bomb(Progress):
        def step(self, metrics) -> None:
            super().step(metrics)
            if metrics["step"] == steps:
                raise Crash

    with pytest.raises(Crash):
        train(config, progress=Bomb())


def test_resume_with_other_data_or_settings_is_refused(config, pool, llama, texts, tmp_path):
    train(config("run", [3], training={"max_steps": 2}))
    other = config("run", [3], training={"seed": 7})
    with pytest.raises(CheckpointError, match=r"training\.seed was 42, now it is 7"):
        train(other, resume="latest")
    texts2 = tmp_path / "other.jsonl"
    texts2.write_text(texts.read_text() + '{"text": "one more"}\n')
    with pytest.raises(CheckpointError, match="other training data"):
        train(make(pool, llama, texts2, tmp_path / "run", [3]), resume="latest")


def test_checkpoint_needs_no_worker_disk(config, tmp_path):
    train(config("run", [2, 4], adapter=LORA))
    steps = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == ["step_6", "step_8", "step_9"]
    files = {p.name for p in (tmp_path / "run" / "checkpoints" / "step_9").iterdir()}
    assert files == {"manifest.json", *(f"stage-{k}.0.safetensors" for k in range(3))}


def test_bytes_of_a_step_exclude_resume_and_checkpoints(config, tmp_path):
    """Neither the state that a resume loads nor a checkpoint before the step is counted in it."""

    def bytes_of(name: str) -> list[int]:
        lines = read_jsonl(tmp_path / name / "metrics.jsonl")
        stages = [stage for line in lines for stage in line.get("stages", [])][1::2]
        return [stage["bytes_in"] + stage["bytes_out"] for stage in stages]

    training = {"max_steps": 3, "save_steps": 1, "eval_strategy": "no"}
    train(config("saving", [3], training=training))
    train(config("saving", [3], training=training), resume=1)
    train(config("plain", [3], training={**training, "save_strategy": "no", "save_steps": 500}))
    state = sum(p.stat().st_size for p in (tmp_path / "saving/checkpoints/step_3").glob("stage-1*"))
    differ = [a - b for a, b in zip(bytes_of("saving"), bytes_of("plain"), strict=True)]
    assert max(map(abs, differ)) < state / 20  # pings and confirmations, no state


def test_fresh_start_keeps_an_earlier_run(config, tmp_path):
    for _ in range(2):
        train(config("run", [3], training={"max_steps": 2}))
    assert (tmp_path / "run" / "previous-1" / "checkpoints" / "step_2" / "manifest.json").exists()
    assert len(read_metrics(tmp_path / "run")) == 2


def test_evaluation_leaves_training_alone(config, tmp_path):
    train(config("with", [3], adapter=LORA, training={"eval_steps": 1}))
    train(config("without", [3], adapter=LORA))
    assert read_metrics(tmp_path / "with") == read_metrics(tmp_path / "without")
    assert len(evals(tmp_path / "with")) == 9


def test_eval_token_loss_is_the_mean_over_tokens(config, llama, tmp_path):
    training = {"max_steps": 1, "eval_on_start": True, "eval_strategy": "steps"}
    made = config("run", [3], training=training)
    train(made)
    model = AutoModelForCausalLM.from_pretrained(llama)
    data = load_data(made, load_tokenizer(made))
    total = items = 0.0
    with torch.no_grad():
        for batch in data.eval_batches():
            count = num_items([batch])
            total += float(model(**batch, num_items_in_batch=torch.tensor(1.0)).loss)
            items += count
    assert evals(tmp_path / "run")[0][1] == total / items


def test_checkpoints_after_the_resumed_step_step_aside(config, tmp_path):
    for resume in (None, 2):
        train(config("run", [3], training={"max_steps": 5}), resume=resume)
    assert {p.name for p in (tmp_path / "run" / "previous-1").iterdir()} == {"step_4", "step_5"}
    now = {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()}
    assert now == {"step_2", "step_4", "step_5"}
