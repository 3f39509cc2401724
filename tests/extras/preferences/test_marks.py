"""The marks of settings against what the losses read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_framework.extras.preferences.pairs import MARGIN, REFERENCE
from hetero_framework.extras.preferences.settings import losses_of
from hetero_framework.models.cut.objectives import objective_of
from tests.unit.config.test_idle import config_of, idle

CHANGES = {
    **{"beta": 0.7, "label_smoothing": 0.3, "cpo_alpha": 0.2, "simpo_gamma": 1.5},
    **{"rpo_alpha": 0.6, "use_weighting": True, "ld_alpha": 0.5, "discopop_tau": 0.4},
    **{"desirable_weight": 3.0, "undesirable_weight": 2.0, "center_rewards_coefficient": 0.5},
}


LOSSES = {name: losses_of(name) for name in ("dpo", "orpo", "cpo", "kto", "image-kto")}


def heard(training: dict[str, Any]) -> list[torch.Tensor]:
    """The loss of a micro-batch, and what is logged of it, by the class of the objective."""
    config = config_of(training={"loss_chunk_tokens": None, **training}).training
    objective, drawn = objective_of(config), torch.Generator().manual_seed(3)
    rows, kind = 4, config.data_kind
    logits = torch.randn(rows, 6, 5, generator=drawn)
    labels = torch.randint(0, 5, (rows, 6), generator=drawn)
    labels[0, 4:] = -100
    inputs = {"labels": labels, "input_ids": labels.clamp(min=0)}
    inputs["attention_mask"] = torch.ones_like(labels)
    if kind == "compared":
        inputs[MARGIN] = torch.ones(2)
    elif objective.has_reference:
        count = rows // len(REFERENCE[kind])
        inputs |= {name: torch.randn(count, generator=drawn) - 9 for name in REFERENCE[kind]}
        inputs["desirable"] = torch.arange(count) % 2
    shard: Any = SimpleNamespace(
        config=SimpleNamespace(vocab_size=5),
        logits=lambda *_: logits[:, 0, :1],
        logits_and_routing=lambda *_: (logits, None),
    )
    running: Any = torch.no_grad
    loss, named = objective.loss(
        shard, inputs, (), torch.ones(()), running=running, backward=lambda loss: None
    )
    return [loss, *named.values()]


@pytest.mark.parametrize(
    ("objective", "loss"),
    [*((name, loss) for name, losses in LOSSES.items() for loss in losses), ("reward", None)],
)
def test_the_marks_say_what_each_loss_reads(objective, loss):
    base: dict[str, Any] = {"objective": objective, "per_device_train_batch_size": 2}
    base |= {"loss_type": loss} if loss else {}
    base |= {"train_sampling_strategy": "sequential"} if objective.endswith("kto") else {}
    base |= {"label_smoothing": 0.1} if loss == "exo_pair" else {}
    before = heard(base)
    for name, value in CHANGES.items():
        changed = {**base, name: value}
        reads = not all(map(torch.equal, before, heard(changed)))
        assert (f"training.{name}" not in idle(config_of(training=changed))) == reads, name
