"""The best checkpoint becomes the result whatever the cut, and also of a run that was ended."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import TrainerCallback

from hetero_framework.config import Config
from hetero_framework.errors import CallbackError
from hetero_framework.trainer.coordinator import train
from tests.integration.test_parity import LORA, assert_same, weights

pytestmark = pytest.mark.xdist_group("pool")

TRAINING = {
    **{"max_steps": 6, "warmup_steps": 1, "load_best_model_at_end": True},
    **{"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
    **{"save_total_limit": 2, "early_stopping_patience": 3},
}


class Ending(TrainerCallback):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("the end")


@pytest.mark.parametrize(
    ("adapter", "rate"),
    [pytest.param(None, 0.3, marks=pytest.mark.long), (LORA, 5.0)],
    ids=["full", "lora"],
)
def test_the_best_model_does_not_depend_on_the_cut(adapter, rate, configured, texts, tmp_path):
    def config(name: str, cuts: list[int]) -> Config:
        sections: dict[str, Any] = {"adapter": adapter} if adapter else {}
        sections["data"] = {"train": str(texts), "eval": str(texts), "max_length": 64}
        return configured(cuts, name, training={**TRAINING, "learning_rate": rate}, **sections)

    whole = train(config("whole", []))
    cut = train(config("cut", [2, 4]))
    for step in (2, 3):
        with pytest.raises(CallbackError):
            train(config("ended", [3] if step == 2 else [1, 4]), callbacks=[Ending(step)])
    ended = train(config("ended", [2, 4]))
    for run, name in ((cut, "cut"), (ended, "ended")):
        assert run.best_checkpoint.name == whole.best_checkpoint.name
        assert run.steps == whole.steps
        assert_same(weights(tmp_path / name), weights(tmp_path / "whole"))
    assert whole.best_checkpoint.name != f"step_{whole.steps}"
