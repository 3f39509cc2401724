"""How fast a link is: questions with and without bytes beside them, over the run's own links.

Importing this module registers what a worker answers.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from hetero_framework import control
from hetero_framework.core import timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.frames import WireTensor, shown
from hetero_framework.core.messages import Control, Message, shortened
from hetero_framework.errors import HeteroError, NetworkError, ProtocolError

SINK, SOURCE, PEER = "hetero.sink", "hetero.source", "hetero.peer"
ALIVE = "hetero.alive"
"""Nobody needs to know it: whatever the answer says, a thread gave one."""
_TRIPS = 20
_ROUNDS = 5
MOST_BYTES = 1 << 30
_RANDOM_BYTES = 1 << 18

MOST_BYTES_OF_PEER = 1 << 26
"""Of one message between two workers; `hetero plan --measure` sends half of it."""
BETWEEN_WORKERS = (SINK, SOURCE)
"""What a worker may ask of another one. No other handler is anybody's but the coordinator's."""

Ask = Callable[[Message, Message | None], Message]
"""Sends a question, right after it a message that nobody answers where there is one; the answer."""


@dataclass(frozen=True)
class LinkSpeed:
    """Medians: seconds there and back of a small message, bytes per second away and back, each way
    by itself; and how many times as long that takes while as many bytes go the other way (1: they
    do not disturb each other, 2: they share what there is, as on Wi-Fi)."""

    round_trip_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    both_ways: float = 1.0


def measure(ask: Ask, nbytes: int) -> LinkSpeed:
    """Measure a link with messages of `nbytes`. A transfer's time includes a round trip: the
    shortest one is taken off."""
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
    """`times` measurements after one to warm the link up; fewer, but one, when they take long."""
    first = seconds()
    found: list[float] = []
    while len(found) < times and first + sum(found) < timeouts.PROBE_S:
        found.append(seconds())
    return found or [first]


def peer_question(number: int, peer: WorkerId, nbytes: int) -> Message:
    """Asks a worker to measure its link to another one."""
    return control.request(number, PEER, {"peer": peer, "bytes": nbytes})


def peer_speed(answer: Message) -> LinkSpeed:
    """What the worker measured. Raises NetworkError with its reason if it could not."""
    found = answer.expect(Control)
    if found.error is not None:
        raise NetworkError(shortened(found.error))
    return LinkSpeed(**found.data)


def answer_for_peer(question: Control, ask_peer: Callable[..., Message]) -> Message:
    """In the worker that was asked: measure, and answer. `ask_peer(worker, question, seconds,
    then)` is `PeerLinks.ask`."""
    try:
        peer, nbytes = question.data["peer"], question.data["bytes"]
        patience_s = timeouts.PROBE_ANSWER_S
        speed = measure(lambda asked, then: ask_peer(peer, asked, patience_s, then), nbytes)
    except (HeteroError, KeyError, TypeError, ValueError) as error:
        text = error.message if isinstance(error, HeteroError) else repr(error)
        return Message(Control(PEER, answers=question.request, error=text))
    return Message(Control(PEER, asdict(speed), answers=question.request))


def check_peer(question: Control, payload_bytes: int) -> None:
    """Raise ProtocolError for what a worker may not ask of another one, or not in this size."""
    asked: Any = 0
    if question.answers is None:
        if question.name not in BETWEEN_WORKERS:
            raise ProtocolError(
                f"CONTROL {shown(question.name)} came from a worker, which may ask for"
                f" {' and '.join(BETWEEN_WORKERS)} alone"
            )
        asked = question.data.get("bytes") if isinstance(question.data, dict) else 0
    largest = max(payload_bytes, asked if isinstance(asked, int) else 0)
    if largest > MOST_BYTES_OF_PEER:
        text = f"CONTROL {shown(question.name)} of {largest} bytes came from a worker"
        raise ProtocolError(f"{text}; at most {MOST_BYTES_OF_PEER} may")


@control.on(SINK)
def _sink(data: Any) -> None:
    """Bytes come and are dropped."""


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
    """Until `nbytes` have come while as many went; with two round trips."""
    began = time.perf_counter()
    away = Message(Control(SINK), (_bytes(nbytes),))
    _check(ask(control.request(next(_numbers), SOURCE, {"bytes": nbytes}), away))
    _check(ask(control.request(next(_numbers), SINK, None), None))  # behind what went
    return time.perf_counter() - began


def _check(answer: Message) -> None:
    """Raise what it says went wrong; its bytes are not needed."""
    try:
        control.result(answer)
    finally:
        answer.release()


_numbers = itertools.count(1 << 32)  # beyond the numbers that a pipeline gives its own questions
