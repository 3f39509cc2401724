"""A run's directories: probed, locked, and never those of another run."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoConfig

from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.models.files.card import code, is_hub_name
from hetero_framework.models.files.export import OutputDirectory
from hetero_framework.models.files.source import ModelSource
from hetero_framework.trainer import outputs
from hetero_framework.trainer.checkpoint import CheckpointStore
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.outputs import RunDirectories, run_card
from tests.unit.data_helpers import write_jsonl

LORA = {"r": 4, "target_modules": "all-linear"}


@contextmanager
def entered(config: Config) -> Iterator[RunDirectories]:
    with RunDirectories(config, CheckpointStore(config.checkpoints)) as directories:
        yield directories


def save(config: Config, step: int) -> None:
    with CheckpointStore(config.checkpoints).begin(step) as writer:
        writer.add(0, 0, {"weights/a": torch.zeros(2)})
        writer.commit({})


def placed(setting: str, place: Path) -> dict[str, Any]:
    """The sections in which this setting of a directory is `place`."""
    if setting == "checkpoint_dir":
        return {"checkpoint_dir": str(place)}
    return {"training": {setting: str(place), "report_to": "tensorboard"}}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def test_a_fresh_start_moves_its_own_earlier_results(alone, logged):
    config = alone()
    with entered(config) as first:
        first.set_aside()
        save(config, 2)
        (config.output_dir / "metrics.jsonl").write_text("{}\n")
        assert logged == []
    with entered(config) as second:
        assert second.run_id == first.run_id
        second.set_aside()
    assert names(config.output_dir / "previous-1") == ["checkpoints", "metrics.jsonl"]
    assert names(config.output_dir / "previous-1" / "checkpoints") == ["step_2"]
    assert names(config.checkpoints) == []
    assert len(logged) == 1


def test_checkpoints_of_another_run_are_refused_and_untouched(alone, tmp_path):
    shared = str(tmp_path / "shared")
    one, two = alone("one", checkpoint_dir=shared), alone("two", checkpoint_dir=shared)
    with entered(one) as directories:
        directories.set_aside()
        save(one, 2)
        (tmp_path / "shared" / "step_4.tmp").mkdir()
    before = names(tmp_path / "shared")
    refused = pytest.raises(ConfigError, match=r"holds checkpoints of .*one")
    with entered(two) as directories, refused:
        directories.set_aside()
    assert names(tmp_path / "shared") == before
    with entered(one) as directories:  # the owner may
        directories.set_aside()
    assert names(one.output_dir / "previous-1" / "checkpoints") == ["step_2", "step_4.tmp"]


def test_checkpoints_elsewhere_without_a_run_id_are_refused(alone, tmp_path):
    config = alone(checkpoint_dir=str(tmp_path / "elsewhere"))
    save(config, 2)
    with entered(config) as directories, pytest.raises(ConfigError, match="of another run"):
        directories.check_fresh()


def test_a_resumed_run_takes_the_checkpoints_over(alone, tmp_path):
    config = alone(checkpoint_dir=str(tmp_path / "elsewhere"))
    save(config, 2)
    save(config, 4)
    with entered(config) as directories:
        directories.own_checkpoints()
        directories.set_later_aside(2)
    with entered(config) as directories:
        directories.check_fresh()
    assert names(config.output_dir / "previous-1") == ["step_4"]


@pytest.mark.parametrize("where", ["output_dir", "inside", "elsewhere"])
def test_only_own_tensorboard_events_are_moved(alone, tmp_path, where):
    config = alone()
    places = {"inside": config.output_dir / "tb", "elsewhere": tmp_path / "elsewhere"}
    logging_dir = places.get(where, config.output_dir)
    config = alone(training={"logging_dir": str(logging_dir), "report_to": "tensorboard"})
    with entered(config) as directories:
        directories.set_aside()
        own = f"events.out.tfevents.1.host.1.0.{directories.run_id}"
        for name in (own, "events.out.tfevents.1.host.1.0.0ther", "notes.txt"):
            (logging_dir / name).parent.mkdir(exist_ok=True)
            (logging_dir / name).write_text("x")
        directories.set_aside()
    moved = {own} if where == "elsewhere" else {own, "events.out.tfevents.1.host.1.0.0ther"}
    assert set(names(config.output_dir / "previous-1" / "tensorboard")) == moved
    assert "notes.txt" in names(logging_dir)


@pytest.mark.parametrize("setting", ["output_dir", "checkpoint_dir", "logging_dir"])
def test_a_directory_in_use_is_refused_by_its_setting(alone, tmp_path, setting):
    sections = placed(setting, tmp_path / "shared")
    one, two = alone("one", **sections), alone("two", **sections)
    said = rf"{setting}: process {os.getpid()} on .* is writing"
    with entered(one), pytest.raises(ConfigError, match=said), entered(two):
        pass
    with entered(two):
        pass


@pytest.mark.parametrize("said", ['{"process": 1e400, "host": "h"}', "[" * 60_000, "[]", "pipe"])
def test_a_holder_that_says_nothing_is_another_run(alone, said):
    config = alone("one")
    with entered(config):
        file = config.output_dir / outputs.HOLDER_FILE
        if said == "pipe":
            file.unlink()
            os.mkfifo(file)
        else:
            file.write_text(said)
        with pytest.raises(ConfigError, match="another run is writing"), entered(config):
            pass


def test_a_run_whose_folder_is_deleted_is_locked_and_goes_on_in_a_new_one(alone, logged):
    config = alone("one")
    with entered(config) as directories:
        directories.mark_unfinished()
        shutil.rmtree(config.output_dir)
        directories.keep()
        with pytest.raises(ConfigError, match="is writing into"), entered(config):
            pass
        shutil.rmtree(config.output_dir)
    assert directories.is_unfinished
    assert "was moved or deleted" in logged[0]
    with entered(config) as directories:
        directories.mark_unfinished()
        directories.mark_finished()
        shutil.rmtree(config.output_dir)
    assert not directories.is_unfinished


@pytest.mark.parametrize("setting", ["checkpoint_dir", "logging_dir"])
def test_a_directory_inside_a_running_output_dir_is_in_use(alone, tmp_path, setting):
    """The other run has no checkpoint there yet: nothing but its lock says whose it is."""
    two = alone("two", **placed(setting, tmp_path / "one" / "checkpoints"))
    said = rf"{setting}: process {os.getpid()} on .* into .*one"
    with entered(alone("one")), pytest.raises(ConfigError, match=said), entered(two):
        pass
    with entered(two):
        pass


@pytest.mark.parametrize("setting", ["output_dir", "checkpoint_dir", "logging_dir"])
def test_a_directory_that_is_a_file_is_refused_by_its_setting(alone, tmp_path, setting):
    (tmp_path / "file").write_text("x")
    refused = pytest.raises(ConfigError, match=rf"{setting}: cannot write into .*it is a file")
    with refused, entered(alone(**placed(setting, tmp_path / "file"))):
        pass


@pytest.mark.parametrize("operation", ["mkdtemp", "replace", "unlink"])
def test_a_directory_is_probed_with_a_runs_own_operations(alone, tmp_path, monkeypatch, operation):
    module = outputs.tempfile if operation == "mkdtemp" else os
    real = getattr(module, operation)

    def refuse(*args: object, **kwargs: object) -> object:
        if "elsewhere" in f"{args}{kwargs}":
            raise OSError(30, "Read-only file system")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, operation, refuse)
    refused = pytest.raises(ConfigError, match=r"checkpoint_dir: cannot write .*Read-only file")
    with refused, entered(alone(checkpoint_dir=str(tmp_path / "elsewhere"))):
        pass


def test_a_run_without_tensorboard_leaves_logging_dir_alone(alone, tmp_path):
    with entered(alone(training={"logging_dir": str(tmp_path / "logs")})):
        assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("setting", ["output_dir", "result", "checkpoint_dir", "logging_dir"])
def test_the_base_model_is_no_place_to_write_into(alone, tmp_path, setting):
    base = tmp_path / "run" / "model" if setting == "result" else tmp_path / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    place = base / ".." / "base" if setting == "output_dir" else base
    sections = {} if setting == "result" else placed(setting, place)
    config = alone(model={"name_or_path": str(base)}, **sections)
    refused = pytest.raises(ConfigError, match=r"directory of its base model.*\n.*--output-dir")
    with refused, entered(config):
        pass
    assert names(base) == ["config.json"]


# ---- the card of a result, which names no machine and no place on a disk


def card_of(config: Config, step: int | None = None) -> ModelCard:
    return ModelCard(text_of_card(config, step))


def text_of_card(config: Config, step: int | None = None) -> str:
    source = ModelSource.of(config)
    source.config = AutoConfig.for_model("llama")
    return run_card(config, source, step)


def measured(config: Config, *lines: dict[str, Any]) -> None:
    config.output_dir.mkdir(parents=True, exist_ok=True)
    write_jsonl(config.output_dir / "metrics.jsonl", [*lines])


@pytest.mark.parametrize("adapter", [None, LORA], ids=["model", "adapter"])
def test_a_runs_result_has_a_card(alone, tmp_path, adapter):
    config = alone(adapter=adapter)
    train(config)
    card = ModelCard.load(config.result_dir / "README.md")
    assert card.data.library_name == ("peft" if adapter else "transformers")
    assert card.data.base_model is None  # a directory of this machine
    assert card.data.pipeline_tag == "text-generation"
    assert "hetero_framework" in card.data.tags
    assert ("lora" in card.data.tags) == (adapter is not None)
    assert ("PeftModel.from_pretrained(model," in card.text) == (adapter is not None)
    assert "LlamaForCausalLM.from_pretrained(" in card.text
    assert "- training.learning_rate: `0.01`" in card.text
    assert "- stage 0: embedding + layer 0 + head" in card.text
    last = json.loads((config.output_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"- loss {last['loss']:.4g} (step 4)" in card.text
    of_disk = (str(tmp_path), "texts.jsonl", str(config.model.name_or_path))
    for private in (*of_disk, platform.node(), "127.0.0.1"):
        assert private not in str(card)
    assert (
        "README.md" in json.loads((config.result_dir / "hetero_export.json").read_text())["files"]
    )


@pytest.fixture
def of_hub(alone, monkeypatch, tmp_path):
    """A run of a model and data sets of the hub, of which this machine has the model's card."""
    (card := tmp_path / "card.md").write_text("---\nlicense: other\nlicense_name: llama3\n---\n")
    monkeypatch.setattr(
        "hetero_framework.models.files.card.try_to_load_from_cache", lambda *a, **k: str(card)
    )
    data = {"train": ["org/chats", str(tmp_path / "texts.jsonl")], "eval": "org/tests"}
    return alone(model={"name_or_path": "org/base"}, data=data, adapter=LORA)


