"""The trainer's side of the wire: its nouns to messages and back. No sockets, no stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetero_framework.core.frames import Message, MessageType, WireTensor
from hetero_framework.core.tensors import dtype_name, from_wire, to_wire
from hetero_framework.engine.stage_api import (
    GradientReport,
    StatePart,
    StepInfo,
    StepSchedule,
    Tensors,
)
from hetero_framework.errors import ProtocolError
from hetero_framework.planner.readiness import Policy

PackedInput = WireTensor | list[int]
"""A batch tensor as it travels: its bytes, or the shape of one that is all ones."""


def step_message(info: StepInfo, orders: StepSchedule) -> Message:
    policy = orders.policy
    return Message(
        MessageType.STEP,
        {
            "step": info.step,
            "attempt": info.attempt,
            "train": info.train,
            "micro_batches": info.micro_batches,
            "num_items": info.num_items,
            "loss_scale": info.loss_scale,
            "in_flight_limits": [
                {"index": k, "limit": limit} for k, limit in enumerate(orders.in_flight_limits)
            ],
            "policy": [
                policy.bias,
                policy.backward_age,
                policy.backward_depth,
                policy.forward_age,
                policy.forward_depth,
                float(policy.grouped),
            ],
            "direct": sorted(orders.direct),
        },
    )


def step_info(message: Message) -> StepInfo:
    names = ("step", "attempt", "train", "micro_batches", "num_items", "loss_scale")
    return StepInfo(**{name: message.meta[name] for name in names})


def step_orders(message: Message) -> StepSchedule:
    meta = message.meta
    if len(meta["policy"]) != 6:
        raise ProtocolError(f"STEP: a policy has 6 numbers, got {len(meta['policy'])}")
    bias, backward_age, backward_depth, forward_age, forward_depth, grouped = meta["policy"]
    limits = {entry["index"]: entry["limit"] for entry in meta["in_flight_limits"]}
    return StepSchedule(
        in_flight_limits=tuple(limits[k] for k in sorted(limits)),
        policy=Policy(
            bias, backward_age, backward_depth, forward_age, forward_depth, bool(grouped)
        ),
        direct=frozenset(meta["direct"]),
    )


def pack_inputs(inputs: Tensors) -> dict[str, PackedInput]:
    """Batch tensors as they travel: token numbers, masks and labels fit into half of their 8
    bytes, and of a mask of ones only the shape is needed."""
    return {
        name: list(tensor.shape)
        if name == "attention_mask" and tensor.dtype == torch.int64 and bool((tensor == 1).all())
        else to_wire(_narrow(tensor))
        for name, tensor in inputs.items()
    }


def inputs_message(
    info: StepInfo, stage: int, micro_batch: int, packed: Mapping[str, PackedInput]
) -> Message:
    sent = {name: value for name, value in packed.items() if isinstance(value, WireTensor)}
    ones = {name: value for name, value in packed.items() if name not in sent}
    return Message(
        MessageType.INPUTS,
        {**_address(info, stage, micro_batch), "names": list(sent), "ones": ones},
        tuple(sent.values()),
    )


def inputs_of(message: Message) -> Tensors:
    """The batch tensors, in memory of their own."""
    meta = message.meta
    found = {
        name: tensor.to(torch.int64) if tensor.dtype == torch.int32 else tensor.clone()
        for name, tensor in zip(meta["names"], map(from_wire, message.tensors), strict=True)
    }
    for name, shape in meta["ones"].items():
        found[name] = torch.ones(shape, dtype=torch.int64)
    return found


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor


def boundary_message(
    kind: MessageType, info: StepInfo, stage: int, micro_batch: int, parts: Sequence[torch.Tensor]
) -> Message:
    """FORWARD or BACKWARD with a tensor as it is."""
    return Message(kind, _address(info, stage, micro_batch), tuple(map(to_wire, parts)))


def coded_message(
    kind: MessageType,
    info: StepInfo,
    stage: int,
    micro_batch: int,
    codec: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    parts: Sequence[torch.Tensor],
) -> Message:
    """FORWARD or BACKWARD with the parts that a codec made of a tensor of this shape and dtype."""
    meta = {
        **_address(info, stage, micro_batch),
        "codec": codec,
        "shape": list(shape),
        "dtype": dtype_name(dtype),
    }
    return Message(kind, meta, tuple(map(to_wire, parts)))


def loss_message(info: StepInfo, micro_batch: int, loss: float) -> Message:
    meta = {"step": info.step, "attempt": info.attempt, "micro_batch": micro_batch, "loss": loss}
    return Message(MessageType.LOSS, meta)


def backward_done_message(info: StepInfo, micro_batch: int) -> Message:
    meta = {"step": info.step, "attempt": info.attempt, "micro_batch": micro_batch}
    return Message(MessageType.BACKWARD_DONE, meta)


def gradient_norms_message(
    info: StepInfo, reports: dict[int, GradientReport], stats: dict[str, Any]
) -> Message:
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
    meta = {"step": info.step, "attempt": info.attempt, "stages": stages, "stats": stats}
    return Message(MessageType.GRADIENT_NORMS, meta, tuple(tensors))


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
