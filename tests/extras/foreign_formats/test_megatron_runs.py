"""Training from Megatron's files equals a torch loop under every cut, and resumes at its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_framework.config import Config
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import load_data
from hetero_framework.errors import CheckpointError
from hetero_framework.trainer.coordinator import train
from tests.extras.foreign_formats.test_megatron import present, write
from tests.integration.oracles import torch_loop
from tests.integration.test_parity import assert_same, weights
from tests.integration.test_resume import SAVING, evals
from tests.pools import Pool, read_metrics

pytestmark = pytest.mark.xdist_group("pool2")


@pytest.fixture
def corpus(tmp_path):
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 40, 30).tolist()
    tokens = draw.integers(3, 320, sum(lengths), np.uint16)
    return write(tmp_path, present(lengths, 8, 2), tokens.tobytes())


def make(
    pool: Pool, llama: Path, corpus: Path, output: str, cuts: list[int], **training: Any
) -> Config:
    sections = {
        "model": {"name_or_path": str(llama)},
        "data": {"train": str(corpus), "eval": str(corpus), "max_length": 12},
        "training": {**SAVING, "max_steps": 9, "save_steps": 3, "eval_steps": 3, **training},
    }
    return Config.from_dict(pool.config(corpus.parent / output, cuts, **sections))


def test_one_stage_and_two_equal_a_torch_loop(pool, llama, corpus):
    one, two = (make(pool, llama, corpus, name, cuts) for name, cuts in (("1", []), ("2", [3])))
    for config in (one, two):
        train(config)
    data = load_data(one, load_tokenizer(one))
    assert data.steps_per_epoch < 9  # more than one epoch
    theirs, trained = torch_loop(llama, [data.step_batches(k) for k in range(9)], max_steps=9)
    assert read_metrics(corpus.parent / "1") == read_metrics(corpus.parent / "2") == theirs
    assert_same(weights(corpus.parent / "2"), trained)
    assert len(evals(corpus.parent / "2")) == 3


@pytest.mark.long
def test_a_resumed_run_goes_on_at_its_place(pool, llama, corpus):
    config = make(pool, llama, corpus, "run", [3])
    train(config)
    whole = read_metrics(corpus.parent / "run")
    train(config, resume=3)
    assert read_metrics(corpus.parent / "run") == whole
    longer = make(pool, llama, corpus, "run", [3], max_steps=40)
    with pytest.raises(CheckpointError, match=r"training.max_steps was 9, now it is 40"):
        train(longer, resume=3)
