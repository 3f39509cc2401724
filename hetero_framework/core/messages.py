"""Every message of the protocol: one frozen dataclass each, and the `Message` that carries one.

A class here is the whole specification of a message: its docstring names sender, receiver and
answer, its annotations give the values of its fields, and `@message` gives the rest. The checks and
the form on the wire (`fields.py`) and docs/maintainers/protocol.md's tables are derived from it. To
add a message, add a class, and say in `session.py` when it is legal. An extra that opens its own
connections has their messages in its own module, which its extra.toml names under "messages".

A message is checked when it is made and when it is received, before memory for its tensors is
taken. Whatever bytes arrive, the only exception that leaves this module is ProtocolError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from typing_extensions import dataclass_transform

from hetero_framework._version import __version__
from hetero_framework.core import frames
from hetero_framework.core.fields import AnyFloat, Raw, Shape, Spec, WorkerId
from hetero_framework.core.frames import MAX_TENSORS, PREFIX_BYTES, PROTOCOL_VERSION, WireTensor
from hetero_framework.core.planned_order import BACKWARD, FORWARD, Lane
from hetero_framework.errors import ProtocolError

COORDINATOR = "coordinator"
WORKER = "worker"
DIALLER = "connecting worker"
LISTENER = "accepting worker"
EITHER = "either"

FrameBytes = Annotated[int, frames.HANDSHAKE_MAX_FRAME_BYTES, frames.IMPOSSIBLE_FRAME_BYTES]
"""Frame limit that a peer proposes: never less than the limit that holds in the handshake."""
Seconds = Annotated[float, 0.0, 1e9]
Patience = Annotated[float, 0.0, 1e6]
"""Seconds that somebody waits."""
RejectCode = Literal["busy", "identity", "peer", "protocol", "stale"]
SessionKind = Literal["training", "chat", "generation", "measurement"]
StateKind = Literal["checkpoint", "export", "weights"]
LoadKind = Literal[
    "checkpoint", "adapter", "tied weights", "gradients", "tied gradients", "weights"
]


class Body:
    """The fields of a message."""

    __slots__ = ()
    spec: ClassVar[Spec]

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the receiver needs for the message beyond its tensors."""
        return 0


B = TypeVar("B", bound=Body)

BODIES: dict[int, type[Body]] = {}
"""All messages by their numbers on the wire, which never change their meaning."""


@dataclass_transform(frozen_default=True)
def message(
    number: int, sender: str, *, tensors: tuple[int, int] = (0, 0), long: bool = False
) -> Callable[[type[B]], type[B]]:
    """Make a class a frozen dataclass and a message. `tensors` is the smallest and largest number
    of tensors; with a field `names` there is one tensor per name. `long` allows a header up to
    MAX_LONG_HEADER_BYTES."""

    def register(cls: type[B]) -> type[B]:
        made = dataclass(frozen=True, slots=True)(cls)
        assert number not in BODIES
        made.spec = Spec(made, number, sender, tensors, long)
        BODIES[number] = made
        return made

    return register


# ------------------------------------------------------------------- a coordinator and a worker


@dataclass(frozen=True, slots=True)
class Greeting(Body):
    """The first message of one side of a connection."""

    protocol: int = field(default=PROTOCOL_VERSION, kw_only=True)
    package: str = field(default=__version__, kw_only=True)


@message(1, COORDINATOR)
class Hello(Greeting):
    """Coordinator to worker, first of a connection: who I am, which worker I mean, and the largest
    frame that either side may send. Answered by WELCOME or REJECT. `epoch` counts the connections
    of a coordinator's `process` (a random id); an older epoch comes too late. `session` is what the
    coordinator wants the worker for. `name` is what people call a training. When the link breaks, a
    worker keeps nothing of another kind of session."""

    run_id: str
    worker_id: WorkerId
    process: str
    epoch: int
    max_frame_bytes: FrameBytes
    session: SessionKind = "training"
    name: str = ""


@message(9, WORKER)
class Call(Greeting):
    """Worker to coordinator, first of a connection that the worker has dialled: who I am. Answered
    by HELLO when the coordinator wants the worker, or by REJECT. `process` is a random id."""

    worker_id: WorkerId
    process: str


