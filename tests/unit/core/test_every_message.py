"""Mistakes of a peer, over the tables of messages and of their order: every value that a
field may not have, every message where it is not legal, and floods of each where it is."""

from __future__ import annotations

import copy
import math
import re
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from hetero_framework.core import messages as m
from hetero_framework.core.connection import Connection, opening
from hetero_framework.core.frames import (
    HANDSHAKE_MAX_FRAME_BYTES,
    MAX_ELEMENTS,
    MAX_LONG_HEADER_BYTES,
    PREFIX,
    field_bytes,
    pack_shapes,
    unpack_header,
)
from hetero_framework.core.messages import BODIES, Message, read_header
from hetero_framework.core.session import ORDER, ROLES, Session, legal
from hetero_framework.errors import ProtocolError
from tests.installed import whole
from tests.unit.core.test_frames import EVALUATION, examples

EXAMPLES = examples()
NO_NUMBERS = [math.nan, math.inf, -math.inf]
NO_COUNTS = [-1, 2**63, True, 0.5, "1", math.nan]
FREE = {("LOSS", "loss"), ("CONTROL", "data")}
"""Fields that may have any number."""
PLAIN = ("config", "info", "spans")
"""Maps whose integers mean nothing to the protocol."""
BOUNDS: dict[str, list[Any]] = {
    "max_frame_bytes": [0, 1, HANDSHAKE_MAX_FRAME_BYTES - 1, 2**41],
    "max_boundary_bytes": [0, 2**41],
    "port": [0, 65536],
    "timeout_s": [-1.0, 1e7],
    "order_timeout_s": [-0.5, 1e300],
    "loss_scale": [0.0, -1.0, 1e300],
    "seconds": [-0.1, 1e10],
    "since_s": [-1.0],
    "bytes_per_s": [-1.0, 1e300],
    **{f"{what}_s": [-1.0] for what in ("forward", "backward", "arrive_forward")},
    "arrive_backward_s": [-1.0, 1e10],
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The numbers in a message's map, with their places."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, (*path, key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def plain(value: Any) -> Any:
    """As it travels: lists, which can be changed."""
    return msgpack.unpackb(msgpack.packb(value))


def received(name: str, fields: dict[str, Any]) -> None:
    message = EXAMPLES[name]
    header = msgpack.packb(
        {"t": message.body.spec.number, "m": fields, "x": pack_shapes(message.tensors)}
    )
    prefix = PREFIX.pack(4 + len(header) + message.payload_bytes, len(header))
    read_header(prefix, header, message.payload_bytes)


def bad_values() -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    for name, message in EXAMPLES.items():
        for path, good in leaves(plain(message._fields)):
            if (name, path[0]) in FREE or path[-1] in ("worker_id", "id", "from_id"):
                continue
            if path[0] == "protocol":  # another version's greeting is answered
                continue
            wrong = list(NO_NUMBERS)
            if isinstance(good, int) and path[0] not in PLAIN:
                wrong += NO_COUNTS
            for value in (*wrong, *BOUNDS.get(str(path[-1]), [])):
                yield name, path, value


@whole
def test_every_number_of_every_message_is_checked():
    tried = set()
    for name, path, value in bad_values():
        fields = plain(EXAMPLES[name]._fields)
        *before, last = path
        place: Any = fields
        for key in before:
            place = place[key]
        place[last] = value
        with suppress(OverflowError):  # msgpack writes no such integer
            with pytest.raises(ProtocolError, match=rf"^{name}: .*'?{path[0]}'?"):
                received(name, fields)
            tried.add((name, path[0]))
    assert len(tried) > 60
    assert set(BOUNDS) == {path[-1] for _, path, _ in bad_values()}.intersection(BOUNDS)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e308])
def test_a_loss_may_be_any_number(loss):
    received("LOSS", {**plain(EXAMPLES["LOSS"]._fields), "loss": loss})


# ---- order


def quiet(role: str | None, phase: Enum) -> tuple[Connection, list[Message]]:
    """A connection of this role in this phase, without threads, and what its owner is given."""
    stream = SimpleNamespace(set_tick=lambda seconds: None, peer="peer", local=False)
    given: list[Message] = []

    def take(connection: Connection, message: Message) -> None:
        connection.waiting.came(message)
        given.append(message)

    connection = Connection(
        stream,  # type: ignore[arg-type]
        "peer",
        role,
        take,
        lambda _, reason: None,
        awaited=lambda _, frame: given.append(frame),  # type: ignore[arg-type]
    )
    if role is not None:
        connection._session = session = Session(role)
        session.phase = phase
    return connection, given


def everywhere() -> list[tuple[str, Enum]]:
    return [(role, phase) for role in ROLES for phase in ORDER]


