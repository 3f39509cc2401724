from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_framework.core.devices import Device, DeviceEvent, open_device
from hetero_framework.core.messages import BoundaryTensor, Forward, StageFigures
from hetero_framework.core.spans import (
    AWAITED,
    BACKWARD,
    COMMIT,
    FORWARD,
    FORWARD_BACKWARD,
    WEIGHTS,
    Recorder,
)
from hetero_framework.engine.executor import Executor
from hetero_framework.engine.out_of_memory import StepOutOfMemory
from hetero_framework.engine.schedule.readiness import BACKWARD_FIRST, Admission, Task
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.schedule.tuning import (
    TunedSchedule,
    by_depth,
    due_dates,
    forwards_ahead,
)
from hetero_framework.engine.stage_api import (
    Arrival,
    GradientReport,
    Outcome,
    Residence,
    StatePart,
    StepInfo,
    Tensors,
)
from hetero_framework.engine.state_snapshot import StateSnapshot
from hetero_framework.errors import HeteroError, ModelError, ProtocolError
from hetero_framework.models.cut.side import Bundle
from hetero_framework.models.sizing.footprint import Form
from tests.unit.device_helpers import QueuedDevice
from tests.waiting import WAIT_S

POLICIES = (BACKWARD_FIRST, forwards_ahead(6), by_depth(6))  # of up to six stages
TRAIN = StepInfo(step=3, attempt=0, train=True, micro_batches=4, num_items=8)
EVALUATE = StepInfo(step=3, attempt=0, train=False, micro_batches=4, num_items=8)
SCHEDULE = StepSchedule((8,) * 4)
INPUTS: Tensors = {"attention_mask": torch.ones(1, 2)}


