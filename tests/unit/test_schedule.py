from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.trainer.schedule import (
    BACKWARD,
    FORWARD,
    Task,
    choose,
    one_f_one_b_bound,
    simulate,
    window_size,
)

KINDS = st.sampled_from([FORWARD, BACKWARD])
TASKS = st.builds(Task, KINDS, st.integers(0, 5), st.integers(0, 20))
TIMES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)
PLAYS = settings(max_examples=150, deadline=None)


# ---- the policy


@given(st.sets(TASKS, min_size=1))
def test_choose_backward_first_then_the_oldest_then_the_deepest(ready: set[Task]) -> None:
    chosen = choose(ready)
    assert chosen in ready
    if any(task.kind == BACKWARD for task in ready):
        assert chosen.kind == BACKWARD
    same = [task for task in ready if task.kind == chosen.kind]
    assert chosen.micro_batch == min(task.micro_batch for task in same)
    assert chosen.stage == max(t.stage for t in same if t.micro_batch == chosen.micro_batch)


def test_choose_among_nothing_is_an_error() -> None:
    with pytest.raises(ValueError):
        choose([])


def test_window_size_is_twice_the_stages_unless_configured() -> None:
    assert window_size(4, None) == 8
    assert window_size(4, 3) == 3


# ---- the bound


def test_bound_of_equal_stages_is_the_textbook_formula() -> None:
    m, p, f, b = 16, 4, 20, 40
    assert one_f_one_b_bound([f] * p, [b] * p, m) == (m + p - 1) * (f + b)


def test_bound_of_one_stage_is_its_work() -> None:
    assert one_f_one_b_bound([3], [5], 7) == 7 * 8


def test_bound_of_unequal_stages_waits_for_the_slowest() -> None:
    assert one_f_one_b_bound([1, 4, 2], [2, 6, 3], 5) == 3 + 5 * 10


def test_bound_of_one_micro_batch_is_its_way_through_all_stages() -> None:
    assert one_f_one_b_bound([1, 4, 2], [2, 6, 3], 1) == 3 + 10 + 5


def test_bound_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(ValueError):
        one_f_one_b_bound([1, 1], [1], 2)


# ---- the simulator against closed forms


@pytest.mark.parametrize("p", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("m", [1, 3, 16, 64])
@pytest.mark.parametrize(("f", "b"), [(20, 40), (10, 10), (10, 30)])
def test_simulate_equal_stages_reach_the_bound_with_the_default_window(
    p: int, m: int, f: int, b: int
) -> None:
    played = simulate([f] * p, [b] * p, m, window_size(p, None))
    assert played.seconds == (m + p - 1) * (f + b)
    assert played.busy == pytest.approx([m * (f + b) / played.seconds] * p)


def test_simulate_window_of_p_suffices_for_few_stages() -> None:
    assert simulate([20] * 4, [40] * 4, 16, 4).seconds == (16 + 3) * 60
    assert simulate([20] * 8, [40] * 8, 16, 8).seconds > (16 + 7) * 60


def test_simulate_window_one_is_serial() -> None:
    f, b, m, t = [1, 4, 2], [2, 6, 3], 5, 0.5
    played = simulate(f, b, m, 1, transfer_s=t)
    hops = 2 * (len(f) - 1)
    assert played.seconds == m * (sum(f) + sum(b) + hops * t)
    assert played.peak_in_flight == (1, 1, 1)


def test_simulate_small_window_starves_the_stages() -> None:
    """Two micro-batches in four stages: no more than two stages are busy at a time."""
    played = simulate([20] * 4, [40] * 4, 16, 2)
    assert sum(played.busy) <= 2
    assert played.peak_in_flight == (2, 2, 2, 1)


def test_simulate_transfers_hide_behind_a_wide_window_only() -> None:
    m, p, f, b, t = 64, 4, 20, 40, 5
    bound = (m + p - 1) * (f + b)
    wide = simulate([f] * p, [b] * p, m, 2 * p, transfer_s=t).seconds
    narrow = simulate([f] * p, [b] * p, m, p, transfer_s=t).seconds
    assert bound < wide <= bound + 2 * (p - 1) * t + (f + b)
    assert narrow > 1.05 * bound


def test_simulate_slowest_stage_sets_the_pace() -> None:
    f, b, m = [1, 4, 2], [2, 6, 3], 50
    played = simulate(f, b, m, 6)
    assert played.seconds <= one_f_one_b_bound(f, b, m) + f[2] + b[2]
    assert played.busy[1] > 0.98


def test_simulate_devices_with_two_stages_each_do_the_work_of_both() -> None:
    m, f, b = 8, 10, 20
    played = simulate([f] * 4, [b] * 4, m, 8, devices=[0, 1, 0, 1])
    work = 2 * m * (f + b)
    assert len(played.busy) == 2
    assert played.seconds >= work + f + b  # the other device has nothing before the first forward
    assert [share * played.seconds for share in played.busy] == pytest.approx([work, work])


def test_simulate_all_stages_on_one_device_is_the_sum_of_the_work() -> None:
    played = simulate([1, 2, 3], [4, 5, 6], 7, 4, devices=[0, 0, 0])
    assert played.seconds == 7 * 21
    assert played.busy == (1.0,)


@pytest.mark.parametrize("window", [0, -1])
def test_simulate_refuses_a_window_that_lets_nothing_in(window: int) -> None:
    with pytest.raises(ValueError, match="never starts"):
        simulate([1], [1], 1, window)


# ---- properties


@PLAYS
@given(
    times=TIMES,
    m=st.integers(0, 12),
    window=st.integers(1, 14),
    transfer=st.integers(0, 30),
    data=st.data(),
)
def test_simulate_ends_with_every_task_done_once(
    times: list[tuple[int, int]], m: int, window: int, transfer: int, data: st.DataObject
) -> None:
    """Whatever the times, the window and the devices: it ends, and each device has done exactly
    the work of its stages; no stage holds more micro-batches than the window lets in."""
    p = len(times)
    devices = data.draw(st.lists(st.integers(0, 2), min_size=p, max_size=p))
    forward, backward = zip(*times, strict=True)
    played = simulate(forward, backward, m, window, devices=devices, transfer_s=transfer)
    work = dict.fromkeys(devices, 0)
    for device, cost in zip(devices, times, strict=True):
        work[device] += m * sum(cost)
    assert [share * played.seconds for share in played.busy] == pytest.approx(list(work.values()))
    assert all(peak <= min(window, m) for peak in played.peak_in_flight)
    assert played.seconds >= max(work.values(), default=0)


@PLAYS
@given(times=TIMES, m=st.integers(1, 12), window=st.integers(1, 14))
def test_simulate_never_beats_the_bound_nor_loses_to_serial(
    times: list[tuple[int, int]], m: int, window: int
) -> None:
    forward, backward = zip(*times, strict=True)
    seconds = simulate(forward, backward, m, window).seconds
    assert seconds >= one_f_one_b_bound(forward, backward, m)
    assert seconds <= m * (sum(forward) + sum(backward))
