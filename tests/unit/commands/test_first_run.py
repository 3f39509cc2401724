"""`hetero train --model`: the configuration that it makes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hetero_framework.cli import main
from hetero_framework.commands import first_run
from hetero_framework.commands.first_run import FirstRun
from hetero_framework.commands.init import Answers
from hetero_framework.config import load_config
from hetero_framework.core import devices
from hetero_framework.errors import UserError
from tests.installed import needs
from tests.samples import save_llama, save_texts


@pytest.fixture
def answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "llama")
    save_texts(tmp_path / "train.jsonl", 4)
    return Answers(model="llama", data="train.jsonl")


@pytest.fixture
def cards(monkeypatch):
    """cards("cuda:0", "cuda:1") are this machine's."""

    def have(*names):
        found = [SimpleNamespace(name=name, kind=name.partition(":")[0]) for name in names]
        monkeypatch.setattr(devices, "list_devices", lambda: [*found, SimpleNamespace(kind="cpu")])

    return have


@pytest.mark.parametrize("names", [["cuda:0"], ["rocm:0", "rocm:1"], [f"cuda:{k}" for k in "0123"]])
def test_each_card_has_a_process(names, answers, cards):
    cards(*names)
    config = load_config(FirstRun(answers).written())
    assert [config.coordinator.device, *(worker.device for worker in config.workers)] == names
    assert all(worker.dials for worker in config.workers)
    assert not config.is_planned


def test_without_a_card_the_cpu_trains(answers, cards):
    cards()
    assert FirstRun(answers).config().coordinator.device == "cpu"


def test_a_port_that_is_taken_is_passed_over(answers, monkeypatch):
    monkeypatch.setattr(first_run.addresses, "port_is_free", lambda _, port: port == 10_003)
    assert FirstRun(answers).config().coordinator.port == 10_003


def test_the_file_is_in_the_output_directory_with_paths_that_hold_there(answers, tmp_path):
    file = FirstRun(answers, settings=["training.max_steps=3"]).written()
    assert file == tmp_path / "runs" / "llama" / "hetero_config.json"
    config = load_config(file)
    assert config.output_dir == file.parent
    assert config.training.max_steps == 3
    assert "num_train_epochs" not in json.loads(file.read_text())["training"]
    assert config.path(config.model.name_or_path) == tmp_path / "llama"
    assert config.path(config.data.train) == tmp_path / "train.jsonl"


def test_paths_of_settings_start_where_the_command_is_called(answers, tmp_path):
    save_texts(tmp_path / "dev.jsonl", 2)
    settings = ["data.eval=dev.jsonl", "training.output_dir=out", "data.max_length=32"]
    file = FirstRun(answers, settings=settings).written()
    assert file == tmp_path / "out" / "hetero_config.json"
    config = load_config(file)
    assert config.output_dir == file.parent
    assert config.path(config.data.eval) == tmp_path / "dev.jsonl"
    assert config.data.max_length == 32


def test_the_same_options_use_the_file_again_and_others_are_refused(answers, cards):
    cards("cuda:0", "cuda:1")
    file = FirstRun(answers).written()
    kept = json.loads(file.read_text())
    kept["coordinator"]["port"] += 7  # another one was free
    file.write_text(json.dumps(kept))
    assert FirstRun(answers).written() == file
    assert json.loads(file.read_text()) == kept
    other = FirstRun(answers, settings=["training.learning_rate=1e-3"])
    with pytest.raises(UserError, match="says something else") as raised:
        other.written()
    assert "--fresh" in raised.value.hint
    other.written(fresh=True)
    assert json.loads(file.read_text())["training"]["learning_rate"] == 1e-3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "./nothing", "--data", "train.jsonl"], "there is no directory ./nothing"),
        (["--model", "org/typo", "--data", "train.jsonl", "--output-dir", "runs"], "org/typo"),
        (["--model", "llama", "--data", "./nothing.jsonl"], "there is no file ./nothing.jsonl"),
        pytest.param(
            ["--model", "llama", "--data", "train.jsonl", "--objective", "dop"],
            'did you mean "dpo"',
            marks=needs("preferences"),
        ),
        pytest.param(
            ["--model", "llama", "--data", "train.jsonl", "--objective", "dpo"],
            "is not for data",
            marks=needs("preferences"),
        ),
        (["--model", "llama", "--data", "train.jsonl", "--set", "training.max_stepz=3"], "unknown"),
        (["--model", "llama", "--config", "other.json"], "leave out --config"),
        (["--data", "train.jsonl", "--adapter", "none"], "--data and --adapter go with --model"),
        (["--data", "train.jsonl"], "--data goes with --model"),
        (["--model", "llama"], "--model needs training data"),
    ],
)
def test_options_that_cannot_be_are_refused_and_write_nothing(
    words, said, answers, tmp_path, capsys
):
    assert main(["train", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
