from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.core import messages as m
from hetero_framework.core.fields import MAX_TEXT_BYTES
from hetero_framework.core.frames import (
    DTYPES,
    HANDSHAKE_MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    PREFIX,
    PROTOCOL_VERSION,
    WireTensor,
    check_start,
    parse_prefix,
)
from hetero_framework.core.messages import Message, decode, encode
from hetero_framework.core.session import ORDER, ROLES, Phase, Session, legal
from hetero_framework.errors import ProtocolError

GOLDEN = Path(__file__).parents[2] / "golden" / "frames.json"
STEP = (7, 1)  # step, attempt


def tensor(dtype: str = "float32", *shape: int) -> WireTensor:
    (itemsize,) = (row.itemsize for row in DTYPES if row.name == dtype)
    nbytes = itemsize * math.prod(shape)
    return WireTensor(dtype, shape, memoryview(bytes(i % 251 for i in range(nbytes))))


def examples() -> dict[str, Message]:
    """One message of every type, the same on every machine."""
    versions: dict[str, Any] = {"protocol": PROTOCOL_VERSION, "package": "0.1.0"}
    figures = m.StageFigures(0.5, 1.5, 2, 3, 1 << 30, 0.125, 0.0, 1)
    parameters = (m.Parameter("w", (4, 0)),)
    welcome = m.Welcome("2.13.0", "cuda:0", "GPU", 8 << 30, 7 << 30, host_free=48 << 30, **versions)
    reports, trips = (m.StageReport(1, (2,), figures),), (m.RoundTrip("box", 0.25),)
    coded = m.Coded("int8", (1, 2, 3), "float32")
    made: list[tuple[m.Body, list[WireTensor]]] = [
        (m.Hello("r", 1, "p", 1, 1 << 30, "chat", "names", **versions), []),
        (m.Call(1, "p", **versions), []),
        (welcome, []),
        (m.Reject("protocol", "no", "upgrade"), []),
        (m.Setup({"version": "1"}, (1,)), []),
        (m.Ready((m.LoadedStage(1, parameters, {"layers.4": "0f"}, {"t": "s"}),)), []),
        (m.Start((1,), 4096), []),
        (m.Log("INFO", "größer"), []),
        (m.Error("ModelError", "gone"), []),
        (m.Step(*STEP, True, 4, 99, 1.0, True, 6, (1, 3), (2, 3), (4,), (1,), 0.25, (1,)), []),
        (m.Inputs(*STEP, 1, 3, ("labels",), {"attention_mask": (1, 2)}), [tensor("int32", 1, 2)]),
        (m.Forward(*STEP, 1, 3), [tensor("bfloat16", 1, 2, 3)]),
        (m.Backward(*STEP, 1, 3, coded), [tensor("int8", 6), tensor("bfloat16", 1)]),
        (m.Loss(*STEP, 3, 0.5), []),
        (m.BackwardDone(*STEP, 3), []),
        (m.Gradients(*STEP, 1, 0, True, ("a",)), [tensor("float32", 3)]),
        (m.GradientNorms(*STEP, reports, trips, 5), [tensor("float32", 3)]),
        (m.Commit(*STEP, 1e-4, 0.5, ("s",)), [tensor("float32", 3)]),
        (m.Committed(*STEP, ({"kind": "forward", "began": 0.25},)), []),
        (m.Abort(*STEP), []),
        (m.Aborted(*STEP), []),
        (m.StepFailed(*STEP, "memory ran out", "fewer layers"), []),
        (m.StateRequest(1, "checkpoint", 0), []),
        (m.State(1, "export", 0, True, ("a", "b"), {}), [tensor("float16", 2), tensor("bool")]),
        (
            m.LoadState(1, "adapter", 0, True, ("a", "b"), {}),
            [tensor("uint8", 0), tensor("float64", 1)],
        ),
        (m.StateLoaded(1, 0), []),
        (m.Rewind(4), []),
        (m.Rewound((m.KeptStage(1, "0f"),)), []),
        (m.Heartbeat(pong=0.5, at=1.5), []),
        (m.AskTurn(1 << 20, 3), []),
        (m.Turn(True, False), []),
        (m.ArrivalRate(1e9, True), []),
        (m.Bye("done"), []),
        (m.Control("x", [1, -2, None, {"k": 2.5}, b"raw"]), [tensor("int8", 2)]),
        (m.Connect((m.PeerAddress("box", "10.0.0.2", 29500),), 2.5), []),
        (m.Connected((m.PeerResult("box"), m.PeerResult(3, "refused"))), []),
        (m.PeerHello("r", "box", 1, 1 << 30, **versions), []),
        (m.PeerWelcome(**versions), []),
        (m.PeerLost("box", "connection reset"), []),
        (m.Leaving("SIGTERM"), []),
        (m.Quit("it hangs"), []),
    ]
    with suppress(ImportError):  # the heart's tests run without extras
        made += _of_islands(versions)
    return {body.spec.name: Message(body, tensors) for body, tensors in made}


