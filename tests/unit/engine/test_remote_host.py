from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_framework.core.messages import (
    Abort,
    Aborted,
    BackwardDone,
    Body,
    Bye,
    Commit,
    Control,
    KeptStage,
    Loss,
    Message,
    Rewound,
    StageFigures,
    State,
    StateRequest,
)
from hetero_framework.engine import wire_forms
from hetero_framework.engine.hosts import HostEvent, LinkLost, StepResults
from hetero_framework.engine.remote_host import RemoteHost
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.stage_api import (
    GradientPart,
    GradientReport,
    HostReport,
    StatePart,
    StepInfo,
)
from hetero_framework.errors import ProtocolError

INFO = StepInfo(step=2, attempt=5, train=True, micro_batches=1, num_items=8)


class Links:
    """One link, which `renew` replaces by another."""

    def __init__(self) -> None:
        self.sent: list[Body] = []
        self.tensors = 0
        self.renew()

    def renew(self) -> None:
        self._generation = object()

    def expect(self, step: int, attempt: int) -> None: ...
    def plan(self, attempt: int, schedule: StepSchedule) -> None: ...
    def ping(self, worker_id: int | str) -> None: ...
    def generation(self, worker_id: int | str) -> object:
        return self._generation

    def send(self, worker_id: int | str, message: Message) -> None:
        self.sent.append(message.body)
        self.tensors += len(message.tensors)

    def receive(self, timeout_s: float) -> HostEvent | None:
        return None

    def is_quiet(self) -> bool:
        return True


def made(**options: Any) -> tuple[RemoteHost, Links]:
    links = Links()

    def deliver(message: Message, arrival: object) -> None:
        raise AssertionError("no tensor comes")

    trained = {0: ["z"], 1: ["a"], 2: ["y"], 3: ["a", "b"]}
    targets = dict(zip((1, 3), options.pop("targets", ({}, {})), strict=True))
    options = {"trained": trained, "states": [*trained.values()], **options}
    host = RemoteHost(7, targets, links, StepResults(), deliver, **options)
    host.begin(INFO, StepSchedule(in_flight_limits=(1,) * 4))
    links.sent.clear()
    return host, links


def part(stage: int, number: int, *, last: bool = False) -> Message:
    found = StatePart({"weights/a": torch.ones(2)}, last=last)
    return wire_forms.part_message(State, stage, "checkpoint", number, found)


def test_question_is_sent_once_over_each_link():
    host, links = made()
    assert not host.abort()
    assert not host.abort()
    assert links.sent == [Abort(2, 5)]
    links.renew()
    assert not host.abort()
    assert links.sent == [Abort(2, 5)] * 2
    host.receive(Message(Aborted(2, 5)), None)
    assert host.abort()


def test_state_is_the_part_that_was_asked_for_and_no_other():
    host, links = made()
    assert host.state(1, "checkpoint", 0, 2) is None
    host.receive(part(3, 0), None)  # of a question that was given up
    assert host.state(1, "checkpoint", 0, 2) is None
    host.receive(part(1, 0), None)
    found = host.state(1, "checkpoint", 0, 2)
    assert list(found.tensors) == ["weights/a"]
    assert links.sent == [StateRequest(1, "checkpoint", 0, 2)]


def test_snapshot_is_announced_until_the_worker_is_known_to_keep_it():
    host, links = made()
    host.snapshot(2)
    host.snapshot(2)
    assert links.sent == [StateRequest(1, "checkpoint", 0, 2)]
    links.renew()  # the request may have been lost
    host.snapshot(2)
    host.receive(part(1, 0), None)
    assert host.state(1, "checkpoint", 0, 2) is not None
    host.snapshot(2)
    assert links.sent == [StateRequest(1, "checkpoint", 0, 2)] * 2


@pytest.mark.parametrize("targets", [({}, {}), ({"head": "a"}, {}), ({"x": "b"}, {"y": "b"})])
def test_commit_carries_the_weights_tied_to_its_stages(targets):
    host, links = made(targets=targets)
    new = {"a": torch.ones(2), "b": torch.ones(2)}
    host.commit(Commit(2, 5, 1e-3, 1.0), new)
    names = tuple(sorted({source for own in targets for source in own.values()}))
    assert links.sent == [Commit(2, 5, 1e-3, 1.0, names)]
    assert links.tensors == len(names)
    assert not host.is_committed()


def test_gradients_are_taken_of_stages_that_are_tied_alone():
    given = GradientPart(1, 0, StatePart({"x": torch.ones(1)}, last=True))
    host, _ = made(targets=({"x": "b"}, {}))
    host.receive(wire_forms.gradients_message(INFO, given), None)
    assert [found.stage for found in host.gradients()] == [1]
    host, _ = made()
    with pytest.raises(ProtocolError, match="it sends gradients of stage 1, unasked"):
        host.receive(wire_forms.gradients_message(INFO, given), None)


