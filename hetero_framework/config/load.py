"""Loads a `Config` from a file and `--set` options; makes the JSON Schema of the file."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_framework.config.composition import whole_schema
from hetero_framework.config.plan import process_name
from hetero_framework.config.problems import shown
from hetero_framework.config.schema import Config
from hetero_framework.config.strict_json import read_object
from hetero_framework.errors import ConfigError
from hetero_framework.file_trust import untrusted_reason

_log = logging.getLogger(__name__)
PLAN_FILE = "plan.json"
"""File in output_dir: the answer of `hetero plan` when the run began, with the plan as used."""
_PLAN_HINT = "delete the file, or begin anew with --fresh; the machines are planned for again then"


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Sequence[str] = (),
    base_dir: str | os.PathLike[str] | None = None,
) -> Config:
    """The configuration in a JSON or YAML file, or in a dictionary, which is left as it is, with
    `overrides` such as "training.learning_rate=1e-4".

    Relative paths start at `base_dir`, else at the file's folder or the current directory. Raises
    ConfigError (PlanError when only the plan is wrong) that lists all problems.
    """
    if isinstance(source, Mapping):
        raw, folder, name = copy.deepcopy(dict(source)), Path.cwd(), "configuration"
    else:
        raw, folder = read_object(Path(source)), Path(source).absolute().parent
        name = str(source)
    for override in overrides:
        apply_override(raw, override)
    return Config.from_dict(raw, base_dir or folder, name=name)


def devices_of(config: Config) -> dict[str, str]:
    """The device of each process by its id. A plan that is left to the run is made for them."""
    return {str(id): config.machine(id).device for id in ("local", *(w.id for w in config.workers))}


def with_saved_plan(config: Config) -> Config:
    """The configuration. The plan that a run of this `output_dir` has saved, if any, replaces
    "auto", unless it was made for other devices. Raises ConfigError for a plan that cannot be read
    or is none of these workers."""
    file = config.output_dir / PLAN_FILE
    if config.is_planned or not file.exists():
        return config
    if (wrong := untrusted_reason(file)) is not None:
        problem = f"{file} is not read, others may have made it: it {wrong.problem}"
        raise ConfigError(problem, hint=f"{wrong.mend}, or {_PLAN_HINT}")
    try:
        kept, now = read_object(file), devices_of(config)
        if isinstance(then := kept.get("planned_for"), dict) and then != now:
            ids = sorted(now.keys() ^ then.keys())
            changed = [f"{process_name(id)} is {'gone' if id in then else 'new'}" for id in ids]
            _log.info("the plan in %s is not used: %s", file, ", ".join(changed) or "other devices")
            return config
        return config.with_changes(shard_plan=kept.get("shard_plan"))
    except ConfigError as error:
        raise type(error)(f"{file}: {error.message}", hint=_PLAN_HINT) from None


def apply_override(raw: dict[str, Any], setting: str) -> None:
    """Set `PATH=VALUE` in `raw`. "workers[0].port" is a path; a value is JSON or a text."""
    path, equals, text = setting.partition("=")
    keys: list[str | int] = [
        int(index) if index else key for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path)
    ]
    if not equals or not keys or isinstance(keys[0], int):
        raise ConfigError(
            f"--set {shown(setting)} is not of the form section.name=value",
            hint="for example: --set training.learning_rate=1e-4",
        )
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    target: Any = raw
    for depth, key in enumerate(keys):
        fits = isinstance(target, list) and isinstance(key, int) and key < len(target)
        if not fits and not (isinstance(target, dict) and isinstance(key, str)):
            raise ConfigError(f"--set {shown(setting)}: the configuration has no {path}")
        if depth == len(keys) - 1:
            target[key] = value
        elif isinstance(target, dict) and target.get(str(key)) is None:
            target[key] = {}
        target = target[key]


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the configuration file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_in_one_line(whole_schema(Config).model_json_schema()),
        "title": "hetero_config.json",
    }


def _in_one_line(schema: Any) -> Any:
    """The schema with each text in one line: descriptions are wrapped in the source."""
    if isinstance(schema, dict):
        return {key: _in_one_line(value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_in_one_line(value) for value in schema]
    return " ".join(schema.split()) if isinstance(schema, str) else schema
