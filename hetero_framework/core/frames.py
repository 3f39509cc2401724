"""Messages and frames as pure bytes in, messages out. No sockets, no torch; only msgpack.

A frame on the wire (all integers of the prefix big-endian, tensor bytes little-endian):

    u64  length of the rest of the frame (4 + header + tensor bytes)
    u32  length of the header
    ...  msgpack header {"t": message type, "m": fields, "x": [[dtype code, shape], ...]}
    ...  the raw bytes of the tensors, back to back, nothing between them

`SPEC` declares every message once: who sends it, what answers it, its fields and how many tensors
it carries. A message is checked when it is made and when it is received, and everything about a
received frame is checked before memory for its tensors is taken. Whatever bytes arrive, the only
exception that leaves this module is ProtocolError. `session.py` holds the legal order.

docs/protocol.md is the byte by byte specification; its tables are generated from this module.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack

from hetero_framework.errors import ProtocolError

PROTOCOL_VERSION = 3

PREFIX = struct.Struct(">QI")
PREFIX_BYTES = PREFIX.size

MAX_HEADER_BYTES = 64 * 1024
"""Largest header of an ordinary message."""
MAX_LONG_HEADER_BYTES = 16 * 1024 * 1024
"""Largest header of the messages that carry lists of names or settings (`MessageSpec.long`)."""
HANDSHAKE_MAX_FRAME_BYTES = 64 * 1024
"""Largest frame from a peer that has not finished the handshake: it carries no tensors."""
DEFAULT_MAX_FRAME_BYTES = 1 << 30
"""Largest frame a coordinator proposes in HELLO unless told otherwise."""
IMPOSSIBLE_FRAME_BYTES = 1 << 40
"""No frame is that long, so a prefix that says so was not written by this protocol."""
MAX_TENSORS = 65_536
MAX_DIMS = 8
MAX_DEPTH = 16
"""Deepest nesting of lists and maps in the fields of a message."""


@dataclass(frozen=True)
class DType:
    """One row of the fixed dtype table: `code` travels, `itemsize` is in bytes."""

    name: str
    code: int
    itemsize: int


DTYPES = (
    DType("float32", 1, 4),
    DType("float16", 2, 2),
    DType("bfloat16", 3, 2),
    DType("float64", 4, 8),
    DType("int64", 5, 8),
    DType("int32", 6, 4),
    DType("int16", 7, 2),
    DType("int8", 8, 1),
    DType("uint8", 9, 1),
    DType("bool", 10, 1),
)
_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_CODE = {dtype.code: dtype for dtype in DTYPES}


class MessageType(IntEnum):
    """The numbers on the wire. They never change their meaning; SPEC says the rest."""

    HELLO = 1
    WELCOME = 2
    REJECT = 3
    SETUP = 4
    READY = 5
    START = 6
    LOG = 7
    ERROR = 8
    STEP = 10
    INPUTS = 11
    FORWARD = 12
    BACKWARD = 13
    LOSS = 14
    BACKWARD_DONE = 15
    GRADIENT_NORMS = 21
    COMMIT = 22
    COMMITTED = 23
    ABORT = 24
    ABORTED = 25
    STATE_REQUEST = 30
    STATE = 31
    LOAD_STATE = 32
    STATE_LOADED = 33
    HEARTBEAT = 40
    BYE = 41
    CONTROL = 50
    CONNECT = 60
    CONNECTED = 61
    PEER_HELLO = 62
    PEER_WELCOME = 63
    PEER_LOST = 64


_TYPES = {int(kind): kind for kind in MessageType}


# ---------------------------------------------------------------------------------------- fields


@dataclass(frozen=True)
class Kind:
    """The type of one field: how it is called in errors and documents, and what it accepts."""

    name: str
    accepts: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    if type(value) is not int and (not isinstance(value, int) or isinstance(value, bool)):
        return False
    return 0 <= value < 2**63


def _is_float(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list_of(kind: Kind) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(kind.accepts, value))


def _list_of(kind: Kind) -> Kind:
    return Kind(f"list of {kind.name}", _is_list_of(kind))


def _map_of(kind: Kind) -> Kind:
    return Kind(
        f"map to {kind.name}",
        lambda value: isinstance(value, dict) and all(map(kind.accepts, value.values())),
    )


def _or_none(kind: Kind) -> Kind:
    return Kind(f"{kind.name} or null", lambda value: value is None or kind.accepts(value))


def _one_of(*values: str) -> Kind:
    return Kind(" or ".join(f'"{value}"' for value in values), lambda value: value in values)


def _record(**fields: Kind) -> Kind:
    """A map that has at least these fields; others may stand beside them."""
    name = "{" + ", ".join(f"{key}: {kind.name}" for key, kind in fields.items()) + ", ...}"

    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and all(
            key in value and kind.accepts(value[key]) for key, kind in fields.items()
        )

    return Kind(name, accepts)


INT = Kind("int", _is_int)
FLOAT = Kind("float", _is_float)
BOOL = Kind("bool", lambda value: isinstance(value, bool))
STR = Kind("string", lambda value: isinstance(value, str))
ID = Kind("int or string", lambda value: _is_int(value) or isinstance(value, str))
MAP = Kind("map", lambda value: isinstance(value, dict))
LIST = Kind("list", lambda value: isinstance(value, (list, tuple)))
ANY = Kind("anything", lambda value: True)
NAMES = _list_of(STR)


# -------------------------------------------------------------------------------------- messages

COORDINATOR = "coordinator"
WORKER = "worker"
DIALLER = "connecting worker"
LISTENER = "accepting worker"
EITHER = "either"


@dataclass(frozen=True)
class MessageSpec:
    """What one message is. `about` says who sends it to whom and what answers it.

    `sender` is "coordinator", "worker", on a link between two workers "connecting worker" or
    "accepting worker", or "either"; the other side receives. `tensors` is the smallest and
    largest number of tensors; `named` means one tensor for each entry of the field
    `names`. `long` allows a header up to MAX_LONG_HEADER_BYTES.
    """

    about: str
    sender: str
    required: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)
    tensors: tuple[int, int] = (0, 0)
    named: bool = False
    long: bool = False

    @property
    def max_header_bytes(self) -> int:
        return MAX_LONG_HEADER_BYTES if self.long else MAX_HEADER_BYTES


_STEP = {"step": INT, "attempt": INT}
_CODED = {"codec": STR, "shape": _list_of(INT), "dtype": STR}
_PEER = {"protocol": INT, "package": STR, "run_id": STR, "worker_id": ID}
_MANY = (0, MAX_TENSORS)

SPEC: dict[MessageType, MessageSpec] = {
    MessageType.HELLO: MessageSpec(
        "Coordinator to worker, the first message of a connection: who I am, which worker I mean, "
        "the largest frame either side may send from now on. Answered by WELCOME or REJECT.",
        COORDINATOR,
        {
            "protocol": INT,
            "package": STR,
            "run_id": STR,
            "worker_id": ID,
            "max_frame_bytes": INT,
        },
    ),
    MessageType.WELCOME: MessageSpec(
        "Worker to coordinator, accepts HELLO: versions, device and memory (bytes), and the last "
        "step that this process has committed in `run_id`, if any. Answered by SETUP or REJECT.",
        WORKER,
        {
            "protocol": INT,
            "package": STR,
            "worker_id": ID,
            "torch": STR,
            "transformers": STR,
            "device": STR,
            "device_label": STR,
            "memory_total": INT,
            "memory_free": INT,
        },
        {"last_step": _or_none(INT), "run_id": _or_none(STR), "info": MAP},
    ),
    MessageType.REJECT: MessageSpec(
        "Either side, refuses the handshake: a code for programs, a message and a hint for "
        "people. The sender closes the connection.",
        EITHER,
        {"code": STR, "message": STR},
        {"hint": _or_none(STR)},
    ),
    MessageType.SETUP: MessageSpec(
        "Coordinator to worker: the configuration and the stages that the worker holds. Answered "
        "by READY when they are loaded, or by ERROR.",
        COORDINATOR,
        {
            "config": MAP,
            "stages": _list_of(_record(index=INT, start=INT, end=INT, is_first=BOOL, is_last=BOOL)),
            "num_stages": INT,
            "num_layers": INT,
            "settings": MAP,
        },
        long=True,
    ),
    MessageType.READY: MessageSpec(
        "Worker to coordinator, answers SETUP: its stages are loaded; the trainable parameters of "
        "each with their rank in the whole model. Answered by START.",
        WORKER,
        {"stages": _list_of(_record(index=INT, trainable=LIST)), "info": MAP},
        long=True,
    ),
    MessageType.START: MessageSpec(
        "Coordinator to worker: all workers are ready; whether a stage's input needs a gradient. "
        "No answer; STEP follows.",
        COORDINATOR,
        {"stages": _list_of(_record(index=INT, input_requires_grad=BOOL))},
    ),
    MessageType.LOG: MessageSpec(
        "Worker to coordinator: one line for the coordinator's log. No answer.",
        WORKER,
        {"level": STR, "text": STR},
        long=True,
    ),
    MessageType.ERROR: MessageSpec(
        "Either side: something failed; `kind` is the class name of the error. The receiver "
        "decides whether the step is retried or the run ends.",
        EITHER,
        {"kind": STR, "message": STR, "exit_code": INT},
        {"stage": _or_none(INT), "micro_batch": _or_none(INT), "hint": _or_none(STR)},
        long=True,
    ),
    MessageType.STEP: MessageSpec(
        "Coordinator to worker: a training step (or one evaluation pass, `train` false) begins "
        "with so many micro-batches; `num_items` label tokens in all of them together. `attempt` "
        "grows with every STEP of a run. `in_flight_limits` says how many forwards each stage of "
        "the run may store, `policy` are the numbers that order tasks, `direct` the boundaries "
        "(numbers of the stage before each) whose tensors go straight to the other worker.",
        COORDINATOR,
        {
            **_STEP,
            "train": BOOL,
            "micro_batches": INT,
            "num_items": INT,
            "loss_scale": FLOAT,
            "in_flight_limits": _list_of(_record(index=INT, limit=INT)),
            "policy": _list_of(FLOAT),
            "direct": _list_of(INT),
        },
    ),
    MessageType.INPUTS: MessageSpec(
        "Coordinator to worker, ahead of the activations: the batch tensors that a stage needs "
        "for one micro-batch, in the order of `names`. Integers travel as int32 and are int64 "
        "again at the other end; `ones` are tensors of the value 1, of which only the shape "
        "travels.",
        COORDINATOR,
        {**_STEP, "stage": INT, "micro_batch": INT, "names": NAMES, "ones": _map_of(_list_of(INT))},
        tensors=_MANY,
        named=True,
    ),
    MessageType.FORWARD: MessageSpec(
        "To the stage `stage`: its input hidden states. A worker sends it straight to the worker "
        "that holds the stage, or to the coordinator, which relays it undecoded. With `codec` the "
        "tensors are an encoded form of one of shape `shape` and type `dtype`. On the last stage "
        "it is answered by LOSS and BACKWARD.",
        EITHER,
        {**_STEP, "stage": INT, "micro_batch": INT},
        _CODED,
        tensors=(1, 2),
    ),
    MessageType.BACKWARD: MessageSpec(
        "To the stage `stage`: the gradient of its output, on the ways of FORWARD. There is none "
        "where nothing before the boundary is trained.",
        EITHER,
        {**_STEP, "stage": INT, "micro_batch": INT},
        _CODED,
        tensors=(1, 2),
    ),
    MessageType.LOSS: MessageSpec(
        "Worker to coordinator, from the last stage: this micro-batch's part of the loss (the sum "
        "of its token losses in an evaluation). It may be infinite or NaN. No answer.",
        WORKER,
        {**_STEP, "micro_batch": INT, "loss": FLOAT},
    ),
    MessageType.BACKWARD_DONE: MessageSpec(
        "Worker to coordinator, from the lowest stage that computes gradients, if that is a "
        "worker's: the backward of this micro-batch is done. No answer.",
        WORKER,
        {**_STEP, "micro_batch": INT},
    ),
    MessageType.GRADIENT_NORMS: MessageSpec(
        "Worker to coordinator, when all micro-batches of a training step are through its stages: "
        "for each stage a float32 vector of per-parameter norms, followed by the head's gradient "
        "where `tied` (head and embedding are one weight); `nonfinite` are the micro-batches "
        "whose output there was not finite; `stats` are the times and the memory of the step. "
        "Answered by COMMIT or ABORT.",
        WORKER,
        {
            **_STEP,
            "stages": _list_of(_record(index=INT, nonfinite=_list_of(INT), tied=BOOL)),
            "stats": MAP,
        },
        tensors=_MANY,
        long=True,
    ),
    MessageType.COMMIT: MessageSpec(
        "Coordinator to worker: change the weights with this learning rate, after multiplying the "
        "gradients by `grad_scale`. The tensor is the embedding's new weight for a head that is "
        "one with it. It is sent again after a lost link; a worker that has committed this step "
        "already changes nothing. Answered by COMMITTED, which need not be awaited before STEP.",
        COORDINATOR,
        {**_STEP, "learning_rate": FLOAT, "grad_scale": FLOAT},
        tensors=(0, 1),
    ),
    MessageType.COMMITTED: MessageSpec(
        "Worker to coordinator, answers COMMIT: the weights are changed; the recorded times of the "
        "step, if any.",
        WORKER,
        {**_STEP, "spans": LIST},
        long=True,
    ),
    MessageType.ABORT: MessageSpec(
        "Coordinator to worker: forget this attempt at the step. Answered by ABORTED, after which "
        "nothing of the attempt comes from this worker any more.",
        COORDINATOR,
        _STEP,
    ),
    MessageType.ABORTED: MessageSpec(
        "Worker to coordinator, answers ABORT: weights and optimizer are as before the attempt.",
        WORKER,
        _STEP,
    ),
    MessageType.STATE_REQUEST: MessageSpec(
        "Coordinator to worker: send part `part` (from 0, in order) of a stage's state. Answered "
        "by STATE.",
        COORDINATOR,
        {"stage": INT, "kind": _one_of("checkpoint", "export"), "part": INT},
    ),
    MessageType.STATE: MessageSpec(
        "Worker to coordinator, answers STATE_REQUEST: the part, one tensor for each name, and in "
        "`info` the named values that are no tensors; `last` marks the last part. No answer.",
        WORKER,
        {
            "stage": INT,
            "kind": _one_of("checkpoint", "export"),
            "part": INT,
            "last": BOOL,
            "names": NAMES,
            "info": MAP,
        },
        tensors=_MANY,
        named=True,
        long=True,
    ),
    MessageType.LOAD_STATE: MessageSpec(
        "Coordinator to worker: part `part` of what a stage shall take over: a `checkpoint` as "
        "STATE gave it, the tensors of an `adapter` file, or the embedding's weight for a head "
        "that is one with it (`tied`). Answered by STATE_LOADED.",
        COORDINATOR,
        {
            "stage": INT,
            "kind": _one_of("checkpoint", "adapter", "tied"),
            "part": INT,
            "last": BOOL,
            "names": NAMES,
            "info": MAP,
        },
        tensors=_MANY,
        named=True,
        long=True,
    ),
    MessageType.STATE_LOADED: MessageSpec(
        "Worker to coordinator, answers LOAD_STATE: the part is in place.",
        WORKER,
        {"stage": INT, "part": INT},
    ),
    MessageType.HEARTBEAT: MessageSpec(
        "Either side, when it has sent nothing for a while: I am alive. With `ping`, the sender's "
        "clock in seconds, the peer answers at once with the same number in `pong` and its own "
        "clock in `at`. The transport sends and swallows them.",
        EITHER,
        optional={"ping": FLOAT, "pong": FLOAT, "at": FLOAT},
    ),
    MessageType.BYE: MessageSpec(
        "Either side: I close the connection on purpose. No answer.",
        EITHER,
        {"reason": STR},
    ),
    MessageType.CONTROL: MessageSpec(
        "Either side: the extension point. `name` says what `data` and the tensors mean. With "
        "`request`, a number of the sender's choice, it is answered by a CONTROL of the same name "
        "with that number in `answers`, and with `error` if it failed or the name is not known "
        "there. Without `request`, a receiver that does not know the name ignores it.",
        EITHER,
        {"name": STR, "data": ANY},
        {"request": INT, "answers": INT, "error": STR},
        tensors=_MANY,
        long=True,
    ),
    MessageType.CONNECT: MessageSpec(
        "Coordinator to worker: open links to these other workers. Answered by CONNECTED.",
        COORDINATOR,
        {"peers": _list_of(_record(id=ID, ip=STR, port=INT)), "timeout_s": FLOAT},
    ),
    MessageType.CONNECTED: MessageSpec(
        "Worker to coordinator, answers CONNECT: for each of them null, or why there is no link.",
        WORKER,
        {"peers": _list_of(_record(id=ID, problem=_or_none(STR)))},
    ),
    MessageType.PEER_HELLO: MessageSpec(
        "First message of a link between two workers: the run, which worker I mean, and which one "
        "I am. Answered by PEER_WELCOME or REJECT.",
        DIALLER,
        {**_PEER, "from_id": ID, "max_frame_bytes": INT},
    ),
    MessageType.PEER_WELCOME: MessageSpec(
        "Accepts PEER_HELLO; FORWARD and BACKWARD follow in both directions.",
        LISTENER,
        _PEER,
    ),
    MessageType.PEER_LOST: MessageSpec(
        "Worker to coordinator: the link to that worker is gone. No answer; the coordinator has "
        "the step done again without it.",
        WORKER,
        {"worker_id": ID, "reason": STR},
    ),
}


@dataclass(frozen=True)
class WireTensor:
    """A tensor as it travels: dtype name, shape, and its contiguous little-endian bytes.

    `data` is not copied: whoever owns the memory must leave it alone until the message is sent.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.dtype not in _BY_NAME:
            known = ", ".join(_BY_NAME)
            raise ProtocolError(f"dtype {self.dtype!r} cannot travel (known: {known})")
        object.__setattr__(self, "shape", tuple(self.shape))
        expected = _tensor_bytes(_BY_NAME[self.dtype], self.shape)
        view = memoryview(self.data)
        if view.nbytes != expected:
            raise ProtocolError(
                f"a {self.dtype} tensor of shape {list(self.shape)} has {expected} bytes, "
                f"got {view.nbytes}"
            )
        if view.nbytes == 0:
            view = memoryview(b"")
        elif not view.c_contiguous:
            raise ProtocolError(f"the bytes of a {self.dtype} tensor are not contiguous")
        object.__setattr__(self, "data", view.cast("B"))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Message:
    """One message: its type, its fields (`meta`) and its tensors.

    Making one checks it against SPEC and raises ProtocolError. A received message also keeps the
    bytes it came as, so that a relay can pass them on undecoded, and the buffer that holds its
    tensors, which `release` gives back.
    """

    __slots__ = ("_buffer_release", "_raw", "meta", "tensors", "type")

    def __init__(
        self,
        type: MessageType,
        meta: dict[str, Any] | None = None,
        tensors: tuple[WireTensor, ...] | list[WireTensor] = (),
    ) -> None:
        self.type = type
        self.meta: dict[str, Any] = {} if meta is None else meta
        self.tensors: tuple[WireTensor, ...] = tuple(tensors)
        self._raw: tuple[bytes, memoryview] | None = None
        self._buffer_release: Callable[[], None] | None = None
        check(self)

    @property
    def payload_bytes(self) -> int:
        return sum([tensor.nbytes for tensor in self.tensors]) if self.tensors else 0

    def forward_buffers(self) -> list[bytes | memoryview]:
        """The very bytes that were received, for a relay. ProtocolError after `release`."""
        if self._raw is None:
            raise ProtocolError(f"{self.type.name} was not received or is released already")
        head, payload = self._raw
        return [head, payload] if payload.nbytes else [head]

    def release(self) -> None:
        """Give the receive buffer back for the next frame; calling it again does nothing.

        Tensors made from this message must not be used afterwards. A message that is never
        released is safe: its buffer is simply not reused.
        """
        release, self._buffer_release = self._buffer_release, None
        self._raw = None
        self.tensors = ()
        if release is not None:
            release()

    def __repr__(self) -> str:
        shapes = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in self.tensors]
        return f"Message({self.type.name}, {self.meta!r}, tensors={shapes})"