class FakeStage:
    """Writes down what is asked of it; its output is its input plus one."""

    def __init__(self, index: int, *, first: bool = False, last: bool = False) -> None:
        self.index, self.is_first, self.is_last = index, first, last
        self.input_requires_grad = not first
        self.residence = Residence()
        self.differentiates = True
        self.fingerprint: dict[str, str] = {}
        self.ties: dict[str, str] = {}
        self.awaits_sums = False
        self.calls: list[tuple[Any, ...]] = []
        self.fails: Exception | None = None
        self.in_place = False

    def arrival_problem(self, forms: Sequence[Form], rows: int, tokens: int) -> str | None:
        return None

    def begin(self, info: StepInfo, take: Any = None) -> None:
        self.calls.append(("begin", info.step))

    def abort(self) -> None:
        self.calls.append(("abort",))

    def forward(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Bundle:
        self.calls.append(("forward", micro_batch))
        if self.fails is not None:
            raise self.fails
        return self._result(received)

    def forward_backward(
        self, micro_batch: int, inputs: Tensors, received: Bundle
    ) -> tuple[Outcome, Bundle]:
        self.calls.append(("forward_backward", micro_batch))
        return Outcome(float(micro_batch)), () if self.is_first else self._result(received)

    def evaluate(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Outcome:
        self.calls.append(("evaluate", micro_batch))
        self._result(received)
        return Outcome(float(micro_batch))

    def backward(self, micro_batch: int, gradients: Bundle) -> Bundle:
        self.calls.append(("backward", micro_batch))
        return self._result(gradients) if self.input_requires_grad else ()

    def _result(self, tensors: Bundle) -> Bundle:
        if not tensors:
            return (torch.zeros(1, 2, 3),)
        assert not any(tensor.isnan().any() for tensor in tensors), "its buffer was given back"
        return tuple(tensor.add_(1) if self.in_place else tensor + 1 for tensor in tensors)

    def gradients(self) -> Iterator[StatePart]:
        yield StatePart({f"w{self.index}": torch.ones(1)}, last=True)

    def report_gradients(self) -> GradientReport:
        self.calls.append(("report_gradients",))
        return GradientReport(torch.zeros(0))

    def commit(self, learning_rate: float, grad_scale: float) -> None:
        self.calls.append(("commit", learning_rate, grad_scale))

    def trainable(self) -> list[tuple[str, tuple[int, ...]]]:
        return []

    def snapshot(self, *, lasting: bool = False) -> StateSnapshot:
        return StateSnapshot([], open_device("cpu"))

    def export(self) -> Iterator[StatePart]:
        yield StatePart({}, last=True)

    def weights(self, names: Sequence[str], number: int) -> StatePart:
        return StatePart({name: torch.zeros(1) for name in names}, last=True)

    def load_state(self, kind: str, part: StatePart) -> None:
        self.calls.append(("load_state", kind))

    def tied_weights(self) -> Tensors:
        return {}

    def set_tied_weights(self, weights: Tensors) -> None:
        self.calls.append(("set_tied_weights", sorted(weights)))


class Sent:
    """Keeps everything that leaves."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []

    def send(self, body: BoundaryTensor, tensors: Bundle) -> None:
        kind = "hidden" if isinstance(body, Forward) else "gradient"
        self.messages.append((kind, body.stage, body.micro_batch, tensors[0]))

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        self.messages.append(("loss", micro_batch, outcome.loss))

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        self.messages.append(("finished", micro_batch))

    @property
    def heads(self) -> list[tuple[Any, ...]]:
        return [message[:3] for message in self.messages]


class Buffers:
    """Receive buffers that count how often each is given back, and are overwritten then."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def arrival(self, value: float = 0.0) -> Arrival:
        number = len(self.released)
        self.released.append(0)
        tensor = torch.full((1, 2, 3), value)

        def release() -> None:
            self.released[number] += 1
            tensor.fill_(math.nan)

        return Arrival((tensor,), release)


def make_executor(
    stages: list[FakeStage], *, device: Device | None = None, recorder: Recorder | None = None
) -> tuple[Executor, Sent]:
    sent = Sent()
    executor = Executor(stages, device or open_device("cpu"), recorder or Recorder(0), sent)
    return executor, sent


def executor_of(
    *stages: FakeStage, info: StepInfo = TRAIN, schedule: StepSchedule = SCHEDULE, **options: Any
) -> tuple[Executor, Sent, Buffers]:
    """An executor of these stages, which has begun a step."""
    executor, sent = make_executor(list(stages), **options)
    executor.begin(info, schedule)
    for stage in stages:
        stage.calls.clear()
    return executor, sent, Buffers()


def first_and_last() -> tuple[FakeStage, FakeStage]:
    return FakeStage(0, first=True), FakeStage(3, last=True)


def feed(executor: Executor, stage: int, buffers: Buffers, count: int) -> None:
    """Inputs and hidden states of micro-batches 0 to `count` - 1."""
    for k in range(count):
        executor.put_inputs(stage, k, INPUTS)
        if not executor.stage(stage).is_first:
            executor.put_hidden(stage, k, buffers.arrival())


def run_all(executor: Executor) -> int:
    count = 0
    while executor.run_next():
        count += 1
    return count


# ---- what is ready, in which order


def test_forward_needs_both_inputs_and_hidden_states():
    executor, sent, buffers = executor_of(FakeStage(1))
    assert not executor.run_next()
    executor.put_inputs(1, 0, INPUTS)
    assert not executor.run_next()
    assert sent.messages == []
    executor.put_hidden(1, 0, buffers.arrival())
    assert executor.run_next()


BEHIND_FROZEN = FakeStage(1)
BEHIND_FROZEN.input_requires_grad = False
LOSS = ("loss", 0, 0.0)


@pytest.mark.parametrize(
    ("stage", "info", "tasks", "heads"),
    [
        (FakeStage(0, first=True), TRAIN, "forward backward", [("hidden", 1, 0), ("finished", 0)]),
        (FakeStage(1), TRAIN, "forward backward", [("hidden", 2, 0), ("gradient", 0, 0)]),
        (BEHIND_FROZEN, TRAIN, "forward backward", [("hidden", 2, 0), ("finished", 0)]),
        (FakeStage(2, last=True), TRAIN, "forward_backward", [LOSS, ("gradient", 1, 0)]),
        (FakeStage(0, first=True, last=True), TRAIN, "forward_backward", [LOSS, ("finished", 0)]),
        (FakeStage(1), EVALUATE, "forward", [("hidden", 2, 0)]),
        (FakeStage(2, last=True), EVALUATE, "evaluate", [LOSS]),
    ],
    ids=["first", "middle", "behind frozen", "last", "only", "evaluated", "last evaluated"],
)
def test_a_micro_batch_leaves_a_stage_by_its_place(stage, info, tasks, heads):
    executor, sent, buffers = executor_of(stage, info=info)
    feed(executor, stage.index, buffers, 1)
    for task in tasks.split():
        if task == "backward":
            executor.put_gradient(stage.index, 0, buffers.arrival())
        assert run_all(executor) == 1
    assert stage.calls == [(task, 0) for task in tasks.split()]
    assert sent.heads == heads
    assert set(buffers.released) <= {1}


def test_micro_batches_run_in_ascending_order_for_any_arrival():
    stage = FakeStage(1)
    executor, sent, buffers = executor_of(stage)
    for k in (2, 1):
        executor.put_inputs(1, k, INPUTS)
        executor.put_hidden(1, k, buffers.arrival())
    assert not executor.run_next()
    executor.put_inputs(1, 0, INPUTS)
    executor.put_hidden(1, 0, buffers.arrival())
    run_all(executor)
    for k in (1, 2, 0):
        executor.put_gradient(1, k, buffers.arrival())
    run_all(executor)
    assert stage.calls == [("forward", k) for k in range(3)] + [("backward", k) for k in range(3)]
    left = [("hidden", 2), ("gradient", 0)]
    assert sent.heads == [(*head, k) for head in left for k in range(3)]


def test_backward_goes_before_forward():
    stage = FakeStage(1)
    executor, _, buffers = executor_of(stage)
    feed(executor, 1, buffers, 2)
    executor.run_next()
    executor.put_gradient(1, 0, buffers.arrival())
    run_all(executor)
    assert stage.calls == [("forward", 0), ("backward", 0), ("forward", 1)]


@pytest.mark.parametrize("seed", range(8))
def test_two_executors_under_random_timing_do_everything_once_and_in_order(seed):
    """Stages 0 and 2 in one process, 1 and 3 in another, frames delivered in any order."""
    draw = random.Random(seed)
    stages = [FakeStage(k, first=k == 0, last=k == 3) for k in range(4)]
    executors, outboxes = zip(*(make_executor(stages[i::2]) for i in (0, 1)), strict=True)
    buffers = Buffers()
    tasks = [(kind, stage) for kind in (FORWARD, BACKWARD) for stage in range(4)] * 6
    draw.shuffle(tasks)
    schedule = StepSchedule((draw.randint(1, 6),) * 4, tasks=tuple(tasks))
    for i, executor in enumerate(executors):
        own = schedule.for_process(range(i, 4, 2))
        executor.begin(replace(TRAIN, micro_batches=6), own)
    for stage in stages:
        stage.calls.clear()
    pending: list[tuple[Any, ...]] = [("inputs", s, k) for s in range(4) for k in range(6)]
    finished: list[int] = []
    while len(finished) < 6:
        if pending and draw.random() < 0.5:
            kind, stage, k, *tensor = pending.pop(draw.randrange(len(pending)))
            executor = executors[stage % 2]
            if kind == "inputs":
                executor.put_inputs(stage, k, INPUTS)
            else:
                put = executor.put_hidden if kind == "hidden" else executor.put_gradient
                put(stage, k, buffers.arrival(float(tensor[0].flatten()[0])))
        else:
            executors[draw.randrange(2)].run_next()
        for outbox in outboxes:
            pending += [m for m in outbox.messages if m[0] in ("hidden", "gradient")]
            finished += [m[1] for m in outbox.messages if m[0] == "finished"]
            outbox.messages.clear()
    for stage in stages:
        for verb in ("forward_backward",) if stage.is_last else ("forward", "backward"):
            assert [k for name, k in stage.calls if name == verb] == list(range(6))
    assert finished == list(range(6))
    assert set(buffers.released) == {1}
    assert all(executor.is_done for executor in executors)


def planned(order_timeout_s: float, *lanes: tuple[str, int]) -> StepSchedule:
    return StepSchedule((8,) * 4, tasks=lanes, order_timeout_s=order_timeout_s)


def test_the_planned_order_decides_among_ready_tasks():
    """Of two stages the deeper one first, and then forward before backward."""
    stages = [FakeStage(0, first=True), FakeStage(2)]
    executor, _ = make_executor(stages)
    buffers = Buffers()
    order: list[tuple[Any, ...]] = []
    for stage in stages:
        stage.calls = order
    for schedule, verbs in (
        (planned(0.0, (FORWARD, 2), (FORWARD, 0), (BACKWARD, 2)), ["forward", "backward"]),
        (StepSchedule((8,) * 4), ["backward", "forward"]),
    ):
        executor.begin(TRAIN, schedule)
        for index in (0, 2):
            feed(executor, index, buffers, 1)
        executor.run_next()
        executor.put_gradient(2, 0, buffers.arrival())
        order.clear()
        run_all(executor)
        assert [verb for verb, _ in order] == verbs


class Told(Residence):
    """A residence that writes down the tasks that it is told of, and those that are to follow."""

    streams = True

    def __init__(self) -> None:
        self.tasks: list[tuple[str, int, str]] = []
        self.ended = 0

    def begin(self, kind: str, micro_batch: int, following: str) -> None:
        assert self.ended == len(self.tasks)
        self.tasks.append((kind, micro_batch, following))

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_residence_hears_of_the_task_that_follows(is_ordered):
    """By the order of the step, or, where there is none, by that of 1F1B with two in flight."""
    stage = FakeStage(1)
    stage.residence = told = Told()
    kinds = [FORWARD, FORWARD, BACKWARD, FORWARD, BACKWARD, FORWARD, BACKWARD, BACKWARD]
    tasks = tuple((kind, 1) for kind in kinds) if is_ordered else ()
    executor, _, buffers = executor_of(stage, schedule=StepSchedule((2,) * 4, tasks=tasks))
    feed(executor, 1, buffers, 4)
    backwards = 0
    for kind in kinds:
        if kind == BACKWARD:
            executor.put_gradient(1, backwards, buffers.arrival())
            backwards += 1
        assert executor.run_next()
    assert [kind for kind, _, _ in told.tasks] == kinds
    assert [following for _, _, following in told.tasks] == [*kinds[1:], FORWARD]
    executor.begin(EVALUATE, SCHEDULE)
    feed(executor, 1, buffers, 4)
    run_all(executor)
    assert [following for _, _, following in told.tasks[8:]] == [FORWARD] * 4
    assert told.ended == len(told.tasks)


def test_a_task_out_of_turn_waits_as_long_as_the_schedule_says():
    stages = [FakeStage(0, first=True), FakeStage(2)]
    schedule = planned(1e9, (FORWARD, 2), (FORWARD, 0))
    executor, _, buffers = executor_of(*stages, schedule=schedule)
    feed(executor, 0, buffers, 2)
    assert not executor.run_next()
    assert 1e8 < executor.waits_s <= 1e9
    feed(executor, 2, buffers, 1)
    assert [executor.run_next() for _ in range(3)] == [True, True, True]
    assert executor.waits_s == 0
    assert [stage.calls[-1] for stage in stages] == [("forward", 1), ("forward", 0)]

    executor.begin(TRAIN, planned(0.01, (FORWARD, 2), *[(FORWARD, 0)] * 2))
    feed(executor, 0, buffers, 2)
    deadline = time.monotonic() + WAIT_S
    while not executor.run_next():
        assert time.monotonic() < deadline
        Event().wait(executor.waits_s)
    assert executor.run_next()  # what has been waited for once is not again


def test_a_busy_device_is_not_idle_while_others_wait_for_a_turn():
    device, stages = QueuedDevice(), (FakeStage(0, first=True), FakeStage(2))
    schedule = planned(8.0, (FORWARD, 2), (FORWARD, 2), (FORWARD, 0))
    executor, _, buffers = executor_of(*stages, schedule=schedule, device=device)
    feed(executor, 2, buffers, 1)
    feed(executor, 0, buffers, 1)
    assert executor.run_next()
    assert not executor.run_next()
    assert executor.waits_s == 1.0  # asked again soon, from when it is idle
    device.reach()
    assert not executor.run_next()
    assert executor.waits_s > 7.0


def test_planned_tasks_that_a_stage_lacks_are_not_waited_for():
    """The last stage does both as one; a stage in front of what is trained has no backwards."""
    frozen, last = FakeStage(0, first=True), FakeStage(2, last=True)
    frozen.differentiates = False
    lanes = [(BACKWARD, 0), (BACKWARD, 2), (FORWARD, 0), (FORWARD, 2)]
    executor, _, buffers = executor_of(frozen, last, schedule=planned(1e9, *lanes))
    for index in (0, 2):
        feed(executor, index, buffers, 1)
    assert executor.run_next()
    assert executor.run_next()


# ---- what a stage may hold, and when it is done


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_stage_stores_no_more_forwards_than_it_may(in_flight):
    executor, sent, buffers = executor_of(FakeStage(1), schedule=StepSchedule((in_flight,) * 4))
    feed(executor, 1, buffers, 4)
    assert run_all(executor) == in_flight
    for k in range(4):
        executor.put_gradient(1, k, buffers.arrival())
        run_all(executor)
    assert [m[2] for m in sent.messages if m[0] == "hidden"] == list(range(4))
    assert executor.statistics()[1].in_flight_peak == in_flight
    assert executor.is_done


def test_limit_of_each_stage_is_its_own():
    stages, schedule = (FakeStage(0, first=True), FakeStage(2)), StepSchedule((3, 9, 1, 9))
    executor, sent, buffers = executor_of(*stages, schedule=schedule)
    for index in (0, 2):
        feed(executor, index, buffers, 4)
    assert run_all(executor) == 4
    assert [m[1] for m in sent.messages].count(1) == 3


def test_evaluation_and_stages_without_a_backward_store_nothing():
    for info, differentiates in ((EVALUATE, True), (TRAIN, False)):
        stage = FakeStage(1)
        stage.differentiates = differentiates
        executor, _, buffers = executor_of(stage, info=info, schedule=StepSchedule((1,) * 4))
        feed(executor, 1, buffers, 4)
        assert run_all(executor) == 4
        assert buffers.released == [1] * 4
        assert executor.statistics()[1].in_flight_peak == 0


@pytest.mark.parametrize("role", ["middle", "last", "no backward"])
def test_executor_is_done_with_the_last_task_of_the_last_micro_batch(role):
    stage = FakeStage(1, last=role == "last")
    stage.differentiates = role != "no backward"
    executor, _, buffers = executor_of(stage, info=replace(TRAIN, micro_batches=2))
    feed(executor, 1, buffers, 2)
    done = []
    while executor.run_next():
        done.append(executor.is_done)
        if role == "middle" and len(done) == 2:
            for k in range(2):
                executor.put_gradient(1, k, buffers.arrival())
    assert done == ([False] * 3 if role == "middle" else [False]) + [True]
    executor.abort()
    assert not executor.is_done


def test_executor_with_several_stages_is_done_when_all_are():
    executor, _, buffers = executor_of(*first_and_last(), info=replace(TRAIN, micro_batches=1))
    feed(executor, 0, buffers, 1)
    feed(executor, 3, buffers, 1)
    assert run_all(executor) == 2
    assert not executor.is_done
    executor.put_gradient(0, 0, buffers.arrival())
    assert run_all(executor) == 1
    assert executor.is_done


# ---- receive buffers


def test_buffers_are_held_until_backward_and_given_back_once():
    """The stored forward may look into the receive buffer of its hidden states."""
    executor, _, buffers = executor_of(FakeStage(1))
    feed(executor, 1, buffers, 1)
    executor.run_next()
    assert buffers.released == [0]
    executor.put_gradient(1, 0, buffers.arrival())
    executor.run_next()
    assert buffers.released == [1, 1]
    executor.begin(TRAIN, SCHEDULE)
    assert buffers.released == [1, 1]


@pytest.mark.parametrize(
    ("info", "last"),
    [(TRAIN, False), (EVALUATE, False), (TRAIN, True)],
    ids=["train", "evaluate", "last"],
)
def test_result_that_lies_in_a_buffer_is_copied_before_it_goes(info, last):
    stage = FakeStage(1, last=last)
    stage.in_place = True
    executor, sent, buffers = executor_of(stage, info=info)
    executor.put_inputs(1, 0, INPUTS)
    executor.put_hidden(1, 0, buffers.arrival(1.0))
    executor.run_next()
    if info.train and not last:
        executor.put_gradient(1, 0, buffers.arrival(1.0))
        executor.run_next()
    assert torch.equal(sent.messages[-1][3], torch.full((1, 2, 3), 2.0))


@pytest.mark.parametrize("end", ["abort", "begin"])
def test_abort_and_begin_drop_everything_that_waits(end):
    stage = FakeStage(1)
    executor, sent, buffers = executor_of(stage)
    feed(executor, 1, buffers, 3)
    executor.run_next()
    executor.run_next()
    executor.put_gradient(1, 0, buffers.arrival())
    executor.put_gradient(1, 1, buffers.arrival())
    sent.messages.clear()
    if end == "abort":
        executor.abort()
        assert executor.info is None
        assert stage.calls[-1] == ("abort",)
    else:
        executor.begin(TRAIN, SCHEDULE)
        assert stage.calls[-1] == ("begin", TRAIN.step)
    assert buffers.released == [1] * 5
    assert not executor.run_next()
    assert sent.messages == []


def test_begin_starts_over_with_micro_batch_zero():
    stage = FakeStage(0, first=True)
    executor, _, buffers = executor_of(stage)
    feed(executor, 0, buffers, 2)
    run_all(executor)
    executor.begin(TRAIN, SCHEDULE)
    feed(executor, 0, buffers, 1)
    run_all(executor)
    assert stage.calls == [("forward", 0), ("forward", 1), ("begin", 3), ("forward", 0)]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda e, a: e.put_hidden(2, 0, a), "FORWARD of micro-batch 0 came for stage 2, not held"),
        (lambda e, a: e.put_inputs(0, 0, INPUTS), "INPUTS of micro-batch 0 came for stage 0"),
        (lambda e, a: e.put_hidden(1, 4, a), "FORWARD of micro-batch 4 .* the step has 4 micro-"),
        (lambda e, a: e.put_gradient(1, 9, a), "BACKWARD of micro-batch 9 .* the step has 4"),
        (lambda e, a: e.put_hidden(1, 0, a), "FORWARD of micro-batch 0 .* a second time"),
        (lambda e, a: e.put_hidden(1, 1, a), "FORWARD of micro-batch 1 .* a second time"),
        (lambda e, a: e.put_inputs(1, 0, INPUTS), "INPUTS of micro-batch 0 .* a second time"),
        (lambda e, a: e.put_gradient(1, 0, a), "BACKWARD of micro-batch 0 .* a second time"),
        (lambda e, a: e.put_gradient(1, 1, a), "BACKWARD of micro-batch 1 .* before its forward"),
    ],
)
def test_an_impossible_arrival_is_refused_and_changes_nothing(wrong, text):
    """Micro-batch 0 has been through, 1 waits for its forward."""
    stage = FakeStage(1)
    executor, sent, buffers = executor_of(stage)
    feed(executor, 1, buffers, 1)
    assert executor.run_next()
    executor.put_gradient(1, 0, buffers.arrival())
    assert executor.run_next()
    executor.put_hidden(1, 1, buffers.arrival())
    sent.messages.clear()
    with pytest.raises(ProtocolError, match=text):
        wrong(executor, Arrival((torch.full((1, 2, 3), 7.0),)))
    assert not executor.run_next()
    executor.put_inputs(1, 1, INPUTS)
    assert executor.run_next()
    [(_, _, k, hidden_BSD)] = sent.messages
    assert (k, float(hidden_BSD.max())) == (1, 1.0)