def test_answer_to_another_request_is_dropped():
    host, _ = made()
    question = Message(Control("name", request=4))
    assert host.answer(question) is None
    host.receive(Message(Control("name", answers=3)), None)
    assert host.answer(question) is None
    host.receive(Message(Control("name", answers=4)), None)
    assert host.answer(question) is not None


def test_a_goodbye_counts_as_a_lost_link():
    host, _ = made()
    with pytest.raises(LinkLost, match="worker 7: it is over"):
        host.receive(Message(Bye("it is over")), None)


@pytest.mark.parametrize("kind", [lambda k: Loss(2, 5, k, 0.5), lambda k: BackwardDone(2, 5, k)])
def test_end_of_a_micro_batch_that_cannot_be_names_the_worker(kind):
    """Counted, it would end the step before all micro-batches are through."""
    host, _ = made()
    with pytest.raises(ProtocolError, match=r"^worker 7: the end of micro-batch 1 came; the step"):
        host.receive(Message(kind(1)), None)
    host.receive(Message(kind(0)), None)
    with pytest.raises(ProtocolError, match=r"^worker 7: the end of micro-batch 0 .* second time"):
        host.receive(Message(kind(0)), None)


def norms_of(*stages: int, nonfinite: int = 0, norms: Any = None) -> Message:
    figures = StageFigures(0.0, 0.0, 0, 0, 0, 0.0, 0.0)
    sizes = {1: 1, 2: 1, 3: 2}
    reports = {
        stage: GradientReport(torch.zeros(sizes[stage]) if norms is None else norms, (nonfinite,))
        for stage in stages
    }
    return wire_forms.gradient_norms_message(
        INFO, HostReport(reports, dict.fromkeys(stages, figures))
    )


def test_norms_of_the_own_stages_are_taken():
    host, _ = made()
    host.receive(norms_of(1, 3), None)
    report = host.report()
    assert list(report.gradients) == [1, 3]


def without_a_tensor(message: Message) -> Message:
    return Message(message.body, message.tensors[:1])


def gradients_of(*names: str, stage: int = 1) -> Message:
    part = StatePart({name: torch.ones(1) for name in names})
    return wire_forms.gradients_message(INFO, GradientPart(stage, 0, part))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([norms_of(1, 2)], r"it reports stages \[1, 2\]; it holds \[1, 3\]"),
        ([norms_of(1)], r"it reports stages \[1\]"),
        ([without_a_tensor(norms_of(1, 3))], "GRADIENT_NORMS: 2 tensors expected, got 1"),
        ([norms_of(1, 3, nonfinite=1)], "micro-batches that stage 1 lacks"),
        ([norms_of(1, 3, norms=torch.zeros(2))], "norms or micro-batches that stage 1 lacks"),
        ([norms_of(1, 3, norms=torch.zeros(1).double())], "that stage 1 lacks"),
        ([norms_of(1, 3, norms=torch.zeros(()))], "that stage 1 lacks"),
        ([gradients_of("b")], "stage 1 trains no 'b'"),
        ([gradients_of("z", stage=3)], "stage 3 trains no 'z'"),
        ([gradients_of("a"), gradients_of("x", "a")], "stage 1 came a second time"),
    ],
)
def test_gradients_and_norms_that_are_not_its_own_name_the_worker(told, said):
    host, _ = made(targets=({"x": "b"}, {}))
    *before, last = told
    for message in before:
        host.receive(message, None)
    with pytest.raises(ProtocolError, match=f"^worker 7: .*{said}"):
        host.receive(last, None)


@pytest.mark.parametrize("kind", ["checkpoint", "weights"])
def test_a_state_of_other_parameters_names_the_worker(kind):
    host, _ = made()
    asked = (1, kind, 0, 2, ("a",) if kind == "weights" else ())
    for name, right in {"a": True, "b": False}.items():
        assert host.state(*asked) is None
        entry = name if kind == "weights" else f"optimizer/exp_avg/{name}"
        part = StatePart({entry: torch.ones(1)})
        host.receive(wire_forms.part_message(State, 1, kind, 0, part), None)
        if right:
            assert host.state(*asked) is not None
            continue
        with pytest.raises(ProtocolError, match="worker 7 gives a state of 'b' for stage 1"):
            host.state(*asked)


def test_a_kept_state_of_another_workers_stage_is_refused():
    """Else that stage would not be sent the state to which the run goes back."""
    host, _ = made()
    assert host.rewind(2) is None
    host.receive(Message(Rewound((KeptStage(1, "0f"), KeptStage(0, "1e")))), None)
    with pytest.raises(ProtocolError, match="worker 7 has kept stages that it does not hold"):
        host.rewind(2)
