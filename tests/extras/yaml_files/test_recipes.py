"""`hetero init --recipe`: what is copied, and what is refused."""

from __future__ import annotations

import pytest

from hetero_framework.cli import main
from hetero_framework.config import load_config
from hetero_framework.extras.yaml_files import recipes as module
from hetero_framework.extras.yaml_files.recipes import recipe, recipes


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_loads_and_has_no_setting_without_effect(name, here):
    assert main(["init", "--recipe", name]) == 0
    config = load_config(here / "hetero_config.yaml")
    assert config.output_dir == here / "runs" / ("garage" if name == "two-islands" else name)
    assert config.warnings() == ()


def test_model_and_data_replace_the_recipes_and_its_comments_stay(here, capsys):
    (here / "my model").mkdir()
    (here / "rows.jsonl").write_text("{}")
    words = ["--model", "my model", "--data", str(here / "rows.jsonl"), "--output", "sub/g.yaml"]
    assert main(["init", "--recipe", "gguf", *words]) == 0
    assert "next: hetero check --config sub/g.yaml" in capsys.readouterr().out
    text = (here / "sub" / "g.yaml").read_text(encoding="utf-8")
    config = load_config(here / "sub" / "g.yaml")
    assert config.model.name_or_path == str(here / "my model")
    assert config.path(config.data.train) == here / "rows.jsonl"
    assert f'--model "{here / "my model"}"' in text
    assert text.count("#") == recipe("gguf", {}).count("#")


@pytest.mark.parametrize("words", [[], ["none-such"]])
def test_recipes_are_listed(words, here, capsys):
    assert main(["init", "--recipe", *words]) == 2 * len(words)
    said = "".join(capsys.readouterr())
    assert "  dpo             Prefer better answers" in said
    assert all(f"  {name} " in said for name in recipes())
    assert [*here.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dpo", "--adapter", "none", "--worker", "box"], "--worker, --adapter: a recipe takes"),
        (["dpo", "--model", "./absent"], "there is no directory ./absent"),
        (["dpo", "--data", "absent.jsonl"], "there is no file absent.jsonl"),
        (["dpo", "--output", "c.json"], "c.json: a recipe is YAML"),
        (["mixture", "--data", "org/rows"], "mixture has several values of train"),
        (["dpo", "--output", "taken.yaml"], "taken.yaml exists already"),
    ],
)
def test_what_a_recipe_cannot_take_is_refused(words, said, here, capsys):
    (here / "taken.yaml").write_text("precious")
    assert main(["init", "--recipe", *words]) == 2
    assert said in capsys.readouterr().err
    assert [file.read_text() for file in here.iterdir()] == ["precious"]


def test_without_a_checkout_the_recipes_of_the_first_installation_are_found(here, monkeypatch):
    for place, name in ((here / "later", "kto"), (here / "first", "dpo")):
        (info := place / "hetero_framework-1.dist-info").mkdir(parents=True)
        (share := place / "share" / "recipes").mkdir(parents=True)
        (share / f"{name}.yaml").write_text("# A recipe.\n")
        (info / "METADATA").write_text("Name: hetero-framework\n")
        (info / "RECORD").write_text(f"share/recipes/{name}.yaml,,\n")
        monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(module, "_CHECKOUT", here / "absent")
    assert [*recipes()] == ["dpo"]