def test_gradient_in_an_evaluation_is_refused():
    executor, _, buffers = executor_of(FakeStage(1), info=EVALUATE)
    feed(executor, 1, buffers, 1)
    run_all(executor)
    with pytest.raises(ProtocolError, match="before its forward"):
        executor.put_gradient(1, 0, buffers.arrival())


# ---- failure, statistics


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (ValueError("odd shape"), HeteroError, "ValueError: odd shape"),
        (KeyError("missing"), HeteroError, "KeyError: 'missing'"),
        (MemoryError(), StepOutOfMemory, "memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), StepOutOfMemory, "memory"),
    ],
)
def test_failure_says_which_stage_and_which_micro_batch(cause, kind, text):
    stage = FakeStage(1)
    executor, _, buffers = executor_of(stage)
    feed(executor, 1, buffers, 1)
    stage.fails = cause
    with pytest.raises(kind, match="stage 1, forward of micro-batch 0") as caught:
        executor.run_next()
    assert text in caught.value.message
    assert caught.value.__cause__ is cause
    assert getattr(caught.value, "attempt", (3, 0)) == (TRAIN.step, TRAIN.attempt)


def test_failure_that_speaks_to_the_user_is_left_alone():
    stage = FakeStage(0, first=True)
    executor, _, _ = executor_of(stage)
    executor.put_inputs(0, 0, INPUTS)
    stage.fails = ModelError("said well already")
    with pytest.raises(ModelError, match=r"^said well already"):
        executor.run_next()