_GREETINGS = (
    MessageType.HELLO,
    MessageType.WELCOME,
    MessageType.PEER_HELLO,
    MessageType.PEER_WELCOME,
)


def check(message: Message) -> None:
    """Raise ProtocolError unless the message has exactly the fields and tensors of its SPEC."""
    _check_fields(message.type, message.meta, len(message.tensors))


def check_version(message: Message) -> None:
    """Raise ProtocolError when HELLO or WELCOME comes from another protocol version."""
    theirs = message.meta.get("protocol", PROTOCOL_VERSION)
    if theirs != PROTOCOL_VERSION:
        package = message.meta.get("package")
        older = "the peer" if theirs < PROTOCOL_VERSION else "this machine"
        raise ProtocolError(
            f"the peer speaks protocol version {theirs} (package {package!r}), "
            f"this machine speaks {PROTOCOL_VERSION}",
            hint=f"install the same version of hetero-framework on both; {older} is the older one",
        )


def _check_fields(kind: MessageType, meta: Any, num_tensors: int) -> None:
    spec = SPEC.get(kind)
    if spec is None:
        raise ProtocolError(f"unknown message type {kind!r}")
    name = kind._name_  # `name` takes two calls
    if not isinstance(meta, dict):
        raise ProtocolError(f"{name}: the fields must be a map, got {_shown(meta)}")
    _check_map(name, meta, 0)
    if kind in _GREETINGS and _is_other_version(meta):
        # A later version may have other fields; `check_version` makes a readable refusal of it.
        return
    for key, field_kind in spec.required.items():
        if key not in meta:
            raise ProtocolError(f"{name}: field {key!r} is missing")
        if not field_kind.accepts(meta[key]):
            raise _wrong_field(name, key, field_kind, meta[key])
    for key, value in meta.items() if len(meta) > len(spec.required) else ():
        if key in spec.required:
            continue
        if key not in spec.optional:
            known = ", ".join([*spec.required, *spec.optional]) or "none"
            raise ProtocolError(f"{name}: unknown field {_shown(key)} (known: {known})")
        if not spec.optional[key].accepts(value):
            raise _wrong_field(name, key, spec.optional[key], value)
    low, high = spec.tensors
    if spec.named:
        low = high = len(meta["names"])
    if not low <= num_tensors <= high:
        wanted = str(low) if low == high else f"{low} to {high}"
        raise ProtocolError(f"{name}: {wanted} tensors expected, got {num_tensors}")


