"""Checks before the first step that the disk has room for the run's checkpoints."""

from __future__ import annotations

import logging
import math
import shutil

from hetero_framework.config import TrainingConfig, interval
from hetero_framework.trainer.checkpoint import CheckpointStore
from hetero_framework.trainer.setup import Prepared
from hetero_framework.units import size

_log = logging.getLogger(__name__)


def warn_of_a_small_disk(prepared: Prepared, store: CheckpointStore, done: int) -> None:
    """Warn if the disk lacks room for the checkpoints that the run adds, at least two. `done` is
    the number of steps done. Raises CheckpointError if the directory cannot be read."""
    training = prepared.config.training
    if training.save_strategy == "no":
        return
    data = prepared.data
    most = checkpoints_at_once(training, data.total_steps, data.steps_per_epoch)
    there = sum(step <= done for step in store.complete_steps()) if done else 0
    nbytes = sum(memory.gradients + memory.states for memory in prepared.memory)
    needed = nbytes * max(most - there, 2)
    try:
        folders = (store.root, *store.root.absolute().parents)
        free = shutil.disk_usage(next(path for path in folders if path.exists())).free
    except OSError as error:
        _log.warning("the free space for checkpoints in %s is not known: %s", store.root, error)
        return
    if free < needed:
        _log.warning(
            "a checkpoint takes about %s, and the run writes up to %d beside each other: %s are "
            "needed, %s are free in %s. Free some, lower training.save_total_limit or set another "
            "checkpoint_dir; a checkpoint that does not fit is left out",
            *(size(nbytes), max(most - there, 2), size(needed), size(free), store.root),
        )


def checkpoints_at_once(training: TrainingConfig, total_steps: int, steps_per_epoch: int) -> int:
    """The most checkpoints that the run has on its disk at once, including the one being written;
    at least 2."""
    every = steps_per_epoch
    if training.save_strategy == "steps":
        every = interval(training.save_steps, total_steps)
    saves = math.ceil(total_steps / every)  # the last one is at the end, whatever the interval
    limit = training.save_total_limit
    return max(2, saves if limit is None else min(saves, limit + 1))