def _of_islands(versions: dict[str, Any]) -> list[tuple[m.Body, list[Any]]]:
    from hetero_framework.extras.islands import island_messages as im

    return [
        (im.IslandHello("attic", "p", "garage", "0f", 1 << 30, **versions), []),
        (im.IslandWelcome(**versions), []),
        (im.Share(7, "changes", True, ("a",), {"tokens": 99}), [tensor("float32", 3)]),
        (im.LighthouseHello(im.Member("attic", "p", "10.0.0.2:4711"), **versions), []),
        (im.LighthouseWelcome(1.5, **versions), []),
        (im.NextView(), []),
        (im.Members((im.Member("attic", "p", "10.0.0.2:4711"),)), []),
        (im.Finished(im.FinishedRun("run", "0f", 9, ("attic", "garage"))), []),
        (im.FindFinished("", "0f", 2.5), []),
    ]


def bundles() -> dict[str, Message]:
    """FORWARD and BACKWARD of a model whose boundaries carry more than the hidden state."""
    whole, coded = m.SideForm(False), m.SideForm(True, m.Coded("int8", (1, 2), "float32"))
    forward = m.Forward(*STEP, 1, 3, sides=(whole, coded))
    backward = m.Backward(*STEP, 1, 3, sides=(m.SideForm(False),))
    hidden = tensor("bfloat16", 1, 2, 3)
    sides = [tensor("int32", 1, 2, 4), tensor("int8", 2), tensor("bfloat16", 1)]
    back = [hidden, tensor("float32", 1, 2)]
    return {"FORWARD": Message(forward, [hidden, *sides]), "BACKWARD": Message(backward, back)}


EVALUATION = Message(replace(examples()["STEP"].body, train=False))  # type: ignore[type-var]


def frame(message: Message) -> bytes:
    return b"".join(encode(message))


def raw_frame(header: Any, payload: bytes = b"") -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return PREFIX.pack(4 + len(packed) + len(payload), len(packed)) + packed + payload


def same(a: Message, b: Message) -> bool:
    return a.body == b.body and [(t.dtype, t.shape, bytes(t.data)) for t in a.tensors] == [
        (t.dtype, t.shape, bytes(t.data)) for t in b.tensors
    ]


def test_spec_describes_every_message_type():
    specs = [body.spec for body in m.BODIES.values()]
    assert set(examples()) == {spec.name for spec in specs}
    assert {kind for table in ORDER.values() for kind in table} == set(m.BODIES.values())
    assert all(spec.sender in (*ROLES, m.EITHER) for spec in specs)


@pytest.mark.parametrize("name", list(examples()))
def test_frame_of_every_message_is_golden(name):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden["protocol"] == PROTOCOL_VERSION
    message = examples()[name]
    assert frame(message).hex() == golden["frames"][name]
    assert same(decode(bytes.fromhex(golden["frames"][name])), message)


@pytest.mark.parametrize("name", ["FORWARD", "BACKWARD"])
def test_frame_with_side_tensors_is_golden(name):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))["bundles"][name]
    message = bundles()[name]
    assert frame(message).hex() == golden
    assert same(decode(bytes.fromhex(golden)), message)