def _is_other_version(meta: dict[str, Any]) -> bool:
    version = meta.get("protocol")
    return _is_int(version) and version != PROTOCOL_VERSION


def _wrong_field(name: str, key: str, kind: Kind, value: Any) -> ProtocolError:
    return ProtocolError(f"{name}: field {key!r} must be {kind.name}, got {_shown(value)}")


_SIMPLE = (bool, float, str, bytes, type(None))
_SURE = frozenset(_SIMPLE)


def _check_plain(name: str, value: Any, depth: int) -> None:
    """Fields are what msgpack carries unchanged: null, bool, int, float, str, bytes, list, map."""
    if depth > MAX_DEPTH:
        raise ProtocolError(f"{name}: fields are nested deeper than {MAX_DEPTH}")
    if isinstance(value, _SIMPLE):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ProtocolError(f"{name}: an integer does not fit 64 bits")
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(name, item, depth + 1)
    elif isinstance(value, dict):
        _check_map(name, value, depth)
    else:
        raise ProtocolError(f"{name}: {type(value).__name__} cannot travel in a message's fields")


def _check_map(name: str, value: dict[Any, Any], depth: int) -> None:
    for key, item in value.items():
        if not isinstance(key, str):
            raise ProtocolError(f"{name}: map keys must be strings, got {_shown(key)}")
        if type(item) not in _SURE and not (type(item) is int and 0 <= item < 2**63):
            _check_plain(name, item, depth + 1)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _tensor_bytes(dtype: DType, shape: Any) -> int:
    """Bytes of a tensor; ProtocolError unless `shape` is at most MAX_DIMS non-negative ints."""
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMS:
        raise ProtocolError(f"a tensor's shape has at most {MAX_DIMS} sizes, got {_shown(shape)}")
    for size in shape:
        if not _is_int(size):
            raise ProtocolError(f"a tensor's sizes are non-negative ints, got {_shown(shape)}")
    return math.prod(shape) * dtype.itemsize


