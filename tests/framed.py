"""Messages as they lie on a plain connection, for tests that speak over bare sockets."""

from __future__ import annotations

from collections.abc import Iterable

from hetero_framework.core.frames import GOES_ON, PIECE_BYTES
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


def checksum(buffers: Iterable[bytes | memoryview]) -> bytes:
    hasher = Hasher()
    for buffer in buffers:
        hasher.update(buffer)
    return digest(hasher)
