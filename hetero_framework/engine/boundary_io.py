"""Moves tensors out of a process's stages (encode, copy, send) and into them (receive, decode).

The computing thread hands a result over and goes on. On the CPU, a tensor without a codec goes
straight to its link. If a device must be waited for or the CPU must encode, one sender thread does
that, in the same order. A link's reader thread unpacks what arrives onto the device, or into CPU
memory if only the computing thread may copy to the device (`move_in`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from hetero_framework.config import Config, WireConfig
from hetero_framework.core.codecs import CODECS, Codec
from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.core.messages import BoundaryTensor, Coded, Forward, Inputs, Message, SideForm
from hetero_framework.core.spans import Recorder
from hetero_framework.core.tensors import TORCH_DTYPES, dtype_name, from_wire, to_wire
from hetero_framework.engine import wire_forms
from hetero_framework.engine.expectation import Expectation, incoming_forms
from hetero_framework.engine.out_of_memory import explaining, failed
from hetero_framework.engine.stage_api import Arrival, Outcome, StepInfo, Tensors
from hetero_framework.errors import PeerLostError
from hetero_framework.models.cut.side import Bundle

Done = Callable[[], None]
_PAGE_STEPS = 8
"""A run with a page records the steps whose number is a multiple of this."""


class StepSink(Protocol):
    """The receiver of tensors that leave a process's stages. May be called in the sender thread."""

    def post(self, message: Message, done: Done | None = None) -> None:
        """Send FORWARD or BACKWARD and call `done` when it is written. A lost link is no error."""

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        """Take the last stage's outcome of a micro-batch."""

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        """Take the news that the lowest stage with a backward is done with a micro-batch."""

    def failed(self, error: Exception) -> None:
        """Take an error of the sender thread."""


_CLOSE_S = 5.0
_SLICE_S = 0.5  # waits are sliced, so that Ctrl-C is heard on every system


def unpack(message: Message, device: Device) -> Arrival | Tensors | None:
    """Unpack the tensors of INPUTS, FORWARD or BACKWARD, for `move_in`; None for other messages.

    Called in reader threads. Releases the message's buffer unless a tensor still lies in it. Raises
    ProtocolError for a codec that is unknown or does not fit, StepOutOfMemory for lack of memory.
    """
    try:
        return _unpack(message, Device() if device.one_thread else device)
    except (RuntimeError, MemoryError) as error:
        body = message.body
        assert isinstance(body, (Inputs, BoundaryTensor))
        where = f"stage {body.stage}, {message.name} of micro-batch {body.micro_batch}"
        raise failed(where, error, device, (body.step, body.attempt)) from error


def _unpack(message: Message, device: Device) -> Arrival | Tensors | None:
    body = message.body
    if isinstance(body, Inputs):
        inputs = inputs_in(device, wire_forms.inputs_of(message))
        message.release()
        return inputs
    if not isinstance(body, BoundaryTensor):
        return None
    parts = [from_wire(tensor) for tensor in message.tensors]
    sides = [SideForm(False, body.coded), *(body.sides or ())]
    # No need to divide where one tensor travels as it is, as most do.
    whole = len(parts) == len(sides) == 1 and body.coded is None
    counts = [1] if whole else [count for _, count in incoming_forms(body, message.shapes)]
    tensors = []
    for side, count in zip(sides, counts, strict=True):
        used, parts = parts[:count], parts[count:]
        tensor = used[0] if side.coded is None else _decoded(side.coded, used, device)
        if side.coded is None and device.is_async:
            tensor = device.copy_in(tensor)
        tensors.append(tensor.requires_grad_(side.wants_gradient))
    if not device.is_async and any(side.coded is None for side in sides):
        return Arrival(tuple(tensors), message.release)
    message.release()
    return Arrival(tuple(tensors))


def _decoded(coded: Coded, parts: list[torch.Tensor], device: Device) -> torch.Tensor:
    """Decode `parts` into one tensor on the device, in memory of its own."""
    codec, dtype = CODECS[coded.codec], TORCH_DTYPES[coded.dtype]
    if device.is_async and can_code(device):
        return codec.decode(device.copies_in(parts), coded.shape, dtype)
    decoded = codec.decode(parts, coded.shape, dtype)
    memory = decoded.untyped_storage().data_ptr()
    shares = any(part.untyped_storage().data_ptr() == memory for part in parts)
    return device.copy_in(decoded.clone() if shares else decoded)


