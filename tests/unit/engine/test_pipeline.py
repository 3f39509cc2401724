"""The engine with a stage here and a worker that the test plays."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_framework.config import StageSpec
from hetero_framework.core.devices import open_device
from hetero_framework.core.messages import (
    Abort,
    Aborted,
    Backward,
    BackwardDone,
    Body,
    Commit,
    Committed,
    Inputs,
    LoadKind,
    LoadState,
    Loss,
    Message,
    StageFigures,
    StateLoaded,
    StateRequest,
    Step,
)
from hetero_framework.core.spans import Recorder
from hetero_framework.engine import state_snapshot, wire_forms
from hetero_framework.engine.boundary_io import ArrivalMeter, unpack
from hetero_framework.engine.hosts import (
    HostEvent,
    LinkLost,
    ReplicasChanged,
    Stalled,
    StepResults,
)
from hetero_framework.engine.pipeline import Pipeline, Summing
from hetero_framework.engine.remote_host import RemoteHost
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD
from hetero_framework.engine.schedule.step_schedule import StepSchedule, Transfer
from hetero_framework.engine.stage_api import (
    GradientPart,
    GradientReport,
    HostReport,
    Outcome,
    StatePart,
    StepInfo,
    Tensors,
)
from hetero_framework.engine.stage_host import StageHost
from hetero_framework.engine.ties import Ties
from hetero_framework.errors import HeteroError, NumericError, ProtocolError
from hetero_framework.models.cut.causal_lm import CausalLM
from tests.samples import boundary_message, config_for
from tests.unit.engine.test_executor import FakeStage

CONFIG = config_for(("local", 2), (7, 4))
STAGES = [StageSpec(0, "local", 0, 2, True, False), StageSpec(1, 7, 2, 4, False, True)]
INFO = StepInfo(step=0, attempt=0, train=True, micro_batches=4, num_items=8)
SCHEDULE = StepSchedule(in_flight_limits=(4, 4), max_in_flight=3)
ONE_IN_FLIGHT = replace(SCHEDULE, max_in_flight=1)
BATCHES: list[Tensors] = [
    {"input_ids": torch.full((1, 2), k), "labels": torch.full((1, 2), k)} for k in range(4)
]
FIGURES = StageFigures(
    **{"forward_s": 0.0, "backward_s": 0.5, "queue_peak": 2, "in_flight_peak": 1},
    **{"peak_memory_bytes": 9, "arrive_forward_s": 0.25, "arrive_backward_s": 0.0},
)


class Worker:
    """Worker 7 with the last stage, behind the interface of `Links`. Answers when told to."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.info = INFO
        self.answers = True
        self.most_under_way = 0
        self.results = StepResults()
        self.breaks: Exception | None = None
        self._inbox: queue.SimpleQueue[HostEvent | Exception] = queue.SimpleQueue()
        self.is_quiet = self._inbox.empty

    def expect(self, step: int, attempt: int) -> None:
        self.expected = step, attempt

    def plan(self, attempt: int, schedule: StepSchedule) -> None:
        self.planned = attempt, schedule

    def ping(self, worker: int) -> None: ...
    def generation(self, worker: int) -> object:
        return self

    def failed(self, error: Exception) -> None:
        self._inbox.put(error)

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        raise AssertionError("the last stage is not here")

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        self.results.finished(info, micro_batch)

    def send(self, worker: int, message: Message) -> None:
        if self.breaks is not None:
            raise self.breaks
        self.sent.append(message)
        if isinstance(message.body, Step):
            self.info = wire_forms.step_info(message.body)
        elif isinstance(message.body, Inputs):
            under_way = len(self.kinds(Inputs)) - len(self.results.through)
            self.most_under_way = max(self.most_under_way, under_way)
        elif isinstance(message.body, LoadState):
            self.tell(Message(StateLoaded(message.body.stage, message.body.part)))
        elif isinstance(message.body, Abort):
            self.tell(Message(Aborted(message.body.step, message.body.attempt)))

    def post(self, message: Message, done: Callable[[], None] | None = None) -> None:
        k = message.body.micro_batch
        if not self.answers:
            return
        self.tell(Message(Loss(self.info.step, self.info.attempt, k, float(10 + k))))
        if self.info.train:
            self.tell(boundary_message(Backward, self.info, 0, k, torch.zeros(1, 2, 3)))
            if k == self.info.micro_batches - 1:
                self.report()  # unasked, and before the first stage has finished

    def report(self) -> None:
        gradients = {1: GradientReport(torch.tensor([3.0]), nonfinite=(2,))}
        report = HostReport(gradients, {1: FIGURES}, {}, 5)
        self.tell(wire_forms.gradient_norms_message(self.info, report))

    def tell(self, message: Message) -> None:
        arrival = unpack(message, open_device("cpu"))
        self._inbox.put(HostEvent(7, None, message, arrival))  # type: ignore[arg-type]

    def confirm(self, info: StepInfo, spans: list[Any] | None = None) -> None:
        self.tell(Message(Committed(info.step, info.attempt, tuple(spans or ()))))

    def receive(self, timeout_s: float) -> HostEvent | None:
        try:
            event = self._inbox.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, Exception):
            raise event
        return event

    def kinds(self, kind: type[Body]) -> list[Message]:
        return [message for message in self.sent if type(message.body) is kind]