@message(2, WORKER)
class Welcome(Greeting):
    """Worker to coordinator, accepts HELLO: versions, device and memory (bytes). `run_id`: the run
    whose stages it holds ready. `no_four_bit`: why the device has no 4 bits. `host_free`: free host
    memory; null where the device has no memory of its own. `own_port`: the port on the loopback on
    which a worker that dials accepts workers of its machine. Answered by SETUP or REJECT."""

    torch: str
    device: str
    device_label: str
    memory_total: int
    memory_free: int
    run_id: str | None = None
    no_four_bit: str | None = None
    host_free: int | None = None
    own_port: Annotated[int, 1, 65535] | None = None


@message(3, EITHER)
class Reject(Body):
    """Either side, refuses the handshake: a code for programs, a message and a hint for people. The
    sender closes the connection."""

    code: RejectCode
    message: str
    hint: str | None = None


@message(4, COORDINATOR, long=True)
class Setup(Body):
    """Coordinator to worker: the configuration and the indexes of the stages that the worker holds.
    Answered by READY when they are loaded, or by ERROR."""

    config: dict[str, Any]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable parameter; `index` is its place in the order of the whole model."""

    name: str
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage's trainable parameters, and hashes of the stored layers that it was read from.
    `ties`, {target: source}, lists in order its parameters that are shared with earlier stages."""

    index: int
    trainable: tuple[Parameter, ...]
    fingerprint: dict[str, str]
    ties: dict[str, str] = field(default_factory=dict)


@message(5, WORKER, long=True)
class Ready(Body):
    """Worker to coordinator, answers SETUP: its stages are loaded. For each stage, the trainable
    parameters with their index in the whole model, and which weights it read. Answered by START."""

    stages: tuple[LoadedStage, ...]


@message(6, COORDINATOR)
class Start(Body):
    """Coordinator to worker: which stages need a gradient of their input. `max_boundary_bytes` is
    the most bytes of tensors that cross a boundary at once in this run. STEP follows."""

    input_requires_grad: tuple[int, ...]
    max_boundary_bytes: Annotated[int, 1, frames.IMPOSSIBLE_FRAME_BYTES]


@message(7, WORKER, long=True)
class Log(Body):
    """Worker to coordinator: one line for the coordinator's log. No answer."""

    level: str
    text: str


@message(8, EITHER, long=True)
class Error(Body):
    """Either side: something failed; `kind` is the class name of the error. The receiver decides
    whether the step is retried or the run ends."""

    kind: str
    message: str
    hint: str | None = None


# --------------------------------------------------------------------------------------- a step