def inputs_in(device: Device, inputs: Tensors) -> Tensors:
    """Batch tensors on the device. A copy keeps its CPU tensor as `_hetero_host`, whose numbers can
    be read without waiting for the device."""
    there = dict(zip(inputs, device.copies_in(list(inputs.values())), strict=True))
    for name, tensor in there.items():
        if tensor is not inputs[name]:
            tensor._hetero_host = inputs[name]  # type: ignore[attr-defined]
    return there


def move_in(device: Device, unpacked: Arrival | Tensors) -> Arrival | Tensors:
    """Move the tensors that `unpack` returned to the device. Called in the computing thread."""
    if not device.one_thread:
        return unpacked
    if not isinstance(unpacked, Arrival):
        return inputs_in(device, unpacked)
    moved = [device.copy_in(t.detach()).requires_grad_(t.requires_grad) for t in unpacked.tensors]
    unpacked.release()
    return Arrival(tuple(moved))


def can_code(device: Device) -> bool:
    """Whether codecs can run on the device: they need bfloat16. Otherwise they run on the CPU."""
    return bool(device.supports(torch.bfloat16))


class BoundaryIO:
    """Hands the results of a process's executor to its `StepSink`."""

    def __init__(
        self,
        device: Device,
        wire: WireConfig,
        sink: StepSink,
        expectation: Expectation,
        *,
        outcome_is_awaited: bool,
        flush_timeout_s: float,
    ) -> None:
        """With `outcome_is_awaited` the sink gets the loss as a number and the other tensors on the
        CPU; the sender thread waits for the device."""
        self._device = device
        self._activations = _codec(wire.activations)
        self._gradients = _codec(wire.gradients)
        self._sink = sink
        self._expectation = expectation
        self._outcome_is_awaited = outcome_is_awaited
        self._pool = device.buffers()
        self._sender = Sender(sink.failed, flush_timeout_s)

    def send(self, body: BoundaryTensor, tensors: Bundle) -> None:
        if isinstance(body, Forward):
            self._expectation.sent(body.attempt, body.stage - 1, body.micro_batch, tensors)
        codec = self._activations if isinstance(body, Forward) else self._gradients
        # A tensor that the codec cannot encode travels as it is; the user was told before.
        codecs = [codec if codec and codec.supports(tensor.dtype) else None for tensor in tensors]
        forms = [_form(tensor, codec) for tensor, codec in zip(tensors, codecs, strict=True)]
        if forms[0].coded is not None or len(forms) > 1:
            body = replace(body, coded=forms[0].coded, sides=tuple(forms[1:]) or None)
        if self._device.is_async:
            # The device encodes if it can, so that only encoded parts are copied.
            here = can_code(self._device)
            parts = _encoded(tensors, codecs) if here else list(tensors)
            later = [None] * len(parts) if here else codecs
            event = self._device.record_event(*parts)
            self._submit(body, lambda: self._copy_and_post(body, parts, event, later))
        elif any(codecs):
            self._submit(body, lambda: self._sink.post(_message(body, _encoded(tensors, codecs))))
        else:
            self._sink.post(_message(body, tensors))

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        loss = outcome.loss
        if not self._outcome_is_awaited:
            self._sink.outcome(info, micro_batch, outcome)
        elif isinstance(loss, torch.Tensor) and self._device.is_async:
            parts = [loss, *outcome.named.values()]
            event = self._device.record_event(*parts)

            def send() -> None:
                there = []
                for part in parts:
                    host, release = self._device.copy_out(part, event, self._pool)
                    there.append(host.clone())
                    release()
                named = dict(zip(outcome.named, there[1:], strict=True))
                self._sink.outcome(info, micro_batch, Outcome(float(there[0]), named))

            self._sender.submit(send)
        else:
            self._sink.outcome(info, micro_batch, replace(outcome, loss=float(loss)))

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        self._sink.finished(info, micro_batch)

    def flush(self) -> None:
        """See `Sender.flush`."""
        self._sender.flush()

    def close(self) -> None:
        self._sender.close()

    def _submit(self, body: BoundaryTensor, job: Callable[[], None]) -> None:
        """Have the sender thread run `job`, which sends the message of `body`."""

        def explained() -> None:
            where = f"{body.spec.name} of micro-batch {body.micro_batch} to stage {body.stage}"
            with explaining(where, self._device, (body.step, body.attempt)):
                job()

        self._sender.submit(explained)

    def _copy_and_post(
        self,
        body: BoundaryTensor,
        parts: list[torch.Tensor],
        event: DeviceEvent,
        codecs: Sequence[Codec | None],
    ) -> None:
        copies = self._device.copies_out(parts, event, self._pool)

        def release() -> None:
            for _, give_back in copies:
                give_back()

        hosts = [host for host, _ in copies]
        self._sink.post(_message(body, _encoded(hosts, codecs)), release)


