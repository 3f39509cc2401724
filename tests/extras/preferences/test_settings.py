"""Settings of preferences."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.extras.preferences.settings import PreferenceSettings


@pytest.mark.parametrize(
    "training", [{"loss_type": "nll"}, {"loss_type": "simpo", "objective": "cpo"}]
)
def test_loss_type_is_one_of_the_objectives(training: dict[str, Any]) -> None:
    assert PreferenceSettings(**training).losses == (training["loss_type"],)
    with pytest.raises(ValueError, match="is none of"):
        PreferenceSettings(**{**training, "loss_type": "dft"})
