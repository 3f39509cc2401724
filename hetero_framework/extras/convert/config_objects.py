"""Configuration objects of peft, transformers and TRL as settings of this project."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from hetero_framework.errors import ConfigError
from hetero_framework.extras.convert.convert import BY_HAND, NEVER, UNKNOWN, Conversion

_REFUSED = (NEVER, BY_HAND, UNKNOWN)
# Fields of an adapter's configuration that say what it is, not how it trains.
_OF_PEFT = ("peft_type", "task_type", "base_model_name_or_path", "inference_mode", "peft_version")


def sections_of(adapter: Any, training: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """The sections model, adapter, data and training that a LoraConfig and a SFTConfig, DPOConfig
    or the like ask for; either may be None. `known` are settings beside them, by path. Raises
    ConfigError that names each field that cannot be had."""
    given: dict[str, Any] = {"use_peft": adapter is not None}
    if training is not None:
        method = type(training).__name__.removesuffix("Config").lower()
        given |= {} if method.endswith("arguments") else {"trl": method}
        given |= _changed(training)
        given.pop("use_cpu", None)  # `train` opens no other device then
    if adapter is not None:
        given |= {name: v for name, v in _changed(adapter).items() if name not in _OF_PEFT}
    conversion = Conversion("TRL", given, settings=dict(known))
    wrong = [row for row in conversion.rows if row.status in _REFUSED and row.key in given]
    if wrong:
        raise ConfigError(
            "\n".join(f"{row.key}: {row.value!r}: {row.why}" for row in wrong),
            hint="leave these out of the config objects",
        )
    return conversion.sections(str)


def _changed(config: Any) -> dict[str, Any]:
    """The fields whose values are not those of a new object of the class. Raises ConfigError."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ConfigError(
            f"{type(config).__name__} is no configuration of peft, transformers or TRL",
            hint="give a LoraConfig, an SFTConfig, DPOConfig or the like, or a dictionary",
        )
    fields = {field.name: field for field in dataclasses.fields(config) if field.init}
    # A new object checks these against this machine, as the given one did.
    kept = {name: getattr(config, name) for name in ("use_cpu", "bf16", "fp16") if name in fields}
    usual = type(config)(**kept)
    found = {}
    for name, field in fields.items():
        value = getattr(config, name)
        if value != (field.default if name in kept else getattr(usual, name)):
            found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set) else value
