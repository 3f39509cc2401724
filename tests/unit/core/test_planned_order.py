from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.core.planned_order import (
    BACKWARD,
    FORWARD,
    Lane,
    OrderTimeout,
    PlannedOrder,
    packed,
    unpacked,
)

A, B, C = (FORWARD, 1), (BACKWARD, 1), (FORWARD, 2)


@given(st.sampled_from([FORWARD, BACKWARD]), st.integers(0, 10_000))
def test_a_lane_travels_as_a_number(kind, stage):
    assert unpacked(packed((kind, stage))) == (kind, stage)


def test_the_order_gives_the_place_of_a_lanes_next_one():
    order = PlannedOrder([A, B, A, A])
    assert (order.place(A), order.place(B), order.place(C)) == (0, 1, math.inf)
    order.went(A, 0)
    assert (order.place(A), order.next_place) == (2, 1)
    order.went(A, 1)  # before its turn
    assert (order.place(A), order.next_place) == (3, 1)
    order.went(B, 0)
    order.went(A, 2)
    order.went(C, 0)  # is not on it
    assert order.place(A) == order.next_place == math.inf


def test_order_counts_by_micro_batch():
    """Frames that are reported twice, or out of order, leave the order right."""
    order = PlannedOrder([A, A, B, A])
    order.went(A, 1)
    order.went(A, 0)
    order.went(A, 1)
    assert order.place(A) == 3


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def left(timeout: OrderTimeout, order: PlannedOrder, *lanes: Lane) -> list[float]:
    return [timeout.left_s(order, lane) for lane in lanes]


def test_the_next_lane_goes_at_once_and_others_wait_for_it_once():
    clock = Clock()
    timeout, order = OrderTimeout(2.0, clock), PlannedOrder([A, B, A, C])
    assert left(timeout, order, A, B) == [0, 2]
    clock.now += 1.5
    assert left(timeout, order, B, C) == [0.5, 0.5]
    clock.now += 1.0
    assert left(timeout, order, B, C) == [0, 0]
    order.went(B, 0)
    assert left(timeout, order, C) == [0]  # A has been waited for
    order.went(A, 0)
    assert left(timeout, order, A, C) == [0, 2]  # the next A has not


def test_the_wait_begins_when_the_device_is_idle():
    clock = Clock()
    timeout, order = OrderTimeout(4.0, clock), PlannedOrder([A, B])
    assert timeout.left_s(order, B, idle=False) == 0.5
    clock.now += 10
    assert timeout.left_s(order, B, idle=False) == 0.5
    assert timeout.left_s(order, B) == 4


@pytest.mark.parametrize("order", [PlannedOrder(), PlannedOrder([B])])
def test_without_timeout_or_order_there_is_no_wait(order):
    assert OrderTimeout(0.0).left_s(order, A) == 0
    assert OrderTimeout(9.0).left_s(PlannedOrder(), A) == 0
