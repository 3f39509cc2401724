"""Messages as they lie on a plain connection, for tests that speak over bare sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgpack

from hetero_framework.core.frames import GOES_ON, PIECE_BYTES, PREFIX
from hetero_framework.core.messages import Message, encode
from hetero_framework.core.send_queue import Hasher, digest


def framed(message: Message) -> bytes:
    head, *payload = encode(message)
    return marked(bytes(head), b"".join(payload))


def marked(head: bytes, payload: bytes, end: bytes | None = None) -> bytes:
    """A frame as it lies on the wire, with its marks and its checksum, or another end."""
    starts = range(0, max(1, len(payload)), PIECE_BYTES)
    pieces = [payload[start : start + PIECE_BYTES] for start in starts]
    return head + GOES_ON.join(pieces) + (end or checksum([head, payload]))


def frame(header: Any, payload: bytes = b"") -> bytes:
    """One with any header, packed or to be packed, of a length that fits."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    data = PREFIX.pack(4 + len(packed) + len(payload), len(packed)) + packed + payload
    return data + checksum([data])


def checksum(buffers: Iterable[bytes | memoryview]) -> bytes:
    hasher = Hasher()
    for buffer in buffers:
        hasher.update(buffer)
    return digest(hasher)


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Something at a port that is no worker; `answer` gets each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as open_ones:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = open_ones.enter_context(listener.accept()[0])
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
