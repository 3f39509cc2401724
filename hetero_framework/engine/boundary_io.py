"""What leaves the stages of a process and what comes in: coded, copied, sent; received, decoded.

The computing thread hands a result over and goes on. On the CPU, a tensor that travels as it is
goes straight to its link. Where a device has to be waited for, or the CPU has to encode, one sender
thread does that, in the order in which results were handed over. What arrives is unpacked in the
link's reader thread, so that the computing thread finds it ready on its device.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_framework.config import WireConfig
from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.codecs import CODECS, Codec
from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.core.messages import Backward, Boundary, Coded, Forward, Inputs, Message
from hetero_framework.core.tensors import TORCH_DTYPES, dtype_name, from_wire, to_wire
from hetero_framework.core.trace import Recorder
from hetero_framework.engine import messages
from hetero_framework.engine.executor import Arrival, Executor
from hetero_framework.engine.stage_api import Loss, StepInfo, Tensors
from hetero_framework.errors import ProtocolError

Done = Callable[[], None]


class Post(Protocol):
    """Sends a boundary message to a stage, and calls `done` when it is written.

    It may be called in the sender thread; a link that is gone is not its caller's business.
    """

    def __call__(self, stage: int, message: Message, done: Done | None = None) -> None: ...


_CLOSE_S = 5.0


def unpack(message: Message, device: Device) -> Arrival | Tensors | None:
    """The tensors of INPUTS, FORWARD or BACKWARD on the device, for use by the computing thread.

    For reader threads. Where it can, the message's buffer is given back here. None for every
    other message. Raises ProtocolError for a codec that does not exist or does not fit.
    """
    body = message.body
    if isinstance(body, Inputs):
        inputs = {k: device.copy_in(v) for k, v in messages.inputs_of(message).items()}
        message.release()
        return inputs
    if not isinstance(body, Boundary):
        return None
    parts = [from_wire(tensor) for tensor in message.tensors]
    coded = body.coded
    if coded is None:
        if not device.is_async:
            return Arrival(parts[0], message.release)
        moved = device.copy_in(parts[0])
        message.release()
        return Arrival(moved)
    codec, dtype = CODECS.get(coded.codec), TORCH_DTYPES.get(coded.dtype)
    if codec is None or dtype is None:
        raise ProtocolError(
            f"{message.name}: cannot read codec {coded.codec!r} of a {coded.dtype!r} tensor"
        )
    if device.is_async and can_code(device):
        decoded = codec.decode([device.copy_in(part) for part in parts], coded.shape, dtype)
    else:
        decoded = codec.decode(parts, coded.shape, dtype)
        decoded = device.copy_in(decoded.clone() if _shares(decoded, parts) else decoded)
    message.release()
    return Arrival(decoded)


def can_code(device: Device) -> bool:
    """Whether codecs work on the device itself: they need bfloat16. Else the CPU does it."""
    return bool(device.supports(torch.bfloat16))


def _shares(tensor: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    memory = tensor.untyped_storage().data_ptr()
    return any(part.untyped_storage().data_ptr() == memory for part in parts)


class BoundaryIO:
    """The `Outbox` of a process's runner."""

    def __init__(
        self,
        runner: Executor,
        device: Device,
        wire: WireConfig,
        post: Post,
        *,
        on_loss: Callable[[StepInfo, int, Loss], None],
        on_finished: Callable[[StepInfo, int], None],
        on_failure: Callable[[Exception], None],
        loss_is_awaited: bool,
    ) -> None:
        """`on_loss(info, micro_batch, loss)` and `on_finished(info, micro_batch)` take what is no
        tensor; with `loss_is_awaited` the loss comes as a number, in the sender thread where
        that has to wait for the device. `on_failure` hears what went wrong in that thread.
        """
        self._runner = runner
        self._device = device
        self._codecs = {Forward: _codec(wire.activations), Backward: _codec(wire.gradients)}
        self._post = post
        self._on_loss = on_loss
        self._on_finished = on_finished
        self._loss_is_awaited = loss_is_awaited
        self._pool = BufferPool(device.allocate_host)
        self._sender = Sender(on_failure)

    # -- Outbox ---------------------------------------------------------------------------------

    def hidden(self, stage: int, micro_batch: int, hidden_BSD: torch.Tensor) -> None:
        if self._runner.owns(stage):
            self._runner.put_hidden(stage, micro_batch, Arrival(hidden_BSD))
        else:
            self._send(Forward, stage, micro_batch, hidden_BSD)

    def gradient(self, stage: int, micro_batch: int, gradient_BSD: torch.Tensor) -> None:
        if self._runner.owns(stage):
            self._runner.put_gradient(stage, micro_batch, Arrival(gradient_BSD))
        else:
            self._send(Backward, stage, micro_batch, gradient_BSD)

    def loss(self, micro_batch: int, loss: Loss) -> None:
        info = self._info
        if not self._loss_is_awaited:
            self._on_loss(info, micro_batch, loss)
        elif isinstance(loss, torch.Tensor) and self._device.is_async:
            mark = self._device.record_event(loss)

            def send() -> None:
                host, release = self._device.copy_out(loss, mark, self._pool)
                value = float(host)
                release()
                self._on_loss(info, micro_batch, value)

            self._sender.submit(send)
        else:
            self._on_loss(info, micro_batch, float(loss))

    def finished(self, micro_batch: int) -> None:
        self._on_finished(self._info, micro_batch)

    def flush(self) -> None:
        """Wait until everything that was handed over is with its link."""
        self._sender.flush()

    def close(self) -> None:
        self._sender.close()

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _info(self) -> StepInfo:
        assert self._runner.info is not None
        return self._runner.info

    def _send(
        self, kind: type[Forward] | type[Backward], stage: int, k: int, tensor: torch.Tensor
    ) -> None:
        info, codec = self._info, self._codecs[kind]
        if codec is not None and not codec.supports(tensor.dtype):
            codec = None  # it travels as it is; the user was told at the start
        packed = _Packed(kind, info, stage, k, codec, tensor.shape, tensor.dtype)
        if self._device.is_async:
            # Encoding is the device's work; only the encoded parts are copied.
            here = codec is not None and can_code(self._device)
            parts = codec.encode(tensor) if codec is not None and here else [tensor]
            mark = self._device.record_event(*parts)
            self._sender.submit(lambda: self._copy_and_post(packed, parts, mark, here))
        elif codec is not None:
            self._sender.submit(lambda: self._post(stage, packed.message(packed.encode(tensor))))
        else:
            self._post(stage, packed.message([tensor]))

    def _copy_and_post(
        self, packed: _Packed, parts: list[torch.Tensor], mark: DeviceEvent, encoded: bool
    ) -> None:
        copies = [self._device.copy_out(part, mark, self._pool) for part in parts]

        def release() -> None:
            for _, give_back in copies:
                give_back()

        hosts = [host for host, _ in copies]
        message = packed.message(hosts if encoded else packed.encode(hosts[0]))
        self._post(packed.stage, message, release)