@pytest.mark.parametrize(("role", "phase"), everywhere())
def test_a_message_where_it_is_not_legal_reaches_nobody(role, phase):
    """Neither its header, before memory is taken for tensors, nor itself; and nothing changes."""
    allowed = legal(ROLES[role], phase)
    for name, message in EXAMPLES.items():
        if type(message.body) in allowed:
            continue
        connection, given = quiet(role, phase)
        said = re.escape(f"the {ROLES[role]} sent {name} out of order: {phase.name}")
        with pytest.raises(ProtocolError, match=said):
            connection._on_message(copy.copy(message))
        with pytest.raises(ProtocolError, match=f"sends {name} out of order: {phase.name}"):
            connection._on_header(SimpleNamespace(body=message.body))  # type: ignore[arg-type]
        assert (given, connection.phase) == ([], phase)


@pytest.mark.parametrize("role", [None, *ROLES])
def test_of_a_stranger_nothing_but_a_greeting_is_decoded(role):
    greetings = (
        *("HELLO", "CALL", "PEER_HELLO", "ISLAND_HELLO", "LIGHTHOUSE_HELLO"),
        *("WELCOME", "PEER_WELCOME", "ISLAND_WELCOME", "LIGHTHOUSE_WELCOME"),
        *("REJECT", "ERROR", "BYE", "HEARTBEAT"),
    )
    assert {BODIES[number].spec.name for number in opening(role)} <= set(greetings)
    for name, message in EXAMPLES.items():
        if message.body.spec.number in opening(role):
            continue
        header = msgpack.packb({"t": message.body.spec.number, "m": "never read", "x": "nor this"})
        with pytest.raises(ProtocolError, match=f"^{name} came before a greeting"):
            read_header(b"", header, 0, opening=opening(role))


# ---- floods

MOST = 40


def flood(connection: Connection, message: Message) -> None:
    for _ in range(MOST + 2):
        connection._on_message(copy.copy(message))


@pytest.mark.parametrize(("role", "phase"), everywhere())
def test_a_flood_of_any_message_is_bounded(role, phase, monkeypatch):
    """Its owner is given no more than may wait, or the second one is out of order."""
    monkeypatch.setattr("hetero_framework.core.connection.MOST_MESSAGES", MOST)
    for kind in legal(ROLES[role], phase):
        if issubclass(kind, m.Signal):  # the link keeps none of them
            continue
        messages = [EXAMPLES[kind.spec.name]]
        if kind is m.Step:
            messages.append(EVALUATION)
        for message in messages:
            connection, given = quiet(role, phase)
            with pytest.raises(ProtocolError, match=r"out of order|faster than it is heard"):
                flood(connection, message)
            assert len(given) <= MOST
            assert connection.waiting.messages <= MOST


# ---- headers


def control_with(data: bytes) -> bytes:
    """A whole frame of CONTROL with this value, packed, as its data."""
    header = b"\x83\xa1t\x32\xa1m\x82\xa4name\xa1x\xa4data" + data + b"\xa1x\x90"
    return PREFIX.pack(4 + len(header), len(header)) + header


def array(item: bytes, count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + item * count


MIB = 1 << 20
BOMBS = {
    "maps": array(b"\x80", 15 * MIB),
    "lists": array(b"\x90", 15 * MIB),
    "maps with an entry": array(b"\x81\xa0\x00", 5 * MIB),
    "lists of a number": array(b"\x91\x00", 7 * MIB),
    "short texts": array(b"\xa2ab", 5 * MIB),
    "small numbers": array(b"\xcd\x01\x02", 5 * MIB),
    "floats": array(b"\xca\x00\x00\x00\x01", 3 * MIB),
    "lists of lists": array(array(b"\x80", 4096), 3800),
    "a map of maps": b"\xdf"
    + struct.pack(">I", 1 << 21)
    + b"".join(b"\xa4" + struct.pack(">I", i & 0x7F7F7F7F) + b"\x80" for i in range(1 << 21)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_that_would_take_many_times_its_size_is_not_built(name):
    frame = control_with(BOMBS[name])
    assert len(frame) < MAX_LONG_HEADER_BYTES + 100
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"more than {MAX_ELEMENTS} values"):
            m.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(frame)
    finally:
        tracemalloc.stop()


def test_a_header_with_the_most_values_is_built():
    count = MAX_ELEMENTS - 100
    found = m.decode(control_with(array(b"\x80", count)))
    assert found.body == m.Control("x", [{}] * count)
    assert 72 * count < found.field_bytes < 110 * count


@pytest.mark.parametrize(
    "data", [[{}] * 50_000, [["ab"] * 9] * 3000, ["x" * 300] * 1000, list(range(10_000)), {"a": 1}]
)
def test_memory_of_fields_is_not_guessed_too_low(data):
    header = msgpack.packb({"t": 50, "m": {"name": "x", "data": data}, "x": []})
    tracemalloc.start()
    try:
        kept = unpack_header(header)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept
    assert taken < 1.3 * field_bytes(header) + 4096


def test_a_long_text_is_shown_shortened():
    assert m.shortened("x" * 2000) == "x" * 2000
    assert m.shortened("x" * 3_000_000) == "x" * 2000 + "... (3000000 characters)"
