"""Messages as they lie on a plain connection, for tests that speak over bare sockets."""

from __future__ import annotations

from collections.abc import Iterable

from hetero_framework.core.checksum import Hasher, digest
from hetero_framework.core.messages import Message, encode


def framed(message: Message) -> bytes:
    buffers = encode(message)
    return b"".join(buffers) + checksum(buffers)


def checksum(buffers: Iterable[bytes | memoryview]) -> bytes:
    hasher = Hasher()
    for buffer in buffers:
        hasher.update(buffer)
    return digest(hasher)
