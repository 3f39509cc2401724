"""Names of optimizers and schedules, checked without importing transformers."""

from __future__ import annotations

import pytest
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from hetero_framework.config import TrainingConfig, optimizers
from hetero_framework.config.optimizers import check_optimizer
from hetero_framework.engine.optimizer import LearningRate
from hetero_framework.errors import ConfigError


def test_names_are_those_of_the_installed_transformers():
    names = optimizers._names
    assert set(names("training_args.py", "OptimizerNames")) == {one.value for one in OptimizerNames}
    assert set(names("trainer_utils.py", "SchedulerType")) == {one.value for one in SchedulerType}


def test_check_optimizer_lists_the_existing_ones():
    with pytest.raises(ConfigError, match="'adam' is not an optimizer") as caught:
        check_optimizer(TrainingConfig(optim="adam"))
    assert caught.value.hint is not None
    assert "adamw_torch" in caught.value.hint
    assert "galore" not in caught.value.hint


def test_check_optimizer_knows_the_schedules_before_anything_loads():
    with pytest.raises(ConfigError, match="'cosinus' is not a schedule") as caught:
        check_optimizer(TrainingConfig(lr_scheduler_type="cosinus"))
    assert caught.value.hint is not None
    assert "cosine_with_min_lr" in caught.value.hint
    for name in ("linear", "cosine", "constant", "constant_with_warmup", "polynomial"):
        check_optimizer(TrainingConfig(lr_scheduler_type=name))
        LearningRate(TrainingConfig(lr_scheduler_type=name), 10)


@pytest.mark.parametrize(
    "optim", ["galore_adamw", "lomo", "adalomo", "apollo_adamw", "schedule_free_adamw", "grokadamw"]
)
def test_check_optimizer_refuses_those_that_need_the_whole_model(optim):
    with pytest.raises(ConfigError, match="cannot train a model in shards"):
        check_optimizer(TrainingConfig(optim=optim))
