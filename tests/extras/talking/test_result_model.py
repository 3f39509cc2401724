from __future__ import annotations

from pathlib import Path

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import UserError
from hetero_framework.extras.talking.result_model import with_result


@pytest.mark.parametrize("objective", ["classification", "image-classification"])
def test_a_classifier_answers_no_prompts(objective: str, tmp_path: Path) -> None:
    raw = {
        "coordinator": {"ip": "127.0.0.1"},
        "workers": [],
        "shard_plan": [{"id": "local", "start": 0, "end": 2}],
        "model": {"from_config": {"model_type": "llama"}},
        "training": {"objective": objective},
    }
    with pytest.raises(UserError, match=f'the objective "{objective}" answers no prompts'):
        with_result(Config.from_dict(raw, tmp_path), None, base=False, local=False)
