"""The decision on a step, from what all stages report. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero_framework.engine.stage_api import GradientReport

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_


class ModelOrder:
    """Puts the stages' per-parameter norms into the order of the whole model.

    `trainable[k]` is stage k's list of (name, rank). Floating-point sums depend on their order, so
    the global norm does not depend on the cut only if every cut sums in this one.
    """

    def __init__(self, trainable: Sequence[Sequence[tuple[str, tuple[int, ...]]]]) -> None:
        ranks = [rank for stage in trainable for _, rank in stage]
        # Stable: equal ranks are parameters of one module and keep their stage's order.
        order = sorted(range(len(ranks)), key=lambda i: ranks[i])
        self._order = torch.tensor(order, dtype=torch.int64)

    def global_norm(self, reports: Sequence[GradientReport]) -> torch.Tensor:
        """The 2-norm of all gradients, as torch.nn.utils.clip_grad_norm_ computes it (float32)."""
        norms = torch.cat([report.norms.cpu() for report in reports])
        return torch.linalg.vector_norm(norms[self._order])


def clip_factor(norm: torch.Tensor, max_norm: float) -> float:
    """What every gradient is multiplied by: max_norm / (norm + 1e-6), at most 1; 1 if not clipped.

    Source: torch.nn.utils.clip_grad_norm_. `max_norm` 0 means no clipping.
    """
    if not max_norm:
        return 1.0
    return float(torch.clamp(max_norm / (norm + _CLIP_EPSILON), max=1.0))


@dataclass
class LossScale:
    """One loss scale for all stages; torch.amp.GradScaler's rule and its defaults.

    Halved after a step with a non-finite gradient, doubled after 2000 good ones in a row. Without
    fp16 it stays 1.
    """

    value: float = 1.0
    good_steps: int = 0

    @classmethod
    def for_training(cls, fp16: bool) -> LossScale:
        return cls(65536.0 if fp16 else 1.0)

    @property
    def active(self) -> bool:
        return self.value != 1.0

    def update(self, finite: bool) -> None:
        if not self.active:
            return
        if not finite:
            # 2.0, not less: at 1 the scale would be switched off.
            self.value, self.good_steps = max(2.0, self.value / 2), 0
        elif self.good_steps + 1 == 2000:
            self.value, self.good_steps = self.value * 2, 0
        else:
            self.good_steps += 1