def test_protocol_does_not_import_torch_or_socket():
    code = (
        "import sys, hetero_framework.core.session\n"
        "print(sorted({'torch', 'numpy', 'hetero_framework.core.link'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    source = importlib.util.find_spec("hetero_framework.core.frames")
    assert source is not None
    assert source.origin is not None
    assert "import socket" not in Path(source.origin).read_text(encoding="utf-8")


def test_tensor_data_is_not_copied():
    data = bytearray(8)
    message = Message(m.Control("x"), [WireTensor("float32", (2,), memoryview(data))])
    data[0] = 9
    assert frame(message)[-8:] == bytes(data)


def test_release_twice_gives_the_buffer_back_once():
    sent = frame(examples()["FORWARD"])
    header_bytes, payload_bytes = parse_prefix(sent[:12])
    head = m.read_header(sent[:12], sent[12 : 12 + header_bytes], payload_bytes)
    calls: list[int] = []
    message = head.attach(sent[12 + header_bytes :], lambda: calls.append(1))
    message.release()
    message.release()
    assert calls == [1]
    assert message.tensors == ()


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
def test_prefix_that_is_wrong_is_named(data, text):
    with pytest.raises(ProtocolError, match=text):
        parse_prefix(data, HANDSHAKE_MAX_FRAME_BYTES)


def test_the_first_byte_alone_identifies_garbage():
    check_start(b"\x00")
    with pytest.raises(ProtocolError, match="not a hetero peer"):
        check_start(b"G")


HIDDEN = {"step": 7, "attempt": 1, "stage": 1, "micro_batch": 0}
SIDED = {**HIDDEN, "sides": [{"wants_gradient": True}]}
NAMED = {**HIDDEN, "names": ["a"], "ones": {}}
ALL_OF_A_STAGE = {"stage": 0, "kind": "all", "part": 0}
DEEP = [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]


def coded(**changes: Any) -> dict[str, Any]:
    """A FORWARD header with something else in what it says of its codec."""
    return {
        "t": 12,
        "m": {**HIDDEN, "coded": {"codec": "int8", "shape": [0], "dtype": "float32", **changes}},
        "x": [[8, [0]]],
    }


@pytest.mark.parametrize(
    ("header", "payload", "text"),
    [
        (b"\xc1", b"", "not msgpack"),
        (b"\x91" * 5000, b"", "not msgpack"),
        (msgpack.packb(msgpack.Timestamp(1)), b"", "not msgpack"),
        ([1], b"", "map with t, m and x"),
        (b"\x91" * 1020 + b"\x90", b"", "map with t, m and x"),  # deeper than repr() can go
        ({"t": 24, "m": {}, "x": [[1, [-1]]] * 3}, b"", "ABORT: 0 tensors expected, got 3"),
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
        ({"t": 12, "m": SIDED, "x": [[8, [0]]]}, b"", "FORWARD: 2 to 4 tensors expected, got 1"),
        (coded(codec=1), b"", "'coded' must be {codec: string, shape: shape, dtype: string}"),
        (coded(shape=[-1]), b"", "'coded' must be"),
        (coded(shape=[1] * 9), b"", "'coded' must be"),
        (coded(other=1), b"", "'coded' must be"),
        ({"t": 11, "m": {**HIDDEN, "names": [], "ones": {"a": 3}}, "x": []}, b"", "map to shape"),
        ({"t": 40, "m": {"ping": "now"}, "x": []}, b"", "'ping' must be float, got 'now'"),
        ({"t": 12, "m": HIDDEN, "x": [[77, [1]]]}, b"", "unknown dtype code 77"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [-1]]]}, b"", "non-negative ints"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [True]]]}, b"1234", "non-negative ints"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [1] * 9]]}, b"1234", "at most 8 non-negative ints"),
        ({"t": 12, "m": HIDDEN, "x": [[1, 4]]}, b"", "at most 8 non-negative ints .*, got 4"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [2]]]}, b"1234", "have 8 bytes, the frame carries 4"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [2**62] * 8]]}, b"1234", "whose product is below"),
        ({"t": 12, "m": HIDDEN, "x": [[1, [0, 2**62, 2**62]]]}, b"", "whose product is below"),
        ({"t": 12, "m": HIDDEN, "x": [[1]]}, b"", r"a tensor is \[dtype, shape\]"),
        ({"t": 11, "m": NAMED, "x": []}, b"", "1 tensors expected"),
        ({"t": 50, "m": {"name": "", "data": {1: 2}}, "x": []}, b"", "not msgpack"),
        ({"t": 30, "m": ALL_OF_A_STAGE, "x": []}, b"", '"checkpoint" or "export"'),
        ({"t": 50, "m": {"name": "x", "data": DEEP}, "x": []}, b"", "nested deeper than 16"),
        ({"t": 41, "m": {"reason": "x" * MAX_HEADER_BYTES}, "x": []}, b"", "is larger than 65536"),
    ],
)
def test_header_that_is_wrong_is_named(header, payload, text):
    with pytest.raises(ProtocolError, match=text):
        decode(raw_frame(header, payload))


