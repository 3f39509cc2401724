"""Recipes: whole configurations with comments, for `hetero init --recipe`."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import distributions
from pathlib import Path

from hetero_framework.commands.init import Answers, beside, checked_data, checked_model
from hetero_framework.commands.options import DEFAULT_CONFIG
from hetero_framework.core.files import refuse_output, write_file
from hetero_framework.errors import UserError

_CHECKOUT = Path(__file__).parents[3] / "examples" / "recipes"
_KEYS = {"model": "name_or_path", "data": "train"}


def write_recipe(arguments: Namespace) -> None:
    """Write the recipe that the options of `hetero init` name, with their model and data. Without
    a name, print the recipes. Raises UserError."""
    if not arguments.recipe:
        return print(_listed())
    others = [f.name for f in fields(Answers) if f.name not in _KEYS]
    if given := [name for name in others if getattr(arguments, name, None)]:
        names = ", ".join(f"--{name.replace('_', '-').removesuffix('s')}" for name in given)
        raise UserError(f"{names}: a recipe takes --model, --data and --output alone")
    output = Path(arguments.output)
    output = Path("hetero_config.yaml") if output == Path(DEFAULT_CONFIG) else output
    if output.suffix not in (".yaml", ".yml"):
        raise UserError(f"{output}: a recipe is YAML, with comments; name the file ....yaml")
    refuse_output(output, overwrite=arguments.overwrite)
    values = {}
    for name, check in (("model", checked_model), ("data", checked_data)):
        if (text := getattr(arguments, name)) is not None:
            values[_KEYS[name]] = str(beside(check(text), output))
    write_file(output, recipe(arguments.recipe, values).encode())
    return print(f"wrote {output}; next: hetero check --config {output}")


def recipe(name: str, values: Mapping[str, str]) -> str:
    """The text of a recipe. Each of `values` replaces the value of its key wherever that stands,
    in comments, too. Raises UserError for an unknown recipe, or one with several such values."""
    if name not in (known := recipes()):
        raise UserError(f"there is no recipe {name!r}; there are:\n{_listed()}")
    text = known[name].read_text(encoding="utf-8")
    for key, value in values.items():
        if (found := re.search(rf"^ +{key}: (\S+)", text, re.MULTILINE)) is None:
            raise UserError(f"the recipe {name} has several values of {key}; edit its file")
        is_plain = re.fullmatch(r"[\w./~+-]+", value)
        text = text.replace(found[1], value if is_plain else json.dumps(value))
    return text


def recipes() -> dict[str, Path]:
    """The files of the recipes by name: of a checkout, else those that were installed."""
    if _CHECKOUT.is_dir():
        found = [*_CHECKOUT.glob("*.yaml")]
    else:
        installed = (d.files for d in distributions(name="hetero-framework") if d.files)
        found = [Path(str(f.locate())) for f in next(installed, []) if f.parent.name == "recipes"]
    return {file.stem: file for file in sorted(found)}


def _listed() -> str:
    """The names of the recipes with the first lines of their comments."""
    heads = {n: f.read_text(encoding="utf-8").partition("\n")[0] for n, f in recipes().items()}
    return "\n".join(f"  {name:<15} {head.removeprefix('# ')}" for name, head in heads.items())
