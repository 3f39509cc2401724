"""The card of a result is one of the hub's, and names no machine and no place on a disk."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoConfig

from hetero_framework.config import Config
from hetero_framework.models.files.card import code, is_hub_name
from hetero_framework.models.files.export import OutputDirectory
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.run_card import run_card
from tests.alone import Alone

LORA = {"r": 4, "target_modules": "all-linear"}


def card_of(config: Config, step: int | None = None) -> ModelCard:
    return ModelCard(run_card(config, AutoConfig.for_model("llama"), step))


def measured(config: Config, *lines: dict[str, Any]) -> None:
    config.output_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (config.output_dir / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["model", "adapter"])
def test_a_runs_result_has_a_card(alone: Alone, tmp_path: Path, adapter: Any) -> None:
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
    assert config.model is not None
    of_disk = (str(tmp_path), "texts.jsonl", str(config.model.name_or_path))
    for private in (*of_disk, platform.node(), "127.0.0.1"):
        assert private not in str(card)
    assert (
        "README.md" in json.loads((config.result_dir / "hetero_export.json").read_text())["files"]
    )


@pytest.fixture
def of_hub(alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """A run of a model and data sets of the hub, of which this machine has the model's card."""
    (card := tmp_path / "card.md").write_text("---\nlicense: other\nlicense_name: llama3\n---\n")
    monkeypatch.setattr(
        "hetero_framework.models.files.card.try_to_load_from_cache", lambda *a, **k: str(card)
    )
    data = {"train": ["org/chats", str(tmp_path / "texts.jsonl")], "eval": "org/tests"}
    return alone(model={"name_or_path": "org/base"}, data=data, adapter=LORA)


def test_what_is_the_hubs_is_named_in_the_metadata(of_hub: Config) -> None:
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


def test_a_damaged_card_of_the_base_and_lost_metrics_leave_their_lines_out(
    of_hub: Config, tmp_path: Path
) -> None:
    for broken in ("---\nlicense: [\n---\n", "---\n- 1\n---\n", "", "\xff"):
        (tmp_path / "card.md").write_text(broken, encoding="latin-1")
        card = card_of(of_hub)
        assert card.data.license is None
        assert "not kept with this result" in card.text
        assert card.data.eval_results is None


def test_settings_with_quotes_and_brackets_are_no_markup(of_hub: Config) -> None:
    config = of_hub.with_changes(adapter={"target_modules": '.*["|]\\w+{x}'})
    text = run_card(config, AutoConfig.for_model("llama"))
    assert r'adapter.target_modules: `".*[\"|]\\w+{x}"`' in text
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "peft"


def test_a_card_of_somebody_else_stays_and_an_own_one_is_replaced(tmp_path: Path) -> None:
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
def test_code_holds_any_text(text: str, shown: str) -> None:
    assert code(text) == shown
    assert is_hub_name("org/model-1.b")
    assert not any(map(is_hub_name, ('m", x="', "a](b)", "<img src=x>", "")))
