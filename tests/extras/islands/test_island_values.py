"""Values that another island sends: each is checked where it arrives, and that island is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hetero_framework.errors import CheckpointError, ProtocolError
from hetero_framework.extras.islands.links import Received, check_finite
from hetero_framework.extras.islands.summed_steps import SummedSteps, _decision
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState

NAN, INF = float("nan"), float("inf")
SESSION = cast(Any, SimpleNamespace(leader="a", members=("a", "b")))
SECONDS = {"a": 1.0, "b": 0.5}
YES = {"outcome": [None, ""], "seconds": SECONDS}


def test_a_decision_has_a_norm_and_the_times_of_all():
    norm = torch.tensor(2.0)
    assert _decision(Received({"norm": norm}, YES), SESSION) == (StepOutcome(), SECONDS, norm)
    skip = StepOutcome("rule", "it is small")
    no = {**YES, "outcome": skip.as_info()}
    assert _decision(Received({"norm": torch.tensor(NAN)}, no), SESSION)[0] == skip


@pytest.mark.parametrize(
    ("norm", "changes"),
    [
        (None, {}),
        (torch.ones(2), {}),
        (torch.tensor(NAN), {}),
        (torch.tensor(INF), {}),
        (torch.tensor(1.0), {"outcome": None}),
        (torch.tensor(1.0), {"outcome": ["later", ""]}),
        (torch.tensor(1.0), {"outcome": [None, "but why"]}),
        (torch.tensor(1.0), {"outcome": ["rule", 1]}),
        (torch.tensor(1.0), {"seconds": {"a": 1.0}}),
        (torch.tensor(1.0), {"seconds": {"a": 1.0, "b": NAN}}),
        (torch.tensor(1.0), {"seconds": {"a": 1.0, "b": -1.0}}),
        (torch.tensor(1.0), {"seconds": {"a": 1.0, "b": "1"}}),
        (torch.tensor(1.0), {"seconds": 3}),
    ],
)
def test_a_decision_that_cannot_be_is_refused(norm, changes):
    tensors = {} if norm is None else {"norm": norm}
    with pytest.raises(ProtocolError, match=r"^island [ab] "):
        _decision(Received(tensors, {**YES, **changes}), SESSION)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_tensor_that_is_not_finite_names_the_island(value):
    check_finite({"w": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}, "b")
    with pytest.raises(ProtocolError, match=r"^island b sends 'v', which is not finite"):
        check_finite({"w": torch.ones(2), "v": torch.tensor([1.0, value])}, "b")


POSITION = TrainState(step=3, group={"lineage": "0f"}).state_dict()


def taken_over(position: Any, tensors: dict[str, torch.Tensor] | None = None) -> TrainState:
    """What an island makes of this state of island b; the stages have a place for "w" alone."""

    def take_over(tensors: dict[str, Any], values: Any, state: Any) -> None:
        if tensors.keys() != {"w"}:
            raise CheckpointError("stage 0 has no trainable parameter")

    steps = object.__new__(SummedSteps)
    steps._checkpoints = cast(Any, SimpleNamespace(take_over=take_over))
    found = Received({"w": torch.ones(1)} if tensors is None else tensors, {"position": position})
    return steps._take_over(cast(Any, SimpleNamespace(receive=lambda *asked: found)), "b")


def test_a_state_is_taken_over():
    assert taken_over(POSITION).step == 3


@pytest.mark.parametrize(
    ("position", "tensors"),
    [
        (None, None),
        ([1], None),
        ({}, None),
        *[({**POSITION, "step": step}, None) for step in (-1, 2**63, "3", 1.0, True, None)],
        ({**POSITION, "tokens": -1}, None),
        ({**POSITION, "skipped": "x"}, None),
        ({**POSITION, "loss_scale": -2.0}, None),
        ({**POSITION, "loss_scale": "x"}, None),
        ({**POSITION, "group": []}, None),
        ({**POSITION, "group": {}}, None),
        *[
            ({**POSITION, "group": {"lineage": "0f", "shares": shares}}, None)
            for shares in ({"of": {"a": 0.0}, "taken_at": 1}, {"of": [1]}, {"of": {"a": -1.0}}, 7)
        ],
        (POSITION, {"w": torch.tensor([NAN])}),
        (POSITION, {"v": torch.ones(1)}),
        (POSITION, {}),
    ],
)
def test_a_state_that_cannot_be_names_the_island(position, tensors):
    with pytest.raises(ProtocolError, match=r"^island b sends"):
        taken_over(position, tensors)
