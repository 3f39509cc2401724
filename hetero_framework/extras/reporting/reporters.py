"""Reporters of transformers, such as wandb and trackio, as callbacks of a run.

extra.toml has what to install for each, and the modules that have other names.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hetero_framework import registry
from hetero_framework.config import Config, TrainingConfig
from hetero_framework.errors import ConfigError
from hetero_framework.extras.reporting.settings import ReportSettings

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from hetero_framework.trainer.setup import Sample


def _chosen(config: Config) -> dict[str, Mapping[str, Any]]:
    """The reporters that report_to names, and their facts."""
    known = registry.entries("reporters")
    own = {name: entry.facts for name, entry in known.items() if "packages" in entry.facts}
    return {name: own[name] for name in config.training.report_to if name in own}


def check(config: Config) -> None:
    """Raise ConfigError for reporters whose package is not installed."""
    for name, facts in _chosen(config).items():
        packages = facts["packages"]
        modules = facts.get("modules", packages).split()
        if any(importlib.util.find_spec(module) is None for module in modules):
            raise ConfigError(
                f"training.report_to asks for {name}, which is not installed",
                hint=f"python -m pip install {packages}, or leave {name} out",
            )


def reporters(config: Config) -> list[type[TrainerCallback]]:
    """The callbacks that report_to names. Raises as `check` does."""
    check(config)
    names, wants_all = [*_chosen(config)], "all" in config.training.report_to
    if not names and not wants_all:
        return []
    from transformers.integrations import (  # type: ignore[attr-defined]
        get_available_reporting_integrations,
        get_reporting_integration_callbacks,
    )

    if wants_all:
        names = [name for name in get_available_reporting_integrations() if name != "tensorboard"]
    return list(get_reporting_integration_callbacks(names))


def report_samples(reporter: Any, step: int, samples: Sequence[Sample]) -> None:
    """Give wandb or trackio a table of samples. Other reporters' callbacks take only numbers."""
    columns, rows = ["step", "prompt", "text"], [[step, s.prompt, s.text] for s in samples]
    if (wandb := getattr(reporter, "_wandb", None)) is not None:
        table = wandb.Table(columns=columns, data=rows)
        wandb.log({"samples": table, "train/global_step": step})
    elif (trackio := getattr(reporter, "_trackio", None)) is not None:
        from pandas import DataFrame

        table = trackio.Table(dataframe=DataFrame(rows, columns=columns))
        trackio.log({"samples": table, "train/global_step": step})


def mlflow_run() -> str | None:
    """The identifier, made by MLflow's server, of MLflow's active run; None without one."""
    mlflow: Any = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None else None
    return None if active is None else str(active.info.run_id)


@contextmanager
def remote_run(run: str, training: TrainingConfig, of_mlflow: str | None) -> Iterator[None]:
    """Within the block, wandb, Comet and SwanLab, where report_to names them, begin or continue the
    remote run `run`; trackio knows a run by its name. MLflow continues its run `of_mlflow`, if
    there is one. Variables that the environment already has stay."""
    project = ReportSettings.of(training).project
    of_mlflow_run = {} if of_mlflow is None else {"MLFLOW_RUN_ID": of_mlflow}
    known = {
        "wandb": {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow", "WANDB_PROJECT": project},
        "comet_ml": {"COMET_EXPERIMENT_KEY": (3 * run)[:36], "COMET_PROJECT_NAME": project},
        "swanlab": {
            **{"SWANLAB_RUN_ID": (2 * run)[:21], "SWANLAB_RESUME": "allow"},
            "SWANLAB_PROJECT": project,
        },
        "mlflow": {"MLFLOW_EXPERIMENT_NAME": project, **of_mlflow_run},
    }
    chosen = known.keys() & {*training.report_to} if "all" not in training.report_to else known
    settings = {key: value for name in chosen for key, value in known[name].items()}
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
