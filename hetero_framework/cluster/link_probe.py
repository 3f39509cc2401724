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
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import Control, Message
from hetero_framework.errors import HeteroError, NetworkError

SINK, SOURCE, PEER = "hetero.sink", "hetero.source", "hetero.peer"
ALIVE = "hetero.alive"
"""Nobody needs to know it: whatever the answer says, a thread gave one."""
_TRIPS = 20
_ROUNDS = 5
MOST_BYTES = 1 << 30
_RANDOM_BYTES = 1 << 18

Ask = Callable[[Message], Message]


@dataclass(frozen=True)
class LinkSpeed:
    """Medians: seconds there and back of a small message, bytes per second away and back."""

    round_trip_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float


def measure(ask: Ask, nbytes: int) -> LinkSpeed:
    """Measure a link with messages of `nbytes`; `ask` sends a question and gives its answer. A
    transfer's time includes a round trip: the shortest one is taken off."""
    payload = (_bytes(nbytes),)
    trips = _repeat(lambda: _seconds(ask, SINK, None), _TRIPS)
    up = _repeat(lambda: _seconds(ask, SINK, None, payload), _ROUNDS)
    down = _repeat(lambda: _seconds(ask, SOURCE, {"bytes": nbytes}), _ROUNDS)

    def speed(seconds: list[float]) -> float:
        median = statistics.median(seconds)
        return nbytes / max(median - min(trips), median / 10)

    return LinkSpeed(statistics.median(trips), speed(up), speed(down))


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
        raise NetworkError(found.error)
    return LinkSpeed(**found.data)


def answer_for_peer(
    question: Control, ask_peer: Callable[[WorkerId, Message, float], Message]
) -> Message:
    """In the worker that was asked: measure, and answer."""
    try:
        peer, nbytes = question.data["peer"], question.data["bytes"]
        speed = measure(lambda message: ask_peer(peer, message, timeouts.PROBE_ANSWER_S), nbytes)
    except (HeteroError, KeyError, TypeError, ValueError) as error:
        text = error.message if isinstance(error, HeteroError) else repr(error)
        return Message(Control(PEER, answers=question.request, error=text))
    return Message(Control(PEER, asdict(speed), answers=question.request))


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
    answer = ask(control.request(next(_numbers), name, data, tensors))
    ended = time.perf_counter()
    try:
        control.result(answer)
    finally:
        answer.release()
    return ended - began


_numbers = itertools.count(1 << 32)  # beyond the numbers that a pipeline gives its own questions
