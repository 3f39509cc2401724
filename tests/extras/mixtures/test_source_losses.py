"""The loss of each source, in runs of several processes, against transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from hetero_framework.config import Config
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import load_data
from tests.samples import save_texts
from tests.unit.data_helpers import write_jsonl

pytestmark = pytest.mark.xdist_group("pool2")


@pytest.fixture
def section(tmp_path):
    first = save_texts(tmp_path / "first.jsonl", 13)
    texts = save_texts(tmp_path / "all.jsonl", 21).read_text().splitlines()[13:]
    second = write_jsonl(tmp_path / "second.jsonl", [json.loads(line) for line in texts])
    sources = [{"path": str(first), "name": "one"}, {"path": str(second), "name": "two"}]
    return {"train": sources, "max_length": 64, "val_set_size": 4}


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def of_sources(output: Path) -> list[dict[str, float]]:
    found = [{k: v for k, v in line.items() if "loss/" in k} for line in lines(output)]
    return [each for each in found if each]


@pytest.mark.parametrize(
    "packing",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"packing": True},
        pytest.param({"padding_free": True}, marks=pytest.mark.long),
    ],
)
def test_are_those_of_the_model(pool, losses, llama, section, tmp_path, capsys, packing):
    section |= packing
    training = {"max_steps": 3, "learning_rate": 1e-4, "eval_on_start": True, "logging_steps": 1}
    ours = losses([], "one", data=section, training=training)
    assert "loss/one" in capsys.readouterr().out
    sums = of_sources(tmp_path / "one")
    assert losses([3], "two", data=section, training=training) == ours
    assert losses([2, 4], "three", data=section, training=training) == ours
    assert of_sources(tmp_path / "two") == of_sources(tmp_path / "three") == sums
    losses([3], "chunked", data=section, training=training | {"loss_chunk_tokens": 11})
    for found, expected in zip(of_sources(tmp_path / "chunked"), sums, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)

    about = {"model": {"name_or_path": str(llama)}, "data": section, "training": training}
    config = Config.from_dict(pool.config(tmp_path / "again", [], **about))
    data = load_data(config, load_tokenizer(config))
    model = AutoModelForCausalLM.from_pretrained(llama)
    total, count = torch.zeros(2), torch.zeros(2)
    for batch in data.step_batches(0):
        marks = batch.pop("sources")[:, 1:].flatten()
        labels = batch.pop("labels")[:, 1:].flatten()
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        values = cross_entropy(logits, labels, reduction="none")
        for source in (0, 1):
            total[source] += values[marks == source].sum()
            count[source] += (labels[marks == source] >= 0).sum()
    first = next(each for each in sums if "loss/one" in each)
    expected = dict(zip(("loss/one", "loss/two"), (total / count).tolist(), strict=True))
    assert first == pytest.approx(expected, rel=1e-5)
    step = next(
        line for line in lines(tmp_path / "one") if line.get("step") == 1 and "loss" in line
    )
    assert step["loss"] == pytest.approx(float(total.sum() / count.sum()), rel=1e-5)
    evaluated = next(each for each in sums if "eval_loss/one" in each or "eval_loss/two" in each)
    assert evaluated.keys() <= {"eval_loss/one", "eval_loss/two"}


def test_a_run_is_the_same_with_sources_as_with_a_list_of_files(losses, section, tmp_path):
    del section["val_set_size"]
    listed = {**section, "train": [source["path"] for source in section["train"]]}
    training = {"max_steps": 3}
    assert losses([3], "a", data=section, training=training) == losses(
        [3], "b", data=listed, training=training
    )
    assert not of_sources(tmp_path / "b")
