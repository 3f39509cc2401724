"""Conversion between the engine's types and messages. No sockets, no stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import torch

from hetero_framework.core import messages as m
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import Message
from hetero_framework.core.planned_order import packed, unpacked
from hetero_framework.core.tensors import from_wire, to_wire
from hetero_framework.engine import stage_api as api
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.errors import ProtocolError

PackedInput = WireTensor | tuple[int, ...]  # bytes, or the shape of a tensor of ones


def step_message(info: api.StepInfo, schedule: StepSchedule) -> Message:
    body = m.Step(
        **{field.name: getattr(info, field.name) for field in fields(info)},
        in_flight_limits=schedule.in_flight_limits,
        tasks=tuple(map(packed, schedule.tasks)),
        sends=tuple(map(packed, schedule.sends)),
        receives=tuple(map(packed, schedule.receives)),
        order_timeout_s=schedule.order_timeout_s,
        direct=tuple(sorted(schedule.direct)),
    )
    return Message(body)


def step_info(step: m.Step) -> api.StepInfo:
    names = (field.name for field in fields(api.StepInfo))
    return api.StepInfo(**{name: getattr(step, name) for name in names})


def step_schedule(step: m.Step) -> StepSchedule:
    return StepSchedule(
        step.in_flight_limits,
        tasks=tuple(map(unpacked, step.tasks)),
        sends=tuple(map(unpacked, step.sends)),
        receives=tuple(map(unpacked, step.receives)),
        order_timeout_s=step.order_timeout_s,
        direct=frozenset(step.direct),
    )


def pack_inputs(inputs: api.Tensors) -> dict[str, PackedInput]:
    """Batch tensors as they travel: int64 as int32, an attention mask of ones as its shape."""
    return {
        name: tuple(tensor.shape)
        if name == "attention_mask" and tensor.dtype == torch.int64 and bool((tensor == 1).all())
        else to_wire(tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor)
        for name, tensor in inputs.items()
    }


def inputs_message(
    info: api.StepInfo, stage: int, micro_batch: int, packed: Mapping[str, PackedInput]
) -> Message:
    sent = {name: value for name, value in packed.items() if isinstance(value, WireTensor)}
    ones = {name: value for name, value in packed.items() if not isinstance(value, WireTensor)}
    body = m.Inputs(info.step, info.attempt, stage, micro_batch, tuple(sent), ones)
    return Message(body, tuple(sent.values()))


def inputs_of(message: Message) -> api.Tensors:
    """The batch tensors of INPUTS, in memory of their own."""
    body = message.expect(m.Inputs)
    inputs = {
        name: tensor.to(torch.int64) if tensor.dtype == torch.int32 else tensor.clone()
        for name, tensor in zip(body.names, map(from_wire, message.tensors), strict=True)
    }
    for name, shape in body.ones.items():
        inputs[name] = torch.ones(shape, dtype=torch.int64)
    return inputs


def loss_message(info: api.StepInfo, micro_batch: int, outcome: api.Outcome) -> Message:
    """LOSS with an outcome whose tensors are on the CPU."""
    named, loss = outcome.named, float(outcome.loss)
    body = m.Loss(info.step, info.attempt, micro_batch, loss, tuple(named) or None)
    return Message(body, tuple(map(to_wire, named.values())))


def outcome(message: Message) -> api.Outcome:
    """The content of LOSS, in memory of its own."""
    body = message.expect(m.Loss)
    tensors = (from_wire(tensor).clone() for tensor in message.tensors)
    return api.Outcome(body.loss, dict(zip(body.names or (), tensors, strict=True)))


def gradient_norms_message(info: api.StepInfo, report: api.HostReport) -> Message:
    tensors, entries = [], []
    for index, gradients in report.gradients.items():
        entries.append(m.StageReport(index, gradients.nonfinite, report.figures[index]))
        tensors.append(to_wire(gradients.norms))
    trips = tuple(m.RoundTrip(worker, seconds) for worker, seconds in report.round_trips.items())
    body = m.GradientNorms(info.step, info.attempt, tuple(entries), trips, report.direct_bytes)
    return Message(body, tensors)


def host_report(message: Message) -> api.HostReport:
    body = message.expect(m.GradientNorms)
    count, wanted = len(message.tensors), len(body.stages)
    if count != wanted:
        raise ProtocolError(f"GRADIENT_NORMS: {wanted} tensors expected, got {count}")
    gradients = {
        entry.index: api.GradientReport(from_wire(norms), entry.nonfinite)
        for entry, norms in zip(body.stages, message.tensors, strict=True)
    }
    return api.HostReport(
        gradients,
        {entry.index: entry.figures for entry in body.stages},
        {trip.worker_id: trip.seconds for trip in body.round_trips},
        body.direct_bytes,
    )


def gradients_message(info: api.StepInfo, given: api.GradientPart) -> Message:
    names, last = tuple(given.part.tensors), given.part.last
    body = m.Gradients(info.step, info.attempt, given.stage, given.number, last, names)
    return Message(body, tuple(map(to_wire, given.part.tensors.values())))


def gradient_part(message: Message) -> api.GradientPart:
    """The content of GRADIENTS; its tensors lie in the message's buffer."""
    body = message.expect(m.Gradients)
    tensors = dict(zip(body.names, map(from_wire, message.tensors), strict=True))
    part = api.StatePart(tensors, {}, body.last, message.release)
    return api.GradientPart(body.stage, body.part, part)


def commit_message(order: m.Commit, tied_weights: api.Tensors) -> Message:
    body = replace(order, names=tuple(tied_weights))
    return Message(body, tuple(map(to_wire, tied_weights.values())))


def tied_weights(message: Message) -> api.Tensors:
    """The new weights in a COMMIT, by source, for targets in the receiver's stages."""
    names = message.expect(m.Commit).names
    return dict(zip(names, map(from_wire, message.tensors), strict=True))


def part_message(
    kind: type[m.State] | type[m.LoadState], stage: int, what: str, number: int, part: api.StatePart
) -> Message:
    """STATE or LOAD_STATE with part `number` of a stage's "checkpoint", "export", ..."""
    names = tuple(part.tensors)
    body = kind(stage, what, number, part.last, names, part.values)  # type: ignore[arg-type]
    return Message(body, tuple(map(to_wire, part.tensors.values())))


def state_part(message: Message) -> api.StatePart:
    """The part carried by STATE or LOAD_STATE; its tensors lie in the message's buffer."""
    body = message.body
    assert isinstance(body, (m.State, m.LoadState))
    tensors = dict(zip(body.names, map(from_wire, message.tensors), strict=True))
    return api.StatePart(tensors, body.info, body.last, message.release)