def test_loss_that_is_still_a_tensor_is_handed_on_as_it_is():
    stage, loss = FakeStage(1, last=True), torch.tensor(2.5)
    stage.evaluate = lambda *_: Outcome(loss)  # type: ignore[method-assign]
    executor, sent, buffers = executor_of(stage, info=EVALUATE)
    feed(executor, 1, buffers, 1)
    run_all(executor)
    assert sent.messages[0][2] is loss


def test_statistics_count_the_longest_queue_of_the_step():
    executor, _, buffers = executor_of(FakeStage(1))
    feed(executor, 1, buffers, 3)
    run_all(executor)
    executor.put_gradient(1, 0, buffers.arrival())
    figures = executor.statistics()[1]
    assert (figures.queue_peak, figures.in_flight_peak) == (3, 3)
    assert figures.forward_s > 0
    assert figures.backward_s == 0
    executor.begin(TRAIN, SCHEDULE)
    assert executor.statistics()[1] == StageFigures(0.0, 0.0, 0, 0, 0, 0.0, 0.0)


def test_statistics_count_the_prefetch_misses_of_a_step():
    stage = FakeStage(1)
    stage.residence = SimpleNamespace(misses=2, transfers=list, streams=False)
    executor, _, _ = executor_of(stage)
    stage.residence.misses = 5
    assert executor.statistics()[1].prefetch_misses == 3
    executor.begin(TRAIN, SCHEDULE)
    assert executor.statistics()[1].prefetch_misses == 0
    stage.residence.misses = None  # only states or inputs are in host memory
    assert executor.statistics()[1].prefetch_misses is None


