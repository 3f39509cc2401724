"""Data and tokenizers as Python objects: the run is that of the same files."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import hetero_framework
from hetero_framework.config import PLAN_FILE
from hetero_framework.core.addresses import primary_address
from hetero_framework.data.sources import find_sources
from hetero_framework.data.splits import SplitReader
from hetero_framework.errors import ConfigError, DataError, UserError
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.python_data import with_objects
from tests.installed import needs
from tests.unit.data_helpers import write_jsonl

RECORDS = [{"text": f"a model of {number} words and " * (1 + number % 4)} for number in range(9)]


def records() -> Iterator[dict[str, Any]]:
    yield from RECORDS


@pytest.mark.parametrize("form", ["dataset", "list", "iterable"])
def test_objects_train_as_their_file_does(form, alone, tmp_path):
    file = write_jsonl(tmp_path / "records.jsonl", RECORDS)
    data = {"train": str(file), "eval": str(file)}
    training = {"eval_strategy": "epoch"}
    of_file = train(alone("file", training=training, data=data))
    rows = {"dataset": datasets.Dataset.from_list(RECORDS), "list": RECORDS, "iterable": records()}
    config = alone("objects", training=training, data=None)
    summary = train(config, train_dataset=rows[form], eval_dataset=RECORDS)
    assert summary.losses == of_file.losses
    assert summary.metrics["eval_loss"] == of_file.metrics["eval_loss"]
    one, other = (run.files["model"] / "model.safetensors" for run in (summary, of_file))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    "data",
    [
        {"max_length": 16},
        {"train": "away.jsonl", "train_split": "train_sft[:2]", "val_set_size": 0.5},
        {"train": [{"path": "a"}, {"path": "b"}], "mixing": "interleave", "max_length": 16},
        {"train": "org/name", "eval": {"a": "b"}, "eval_split": "test_sft", "dataset_config": "c"},
    ],
)
def test_objects_stand_for_all_that_names_their_files(data, alone):
    """Settings of `data` that go with other files do not apply to them; the rest does."""
    config = alone(data=data, training={"eval_strategy": "epoch"})
    config = with_objects(config, {"train_dataset": RECORDS, "eval_dataset": RECORDS})
    assert config.data.max_length == data.get("max_length", 1024)
    reader = SplitReader(config.data.train_split, ("train",), config.data.dataset_config)
    rows = reader.read(find_sources(config.data.paths, config.base_dir), print)
    assert len([*rows]) == len(RECORDS)
    assert [*config.data.eval_sets] == [""]
    assert config.data.eval_split == "test"


def test_what_no_argument_gives_is_asked_for(alone):
    with pytest.raises(ConfigError, match=r"data\.train: is missing"):
        train(alone(data={"max_length": 16}), eval_dataset=RECORDS)
    with pytest.raises(ConfigError, match="eval_strategy: needs evaluation data"):
        train(alone(training={"eval_strategy": "epoch"}), train_dataset=RECORDS)
    from_config = {"from_config": {"model_type": "llama"}}
    with pytest.raises(ConfigError, match=r"model\.tokenizer: is needed"):
        train(alone(model=from_config), train_dataset=RECORDS)


@needs("planner")
def test_an_open_plan_is_made(alone, tmp_path):
    assert train(alone(shard_plan="auto", training={"max_steps": 1})).steps == 1
    assert json.loads((tmp_path / "run" / PLAN_FILE).read_text())["shard_plan"]


def test_a_workers_machine_is_told_its_command(alone, tmp_path):
    config = alone(
        coordinator={"ip": "192.0.2.7"},
        workers=[{"id": 1, "ip": primary_address(), "port": 29511}],
        shard_plan=[{"id": "local", "start": 0, "end": 0}, {"id": 1, "start": 0, "end": 1}],
    )
    with pytest.raises(UserError, match=r"worker 1; train .*\n.*hetero worker"):
        train(config, train_dataset=RECORDS)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_is_taken(alone):
    config = alone()
    tokenizer = AutoTokenizer.from_pretrained(config.model.name_or_path)
    tokenizer.add_eos_token = False
    tokenizer.pad_token = tokenizer.eos_token
    summary = train(config, processing_class=tokenizer)
    assert AutoTokenizer.from_pretrained(summary.files["model"]).pad_token == tokenizer.eos_token


@pytest.mark.parametrize(
    "rows",
    [
        *({"text": ["a"]}, 5, ["a text"], "rows.jsonl", Path("rows.jsonl")),
        datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)}),
        datasets.Dataset.from_list(RECORDS).to_pandas(),
    ],
)
def test_what_holds_no_records_is_refused(rows, alone):
    with pytest.raises(DataError, match=r"train_dataset: this .* holds no records") as refused:
        train(alone(), train_dataset=rows)
    assert 'data={"train": ...}' in refused.value.hint


@needs("reporting")
def test_the_summary_says_what_was_made_and_loads_it(alone, tmp_path):
    best = {"eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    config = alone(training={**best, "save_strategy": "steps"}, data=None)
    summary = train(config, train_dataset=RECORDS, eval_dataset=RECORDS)
    assert summary.output_dir == tmp_path / "run"
    assert summary.best_checkpoint.parent == tmp_path / "run" / "checkpoints"
    assert {"loss", "eval_loss", "learning_rate"} <= summary.metrics.keys()
    assert isinstance(summary.load(), LlamaForCausalLM)


def test_the_summary_loads_an_adapter(alone):
    model = train(alone(adapter={"r": 2, "target_modules": ["q_proj"]})).load(dtype=torch.float32)
    assert isinstance(model, peft.PeftModel)
    assert model.peft_config["default"].r == 2


EXAMPLES = Path(__file__).parents[3] / "examples"


@needs("reporting")
def test_the_script_runs(alone, tmp_path, monkeypatch, capsys):
    config = alone(data=None, training={"eval_strategy": "epoch"})
    (tmp_path / "hetero_config.json").write_text(json.dumps(config.to_dict()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["from_python.py", "hetero_config.json"])
    runpy.run_path(str(EXAMPLES / "from_python.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "LlamaForCausalLM is loaded" in said
    assert "'train_loss'" in said


@pytest.mark.parametrize(
    "given",
    [{"train_dataset": []}, {"eval_dataset": {"a": []}}, {"processing_class": "org/name"}],
)
def test_objects_without_content_are_refused_by_their_name(given, alone):
    with pytest.raises(DataError, match=f"^{next(iter(given))}"):
        with_objects(alone("run"), given)


def test_a_file_is_no_configuration():
    with pytest.raises(UserError, match="config is a str"):
        hetero_framework.train("run.json")