def test_what_is_the_hubs_is_named_in_the_metadata(of_hub):
    measured(
        of_hub,
        {"step": 2, "loss": 2.0, "eval_loss": None},
        {"step": 2, "eval_loss": 1.5},
        {"step": 4, "loss": None},
        {"step": 4, "eval_loss": 1.25},
    )
    data = card_of(of_hub).data.to_dict()
    assert data["base_model"] == "org/base"
    assert data["datasets"] == ["org/chats", "org/tests"]
    assert (data["license"], data["license_name"]) == ("other", "llama3")
    assert "base_model:adapter:org/base" in data["tags"]
    (index,) = data["model-index"]
    (result,) = index["results"]
    assert result["dataset"] == {"name": "org/tests", "type": "org/tests"}
    assert result["metrics"] == [{"type": "loss", "value": 1.25}]
    assert card_of(of_hub, 3).data.eval_results[0].metric_value == 1.5
    text = card_of(of_hub, 3).text
    assert 'LlamaForCausalLM.from_pretrained("org/base")' in text
    assert "- loss 2 (step 2)" in text
    assert "nan" not in card_of(of_hub).text


def test_a_damaged_card_of_the_base_and_lost_metrics_leave_their_lines_out(of_hub, tmp_path):
    for broken in ("---\nlicense: [\n---\n", "---\n- 1\n---\n", "", "\xff"):
        (tmp_path / "card.md").write_text(broken, encoding="latin-1")
        card = card_of(of_hub)
        assert card.data.license is None
        assert "not kept with this result" in card.text
        assert card.data.eval_results is None