def test_ready_with_thousands_of_names_travels():
    name = "model.layers.{}.self_attn.q_proj.lora_A.default.weight"
    names = tuple(m.Parameter(name.format(i), (i, 0)) for i in range(5000))
    message = Message(m.Ready((m.LoadedStage(1, names, {}),)))
    assert decode(frame(message)).body == message.body


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (m.Control("x", object()), "object cannot travel"),
        (m.Control("x", {1: 2}), "map keys must be strings"),
        (m.Control("x", 2**64), "does not fit 64 bits"),
        (m.Control(None), "'name' is missing"),  # type: ignore[arg-type]
        (m.Control(3), "'name' must be string, got 3"),  # type: ignore[arg-type]
        (m.Abort(True, 0), "'step' must be int, got True"),
    ],
)
def test_message_is_checked_when_it_is_made(body, text):
    with pytest.raises(ProtocolError, match=text):
        Message(body)


def test_ones_that_need_more_memory_than_a_frame_may_have_are_refused():
    """86 bytes of a stranger made a worker take 2 GiB."""
    sent = frame(Message(m.Inputs(*STEP, 1, 0, (), {"a": (2**27,), "b": (2**27,)})))
    header_bytes, _ = parse_prefix(sent[:12])
    with pytest.raises(ProtocolError, match="asks for 2147483648 bytes of memory; at most 65536"):
        m.read_header(sent[:12], sent[12 : 12 + header_bytes], 0, HANDSHAKE_MAX_FRAME_BYTES)


def test_an_illegal_first_message_is_refused_before_its_fields_are_read():
    sent = raw_frame({"t": 50, "m": {"name": 1}, "x": []})
    with pytest.raises(ProtocolError, match="CONTROL came before a greeting"):
        m.read_header(sent[:12], sent[12:], 0, opening={m.Hello.spec.number})
    with pytest.raises(ProtocolError, match="'name' must be string"):
        m.read_header(sent[:12], sent[12:], 0, opening={m.Control.spec.number})


def test_expect_of_another_message_is_refused():
    with pytest.raises(ProtocolError, match="READY was expected, BYE came"):
        examples()["BYE"].expect(m.Ready)


# New lines of all kinds, what steers a terminal, marks that turn the direction of writing, length.
HOSTILE = "ends\nhetero: error: fake\r\x85\u2028\u2029\x1b[2J\x00\u202e\u2066" + "x" * 9_000