# ---------------------------------------------------------------------------------------- frames


def encode(
    message: Message, max_frame_bytes: int = IMPOSSIBLE_FRAME_BYTES
) -> list[bytes | memoryview]:
    """The frame as buffers to write one after the other; tensor bytes are not copied.

    Raises ProtocolError when the header or the frame is larger than what may be sent.
    """
    tensors = [[_BY_NAME[tensor.dtype].code, list(tensor.shape)] for tensor in message.tensors]
    try:
        header: bytes = msgpack.packb({"t": int(message.type), "m": message.meta, "x": tensors})
    except ValueError as error:  # a string that is not valid Unicode, a map that is too large
        raise ProtocolError(f"{message.type.name}: cannot be written: {error}") from error
    limit = SPEC[message.type].max_header_bytes
    if len(header) > limit:
        raise ProtocolError(
            f"{message.type.name}: a header of {len(header)} bytes is larger than {limit}"
        )
    rest = 4 + len(header) + message.payload_bytes
    if rest > max_frame_bytes:
        raise ProtocolError(
            f"{message.type.name}: a frame of {rest} bytes is larger than the "
            f"{max_frame_bytes} bytes agreed with the peer"
        )
    payload = [tensor.data for tensor in message.tensors if tensor.nbytes]
    return [PREFIX.pack(rest, len(header)) + header, *payload]


