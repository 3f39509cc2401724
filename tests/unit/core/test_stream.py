"""The contract of streams, on each kind there is."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections import deque
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.core import tls
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.send_queue import drop_sent
from hetero_framework.core.stream import PlainStream, Stream
from hetero_framework.core.threads import in_background
from tests.certificates import keys_of
from tests.waiting import WAIT_S

Pair = tuple[Stream, Stream]


def over_a_socket_pair() -> Pair:
    one, other = socket.socketpair()
    return PlainStream(one), PlainStream(other)


def over_tcp() -> Pair:
    with closing(Listener("127.0.0.1", 0)) as listener:
        near = connect("127.0.0.1", listener.port, WAIT_S)
        return near, listener.accept()


def over_tls(folder: Path) -> Pair:
    near, far = over_tcp()
    keys = keys_of(folder, "local", 1)

    def context(process: int | str, server: bool) -> Any:
        return tls.context(keys.bundle(process), server=server)

    accepted = in_background(
        lambda: tls.accept(far, context(1, True), lambda *_: None, {}), "accept"
    )
    dialled = tls.dial(near, context("local", False), lambda *_: None, {}, "worker 1")
    return dialled, accepted.result(WAIT_S)[0]


@pytest.fixture(params=["socket pair", "TCP", "TLS", "out of TLS"])
def ends(request, tmp_path, monkeypatch):
    monkeypatch.setenv(tls.OFF, "off" if request.param == "TLS" else "on")
    kinds = {
        **{"socket pair": over_a_socket_pair, "TCP": over_tcp},
        **dict.fromkeys(("TLS", "out of TLS"), lambda: over_tls(tmp_path)),
    }
    pair = kinds[request.param]()
    for stream in pair:
        stream.set_tick(0.2)
    yield pair
    for stream in pair:
        stream.close()


def views(*parts: bytes) -> deque[memoryview]:
    return deque(map(memoryview, parts))


def read(stream: Stream, count: int) -> bytes:
    data = bytearray(count)
    got = 0
    while got < count:
        more = stream.read(memoryview(data)[got:], fill=True)
        assert more != 0, "the other end has ended"
        got += more or 0
    return bytes(data)


def test_bytes_of_many_buffers_arrive_in_order(ends):
    parts = [bytes([i % 256]) * (i % 7) for i in range(1, 3000)]
    whole = b"".join(parts)
    pending = views(*parts)
    sent = 0
    while sent < len(whole):
        count = ends[0].write(pending)
        sent += count
        while count:
            if count < len(pending[0]):
                pending[0] = pending[0][count:]
                break
            count -= len(pending.popleft())
    assert read(ends[1], len(whole)) == whole


def test_read_of_nothing_ends_with_the_tick(ends):
    began = time.monotonic()
    assert ends[0].read(memoryview(bytearray(4))) is None
    assert time.monotonic() - began < WAIT_S


def test_write_to_a_peer_that_does_not_read_ends_with_the_tick(ends):
    block = bytes(1 << 22)
    while ends[0].write(views(block)):
        pass
    assert ends[0].try_write(views(block), len(block)) == 0


def test_try_write_takes_no_more_than_the_room(ends):
    sent = ends[0].try_write(views(b"abc", b"def"), 4)
    assert sent in (0, 4)  # a stream may be unable to try
    if sent:
        assert read(ends[1], 4) == b"abcd"


def test_end_of_writes_is_the_end_for_the_reader_only(ends):
    ends[0].write(views(b"last"))
    ends[0].end_writes()
    assert read(ends[1], 4) == b"last"
    assert ends[1].read(memoryview(bytearray(1))) == 0
    ends[1].write(views(b"answer"))
    assert read(ends[0], 6) == b"answer"


@pytest.mark.parametrize("ends", ["TCP", "TLS"], indirect=True)
def test_abandoned_stream_tells_its_peer_at_once(ends):
    """Though bytes wait that the peer does not take: it need not read them first."""
    while ends[0].write(views(bytes(1 << 22))):
        pass
    ends[0].abandon()
    ends[0].stop()
    ends[0].close()

    def read_on() -> None:
        while ends[1].read(memoryview(bytearray(1 << 16))) is not None:
            pass

    with pytest.raises(ConnectionResetError):
        read_on()


def test_bytes_pass_whole_while_both_write_more_than_the_system_takes(ends):
    """Each end writes 8 MB before it reads, in pieces that are tried first, from a second thread,
    while the other reads slowly: what is left over of a piece goes out with the next one."""
    whole = random.Random(0).randbytes(1 << 23)

    def write(stream: Stream) -> None:
        left = memoryview(whole)
        for size in itertools.cycle((1, 2, 70_000, 300_000, 16_384, 5)):
            piece = deque([left[: size // 2], left[size // 2 : size]])
            piece = deque(filter(len, piece))
            left = left[size:]
            drop_sent(piece, stream.try_write(piece, 1 << 16) if piece else 0)
            while piece:
                drop_sent(piece, stream.write(piece))
            if not left:
                return

    written = [in_background(partial(write, stream), "write") for stream in ends]
    found = [in_background(partial(read, stream, len(whole)), "read") for stream in ends]
    assert [future.result(60.0) == whole for future in found] == [True, True]
    assert [future.result(60.0) for future in written] == [None, None]


def test_stop_wakes_a_reader_in_another_thread(ends):
    ends[0].set_tick(30.0)
    found: list[int | None] = []

    def wait() -> None:
        try:
            found.append(ends[0].read(memoryview(bytearray(1))))
        except OSError:
            found.append(0)

    reader = threading.Thread(target=wait)
    reader.start()
    time.sleep(0.05)  # the reader is in its call then, as a rule; the outcome is the same
    ends[0].stop()
    reader.join(WAIT_S)
    assert found == [0]


def test_peer_is_named_by_its_address_even_when_it_is_gone():
    near, far = over_tcp()
    assert near.peer.startswith("127.0.0.1:")
    far.close()
    near.close()
    assert near.peer == "a peer that is gone"
