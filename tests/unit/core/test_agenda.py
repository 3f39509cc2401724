from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.core.agenda import BACKWARD, FORWARD, Agenda, Lane, Patience, packed, unpacked

A, B, C = (FORWARD, 1), (BACKWARD, 1), (FORWARD, 2)


@given(st.sampled_from([FORWARD, BACKWARD]), st.integers(0, 10_000))
def test_a_lane_travels_as_a_number(kind: str, stage: int) -> None:
    assert unpacked(packed((kind, stage))) == (kind, stage)


def test_agenda_says_where_the_next_one_of_a_lane_stands() -> None:
    agenda = Agenda([A, B, A, A])
    assert (agenda.place(A), agenda.place(B), agenda.place(C)) == (0, 1, math.inf)
    agenda.went(A, 0)
    assert (agenda.place(A), agenda.next_place) == (2, 1)
    agenda.went(A, 1)  # before its turn
    assert (agenda.place(A), agenda.next_place) == (3, 1)
    agenda.went(B, 0)
    agenda.went(A, 2)
    agenda.went(C, 0)  # is not on it
    assert agenda.place(A) == agenda.next_place == math.inf


def test_agenda_counts_by_micro_batch() -> None:
    """What is told twice, or only of a later one, is right."""
    agenda = Agenda([A, A, B, A])
    agenda.went(A, 1)
    agenda.went(A, 0)
    agenda.went(A, 1)
    assert agenda.place(A) == 3


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def left(patience: Patience, agenda: Agenda, *lanes: Lane) -> list[float]:
    return [patience.left_s(agenda, lane) for lane in lanes]


def test_whose_turn_it_is_need_not_wait_and_others_wait_once_for_it() -> None:
    clock = Clock()
    patience, agenda = Patience(2.0, clock), Agenda([A, B, A, C])
    assert left(patience, agenda, A, B) == [0, 2]
    clock.now += 1.5
    assert left(patience, agenda, B, C) == [0.5, 0.5]
    clock.now += 1.0
    assert left(patience, agenda, B, C) == [0, 0]
    agenda.went(B, 0)
    assert left(patience, agenda, C) == [0]  # A has been waited for
    agenda.went(A, 0)
    assert left(patience, agenda, A, C) == [0, 2]  # the next A has not


def test_the_wait_begins_when_who_waits_is_idle() -> None:
    clock = Clock()
    patience, agenda = Patience(4.0, clock), Agenda([A, B])
    assert patience.left_s(agenda, B, idle=False) == 0.5
    clock.now += 10
    assert patience.left_s(agenda, B, idle=False) == 0.5
    assert patience.left_s(agenda, B) == 4


@pytest.mark.parametrize("agenda", [Agenda(), Agenda([B])])
def test_without_patience_or_order_nobody_waits(agenda: Agenda) -> None:
    assert Patience(0.0).left_s(agenda, A) == 0
    assert Patience(9.0).left_s(Agenda(), A) == 0