def make(
    step_timeout_s: float = 60.0, tied: dict[str, str] | None = None
) -> tuple[Pipeline, Worker, FakeStage]:
    """`tied` are the last stage's targets of weights of the first one."""
    tied = tied or {}
    worker, stage = Worker(), FakeStage(0, first=True)
    host = StageHost([stage], CONFIG, open_device("cpu"), ArrivalMeter(Recorder(0)), worker)
    trained = {0: ["first"], 1: ["last"]}
    about = (7, {1: tied}, worker, worker.results, host.data)
    remote = RemoteHost(*about, trained=trained, states=[*trained.values()])
    options = {"objective": CausalLM(None), "step_timeout_s": step_timeout_s, "trained": trained}
    ties = Ties({1: tied}, {0: list(tied.values())})
    pipeline = Pipeline(STAGES, host, [remote], worker, worker.results, ties=ties, **options)
    return pipeline, worker, stage


def no_recovery(lost: LinkLost) -> None:
    raise AssertionError("nothing is lost")


def step(pipeline: Pipeline, info: StepInfo) -> list[float]:
    pipeline.begin(info, SCHEDULE)
    losses = pipeline.run(BATCHES)
    pipeline.report_gradients()
    return losses


@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 9])
def test_run_keeps_to_max_in_flight_and_gives_losses_in_order(max_in_flight):
    pipeline, worker, stage = make()
    pipeline.begin(INFO, replace(SCHEDULE, max_in_flight=max_in_flight))
    assert pipeline.run(BATCHES) == [10.0, 11.0, 12.0, 13.0]
    assert min(max_in_flight, 2) <= worker.most_under_way <= min(max_in_flight, 4)
    assert [call[1] for call in stage.calls if call[0] == "backward"] == [0, 1, 2, 3]


def test_every_process_gets_the_part_of_the_order_that_is_its_own():
    pipeline, links, _ = make()
    lanes = [(FORWARD, 0), (FORWARD, 1), (BACKWARD, 0)]
    transfers = (Transfer((FORWARD, 1)), Transfer((BACKWARD, 0))) * 4
    pipeline.begin(INFO, replace(SCHEDULE, tasks=tuple(lanes * 4), transfers=transfers))
    attempt, own = links.planned
    assert attempt == INFO.attempt
    assert own.tasks == ((FORWARD, 0), (BACKWARD, 0)) * 4
    assert (own.sends, own.receives) == (((FORWARD, 1),) * 4, ((BACKWARD, 0),) * 4)
    (sent,) = links.kinds(Step)
    theirs = wire_forms.step_schedule(sent.expect(Step))
    assert theirs.tasks == ((FORWARD, 1),) * 4
    assert (theirs.sends, theirs.receives) == (own.receives, own.sends)
    assert len(pipeline.run(BATCHES)) == 4


