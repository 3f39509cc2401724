from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.core.frames import (
    COORDINATOR,
    DIALLER,
    DTYPES,
    EITHER,
    HANDSHAKE_MAX_FRAME_BYTES,
    LISTENER,
    MAX_HEADER_BYTES,
    PREFIX,
    PROTOCOL_VERSION,
    SPEC,
    WORKER,
    Message,
    MessageType,
    WireTensor,
    check_start,
    check_version,
    decode,
    encode,
    parse_header,
    parse_prefix,
)
from hetero_framework.core.protocol_doc import PAGE, render
from hetero_framework.core.session import ORDER, ROLES, Phase, Session, legal
from hetero_framework.errors import ProtocolError

GOLDEN = Path(__file__).parents[2] / "golden" / "frames.json"
STEP: dict[str, Any] = {"step": 7, "attempt": 1}
STAGE: dict[str, Any] = {"index": 1, "start": 2, "end": 4, "is_first": False, "is_last": True}


def tensor(dtype: str = "float32", *shape: int) -> WireTensor:
    sizes = {row.name: row.itemsize for row in DTYPES}
    nbytes = sizes[dtype]
    for size in shape:
        nbytes *= size
    return WireTensor(dtype, shape, memoryview(bytes(i % 251 for i in range(nbytes))))


def examples() -> dict[str, Message]:
    """One message of every type, the same on every machine."""
    m = MessageType
    hidden = {**STEP, "stage": 1, "micro_batch": 3}
    coded = {**hidden, "codec": "int8", "shape": [1, 2, 3], "dtype": "float32"}
    peer = {"protocol": PROTOCOL_VERSION, "package": "0.1.0", "run_id": "r", "worker_id": "box"}
    named = {"stage": 1, "part": 0, "last": True, "names": ["a", "b"]}
    fields: dict[MessageType, tuple[dict[str, Any], list[WireTensor]]] = {
        m.HELLO: (
            {
                "protocol": PROTOCOL_VERSION,
                "package": "0.1.0",
                "run_id": "r",
                "worker_id": 1,
                "max_frame_bytes": 1 << 30,
            },
            [],
        ),
        m.WELCOME: (
            {
                "protocol": PROTOCOL_VERSION,
                "package": "0.1.0",
                "worker_id": "box",
                "torch": "2.13.0",
                "transformers": "5.23.0",
                "device": "cuda:0",
                "device_label": "GPU",
                "memory_total": 8 << 30,
                "memory_free": 7 << 30,
                "last_step": None,
                "run_id": None,
            },
            [],
        ),
        m.REJECT: ({"code": "version", "message": "no", "hint": "upgrade"}, []),
        m.SETUP: (
            {
                "config": {"version": "1"},
                "stages": [STAGE],
                "num_stages": 2,
                "num_layers": 4,
                "settings": {},
            },
            [],
        ),
        m.READY: ({"stages": [{"index": 1, "trainable": [["w", 4, 0]]}], "info": {}}, []),
        m.START: ({"stages": [{"index": 1, "input_requires_grad": True}]}, []),
        m.LOG: ({"level": "INFO", "text": "größer"}, []),
        m.ERROR: ({"kind": "ModelError", "message": "gone", "exit_code": 2, "stage": 1}, []),
        m.STEP: (
            {
                **STEP,
                "train": True,
                "micro_batches": 4,
                "num_items": 99,
                "loss_scale": 1.0,
                "in_flight_limits": [{"index": 1, "limit": 3}],
                "policy": [-1e9, 1.0, 0.0, 1.0, 0.0, 0.0],
                "direct": [1],
            },
            [],
        ),
        m.INPUTS: (
            {**hidden, "names": ["labels"], "ones": {"attention_mask": [1, 2]}},
            [tensor("int32", 1, 2)],
        ),
        m.FORWARD: (hidden, [tensor("bfloat16", 1, 2, 3)]),
        m.BACKWARD: (coded, [tensor("int8", 6), tensor("bfloat16", 1)]),
        m.LOSS: ({**STEP, "micro_batch": 3, "loss": 0.5}, []),
        m.BACKWARD_DONE: ({**STEP, "micro_batch": 3}, []),
        m.GRADIENT_NORMS: (
            {
                **STEP,
                "stages": [{"index": 1, "nonfinite": [2], "tied": False}],
                "stats": {"round_trips": {"2": 0.25}},
            },
            [tensor("float32", 3)],
        ),
        m.COMMIT: ({**STEP, "learning_rate": 1e-4, "grad_scale": 0.5}, []),
        m.COMMITTED: ({**STEP, "spans": [{"kind": "forward", "began": 0.25}]}, []),
        m.ABORT: (STEP, []),
        m.ABORTED: (STEP, []),
        m.STATE_REQUEST: ({"stage": 1, "kind": "checkpoint", "part": 0}, []),
        m.STATE: (
            {**named, "kind": "export", "info": {}},
            [tensor("float16", 2), tensor("bool")],
        ),
        m.LOAD_STATE: (
            {**named, "kind": "adapter", "info": {}},
            [tensor("uint8", 0), tensor("float64", 1)],
        ),
        m.STATE_LOADED: ({"stage": 1, "part": 0}, []),
        m.HEARTBEAT: ({"pong": 0.5, "at": 1.5}, []),
        m.BYE: ({"reason": "done"}, []),
        m.CONTROL: ({"name": "x", "data": [1, -2, None, {"k": 2.5}, b"raw"]}, [tensor("int8", 2)]),
        m.CONNECT: (
            {"peers": [{"id": "box", "ip": "10.0.0.2", "port": 29500}], "timeout_s": 2.5},
            [],
        ),
        m.CONNECTED: (
            {"peers": [{"id": "box", "problem": None}, {"id": 3, "problem": "refused"}]},
            [],
        ),
        m.PEER_HELLO: ({**peer, "from_id": 1, "max_frame_bytes": 1 << 30}, []),
        m.PEER_WELCOME: (peer, []),
        m.PEER_LOST: ({"worker_id": "box", "reason": "connection reset"}, []),
    }
    return {kind.name: Message(kind, meta, tensors) for kind, (meta, tensors) in fields.items()}