def strings(value: Any) -> list[str]:
    if is_dataclass(value):
        return strings([getattr(value, field.name) for field in fields(value)])
    if isinstance(value, dict):
        return strings([*value, *value.values()])
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", list(examples()))
def test_every_string_of_every_message_is_one_printable_line(name):
    message = examples()[name]
    hostile: dict[str, Any] = {}
    for field, (kind, _) in message.body.spec.fields.kinds.items():
        if (name, field) == ("CONTROL", "name"):
            continue  # it is looked up, not shown
        if kind.name in ("string", "int or string"):
            hostile[field] = HOSTILE
        elif kind.name == "list of string":
            hostile[field] = (HOSTILE,)
        elif kind.name == "map to string":
            hostile[field] = {HOSTILE: HOSTILE}
    if not hostile:
        return
    try:
        sent = Message(replace(message.body, **hostile), message.tensors)
    except ProtocolError:
        return  # this text is not legal there at all
    found = decode(frame(sent)).body
    assert any(text.startswith("ends\\nhetero") for text in strings(found))
    for text in strings(found):
        assert text.isprintable()
        assert len(text.encode()) <= MAX_TEXT_BYTES


def test_text_that_is_not_unicode_cannot_be_written():
    with pytest.raises(ProtocolError, match="cannot be written"):
        encode(Message(m.Bye("\udc80")))


def test_encode_over_the_agreed_frame_is_refused():
    with pytest.raises(ProtocolError, match="larger than the 16 bytes agreed"):
        encode(examples()["FORWARD"], max_frame_bytes=16)


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "text"),
    [
        ("float8", (1,), b"1", "dtype 'float8' cannot travel"),
        ("float32", (2,), b"1234", "has 8 bytes, got 4"),
        ("float32", (-1,), b"", "non-negative"),
        ("float32", (1,) * 9, b"1234", "at most 8"),
        ("float32", (1,), memoryview(bytes(8))[::2], "not one contiguous row"),
    ],
)
def test_wire_tensor_is_checked(dtype, shape, data, text):
    with pytest.raises(ProtocolError, match=text):
        encode(Message(m.Control("x"), [WireTensor(dtype, shape, memoryview(data))]))


@pytest.mark.parametrize(
    ("greeting", "role"),
    [("HELLO", m.WORKER), ("PEER_HELLO", m.LISTENER), ("WELCOME", m.COORDINATOR)],
)
@pytest.mark.parametrize(
    ("version", "older"), [(PROTOCOL_VERSION + 1, "this machine"), (1, "the peer")]
)
def test_other_version_is_readable_and_refused_with_both_numbers(greeting, role, version, older):
    fields = {"protocol": version, "package": "9.0", "something": "new"}
    number = examples()[greeting].body.spec.number
    message = decode(raw_frame({"t": number, "m": fields, "x": []}))
    text = rf"version {version} \(package '9.0'\), this machine speaks {PROTOCOL_VERSION}"
    with pytest.raises(ProtocolError, match=text) as caught:
        Session(role).receive(message)
    assert f"{older} is the older one" in str(caught.value)


# ------------------------------------------------------------------------------- legal order


def walk(names: str) -> tuple[Session, Session]:
    """Both sides of a coordinator's connection over which these messages went."""
    return walk_between(m.COORDINATOR, names)


def walk_between(first: str, names: str) -> tuple[Session, Session]:
    """Both sides; `first` sends what either side may send."""
    one, other = Session(first), Session(ROLES[first])
    known = {**examples(), "EVALUATION": EVALUATION}
    for name in names.split():
        message = known[name]
        is_others = message.body.spec.sender == other.role
        sender, receiver = (other, one) if is_others else (one, other)
        sender.send(message)
        receiver.receive(message)
        assert one.phase is other.phase
    return one, other


UP = "HELLO WELCOME SETUP READY START "
STATE_READ = (" STATE_REQUEST", " STATE_REQUEST STATE")
PEERS_UP = "PEER_HELLO PEER_WELCOME "


