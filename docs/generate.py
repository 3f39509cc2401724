"""Write docs/configuration.md and config/alias_names.json: `python docs/generate.py`."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

from pydantic.fields import FieldInfo

from hetero_framework import config as schema
from hetero_framework.config import Config, aliases, effects
from hetero_framework.config.composition import whole_schema
from hetero_framework.config.section import IDENTITY, RESULT, ROUNDING, NameOf

TARGET = Path(__file__).with_name("configuration.md")
_WHOLE = whole_schema(Config)
_RESUMED = {IDENTITY: "refused", RESULT: "reported", ROUNDING: "reported"}

_INTRODUCTION = """\
# hetero_config.json

One file, JSON or YAML, names the machines, the layers of each, and the training. It is the same
file on every machine; the coordinator's copy takes precedence. `hetero init` writes one in JSON,
`hetero check` validates one, `hetero schema` prints its JSON Schema. This page is generated from
that schema by `python docs/generate.py`.

- Values are strict: `9999` is a port, `"9999"` is not. Where a decimal number is expected, a whole
  one is accepted.
- Unknown names, repeated keys, and in JSON comments and trailing commas are errors that name the
  place.
- A file whose name ends in `.yaml` or `.yml` is YAML, with the values of JSON: `1e-4` is a number;
  yes, no, on, off and 010 are texts. It holds one document without anchors, aliases, merge keys and
  tags. The copies that a run keeps are JSON, and `hetero plan --write` changes JSON alone.
- Relative paths start at the folder of the file. Paths of command line options start at the
  current directory.
- Only `coordinator` and `shard_plan` are required, and `workers` for plans that name any;
  training also needs `model` and `data`.
- `hetero check` and each run, before it begins, name settings that have no effect, such as `beta`
  with the objective sft, and the settings with which they would have one.
- Any setting can be replaced for one run: `hetero train --set training.learning_rate=1e-4`.
- The column "on resume" tells what happens when the checkpoint was written with another value:
  "refused", since it would be another run; or "reported": both values are shown, and the run
  continues with the new one. Where it is empty, the trained result does not depend on the setting.
  Training data are compared by their tokens: other tokens are refused.
- Names in `training` are those of `transformers.TrainingArguments` and mean the same, names in
  `adapter` those of `peft.LoraConfig`, names in `data` those of TRL's `SFTConfig` where it has
  them.

## The plan

`shard_plan` lists the stages in the order of the model; entry after entry covers all layers
exactly once, and each entry is `[start, end)`. The first entry is `"local"`, the coordinator's: it
holds the embedding, and may hold nothing else (`"start": 0, "end": 0`). The last entry computes
the loss; it may hold the head alone (`start` = `end` = number of layers). `"local"` and every
worker may appear several times; a worker that does not appear takes no part.

`"shard_plan": "auto"` leaves the plan to the run: when it begins, the coordinator measures all
machines of the configuration, as `hetero plan --measure` does, and plans. The plan is kept as
`plan.json` in `output_dir`: the run goes on with it when it is resumed, and a new one plans anew.
So does a resumed run whose file has gained or lost a device since; its result stays the same to the
bit (on the CPU in float32). A worker that the plan leaves out is told so and ends, or waits for the
next run with `--keep`.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [_INTRODUCTION, "## The top level\n", _table(_WHOLE, "")]
    for name, field in _WHOLE.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            items = " (each entry)" if name in ("workers", "shard_plan") else ""
            parts += [f"\n## {name}{items}\n", f"{section.__doc__}\n", _table(section, f"{name}.")]
    parts.append("\n## Names that are not supported\n")
    parts.append("Each is refused, with its reason where one is given.\n")
    for name, reasons in aliases.unsupported(_WHOLE).items():
        parts += [f"| `{name}`: name of {aliases.OWNERS[name]} | reason |", "|---|---|"]
        parts += [f"| `{key}` | {reason} |" for key, reason in reasons.items() if reason]
        rest = ", ".join(f"`{key}`" for key, why in reasons.items() if not why)
        parts.append(f"\nAlso not supported: {rest}.\n" if rest else "")
    return "\n".join(parts).rstrip() + "\n"


def _table(section: type[schema.Section], place: str) -> str:
    rows = ["| name | type | default | unit | on resume | meaning |", "|---|---|---|---|---|---|"]
    for name, field in section.model_fields.items():
        meaning = " ".join(str(field.description).split())
        unit = _unit(field) or _unit(field.annotation)
        setting = place + name
        resumed = _RESUMED.get(effects.effects()[setting], "")
        cells = [f"`{name}`", _type(field.annotation), _default(field), unit, resumed, meaning]
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _unit(part: Any) -> str:
    """The unit of a field, or of a type within a union."""
    if isinstance(part, FieldInfo):
        extra = part.json_schema_extra
        return str(extra["unit"]) if isinstance(extra, dict) else ""
    inside = (*typing.get_args(part), *getattr(part, "__metadata__", ()))
    return next((unit for unit in map(_unit, inside) if unit), "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory_takes_validated_data:
        return "see meaning"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, schema.Section):
        return "all defaults"
    return f"`{json.dumps(value)}`"


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(argument)}`" for argument in arguments)
    if origin in (typing.Union, UnionType):
        return " or ".join(dict.fromkeys(_type(argument) for argument in arguments))
    if origin is typing.Annotated:
        names = next((mark.names for mark in arguments if isinstance(mark, NameOf)), None)
        return _type(arguments[0]) if names is None else _type(Literal[*names])
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, schema.Section):
        return "object"
    names = {str: "text", int: "whole number", float: "number", bool: "boolean", NoneType: "null"}
    return names.get(annotation, "object")


def _section(annotation: Any) -> type[schema.Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, schema.Section):
        return annotation
    found = (_section(argument) for argument in typing.get_args(annotation))
    return next((section for section in found if section is not None), None)


def alias_names() -> dict[str, dict[str, Any]]:
    """The fields of the installed versions' classes that are no settings here, by section, with
    their defaults; null for what is not a JSON value."""
    from peft import LoraConfig
    from transformers import TrainingArguments
    from trl import SFTConfig

    of_trainer = _fields(TrainingArguments)
    of_trl = {name: value for name, value in _fields(SFTConfig).items() if name not in of_trainer}
    found = {
        "training": of_trainer,
        "adapter": _fields(LoraConfig),
        "data": of_trl,
    }
    return {
        section: {name: v for name, v in fields.items() if name not in _names(section)}
        for section, fields in found.items()
    }


def _fields(owner: type) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(owner):
        factory = field.default_factory
        default = factory() if factory is not dataclasses.MISSING else field.default
        default = getattr(default, "value", default)
        plain = isinstance(default, (bool, int, float, str, list, dict, NoneType))
        found[field.name] = default if plain else None
    return found


def _names(section: str) -> set[str]:
    """The settings of a section."""
    found = _section(_WHOLE.model_fields[section].annotation)
    return set(found.model_fields) if found is not None else set()


if __name__ == "__main__":
    # Names of other versions stay: a file may have been written for them.
    known = json.loads(aliases.FILE.read_text(encoding="utf-8"))
    names = {
        section: {n: v for n, v in (known[section] | found).items() if n not in _names(section)}
        for section, found in alias_names().items()
    }
    text = json.dumps(names, indent=0, sort_keys=True) + "\n"
    aliases.FILE.write_text(text, encoding="utf-8")
    TARGET.write_text(page(), encoding="utf-8")
    print(f"wrote {aliases.FILE} and {TARGET}")
