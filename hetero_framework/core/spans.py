"""Spans of a process's time by activity, kept for a few steps and then sent to the coordinator.

A span is plain data (a dict of strings, integers and floats), so that a message can carry it:

    kind         one of KINDS
    stage        the stage that worked, or the stage that a tensor was for
    micro_batch  its number, or -1 for work that is done once a step (commit)
    step         the step, counted from 0 as in StepInfo
    began, ended seconds of this process's `time.perf_counter`

and, for "send" and "receive": `what` (the message's type), `peer` ("local" or a worker's id),
`bytes` that travelled, `dtype` of the tensor and the `codec`, if any. Another process's clock
starts anywhere; the gathering process shifts its spans.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from hetero_framework.core.messages import BoundaryTensor, Inputs, Message

FORWARD = "forward"
BACKWARD = "backward"
FORWARD_BACKWARD = "forward_backward"
"""Both for a micro-batch in one go, as the last stage does in a training step."""
SEND = "send"
RECEIVE = "receive"
COMMIT = "commit"
WEIGHTS = "weights"
"""A layer's way from host memory to the device."""
AWAITED = "awaited"
"""The device's wait for a layer on its way, within a task."""
VISITS = (
    WEIGHTS,
    AWAITED,
    "inputs out",
    "inputs in",
    "states in",
    "states out",
    "gradients in",
    "gradients out",
)
"""Kinds for tensors in host memory: each kind of copy, and the wait."""
KINDS = (FORWARD, BACKWARD, FORWARD_BACKWARD, SEND, RECEIVE, COMMIT, *VISITS)
COMPUTE = (FORWARD, BACKWARD, FORWARD_BACKWARD)

ALL_STEPS = -1
NO_MICRO_BATCH = -1

Span = dict[str, Any]


def is_span(span: dict[str, Any]) -> bool:
    """Whether what another process sent is a valid span."""
    times = [span.get(name) for name in ("began", "ended")]
    return (
        span.get("kind") in KINDS
        and all(type(span.get(name)) is int for name in ("stage", "micro_batch", "step"))
        and all(isinstance(at, (int, float)) and math.isfinite(at) for at in times)
        and isinstance(span.get("bytes", 0), int)
    )


class Recorder:
    """The spans of one process; thread-safe. It records the `steps` training steps after the first,
    which is not typical (-1: all, the first too), and later steps whose number `every` divides (0:
    none). At most `limit` spans are kept until they are taken."""

    def __init__(self, steps: int, every: int = 0, *, limit: int = 200_000) -> None:
        self.steps, self._every = steps, every
        self.records = bool(steps or every)
        self._limit = limit
        self._lock = threading.Lock()
        self._spans: list[tuple[int, Span]] = []  # with the attempt that they belong to
        self._first: int | None = None
        self._step = self._attempt = -1
        self._wanted: set[int] = set()  # attempts that are recorded
        self.enabled = False

    def begin(self, step: int, *, attempt: int = 0, train: bool = True) -> None:
        """Begin a step, or begin it again: spans of an aborted attempt of it are forgotten."""
        with self._lock:
            if train and self._first is None:
                self._first = step
            self._step, self._attempt = step, attempt
            self._spans = [
                kept for kept in self._spans if kept[1]["step"] != step or kept[0] == attempt
            ]
            self.enabled = train and self._wants(step)
            if self.enabled:
                self._wanted.add(attempt)

    def span(
        self, kind: str, stage: int, micro_batch: int, began: float, ended: float, **extra: Any
    ) -> None:
        """Keep one span of the present step; does nothing while the step is not recorded."""
        if self.enabled:
            task = {"stage": stage, "micro_batch": micro_batch, "step": self._step}
            times = {"began": began, "ended": ended}
            self._keep(self._attempt, {"kind": kind, **task, **times, **extra})

    def on_moved(self, peer: int | str) -> Callable[[str, Message, float, float], None]:
        """The `on_moved` of a link to `peer`. It keeps spans of frames of micro-batches, also of
        the next step."""

        def moved(direction: str, message: Message, began: float, ended: float) -> None:
            body = message.body
            if not isinstance(body, (BoundaryTensor, Inputs)) or not self._wants(body.step):
                return
            dtype, codec = message.tensors[0].dtype if message.tensors else "", ""
            if isinstance(body, BoundaryTensor) and body.coded is not None:
                dtype, codec = body.coded.dtype, body.coded.codec
            task = {"stage": body.stage, "micro_batch": body.micro_batch, "step": body.step}
            times = {"began": began, "ended": ended}
            what = {"what": message.name, "peer": peer, "bytes": message.payload_bytes}
            kinds = {"dtype": dtype, "codec": codec}
            self._keep(body.attempt, {"kind": direction, **task, **times, **what, **kinds})

        return moved

    def take(self) -> list[Span]:
        """The spans since the last call, in the order in which they were kept."""
        with self._lock:
            taken = [span for attempt, span in self._spans if attempt in self._wanted]
            self._spans = [entry for entry in self._spans if entry[0] > self._attempt]
            self._wanted &= {self._attempt}
            return taken

    def _keep(self, attempt: int, span: Span) -> None:
        with self._lock:
            if len(self._spans) < self._limit:
                self._spans.append((attempt, span))

    def _wants(self, step: int) -> bool:
        if self.steps == ALL_STEPS:
            return True
        if self._first is None or step <= self._first:
            return False
        return step <= self._first + self.steps or (self._every > 0 and step % self._every == 0)
