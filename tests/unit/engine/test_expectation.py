"""Tensors that are accepted or refused by their header alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hetero_framework.core import timeouts
from hetero_framework.core.codecs import CODECS
from hetero_framework.core.messages import (
    Backward,
    BoundaryTensor,
    Coded,
    Forward,
    Inputs,
    Message,
    SideForm,
    Step,
)
from hetero_framework.core.tensors import to_wire
from hetero_framework.engine import expectation
from hetero_framework.engine.expectation import Expectation, incoming_forms, rows_and_tokens
from hetero_framework.errors import PeerLostError, ProtocolError
from hetero_framework.models.sizing.footprint import Form
from tests.installed import needs
from tests.waiting import WAIT_S

HIDDEN = torch.zeros(2, 7, 4)
MOST = HIDDEN.nbytes


class Stage:
    """Wants hidden states of four numbers per token."""

    def __init__(self, index: int) -> None:
        self.index = index

    def arrival_problem(self, forms: Sequence[Form], rows: int, tokens: int) -> str | None:
        wanted = (rows, tokens, 4)
        return None if forms[0][0] == wanted else f"{forms[0][0]}, not {wanted}"


def made(attempt: int = 1, micro_batches: int = 3) -> Expectation:
    """Of stages 1 and 3, in an attempt."""
    found = Expectation([Stage(1), Stage(3)])  # type: ignore[list-item]
    found.max_boundary_bytes = MOST
    found.begin(attempt, micro_batches)
    return found


def frame(
    kind: type[BoundaryTensor],
    *tensors: torch.Tensor,
    attempt: int = 1,
    stage: int = 1,
    k: int = 0,
    coded: Coded | None = None,
    sides: tuple[SideForm, ...] | None = None,
) -> tuple[Any, Any, int]:
    message = Message(kind(0, attempt, stage, k, coded, sides), tuple(map(to_wire, tensors)))
    return message.body, message.shapes, message.payload_bytes


def test_an_awaited_tensor_is_accepted_once():
    awaited = made()
    awaited.inputs(1, 1, 0, {"input_ids": (2, 7), "labels": (2, 7)})
    awaited.check(*frame(Forward, HIDDEN))
    with pytest.raises(ProtocolError, match=r"^FORWARD of micro-batch 0 for stage 1 came a second"):
        awaited.check(*frame(Forward, HIDDEN))
    awaited.check(*frame(Forward, HIDDEN, k=1))
    awaited.check(*frame(Forward, HIDDEN, stage=3))


def test_tensors_must_match_the_size_of_their_micro_batch():
    awaited = made()
    for k in (0, 1):
        awaited.inputs(1, 1, k, {"attention_mask": (2, 7)})
    awaited.inputs(0, 1, 2, {"attention_mask": (1, 1)})  # of an attempt that is over
    with pytest.raises(
        ProtocolError, match=r"^FORWARD of .* stage 1: \(2, 6, 4\), not \(2, 7, 4\)"
    ):
        awaited.check(*frame(Forward, HIDDEN[:, :6]))
    awaited.check(*frame(Forward, HIDDEN, k=1))
    awaited.check(*frame(Forward, HIDDEN[:, :6], k=2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stage": 2}, "stage 2: that stage is not held here"),
        ({"k": 3}, "the step has 3 micro-batches"),
        ({"attempt": 2, "stage": 2}, "not held here"),
    ],
)
def test_a_tensor_that_no_stage_awaits_is_refused(change, text):
    with pytest.raises(ProtocolError, match=text):
        made().check(*frame(Forward, HIDDEN, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("attempt", [0, 1, 2])
def test_a_frame_larger_than_any_boundary_is_refused(attempt):
    large = torch.zeros(2, 8, 4)
    text = f"FORWARD of micro-batch 0 for stage 1 has {large.nbytes} bytes; at most {MOST} cross"
    with pytest.raises(ProtocolError, match=f"^{text}"):
        made().check(*frame(Forward, large, attempt=attempt))
    with pytest.raises(ProtocolError, match=f"^{text}"):
        made().check_passing(*frame(Forward, large, attempt=attempt))
    made().check_passing(*frame(Forward, HIDDEN, stage=7))


@needs("codecs")
def test_bytes_once_decoded_count_too():
    shape = (2, 8, 4)
    parts = CODECS["int8"].encode(torch.zeros(shape))
    coded = Coded("int8", shape, "float32")
    assert sum(part.nbytes for part in parts) < MOST
    with pytest.raises(ProtocolError, match="at most 224 cross"):
        made().check(*frame(Forward, *parts, coded=coded))
    with pytest.raises(ProtocolError, match="cannot read codec"):
        made().check(*frame(Forward, *parts, coded=Coded("zip", shape, "float32")))
    with pytest.raises(ProtocolError, match="comes as"):
        made().check(*frame(Forward, *parts, coded=Coded("int8", (1, 8, 4), "float32")))


def test_gradients_match_the_sent_tensors_and_come_after_them():
    awaited = made()
    side = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(ProtocolError, match=r"^BACKWARD of .* stage 1 came before its forward"):
        awaited.check(*frame(Backward, HIDDEN))
    awaited.sent(1, 1, 1, (HIDDEN[:, :6], side, torch.zeros(9)))
    awaited.sent(0, 1, 2, (HIDDEN,))
    wanted = "2 x 6 x 4 of float32, 2 x 3 of float32"
    with pytest.raises(ProtocolError, match=f"is 2 x 6 x 4 of float32, expected {wanted}$"):
        awaited.check(*frame(Backward, HIDDEN[:, :6], k=1))
    with pytest.raises(ProtocolError, match="before its forward"):
        awaited.check(*frame(Backward, HIDDEN, k=2))
    awaited = made()
    awaited.sent(1, 1, 1, (HIDDEN[:, :6], side, torch.zeros(9)))
    forms = (SideForm(False),)
    awaited.check(*frame(Backward, HIDDEN[:, :6], side.detach(), k=1, sides=forms))


def test_tensors_of_later_steps_wait_beyond_a_few(monkeypatch):
    awaited = made(attempt=1)
    for k in range(expectation._MOST_EARLY):
        awaited.check(*frame(Forward, HIDDEN, attempt=2, k=k))
    waiting = threading.Event()
    wait = awaited._changed.wait

    def seen(timeout: float) -> bool:
        waiting.set()
        return wait(timeout)

    monkeypatch.setattr(awaited._changed, "wait", seen)
    later = frame(Forward, HIDDEN, attempt=2, k=4)
    thread = threading.Thread(target=lambda: awaited.check(*later))
    thread.start()
    assert waiting.wait(WAIT_S)
    awaited.begin(2, 8)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with pytest.raises(ProtocolError, match="a second time"):
        awaited.check(*later)
    with pytest.raises(ProtocolError, match="a second time"):
        awaited.check(*frame(Forward, HIDDEN, attempt=2, k=0))


@pytest.mark.parametrize("ends", ["closed", "too late"])
def test_a_tensor_without_its_step_is_refused(ends, monkeypatch):
    awaited = made()
    for k in range(expectation._MOST_EARLY):
        awaited.check(*frame(Forward, HIDDEN, attempt=2, k=k))
    if ends == "closed":
        awaited.close()
    else:
        monkeypatch.setattr(timeouts, "LIVENESS_S", 0.0)
        monkeypatch.setattr(timeouts, "TICK_S", 0.01)
    with pytest.raises(PeerLostError, match="its step does not begin"):
        awaited.check(*frame(Forward, HIDDEN, attempt=2, k=4))


def test_readers_hear_of_steps_and_inputs_before_the_computing_thread():
    awaited = made()
    step = Step(0, 2, True, 2, 1, 1.0, False, 0, (1, 1, 1, 1), (), (), (), 0.0, ())
    awaited.hear(Message(step))
    inputs = Inputs(0, 2, 1, 0, ("labels",), {"attention_mask": (2, 6)})
    awaited.hear(Message(inputs, (to_wire(torch.zeros(2, 6, dtype=torch.int32)),)))
    awaited.begin(2, 2)  # the computing thread, later: nothing is forgotten
    with pytest.raises(ProtocolError, match="not"):
        awaited.check(*frame(Forward, HIDDEN, attempt=2))
    with pytest.raises(ProtocolError, match="the step has 2 micro-batches"):
        awaited.check(*frame(Forward, HIDDEN, attempt=2, k=2))
    awaited.check(*frame(Forward, HIDDEN, attempt=1))  # it is dropped
    awaited.check(*frame(Forward, HIDDEN, attempt=1))


def test_size_of_a_micro_batch_is_that_of_its_first_known_input():
    assert rows_and_tokens({"input_ids": (5, 5), "labels": (2, 7)}) == (2, 7)
    assert rows_and_tokens({"labels": (2, 7), "attention_mask": (2, 8, 1)}) == (2, 8)
    assert rows_and_tokens({"position_ids": (3, 2, 7), "positions": (2,)}) == (2, 7)
    assert rows_and_tokens({"input_ids": (5, 5)}) is None
    assert rows_and_tokens({"labels": (5,)}) is None


def test_gradient_of_an_integer_is_refused_by_the_header():
    body, shapes, _ = frame(
        Forward, HIDDEN, torch.zeros(2, dtype=torch.int64), sides=(SideForm(True),)
    )
    with pytest.raises(ProtocolError, match=r"a gradient for a tensor of torch.int64"):
        incoming_forms(body, shapes)