def test_a_task_that_waits_for_anothers_turn_runs_when_it_has_waited_enough():
    """Nothing arrives meanwhile that would wake the computing thread."""
    pipeline, links, _ = make()
    tasks = ((BACKWARD, 0), (FORWARD, 0))
    pipeline.begin(INFO, replace(ONE_IN_FLIGHT, tasks=tasks, order_timeout_s=0.05))
    waited: list[float] = []
    receive = links.receive

    def noted(timeout_s: float) -> HostEvent | None:
        found = receive(timeout_s)
        if timeout_s and found is None:
            waited.append(timeout_s)
            threading.Event().wait(timeout_s)
        return found

    links.receive = noted  # type: ignore[method-assign]
    pipeline.run(BATCHES)
    assert waited
    assert max(waited) <= 0.05 + 1e-9  # the clock has large numbers


def test_run_of_an_evaluation_ends_with_the_losses():
    pipeline, _, stage = make()
    pipeline.begin(replace(INFO, train=False), SCHEDULE)
    assert pipeline.run(BATCHES) == [10.0, 11.0, 12.0, 13.0]
    assert not any(call[0] == "backward" for call in stage.calls)


def test_a_stage_is_sent_only_the_inputs_it_needs():
    pipeline, worker, _ = make()
    step(pipeline, INFO)
    assert [message.body.names for message in worker.kinds(Inputs)] == [("labels",)] * 4


def test_report_gradients_takes_reports_that_came_by_themselves():
    pipeline, _, _ = make()
    pipeline.begin(INFO, SCHEDULE)
    pipeline.run(BATCHES)
    reports, statistics = pipeline.report_gradients()
    assert [report.norms.tolist() for report in reports] == [[], [3.0]]
    assert reports[1].nonfinite == (2,)
    assert statistics[1].backward_s == statistics[1].busy_s == 0.5
    assert (statistics[1].arrive_forward_s, statistics[1].queue_peak) == (0.25, 2)
    assert statistics[0].forward_s > 0
    assert pipeline.direct_bytes == {"local": 0, 7: 5}


def test_last_stages_sums_come_before_the_firsts_backward(monkeypatch):
    """Its worker has no gradient for the first stage before it has the sums."""
    pipeline, worker, stage = make(step_timeout_s=1.0)
    post, send, held = worker.post, worker.send, []

    def post_all_but_last(message: Message, done: Any = None) -> None:
        if message.body.micro_batch < INFO.micro_batches - 1:
            post(message)
            return
        held.append(message)
        part = GradientPart(1, 0, StatePart({"last": torch.ones(1)}, last=True))
        worker.tell(wire_forms.gradients_message(worker.info, part))

    def send_and_go_on(worker_id: int, message: Message) -> None:
        send(worker_id, message)
        if isinstance(message.body, LoadState):
            assert message.body.names == ("last",)
            post(held.pop())

    monkeypatch.setattr(worker, "post", post_all_but_last)
    monkeypatch.setattr(worker, "send", send_and_go_on)
    group = Group("first", "last", "w0")
    pipeline.begin(replace(INFO, summed=True), SCHEDULE, group)
    pipeline.run(BATCHES)
    assert ("backward", INFO.micro_batches - 1) in stage.calls
    pipeline.sum_gradients()
    assert (group.given, group.ended) == (["last", "w0"], 1)
    assert stage.calls[-1] == ("load_state", "gradients")


def test_a_worker_that_does_not_take_its_sums_is_named(monkeypatch):
    pipeline, worker, _ = make(step_timeout_s=0.1)
    monkeypatch.setattr(worker, "answers", False)
    pipeline.begin(replace(INFO, micro_batches=0, summed=True), SCHEDULE, Group("last"))
    part = GradientPart(1, 0, StatePart({"last": torch.ones(1)}, last=True))
    worker.tell(wire_forms.gradients_message(worker.info, part))
    pipeline.run([])
    send = worker.send
    monkeypatch.setattr(
        worker, "send", lambda k, message: isinstance(message.body, LoadState) or send(k, message)
    )
    with pytest.raises(Stalled, match="worker 7 to take over sums of gradients"):
        pipeline.sum_gradients()


