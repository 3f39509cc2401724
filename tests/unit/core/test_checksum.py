from __future__ import annotations

from hetero_framework.core.checksum import CHECKSUM_BYTES, VOID, Hasher, digest


class Fixed:
    """A hasher of which the digest is known."""

    def __init__(self, found: bytes) -> None:
        self._found = found

    def digest(self) -> bytes:
        return self._found


def test_the_checksum_is_xxh3_of_all_bytes_big_endian() -> None:
    """The value of the empty input is in the specification of XXH3."""
    assert digest(Hasher(b"")) == (0x2D06800538D394C2).to_bytes(CHECKSUM_BYTES, "big")
    parts = Hasher(b"one ")
    parts.update(b"frame")
    assert digest(parts) == digest(Hasher(b"one frame"))
    assert digest(Hasher(b"one frame")) != digest(Hasher(b"one framf"))


def test_no_frame_has_the_checksum_of_one_that_was_given_up() -> None:
    void, other = Fixed(VOID), Fixed(b"\xff" * 7 + b"\xfe")
    assert digest(void) == bytes(CHECKSUM_BYTES)  # type: ignore[arg-type]
    assert digest(other) == b"\xff" * 7 + b"\xfe"  # type: ignore[arg-type]