@dataclass(frozen=True)
class _Packed:
    """What the message of an encoded tensor has to say about it."""

    kind: type[Boundary]
    info: StepInfo
    stage: int
    micro_batch: int
    codec: Codec | None
    shape: torch.Size
    dtype: torch.dtype

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] if self.codec is None else self.codec.encode(tensor)

    def message(self, parts: list[torch.Tensor]) -> Message:
        coded = None
        if self.codec is not None:
            coded = Coded(self.codec.name, tuple(self.shape), dtype_name(self.dtype))
        info = self.info
        body = self.kind(info.step, info.attempt, self.stage, self.micro_batch, coded)
        return Message(body, tuple(map(to_wire, parts)))


def _codec(name: str) -> Codec | None:
    return None if name == "none" else CODECS[name]


class Sender:
    """One thread that runs jobs in order; it starts with the first one."""

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def flush(self) -> None:
        """Wait until all jobs that were submitted before are done."""
        if self._thread is not None:
            reached = threading.Event()
            self._jobs.put(reached.set)
            reached.wait()

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
    """How long boundary tensors took to arrive, by stage and direction; feeds the timeline too.

    `watch(peer)` is what a link to `peer` calls for each frame (`Link.on_moved`). Thread-safe.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._lock = threading.Lock()
        self._seconds: dict[tuple[str, int], tuple[float, int]] = {}

    def watch(self, peer: int | str) -> Callable[[str, Message, float, float], None]:
        record = self.recorder.on_moved(peer)

        def moved(direction: str, message: Message, began: float, ended: float) -> None:
            record(direction, message, began, ended)
            body = message.body
            if direction == "receive" and isinstance(body, Boundary):
                key = ("forward" if isinstance(body, Forward) else "backward", body.stage)
                with self._lock:
                    seconds, count = self._seconds.get(key, (0.0, 0))
                    self._seconds[key] = (seconds + ended - began, count + 1)

        return moved

    def take(self) -> dict[str, dict[int, float]]:
        """Mean seconds per tensor since the last call: {"forward": {stage: s}, "backward": ...}."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        means: dict[str, dict[int, float]] = {"forward": {}, "backward": {}}
        for (kind, stage), (seconds, count) in taken.items():
            means[kind][stage] = seconds / count
        return means