@pytest.mark.parametrize(
    ("step_timeout_s", "step_s", "stall_s"),
    [
        (600.0, [1.0] * 2, 600.0),  # too few to know
        (600.0, [1.0] * 3, 60.0),
        (600.0, [20.0, 1.0, 30.0], 200.0),
        (600.0, [90.0] * 3, 600.0),
        (30.0, [1.0] * 3, 30.0),
    ],
)
def test_steps_say_how_long_nothing_may_move_within_the_setting(step_timeout_s, step_s, stall_s):
    pipeline, _, _ = make(step_timeout_s)
    pipeline._step_s.extend(step_s)
    assert pipeline._stall_s == stall_s


def test_commit_is_not_awaited_and_may_be_confirmed_in_the_next_step():
    pipeline, worker, stage = make()
    step(pipeline, INFO)
    pipeline.commit(1e-3, 0.5, no_recovery)
    assert stage.calls[-1] == ("commit", 1e-3, 0.5)
    assert len(worker.kinds(Commit)) == 1
    following = replace(INFO, step=1, attempt=1)
    worker.confirm(INFO, [{"kind": "forward"}])
    assert step(pipeline, following) == [10.0, 11.0, 12.0, 13.0]
    assert pipeline.take_spans() == {7: [{"kind": "forward"}], "local": []}
    pipeline.drain_commits()  # nothing is open
    pipeline.repeat_commit(7)
    assert len(worker.kinds(Commit)) == 1


@pytest.mark.parametrize(("limit", "in_parts"), [(8, False), (7, True)])
def test_new_weights_that_are_too_many_for_a_frame_go_before_the_next_step(
    limit, in_parts, monkeypatch
):
    monkeypatch.setattr(state_snapshot, "STATE_PART_BYTES", limit)
    pipeline, worker, stage = make(tied={"x": "a", "y": "b"})
    weights = {"a": torch.ones(1), "b": torch.ones(1)}
    monkeypatch.setattr(stage, "tied_weights", lambda: weights)
    pipeline.begin(INFO, ONE_IN_FLIGHT)
    pipeline.commit(1e-3, 0.5, no_recovery)
    [commit] = worker.kinds(Commit)
    assert commit.body.names == (() if in_parts else ("a", "b"))
    pipeline.begin(replace(INFO, step=1), ONE_IN_FLIGHT)
    loaded = [message.body for message in worker.kinds(LoadState)]
    parts = [("tied weights", ("a",)), ("tied weights", ("b",))] if in_parts else []
    assert [(body.kind, body.names) for body in loaded] == parts
    pipeline.begin(replace(INFO, step=2), ONE_IN_FLIGHT)
    assert len(worker.kinds(LoadState)) == len(loaded)  # once


def test_drain_commits_waits_for_the_last_commit_and_not_for_an_older_one():
    pipeline, worker, _ = make(step_timeout_s=-1.0)
    step(pipeline, INFO)
    pipeline.commit(1e-3, 0.5, no_recovery)
    following = replace(INFO, step=1, attempt=1)
    step(pipeline, following)
    pipeline.commit(1e-3, 0.5, no_recovery)
    worker.confirm(INFO)
    with pytest.raises(Stalled, match="waiting for the commit of worker 7"):
        pipeline.drain_commits()
    worker.confirm(following)
    pipeline.drain_commits()


def test_a_long_snapshot_is_requested_as_of_its_first_step():
    pipeline, worker, _ = make()
    step(pipeline, INFO)
    pipeline.commit(1e-3, 0.5, no_recovery)
    pipeline.snapshot(lambda *part: None)  # of which nothing comes
    for number in (1, 2):
        step(pipeline, replace(INFO, step=number, attempt=number))
        pipeline.commit(1e-3, 0.5, no_recovery)
    pipeline.begin(replace(INFO, step=3, attempt=3), SCHEDULE)
    assert {message.body.step for message in worker.kinds(StateRequest)} == {0}