@dataclass(frozen=True, slots=True)
class OfStep(Body):
    """A message of one attempt at one step."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """How text is continued. With `cached` each stage keeps the keys and values of earlier tokens,
    and gets only the newest token of each text."""

    cached: bool


@message(10, COORDINATOR, long=True)
class Step(OfStep):
    """Coordinator to worker: a training step begins, or an evaluation pass (`train` false).
    `attempt` grows with every STEP of a run."""

    train: bool
    micro_batches: int
    """The number of micro-batches. With `decoding` fewer may come."""
    num_items: int
    """The number of label tokens in all micro-batches together."""
    loss_scale: Annotated[float, 1e-30, 1e30]
    summed: bool
    """The gradients of other replicas are added before norms are taken: GRADIENTS comes first, and
    LOAD_STATE for each stage."""
    first_micro_batch: int
    """Random numbers are drawn as if this many micro-batches of the step came before these."""
    in_flight_limits: tuple[int, ...]
    """How many forwards each stage of the run may store."""
    tasks: tuple[int, ...]
    """The order of the worker's tasks in a training step. An entry is twice the stage, plus 1 for a
    backward, and stands once for each micro-batch. Missing tasks go last: backwards before
    forwards, the oldest first."""
    sends: tuple[int, ...]
    """The order of the tensors that the worker sends, as in `tasks`, by the receiving stage."""
    receives: tuple[int, ...]
    """The order of the tensors that the worker receives, in the same form."""
    order_timeout_s: Patience
    """How long a task or tensor that is ready out of turn waits for the one whose turn it is."""
    direct: tuple[int, ...]
    """The boundaries (number of the stage before each) whose tensors go straight to the other
    worker."""
    decoding: Decoding | None = None
    """The evaluation pass continues texts: a micro-batch is one more part of the texts of a prompt,
    and LOSS brings the next tokens."""
    reference: bool | None = None
    """The evaluation pass runs without adapters."""
    predicts: bool | None = None
    """LOSS of the evaluation pass brings the predictions of each micro-batch."""
    continues: bool | None = None
    """The gradients that earlier passes of this step have left stay, and grow."""


@message(11, COORDINATOR, tensors=(0, MAX_TENSORS))
class Inputs(OfStep):
    """Coordinator to worker, ahead of the activations: the batch tensors that a stage needs for one
    micro-batch, in the order of `names`. Integers travel as int32 and are int64 again at the other
    end; `ones` are tensors of the value 1, of which only the shape travels."""

    stage: int
    micro_batch: int
    names: tuple[str, ...]
    ones: dict[str, Shape]

    @property
    def memory_bytes(self) -> int:
        return sum(8 * math.prod(shape) for shape in self.ones.values())


@dataclass(frozen=True, slots=True)
class Coded:
    """An encoded tensor: its codec, and the shape and dtype of the original."""

    codec: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class SideForm:
    """How a side tensor travels: whether it wants a gradient, and its encoding by a codec."""

    wants_gradient: bool
    coded: Coded | None = None


@dataclass(frozen=True, slots=True)
class BoundaryTensor(OfStep):
    """A tensor that crosses a stage boundary; `bandwidth_scheduler.py` queues large ones."""

    direction: ClassVar[str]
    stage: int
    micro_batch: int
    coded: Coded | None = None
    sides: tuple[SideForm, ...] | None = None

    @property
    def lane(self) -> Lane:
        return self.direction, self.stage


@message(12, EITHER, tensors=(1, 2))
class Forward(BoundaryTensor):
    """To the stage `stage`: its input hidden states. A worker sends it straight to the worker that
    holds the stage, or to the coordinator, which relays it undecoded. With `coded` the first
    tensors are a codec's encoding of hidden states of that shape and dtype. `sides` are the tensors
    that the model's blocks receive beside the hidden state, in the order of the model, if there are
    any. On the last stage it is answered by LOSS and BACKWARD."""

    direction = FORWARD


@message(13, EITHER, tensors=(1, 2))
class Backward(BoundaryTensor):
    """To the stage `stage`: the gradient of its output, on the paths of FORWARD. `sides` are the
    gradients of the side tensors that want one. No BACKWARD comes where nothing before the boundary
    is trained."""

    direction = BACKWARD


@message(14, WORKER, tensors=(0, MAX_TENSORS))
class Loss(OfStep):
    """Worker to coordinator, from the last stage: this micro-batch's part of the loss (the sum of
    its token losses in an evaluation), and what else was asked for, one tensor for each of `names`.
    The loss may be infinite or NaN. No answer."""

    micro_batch: int
    loss: AnyFloat
    names: tuple[str, ...] | None = None


@message(15, WORKER)
class BackwardDone(OfStep):
    """Worker to coordinator, from the lowest stage that computes gradients, if that is a worker's:
    the backward of this micro-batch is done. No answer."""

    micro_batch: int


@dataclass(frozen=True, slots=True)
class StageFigures:
    """The cost of one step at a stage: seconds of its forwards and backwards, its longest queues of
    arrivals and of stored forwards, and its process's peak memory. `arrive_forward_s` and
    `arrive_backward_s`: seconds on the wire of an arriving activation and gradient, each as if
    alone there. `prefetch_misses`: uses of a streamed layer before its copy was asked for."""

    forward_s: Seconds
    backward_s: Seconds
    queue_peak: int
    in_flight_peak: int
    peak_memory_bytes: int
    arrive_forward_s: Seconds
    arrive_backward_s: Seconds
    prefetch_misses: int | None = None


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage in one step: micro-batches whose output was not finite, and its figures."""

    index: int
    nonfinite: tuple[int, ...]
    figures: StageFigures


@dataclass(frozen=True, slots=True)
class RoundTrip:
    worker_id: WorkerId
    seconds: Seconds


