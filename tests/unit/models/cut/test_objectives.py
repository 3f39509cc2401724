from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.models.cut.objectives import objective_of

RAW: dict[str, Any] = {
    "coordinator": {"ip": "127.0.0.1"},
    "workers": [],
    "shard_plan": [{"id": "local", "start": 0, "end": 2}],
    "data": {"train": "a", "eval": "b"},
}


@pytest.mark.parametrize(
    ("objective", "given", "not_given"),
    [
        ("sft", "perplexity", "accuracy"),
        ("dpo", "rewards/accuracies", "perplexity"),
        ("orpo", "eval_logps/chosen", "kl"),
        ("kto", "kl", "rewards/accuracies"),
        ("reward", "eval_accuracy", "token_loss"),
        ("classification", "accuracy", "f1"),
        ("image-classification", "accuracy", "entropy"),
    ],
)
def test_a_best_model_is_chosen_by_what_the_objective_gives(
    objective: str, given: str, not_given: str
) -> None:
    def check(metric: str) -> None:
        settings = {"objective": objective, "per_device_train_batch_size": 2}
        settings |= {"eval_strategy": "epoch", "metric_for_best_model": metric}
        settings |= {"train_sampling_strategy": "sequential"}
        config = Config.from_dict({**RAW, "training": settings})
        config.check_metric(objective_of(config.training).evaluated)

    check("loss")
    check(given)
    with pytest.raises(ConfigError, match="which no evaluation gives"):
        check(not_given)