def test_commit_over_a_broken_link_is_repeated_when_it_is_mended():
    pipeline, worker, stage = make()
    step(pipeline, INFO)
    lost: list[LinkLost] = []

    def recover(error: LinkLost) -> None:
        lost.append(error)
        worker.breaks = None
        pipeline.repeat_commit(7)

    worker.breaks = LinkLost(7, "gone")
    pipeline.commit(1e-3, 0.5, recover)
    assert [error.worker for error in lost] == [7]
    assert len(worker.kinds(Commit)) == 1
    assert [call for call in stage.calls if call[0] == "commit"] == [("commit", 1e-3, 0.5)]
    pipeline.repeat_commit(7)  # a second loss, before it was confirmed
    assert len(worker.kinds(Commit)) == 2


def test_messages_of_an_attempt_that_is_over_are_dropped():
    pipeline, worker, _ = make()
    pipeline.begin(INFO, SCHEDULE)
    for k in range(4):
        worker.tell(Message(Loss(INFO.step, 5, k, 99.0)))
    worker.tell(Message(BackwardDone(4, INFO.attempt, 3)))
    assert pipeline.run(BATCHES) == [10.0, 11.0, 12.0, 13.0]


def test_abort_drops_earlier_reports():
    pipeline, worker, stage = make(step_timeout_s=-1.0)
    pipeline.begin(INFO, SCHEDULE)
    pipeline.run(BATCHES)
    assert worker.expected == (INFO.step, INFO.attempt)
    pipeline.abort()
    assert worker.expected == (INFO.step, -1)
    assert stage.calls[-1] == ("abort",)
    assert len(worker.kinds(Abort)) == 1
    with pytest.raises(Stalled, match="waiting for gradient norms of worker 7"):
        pipeline.report_gradients()


def test_a_stalled_run_names_the_open_micro_batches():
    pipeline, worker, _ = make(step_timeout_s=-1.0)
    worker.answers = False
    pipeline.begin(INFO, SCHEDULE)
    with pytest.raises(Stalled, match="in step 1; waiting for losses of micro-batches 0, 1"):
        pipeline.run(BATCHES)


def test_failure_of_the_sending_thread_ends_the_run():
    pipeline, worker, _ = make()
    pipeline.begin(INFO, SCHEDULE)
    worker.failed(HeteroError("too large"))
    with pytest.raises(HeteroError, match="too large"):
        pipeline.run(BATCHES)
    pipeline.close()


@pytest.mark.parametrize("error", [ProtocolError, NumericError])
def test_what_the_last_stage_gave_is_told_with_the_name_of_its_process(error):
    pipeline = make()[0]
    with (
        pytest.raises(error, match=r"^worker 7: no numbers") as raised,
        pipeline.judging_outcomes(),
    ):
        raise error("no numbers", hint="look there")
    assert raised.value.hint == "look there"


# ---- gradients of one attempt on their way to the sums of all replicas

ONE = torch.ones(1)


class Holder:
    """A host that gives what is put into `parts`, once, and takes sums as soon as it `confirms`."""

    def __init__(self) -> None:
        self.parts: list[GradientPart] = []
        self.loaded: list[tuple[int, list[str]]] = []
        self.confirms = True

    def gradients(self) -> list[GradientPart]:
        parts, self.parts = self.parts, []
        return parts

    def load_state(self, stage: int, kind: LoadKind, number: int, part: StatePart) -> bool:
        assert kind == "gradients"
        if self.confirms:
            self.loaded.append((stage, list(part.tensors)))
        return self.confirms


class Group:
    """Sums are there for the names in `known`."""

    def __init__(self, *known: str) -> None:
        self.known = set(known)
        self.given: list[str] = []
        self.asked: list[tuple[str, ...]] = []
        self.ended = 0
        self.fails: Exception | None = None

    def give(self, found: GradientPart) -> None:
        if self.fails is not None:
            raise self.fails
        self.given += found.part.tensors

    def end(self) -> None:
        self.ended += 1

    def sums(self, names: Sequence[str]) -> Tensors | None:
        self.asked.append(tuple(names))
        return dict.fromkeys(names, ONE) if self.known >= set(names) else None


def part(stage: int, *names: str, number: int = 0, last: bool = True, **more: Any) -> GradientPart:
    return GradientPart(stage, number, StatePart(dict.fromkeys(names, ONE), last=last, **more))