@message(27, WORKER, tensors=(0, MAX_TENSORS), long=True)
class Gradients(OfStep):
    """Worker to coordinator, once all backwards of a stage are done: part `part` of its gradients,
    one tensor for each name; parameters without one are left out. `last` marks the last part. In a
    `summed` step these are all gradients, and LOAD_STATE of the kind `gradients` answers with the
    sums; gradients that are final before the last backward may come early, also as part 0. In other
    steps these are the gradients of its `ties`, and the stages of the sources get the sums."""

    stage: int
    part: int
    last: bool
    names: tuple[str, ...]


@message(21, WORKER, tensors=(0, MAX_TENSORS), long=True)
class GradientNorms(OfStep):
    """Worker to coordinator, when all micro-batches of a training step are through its stages: for
    each stage a float32 vector of per-parameter norms, and its figures. `round_trips` has one for
    each link to another worker, `direct_bytes` the bytes sent over these links. Answered by COMMIT
    or ABORT."""

    stages: tuple[StageReport, ...]
    round_trips: tuple[RoundTrip, ...]
    direct_bytes: int


@message(22, COORDINATOR, tensors=(0, MAX_TENSORS), long=True)
class Commit(OfStep):
    """Coordinator to worker: change the weights with this learning rate, after multiplying the
    gradients by `grad_scale`. The tensors are, by name, new weights of the coordinator's stages
    that are tied to weights of the worker. COMMIT is sent again after a lost link; a worker that
    has committed this step already changes nothing. Answered by COMMITTED, which need not be
    awaited before STEP."""

    learning_rate: float
    grad_scale: float
    names: tuple[str, ...] = ()
    adam: tuple[float, ...] | None = None
    """beta1, beta2, epsilon and weight decay of this step; null: as configured."""


@message(23, WORKER, long=True)
class Committed(OfStep):
    """Worker to coordinator, answers COMMIT: weights are changed. `spans`: its times, if kept."""

    spans: tuple[dict[str, Any], ...]


@message(24, COORDINATOR)
class Abort(OfStep):
    """Coordinator to worker: forget this attempt at the step. Answered by ABORTED, after which
    nothing of the attempt comes from this worker any more."""


@message(25, WORKER)
class Aborted(OfStep):
    """Worker to coordinator, answers ABORT: weights and optimizer are as before the attempt."""


@message(26, WORKER)
class StepFailed(OfStep):
    """Worker to coordinator: memory ran out in this attempt, which the worker has given up; no
    weight is changed. Answered by ABORT. The coordinator has the step done again, once."""

    message: str
    hint: str | None = None


# ---------------------------------------------------------------------------------------- state


@message(30, COORDINATOR, long=True)
class StateRequest(Body):
    """Coordinator to worker: send part `part` (from 0, in order) of a stage's state. A `checkpoint`
    is the state that the commit of `step` left (null: the state before the first commit). The first
    request for a step comes before the next commit; it keeps the state of all stages of the worker
    readable until another step is asked for. `weights` are those of the parameters `names`, as they
    are now. Answered by STATE. Legal while a step runs, too."""

    stage: int
    kind: StateKind
    part: int
    step: int | None = None
    names: tuple[str, ...] = ()


@message(31, WORKER, tensors=(0, MAX_TENSORS), long=True)
class State(Body):
    """Worker to coordinator, answers STATE_REQUEST: the part, one tensor for each name, and in
    `info` the named values that are no tensors; `last` marks the last part. No answer."""

    stage: int
    kind: StateKind
    part: int
    last: bool
    names: tuple[str, ...]
    info: dict[str, Any]


@message(32, COORDINATOR, tensors=(0, MAX_TENSORS), long=True)
class LoadState(Body):
    """Coordinator to worker: part `part` of state that a stage takes over. `checkpoint`: as STATE
    gave it. `adapter`: the tensors of an adapter file. `tied weights`: weights of other stages, by
    source, for its targets. `weights`: some parameters, whose optimizer goes on as it is. Within a
    step, `gradients`: sums over all replicas; `tied gradients`: sums over targets on other stages.
    Answered by STATE_LOADED."""

    stage: int
    kind: LoadKind
    part: int
    last: bool
    names: tuple[str, ...]
    info: dict[str, Any]


