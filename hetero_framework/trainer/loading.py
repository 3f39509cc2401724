"""From a plan's entry to a stage ready to train: load, adapt."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import logging as transformers_logging

from hetero_framework.config import Config, StageSpec
from hetero_framework.core.dal import Device
from hetero_framework.models.adapters import attach_adapter
from hetero_framework.models.shard import ShardRange, load_shard
from hetero_framework.trainer.stage import Stage


def load_stages(config: Config, specs: Sequence[StageSpec], device: Device) -> list[Stage]:
    """Load the stages of one process onto its device.

    Raises ModelError when the model cannot be found or read here, ConfigError when the adapter
    does not fit it.
    """
    assert config.model is not None
    quiet_libraries(config.training.log_level)
    seed = config.training.seed
    plan = None
    stages = []
    for spec in specs:
        span = ShardRange(spec.start, spec.end, spec.is_first, spec.is_last)
        shard = load_shard(config.model, config.base_dir, span, device, seed=seed)
        plan = attach_adapter(shard, config.adapter, config.base_dir, seed, plan)
        stages.append(Stage(spec, shard, config, device))
    return stages


def quiet_libraries(log_level: str) -> None:
    """Show the libraries' own progress bars and notices with log level DEBUG only."""
    if log_level != "DEBUG":
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
