from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.core.messages import (
    Commit,
    GradientNorms,
    LoadState,
    Message,
    RoundTrip,
    StageFigures,
    State,
    Step,
    decode,
    encode,
)
from hetero_framework.engine import wire_forms
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.stage_api import (
    GradientReport,
    HostReport,
    StatePart,
    StepInfo,
    Tensors,
)

INFO = StepInfo(step=3, attempt=1, train=True, micro_batches=4, num_items=99, loss_scale=8.0)
ADDRESS = {"step": 3, "attempt": 1, "stage": 2, "micro_batch": 5}


LANES = st.lists(st.tuples(st.sampled_from([FORWARD, BACKWARD]), st.integers(0, 99))).map(tuple)
SCHEDULES = st.builds(
    StepSchedule,
    st.lists(st.integers(1, 99), min_size=1, max_size=6).map(tuple),
    tasks=LANES,
    sends=LANES,
    receives=LANES,
    order_timeout_s=st.floats(0, 1e6),
    direct=st.frozensets(st.integers(0, 5)),
)


def travelled(message: Message) -> Message:
    return decode(b"".join(encode(message)))


def travelled_inputs(inputs: Tensors) -> Message:
    return travelled(wire_forms.inputs_message(INFO, 2, 5, wire_forms.pack_inputs(inputs)))


# ---- STEP


@given(SCHEDULES, st.booleans())
def test_a_step_message_carries_info_and_schedule(schedule, train):
    info = StepInfo(7, 2, train, micro_batches=4, num_items=10, loss_scale=0.5)
    message = travelled(wire_forms.step_message(info, schedule))
    assert wire_forms.step_info(message.expect(Step)) == info
    assert wire_forms.step_schedule(message.expect(Step)) == schedule


# ---- INPUTS


def test_inputs_are_sent_in_half_of_their_bytes_and_masks_in_none():
    inputs = {
        "input_ids": torch.tensor([[1, 2, 250_000], [4, 5, 6]]),
        "attention_mask": torch.ones(2, 3, dtype=torch.int64),
        "labels": torch.tensor([[-100, 2, 3], [4, 5, -100]]),
        "position_ids": torch.arange(3)[None],
        "pixels": torch.randn(2, 3, dtype=torch.float32),
    }
    message = travelled_inputs(inputs)
    assert message.payload_bytes == (6 + 6 + 3) * 4 + 6 * 4
    assert message.body.ones == {"attention_mask": (2, 3)}
    assert {key: getattr(message.body, key) for key in ADDRESS} == ADDRESS
    found = wire_forms.inputs_of(message)
    assert found.keys() == inputs.keys()
    for name, tensor in inputs.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("attention_mask", torch.tensor([[1, 1, 0]])),
        ("attention_mask", torch.tensor([[1, 1, 2]])),
        ("attention_mask", torch.ones(1, 3, dtype=torch.bool)),
        ("attention_mask", torch.ones(1, 3)),
        ("labels", torch.ones(1, 3, dtype=torch.int64)),
    ],
    ids=["padding", "two", "bool", "float", "labels of ones"],
)
def test_a_tensor_that_is_no_mask_of_ones_travels(name, tensor):
    message = travelled_inputs({name: tensor})
    assert (message.body.ones, message.body.names) == ({}, (name,))
    found = wire_forms.inputs_of(message)[name]
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_inputs_lie_in_memory_of_their_own():
    """Their message's buffer goes back at once."""
    inputs = {"pixels": torch.ones(3), "labels": torch.ones(1, 2, dtype=torch.int32)}
    message = wire_forms.inputs_message(INFO, 2, 5, wire_forms.pack_inputs(inputs))
    found = wire_forms.inputs_of(message)
    for tensor in inputs.values():
        tensor.zero_()
    assert all(bool((tensor == 1).all()) for tensor in found.values())


# ---- tensors over boundaries, and what comes back


def test_gradient_norms_bring_bad_micro_batches_and_figures():
    reports = {
        1: GradientReport(torch.tensor([1.0, 2.0]), nonfinite=(3,)),
        4: GradientReport(torch.tensor([0.5])),
    }
    figures = {k: StageFigures(0.5, 0.25, 1, 2, k, 0.0, 0.125) for k in reports}
    report = HostReport(reports, figures, {2: 0.5}, 7)
    message = travelled(wire_forms.gradient_norms_message(INFO, report))
    body = message.expect(GradientNorms)
    assert [(entry.index, entry.figures) for entry in body.stages] == list(figures.items())
    assert (body.round_trips, body.direct_bytes) == ((RoundTrip(2, 0.5),), 7)
    arrived = wire_forms.host_report(message)
    assert (arrived.figures, arrived.round_trips, arrived.direct_bytes) == (figures, {2: 0.5}, 7)
    found = arrived.gradients
    assert list(found) == [1, 4]
    assert torch.equal(found[1].norms, reports[1].norms)
    assert found[1].nonfinite == (3,)
    assert torch.equal(found[4].norms, reports[4].norms)


@pytest.mark.parametrize("names", [(), ("embed",), ("a", "b")])
def test_commit_carries_the_weights_that_the_worker_has_ties_to(names):
    weights = {name: torch.full((2,), float(k)) for k, name in enumerate(names)}
    message = travelled(wire_forms.commit_message(Commit(3, 1, 1e-3, 0.25), weights))
    assert message.body == Commit(3, 1, 1e-3, 0.25, names)
    found = wire_forms.tied_weights(message)
    assert list(found) == list(names)
    assert all(torch.equal(found[name], weights[name]) for name in names)


@pytest.mark.parametrize("kind", [State, LoadState])
def test_part_of_a_state_arrives_as_it_was(kind):
    part = StatePart({"a": torch.ones(2), "b": torch.zeros(0)}, {"step": 3}, last=True)
    message = travelled(wire_forms.part_message(kind, 2, "checkpoint", 7, part))
    assert (message.body.stage, message.body.part) == (2, 7)
    found = wire_forms.state_part(message)
    assert (list(found.tensors), found.values, found.last) == (["a", "b"], {"step": 3}, True)
    assert all(torch.equal(found.tensors[name], part.tensors[name]) for name in part.tensors)
