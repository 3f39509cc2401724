from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical

from hetero_framework.errors import ArchitectureError, ProtocolError
from hetero_framework.models.cut import token_metrics as module
from hetero_framework.models.cut.token_metrics import SUMS, TokenSums, token_metrics

LABELS = torch.tensor([[3, 1, -100, 2], [0, -100, 4, 4]])


def sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counted = TokenSums()
    counted.look(logits, labels)
    assert counted.total is not None
    return counted.total


@pytest.mark.parametrize("at_once", [1, 10, 1000])
def test_sums_are_those_of_the_tokens_with_labels(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOGITS", at_once)
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    places = [(row, token) for row in range(2) for token in range(3) if LABELS[row, token + 1] >= 0]
    entropy = sum(float(Categorical(logits=logits[place]).entropy()) for place in places)
    hits = sum(int(logits[r, t].argmax()) == int(LABELS[r, t + 1]) for r, t in places)
    assert sums(logits, LABELS).tolist() == pytest.approx([entropy, hits, 4])


def test_tokens_that_the_model_rules_out_add_nothing() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, -math.inf, -math.inf]]])
    found = sums(logits, torch.tensor([[0, 1]]))
    assert found.tolist() == pytest.approx([math.log(2), 0, 1])


def test_metrics_are_means_over_micro_batches_each_a_mean_over_its_tokens() -> None:
    named = [{SUMS: torch.tensor(values)} for values in ([6.0, 1.0, 2.0], [1.0, 1.0, 1.0])]
    assert token_metrics(named) == {"entropy": 2.0, "mean_token_accuracy": 0.75}
    assert token_metrics([{SUMS: torch.zeros(3)}]) == {"entropy": 0, "mean_token_accuracy": 0}
    assert token_metrics([]) == {}


@pytest.mark.parametrize("named", [{}, {SUMS: torch.zeros(2)}, {SUMS: torch.zeros(3).long()}])
def test_other_tensors_of_a_peer_are_refused(named: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ProtocolError, match="the last stage gave no sums"):
        token_metrics([{SUMS: torch.zeros(3)}, named])


def test_logits_that_are_no_rows_of_tokens_are_refused() -> None:
    with pytest.raises(ArchitectureError, match="no prediction for each token"):
        TokenSums().look(torch.zeros(2, 3, 5), LABELS)