def frame(message: Message) -> bytes:
    return b"".join(encode(message))


def raw_frame(header: Any, payload: bytes = b"") -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return PREFIX.pack(4 + len(packed) + len(payload), len(packed)) + packed + payload


def same(a: Message, b: Message) -> bool:
    return (
        a.type is b.type
        and a.meta == b.meta
        and [(t.dtype, t.shape, bytes(t.data)) for t in a.tensors]
        == [(t.dtype, t.shape, bytes(t.data)) for t in b.tensors]
    )


def test_spec_describes_every_message_type() -> None:
    assert set(SPEC) == set(MessageType)
    assert set(examples()) == {kind.name for kind in MessageType}
    assert all(spec.sender in (*ROLES, EITHER) for spec in SPEC.values())


@pytest.mark.parametrize("name", list(examples()))
def test_frame_of_every_message_is_golden(name: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden["protocol"] == PROTOCOL_VERSION
    message = examples()[name]
    assert frame(message).hex() == golden["frames"][name]
    assert same(decode(bytes.fromhex(golden["frames"][name])), message)


def test_documentation_agrees_with_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(PAGE.read_text(encoding="utf-8"))


def test_protocol_does_not_import_torch_or_socket() -> None:
    code = (
        "import sys, hetero_framework.core.session\n"
        "print(sorted({'torch', 'numpy', 'hetero_framework.core.transport'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    source = importlib.util.find_spec("hetero_framework.core.frames")
    assert source is not None
    assert source.origin is not None
    assert "import socket" not in Path(source.origin).read_text(encoding="utf-8")


def test_forward_buffers_are_the_received_bytes() -> None:
    sent = frame(examples()["FORWARD"])
    message = decode(sent)
    assert b"".join(message.forward_buffers()) == sent


def test_tensor_data_is_not_copied() -> None:
    data = bytearray(8)
    message = Message(
        MessageType.CONTROL,
        {"name": "x", "data": None},
        [WireTensor("float32", (2,), memoryview(data))],
    )
    data[0] = 9
    assert frame(message)[-8:] == bytes(data)


def test_release_twice_gives_the_buffer_back_once() -> None:
    sent = frame(examples()["FORWARD"])
    header_bytes, payload_bytes = parse_prefix(sent[:12])
    head = parse_header(sent[:12], sent[12 : 12 + header_bytes], payload_bytes)
    calls: list[int] = []
    message = head.attach(sent[12 + header_bytes :], lambda: calls.append(1))
    message.release()
    message.release()
    assert calls == [1]
    assert message.tensors == ()
    with pytest.raises(ProtocolError, match="released"):
        message.forward_buffers()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1", r"not a hetero peer \(got 'GET /'\)"),
        (b"SSH-2.0-Open", r"not a hetero peer \(got 'SSH-2'\)"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00", r"not a hetero peer"),
        (b"\x00\x00\x00\xff" + bytes(8), "a frame of 1095216660480 bytes; at most 65536"),
        (PREFIX.pack(4, 0), "cannot hold a header of 0"),
        (PREFIX.pack(10, 7), "a frame of 10 bytes cannot hold a header of 7"),
        (PREFIX.pack(0, 0), "cannot hold"),
        (b"short", "begins with 12 bytes, got 5"),
    ],
)
def test_prefix_that_is_wrong_is_named(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        parse_prefix(data, HANDSHAKE_MAX_FRAME_BYTES)


def test_first_byte_alone_tells_garbage() -> None:
    check_start(b"\x00")
    with pytest.raises(ProtocolError, match="not a hetero peer"):
        check_start(b"G")


HIDDEN = {**STEP, "stage": 1, "micro_batch": 0}


@pytest.mark.parametrize(
    ("header", "payload", "text"),
    [
        (b"\xc1", b"", "not msgpack"),
        (b"\x91" * 5000, b"", "not msgpack"),
        (msgpack.packb(msgpack.Timestamp(1)), b"", "not msgpack"),
        ([1], b"", "map with t, m and x"),
        ({"t": 1, "m": {}}, b"", "map with t, m and x"),
        ({"t": 99, "m": {}, "x": []}, b"", "unknown message type 99"),
        ({"t": True, "m": {}, "x": []}, b"", "unknown message type True"),
        ({"t": 40, "m": [], "x": []}, b"", "HEARTBEAT: the fields must be a map"),
        ({"t": 40, "m": {"a": 1}, "x": []}, b"", "HEARTBEAT: unknown field 'a'"),
        ({"t": 20, "m": {"step": 1}, "x": []}, b"", "unknown message type 20"),  # of version 1
        ({"t": 24, "m": {"step": 1}, "x": []}, b"", "ABORT: field 'attempt' is missing"),
        ({"t": 24, "m": {"step": True, "attempt": 0}, "x": []}, b"", "'step' must be int"),
        ({"t": 24, "m": {"step": -1, "attempt": 0}, "x": []}, b"", "'step' must be int, got -1"),
        ({"t": 12, "m": HIDDEN, "x": []}, b"", "FORWARD: 1 to 2 tensors expected, got 0"),
        ({"t": 13, "m": HIDDEN, "x": [[8, [0]]] * 3}, b"", "BACKWARD: 1 to 2 tensors expected"),
        ({"t": 12, "m": {**HIDDEN, "codec": 1}, "x": [[8, [0]]]}, b"", "'codec' must be string"),
        ({"t": 12, "m": {**HIDDEN, "shape": [-1]}, "x": [[8, [0]]]}, b"", "'shape' must be list"),
        ({"t": 11, "m": {**HIDDEN, "names": [], "ones": {"a": 3}}, "x": []}, b"", "map to list of"),
        ({"t": 40, "m": {"ping": "now"}, "x": []}, b"", "'ping' must be float, got 'now'"),
        ({"t": 12, "m": HIDDEN, "x": [[77, [1]]]}, b"", "unknown dtype code 77"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [-1]]]}, b"", "non-negative ints"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [True]]]}, b"1234", "non-negative ints"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [1] * 9]]}, b"1234", "at most 8 sizes"),
        ({"t": 12, "m": HIDDEN, "x": [[1, 4]]}, b"", "at most 8 sizes, got 4"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [2]]]}, b"1234", "have 8 bytes, the frame carries 4"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [2**62] * 8]]}, b"1234", "the frame carries 4"),
        ({"t": 12, "m": HIDDEN, "x": [[1]]}, b"", r"a tensor is \[dtype, shape\]"),
        (
            {"t": 11, "m": {**HIDDEN, "names": ["a"], "ones": {}}, "x": []},
            b"",
            "1 tensors expected",
        ),
        ({"t": 50, "m": {"name": "", "data": {1: 2}}, "x": []}, b"", "not msgpack"),
        (
            {"t": 30, "m": {"stage": 0, "kind": "all", "part": 0}, "x": []},
            b"",
            '"checkpoint" or "export"',
        ),
        (
            {"t": 50, "m": {"name": "x", "data": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]}, "x": []},
            b"",
            "nested deeper than 16",
        ),
        ({"t": 41, "m": {"reason": "x" * MAX_HEADER_BYTES}, "x": []}, b"", "is larger than 65536"),
    ],
)
def test_header_that_is_wrong_is_named(header: Any, payload: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode(raw_frame(header, payload))


def test_ready_with_thousands_of_names_travels() -> None:
    names = [
        [f"model.layers.{i}.self_attn.q_proj.lora_A.default.weight", i, 0] for i in range(5000)
    ]
    message = Message(MessageType.READY, {"stages": [{"index": 1, "trainable": names}], "info": {}})
    assert decode(frame(message)).meta == message.meta


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        ({"name": "x", "data": object()}, "object cannot travel"),
        ({"name": "x", "data": {1: 2}}, "map keys must be strings"),
        ({"name": "x", "data": 2**64}, "does not fit 64 bits"),
        ({"name": "x"}, "'data' is missing"),
        ({"name": 3, "data": 0}, "'name' must be string, got 3"),
    ],
)
def test_message_is_checked_when_it_is_made(meta: dict[str, Any], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        Message(MessageType.CONTROL, meta)


def test_text_that_is_not_unicode_cannot_be_written() -> None:
    with pytest.raises(ProtocolError, match="cannot be written"):
        encode(Message(MessageType.BYE, {"reason": "\udc80"}))


def test_encode_over_the_agreed_frame_is_refused() -> None:
    with pytest.raises(ProtocolError, match="larger than the 16 bytes agreed"):
        encode(examples()["FORWARD"], max_frame_bytes=16)


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "text"),
    [
        ("float8", (1,), b"1", "dtype 'float8' cannot travel"),
        ("float32", (2,), b"1234", "has 8 bytes, got 4"),
        ("float32", (-1,), b"", "non-negative"),
        ("float32", (1,) * 9, b"1234", "at most 8"),
        ("float32", (1,), memoryview(bytes(8))[::2], "not contiguous"),
    ],
)
def test_wire_tensor_is_checked(dtype: str, shape: tuple[int, ...], data: Any, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        WireTensor(dtype, shape, memoryview(data))


@pytest.mark.parametrize(
    ("greeting", "role"), [("HELLO", WORKER), ("PEER_HELLO", LISTENER), ("WELCOME", COORDINATOR)]
)
@pytest.mark.parametrize(
    ("version", "older"), [(PROTOCOL_VERSION + 1, "this machine"), (1, "the peer")]
)
def test_other_version_is_readable_and_refused_with_both_numbers(
    greeting: str, role: str, version: int, older: str
) -> None:
    meta = {"protocol": version, "package": "9.0", "something": "new"}
    message = decode(raw_frame({"t": int(MessageType[greeting]), "m": meta, "x": []}))
    text = rf"version {version} \(package '9.0'\), this machine speaks {PROTOCOL_VERSION}"
    with pytest.raises(ProtocolError, match=text):
        check_version(message)
    with pytest.raises(ProtocolError, match=f"{older} is the older one"):
        Session(role).receive(message)


# ------------------------------------------------------------------------------- legal order


def walk(names: str) -> tuple[Session, Session]:
    """Both sides of a coordinator's connection over which these messages went."""
    return walk_between(COORDINATOR, names)


def walk_between(first: str, names: str) -> tuple[Session, Session]:
    """Both sides; `first` sends what either side may send."""
    one, other = Session(first), Session(ROLES[first])
    known = examples()
    for name in names.split():
        message = known[name]
        sender, receiver = (one, other)
        if SPEC[message.type].sender == other.role:
            sender, receiver = (other, one)
        sender.send(message)
        receiver.receive(message)
        assert one.phase is other.phase
    return one, other


UP = "HELLO WELCOME SETUP READY START "


def test_session_of_a_whole_run_is_legal() -> None:
    steps = (
        "STEP INPUTS FORWARD LOSS BACKWARD_DONE BACKWARD GRADIENT_NORMS COMMIT COMMITTED "
        "STEP INPUTS FORWARD ABORT ABORTED STEP GRADIENT_NORMS ABORT ABORTED "
        "STATE_REQUEST STATE LOAD_STATE STATE_LOADED PEER_LOST CONTROL LOG HEARTBEAT BYE"
    )
    coordinator, _ = walk(UP + steps)
    assert coordinator.phase is Phase.CLOSED
    assert legal(COORDINATOR, Phase.CLOSED) == []


@pytest.mark.parametrize(
    ("then", "phase"),
    [
        ("COMMITTED", Phase.IDLE),
        ("STEP COMMITTED", Phase.STEP),
        ("STEP INPUTS FORWARD LOSS COMMITTED BACKWARD_DONE GRADIENT_NORMS", Phase.COLLECTED),
        ("STEP ABORT COMMITTED ABORTED", Phase.IDLE),
        ("STATE_REQUEST COMMITTED STATE", Phase.IDLE),
    ],
)
def test_committed_need_not_come_before_the_next_step(then: str, phase: Phase) -> None:
    _, worker = walk(UP + "STEP GRADIENT_NORMS COMMIT " + then)
    assert worker.phase is phase


def test_committed_may_come_during_an_evaluation() -> None:
    coordinator, worker = walk(UP + "STEP GRADIENT_NORMS COMMIT")
    evaluation = Message(MessageType.STEP, {**examples()["STEP"].meta, "train": False})
    coordinator.send(evaluation)
    worker.receive(evaluation)
    worker.send(examples()["COMMITTED"])
    coordinator.receive(examples()["COMMITTED"])
    assert coordinator.phase is worker.phase is Phase.EVALUATION


def test_workers_are_introduced_before_the_first_step() -> None:
    coordinator, _ = walk("HELLO WELCOME SETUP READY CONNECT CONNECTED START")
    assert coordinator.phase is Phase.IDLE


def test_session_of_two_workers_carries_tensors_both_ways() -> None:
    up = "PEER_HELLO PEER_WELCOME "
    for first in (DIALLER, LISTENER):
        one, _ = walk_between(first, up + "FORWARD BACKWARD HEARTBEAT CONTROL FORWARD ERROR")
        assert one.phase is Phase.FLOWING
        one, _ = walk_between(first, up + "FORWARD BYE")
        assert one.phase is Phase.CLOSED
    one, _ = walk_between(LISTENER, "PEER_HELLO REJECT")
    assert one.phase is Phase.CLOSED


@pytest.mark.parametrize(
    ("before", "message", "role"),
    [
        ("", "HELLO", LISTENER),
        ("", "PEER_WELCOME", DIALLER),
        ("PEER_HELLO", "PEER_HELLO", LISTENER),
        ("PEER_HELLO", "FORWARD", DIALLER),
        ("PEER_HELLO PEER_WELCOME", "STEP", LISTENER),
        ("PEER_HELLO PEER_WELCOME", "INPUTS", LISTENER),
        ("PEER_HELLO PEER_WELCOME", "LOSS", DIALLER),
        ("PEER_HELLO PEER_WELCOME", "REJECT", DIALLER),
        ("PEER_HELLO PEER_WELCOME BYE", "FORWARD", LISTENER),
    ],
)
def test_message_out_of_order_between_workers_is_refused(
    before: str, message: str, role: str
) -> None:
    session = walk_between(DIALLER, before)[0 if role == DIALLER else 1]
    phase = session.phase
    text = f"the {ROLES[role]} sent {message} out of order: {phase.name}"
    with pytest.raises(ProtocolError, match=text):
        session.receive(examples()[message])
    assert session.phase is phase


def test_session_of_an_unknown_role_is_an_error() -> None:
    with pytest.raises(ValueError):
        Session("observer")


def test_evaluation_ends_with_the_next_step() -> None:
    coordinator, _ = walk(UP)
    evaluation = Message(MessageType.STEP, {**examples()["STEP"].meta, "train": False})
    coordinator.send(evaluation)
    assert coordinator.phase is Phase.EVALUATION
    coordinator.send(examples()["STEP"])
    assert coordinator.phase is Phase.STEP


def test_late_messages_of_an_aborted_attempt_are_legal() -> None:
    coordinator, worker = walk(UP + "STEP")
    coordinator.send(examples()["ABORT"])
    for name in ("FORWARD", "BACKWARD", "LOSS", "BACKWARD_DONE", "GRADIENT_NORMS", "ABORTED"):
        coordinator.receive(examples()[name])
    worker.receive(examples()["ABORT"])
    worker.send(examples()["ABORTED"])
    worker.receive(examples()["FORWARD"])
    assert worker.phase is Phase.IDLE


@pytest.mark.parametrize(
    ("before", "message", "role"),
    [
        ("", "STEP", WORKER),
        ("", "WELCOME", COORDINATOR),
        ("HELLO", "HELLO", WORKER),
        ("HELLO WELCOME", "START", WORKER),
        (UP, "COMMIT", WORKER),
        (UP + "STEP", "COMMIT", WORKER),
        (UP + "STEP GRADIENT_NORMS", "GRADIENT_NORMS", COORDINATOR),
        (UP + "STEP GRADIENT_NORMS", "STEP", WORKER),
        (UP + "STEP GRADIENT_NORMS COMMIT", "COMMIT", WORKER),
        (UP + "STEP GRADIENT_NORMS COMMIT", "LOSS", COORDINATOR),
        (UP + "STEP", "STATE_REQUEST", WORKER),
        (UP, "CONNECT", WORKER),
        (UP, "STEP", COORDINATOR),  # a worker may not command
        (UP, "PEER_HELLO", WORKER),
        (UP + "BYE", "STEP", WORKER),
    ],
)
def test_message_out_of_order_is_refused(before: str, message: str, role: str) -> None:
    session = walk(before)[0 if role == COORDINATOR else 1]
    phase = session.phase
    with pytest.raises(ProtocolError, match=f"sent {message} out of order: {phase.name}"):
        session.receive(examples()[message])
    assert session.phase is phase


def test_every_phase_can_be_reached_and_left() -> None:
    reached = {Phase.OPEN, Phase.EVALUATION}
    for table in ORDER.values():
        reached.update(table.values())
    assert reached == set(Phase)
    for role in ROLES:
        assert all(legal(role, phase) for phase in Phase if phase is not Phase.CLOSED)


# -------------------------------------------------------------------------------------- fuzz

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
TENSORS = st.builds(
    lambda dtype, shape: tensor(dtype, *shape),
    st.sampled_from([row.name for row in DTYPES]),
    st.lists(st.integers(0, 3), max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(name=st.text(max_size=10), data=PLAIN, tensors=st.lists(TENSORS, max_size=3))
def test_any_message_survives_the_wire(name: str, data: Any, tensors: list[WireTensor]) -> None:
    message = Message(MessageType.CONTROL, {"name": name, "data": data}, tensors)
    assert same(decode(frame(message)), message)


def only_protocol_error(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert b"".join(message.forward_buffers()) == data


FRAMES = [frame(message) for message in examples().values()]


@settings(max_examples=400, deadline=None)
@given(
    base=st.sampled_from(FRAMES),
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 400),
)
def test_mutated_frames_raise_only_protocol_error(
    base: bytes, edits: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(base)
    for position, value in edits:
        data[position % len(data)] = value
    only_protocol_error(bytes(data[:cut]))


@settings(max_examples=300, deadline=None)
@given(header=st.binary(max_size=64) | PLAIN.map(msgpack.packb), payload=st.binary(max_size=8))
def test_any_header_raises_only_protocol_error(header: bytes, payload: bytes) -> None:
    only_protocol_error(raw_frame(header, payload))


@settings(max_examples=300, deadline=None)
@given(kind=PLAIN | st.integers(0, 70), meta=PLAIN, shapes=PLAIN)
def test_any_structure_raises_only_protocol_error(kind: Any, meta: Any, shapes: Any) -> None:
    only_protocol_error(raw_frame({"t": kind, "m": meta, "x": shapes}))
