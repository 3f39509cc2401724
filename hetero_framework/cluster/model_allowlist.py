"""Checks that a worker's own configuration permits a model that a coordinator has it load.

A model or adapter is a folder, a name on the hub or in an imported file, or an inline
configuration. It is the only value of a run's configuration that a worker turns into a path.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from typing import Any

from hetero_framework.config import Config, WorkerConfig
from hetero_framework.errors import ConfigError

EVERYTHING = "*"
MEASURE = "hetero.measure"
"""Asks a worker for the cost of a model, which its configuration has to permit too."""
LEFT_OUT = "hetero.left-out"
"""Tells a measured worker that the plan has no layers for it; the data say why."""
TINY: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}
"""The model of which each worker loads a layer while it is measured."""


def check_permitted(asked: Config, local: Config, entry: WorkerConfig) -> Config:
    """Return `asked` with every folder replaced by the checked folder, without symbolic links.
    Raises ConfigError for a model or adapter that is permitted neither by `local`, the
    worker's configuration, nor by the `models` of its `entry` there."""
    _check_in_place(asked, local, entry)
    folders: dict[str, dict[str, str]] = {}
    for what, name in (("model", _model(asked)), ("adapter", _adapter(asked))):
        if name is None:
            continue
        opened = _opened(local, name)
        if not _is_permitted(opened, local, entry):
            raise _refusal(f"the {what} {name!r}", local, entry)
        of_file = what == "model" and asked.model is not None and asked.model.name_or_path is None
        if os.path.isdir(opened) and not of_file:
            folders[what] = {"name_or_path" if what == "model" else "init_from": opened}
    return asked.with_changes(**folders) if folders else asked


def _check_in_place(asked: Config, local: Config, entry: WorkerConfig) -> None:
    """Check a model that is written in the configuration itself. TINY is always permitted."""
    fields = asked.model.from_config if asked.model is not None else None
    if fields is None or EVERYTHING in (entry.models or ()):
        return
    if local.model is not None and local.model.from_config == fields:
        return
    if fields != {**TINY, "num_hidden_layers": len(asked.shard_plan)}:
        raise _refusal("the model of model.from_config", local, entry)


def _refusal(what: str, local: Config, entry: WorkerConfig) -> ConfigError:
    named = [name for name in (_model(local), _adapter(local)) if name is not None]
    permitted = ", ".join(map(repr, [*named, *(entry.models or ())])) or "none"
    return ConfigError(
        f"worker {entry.id} may not load {what}: its own configuration permits {permitted}",
        hint='on its machine, start it with the same file, or add the name to "models" of'
        f' worker {entry.id} ("*" permits everything)',
    )


def _model(config: Config) -> str | None:
    return config.model.source if config.model is not None else None


def _adapter(config: Config) -> str | None:
    return config.adapter.init_from if config.adapter is not None else None


def _opened(config: Config, name: str) -> str:
    """The folder that a name means, without symbolic links; also for a name on the hub."""
    return os.path.realpath(config.path(name))


def _is_permitted(asked: str, local: Config, entry: WorkerConfig) -> bool:
    patterns = entry.models or ()
    if EVERYTHING in patterns:
        return True
    # As paths, so that "models/../../etc" is not taken for one of "models/*".
    named = [_opened(local, name) for name in (_model(local), _adapter(local)) if name is not None]
    if any(os.path.normcase(asked) == os.path.normcase(name) for name in named):
        return True
    return any(fnmatch.fnmatch(asked, _opened_pattern(local, pattern)) for pattern in patterns)


def _opened_pattern(local: Config, pattern: str) -> str:
    """A pattern of folders whose part before the first wildcard is resolved. Brackets in the name
    of the configuration's own folder are not a pattern."""
    parts = os.path.normpath(os.path.expanduser(pattern)).split(os.sep)
    plain = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    folder = os.sep.join(parts[:plain]) + os.sep if plain else "."
    return os.path.join(glob.escape(_opened(local, folder)), *parts[plain:])
