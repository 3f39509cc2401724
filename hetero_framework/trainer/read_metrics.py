"""metrics.jsonl, read without torch: its curves."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from hetero_framework.errors import UserError, in_words

_FILE = "metrics.jsonl"
MEASURES = {
    "accuracy": re.compile("(rewards/)?accurac(y|ies)|mean_token_accuracy"),
    "reward": re.compile("rewards/(margins|chosen|rejected)|margin|(min|mean|max)_reward"),
}
"""Names of the objectives' measures that are shown beside losses, by kind."""
Points = tuple[list[int], list[float]]  # steps and values, NaN where one was not finite


def loss_of(name: str = "") -> str:
    """The name of the loss of an evaluation set; "" is a set without a name."""
    return f"eval_{name}_loss" if name else "eval_loss"


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
