from __future__ import annotations

from pathlib import Path

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import UserError
from hetero_framework.extras.talking.result_model import with_result
from tests.samples import machines_here


@pytest.mark.parametrize("objective", ["classification", "image-classification"])
def test_a_classifier_answers_no_prompts(objective: str, tmp_path: Path) -> None:
    raw = {**machines_here(("local", 2)), "training": {"objective": objective}}
    raw["model"] = {"from_config": {"model_type": "llama"}}
    with pytest.raises(UserError, match=f'the objective "{objective}" answers no prompts'):
        with_result(Config.from_dict(raw, tmp_path), None, base=False, local=False)
