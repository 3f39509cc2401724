"""The questions of a link's measurement, and the speeds computed from the times; no socket."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from hetero_framework import control
from hetero_framework.cluster import link_probe
from hetero_framework.core.messages import Control, Message, decode, encode
from hetero_framework.errors import NetworkError, ProtocolError
from tests.cases import raising

MB = 10**6


class Wire:
    """A link with its own clock: every message takes its delay and its bytes."""

    def __init__(self, delay_s: float, up: float, down: float, shared: bool = False) -> None:
        """`shared`: one direction waits for the other."""
        self.now = 0.0
        self.questions: list[tuple[str, int]] = []
        self.jitter: Iterator[float] = iter(())
        self._delay_s, self._up, self._down = delay_s, up, down
        self._shared = shared

    def ask(self, question: Message, then: Message | None = None) -> Message:
        sent = over_the_wire(question)
        answer = control.answer(sent)
        assert answer is not None
        up, down = size(question), size(answer)
        self.questions.append((question.body.name, up + down))
        take = up / self._up + down / self._down
        if then is not None:
            assert control.answer(over_the_wire(then)) is None
            beside = size(then) / self._up
            take = take + beside if self._shared else max(take, beside)
        self.now += 2 * self._delay_s + take + next(self.jitter, 0.0)
        return over_the_wire(answer)


def over_the_wire(message: Message) -> Message:
    return decode(b"".join(bytes(buffer) for buffer in encode(message)))


def size(message: Message) -> int:
    return sum(tensor.data.nbytes for tensor in message.tensors)


@pytest.fixture
def wire(monkeypatch):
    made = Wire(delay_s=0.01, up=10 * MB, down=100 * MB)
    monkeypatch.setattr(link_probe.time, "perf_counter", lambda: made.now)
    return made


def test_round_trip_and_both_directions_are_told_apart(wire):
    found = link_probe.measure(wire.ask, MB)
    assert found.round_trip_s == pytest.approx(0.02)
    assert found.up_bytes_per_s == pytest.approx(10 * MB)
    assert found.down_bytes_per_s == pytest.approx(100 * MB)


@pytest.mark.parametrize(("shared", "times"), [(False, 1.0), (True, 2.0)])
def test_a_shared_medium_is_distinguished_from_a_cable(shared, times, monkeypatch):
    wire = Wire(delay_s=0.01, up=10 * MB, down=10 * MB, shared=shared)
    monkeypatch.setattr(link_probe.time, "perf_counter", lambda: wire.now)
    found = link_probe.measure(wire.ask, MB)
    assert found.both_ways == pytest.approx(times)
    assert found.up_bytes_per_s == pytest.approx(10 * MB)


def test_the_first_message_of_a_kind_is_not_measured(wire):
    wire.jitter = iter([1.5])
    assert link_probe.measure(wire.ask, MB).round_trip_s == pytest.approx(0.02)


def test_slow_trips_do_not_make_the_link_look_fast(wire):
    wire.jitter = iter([0.0, 0.0, *[0.09] * 19])  # one quick trip among slow ones
    found = link_probe.measure(wire.ask, MB)
    assert found.round_trip_s == pytest.approx(0.11)
    assert found.up_bytes_per_s == pytest.approx(10 * MB)


def test_slow_link_is_measured_with_few_messages(monkeypatch):
    wire = Wire(delay_s=0.1, up=MB / 4, down=MB / 4)
    monkeypatch.setattr(link_probe.time, "perf_counter", lambda: wire.now)
    found = link_probe.measure(wire.ask, MB)
    assert found.up_bytes_per_s == pytest.approx(MB / 4)
    large = [name for name, nbytes in wire.questions if nbytes]
    assert large == [link_probe.SINK, link_probe.SOURCE, link_probe.SOURCE]
    assert wire.now < 20


def test_bytes_cannot_be_compressed_and_have_the_size_asked_for():
    answer = control.answer(control.request(1, link_probe.SOURCE, {"bytes": 300_001}))
    assert answer is not None
    assert size(answer) == 300_001
    assert len(set(bytes(answer.tensors[0].data[:4096]))) > 200


@pytest.mark.parametrize("count", [0, -1, link_probe.MOST_BYTES + 1])
def test_senseless_sizes_are_refused_where_they_are_asked_for(count):
    answer = control.answer(control.request(1, link_probe.SOURCE, {"bytes": count}))
    assert answer is not None
    assert f"{count} bytes cannot be asked for" in answer.body.error


def test_worker_measures_its_link_to_another_and_tells(wire):
    asked: list[int | str] = []

    def ask_peer(worker: Any, question: Message, timeout_s: float, then: Any) -> Message:
        assert timeout_s > 0
        asked.append(worker)
        return wire.ask(question, then)

    question = over_the_wire(link_probe.peer_question(5, "box", MB))
    answer = over_the_wire(link_probe.answer_for_peer(question.expect(Control), ask_peer))
    assert answer.body.answers == 5
    found = link_probe.peer_speed(answer)
    assert found.up_bytes_per_s == pytest.approx(10 * MB)
    assert set(asked) == {"box"}


def test_worker_without_a_link_tells_why():
    lost = NetworkError("there is no link to worker 2")
    question = link_probe.peer_question(5, 2, MB).expect(Control)
    answer = over_the_wire(link_probe.answer_for_peer(question, raising(lost)))
    with pytest.raises(NetworkError, match="there is no link to worker 2") as caught:
        link_probe.peer_speed(answer)
    assert caught.value.hint is None


@pytest.mark.parametrize("data", [None, {}, {"peer": 2, "bytes": 0}, {"peer": 2, "bytes": "x"}])
def test_question_that_makes_no_sense_is_answered(data):
    question = Control(link_probe.PEER, data, request=9)
    answer = link_probe.answer_for_peer(question, lambda *given: pytest.fail("asked"))
    assert answer.body.answers == 9
    assert answer.body.error


@pytest.mark.parametrize(
    "change",
    [
        {"round_trip_s": math.nan}, {"up_bytes_per_s": 0.0}, {"down_bytes_per_s": math.inf},
        {"both_ways": 0.5}, {"more": 1}, {"round_trip_s": "1"}, {"round_trip_s": None},
    ],
)  # fmt: skip
def test_a_speed_that_cannot_be_is_refused(change):
    speed = {"round_trip_s": 0.1, "up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6, "both_ways": 1.0}
    assert link_probe.peer_speed(Message(Control(link_probe.PEER, speed))).round_trip_s == 0.1
    for data in ({**speed, **change}, [speed], None):
        with pytest.raises(ProtocolError, match=r"^LinkSpeed: "):
            link_probe.peer_speed(Message(Control(link_probe.PEER, data)))