@message(33, WORKER)
class StateLoaded(Body):
    """Worker to coordinator, answers LOAD_STATE: the part is in place."""

    stage: int
    part: int


@message(34, COORDINATOR)
class Rewind(Body):
    """Coordinator to worker: the run goes on after the commit of `step` (null: before the first),
    since another worker lost its stages. Stages whose state after that commit is kept here go back
    to it; for the others LOAD_STATE follows. Answered by REWOUND."""

    step: int | None = None


@dataclass(frozen=True, slots=True)
class KeptStage:
    """A stage that went back to its kept state, and the digest of that state."""

    index: int
    digest: str


@message(35, WORKER)
class Rewound(Body):
    """Worker to coordinator, answers REWIND: the stages whose state was kept here."""

    stages: tuple[KeptStage, ...]


# ---------------------------------------------------------------------------------------- links


class Signal(Body):
    """A message that links send and swallow themselves, also between two pieces of a frame."""

    __slots__ = ()


@message(40, EITHER)
class Heartbeat(Signal):
    """Either side, when it has sent nothing for a while: I am alive. With `ping`, the sender's
    clock in seconds, the peer answers at once with the same number in `pong` and its own clock in
    `at`. Legal at any time, also between two pieces of a frame."""

    ping: float | None = None
    pong: float | None = None
    at: float | None = None


@message(42, EITHER)
class AskTurn(Signal):
    """The sender has a large frame of `frame_bytes`, which waits for TURN, at most 5 seconds.
    `lane` is a number as in STEP's `sends`. A second ASK_TURN says that it has waited long for
    another frame's turn. An ASK_TURN of 0 bytes answers a TURN for which no frame comes now. May
    come between pieces of a frame."""

    frame_bytes: int
    lane: int


@message(43, EITHER)
class Turn(Signal):
    """To the sender of large frames: with `granted` the frame that it asked for may come, as no
    other frame fills the network here. While `alone` the sender need not ask: no other peer sends
    large frames. May come between pieces of a frame."""

    granted: bool
    alone: bool


@message(44, EITHER)
class ArrivalRate(Signal):
    """To the sender of large frames: how fast the last one arrived, and whether it shared the
    network. May come between two pieces of a frame."""

    bytes_per_s: Annotated[float, 0.0, 1e18]
    shared: bool


@message(41, EITHER)
class Bye(Body):
    """Either side: I close the connection on purpose. No answer."""

    reason: str


@message(50, EITHER, tensors=(0, MAX_TENSORS), long=True)
class Control(Body):
    """Either side: the extension point. `name` says what `data` and the tensors mean. With
    `request`, a number of the sender's choice, it is answered by a CONTROL of the same name with
    that number in `answers`, and with `error` if it failed or the name is not known there. Without
    `request`, a receiver that does not know the name ignores it."""

    name: Raw
    data: Any = None
    request: int | None = None
    answers: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PeerAddress:
    id: WorkerId
    ip: str
    port: Annotated[int, 1, 65535]


@message(60, COORDINATOR)
class Connect(Body):
    """Coordinator to worker: open links to these other workers. Answered by CONNECTED."""

    peers: tuple[PeerAddress, ...]
    timeout_s: Patience


@dataclass(frozen=True, slots=True)
class PeerResult:
    id: WorkerId
    problem: str | None = None


@message(61, WORKER)
class Connected(Body):
    """Worker to coordinator, answers CONNECT: for each worker, why there is no link, or null."""

    peers: tuple[PeerResult, ...]


@message(62, DIALLER)
class PeerHello(Greeting):
    """First message of a link between two workers: the run, which worker I mean, and which one I
    am. Answered by PEER_WELCOME or REJECT."""

    run_id: str
    worker_id: WorkerId
    from_id: WorkerId
    max_frame_bytes: FrameBytes


@message(63, LISTENER)
class PeerWelcome(Greeting):
    """Accepts PEER_HELLO; FORWARD and BACKWARD follow in both directions."""


@message(64, WORKER)
class PeerLost(Body):
    """Worker to coordinator: the link to `worker_id` is gone; the step is done again. No answer."""

    worker_id: WorkerId
    reason: str


