from __future__ import annotations

import math

import pytest

from hetero_framework.core.link_bandwidth import SendPacing

PIECE = 100_000
FRAME = 10 * PIECE


class Writer:
    """Writes frames as `SendPacing` lets it, by a clock of its own."""

    def __init__(self, *rates: float) -> None:
        """These were reported of frames that went alone."""
        self.now = 100.0
        self.pace = SendPacing(lambda: self.now)
        for rate in rates:
            self.pace.heard(rate, alone=True)

    def frame(self, pieces: int = 10) -> float:
        """Write one, a piece at once; seconds until the last of it was written."""
        began = self.now
        for k in range(pieces):
            self.now += self.pace.pause_s()
            self.pace.wrote(PIECE, pieces * PIECE, is_last=k == pieces - 1)
        return self.now - began


def test_frames_are_not_paced_before_a_rate_is_known():
    assert Writer().frame() == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_rate_is_ignored(rate):
    assert Writer(rate).frame() == 0.0


def test_pieces_are_written_a_little_faster_than_they_arrive():
    assert Writer(1e6).frame() == pytest.approx(0.9 / 1.05, abs=0.003)


def test_the_next_frame_begins_when_the_last_one_is_nearly_there():
    writer = Writer(1e6)
    began = writer.now
    for _ in range(5):
        writer.frame()
    writer.now += writer.pace.pause_s()
    assert writer.now - began == pytest.approx(5.0, abs=0.01)


def test_short_frames_are_not_paced():
    assert Writer(FRAME / 0.009).frame() == 0.0


@pytest.mark.parametrize(("rate", "paced"), [(1.9e8, True), (2.1e8, False)])
def test_a_fast_network_is_left_to_itself(rate, paced):
    assert (Writer(rate).frame(pieces=100) > 0) is paced


def test_the_fastest_of_the_last_frames_counts():
    writer = Writer(2e6, 1e6)
    assert writer.frame() == pytest.approx(0.45 / 1.05, abs=0.003)
    for _ in range(8):
        writer.pace.heard(1e6, alone=True)
    writer.now += 10
    assert writer.frame() == pytest.approx(0.9 / 1.05, abs=0.003)


def test_a_late_writer_catches_up_little():
    writer = Writer(1e6)
    writer.pace.wrote(PIECE, FRAME, is_last=False)
    writer.now += 5.0
    assert writer.pace.pause_s() == 0.0
    writer.pace.wrote(PIECE, FRAME, is_last=False)
    assert writer.pace.pause_s() == pytest.approx(0.1 / 1.05, abs=0.003)


def test_no_pause_is_longer_than_a_second():
    writer = Writer(1e-6)
    writer.pace.wrote(PIECE, FRAME, is_last=False)
    assert writer.pace.pause_s() <= 1.0


def test_a_shared_rate_sets_no_pace_but_an_expected_duration():
    pace = SendPacing()
    assert pace.lasts_s(1_000_000) == 0.0
    pace.heard(5e6, alone=False)
    pace.heard(4e6, alone=False)
    assert pace.lasts_s(1_000_000) == 0.2
    pace.wrote(1_000_000, 1_000_000, is_last=True)
    assert pace.pause_s() == 0.0