def check_start(data: bytes | bytearray | memoryview) -> None:
    """Raise ProtocolError when the first bytes of a frame (one or more) cannot be a prefix.

    No frame reaches IMPOSSIBLE_FRAME_BYTES, so its first three bytes are zero. Text, a TLS
    greeting or another program's magic number shows in its first byte.
    """
    if any(bytes(data[:3])):
        raise ProtocolError(f"not a hetero peer (got {_as_text(bytes(data[:5]))})")


def _as_text(data: bytes) -> str:
    text = data.decode("latin-1").rstrip("\r\n")
    return repr(text) if text.isascii() and text.isprintable() else repr(data)[1:]


def parse_prefix(
    data: bytes | bytearray | memoryview, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
) -> tuple[int, int]:
    """(header bytes, tensor bytes) of the frame that begins with these PREFIX_BYTES bytes.

    Raises ProtocolError when they are not a frame's, or the frame is larger than agreed.
    """
    if len(data) != PREFIX_BYTES:
        raise ProtocolError(f"a frame begins with {PREFIX_BYTES} bytes, got {len(data)}")
    rest, header_bytes = PREFIX.unpack(data)
    if rest >= IMPOSSIBLE_FRAME_BYTES:
        check_start(data)
    if rest > max_frame_bytes:
        raise ProtocolError(
            f"the peer announced a frame of {rest} bytes; at most {max_frame_bytes} are agreed"
        )
    if header_bytes > MAX_LONG_HEADER_BYTES:
        raise ProtocolError(
            f"the peer announced a header of {header_bytes} bytes; "
            f"at most {MAX_LONG_HEADER_BYTES} are allowed"
        )
    payload_bytes = rest - 4 - header_bytes
    if header_bytes == 0 or payload_bytes < 0:
        raise ProtocolError(f"a frame of {rest} bytes cannot hold a header of {header_bytes}")
    return header_bytes, payload_bytes