def test_settings_with_quotes_and_brackets_are_no_markup(of_hub):
    config = of_hub.with_changes(adapter={"target_modules": '.*["|]\\w+{x}'})
    text = text_of_card(config)
    assert r'adapter.target_modules: `".*[\"|]\\w+{x}"`' in text
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "peft"


def test_a_card_of_somebody_else_stays_and_an_own_one_is_replaced(tmp_path):
    def write(text: str, target: str) -> str:
        output = OutputDirectory(tmp_path / target, overwrite=True)
        with output.writing() as folder:
            (folder / "weights").write_text("w")
            output.put_card(text)
        return (tmp_path / target / "README.md").read_text()

    assert write("one", "ours") == "one"
    assert write("two", "ours") == "two"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "README.md").write_text("mine")
    assert write("one", "theirs") == "mine"
    assert write("two", "theirs") == "mine"
    files = json.loads((tmp_path / "theirs" / "hetero_export.json").read_text())["files"]
    assert files == ["weights"]


@pytest.mark.parametrize(
    ("text", "shown"), [("a", "`a`"), ("a`b", "`` a`b ``"), ("``` <img>", "```` ``` <img> ````")]
)
def test_code_holds_any_text(text, shown):
    assert code(text) == shown
    assert is_hub_name("org/model-1.b")
    assert not any(map(is_hub_name, ('m", x="', "a](b)", "<img src=x>", "")))
