"""Mutated frames through the whole receiving side of the product: link, frames, fields, session.

    python -m tests.faults.frame_fuzz COUNT SEED

Each goes through prefix, header, tensors and session, one in twenty through a whole connection: it
reads from a stream of bytes in memory, with the code of its threads but without threads. Whatever
the bytes are, there may be ProtocolError or PeerLostError and nothing else. Prints a JSON object of
what was measured. A process of its own, so that its memory is that of the parser.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgpack

from hetero_framework.core import messages as m
from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.connection import Connection, opening
from hetero_framework.core.frames import (
    DEFAULT_MAX_FRAME_BYTES,
    HANDSHAKE_MAX_FRAME_BYTES,
    PREFIX,
    check_start,
    parse_prefix,
)
from hetero_framework.core.send_queue import CHECKSUM_BYTES, Hasher, digest
from hetero_framework.core.session import ORDER, ROLES, Session
from hetero_framework.errors import PeerLostError, ProtocolError
from tests.unit.core.test_frames import examples, frame

WARM_UP = 3000
SLOW_S = 0.010
REPEATS = 3
INTERESTING = (0, 1, 2, 3, 4, 11, 12, 127, 128, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
LONG = (2**32, 2**40 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
EVIL: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, float("nan"), float("inf"), "", "x" * 300, "\0", "../x", "ü", b"", b"\xff" * 40),
    *([], [[]], [1] * 9, [-1], [True], [2**62] * 8, [[[[[[[[]]]]]]]]),
    *({}, {"": 0}, {"a": {"a": {}}}),
    *([1, [2**40]], [99, [1]], [[1, [1]]] * 40, msgpack.Timestamp(1), msgpack.ExtType(5, b"x")),
)
EVERY_ROLE, PHASES = (None, *ROLES), tuple(ORDER)
WHOLE = 20  # one in this many goes through a connection


class Dice(random.Random):
    """As random.Random, with the two draws that are made most in a tenth of the time; they favour
    some of 2**53 values."""

    def choice(self, seq: Any) -> Any:
        return seq[int(self.random() * len(seq))]

    def randrange(self, start: int, stop: int | None = None) -> int:  # type: ignore[override]
        if stop is None:
            return int(self.random() * start)
        return start + int(self.random() * (stop - start))


class Memory:
    """A stream that gives these bytes and then ends."""

    peer, local = "memory", False

    def __init__(self, data: bytes, piece_bytes: int) -> None:
        self._data = memoryview(data)
        self._most = piece_bytes

    def set_tick(self, seconds: float) -> None: ...

    def read(self, view: memoryview, fill: bool = False) -> int | None:
        taken = self._data[: min(len(view), 1 << 20 if fill else self._most)]
        view[: len(taken)] = taken
        self._data = self._data[len(taken) :]
        return len(taken)

    def write(self, buffers: Any) -> int:
        return sum(map(len, buffers))

    def try_write(self, buffers: Any, room: int) -> int:
        return min(room, sum(map(len, buffers)))

    def end_writes(self) -> None: ...
    def abandon(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Case:
    """Who receives, and how far its conversation has come; `phase` None: nothing was said yet."""

    role: str | None
    phase: Enum | None
    piece_bytes: int

    @property
    def max_frame_bytes(self) -> int:
        return HANDSHAKE_MAX_FRAME_BYTES if self.role is None else DEFAULT_MAX_FRAME_BYTES

    @classmethod
    def draw(cls, dice: random.Random) -> Case:
        role = dice.choice(EVERY_ROLE)
        phase = None if role is None or dice.random() < 0.2 else dice.choice(PHASES)
        return cls(role, phase, dice.choice((1 << 20, 1 << 20, 7)))


def through_connection(data: bytes, case: Case) -> None:
    connection = Connection(
        Memory(data, case.piece_bytes),  # type: ignore[arg-type]
        "fuzz",
        case.role,
        lambda connection, message: message.release(),
        lambda connection, reason: None,
        max_frame_bytes=case.max_frame_bytes,
        pool=BufferPool(),
    )
    if case.phase is not None:  # as after its first messages
        connection.link._greeted()
        assert connection._session is not None
        connection._session.phase = case.phase
    connection.link._read_frames()


def through_parser(data: bytes, case: Case) -> None:
    prefix = data[: PREFIX.size]
    if len(prefix) < PREFIX.size:
        check_start(prefix or b"\0")
        return
    header_bytes, payload_bytes = parse_prefix(prefix, case.max_frame_bytes)
    end = PREFIX.size + header_bytes
    if len(data) < end:
        return
    first = opening(case.role) if case.phase is None else None
    header = data[PREFIX.size : end]
    head = m.read_header(prefix, header, payload_bytes, case.max_frame_bytes, first)
    if len(data) < end + payload_bytes:
        return
    session = Session(case.role or "worker")
    session.phase = case.phase or session.phase
    session.receive(head.attach(data[end : end + payload_bytes]))


def receive(data: bytes, case: Case, whole: bool) -> str:
    """How these bytes are taken: the name of the error, or "none"."""
    try:
        (through_connection if whole else through_parser)(data, case)
    except (ProtocolError, PeerLostError) as error:
        return type(error).__name__
    return "none"


# -- what is done to frames

Mutation = Callable[[bytearray, random.Random], None]


def flip(data: bytearray, dice: random.Random) -> None:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def overwrite(data: bytearray, dice: random.Random) -> None:
    known = (0, 1, 0x7F, 0x80, 0xC1, 0xFF, dice.randrange(256))
    data[dice.randrange(len(data))] = dice.choice(known)


def insert(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data) + 1)
    data[at:at] = dice.choice((b"\x00", b"\x91" * 40, b"\xdd\xff\xff\xff\xff", dice.randbytes(9)))


def delete(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data))
    del data[at : at + dice.choice((1, 1, 4, 32))]


def cut(data: bytearray, dice: random.Random) -> None:
    del data[dice.randrange(len(data)) :]


def repeat(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data))
    piece = data[at : at + dice.randrange(1, 40)]
    data[at:at] = piece * dice.choice((1, 1, 8))


def lie_in_prefix(data: bytearray, dice: random.Random) -> None:
    if len(data) >= PREFIX.size:
        total, header = PREFIX.unpack(data[: PREFIX.size])
        total = dice.choice((total, total + 1, total - 1, *INTERESTING, *LONG)) % 2**64
        header = dice.choice((header, header + 1, header - 1, *INTERESTING)) % 2**32
        data[: PREFIX.size] = struct.pack(">QI", total, header)


BYTES: tuple[Mutation, ...] = (flip, overwrite, insert, delete, cut, repeat, lie_in_prefix)


def replaced(value: Any, dice: random.Random, known: Sequence[Any]) -> Any:
    """`value` with one value in it replaced, added or taken away."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        if dice.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if dice.random() < 0.1:
            return {**value, dice.choice(("zz", "t", key + "_")): dice.choice(EVIL)}
        return {**value, key: replaced(value[key], dice, known)}
    if isinstance(value, list) and value and dice.random() < 0.7:
        at = dice.randrange(len(value))
        return [*value[:at], replaced(value[at], dice, known), *value[at + 1 :]]
    return dice.choice(EVIL) if dice.random() < 0.7 else dice.choice(known)


