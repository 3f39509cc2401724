"""Messages as they lie on a plain connection, for tests that speak over bare sockets."""

from __future__ import annotations

from hetero_framework.core.checksum import checksum
from hetero_framework.core.messages import Message, encode


def framed(message: Message) -> bytes:
    buffers = encode(message)
    return b"".join(buffers) + checksum(buffers)