class Case:
    """One host with all stages."""

    def __init__(self, trained: dict[int, list[str]], *known: str) -> None:
        self.host, self.group = Holder(), Group(*known)
        self.found: dict[int, Tensors] = {}
        hosts = dict.fromkeys(trained, self.host)
        self.summing = Summing(trained, hosts, self.group, self.found.__setitem__)

    def give(self, *parts: GradientPart) -> bool:
        self.host.parts += parts
        return self.summing.give()

    def load_all(self) -> list[tuple[int, list[str]]]:
        while self.summing.load():
            pass
        return self.host.loaded


def test_the_group_is_told_the_end_once_all_stages_have_given():
    case = Case({0: ["a"], 1: ["b"]})
    assert case.give(part(1, "b"))
    assert not case.give()
    assert case.group.ended == 0
    assert case.give(part(0, last=False))
    assert case.group.ended == 0
    assert case.give(part(0, "a", number=1))
    assert (case.group.given, case.group.ended) == (["b", "a"], 1)


def test_sums_of_a_stage_come_once_the_last_stage_first():
    case = Case({0: ["a"], 1: ["b", "c"], 2: []}, "a", "b", "c")
    case.give(part(0, "a"), part(1, "b", "c"), part(2))
    assert not case.summing.is_done
    assert case.load_all() == [(2, []), (1, ["b", "c"]), (0, ["a"])]
    assert case.found == {2: {}, 1: {"b": ONE, "c": ONE}, 0: {"a": ONE}}
    assert case.summing.is_done
    assert not case.summing.load()


def test_sums_of_a_ready_stage_do_not_wait_for_a_later_stage():
    case = Case({0: ["a"], 1: ["b"]}, "a")
    case.give(part(0, "a"), part(1, "b"))
    assert case.load_all() == [(0, ["a"])]
    assert not case.summing.is_done
    case.group.known.add("b")
    assert case.load_all() == [(0, ["a"]), (1, ["b"])]


def test_sums_are_taken_over_when_the_host_says_so(monkeypatch):
    monkeypatch.setattr(state_snapshot, "STATE_PART_BYTES", 4)
    case = Case({0: ["a", "b"]}, "a", "b")
    case.give(part(0, "a", "b"))
    assert case.summing.loading is None
    case.host.confirms = False
    for _ in range(2):
        assert not case.summing.load()  # it returns at once
        assert case.summing.loading is case.host
    assert case.group.asked == [("a", "b")]
    case.host.confirms = True
    assert case.summing.load()
    assert not case.summing.is_done
    assert case.load_all() == [(0, ["a"]), (0, ["b"])]
    assert case.summing.is_done


def test_sums_are_requested_after_all_gradients_of_a_stage():
    case = Case({0: ["a", "b"]}, "a", "b")
    case.summing.take(part(0, "a", last=False))
    case.give(part(0, last=False))
    assert not case.summing.load()
    assert case.group.asked == []
    case.give(part(0, "b"))
    assert case.group.given == ["a", "b"]
    assert case.load_all() == [(0, ["a", "b"])]


@pytest.mark.parametrize("ended", [ReplicasChanged("b is gone"), ProtocolError("not so")])
def test_an_error_within_a_task_is_raised_after_the_task(ended):
    case = Case({0: ["a", "b"]})
    case.group.fails = ended
    case.summing.take(part(0, "a", last=False))
    case.group.fails = None
    with pytest.raises(type(ended), match=str(ended)):
        case.summing.give()


def test_a_tied_head_is_summed_at_a_stage_that_does_not_train_it():
    case = Case({0: ["embed"], 1: []}, "embed", "head")
    case.give(part(0, "embed"), part(1, "head"))
    assert case.load_all()[0] == (1, ["head"])


def test_parameters_without_gradient_here_are_requested_too():
    """Another replica may have one."""
    case = Case({0: ["a", "b"]}, "a", "b")
    case.give(part(0, "b"))
    case.summing.load()
    assert case.group.asked == [("a", "b")]


def test_receive_buffers_are_given_back():
    released: list[int] = []
    case = Case({0: ["a"]})
    case.give(part(0, "a", release=lambda: released.append(1)))
    assert released == [1]
