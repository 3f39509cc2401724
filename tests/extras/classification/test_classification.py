from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from hetero_framework.config import TrainingConfig
from hetero_framework.models.cut.objectives import objective_of


@pytest.mark.parametrize("labels", [torch.ones(2, 5, dtype=torch.int64), torch.tensor([1, 2])])
def test_a_probe_has_a_label_for_each_text(labels: torch.Tensor) -> None:
    """Of made-up token ids, and of a micro-batch of the run."""
    objective = objective_of(TrainingConfig(objective="classification"))
    inputs = {"input_ids": torch.ones(2, 5, dtype=torch.int64), "labels": labels}
    assert objective.probe_inputs(LlamaConfig(), inputs)["labels"].tolist() == [0, 0]
