"""Reads a file of axolotl, LLaMA-Factory or TRL, or a command line of TRL, as keys and values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_framework.config.strict_json import parse_object
from hetero_framework.errors import ConfigError, UserError, in_words
from hetero_framework.extras.convert.convert import program_of

# Keys that only hold the fields of a class.
_CLASSES = re.compile(
    "(sft|peft|lora|model)_config|(training_|model_|script_)?args|model_init_kwargs"
    "|(SFT|Lora|Model)Config|ScriptArguments|(?P<method>DPO|ORPO|CPO|KTO|Reward)Config"
)
_FILES = (".yaml", ".yml", ".json")
_OF_A_SHELL = re.compile(r".*[$`].*|;.*|[|&]+|\d?>.*|<", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """The keys in a file, and the program that the file is of."""

    keys: dict[str, Any]
    program: str


def read_recipe(file: Path) -> Recipe:
    """Read a YAML or JSON file, or a text with a command line of TRL. Raises UserError."""
    text = _text(file)
    if file.suffix in (".py", ".ipynb"):
        raise UserError(
            f"{file} is a program in Python, which is neither run nor read",
            hint="have it write what it gives to its trainer, as in"
            ' json.dump({"SFTConfig": args.to_dict(), "LoraConfig": peft_config.to_dict()}, file,'
            " default=list), and convert that file with --model and --data",
        )
    if file.suffix in _FILES:
        keys = _keys(text, file)
        return Recipe(keys, program_of(keys, str(file)))
    return Recipe(_of_command(text, file), "TRL")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {in_words(error)}") from error


def _keys(text: str, file: Path) -> dict[str, Any]:
    try:
        keys = parse_object(text.encode(), name=str(file), foreign=True)
    except ConfigError as error:
        raise UserError(error.message) from None
    return _flat({str(key): part for key, part in keys.items()}, file)


def _flat(keys: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The keys, with the fields taken out of a class's key, as in {"SFTConfig": {...}}."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        inside = _CLASSES.fullmatch(key) if isinstance(value, dict) else None
        if inside and inside["method"]:
            found["trl"] = inside["method"].lower()
        for name, part in _flat(value, file).items() if inside else [(key, value)]:
            if found.setdefault(name, part) != part:
                raise UserError(f"{file}: {name} is given twice, with two values; keep one")
    return found


def _of_command(text: str, file: Path) -> dict[str, Any]:
    """The options of `trl METHOD`, which override the keys in the file of --config."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"{file}: a quotation in the command line has no end") from error
    if words[:1] != ["trl"] or len(words) < 2 or any(map(_OF_A_SHELL.fullmatch, words)):
        raise UserError(
            f"{file} is neither YAML nor JSON, nor one command line of TRL",
            hint="a shell script is not read; write its command alone, with the values in place of"
            " variables: trl sft --model_name_or_path ...",
        )
    options = _options(words[2:], file)
    keys: dict[str, Any] = {} if words[1] == "sft" else {"trl": words[1]}
    if (name := options.pop("config", None)) is not None:
        path = Path(str(name)) if Path(str(name)).exists() else file.parent / str(name)
        keys |= _keys(_text(path), path)
    return keys | options


def _options(words: Sequence[str], file: Path) -> dict[str, Any]:
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
        else:
            raise UserError(f"{file}: {word} stands where an option of TRL is expected")
    made: dict[str, Any] = {}
    for name, values in found.items():
        if name.startswith("no_") and not values:
            made[name.removeprefix("no_")] = "false"
        else:
            made[name] = values[0] if len(values) == 1 else values or "true"
    return made
