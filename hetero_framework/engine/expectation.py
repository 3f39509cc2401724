"""Checks which boundary tensors may arrive now, and their size, before memory is taken for them.

Reader threads of links ask when a frame's header has come. The computing thread reports what it
has sent and received. `Stage` checks a tensor again before it computes with it, by the model's
rules. Thread-safe.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap

from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.codecs import CODECS, Layout
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.frames import Shapes
from hetero_framework.core.messages import Message
from hetero_framework.core.tensors import TORCH_DTYPES
from hetero_framework.engine import stage_api as api
from hetero_framework.errors import PeerLostError, ProtocolError
from hetero_framework.models.cut.side import Bundle, Form, returning, shown_form

_OF_ITS_SHAPE = ("attention_mask", "position_ids", "positions", "labels")
"""Inputs whose first axes are rows and tokens; positions may have several axes in front."""
_MOST_EARLY = 4
"""At most this many tensors are accepted from other workers before their step begins here; others
wait. Tensors can be early since they come over another link than the news of the step."""

_Place = tuple[int, int]  # stage, micro-batch


def rows_and_tokens(shapes: Mapping[str, Sequence[int]]) -> tuple[int, int] | None:
    """Rows and tokens of a micro-batch, from its inputs' shapes; None if no input has both."""
    name = next((name for name in _OF_ITS_SHAPE if name in shapes), "")
    known = shapes.get(name, ())[-2 if name == "position_ids" else 0 :]
    return (known[0], known[1]) if len(known) >= 2 else None


def incoming_forms(body: m.BoundaryTensor, shapes: Shapes) -> list[tuple[Form, int]]:
    """The form of each decoded tensor of FORWARD or BACKWARD, and the number of frame tensors that
    encode it. Raises ProtocolError if frame and message do not agree."""
    name, parts = body.spec.name, [(TORCH_DTYPES[t.name], tuple(shape)) for t, shape in shapes]
    sides = (m.SideForm(False, body.coded), *(body.sides or ()))
    counts = [1 if s.coded is None else len(_layout(name, s.coded)) for s in sides]
    if sum(counts) != len(parts):
        raise ProtocolError(f"{name}: {sum(counts)} tensors expected, got {len(parts)}")
    forms: list[tuple[Form, int]] = []
    for side, count in zip(sides, counts, strict=True):
        used, parts = parts[:count], parts[count:]
        (dtype, shape), coded = used[0], side.coded
        if coded is not None:
            dtype, shape = TORCH_DTYPES[coded.dtype], coded.shape
            CODECS[coded.codec].check(used, shape, dtype)
        if side.wants_gradient and not dtype.is_floating_point:
            raise ProtocolError(f"{name}: a gradient for a tensor of {dtype}")
        forms.append(((shape, dtype, side.wants_gradient), count))
    return forms


def check_sender(body: m.OfStep, holders: Mapping[int, WorkerId], sender: WorkerId | None) -> None:
    """Raise ProtocolError if `sender` does not hold the stage that a message comes from: an
    activation from the stage before, a gradient from the next stage, a loss from the last."""
    if isinstance(body, m.Forward):
        stage = body.stage - 1
    elif isinstance(body, m.Backward):
        stage = body.stage + 1
    elif isinstance(body, m.Loss):
        stage = max(holders)
    elif isinstance(body, m.Gradients):
        stage = body.stage
    else:
        return
    if str(holders.get(stage)) != str(sender):
        name = body.spec.name
        raise ProtocolError(f"{name} of stage {stage} came from one that does not hold it")


def _layout(name: str, coded: m.Coded) -> Layout:
    """Types and shapes of the tensors that a codec makes of one tensor."""
    codec, dtype = CODECS.get(coded.codec), TORCH_DTYPES.get(coded.dtype)
    if codec is None or dtype is None:
        text = f"{name}: cannot read codec {coded.codec!r} of a {coded.dtype!r} tensor"
        raise ProtocolError(text)
    return codec.layout(coded.shape, dtype)