@message(65, WORKER)
class Leaving(Body):
    """Worker to coordinator: this process has been told to end. It still serves requests, so that
    the run can save its state, until BYE comes or its patience is over. No answer."""

    reason: str


@message(66, COORDINATOR)
class Quit(Body):
    """Coordinator to worker: you answer nothing any more; end this process at once, so that another
    one can take its place. Obeyed by the thread that reads. No answer."""

    reason: str


MAX_SHOWN = 2000
"""Most characters of a peer's text that are shown."""


def shortened(text: str) -> str:
    """A peer's text, which may have millions of characters, cut to MAX_SHOWN of them."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


class OtherVersion(Body):
    """Stands for a received greeting of another protocol version, which may have other fields."""

    __slots__ = ("package", "protocol", "spec")

    def __init__(self, greeting: type[Body], protocol: int, package: Any) -> None:
        self.spec = greeting.spec  # type: ignore[misc]  # of an instance: what it stands for
        self.protocol = protocol
        self.package = package

    def error(self) -> ProtocolError:
        older = "the peer" if self.protocol < PROTOCOL_VERSION else "this machine"
        return ProtocolError(
            f"the peer speaks protocol version {self.protocol} (package {self.package!r}), "
            f"this machine speaks {PROTOCOL_VERSION}",
            hint=f"install the same version of hetero-framework on both; {older} is the older one",
        )


# -------------------------------------------------------------------------------------- messages


def _nothing() -> None:
    """The `seen` of messages that nobody counts."""


class Message:
    """One message: its fields (`body`), its tensors, and the buffer that holds received tensors.
    Making one checks it and raises ProtocolError."""

    __slots__ = (
        *("_buffer_release", "_fields", "body", "field_bytes", "seen"),
        *("tensor_bytes", "tensors"),
    )

    def __init__(self, body: Body, tensors: Sequence[WireTensor] = ()) -> None:
        self.body = body
        self.field_bytes = self.tensor_bytes = 0
        """Bytes of a received message: about the memory of its fields, and its tensors' bytes."""
        self.seen: Callable[[], object] = _nothing
        """To be called when a received message is handled: `Waiting` then counts it no more."""
        self.tensors = tuple(tensors)
        self._fields = body.spec.fields.pack(body)
        self._buffer_release: Callable[[], None] | None = None
        body.spec.check(self._fields, len(self.tensors))

    @property
    def name(self) -> str:
        return self.body.spec.name

    @property
    def shapes(self) -> frames.Shapes:
        return tuple((frames.BY_NAME[tensor.dtype], tensor.shape) for tensor in self.tensors)

    @property
    def payload_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors)

    def expect(self, kind: type[B]) -> B:
        """The body, if it is a `kind`; ProtocolError otherwise."""
        if not isinstance(self.body, kind):
            raise ProtocolError(f"{kind.spec.name} was expected, {self.name} came")
        return self.body

    def release(self) -> None:
        """Give the receive buffer back; calling it again does nothing. Tensors made from this
        message are then void. If nobody calls it, the buffer is not reused."""
        release, self._buffer_release = self._buffer_release, None
        self.tensors = ()
        if release is not None:
            release()

    def __repr__(self) -> str:
        shapes = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in self.tensors]
        return f"Message({self.body!r}, tensors={shapes})"


def not_agreed(name: str, rest: int, max_frame_bytes: int, peer: str) -> ProtocolError:
    """The error for a frame of `rest` bytes, which is larger than agreed with `peer`."""
    agreed = f"the {max_frame_bytes} bytes agreed with {peer}"
    return ProtocolError(f"{name}: a frame of {rest} bytes is larger than {agreed}")


def encode(
    message: Message, max_frame_bytes: int = frames.IMPOSSIBLE_FRAME_BYTES
) -> list[bytes | memoryview]:
    """The frame as buffers to write one after the other; tensor bytes are not copied. Raises
    ProtocolError when the header or the frame is larger than may be sent."""
    spec, tensors = message.body.spec, message.tensors
    payload = [tensor.data for tensor in tensors if tensor.data.nbytes]
    payload_bytes = sum(map(len, payload))
    shapes = frames.pack_shapes(tensors)
    header = frames.pack_header(
        spec.name, spec.number, message._fields, shapes, spec.max_header_bytes
    )
    rest = 4 + len(header) + payload_bytes
    if rest > max_frame_bytes:
        raise not_agreed(spec.name, rest, max_frame_bytes, "the peer")
    return [frames.PREFIX.pack(rest, len(header)) + header, *payload]


