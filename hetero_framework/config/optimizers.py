"""The optimizers and learning-rate schedules that can train shards, and reasons against the others.

The names are read from transformers' source, since importing it takes seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hetero_framework.config.schema import TrainingConfig
from hetero_framework.errors import ConfigError

_WHOLE_MODEL_OPTIMIZERS = {
    "galore": "it rewrites named target modules of the whole model",
    "lomo": "it updates inside the backward pass, before the step is decided",
    "adalomo": "it updates inside the backward pass, before the step is decided",
    "apollo": "it rewrites named target modules of the whole model",
    "schedule_free": "it keeps other weights for training than for evaluation",
    "grokadamw": "its decay follows a signal of the whole model",
}
"""Prefixes of optimizers' names, and why these optimizers cannot run stage by stage."""


def check_optimizer(training: TrainingConfig) -> None:
    """Raise ConfigError for an unknown schedule, and for an optimizer that is unknown or needs more
    than its own stage."""
    for problem in optimizer_problems(training):
        raise problem


def optimizer_problems(training: TrainingConfig) -> Iterator[ConfigError]:
    """All problems that `check_optimizer` would raise."""
    schedules = _names("trainer_utils.py", "SchedulerType")
    if training.lr_scheduler_type not in schedules:
        yield ConfigError(
            f"training.lr_scheduler_type: {training.lr_scheduler_type!r} is not a schedule of"
            " the installed transformers",
            hint=f"one of: {', '.join(schedules)}",
        )
    known = sorted(_names("training_args.py", "OptimizerNames"))
    if training.optim not in known:
        yield ConfigError(
            f"training.optim: {training.optim!r} is not an optimizer of the installed transformers",
            hint=f"one of: {', '.join(name for name in known if _refusal(name) is None)}",
        )
    elif reason := _refusal(training.optim):
        yield ConfigError(
            f"training.optim: {training.optim!r} cannot train a model in shards: {reason}",
            hint='use an optimizer that treats every parameter by itself, such as "adamw_torch"',
        )


def _refusal(name: str) -> str | None:
    reasons = (why for prefix, why in _WHOLE_MODEL_OPTIMIZERS.items() if name.startswith(prefix))
    return next(reasons, None)


@cache
def _names(file: str, enumeration: str) -> tuple[str, ...]:
    """The values of an enumeration of texts in a file of transformers."""
    spec = find_spec("transformers")
    assert spec is not None, "versions.check says so before"
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    members = next(node.body for node in classes if node.name == enumeration)
    values = (node.value for node in members if isinstance(node, ast.Assign))
    return tuple(str(value.value) for value in values if isinstance(value, ast.Constant))