def test_statistics_tell_forward_from_backward():
    device = QueuedDevice(at_once=True)  # a second between two events
    executor, _, buffers = executor_of(*first_and_last(), device=device)
    feed(executor, 0, buffers, 3)
    feed(executor, 3, buffers, 2)
    run_all(executor)
    executor.put_gradient(0, 0, buffers.arrival())
    run_all(executor)
    figures = executor.statistics()
    assert (figures[0].forward_s, figures[0].backward_s) == (3.0, 1.0)
    assert (figures[3].forward_s, figures[3].backward_s) == (0.0, 2.0)
    assert executor.statistics()[0].forward_s == 0.0  # of what came since


def test_statistics_of_an_evaluation_count_the_last_stages_forwards():
    device, stage = QueuedDevice(at_once=True), FakeStage(3, last=True)
    executor, _, buffers = executor_of(stage, info=EVALUATE, device=device)
    feed(executor, 3, buffers, 2)
    run_all(executor)
    figures = executor.statistics()[3]
    assert (figures.forward_s, figures.backward_s) == (2.0, 0.0)


def test_recorder_gets_the_span_of_every_task():
    recorder = Recorder(-1)
    options = {"device": QueuedDevice(at_once=True), "recorder": recorder}
    executor, _, buffers = executor_of(*first_and_last(), **options)
    feed(executor, 0, buffers, 1)
    run_all(executor)
    feed(executor, 3, buffers, 1)
    run_all(executor)
    executor.put_gradient(0, 0, buffers.arrival())
    run_all(executor)
    executor.statistics()
    spans = recorder.take()
    heads = [(s["kind"], s["stage"], s["micro_batch"], s["step"]) for s in spans]
    assert heads == [(FORWARD, 0, 0, 3), (FORWARD_BACKWARD, 3, 0, 3), (BACKWARD, 0, 0, 3)]
    assert [(s["began"], s["ended"]) for s in spans] == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]