class Expectation:
    """The tensors that the stages of one process wait for. `check` admits each tensor once, and
    none larger than `max_boundary_bytes`, encoded or decoded."""

    def __init__(self, stages: Iterable[api.StageInterface]) -> None:
        self.max_boundary_bytes: int | None = None
        """Most bytes that cross a boundary in one message of this run; None while unknown."""
        self._stages = {stage.index: stage for stage in stages}
        self._changed = threading.Condition()
        self._attempt = -1
        self._micro_batches = 0
        self._sizes: dict[_Place, tuple[int, int]] = {}  # rows and tokens
        self._gradients: dict[_Place, tuple[Form, ...]] = {}
        self._come: set[tuple[str, int, int, int]] = set()  # message, attempt, stage, micro-batch
        self._closed = False

    # -- the computing thread ---------------------------------------------------------------------

    def begin(self, attempt: int, micro_batches: int) -> None:
        """Note that an attempt at a step begins, unless it is known already."""
        with self._changed:
            if attempt <= self._attempt:
                return
            self._attempt, self._micro_batches = attempt, micro_batches
            self._sizes.clear()
            self._gradients.clear()
            self._come = {known for known in self._come if known[1] >= attempt}
            self._changed.notify_all()

    def inputs(self, attempt: int, stage: int, k: int, shapes: Mapping[str, Sequence[int]]) -> None:
        """Note the shapes of a stage's inputs for micro-batch `k`."""
        size = rows_and_tokens(shapes)
        with self._changed:
            if attempt == self._attempt and size is not None:
                self._sizes[stage, k] = size

    def sent(self, attempt: int, stage: int, k: int, left: Bundle) -> None:
        """Note that the output of `stage` for micro-batch `k` goes out, and await its gradient."""
        forms = tuple((tuple(t.shape), t.dtype, False) for t in returning(left))
        with self._changed:
            if attempt == self._attempt:
                self._gradients[stage, k] = forms

    def close(self) -> None:
        """End all waits here."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- readers ----------------------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Note a message as it comes: the computing thread may see it minutes later."""
        body = message.body
        if isinstance(body, m.Step):
            self.begin(body.attempt, body.micro_batches)
        elif isinstance(body, m.Inputs):
            shapes = dict(zip(body.names, (t.shape for t in message.tensors), strict=True))
            self.inputs(body.attempt, body.stage, body.micro_batch, {**shapes, **body.ones})

    def check(self, body: m.BoundaryTensor, shapes: Shapes, nbytes: int) -> None:
        """Raise ProtocolError for a frame of FORWARD or BACKWARD that cannot be right. A frame of a
        later step gets only the checks that hold in every step. Waits while too many such
        frames are here; raises PeerLostError if their step does not begin."""
        forms = [form for form, _ in incoming_forms(body, shapes)]
        what = _described(body)
        if body.stage not in self._stages:
            raise ProtocolError(f"{what}: that stage is not held here")
        self._check_size(what, forms, nbytes)
        place = body.stage, body.micro_batch
        with self._changed:
            self._wait_for_its_step(what, body.attempt)
            if body.attempt < self._attempt:
                return  # stale, so it is dropped
            key = body.spec.name, body.attempt, *place
            if key in self._come:
                raise ProtocolError(f"{what} came a second time")
            if body.attempt == self._attempt and body.micro_batch >= self._micro_batches:
                raise ProtocolError(f"{what}: the step has {self._micro_batches} micro-batches")
            self._come.add(key)
            if body.attempt > self._attempt:
                return
            size, gradients = self._sizes.get(place), self._gradients.get(place)
        if isinstance(body, m.Backward):
            if gradients is None:
                raise ProtocolError(f"{what} came before its forward")
            if forms != [*gradients]:
                actual, wanted = (", ".join(starmap(shown_form, f)) for f in (forms, gradients))
                raise ProtocolError(f"{what}: the gradient is {actual}, expected {wanted}")
        elif size is not None:
            problem = self._stages[body.stage].arrival_problem(forms, *size)
            if problem is not None:
                raise ProtocolError(f"{what}: {problem}")

    def check_passing(self, body: m.BoundaryTensor, shapes: Shapes, nbytes: int) -> None:
        """Check only the size of a frame that is for another process, or to be dropped."""
        forms = [form for form, _ in incoming_forms(body, shapes)]
        self._check_size(_described(body), forms, nbytes)

    def _check_size(self, what: str, forms: Iterable[Form], nbytes: int) -> None:
        """Check the bytes of a frame, and of its decoded tensors."""
        most = self.max_boundary_bytes
        decoded = sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in forms)
        if most is not None and max(nbytes, decoded) > most:
            got = max(nbytes, decoded)
            raise ProtocolError(f"{what} has {got} bytes; at most {most} cross a boundary here")

    def _wait_for_its_step(self, what: str, attempt: int) -> None:
        deadline = time.monotonic() + timeouts.LIVENESS_S
        while attempt > self._attempt:
            early = sum(known[1] > self._attempt for known in self._come)
            if early < _MOST_EARLY and not self._closed:
                return
            if self._closed or time.monotonic() > deadline:
                raise PeerLostError(f"{what} came, and its step does not begin")
            self._changed.wait(timeouts.TICK_S)


def _described(body: m.BoundaryTensor) -> str:
    return f"{body.spec.name} of micro-batch {body.micro_batch} for stage {body.stage}"