def _form(tensor: torch.Tensor, codec: Codec | None) -> SideForm:
    """The form in which a tensor travels: whether it wants a gradient, and how it is coded."""
    coded = None
    if codec is not None:
        coded = Coded(codec.name, tuple(tensor.shape), dtype_name(tensor.dtype))
    return SideForm(tensor.requires_grad, coded)


def _encoded(tensors: Sequence[torch.Tensor], codecs: Sequence[Codec | None]) -> list[torch.Tensor]:
    """The tensors to send: each tensor encoded by its codec, or as it is without a codec."""
    return [
        part
        for tensor, codec in zip(tensors, codecs, strict=True)
        for part in ([tensor] if codec is None else codec.encode(tensor))
    ]


def _message(body: BoundaryTensor, parts: Sequence[torch.Tensor]) -> Message:
    return Message(body, tuple(map(to_wire, parts)))


def _codec(name: str) -> Codec | None:
    return None if name == "none" else CODECS[name]


class Sender:
    """One thread that runs jobs in order; it starts with the first job."""

    def __init__(self, on_failure: Callable[[Exception], None], flush_timeout_s: float) -> None:
        self._on_failure = on_failure
        self._flush_timeout_s = flush_timeout_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def flush(self) -> None:
        """Wait for all jobs submitted before. Raises PeerLostError after `flush_timeout_s`."""
        if self._thread is None:
            return
        reached = threading.Event()
        self._jobs.put(reached.set)
        deadline = time.monotonic() + self._flush_timeout_s
        while not reached.wait(_SLICE_S):
            if time.monotonic() > deadline:
                raise PeerLostError(
                    "what the stages here have computed could not be sent within "
                    f"{self._flush_timeout_s:.0f} s",
                    hint="the device or a peer hangs; training.step_timeout_s sets this limit",
                )

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._on_failure(error)


class ArrivalMeter:
    """Times how long boundary tensors take to arrive, by stage and direction; feeds the timeline.
    `watch(peer)` is the `Link.on_moved` of a link to `peer`. Thread-safe."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int], list[tuple[float, int]]] = {}  # seconds, bytes

    def watch(self, peer: int | str) -> Callable[[str, Message, float, float], None]:
        record = self.recorder.on_moved(peer)

        def moved(direction: str, message: Message, began: float, ended: float) -> None:
            if self.recorder.records:
                record(direction, message, began, ended)
            body = message.body
            if direction == "receive" and isinstance(body, BoundaryTensor):
                key = ("forward" if isinstance(body, Forward) else "backward", body.stage)
                with self._lock:
                    self._seen.setdefault(key, []).append((ended - began, message.payload_bytes))

        return moved

    def take(self) -> dict[str, dict[int, float]]:
        """Seconds of a tensor alone in the network (`alone_s`), from arrivals since the last call:
        {"forward": {stage: s}, "backward": ...}."""
        with self._lock:
            taken, self._seen = self._seen, {}
        seconds: dict[str, dict[int, float]] = {"forward": {}, "backward": {}}
        for (kind, stage), seen in taken.items():
            seconds[kind][stage] = alone_s(seen)
        return seconds


def alone_s(seen: Sequence[tuple[float, int]]) -> float:
    """Seconds that a tensor of mean size takes alone in the network, from (seconds, bytes) of
    arrivals. The pace is that of the quickest tenth, which met no other tensor."""
    paces = sorted(seconds / max(nbytes, 1) for seconds, nbytes in seen)
    return paces[len(paces) // 10] * sum(max(nbytes, 1) for _, nbytes in seen) / len(seen)


def meter_of(config: Config) -> ArrivalMeter:
    """The meter of a process of this run."""
    every = _PAGE_STEPS if config.training.page else 0
    return ArrivalMeter(Recorder(config.training.timeline_steps, every))
