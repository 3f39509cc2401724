"""Configuration objects of peft, transformers and TRL as settings of this project."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from peft import LoraConfig
from transformers import TrainingArguments

from hetero_framework.errors import ConfigError
from hetero_framework.extras.convert import convert

_REFUSED = (convert.NEVER, convert.BY_HAND, convert.UNKNOWN)
_OF_NO_VERSION = "no field of a version of peft, transformers or TRL that is known here"
# Fields of an adapter's configuration that say what it is, not how it trains.
_OF_PEFT = ("peft_type", "task_type", "base_model_name_or_path", "inference_mode", "peft_version")


def sections_of(adapter: Any, training: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """The sections model, adapter, data and training that a LoraConfig and a SFTConfig, DPOConfig
    or the like ask for; either may be None. `known` are settings beside them, by path. Raises
    ConfigError that names each field that cannot be had."""
    given: dict[str, Any] = {"use_peft": adapter is not None}
    changed: set[str] = set()
    if training is not None:
        if not isinstance(training, TrainingArguments):
            raise _refusal("training", training, "TrainingArguments, SFTConfig, DPOConfig, ...")
        libraries = ("trl.", "transformers.")  # not those of a class that the user has made of one
        classes = (c for c in type(training).__mro__ if c.__module__.startswith(libraries))
        method = next(classes).__name__.removesuffix("Config").lower()
        given |= {} if method.endswith("arguments") else {"trl": method}
        given |= _fields(training, changed)
        given.pop("use_cpu")  # `train` opens no other device then
    if adapter is not None:
        if not isinstance(adapter, LoraConfig) or adapter.peft_type != "LORA":
            raise _refusal("adapter", adapter, "peft's LoraConfig")
        fields = _fields(adapter, changed).items()
        given |= {name: value for name, value in fields if name not in _OF_PEFT}
    conversion = convert.Conversion("TRL", given, settings=dict(known))
    asked = [row for row in conversion.rows if row.key in changed & given.keys()]
    # A value that nobody chose is written only where the default here is another one.
    chosen = {path for row in asked for path in row.to} | known.keys()
    for path, value in [*conversion.settings.items()]:
        if path not in chosen and value == convert.own_default(path):
            del conversion.settings[path]
    if wrong := [row for row in asked if row.status in _REFUSED]:
        raise ConfigError(
            "\n".join(
                f"{row.key}: {row.value!r}: "
                + (_OF_NO_VERSION if row.status == convert.UNKNOWN else row.why)
                for row in wrong
            ),
            hint="leave these out of the config objects",
        )
    return conversion.sections(str)


def _refusal(name: str, given: Any, wanted: str) -> ConfigError:
    return ConfigError(
        f"{name}: an object of the class {type(given).__name__} is not taken",
        hint=f"give {wanted}, or a dictionary of the section {name}",
    )


def _fields(config: Any, changed: set[str]) -> dict[str, Any]:
    """All fields and public attributes. Adds to `changed` the names of those that a new object of
    the class lacks, or has with another value."""
    fields = {field.name: field for field in dataclasses.fields(config) if field.init}
    # A new object checks these against this machine, as the given one did.
    kept = {name: getattr(config, name) for name in ("use_cpu", "bf16", "fp16") if name in fields}
    usual = type(config)(**kept)
    known = vars(usual)
    strange = {name for name in vars(config).keys() - known.keys() if name[0] != "_"}
    found = {name: getattr(config, name) for name in (*fields, *strange)}
    before = {**known, **{name: fields[name].default for name in kept}}
    changed |= {name for name, v in found.items() if name in strange or v != before.get(name)}
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set) else value
