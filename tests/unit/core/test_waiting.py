"""The waiting messages of one link are bounded, and a header is counted before it is built."""

from __future__ import annotations

import struct
import tracemalloc

import msgpack
import pytest

from hetero_framework.core import frames, waiting
from hetero_framework.core.messages import Control, Loss, Message, decode, encode, shortened
from hetero_framework.core.waiting import Waiting
from hetero_framework.errors import ProtocolError

MIB = 1 << 20


def received(body: Control | Loss) -> Message:
    return decode(b"".join(encode(Message(body))))


def control_with(data: bytes) -> bytes:
    """A whole frame of CONTROL with this value, packed, as its data."""
    header = b"\x83\xa1t\x32\xa1m\x82\xa4name\xa1x\xa4data" + data + b"\xa1x\x90"
    return frames.PREFIX.pack(4 + len(header), len(header)) + header


def array(item: bytes, count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + item * count


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
def test_a_header_that_would_take_many_times_its_size_is_not_built(name: str) -> None:
    frame = control_with(BOMBS[name])
    assert len(frame) < frames.MAX_LONG_HEADER_BYTES + 100
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"more than {frames.MAX_ELEMENTS} values"):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(frame)
    finally:
        tracemalloc.stop()


def test_a_header_with_the_most_values_is_built() -> None:
    count = frames.MAX_ELEMENTS - 100
    found = decode(control_with(array(b"\x80", count)))
    assert found.body == Control("x", [{}] * count)
    assert 72 * count < found.field_bytes < 110 * count


@pytest.mark.parametrize(
    "data", [[{}] * 50_000, [["ab"] * 9] * 3000, ["x" * 300] * 1000, list(range(10_000)), {"a": 1}]
)
def test_memory_of_fields_is_not_guessed_too_low(data: object) -> None:
    header = msgpack.packb({"t": 50, "m": {"name": "x", "data": data}, "x": []})
    tracemalloc.start()
    try:
        kept = frames.unpack_header(header)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept
    assert taken < 1.3 * frames.field_bytes(header) + 4096


def test_waiting_messages_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_MESSAGES", 3)
    link, first = Waiting(), received(Loss(1, 2, 3, 0.5))
    link.came(first)
    link.came(received(Loss(1, 2, 4, 0.5)))
    link.came(received(Loss(1, 2, 5, 0.5)))
    with pytest.raises(ProtocolError, match="faster than it is heard: more than 3 messages wait"):
        link.came(received(Loss(1, 2, 6, 0.5)))
    first.seen()
    link.came(received(Loss(1, 2, 7, 0.5)))
    assert link.messages == 3


def test_waiting_messages_are_bounded_by_the_memory_of_fields() -> None:
    link = Waiting()
    large = received(Control("x", [{}] * 500_000))
    link.came(large)
    with pytest.raises(ProtocolError, match="more than 64 MiB of fields wait"):
        link.came(received(Control("x", [{}] * 500_000)))
    large.seen()
    link.came(received(Control("x", [{}] * 500_000)))
    assert (link.messages, link.tensor_bytes) == (1, 0)


def test_waiting_messages_are_bounded_by_tensor_bytes() -> None:
    def message() -> Message:
        tensor = frames.WireTensor("uint8", (100,), memoryview(bytes(100)))
        return decode(b"".join(encode(Message(Control("x"), (tensor,)))))

    link = Waiting()
    link.most_tensor_bytes = 150 * MIB
    link.came(message())
    link.most_tensor_bytes = 150
    with pytest.raises(ProtocolError, match="MiB of tensors wait"):
        link.came(message())
    assert (link.messages, link.tensor_bytes) == (1, 100)


def test_a_long_text_is_shown_shortened() -> None:
    assert shortened("x" * 2000) == "x" * 2000
    assert shortened("x" * 3_000_000) == "x" * 2000 + "... (3000000 characters)"
