"""Settings under the names of other tools: the name here, or the reason why there is none.

The description of a field ends with its names elsewhere. alias_settings.json has the setting to use
"instead" of another tool's setting with other values, and the "reasons" why settings, named by a
regular expression, have no place here. alias_names.json lists the fields of TrainingArguments,
LoraConfig and SFTConfig that are no settings here; `python docs/generate.py` adds the fields of the
installed versions.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hetero_framework.config.section import sections_of

Schema = type[BaseModel]
OWNERS = {"training": "TrainingArguments", "adapter": "LoraConfig", "data": "SFTConfig"}
FILE = Path(__file__).with_name("alias_names.json")
_SETTINGS = Path(__file__).with_name("alias_settings.json")
_OF_MACHINES = {"coordinator", "workers", "shard_plan"}

_ELSEWHERE = re.compile(r"Elsewhere:\s+([\w.,\s]+)\.\Z")
# Switches that have another name here and are off by default.
_SWITCH = re.compile(
    "load_in_[48]bit|.*flash_attention.*|resume.*|.*dora|.*rslora|lora_target_linear|compile"
    "|.*checkpointing|.*_offloading|group_by_length"
)
_OTHERWISE = {"adapter": "only LoRA, rsLoRA and DoRA are cut exactly"}


def is_harmless(root: Schema, section: str, key: str, value: Any) -> bool:
    """Whether a setting of another tool has a value that means what happens here anyway: the tool's
    default, nothing, or a listed value."""
    name, refusal = own_name(root, section, key), refusal_of(root, section, key)
    if value is None or value in ("", [], {}):
        return name is not None or refusal is not None
    if value is False and key not in settings()["false_is_meant"][""].split():
        return refusal is not None or (name is not None and bool(_SWITCH.fullmatch(key)))
    if refusal is None or name is not None:
        return False
    defaults = [names[key] for names in _tables(FILE).values() if names.get(key) is not None]
    others = [json.loads(v) for v, k in settings()["harmless"].items() if key in k.split()]
    return any(type(value) is type(other) and value == other for other in defaults + others)


@cache
def called(root: Schema) -> dict[str, frozenset[str]]:
    """For each setting of a schema that has any, its names in other tools."""
    found = {}
    for place, section in {"": root, **sections_of(root)}.items():
        for name, field in section.model_fields.items():
            if names := _ELSEWHERE.search(field.description or ""):
                path = f"{place}.{field.alias or name}".lstrip(".")
                found[path] = frozenset(re.split(r",\s+", names[1]))
    return found


def setting_called(root: Schema, section: str, key: str) -> str | None:
    """The setting that other tools call `key`, in a section of the file ("" for the top level). A
    name with a dot counts in its section alone, and a machine's setting in sections of machines."""
    for path, names in called(root).items():
        place = path.rpartition(".")[0]
        apart = place != section and _OF_MACHINES & {place, section}
        if not apart and names & {key, f"{section}.{key}"}:
            return path
    return None


def own_name(root: Schema, section: str, key: str) -> str | None:
    """Our name for `key` of a section of the file, in words; None: unknown."""
    others = {} if section in _OF_MACHINES else settings()["instead"]
    instead = (here for here, names in others.items() if key in names.split())
    here = setting_called(root, section, key) or next(instead, None)
    if here is None:
        return None
    place, _, name = here.partition(".")
    short = name if place == section and name.isidentifier() else here
    return f'"{short}"' if short.isidentifier() else short


def refusal_of(root: Schema, section: str, key: str) -> str | None:
    """Why there is no setting `key`; None where no other tool has it either."""
    fields = unsupported(root)
    for owner in (section, *fields):
        if key in fields.get(owner, {}):
            reason = fields[owner][key]
            because = f" because {reason}" if reason else ""
            return f"{OWNERS[owner]}.{key} is not supported here{because}"
    reason = _reason(key)
    return f"there is no such setting: {reason}" if reason else None


@cache
def _tables(file: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def settings() -> dict[str, dict[str, Any]]:
    """The tables of alias_settings.json."""
    return _tables(_SETTINGS)


@cache
def unsupported(root: Schema) -> dict[str, dict[str, str]]:
    """Section of the file -> field of another tool's class -> why there is none here, or ""."""
    return {
        section: {
            name: _reason(name) or _OTHERWISE.get(section, "")
            for name in names
            if own_name(root, section, name) is None
        }
        for section, names in _tables(FILE).items()
    }


def _reason(key: str) -> str:
    reasons = settings()["reasons"].items()
    return next((why for why, names in reasons if re.fullmatch(names, key)), "")
