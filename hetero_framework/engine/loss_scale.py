"""The loss scale of fp16 training: one for all stages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LossScale:
    """A loss scale with the rule and defaults of torch.amp.GradScaler: halved after a step with a
    non-finite gradient, doubled after 2000 good steps in a row. Without fp16 it stays 1."""

    value: float = 1.0
    good_steps: int = 0

    @classmethod
    def for_training(cls, fp16: bool) -> LossScale:
        return cls(65536.0 if fp16 else 1.0)

    @property
    def active(self) -> bool:
        return self.value != 1.0

    def explains(self, losses: Iterable[float]) -> bool:
        """Whether a gradient that is not finite may come from the scale alone."""
        return self.active and self.value > 2.0 and all(map(math.isfinite, losses))

    def after(self, finite: bool) -> LossScale:
        """The scale of the next step."""
        if not self.active:
            return self
        if not finite:
            # 2.0, not less: at 1 the scale would be switched off.
            return LossScale(max(2.0, self.value / 2))
        if self.good_steps + 1 == 2000:
            return LossScale(self.value * 2)
        return LossScale(self.value, self.good_steps + 1)
