"""The table of losses of pairs, and one more that a user's file adds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_framework import control
from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.extras.preferences.pair_losses import PAIR_LOSSES, Pairs
from hetero_framework.extras.preferences.settings import PreferenceSettings
from hetero_framework.models.cut.objectives import objective_of
from tests.unit.models.cut.test_objectives import RAW

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "objectives.md").read_text()


def config_of(**training: Any) -> Config:
    return Config.from_dict({**RAW, "training": training})


def test_the_page_has_each_loss():
    cells = {
        "dpo": re.search(r"^\| `loss_type` \| (`sigmoid`.*), or a list", PAGE, re.MULTILINE),
        "cpo": re.search(r"`loss_type` \(one of ([^)]*)\)", PAGE),
    }
    for objective, cell in cells.items():
        assert set(re.findall(r"`(\w+)`", cell[1])) == PAIR_LOSSES[objective].keys()


def test_the_pages_loss_is_known_and_read_and_computed(tmp_path, monkeypatch):
    own = {"objective": "dpo", "loss_type": ["sigmoid", "margin_squares"]}
    with pytest.raises(ConfigError, match=r"margin_squares.* is none of sigmoid, hinge,"):
        config_of(**own)
    monkeypatch.setitem(PAIR_LOSSES, "dpo", dict(PAIR_LOSSES["dpo"]))
    monkeypatch.setattr(control, "_imported", [])
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (program,) = [text for text in programs if "register_pair_loss" in text]
    (tmp_path / "own.py").write_text(program)
    control.import_file(tmp_path / "own.py")
    config = config_of(**own, label_smoothing=0.25, beta=0.5)
    assert not any("label_smoothing" in line for line in config.warnings())
    objective: Any = objective_of(config.training)
    ratios_B, logps_B = torch.tensor([3.0, 1.0]), torch.zeros(2)
    found = PAIR_LOSSES["dpo"]["margin_squares"](
        config.training, ratios_B, logps_B, torch.ones(2, dtype=torch.int64)
    )
    assert found.tolist() == [(0.75 - 0.5 * 2) ** 2]
    assert [each.function.__name__ for each, _ in objective._losses] == [
        "_sigmoid",
        "margin_squares",
    ]


def test_a_loss_of_means_is_given_means():
    ratios_B, lengths_B = torch.tensor([8.0, 3.0]), torch.tensor([4, 1])
    training = config_of(objective="dpo", loss_type="ipo", beta=0.5).training
    assert PAIR_LOSSES["dpo"]["ipo"](training, ratios_B, ratios_B, lengths_B).item() == 4.0
    pairs = Pairs(*ratios_B.chunk(2), ratios_B, lengths_B)
    assert pairs.delta_P.tolist() == [5.0]


def test_a_loss_checks_its_settings():
    with pytest.raises(ConfigError, match="exo_pair needs a label_smoothing above 0"):
        config_of(objective="dpo", loss_type=["sigmoid", "exo_pair"])


@pytest.mark.parametrize(
    "training", [{"loss_type": "nll"}, {"loss_type": "simpo", "objective": "cpo"}]
)
def test_loss_type_is_one_of_the_objectives(training):
    assert PreferenceSettings(**training).losses == (training["loss_type"],)
    with pytest.raises(ValueError, match="is none of"):
        PreferenceSettings(**{**training, "loss_type": "dft"})