@dataclass(slots=True)
class FrameHeader:
    """A checked header; `attach` completes the message with the tensor bytes."""

    type: MessageType
    meta: dict[str, Any]
    shapes: tuple[tuple[DType, tuple[int, ...]], ...]
    payload_bytes: int
    raw: bytes

    def attach(
        self,
        payload: bytes | bytearray | memoryview = b"",
        release: Callable[[], None] | None = None,
    ) -> Message:
        """The message whose tensors are views of `payload`; `release` gives the buffer back."""
        view = memoryview(payload)
        if view.nbytes != self.payload_bytes:
            raise ProtocolError(
                f"{self.type.name}: {self.payload_bytes} tensor bytes expected, got {view.nbytes}"
            )
        tensors = []
        offset = 0
        for dtype, shape in self.shapes:
            end = offset + _tensor_bytes(dtype, shape)
            tensors.append(WireTensor(dtype.name, shape, view[offset:end]))
            offset = end
        message = self.announced()
        message.tensors = tuple(tensors)
        message._raw = (self.raw, view)
        message._buffer_release = release
        return message

    def announced(self) -> Message:
        """The message without its tensors, for decisions before they have come."""
        message = Message.__new__(Message)  # parse_header has checked it already
        message.type = self.type
        message.meta = self.meta
        message.tensors = ()
        message._raw = message._buffer_release = None
        return message


