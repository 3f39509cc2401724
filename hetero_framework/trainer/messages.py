"""The trainer's side of the wire: its nouns to messages and back. No sockets, no stages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetero_framework.core.protocol import Message, MessageType
from hetero_framework.core.tensors import from_wire, to_wire
from hetero_framework.trainer.runner import Arrival
from hetero_framework.trainer.verbs import GradientReport, StatePart, StepInfo, Tensors


def step_message(info: StepInfo) -> Message:
    return Message(
        MessageType.STEP,
        {
            "step": info.step,
            "attempt": info.attempt,
            "train": info.train,
            "micro_batches": info.micro_batches,
            "num_items": info.num_items,
            "loss_scale": info.loss_scale,
        },
    )


def step_info(message: Message) -> StepInfo:
    return StepInfo(**message.meta)


def inputs_message(info: StepInfo, stage: int, micro_batch: int, inputs: Tensors) -> Message:
    return Message(
        MessageType.INPUTS,
        {**_address(info, stage, micro_batch), "names": list(inputs)},
        tuple(to_wire(tensor) for tensor in inputs.values()),
    )


def inputs_of(message: Message) -> Tensors:
    return dict(zip(message.meta["names"], map(from_wire, message.tensors), strict=True))


def hidden_message(info: StepInfo, stage: int, k: int, hidden_BSD: torch.Tensor) -> Message:
    return Message(MessageType.FORWARD, _address(info, stage, k), (to_wire(hidden_BSD),))


def gradient_message(
    info: StepInfo, stage: int, k: int, gradient_BSD: torch.Tensor | None
) -> Message:
    tensors = () if gradient_BSD is None else (to_wire(gradient_BSD),)
    return Message(MessageType.BACKWARD, _address(info, stage, k), tensors)


def tensor_of(message: Message) -> torch.Tensor | None:
    """The boundary tensor of FORWARD or BACKWARD, lying in the message's own buffer."""
    return from_wire(message.tensors[0]) if message.tensors else None


def arrival(message: Message, from_host: Callable[[torch.Tensor], torch.Tensor]) -> Arrival:
    """A boundary message's tensor on the device. Where that is a copy, the buffer goes back now."""
    tensor = tensor_of(message)
    if tensor is None:
        return Arrival(None, message.release)
    moved = from_host(tensor)
    if moved.device.type == "cpu":
        return Arrival(moved, message.release)
    message.release()
    return Arrival(moved)


def gradients_message(info: StepInfo, reports: dict[int, GradientReport]) -> Message:
    tensors = []
    stages = []
    for index, report in reports.items():
        stages.append(
            {
                "index": index,
                "nonfinite": list(report.nonfinite),
                "tied": report.tied_gradient is not None,
            }
        )
        tensors.append(to_wire(report.norms))
        if report.tied_gradient is not None:
            tensors.append(to_wire(report.tied_gradient))
    meta = {"step": info.step, "attempt": info.attempt, "stages": stages}
    return Message(MessageType.GRADIENTS, meta, tuple(tensors))


def reports_of(message: Message) -> dict[int, GradientReport]:
    tensors = iter(message.tensors)
    return {
        entry["index"]: GradientReport(
            norms=from_wire(next(tensors)),
            nonfinite=tuple(entry["nonfinite"]),
            tied_gradient=from_wire(next(tensors)) if entry["tied"] else None,
        )
        for entry in message.meta["stages"]
    }


def commit_message(
    info: StepInfo, learning_rate: float, grad_scale: float, tied_weight: torch.Tensor | None
) -> Message:
    meta = {
        "step": info.step,
        "attempt": info.attempt,
        "learning_rate": learning_rate,
        "grad_scale": grad_scale,
    }
    return Message(MessageType.COMMIT, meta, () if tied_weight is None else (to_wire(tied_weight),))


def state_message(stage: int, kind: str, number: int, part: StatePart) -> Message:
    return _part_message(MessageType.STATE, stage, kind, number, part)


def load_state_message(stage: int, kind: str, number: int, part: StatePart) -> Message:
    return _part_message(MessageType.LOAD_STATE, stage, kind, number, part)


def _part_message(
    message_type: MessageType, stage: int, kind: str, number: int, part: StatePart
) -> Message:
    meta = {
        "stage": stage,
        "kind": kind,
        "part": number,
        "last": part.last,
        "names": list(part.tensors),
        "info": part.values,
    }
    return Message(message_type, meta, tuple(map(to_wire, part.tensors.values())))


def state_part(message: Message) -> StatePart:
    """The part carried by STATE or LOAD_STATE; its tensors lie in the message's buffer."""
    tensors = dict(zip(message.meta["names"], map(from_wire, message.tensors), strict=True))
    return StatePart(tensors, message.meta["info"], message.meta["last"])


def _address(info: StepInfo, stage: int, micro_batch: int) -> dict[str, int]:
    return {
        "step": info.step,
        "attempt": info.attempt,
        "stage": stage,
        "micro_batch": micro_batch,
    }
