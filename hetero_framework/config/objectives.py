"""The objectives by name: the data that each is trained on, and the class of its model."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from hetero_framework.config.aliases import meant
from hetero_framework.errors import ConfigError

DataKind = Literal[
    "text", "pairs", "ratings", "mismatched", "compared", "labelled", "tagged", "own"
]
"""Texts, a chosen and a rejected answer, a rated answer, or this and one to another prompt; two
answers as whole texts, a text with its label, words with one each; tensors of a user's data set."""
ROWS = {
    **{"text": 1, "pairs": 2, "ratings": 1, "mismatched": 2, "compared": 2},
    **{"labelled": 1, "tagged": 1, "own": 1},
}
"""Rows of a micro-batch that one example makes."""

Task = Literal[
    "causal-lm", "sequence-classification", "token-classification", "image-classification"
]
"""The task of a model's head, which decides the class: transformers' AutoModelFor..."""


@dataclass(frozen=True)
class Needs:
    """The data and the task of the model that an objective is trained with."""

    data: DataKind = "text"
    task: Task = "causal-lm"


NEEDS: dict[str, Needs] = {
    "sft": Needs(),
    **dict.fromkeys(("dpo", "orpo", "cpo"), Needs("pairs")),
    "kto": Needs("mismatched"),
    "reward": Needs("compared", "sequence-classification"),
    "classification": Needs("labelled", "sequence-classification"),
    "token-classification": Needs("tagged", "token-classification"),
    "sequential": Needs("own"),
    "image-classification": Needs("own", "image-classification"),
}
"""Of each objective; models/cut/objectives.py registers further ones."""
BUILT_IN = tuple(NEEDS)


def needs_of(objective: str) -> Needs:
    """The entry of an objective. Raises ConfigError for an unknown one."""
    if objective in NEEDS:
        return NEEDS[objective]
    near = difflib.get_close_matches(objective.lower(), NEEDS, n=1)
    own = "one of your own is registered by a file of --import, on every machine"
    raise ConfigError(
        f"training.objective: there is no objective {objective!r}; there are {', '.join(NEEDS)}",
        hint=meant("training.objective", objective)
        or (f'did you mean "{near[0]}"?' if near else own),
    )


DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
"""Values of loss_type. TRL's aot and aot_unpaired sort the pairs of a micro-batch."""
WITHOUT_KL = "apo_zero_unpaired"
ONE_LOSS = {
    **{"sft": ("nll",), "orpo": ("sigmoid",), "cpo": ("sigmoid", "hinge", "ipo", "simpo")},
    "kto": ("kto", WITHOUT_KL),
}
"""Values of loss_type of the objectives that take only one, the default first."""
