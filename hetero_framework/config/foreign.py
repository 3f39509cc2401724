"""Settings under the names of other tools: what each is called here, or why there is none.

foreign_settings.json says what is called how here ("called", and for the entries of machines
"called_of_machines"), and why there is no such setting ("reasons"; the names are a regular
expression). foreign_names.json lists the fields of TrainingArguments, LoraConfig and SFTConfig that
are no settings here; `python docs/generate.py` adds those of the installed versions.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

OWNERS = {"training": "TrainingArguments", "adapter": "LoraConfig", "data": "SFTConfig"}
FILE = Path(__file__).with_name("foreign_names.json")
_SETTINGS = Path(__file__).with_name("foreign_settings.json")

_OTHERWISE = {"adapter": "only LoRA, rsLoRA and DoRA are cut exactly"}


def own_name(section: str, key: str) -> str | None:
    """What `key` of a section of the file ("" for the top level) is called here; None: unknown."""
    is_machine = section in ("coordinator", "workers", "shard_plan")
    for here, others in settings()["called_of_machines" if is_machine else "called"].items():
        if key in others.split() or f"{section}.{key}" in others.split():
            place, _, name = here.partition(".")
            short = name if place == section and name.isidentifier() else here
            return f'"{short}"' if short.isidentifier() else short
    return None


def refusal_of(section: str, key: str) -> str | None:
    """Why there is no setting `key`; None where nobody else has one either."""
    fields = unsupported()
    for owner in (section, *fields):
        if key in fields.get(owner, {}):
            reason = fields[owner][key]
            because = f" because {reason}" if reason else ""
            return f"{OWNERS[owner]}.{key} is not supported here{because}"
    reason = _reason(key)
    return f"there is no such setting: {reason}" if reason else None


@cache
def settings() -> dict[str, dict[str, str]]:
    """The tables of foreign_settings.json."""
    found: dict[str, dict[str, str]] = json.loads(_SETTINGS.read_text(encoding="utf-8"))
    return found


@cache
def unsupported() -> dict[str, dict[str, str]]:
    """Section of the file -> field of another tool's class -> why there is none here, or ""."""
    listed = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        section: {
            name: _reason(name) or _OTHERWISE.get(section, "")
            for name in names
            if own_name(section, name) is None
        }
        for section, names in listed.items()
    }


def _reason(key: str) -> str:
    return next(
        (why for why, names in settings()["reasons"].items() if re.fullmatch(names, key)), ""
    )
