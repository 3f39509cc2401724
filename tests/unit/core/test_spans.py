"""Spans are kept for the chosen steps only, and carry what the timeline needs."""

from __future__ import annotations

from functools import partial

import pytest

from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import Bye, Forward, Message
from hetero_framework.core.spans import FORWARD, RECEIVE, Recorder
from hetero_framework.core.threads import in_background
from tests.waiting import WAIT_S


def recorded(steps: int, first: int = 0, count: int = 6, every: int = 0) -> list[int]:
    recorder = Recorder(steps, every)
    for step in range(first, first + count):
        recorder.begin(step)
        recorder.span(FORWARD, 0, 0, 1.0, 2.0)
    return [span["step"] for span in recorder.take()]


@pytest.mark.parametrize(
    ("steps", "first", "expected"),
    [(0, 0, []), (3, 0, [1, 2, 3]), (2, 10, [11, 12]), (-1, 0, [0, 1, 2, 3, 4, 5])],
)
def test_the_chosen_number_of_steps_after_the_first_is_recorded(steps, first, expected):
    assert recorded(steps, first) == expected


@pytest.mark.parametrize(
    ("steps", "first", "expected"),
    [(0, 0, [4, 8]), (2, 0, [1, 2, 4, 8]), (2, 4, [5, 6, 8, 12]), (-1, 2, [*range(2, 12)])],
)
def test_of_later_steps_some_are_recorded(steps, first, expected):
    assert recorded(steps, first, count=10, every=4) == expected


def test_evaluation_is_not_recorded_and_is_not_the_first_step():
    recorder = Recorder(1)
    recorder.begin(0, attempt=1, train=False)
    recorder.begin(0, attempt=2)
    recorder.begin(1, attempt=3)
    recorder.span(FORWARD, 0, 0, 1.0, 2.0)
    recorder.begin(2, attempt=4, train=False)
    recorder.span(FORWARD, 0, 0, 3.0, 4.0)
    assert not recorder.enabled
    assert [span["step"] for span in recorder.take()] == [1]


def test_a_repeated_step_forgets_its_first_attempt_only():
    recorder = Recorder(-1)
    recorder.begin(4)
    recorder.span(FORWARD, 0, 0, 1.0, 2.0)
    recorder.begin(5, attempt=1)
    recorder.span(FORWARD, 0, 0, 3.0, 4.0)
    recorder.begin(5, attempt=2)
    recorder.span(FORWARD, 0, 0, 5.0, 6.0)
    assert [span["began"] for span in recorder.take()] == [1.0, 5.0]


def test_span_is_plain_data_and_is_taken_once():
    recorder = Recorder(-1)
    recorder.begin(7)
    recorder.span(FORWARD, 2, 3, 1.0, 2.5)
    assert recorder.take() == [
        {"kind": "forward", "stage": 2, "micro_batch": 3, "step": 7, "began": 1.0, "ended": 2.5}
    ]
    assert recorder.take() == []


def test_recorder_is_bounded():
    recorder = Recorder(-1, limit=2)
    recorder.begin(0)
    for number in range(5):
        recorder.span(FORWARD, 0, number, 0.0, 1.0)
    assert [span["micro_batch"] for span in recorder.take()] == [0, 1]


def frame(step: int, attempt: int, micro_batch: int = 2) -> Message:
    data = memoryview(bytes(24))
    return Message(Forward(step, attempt, 1, micro_batch), (WireTensor("float32", (2, 3), data),))


def test_frames_of_the_step_become_spans():
    recorder = Recorder(-1)
    moved = recorder.on_moved(1)
    recorder.begin(3, attempt=7)
    moved("receive", frame(3, 6), 1.0, 2.0)  # of an attempt that was given up
    moved("receive", Message(Bye("x")), 1.0, 2.0)
    moved("receive", frame(3, 7), 1.0, 2.0)
    (span,) = recorder.take()
    assert span["step"] == 3
    assert (span["kind"], span["stage"], span["micro_batch"]) == (RECEIVE, 1, 2)
    told = {name: span[name] for name in ("what", "peer", "bytes", "dtype", "codec")}
    assert told == {"what": "FORWARD", "peer": 1, "bytes": 24, "dtype": "float32", "codec": ""}


def test_frames_that_are_early_belong_to_their_own_step():
    """The reader has a frame of the next step while this process still commits the last one."""
    recorder = Recorder(-1)
    moved = recorder.on_moved(1)
    recorder.begin(3, attempt=7)
    moved("receive", frame(4, 8, micro_batch=0), 1.0, 2.0)
    assert recorder.take() == []
    recorder.begin(4, attempt=8)
    moved("receive", frame(4, 8, micro_batch=1), 2.0, 3.0)
    assert [span["micro_batch"] for span in recorder.take()] == [0, 1]


def test_frames_of_an_evaluation_are_forgotten():
    """It carries the number of the step after it, but an attempt of its own."""
    recorder = Recorder(-1)
    moved = recorder.on_moved(1)
    recorder.begin(2, attempt=7)
    moved("receive", frame(3, 8), 1.0, 2.0)
    recorder.take()
    recorder.begin(3, attempt=8, train=False)
    moved("receive", frame(3, 8), 2.0, 3.0)
    moved("receive", frame(3, 9, micro_batch=5), 3.0, 4.0)
    recorder.begin(3, attempt=9)
    assert [span["micro_batch"] for span in recorder.take()] == [5]


def test_frames_of_steps_that_are_not_recorded_are_not_kept():
    recorder = Recorder(1)
    moved = recorder.on_moved(1)
    moved("receive", frame(1, 1), 1.0, 2.0)  # nothing has begun
    found = []
    for step in range(4):
        recorder.begin(step, attempt=step)
        moved("receive", frame(step, step), 1.0, 2.0)
        found += [span["step"] for span in recorder.take()]
    assert found == [1]


def test_spans_of_several_threads_are_all_kept():
    recorder = Recorder(-1)
    recorder.begin(0)

    def work(stage: int) -> None:
        for number in range(500):
            recorder.span(FORWARD, stage, number, 0.0, 1.0)

    for working in [in_background(partial(work, stage), "work") for stage in range(4)]:
        working.result(WAIT_S)
    assert len(recorder.take()) == 2000