# ---- a device that computes behind our back


def test_device_falls_behind_by_two_tasks_at_most():
    """So much is queued that it never idles, so little that an urgent task comes next but one."""
    device = QueuedDevice()
    executor, _, buffers = executor_of(FakeStage(0, first=True), device=device)
    feed(executor, 0, buffers, 4)
    for _ in range(2):
        executor.run_next()
    assert device.log == []
    device.reach(2)  # the first task is done
    executor.run_next()
    assert device.log == [("wait", 1)]
    device.reach(4)
    executor.run_next()
    assert device.log == [("wait", 1), ("wait", 3)]


def test_time_of_a_task_ends_before_its_result_is_sent():
    """Handing the result over may take a while; that is no time of the stage."""
    order: list[str] = []

    class Watched(Device):
        def record_event(self, *tensors: torch.Tensor) -> DeviceEvent:
            order.append("event")
            return DeviceEvent()

    executor, sent, buffers = executor_of(FakeStage(0, first=True), device=Watched())
    sent.send = lambda *_: order.append("sent")  # type: ignore[method-assign]
    feed(executor, 0, buffers, 1)
    executor.run_next()
    assert order == ["event", "event", "sent"]


@pytest.mark.parametrize(("steps", "expected"), [(-1, [(COMMIT, 1, 3)]), (0, [])])
def test_commit_is_recorded_while_the_step_is(steps, expected):
    recorder, stage = Recorder(steps), FakeStage(1)
    device = QueuedDevice(at_once=True)
    executor, _, _ = executor_of(stage, device=device, recorder=recorder)
    executor.commit(stage, 1e-3, 0.5)
    assert stage.calls[-1] == ("commit", 1e-3, 0.5)
    spans = recorder.take()
    assert [(span["kind"], span["stage"], span["step"]) for span in spans] == expected


