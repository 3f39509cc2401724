from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import registry
from hetero_framework.config import Config
from hetero_framework.config.objectives import needs_of, rows_of
from hetero_framework.errors import ConfigError
from hetero_framework.models.cut.objectives import objective_of
from tests.installed import needs, whole

RAW: dict[str, Any] = {
    "coordinator": {"ip": "127.0.0.1"},
    "workers": [],
    "shard_plan": [{"id": "local", "start": 0, "end": 2}],
    "data": {"train": "a", "eval": "b"},
}


@needs("preferences", "classification", "pictures", "reporting")
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
def test_best_model_is_chosen_by_what_is_given(objective, given, not_given):
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


@needs("preferences")
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dpoo", 'did you mean "dpo"'),
        ("mine", "a file of --import"),
    ],
)
def test_an_unknown_objective_is_said_with_its_key_and_a_near_name(name, hint):
    with pytest.raises(ConfigError, match=r"^training.objective: there is no") as error:
        needs_of(name)
    assert hint in (error.value.hint or "")


@whole
def test_the_page_has_each_kind_of_data_with_its_rows():
    page = (Path(__file__).resolve().parents[4] / "docs" / "objectives.md").read_text()
    found = re.findall(r'^\| `"([\w-]+)"` \| [^|]+\| (\d)', page, re.MULTILINE)
    assert {kind: int(rows) for kind, rows in found} == {
        kind: rows_of(kind) for kind in registry.names("data")
    }
