"""What a coordinator may have a worker load: what the worker's own configuration names.

A model or adapter is a folder or a name on the hub, and the one thing of a run's configuration from
which a worker makes a path.
"""

from __future__ import annotations

import fnmatch
import glob
import os

from hetero_framework.config import Config, WorkerConfig
from hetero_framework.errors import ConfigError

EVERYTHING = "*"


def check_permitted(asked: Config, own: Config, entry: WorkerConfig) -> None:
    """Raise ConfigError, which names both, for a model or an adapter that neither `own`, the
    worker's configuration, nor the `models` of its `entry` there permits."""
    for what, name in (("the model", _model(asked)), ("the adapter", _adapter(asked))):
        if name is not None and not _is_permitted(name, own, entry):
            permitted = ", ".join(map(repr, _named(own, entry))) or "none"
            raise ConfigError(
                f"worker {entry.id} may not load {what} {name!r}: its own configuration permits"
                f" {permitted}",
                hint=f'on its machine, start it with the same file, or add the name to "models" of'
                f" worker {entry.id}",
            )


def _model(config: Config) -> str | None:
    return config.model.name_or_path if config.model is not None else None


def _adapter(config: Config) -> str | None:
    return config.adapter.init_from if config.adapter is not None else None


def _named(own: Config, entry: WorkerConfig) -> list[str]:
    names = [name for name in (_model(own), _adapter(own)) if name is not None]
    return [*names, *(entry.models or ())]


def _is_permitted(name: str, own: Config, entry: WorkerConfig) -> bool:
    patterns = entry.models or ()
    if EVERYTHING in patterns:
        return True
    # As paths, so that "models/../../etc" is not taken for one of "models/*".
    asked = own.path(name)
    if any(asked == own.path(named) for named in (_model(own), _adapter(own)) if named is not None):
        return True
    # In the name of the file's own folder brackets are no pattern.
    base = glob.escape(str(own.base_dir))
    paths = (os.path.normpath(os.path.join(base, os.path.expanduser(p))) for p in patterns)
    return any(fnmatch.fnmatch(str(asked), path) for path in paths)