def test_session_of_a_whole_run_is_legal():
    steps = (
        "STEP INPUTS FORWARD LOSS BACKWARD_DONE BACKWARD GRADIENT_NORMS COMMIT COMMITTED "
        "STEP INPUTS FORWARD ABORT ABORTED STEP GRADIENT_NORMS ABORT ABORTED "
        "STEP INPUTS STEP_FAILED ABORT ABORTED STEP ABORT STEP_FAILED ABORTED "
        "STATE_REQUEST STATE REWIND REWOUND LOAD_STATE STATE_LOADED "
        "PEER_LOST LEAVING CONTROL LOG HEARTBEAT ASK_TURN TURN ARRIVAL_RATE BYE"
    )
    coordinator, _ = walk(UP + steps)
    assert coordinator.phase is Phase.CLOSED
    assert legal(m.COORDINATOR, Phase.CLOSED) == []


@pytest.mark.parametrize(
    ("then", "phase"),
    [
        ("COMMITTED", Phase.IDLE),
        ("STEP COMMITTED", Phase.STEP),
        ("EVALUATION COMMITTED", Phase.EVALUATION),
        ("STEP INPUTS FORWARD LOSS COMMITTED BACKWARD_DONE GRADIENT_NORMS", Phase.COLLECTED),
        ("STEP ABORT COMMITTED ABORTED", Phase.IDLE),
        ("STATE_REQUEST COMMITTED STATE", Phase.IDLE),
    ],
)
def test_committed_need_not_come_before_the_next_step(then, phase):
    _, worker = walk(UP + "STEP GRADIENT_NORMS COMMIT " + then)
    assert worker.phase is phase


@pytest.mark.parametrize(
    "before", ["STEP", "STEP STATE_REQUEST GRADIENT_NORMS", "STEP STATE_REQUEST ABORT"]
)
def test_state_may_be_read_while_a_step_runs(before):
    phases = [walk(UP + before + more)[0].phase for more in ("", *STATE_READ)]
    assert phases == [phases[0]] * 3


def test_workers_are_introduced_before_the_first_step():
    coordinator, _ = walk("HELLO WELCOME SETUP READY CONNECT CONNECTED START")
    assert coordinator.phase is Phase.IDLE


def test_session_of_two_workers_carries_tensors_both_ways():
    for first in (m.DIALLER, m.LISTENER):
        one, _ = walk_between(first, PEERS_UP + "FORWARD BACKWARD ASK_TURN CONTROL FORWARD ERROR")
        assert one.phase is Phase.FLOWING
        one, _ = walk_between(first, PEERS_UP + "FORWARD BYE")
        assert one.phase is Phase.CLOSED
    one, _ = walk_between(m.LISTENER, "PEER_HELLO REJECT")
    assert one.phase is Phase.CLOSED


def test_session_of_an_unknown_role_is_an_error():
    with pytest.raises(ValueError):
        Session("observer")


def test_evaluation_ends_with_the_next_step():
    assert walk(UP + "EVALUATION")[0].phase is Phase.EVALUATION
    assert walk(UP + "EVALUATION STEP")[0].phase is Phase.STEP


def test_late_messages_of_an_aborted_attempt_are_legal():
    coordinator, worker = walk(UP + "STEP")
    coordinator.send(examples()["ABORT"])
    for name in ("FORWARD", "BACKWARD", "LOSS", "BACKWARD_DONE", "GRADIENT_NORMS", "ABORTED"):
        coordinator.receive(examples()[name])
    worker.receive(examples()["ABORT"])
    worker.send(examples()["ABORTED"])
    worker.receive(examples()["FORWARD"])
    assert worker.phase is Phase.IDLE


def test_a_step_that_continues_adds_to_collected_gradients():
    worker = walk(UP + "STEP GRADIENT_NORMS")[1]
    assert worker.receive(Message(replace(examples()["STEP"].body, continues=True)))
    assert worker.phase is Phase.STEP


