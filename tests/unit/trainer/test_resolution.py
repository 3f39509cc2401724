"""Open settings are decided in one validated configuration, which remembers the reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

import hetero_framework
from hetero_framework.errors import ConfigError
from hetero_framework.trainer.resolution import Decision, Resolved


def test_decide_sets_the_setting_and_keeps_the_reason(alone):
    given = alone()
    resolved = (
        Resolved.start(given)
        .decide("training.loss_chunk_tokens", 64, "small")
        .decide("shard_plan[0].gradient_checkpointing", True, "tight")
    )
    assert resolved.given is given
    assert resolved.config.training.loss_chunk_tokens == 64
    assert resolved.config.checkpointing(0) is True
    assert resolved.config.output_dir == given.output_dir
    assert resolved.decisions == (
        Decision("training.loss_chunk_tokens", 64, "small"),
        Decision("shard_plan[0].gradient_checkpointing", True, "tight"),
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("training.loss_chunk_tokens", -1),
        ("training.no_such_setting", 1),
        ("shard_plan[0].start", 7),
    ],
)
def test_decide_refuses_values_that_a_file_could_not_have(alone, setting, value):
    with pytest.raises(ConfigError):
        Resolved.start(alone()).decide(setting, value, "")


def test_nothing_in_the_package_changes_a_configuration_unchecked():
    """pydantic's `model_copy` and `model_construct` skip validation. The planner's profiles are no
    configurations."""
    root = Path(hetero_framework.__file__).parent
    files = [file for file in root.rglob("*.py") if file.parent != root / "extras" / "planner"]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert "model_copy(" not in text
    assert "model_construct(" not in text