def parse_header(prefix: bytes, header: bytes, payload_bytes: int) -> FrameHeader:
    """Decode and check a header; `prefix` is kept in front of it for relaying.

    `payload_bytes` is what `parse_prefix` returned. Raises ProtocolError, naming what came, when
    the header is not exactly a known message whose tensors fill exactly that many bytes.
    """
    fields = _unpack(header)
    number = fields["t"]
    if not _is_int(number) or number not in _TYPES:
        raise ProtocolError(
            f"unknown message type {_shown(number)}",
            hint="the peer may run a later version of hetero-framework",
        )
    kind = _TYPES[number]
    if len(header) > SPEC[kind].max_header_bytes:
        raise ProtocolError(
            f"{kind.name}: a header of {len(header)} bytes is larger than "
            f"{SPEC[kind].max_header_bytes}"
        )
    shapes = _parse_shapes(kind, fields["x"])
    _check_fields(kind, fields["m"], len(shapes))
    described = sum([_tensor_bytes(dtype, shape) for dtype, shape in shapes])
    if described != payload_bytes:
        raise ProtocolError(
            f"{kind.name}: the tensors have {described} bytes, the frame carries {payload_bytes}"
        )
    return FrameHeader(kind, fields["m"], shapes, payload_bytes, bytes(prefix) + bytes(header))