def test_visits_from_host_memory_are_recorded_with_their_step():
    """Those of the commit too; not those of a step that is over, nor waits that were none."""
    recorder, stage, device = Recorder(1), FakeStage(1), QueuedDevice(at_once=True)
    noted: list[tuple[str, DeviceEvent, DeviceEvent]] = []

    def note(kind: str, *, late: bool = True) -> None:
        events = device.record_event(), device.record_event()
        noted.append((kind, *events) if late else (kind, *events[::-1]))

    def take() -> list[Any]:
        taken = [*noted]
        noted.clear()
        return taken

    stage.residence = SimpleNamespace(misses=0, transfers=take, streams=False)
    executor, _ = make_executor([stage], device=device, recorder=recorder)
    for step in range(3):
        note("inputs in")  # of an attempt that was given up
        executor.begin(replace(TRAIN, step=step), SCHEDULE)
        note(WEIGHTS)
        note(AWAITED)
        note(AWAITED, late=False)
        executor.statistics()
        note("states in")
        executor.commit(stage, 1e-3, 0.5)
        assert noted == []
    found = [(s["kind"], s["stage"], s["micro_batch"], s["step"]) for s in recorder.take()]
    assert found == [(kind, 1, -1, 1) for kind in (WEIGHTS, AWAITED, COMMIT, "states in")]


# ---- what is simulated is what runs


@dataclass
class Ran:
    """The tasks of one device in the order in which they ran, by stage calls or by simulation."""

    tasks: dict[int, list[Task]] = field(default_factory=dict)

    def add(self, device: int, task: Task) -> None:
        self.tasks.setdefault(device, []).append(task)


def planned_order(profile: Profile, schedule: TunedSchedule) -> dict[int, list[Task]]:
    planned = Ran()
    for span in schedule.spans:
        if not span.is_transfer:
            planned.add(profile.devices[span.task.stage], span.task)
    return planned.tasks