@pytest.mark.parametrize(
    ("before", "message", "role"),
    [
        ("", "STEP", m.WORKER),
        ("", "WELCOME", m.COORDINATOR),
        ("HELLO", "HELLO", m.WORKER),
        ("HELLO WELCOME", "START", m.WORKER),
        (UP, "COMMIT", m.WORKER),
        (UP + "STEP", "COMMIT", m.WORKER),
        (UP + "STEP GRADIENT_NORMS", "GRADIENT_NORMS", m.COORDINATOR),
        (UP + "STEP GRADIENT_NORMS", "STEP", m.WORKER),
        (UP + "STEP GRADIENT_NORMS COMMIT", "COMMIT", m.WORKER),
        (UP + "STEP GRADIENT_NORMS COMMIT", "LOSS", m.COORDINATOR),
        (UP, "STEP", m.COORDINATOR),  # a worker may not command
        (UP, "PEER_HELLO", m.WORKER),
        (UP + "STEP", "STEP_FAILED", m.WORKER),
        (UP + "BYE", "STEP", m.WORKER),
        ("", "HELLO", m.LISTENER),
        ("", "PEER_WELCOME", m.DIALLER),
        ("PEER_HELLO", "PEER_HELLO", m.LISTENER),
        ("PEER_HELLO", "FORWARD", m.DIALLER),
        (PEERS_UP, "STEP", m.LISTENER),
        (PEERS_UP, "INPUTS", m.LISTENER),
        (PEERS_UP, "LOSS", m.DIALLER),
        (PEERS_UP, "REJECT", m.DIALLER),
        (PEERS_UP + "BYE", "FORWARD", m.LISTENER),
    ],
)
def test_message_out_of_order_is_refused(before, message, role):
    dials = role in (m.COORDINATOR, m.DIALLER)
    session = walk_between(role if dials else ROLES[role], before)[0 if dials else 1]
    phase = session.phase
    text = f"the {ROLES[role]} sent {message} out of order: {phase.name}"
    with pytest.raises(ProtocolError, match=text):
        session.receive(examples()[message])
    assert session.phase is phase


def test_messages_that_cross_our_goodbye_are_legal_and_ignored():
    """A line of the log of a worker that is let go, say: it is no fault of the worker."""
    session = walk(UP + "STEP BYE")[0]
    for name in ("LOG", "GRADIENT_NORMS", "LOG", "COMMITTED"):
        session.check(examples()[name].body)
        assert session.receive(examples()[name]) is False
    with pytest.raises(ProtocolError, match="out of order: COLLECTED"):
        session.receive(examples()["READY"])
    with pytest.raises(ProtocolError, match="tried to send STEP out of order: CLOSED"):
        session.send(examples()["STEP"])
    assert session.receive(examples()["BYE"]) is False
    with pytest.raises(ProtocolError, match="sent LOG out of order: CLOSED"):
        session.receive(examples()["LOG"])


def test_every_phase_can_be_reached_and_left():
    reached = {Phase.OPEN, Phase.EVALUATION}
    for table in ORDER.values():
        reached.update(table.values())
    assert reached == set(ORDER)
    for role in ROLES:
        assert all(legal(role, phase) for phase in ORDER if phase is not Phase.CLOSED)


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
def test_any_message_survives_the_wire(name, data, tensors):
    message = Message(m.Control(name, data), tensors)
    assert same(decode(frame(message)), message)


def only_protocol_error(data: bytes) -> None:
    with suppress(ProtocolError):
        decode(data)


FRAMES = [frame(message) for message in examples().values()]


@settings(max_examples=400, deadline=None)
@given(
    base=st.sampled_from(FRAMES),
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 400),
)
def test_mutated_frames_raise_only_protocol_error(base, edits, cut):
    data = bytearray(base)
    for position, value in edits:
        data[position % len(data)] = value
    only_protocol_error(bytes(data[:cut]))


@settings(max_examples=300, deadline=None)
@given(header=st.binary(max_size=64) | PLAIN.map(msgpack.packb), payload=st.binary(max_size=8))
def test_any_header_raises_only_protocol_error(header, payload):
    only_protocol_error(raw_frame(header, payload))


@settings(max_examples=300, deadline=None)
@given(kind=PLAIN | st.integers(0, 70), fields=PLAIN, shapes=PLAIN)
def test_any_structure_raises_only_protocol_error(kind, fields, shapes):
    only_protocol_error(raw_frame({"t": kind, "m": fields, "x": shapes}))
