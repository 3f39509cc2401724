"""`RemoteHost`: a worker's stages, with the calls of a `StageHost`; each becomes a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero_framework.core import messages as m
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Body, LoadKind, Message, StateKind
from hetero_framework.core.spans import Span
from hetero_framework.engine import stage_api as api
from hetero_framework.engine import wire_forms
from hetero_framework.engine.hosts import BatchInputs, LinkLost, Links, StepResults
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.errors import ProtocolError
from hetero_framework.log import one_lines


@dataclass(frozen=True)
class _PendingRequest:
    """A question, the link that it was sent over, and the test for its answer."""

    message: Message
    link: object
    is_answer: Callable[[Any], bool]


class RemoteHost:
    """One worker's stages. Each question is sent once over each link. No method waits for the
    worker: it answers None or False until the answer has come, and is called again. Methods raise
    LinkLost when the link is gone."""

    def __init__(
        self,
        worker: WorkerId,
        targets: Mapping[int, Mapping[str, str]],
        links: Links,
        results: StepResults,
        deliver: Callable[[Message, object], None],
        *,
        trained: Mapping[int, Sequence[str]],
        states: Sequence[Sequence[str]],
    ) -> None:
        """`targets` has the `Ties.targets` of each stage of this worker, and `deliver` receives the
        worker's boundary tensors for local stages. For each stage of the plan, `trained` has the
        names of its parameters, and `states` also the names of all else that training changes."""
        self.id = worker
        self.indexes = list(targets)
        self._links = links
        self._results = results
        self._deliver = deliver
        self._targets = targets
        self._trained, self._states = trained, states
        self._info = api.StepInfo(step=0, attempt=0, train=True, micro_batches=0, num_items=1)
        self._norms: api.HostReport | None = None
        self._gradients: list[api.GradientPart] = []
        self._given: set[tuple[int, str]] = set()  # (stage, name) of gradients that have come
        self._questions: dict[type[Body], _PendingRequest] = {}
        self._answers: dict[type[Body], Message] = {}
        self._commit: Message | None = None
        self._commit_step = -1
        self._spans: list[Span] = []
        self._kept: tuple[int | None] | None = None  # (step,) of the state that it is known to keep

    # -- a step ---------------------------------------------------------------------------------

    def begin(
        self, info: api.StepInfo, schedule: StepSchedule, take: api.TakeEarly | None = None
    ) -> None:
        """Begin a step. The worker sends early gradients unasked; `gradients` returns them."""
        self._info, self._norms, self._given = info, None, set()
        self._drop_gradients()
        self._links.ping(self.id)
        self._links.send(self.id, wire_forms.step_message(info, schedule))

    def feed(self, stage: int, micro_batch: int, names: Sequence[str], batch: BatchInputs) -> None:
        needed = {name: batch.packed[name] for name in names}
        self._links.send(self.id, wire_forms.inputs_message(self._info, stage, micro_batch, needed))

    def gradients(self) -> list[api.GradientPart]:
        """Gradients that have come: workers send them unasked, some while a stage computes."""
        parts, self._gradients = self._gradients, []
        return parts

    def _drop_gradients(self) -> None:
        for given in self.gradients():
            given.part.release()

    def report(self) -> api.HostReport | None:
        """The report, if it has come: workers send it unasked when they are done."""
        report, self._norms = self._norms, None
        return report

    def _report_of(self, message: Message) -> api.HostReport:
        report = wire_forms.host_report(message)
        if sorted(report.gradients) != sorted(self.indexes):
            reported, held = sorted(report.gradients), sorted(self.indexes)
            raise ProtocolError(f"it reports stages {reported}; it holds {held}")
        for index, found in report.gradients.items():
            fits = found.norms.shape == (len(self._trained[index]),)
            fits = fits and found.norms.dtype == torch.float32
            if not fits or max(found.nonfinite, default=-1) >= self._info.micro_batches:
                raise ProtocolError(f"it reports norms or micro-batches that stage {index} lacks")
        return report

    def commit(self, order: m.Commit, tied_weights: api.Tensors) -> None:
        """Have the worker commit and take over `tied_weights`, by source."""
        wanted = {source for targets in self._targets.values() for source in targets.values()}
        weights = {name: weight for name, weight in tied_weights.items() if name in wanted}
        self._commit, self._commit_step = wire_forms.commit_message(order, weights), order.step
        self._links.send(self.id, self._commit)

    def is_committed(self) -> bool:
        """Whether the last `commit` is known to have been done."""
        return self._commit is None

    def repeat_commit(self) -> None:
        """Send the unconfirmed order again. A worker that has committed already only confirms."""
        if self._commit is not None:
            self._links.send(self.id, self._commit)

    def forget_commit(self) -> None:
        """Forget an unconfirmed order: the run goes back to an earlier state."""
        self._commit, self._commit_step = None, -1

    def abort(self) -> bool:
        """Forget the attempt. Once this is True no message of it is on its way."""
        question = Message(m.Abort(self._info.step, self._info.attempt))
        if self._ask(question, m.Aborted, lambda body: True) is None:
            return False
        self._forget_questions()  # all of them have been answered by now
        return True

    def _forget_questions(self) -> None:
        for message in self._answers.values():
            message.release()
        self._answers.clear()
        self._questions.clear()
        self._norms = None
        self._drop_gradients()

    # -- state ----------------------------------------------------------------------------------

    def snapshot(self, step: int | None) -> None:
        """Ask for one part, which has the worker keep all its stages' state. Called again before
        the next step, since the request may be lost with its link."""
        if self._kept != (step,):
            self._ask_state(self.indexes[0], "checkpoint", 0, step)

    def state(
        self, stage: int, kind: StateKind, number: int, step: int | None, names: Sequence[str] = ()
    ) -> api.StatePart | None:
        message = self._ask_state(stage, kind, number, step, names)
        if message is None:
            return None
        part = wire_forms.state_part(message)
        given = {*part.tensors, *part.values}
        if kind == "checkpoint":
            given, names = set(map(_parameter, given)), self._states[stage]
        if kind != "export" and (unknown := given.difference(names)):
            text = f"worker {self.id} gives a state of {min(unknown)!r} for stage {stage}"
            raise ProtocolError(text)
        return part

    def _ask_state(
        self, stage: int, kind: StateKind, number: int, step: int | None, names: Sequence[str] = ()
    ) -> Message | None:
        question = Message(m.StateRequest(stage, kind, number, step, tuple(names)))
        asked = stage, kind, number
        reply = self._ask(question, m.State, lambda b: (b.stage, b.kind, b.part) == asked)
        if reply is not None and kind == "checkpoint":
            self._kept = (step,)
        return reply

    def rewind(self, step: int | None) -> api.RewoundState | None:
        message = self._ask(Message(m.Rewind(step)), m.Rewound, lambda body: True)
        if message is None:
            return None
        self._kept = None
        kept = {one.index: one.digest for one in message.expect(m.Rewound).stages}
        if not kept.keys() <= {*self.indexes}:
            raise ProtocolError(f"worker {self.id} has kept stages that it does not hold")
        return api.RewoundState(kept)

    def renew(self) -> None:
        """Forget what is known of a former process: a new one has loaded the stages."""
        self._forget_questions()
        self._kept = None
        self.forget_commit()

    def load_state(self, stage: int, kind: LoadKind, number: int, part: api.StatePart) -> bool:
        asked = stage, number
        if kind == "weights":
            self._kept = None  # its kept state no longer equals the state of its stages
        question = wire_forms.part_message(m.LoadState, stage, kind, number, part)
        return self._ask(question, m.StateLoaded, lambda b: (b.stage, b.part) == asked) is not None

    def answer(self, question: Message) -> Message | None:
        """The answer to a CONTROL request; None until it has come. The caller releases it."""
        request = question.expect(m.Control).request
        return self._ask(question, m.Control, lambda body: body.answers == request)

    def take_spans(self) -> list[Span]:
        taken, self._spans = self._spans, []
        return taken

    def receive(self, message: Message, arrival: object) -> None:
        """Take a message of the worker, with the result of `unpack`. Raises LinkLost for BYE,
        ProtocolError for an impossible message."""
        try:
            self._receive(message, arrival)
        except ProtocolError as error:
            raise ProtocolError(f"worker {self.id}: {error.message}", hint=error.hint) from None

    def _receive(self, message: Message, arrival: object) -> None:
        body = message.body
        if isinstance(body, m.Committed):
            if body.step == self._commit_step and self._commit is not None:
                self._commit = None
                self._spans += one_lines(body.spans)
        elif isinstance(body, m.BoundaryTensor):
            self._deliver(message, arrival)
        elif isinstance(body, m.OfStep) and not self._is_current(body):
            message.release()
        elif isinstance(body, m.Loss):
            self._results.outcome(self._info, body.micro_batch, wire_forms.outcome(message))
            message.release()
        elif isinstance(body, m.BackwardDone):
            self._results.finished(self._info, body.micro_batch)
        elif isinstance(body, m.GradientNorms):
            self._norms = self._report_of(message)
        elif isinstance(body, m.Gradients):
            self._take_gradients(message, body)
        elif isinstance(body, m.Bye):
            raise LinkLost(self.id, body.reason)
        else:
            question = self._questions.get(type(body))
            if question is not None and question.is_answer(body):
                self._answers[type(body)] = message
            else:
                message.release()

    def _take_gradients(self, message: Message, body: m.Gradients) -> None:
        is_asked = self._info.summed or any(self._targets.values())
        if not is_asked or body.stage not in self.indexes:
            raise ProtocolError(f"it sends gradients of stage {body.stage}, unasked")
        known = self._trained[body.stage], self._targets[body.stage]
        if unknown := set(body.names).difference(*known):
            raise ProtocolError(f"stage {body.stage} trains no {min(unknown)!r}")
        given = {(body.stage, name) for name in body.names}
        if not given.isdisjoint(self._given):
            raise ProtocolError(f"gradients of stage {body.stage} came a second time")
        self._given |= given
        self._gradients.append(wire_forms.gradient_part(message))

    def _ask(
        self, question: Message, answer: type[Body], is_answer: Callable[[Any], bool]
    ) -> Message | None:
        """Send a question once over each link. Returns its answer; None until it has come."""
        link = self._links.generation(self.id)
        known = self._questions.get(answer)
        if known is None or known.link is not link or known.message.body != question.body:
            if (stale := self._answers.pop(answer, None)) is not None:
                stale.release()
            self._questions[answer] = _PendingRequest(question, link, is_answer)
            self._links.send(self.id, question)
        reply = self._answers.pop(answer, None)
        if reply is not None:
            del self._questions[answer]
        return reply

    def _is_current(self, body: m.OfStep) -> bool:
        return (body.step, body.attempt) == (self._info.step, self._info.attempt)


def _parameter(entry: str) -> str:
    """The parameter of "weights/<parameter>" or "optimizer/<key>/<parameter>"."""
    kind, _, rest = entry.partition("/")
    return rest if kind == "weights" else rest.partition("/")[2]