def executed_order(profile: Profile, m: int, schedule: TunedSchedule) -> dict[int, list[Task]]:
    """One executor per device, whose stages take the profile's seconds by a clock of our own."""
    p, ran = profile.num_stages, Ran()
    stages = [FakeStage(k, first=k == 0, last=k == p - 1) for k in range(p)]
    devices = list(dict.fromkeys(profile.devices))
    executors = {
        d: make_executor([s for s in stages if profile.devices[s.index] == d]) for d in devices
    }
    for device, (executor, _) in executors.items():
        own = [k for k in range(p) if profile.devices[k] == device]
        planned = replace(schedule.schedule, order_timeout_s=1e9)
        executor.begin(replace(TRAIN, micro_batches=m), planned.for_process(own))
    lanes = [lane for k in range(p - 1) for lane in ((BACKWARD, k), (FORWARD, k + 1))]
    waiting: dict[tuple[str, int], list[int]] = {lane: [] for lane in lanes}
    busy_nics: set[tuple[int, str]] = set()
    events: list[tuple[float, int, str, Any]] = []
    numbers = itertools.count()
    idle = dict.fromkeys(devices, True)
    admission, finished = Admission(m, schedule.max_in_flight), 0

    def at(when: float, what: str, subject: Any) -> None:
        heapq.heappush(events, (when, next(numbers), what, subject))

    def admit() -> None:
        while (k := admission.next(finished)) is not None:
            admission.admit()
            for stage in stages:
                executors[profile.devices[stage.index]][0].put_inputs(stage.index, k, INPUTS)

    def edge_s(kind: str, stage: int) -> float:
        edge = profile.edges[stage - 1 if kind == FORWARD else stage]
        return edge.forward_s if kind == FORWARD else edge.backward_s

    def nics_of(kind: str, stage: int) -> tuple[tuple[int, str], ...]:
        if not edge_s(kind, stage):
            return ()
        return profile.nics(stage - 1 if kind == FORWARD else stage, kind)

    def send(now: float, kind: str, stage: int, k: int) -> None:
        if profile.nics(stage - 1 if kind == FORWARD else stage, kind):
            waiting[kind, stage].append(k)
            cross(now)
        else:
            at(now, kind, (stage, k))

    def cross(now: float) -> None:
        """Whatever finds its NICs free crosses, and goes to the end of the line."""
        for lane in list(lanes):
            (kind, stage), nics = lane, nics_of(*lane)
            if waiting[lane] and busy_nics.isdisjoint(nics):
                busy_nics.update(nics)
                lanes.remove(lane)
                lanes.append(lane)
                latency_s = profile.edges[stage - 1 if kind == FORWARD else stage].latency_s
                at(now + edge_s(*lane), "crossed", (lane, latency_s, waiting[lane].pop(0)))

    def arrive(now: float, kind: str, stage: int, k: int) -> None:
        device = profile.devices[stage]
        executor, _ = executors[device]
        put = executor.put_hidden if kind == FORWARD else executor.put_gradient
        put(stage, k, Arrival((torch.zeros(1, 2, 3),)))
        start(now, device)

    def start(now: float, device: int) -> None:
        executor, sent = executors[device]
        own = [s for s in stages if profile.devices[s.index] == device]
        before = [len(s.calls) for s in own]
        if not idle[device] or not executor.run_next():
            return
        (stage,) = [s for s, count in zip(own, before, strict=True) if len(s.calls) > count]
        verb, k = stage.calls[-1]
        kind = BACKWARD if verb == "backward" else FORWARD
        ran.add(device, Task(kind, stage.index, k))
        seconds = profile.backward_s[stage.index] if verb != "forward" else 0.0
        seconds += profile.forward_s[stage.index] if verb != "backward" else 0.0
        idle[device] = False
        at(now + seconds, "ended", (device, list(sent.messages)))
        sent.messages.clear()

    admit()
    start(0.0, profile.devices[0])
    while events:
        now, _, what, subject = heapq.heappop(events)
        if what == "ended":
            device, messages = subject
            idle[device] = True
            for name, *rest in messages:
                if name in ("hidden", "gradient"):
                    send(now, FORWARD if name == "hidden" else BACKWARD, rest[0], rest[1])
                elif name == "finished":
                    finished += 1
                    admit()
            start(now, device)
        elif what == "crossed":
            lane, latency_s, k = subject
            if latency_s:
                at(now + latency_s, lane[0], (lane[1], k))
            else:
                arrive(now, *lane, k)
            busy_nics.difference_update(nics_of(*lane))
            cross(now)
        else:
            arrive(now, what, *subject)
    return ran.tasks


@pytest.mark.parametrize("policy", [*POLICIES, None])
@pytest.mark.parametrize(
    "profile",
    [
        Profile.of([2, 4, 1], [8, 8, 4], edges=[Edge(2), Edge(0, 8)]),
        Profile.of([3] * 6, [5] * 6, devices=[0, 1, 2] * 2, edges=[Edge(1, 1, 2)] * 5),
        Profile.of([4, 1, 2, 6], [7, 2, 5, 3], devices=[0, 1, 2, 0], edges=[Edge(3, 4, 1, 0)] * 3),
        Profile.of([1, 2, 3], [4, 5, 6], devices=[0, 0, 0]),
    ],
)
@pytest.mark.parametrize("limits", [2, 3, 9])
def test_executor_runs_the_tasks_in_the_planned_order(profile, policy, limits):
    """Chained and interleaved stages, a relay, slow edges: the same times, the same order."""
    m, in_flight_limits = 12, (limits,) * profile.num_stages
    policy = due_dates(profile, m, 0.2) if policy is None else policy
    schedule = TunedSchedule(policy, 8, in_flight_limits, profile, m)
    planned = planned_order(profile, schedule)
    assert executed_order(profile, m, schedule) == planned
    assert sum(map(len, planned.values())) == m * (2 * profile.num_stages - 1)