def packed(header: Any, payload: bytes) -> bytes:
    data = msgpack.packb(header)
    return PREFIX.pack(4 + len(data) + len(payload), len(data)) + data + payload


def mutated(seeds: Sequence[bytes], trees: Sequence[Any], dice: random.Random) -> bytes:
    """A mutated frame with its checksum, which is right more often than not."""
    at = dice.randrange(len(seeds))
    known = [tree for tree, _ in trees[:3]]
    if dice.random() < 0.4:
        tree, payload = trees[at]
        for _ in range(dice.choice((1, 1, 1, 2))):
            tree = replaced(tree, dice, known)
        data = bytearray(packed(tree, payload))
    else:
        data = bytearray(seeds[at])
        for _ in range(dice.choice((1, 1, 2, 5))):
            dice.choice(BYTES)(data, dice)
            if not data:
                break
    if dice.random() < 0.5 and len(data) > PREFIX.size:  # the length fits again
        data[:8] = struct.pack(">Q", len(data) - 8)
    hasher = Hasher()
    hasher.update(data)
    tail = digest(hasher) if dice.random() < 0.9 else dice.randbytes(CHECKSUM_BYTES)
    following = seeds[dice.randrange(len(seeds))] if dice.random() < 0.2 else b""
    return bytes(data) + tail + following


def peak_bytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def fuzz(count: int, seed: int) -> dict[str, Any]:
    """Counts by how connections ended; growth of the memory's peak; the slowest frame, in seconds,
    of those that were as slow in each of several tries."""
    dice = Dice(seed)
    seeds = [frame(message) for message in examples().values()]
    trees = []
    for data in seeds:
        end = PREFIX.size + PREFIX.unpack(data[: PREFIX.size])[1]
        trees.append((msgpack.unpackb(data[PREFIX.size : end]), data[end:]))
    ends: Counter[str] = Counter()
    slowest, before = 0.0, 0
    gc.collect()
    gc.freeze()  # the connections alone make what it has to find
    for number in range(WARM_UP + count):
        if number == WARM_UP:
            before = peak_bytes()
            ends.clear()
        data, case, whole = mutated(seeds, trees, dice), Case.draw(dice), number % WHOLE == 0
        try:
            began = time.perf_counter()
            ends[receive(data, case, whole)] += 1
            took = time.perf_counter() - began
        except Exception as error:
            raise AssertionError(f"seed {seed}, frame {number}, {case}: {data.hex()}") from error
        if took > max(slowest, SLOW_S / 2):
            took = min(took, *(seconds(data, case, whole) for _ in range(REPEATS)))
        slowest = max(slowest, took)
    return {
        "frames": count,
        "ends": dict(ends),
        "grown_bytes": peak_bytes() - before,
        "slowest_s": slowest,
    }


def seconds(data: bytes, case: Case, whole: bool) -> float:
    began = time.perf_counter()
    receive(data, case, whole)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(fuzz(int(sys.argv[1]), int(sys.argv[2]))))
