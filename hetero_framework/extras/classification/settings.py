"""Settings of rewards and labels."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hetero_framework.config import TrainingConfig
from hetero_framework.config.section import ReadIf


class RewardSettings(TrainingConfig):
    """The training section with the setting of rewards."""

    center_rewards_coefficient: Annotated[float | None, ReadIf("objective=reward")] = Field(
        default=None, ge=0
    )
    """Reward: weight of the squared sum of a pair's rewards, which keeps them around 0. null: 0."""