def _unpack(header: bytes) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(header, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, OverflowError, TypeError) as error:
        detail = str(error) or type(error).__name__
        raise ProtocolError(f"a header that is not msgpack: {detail}") from error
    if not isinstance(fields, dict) or set(fields) != {"t", "m", "x"}:
        raise ProtocolError(f"a header must be a map with t, m and x, got {_shown(fields)}")
    return fields


def _parse_shapes(kind: MessageType, described: Any) -> tuple[tuple[DType, tuple[int, ...]], ...]:
    if not isinstance(described, list) or len(described) > MAX_TENSORS:
        raise ProtocolError(f"{kind.name}: x must list at most {MAX_TENSORS} tensors")
    shapes = []
    for entry in described:
        if not isinstance(entry, list) or len(entry) != 2:
            raise ProtocolError(f"{kind.name}: a tensor is [dtype, shape], got {_shown(entry)}")
        code, shape = entry
        if not _is_int(code) or code not in _BY_CODE:
            raise ProtocolError(f"{kind.name}: unknown dtype code {_shown(code)}")
        _tensor_bytes(_BY_CODE[code], shape)
        shapes.append((_BY_CODE[code], tuple(shape)))
    return tuple(shapes)


def decode(frame: bytes | bytearray | memoryview) -> Message:
    """The message of one whole frame (tests, tools; a link reads piece by piece instead)."""
    view = memoryview(frame)
    prefix = bytes(view[:PREFIX_BYTES])
    header_bytes, payload_bytes = parse_prefix(prefix, IMPOSSIBLE_FRAME_BYTES)
    if len(view) != PREFIX_BYTES + header_bytes + payload_bytes:
        raise ProtocolError(f"a frame of {len(view)} bytes announces another length")
    body = view[PREFIX_BYTES:]
    header = parse_header(prefix, bytes(body[:header_bytes]), payload_bytes)
    return header.attach(body[header_bytes:])
