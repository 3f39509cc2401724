"""What a coordinator may have a worker load: what the worker's own configuration names.

A model or adapter is a folder, a name on the hub or a configuration in place, and the one thing of
a run's configuration from which a worker makes a path.
"""

from __future__ import annotations

import fnmatch
import glob
import os

from hetero_framework.cluster.survey import TINY
from hetero_framework.config import Config, WorkerConfig
from hetero_framework.errors import ConfigError

EVERYTHING = "*"


def check_permitted(asked: Config, own: Config, entry: WorkerConfig) -> Config:
    """`asked`, in which every folder is the one that was looked at, whatever links led there.
    Raises ConfigError, which names both, for a model or an adapter that neither `own`, the worker's
    configuration, nor the `models` of its `entry` there permits."""
    _check_in_place(asked, own, entry)
    folders: dict[str, dict[str, str]] = {}
    for what, name in (("model", _model(asked)), ("adapter", _adapter(asked))):
        if name is None:
            continue
        opened = _opened(own, name)
        if not _is_permitted(opened, own, entry):
            raise _refusal(f"the {what} {name!r}", own, entry)
        if os.path.isdir(opened):
            folders[what] = {"name_or_path" if what == "model" else "init_from": opened}
    return asked.with_changes(**folders) if folders else asked


def _check_in_place(asked: Config, own: Config, entry: WorkerConfig) -> None:
    """Of a model that is written in the configuration itself; a tiny one is for measuring."""
    fields = asked.model.from_config if asked.model is not None else None
    if fields is None or EVERYTHING in (entry.models or ()):
        return
    if own.model is not None and own.model.from_config == fields:
        return
    if fields != {**TINY, "num_hidden_layers": len(asked.shard_plan)}:
        raise _refusal("the model of model.from_config", own, entry)


def _refusal(what: str, own: Config, entry: WorkerConfig) -> ConfigError:
    named = [name for name in (_model(own), _adapter(own)) if name is not None]
    permitted = ", ".join(map(repr, [*named, *(entry.models or ())])) or "none"
    return ConfigError(
        f"worker {entry.id} may not load {what}: its own configuration permits {permitted}",
        hint='on its machine, start it with the same file, or add the name to "models" of'
        f' worker {entry.id} ("*" permits everything)',
    )


def _model(config: Config) -> str | None:
    return config.model.name_or_path if config.model is not None else None


def _adapter(config: Config) -> str | None:
    return config.adapter.init_from if config.adapter is not None else None


def _opened(config: Config, name: str) -> str:
    """The folder that a name means, without links; of a name on the hub the one it would have."""
    return os.path.realpath(config.path(name))


def _is_permitted(asked: str, own: Config, entry: WorkerConfig) -> bool:
    patterns = entry.models or ()
    if EVERYTHING in patterns:
        return True
    # As paths, so that "models/../../etc" is not taken for one of "models/*".
    named = [_opened(own, name) for name in (_model(own), _adapter(own)) if name is not None]
    if any(os.path.normcase(asked) == os.path.normcase(name) for name in named):
        return True
    return any(fnmatch.fnmatch(asked, _opened_pattern(own, pattern)) for pattern in patterns)


def _opened_pattern(own: Config, pattern: str) -> str:
    """A pattern of folders, without links in front of its first wildcard. In the name of the
    file's own folder brackets are no pattern."""
    parts = os.path.normpath(os.path.expanduser(pattern)).split(os.sep)
    plain = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    folder = os.sep.join(parts[:plain]) + os.sep if plain else "."
    return os.path.join(glob.escape(_opened(own, folder)), *parts[plain:])
