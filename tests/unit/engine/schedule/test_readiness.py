from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.engine.schedule.readiness import (
    BACKWARD,
    BACKWARD_FIRST,
    FORWARD,
    Admission,
    DueDates,
    Policy,
    Readiness,
    Task,
)

KINDS = st.sampled_from([FORWARD, BACKWARD])
TASKS = st.builds(Task, KINDS, st.integers(0, 5), st.integers(0, 20))


# ---- the policy


def choose(ready: Iterable[Task], policy: Policy = BACKWARD_FIRST) -> Task:
    return min(ready, key=policy.key)


@given(st.sets(TASKS, min_size=1))
def test_choose_backward_first_then_the_oldest_then_the_deepest(ready):
    chosen = choose(ready)
    assert chosen in ready
    if any(task.kind == BACKWARD for task in ready):
        assert chosen.kind == BACKWARD
    same = [task for task in ready if task.kind == chosen.kind]
    assert chosen.micro_batch == min(task.micro_batch for task in same)
    assert chosen.stage == max(t.stage for t in same if t.micro_batch == chosen.micro_batch)


def test_the_task_due_first_is_chosen():
    policy = Policy((DueDates(0.0, 1.0, 0.5, 1.0), DueDates(-4.0, 1.0, 9.0, 0.0)))
    backward, deep, old = Task(BACKWARD, 0, 0), Task(FORWARD, 1, 3), Task(FORWARD, 0, 2)
    assert choose([backward, deep, old], policy) == deep  # 3 - 4 < 0.5 < 2
    assert choose([backward, old], policy) == backward
    assert choose([Task(BACKWARD, 0, 2), old], policy) == old  # 2.5 > 2
    assert choose([Task(BACKWARD, 1, 5), Task(FORWARD, 0, 9)], policy) == Task(BACKWARD, 1, 5)


# ---- what may run


def ready(limit: int = 1, *tasks: Task) -> Readiness:
    """The readiness of a device with stages 0 and 2, where these tasks' tensors have come."""
    readiness = Readiness({0: limit, 2: limit}, BACKWARD_FIRST)
    for task in tasks:
        readiness.arrived(task)
    return readiness


def test_next_forward_waits_while_the_stage_stores_as_many_as_it_may():
    readiness = ready(1, *(Task(FORWARD, stage, k) for stage in (0, 2) for k in range(2)))
    readiness.start(Task(FORWARD, 0, 0), stores=True)
    assert readiness.next() == Task(FORWARD, 2, 0)  # the other stage has its own limit
    readiness.start(Task(FORWARD, 2, 0), stores=True)
    assert readiness.next() is None
    readiness.arrived(Task(BACKWARD, 2, 0))
    assert readiness.next() == Task(BACKWARD, 2, 0)
    readiness.start(Task(BACKWARD, 2, 0), stores=False)
    assert readiness.next() is None  # its forward is stored until it ends
    readiness.release(2)
    assert readiness.next() == Task(FORWARD, 2, 1)
    assert [readiness.peak_in_flight(stage) for stage in (0, 2)] == [1, 1]


def test_admission_keeps_at_most_max_in_flight_micro_batches():
    admission = Admission(micro_batches=4, max_in_flight=2)
    entered = []
    for finished in (0, 0, 0, 1, 1, 2, 3, 4):
        if (micro_batch := admission.next(finished)) is not None:
            admission.admit()
            entered.append((micro_batch, finished))
    assert entered == [(0, 0), (1, 0), (2, 1), (3, 2)]
