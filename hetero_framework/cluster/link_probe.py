"""Measures a link's speed by CONTROL questions with and without payload, over the run's links.

Importing this module registers a worker's handlers.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any

from hetero_framework import control
from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.fields import Fields, WorkerId
from hetero_framework.core.frames import WireTensor, brief
from hetero_framework.core.messages import Control, Message, shortened
from hetero_framework.errors import HeteroError, NetworkError, ProtocolError

SINK, SOURCE, PEER = "hetero.sink", "hetero.source", "hetero.peer"
ALIVE = "hetero.alive"
"""No handler has this name: any answer, also an error, shows that the main thread works."""
_TRIPS = 20
_ROUNDS = 5
MOST_BYTES = 1 << 30
_RANDOM_BYTES = 1 << 18

MOST_BYTES_OF_PEER = 1 << 26
"""Limit of one message between two workers; `hetero plan --measure` sends half of it."""
BETWEEN_WORKERS = (SINK, SOURCE)
"""Questions that a worker may ask another worker; only the coordinator may ask all others."""

Ask = Callable[[Message, Message | None], Message]
"""Sends a question and, right behind it, an optional further message; returns the answer."""


@dataclass(frozen=True)
class LinkSpeed:
    """Medians: round trip of a small message, bytes per second in each direction alone, and the
    factor by which a transfer slows down while as many bytes go the other way (1: full duplex, 2:
    the directions share the bandwidth, as on Wi-Fi)."""

    round_trip_s: m.Seconds
    up_bytes_per_s: Annotated[float, 1e-3, 1e18]
    down_bytes_per_s: Annotated[float, 1e-3, 1e18]
    both_ways: Annotated[float, 1.0, 2.0] = 1.0


_SPEED = Fields(LinkSpeed)


def measure(ask: Ask, nbytes: int) -> LinkSpeed:
    """Measure a link with messages of `nbytes`. The shortest round trip is subtracted from the time
    of a transfer."""
    payload = (_bytes(nbytes),)
    trips = _repeat(lambda: _seconds(ask, SINK, None), _TRIPS)
    up = _repeat(lambda: _seconds(ask, SINK, None, payload), _ROUNDS)
    down = _repeat(lambda: _seconds(ask, SOURCE, {"bytes": nbytes}), _ROUNDS)
    both = _repeat(lambda: _seconds_both_ways(ask, nbytes), _ROUNDS)

    def one_way(seconds: list[float], round_trips: int = 1) -> float:
        median = statistics.median(seconds)
        return max(median - round_trips * min(trips), median / 10)

    up_s, down_s = one_way(up), one_way(down)
    both_ways = min(2.0, max(1.0, one_way(both, 2) / max(up_s, down_s)))  # more is noise
    return LinkSpeed(statistics.median(trips), nbytes / up_s, nbytes / down_s, both_ways)


def _repeat(seconds: Callable[[], float], times: int) -> list[float]:
    """`times` measurements after a warm-up; fewer, at least one, when they take long."""
    first = seconds()
    timings: list[float] = []
    while len(timings) < times and first + sum(timings) < timeouts.PROBE_S:
        timings.append(seconds())
    return timings or [first]


def peer_question(number: int, peer: WorkerId, nbytes: int) -> Message:
    """Ask a worker to measure its link to another worker."""
    return control.request(number, PEER, {"peer": peer, "bytes": nbytes})


def peer_speed(answer: Message) -> LinkSpeed:
    """The speed that the worker measured. Raises NetworkError with its reason if that failed, and
    ProtocolError for numbers that cannot be right."""
    reply = answer.expect(Control)
    if reply.error is not None:
        raise NetworkError(shortened(reply.error))
    return _SPEED.read(reply.data)  # type: ignore[no-any-return]


def answer_for_peer(question: Control, ask_peer: Callable[..., Message]) -> Message:
    """Measure and answer, in the worker that was asked. `ask_peer(worker, question, seconds, then)`
    is `PeerLinks.ask`."""
    try:
        peer, nbytes = question.data["peer"], question.data["bytes"]
        patience_s = timeouts.PROBE_ANSWER_S
        speed = measure(lambda asked, then: ask_peer(peer, asked, patience_s, then), nbytes)
    except (HeteroError, KeyError, TypeError, ValueError) as error:
        text = error.message if isinstance(error, HeteroError) else repr(error)
        return Message(Control(PEER, answers=question.request, error=text))
    return Message(Control(PEER, asdict(speed), answers=question.request))


def check_peer(question: Control, payload_bytes: int) -> None:
    """Raise ProtocolError for a question or a size that a worker may not send to another worker."""
    asked: Any = 0
    if question.answers is None:
        if question.name not in BETWEEN_WORKERS:
            raise ProtocolError(
                f"CONTROL {brief(question.name)} came from a worker, which may ask for"
                f" {' and '.join(BETWEEN_WORKERS)} alone"
            )
        asked = question.data.get("bytes") if isinstance(question.data, dict) else 0
    largest = max(payload_bytes, asked if isinstance(asked, int) else 0)
    if largest > MOST_BYTES_OF_PEER:
        text = f"CONTROL {brief(question.name)} of {largest} bytes came from a worker"
        raise ProtocolError(f"{text}; at most {MOST_BYTES_OF_PEER} may")


@control.on(SINK)
def _sink(data: Any) -> None:
    """Drop the bytes that come."""


@control.on(SOURCE)
def _source(data: Any) -> control.WithTensors:
    return control.WithTensors(None, (_bytes(data["bytes"]),))


@lru_cache(maxsize=1)
def _bytes(count: int) -> WireTensor:
    if not 0 < count <= MOST_BYTES:
        raise ValueError(f"{count} bytes cannot be asked for")
    # Random, since a tunnel that compresses would be too fast with zeros.
    data = os.urandom(_RANDOM_BYTES) * -(-count // _RANDOM_BYTES)
    return WireTensor("uint8", (count,), memoryview(data)[:count])


def _seconds(ask: Ask, name: str, data: Any, tensors: tuple[WireTensor, ...] = ()) -> float:
    began = time.perf_counter()
    answer = ask(control.request(next(_numbers), name, data, tensors), None)
    ended = time.perf_counter()
    _check(answer)
    return ended - began


def _seconds_both_ways(ask: Ask, nbytes: int) -> float:
    """Seconds to send `nbytes` in both directions at once, including two round trips."""
    began = time.perf_counter()
    away = Message(Control(SINK), (_bytes(nbytes),))
    _check(ask(control.request(next(_numbers), SOURCE, {"bytes": nbytes}), away))
    _check(ask(control.request(next(_numbers), SINK, None), None))  # behind what went
    return time.perf_counter() - began


def _check(answer: Message) -> None:
    """Raise the error that an answer reports, and release it."""
    try:
        control.result(answer)
    finally:
        answer.release()


_numbers = itertools.count(1 << 32)  # beyond the numbers that a pipeline gives its own questions
