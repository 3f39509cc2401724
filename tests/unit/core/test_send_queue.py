from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import pytest

from hetero_framework.core.frames import INSIDE, PIECE_BYTES, WireTensor
from hetero_framework.core.messages import Backward, Forward, Inputs, Message, encode
from hetero_framework.core.send_queue import (
    CHECKSUM_BYTES,
    EARLY_BYTES,
    VOID,
    Hasher,
    LinkStats,
    Outgoing,
    SendQueue,
    digest,
)
from tests.framed import checksum, marked


def joined(views: Iterable[memoryview]) -> bytes:
    return b"".join(views)


def relayed(tensor_bytes: int) -> Outgoing:
    return Outgoing([b"head"], relayed_bytes=tensor_bytes)


def queue_of(*frames: Outgoing) -> SendQueue:
    queue = SendQueue(LinkStats())
    for frame in frames:
        queue.add(frame)
    return queue


def test_frame_gives_its_bytes_once_and_in_order():
    frame = Outgoing([b"ab", memoryview(b"cde")])
    assert (frame.nbytes, frame.left, frame.missing, frame.ready) == (13, 13, 0, True)
    assert joined(frame.take(reserve=3)) == b"abcde" + checksum([b"abcde"])
    assert not frame.take()


@pytest.mark.parametrize("size", [0, 5, 1 << 18, (1 << 18) + 1, 3_000_000])
def test_frame_ends_with_the_checksum_of_its_bytes(size):
    payload = bytes(i % 251 for i in range(size))
    frame = Outgoing([b"head", memoryview(payload)])
    written = b""
    while segment := frame.take():
        rest = segment.pop()  # not all is taken by the system
        frame.put_back(deque([rest[len(rest) // 2 :]]))
        written += joined(segment) + bytes(rest[: len(rest) // 2])
        if len(rest) == 1:
            written += joined(frame.take_one())
    assert written == marked(b"head", payload)
    assert len(written) == frame.nbytes


def test_relayed_frame_that_is_given_up_is_void():
    frame = relayed(5)
    frame.feed(memoryview(b"12"))
    frame.pad()
    assert joined(frame.take()) == b"head12" + bytes(3) + VOID


@pytest.mark.parametrize("reserve", [0, 1, 3, 5, 7, 8, 100])
def test_the_reserve_is_held_back_until_the_frame_is_complete(reserve):
    frame = relayed(5)
    frame.feed(memoryview(b"12"))
    frame.feed(memoryview(b"3"))
    written = joined(frame.take(reserve))
    assert written == b"head123"[: max(0, 7 - reserve)]
    one = joined(frame.take_one())
    assert one == b"head123"[len(written) : len(written) + 1]
    frame.feed(memoryview(b"45"))
    frame.feed(memoryview(b"checksum"))
    assert written + one + joined(frame.take(reserve)) == b"head12345checksum"
    assert frame.take_one() == frame.take(reserve)


def test_padding_makes_the_frame_whole_with_zeros_and_ends_the_feeding():
    frame = relayed(3_000_000)
    frame.feed(memoryview(b"12"))
    frame.pad()
    frame.feed(memoryview(b"late"))
    written = b""
    while segment := frame.take(reserve=10):
        written += joined(segment)
        frame.left = frame.nbytes - len(written)
    assert written == marked(b"head", b"12" + bytes(2_999_998), VOID)
    assert frame.missing == 0


def large(*, begun_with: int = 0) -> Outgoing:
    """A frame with two marks, of which so many bytes are written."""
    frame = Outgoing([b"head", memoryview(bytes(2 * PIECE_BYTES + 1))])
    frame.left -= begun_with
    return frame


def large_relayed() -> Outgoing:
    """The same frame, all of whose bytes have come from another link."""
    frame = relayed(2 * PIECE_BYTES + 1)
    frame.feed(memoryview(bytes(2 * PIECE_BYTES + 1 + CHECKSUM_BYTES)))
    return frame


@pytest.mark.parametrize("make", [large, large_relayed])
@pytest.mark.parametrize(
    ("room", "sizes"),
    [
        (PIECE_BYTES + 4, [4 + PIECE_BYTES, 1 + PIECE_BYTES, 1 + 1 + 8]),
        (2 * PIECE_BYTES + 2, [4 + PIECE_BYTES, 1 + PIECE_BYTES + 1 + 1 + 8]),
        (2 * PIECE_BYTES + 5, [4 + PIECE_BYTES + 1 + PIECE_BYTES, 1 + 1 + 8]),
    ],
)
def test_a_segment_ends_at_the_last_mark_in_its_room(make, room, sizes):
    frame, found = make(), []
    while segment := frame.take(room=room):
        found.append(len(joined(segment)))
        frame.left -= found[-1]
    assert found == sizes


def test_what_was_put_back_of_several_pieces_goes_before_more_is_hashed():
    frame = Outgoing([b"head", memoryview(bytes(9 * PIECE_BYTES))])
    taken = frame.take(room=4 * PIECE_BYTES + 4)
    frame.wrote(taken, PIECE_BYTES)
    assert len(joined(frame.take(room=8 * PIECE_BYTES))) == 4 + 3 * (PIECE_BYTES + 1)


@pytest.mark.parametrize(
    ("written", "is_next"),
    [
        (4 + PIECE_BYTES - 1, False),
        (4 + PIECE_BYTES, True),
        (4 + PIECE_BYTES + 1, False),
        (4 + 2 * PIECE_BYTES + 1, True),
        (4 + 2 * PIECE_BYTES + 2, False),
    ],
)
def test_urgent_frame_goes_where_a_mark_is(written, is_next):
    frame, beat = large(begun_with=written), Outgoing([b"beat"])
    queue = queue_of(frame)
    queue.begin(frame, 1.0)
    queue.add(beat, urgent=True)
    assert queue.next() is (beat if is_next else frame)
    assert queue.next() is (beat if is_next else frame)
    whole = INSIDE + b"beat" + checksum([b"beat"]) if is_next else b"beat" + checksum([b"beat"])
    assert joined(beat.take()) == whole
    assert queue.nbytes == frame.nbytes + len(whole)


def test_urgent_frame_waits_while_the_next_piece_is_being_written():
    frame, beat = large(begun_with=4 + PIECE_BYTES), Outgoing([b"beat"])
    queue = queue_of(frame)
    queue.begin(frame, 1.0)
    frame.busy = True  # its bytes count when they are written
    queue.add(beat, urgent=True)
    assert queue.next() is frame
    assert joined(beat.take()) == b"beat" + checksum([b"beat"])


def test_urgent_frame_that_has_begun_is_ended_first():
    frame, beat = large(begun_with=4 + PIECE_BYTES), Outgoing([b"beat"])
    queue = queue_of(frame)
    queue.begin(frame, 1.0)
    queue.add(beat, urgent=True)
    assert queue.next() is beat
    queue.begin(beat, 2.0)
    queue.add(Outgoing([b"second beat"]), urgent=True)
    assert queue.next() is beat
    queue.remove(beat)
    assert queue.next() is not frame


def boundary(body: type[Forward] | type[Backward], stage: int, micro_batch: int = 0) -> Outgoing:
    """A large frame of a micro-batch for this stage."""
    tensor = WireTensor("uint8", (300_000,), memoryview(bytes(300_000)))
    message = Message(body(0, 0, stage, micro_batch), [tensor])
    return Outgoing(encode(message), None, message)


def inputs() -> Outgoing:
    tensor = WireTensor("uint8", (1,), memoryview(bytes(1)))
    message = Message(Inputs(0, 0, 1, 0, ("labels",), {}), [tensor])
    return Outgoing(encode(message), None, message)


def sent(queue: SendQueue) -> list[Outgoing]:
    """The frames in the order in which they go."""
    order = []
    while (frame := queue.next()) is not None:
        queue.begin(frame, 1.0)
        assert queue.next() is frame
        queue.remove(frame)
        order.append(frame)
    return order


def test_directions_and_stages_take_turns():
    first, second, third = (boundary(Forward, 1, k) for k in range(3))
    back, again, other = boundary(Backward, 1), boundary(Backward, 1, 1), boundary(Forward, 3)
    queue = queue_of(first, second, third, back, again, other)
    assert sent(queue) == [first, back, other, second, again, third]


def test_large_frames_go_after_inputs_and_pass_nothing_else():
    first, second = boundary(Forward, 1), boundary(Forward, 1, 1)
    back, late = boundary(Backward, 1), boundary(Backward, 0)
    labels, word = inputs(), Outgoing([b"word"])
    queue = queue_of(first, second, back, labels, word, late)
    assert sent(queue) == [labels, first, back, second, word, late]


def test_whole_frames_pass_one_that_is_still_coming_in():
    slow, first, second = relayed(EARLY_BYTES + 2), Outgoing([b"first"]), Outgoing([b"second"])
    queue = queue_of(slow)
    assert queue.idle
    queue.add(first)
    queue.add(second)
    assert queue.next() is first
    slow.feed(memoryview(bytes(EARLY_BYTES)))
    assert queue.next() is first
    queue.begin(first, 1.0)
    slow.feed(memoryview(b"12checksum"))
    assert queue.next() is first  # nothing passes a frame that is being written
    queue.remove(first)
    assert queue.next() is slow  # whole by now, and it came before the second
    queue.begin(slow, 1.0)
    queue.remove(slow)
    assert queue.next() is second
    queue.remove(second)
    assert (len(queue), queue.nbytes) == (0, 0)


def test_nothing_passes_once_a_frame_has_begun():
    slow, waiting = relayed(EARLY_BYTES + 2), Outgoing([b"waiting"])
    queue = queue_of(relayed(9), slow)
    slow.feed(memoryview(b"12"))
    assert queue.idle
    assert not slow.ready
    slow.feed(memoryview(bytes(EARLY_BYTES)))
    assert queue.next() is slow
    queue.begin(slow, 1.0)
    queue.add(waiting)
    urgent = Outgoing([b"beat"])
    queue.add(urgent, urgent=True)
    assert queue.next() is slow
    queue.remove(slow)
    assert queue.next() is urgent
    left = queue.clear()
    assert urgent in left
    assert slow not in left


def test_urgent_frame_is_next_when_nothing_has_begun():
    urgent = Outgoing([b"beat"])
    queue = queue_of(Outgoing([b"first"]))
    queue.add(urgent, urgent=True)
    assert queue.next() is urgent


def test_cleared_frames_take_nothing_more():
    frame = relayed(4)
    queue = queue_of(frame)
    assert queue.clear() == [frame]
    frame.feed(memoryview(b"1234checksum"))
    assert not frame.take()
    assert (len(queue), queue.nbytes) == (0, 0)


class Fixed:
    """A hasher of which the digest is known."""

    def __init__(self, found: bytes) -> None:
        self._found = found

    def digest(self) -> bytes:
        return self._found


def test_the_checksum_is_xxh3_of_all_bytes_big_endian():
    """The value of the empty input is in the specification of XXH3."""
    assert digest(Hasher(b"")) == (0x2D06800538D394C2).to_bytes(CHECKSUM_BYTES, "big")
    parts = Hasher(b"one ")
    parts.update(b"frame")
    assert digest(parts) == digest(Hasher(b"one frame"))
    assert digest(Hasher(b"one frame")) != digest(Hasher(b"one framf"))


def test_no_frame_has_the_checksum_of_one_that_was_given_up():
    void, other = Fixed(VOID), Fixed(b"\xff" * 7 + b"\xfe")
    assert digest(void) == bytes(CHECKSUM_BYTES)  # type: ignore[arg-type]
    assert digest(other) == b"\xff" * 7 + b"\xfe"  # type: ignore[arg-type]
