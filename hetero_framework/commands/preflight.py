"""Checks of a configuration that need no torch, whose import takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hetero_framework import control, repository
from hetero_framework.config import Config, ModelConfig
from hetero_framework.config.asked_extras import absent_extras, asked
from hetero_framework.config.optimizers import optimizer_problems
from hetero_framework.config.problems import Problem, report
from hetero_framework.data.sources import find_sources
from hetero_framework.data.tokenizer import tokenizer_place
from hetero_framework.errors import ConfigError, DataError, ModelError, UserError, attempt

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Names of the number of layers in config.json."""


def preflight(config: Config, *, data: bool = True, writes: bool = False) -> None:
    """Raise the error of the only problem, or a ConfigError that lists several problems."""
    raise_all("the configuration", refusals(config, data=data, writes=writes), ConfigError)


def raise_all(name: str, errors: Iterable[UserError], kind: type[UserError]) -> None:
    """Raise the only one of the errors, or one error of this `kind` that lists them all."""
    found = list(errors)
    if len(found) == 1:
        raise found[0]
    if found:
        raise kind(report(name, [Problem("", e.message, e.hint or "") for e in found]))


def raised(check: Callable[[], object]) -> Iterator[UserError]:
    """Yield the UserError that `check` raises, if it raises one."""
    if isinstance(found := attempt(check), UserError):
        yield found


def refusals(config: Config, *, data: bool, writes: bool) -> Iterator[UserError]:
    """Yield every problem that files and names show. `data` adds the checks of the data. `writes`
    adds the checks of the output directories, and what extras check before a run."""
    checks: list[Callable[[Config], Iterator[UserError]]] = [_heart, _model]
    checks += [_data] * data + [_directories, _of_extras] * writes
    for check in checks:
        yield from check(config)


def declared_layers(fields: dict[str, Any]) -> int | None:
    """Number of layers of the language model in a config.json; None if it does not say."""
    text = fields.get("text_config")
    fields = text if isinstance(text, dict) else fields
    counts = [fields[name] for name in _LAYERS if isinstance(fields.get(name), int)]
    return counts[0] if len(counts) == 1 else None


def _heart(config: Config) -> Iterator[UserError]:
    yield from raised(lambda: list(absent_extras(config)))
    yield from optimizer_problems(config.training)
    computes = control.function("compute_metrics") is not None
    yield from raised(partial(config.check_metric, computes=computes))


def _model(config: Config) -> Iterator[UserError]:
    if config.model is not None and config.training.reads_text:  # others may have no layers
        yield from raised(partial(_check_layers, config, config.model))


def _check_layers(config: Config, model: ModelConfig) -> None:
    """Raise PlanError if a local config.json has another number of layers than the plan."""
    fields = model.from_config or {}
    if model.name_or_path is not None:
        folder = repository.resolve_model_path(model.name_or_path, config.base_dir)
        file = Path(folder, repository.CONFIG)
        fields = repository.read_json(file, ModelError) if file.is_file() else {}
    layers = declared_layers(fields)
    if layers is not None and config.is_planned:
        config.plan.covers(layers)


def _data(config: Config) -> Iterator[UserError]:
    if config.data is None:
        return
    if config.model is not None and config.model.tokenizer is not None:
        yield from raised(partial(tokenizer_place, config))
    for spec in config.data.origins:
        yield from raised(partial(find_sources, spec, config.base_dir))
    template = config.data.chat_template_path
    if template is not None and not config.path(template).is_file():
        yield DataError(f"data.chat_template_path: there is no file {config.path(template)}")


def _of_extras(config: Config) -> Iterator[UserError]:
    for check in asked("run_checks", config):
        yield from raised(partial(check, config))


def _directories(config: Config) -> Iterator[UserError]:
    """Output directories that cannot be made or written; nothing is created."""
    places = {"training.output_dir": config.output_dir, "checkpoint_dir": config.checkpoints}
    if config.training.has_tensorboard:
        places["training.logging_dir"] = config.logging_dir
    seen: set[Path] = set()
    for setting, directory in places.items():
        there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
        if there in seen:
            continue
        seen.add(there)
        if not there.is_dir():
            why = "it is a file" if there == directory else f"{there} is a file"
        elif not os.access(there, os.W_OK | os.X_OK):
            why = f"{there} cannot be written by this user"
        else:
            continue
        option = " (--output-dir DIR)" if setting == "training.output_dir" else ""
        yield ConfigError(
            f"{setting}: cannot write into {directory}: {why}",
            hint=f"choose another {setting}{option}",
        )
