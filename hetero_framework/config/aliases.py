"""Settings under the names of other tools: the name here, or the reason why there is none.

alias_settings.json maps names of other tools to ours ("called", and for the entries of machines
"called_of_machines") and gives reasons for those without one ("reasons"; the names are a regular
expression). alias_names.json lists the fields of TrainingArguments, LoraConfig and SFTConfig that
are no settings here; `python docs/generate.py` adds those of the installed versions.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

OWNERS = {"training": "TrainingArguments", "adapter": "LoraConfig", "data": "SFTConfig"}
FILE = Path(__file__).with_name("alias_names.json")
_SETTINGS = Path(__file__).with_name("alias_settings.json")

# Switches that have another name here and are off by default.
_SWITCH = re.compile(
    "load_in_[48]bit|.*flash_attention.*|resume.*|.*dora|.*rslora|lora_target_linear|compile"
    "|.*checkpointing|group_by_length"
)
_OTHERWISE = {"adapter": "only LoRA, rsLoRA and DoRA are cut exactly"}


def is_harmless(section: str, key: str, value: Any) -> bool:
    """Whether a setting of another tool has the value that means what happens here anyway: the
    other's default, nothing, or one that is listed."""
    name, refusal = own_name(section, key), refusal_of(section, key)
    if value is None or value in ("", [], {}):
        return name is not None or refusal is not None
    meant = settings()["false_is_meant"][""].split()
    if value is False and key not in meant:
        return refusal is not None or (name is not None and bool(_SWITCH.fullmatch(key)))
    if refusal is None or name is not None:
        return False
    defaults = [names[key] for names in _listed().values() if names.get(key) is not None]
    others = [json.loads(v) for v, k in settings()["harmless"].items() if key in k.split()]
    return any(type(value) is type(other) and value == other for other in defaults + others)


def meant(path: str, value: Any) -> str | None:
    """Our value for one that other tools have for the setting at `path`."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    for where, values in settings()["values"].items():
        if re.fullmatch(where, path):
            matching = (advice for form, advice in values.items() if _fits(form, text))
            return next(matching, None)
    return None


def _fits(form: str, text: str) -> bool:
    return re.fullmatch(form, text, re.IGNORECASE | re.DOTALL) is not None


def own_name(section: str, key: str) -> str | None:
    """Our name for `key` of a section of the file ("" for the top level); None: unknown."""
    is_machine = section in ("coordinator", "workers", "shard_plan")
    for here, others in settings()["called_of_machines" if is_machine else "called"].items():
        if key in others.split() or f"{section}.{key}" in others.split():
            place, _, name = here.partition(".")
            short = name if place == section and name.isidentifier() else here
            return f'"{short}"' if short.isidentifier() else short
    return None


def refusal_of(section: str, key: str) -> str | None:
    """Why there is no setting `key`; None where no other tool has one either."""
    fields = unsupported()
    for owner in (section, *fields):
        if key in fields.get(owner, {}):
            reason = fields[owner][key]
            because = f" because {reason}" if reason else ""
            return f"{OWNERS[owner]}.{key} is not supported here{because}"
    reason = _reason(key)
    return f"there is no such setting: {reason}" if reason else None


@cache
def _listed() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return tables


@cache
def settings() -> dict[str, dict[str, Any]]:
    """The tables of alias_settings.json."""
    tables: dict[str, dict[str, Any]] = json.loads(_SETTINGS.read_text(encoding="utf-8"))
    return tables


@cache
def unsupported() -> dict[str, dict[str, str]]:
    """Section of the file -> field of another tool's class -> why there is none here, or ""."""
    return {
        section: {
            name: _reason(name) or _OTHERWISE.get(section, "")
            for name in names
            if own_name(section, name) is None
        }
        for section, names in _listed().items()
    }


def _reason(key: str) -> str:
    return next(
        (why for why, names in settings()["reasons"].items() if re.fullmatch(names, key)), ""
    )
