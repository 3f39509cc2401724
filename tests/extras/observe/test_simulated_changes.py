"""Predictions count the bytes that are really sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_framework.core import codecs
from hetero_framework.extras.observe import simulated_changes
from hetero_framework.extras.observe.measured import Boundary, StageTimes

STAGES = tuple(StageTimes(k, k, 2 * k, 2 * k + 2, 1.0, 2.0, 1.0) for k in range(2))
BOUNDARY = Boundary(0, "direct", 1.0, 2.0, 0.0, 4 * 64 * 64, 4 * 64 * 64, "float32", "")


def plan(**changes: Any) -> simulated_changes.MeasuredPlan:
    return simulated_changes.MeasuredPlan(STAGES, (Boundary(**{**vars(BOUNDARY), **changes}),))


def test_a_codec_scales_transfers_by_its_bytes() -> None:
    found = {idea.kind: idea.plan.boundaries[0] for idea in simulated_changes._codecs(plan(), 4)}
    assert list(found) == ["bf16", "int8"]
    for name, boundary in found.items():
        share = codecs.CODECS[name].nbytes((64, 64), torch.float32) / (4 * 64 * 64)
        assert boundary.forward_s == pytest.approx(share)
        assert boundary.backward_s == pytest.approx(2 * share)
        assert boundary.latency_s > 0


def test_an_added_codec_becomes_a_simulated_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(codecs.BFloat16):
        name = "half"

    monkeypatch.setitem(codecs.CODECS, "half", Half())
    assert [idea.kind for idea in simulated_changes._codecs(plan(), 4)] == ["bf16", "int8", "half"]


@pytest.mark.parametrize(
    "changes", [{"codec": "bf16"}, {"way": "same process"}, {"dtype": "load"}, {"dtype": ""}]
)
def test_no_codec_where_none_can_help(changes: dict[str, str]) -> None:
    assert simulated_changes._codecs(plan(**changes), 4) == []
