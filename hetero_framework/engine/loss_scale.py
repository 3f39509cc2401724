"""The loss scale of fp16 training: one for all stages."""

from __future__ import annotations

from dataclasses import dataclass


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
