"""A whole run in this process: a real tiny model, one stage, no worker and no socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetero_framework.config import Config
from tests.samples import save_llama, save_texts

Alone = Callable[..., Config]


@pytest.fixture(scope="session")
def alone_model(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def alone(alone_model, tmp_path, verdicts):
    """Configurations of one process: four steps over eight lines, into `tmp_path / name`."""
    texts = save_texts(tmp_path / "texts.jsonl", 8)

    def config(name: str = "run", *, training: dict[str, Any] | None = None, **sections: Any):
        settings = {
            "output_dir": str(tmp_path / name),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "report_to": "none",
            "visualize": False,
            "verify_architecture": False,
            **(training or {}),
        }
        return Config.from_dict(
            {
                "coordinator": {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"},
                "workers": [],
                "shard_plan": [{"id": "local", "start": 0, "end": 1}],
                "model": {"name_or_path": str(alone_model)},
                "data": {"train": str(texts), "max_length": 32},
                "training": settings,
                **sections,
            }
        )

    return config
