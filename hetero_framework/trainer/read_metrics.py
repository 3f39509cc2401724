"""metrics.jsonl, read without torch: its steps and curves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hetero_framework.errors import UserError, in_words

_FILE = "metrics.jsonl"
_T = TypeVar("_T")
MEASURES = {
    "accuracy": re.compile("(rewards/)?accurac(y|ies)|mean_token_accuracy"),
    "reward": re.compile("rewards/(margins|chosen|rejected)|margin|(min|mean|max)_reward"),
}
"""Names of the objectives' measures that are shown beside losses, by kind."""
Points = tuple[list[int], list[float]]  # steps and values, NaN where one was not finite


def loss_of(name: str = "") -> str:
    """The name of the loss of an evaluation set; "" is a set without a name."""
    return f"eval_{name}_loss" if name else "eval_loss"


def read_steps(folder: Path, find: Callable[[list[Mapping[str, Any]]], _T]) -> _T | None:
    """The result of `find` on the lines of a run's metrics.jsonl; None without such a file. Raises
    UserError if the file is damaged."""
    file = folder / _FILE
    if not file.exists():
        return None
    try:
        return find([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"cannot read {file}: {in_words(error)}") from None


def read_curves(place: Path) -> dict[str, Points]:
    """The losses, learning rates, gradient norms and MEASURES of an `output_dir` or a
    metrics.jsonl, by name. Raises UserError where there are none."""
    file = place / _FILE if place.is_dir() else place
    always = {"loss", "learning_rate", "grad_norm"}
    curves: dict[str, Points] = {}
    try:
        with file.open(encoding="utf-8") as lines:
            for line in (json.loads(line) for line in lines if line.endswith("\n")):
                known = {*always, *map(loss_of, line.get("sets", [""]))}
                for key in (key for key in line if key in known or _is_measure(key)):
                    steps, values = curves.setdefault(key, ([], []))
                    steps.append(int(line["step"]))
                    values.append(math.nan if line[key] is None else float(line[key]))
    except FileNotFoundError:
        hint = "give the output_dir of a run"
        raise UserError(f"there is no {_FILE} in {place}", hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {file}: {in_words(error)}") from None
    if not curves:
        raise UserError(f"{file} holds no step yet")
    return curves


def _is_measure(key: str) -> bool:
    return any(re.fullmatch(f"(eval_.*)?({p.pattern})", key) for p in MEASURES.values())