@dataclass(slots=True)
class FrameHeader:
    """A checked header; `attach` completes the message with the tensor bytes."""

    body: Body
    shapes: frames.Shapes
    payload_bytes: int
    raw: bytes
    field_bytes: int = 0

    def attach(
        self,
        payload: bytes | bytearray | memoryview = b"",
        release: Callable[[], None] | None = None,
    ) -> Message:
        """The message whose tensors are views of `payload`; `release` gives the buffer back."""
        view = memoryview(payload)
        if view.nbytes != self.payload_bytes:
            wanted = f"{self.payload_bytes} tensor bytes expected"
            raise ProtocolError(f"{self.body.spec.name}: {wanted}, got {view.nbytes}")
        message = self.announced()
        message.tensors = frames.split(self.shapes, view)
        message.tensor_bytes = self.payload_bytes
        message._buffer_release = release
        return message

    def announced(self) -> Message:
        """The message without its tensors, for decisions before they have come."""
        message = Message.__new__(Message)  # read_header has checked it already
        message.body = self.body
        message.tensors = ()
        message.field_bytes, message.tensor_bytes = self.field_bytes, 0
        message._buffer_release, message.seen = None, _nothing
        return message


def read_header(
    prefix: bytes,
    header: bytes,
    payload_bytes: int,
    max_frame_bytes: int = frames.IMPOSSIBLE_FRAME_BYTES,
    opening: Container[int] | None = None,
) -> FrameHeader:
    """Decode and check a header. Raises ProtocolError, which names what came, unless it is a known
    message whose tensors fill exactly `payload_bytes`. A number that is not in `opening` and a need
    of more than `max_frame_bytes` of memory are refused, too."""
    values = frames.unpack_header(header)
    number, fields = values["t"], values["m"]
    if not frames.is_int(number) or number not in BODIES:
        raise ProtocolError(
            f"unknown message type {frames.brief(number)}",
            hint="the peer may run a later version of hetero-framework",
        )
    spec = BODIES[number].spec
    if opening is not None and number not in opening:
        raise ProtocolError(f"{spec.name} came before a greeting")
    frames.check_header(spec.name, header, spec.max_header_bytes)
    spec.check_count(values["x"])
    shapes = frames.unpack_shapes(spec.name, values["x"], payload_bytes)
    if not isinstance(fields, dict):
        raise ProtocolError(f"{spec.name}: the fields must be a map, got {frames.brief(fields)}")
    body: Body
    version: Any = fields.get("protocol")
    is_other = frames.is_int(version) and version != PROTOCOL_VERSION
    if is_other and issubclass(BODIES[number], Greeting):
        body = OtherVersion(BODIES[number], version, fields.get("package"))
    else:
        spec.check(fields, len(shapes))
        body = spec.fields.unpack(fields)
        if body.memory_bytes > max_frame_bytes:
            wanted = f"it asks for {body.memory_bytes} bytes of memory"
            raise ProtocolError(f"{spec.name}: {wanted}; at most {max_frame_bytes} are agreed")
    raw, in_memory = bytes(prefix) + bytes(header), frames.field_bytes(header)
    return FrameHeader(body, shapes, payload_bytes, raw, in_memory)


def decode(frame: bytes | bytearray | memoryview) -> Message:
    """The message of one whole frame in memory; a link reads a frame in segments."""
    view = memoryview(frame)
    prefix = bytes(view[:PREFIX_BYTES])
    header_bytes, payload_bytes = frames.parse_prefix(prefix, frames.IMPOSSIBLE_FRAME_BYTES)
    if len(view) != PREFIX_BYTES + header_bytes + payload_bytes:
        raise ProtocolError(f"a frame of {len(view)} bytes announces another length")
    rest = view[PREFIX_BYTES:]
    header = read_header(prefix, bytes(rest[:header_bytes]), payload_bytes)
    return header.attach(rest[header_bytes:])
