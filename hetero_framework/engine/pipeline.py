"""The engine: drives micro-batches through the stages of all hosts.

A step is `begin`, `run`, `report_gradients`, `commit`. One thread computes and decides here; what a
host does elsewhere arrives over `Links`.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from hetero_framework.config import StageSpec
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Commit, LoadKind, Message, StageFigures, StateKind
from hetero_framework.core.spans import Span
from hetero_framework.engine import stage_api as api
from hetero_framework.engine.hosts import (
    BatchInputs,
    LinkLost,
    Links,
    ReplicasChanged,
    Stalled,
    StepResults,
)
from hetero_framework.engine.remote_host import RemoteHost
from hetero_framework.engine.schedule.readiness import Admission
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.stage_host import StageHost
from hetero_framework.engine.state_snapshot import in_parts
from hetero_framework.engine.ties import TiedGradients, Ties
from hetero_framework.errors import NumericError, ProtocolError

if TYPE_CHECKING:
    from hetero_framework.models.cut.objective import Objective  # imports transformers

_POLL_S = 0.5
_ANSWER_S = 0.1
_SUMS_POLL_S = 0.005
_KNOWN_STEPS = 3
_NO_ATTEMPT = -1
_PATIENCE = 10.0
"""A step hangs if nothing moves for this many times the median step."""
_LEAST_PATIENCE_S = 60.0
"""No step hangs before this many seconds."""
T = TypeVar("T")
Host = StageHost | RemoteHost
Part = tuple[int, int, api.StatePart]  # stage, part number, part


@dataclass(frozen=True)
class StageStatistics(StageFigures):
    """One stage in one step: its figures, and the seconds in which it did not compute."""

    wait_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def step_s(self) -> float:
        """Seconds from the step's begin to the last stage's report."""
        return self.busy_s + self.wait_s


@dataclass(frozen=True)
class HeldState:
    """The state of one stage after some commit, in memory here."""

    parts: Sequence[api.StatePart]
    digest: str


class Texts(Protocol):
    """Texts that are continued by tokens: `next` gives a micro-batch, `take` gets its outcome."""

    @property
    def is_done(self) -> bool: ...
    def next(self) -> api.Tensors | None: ...
    def take(self, outcome: api.Outcome) -> None: ...


class Pipeline:
    """All stages of the model as one object that can run a step."""

    def __init__(
        self,
        stages: Sequence[StageSpec],
        here: StageHost,
        remotes: Sequence[RemoteHost],
        links: Links,
        results: StepResults,
        *,
        objective: Objective,
        step_timeout_s: float,
        trained: Mapping[int, Sequence[str]],
        ties: Ties,
        has_stages: Callable[[WorkerId], bool] = lambda worker: True,
    ) -> None:
        """All hosts write into `results`; the one `here` has the first stage. `trained` has the
        parameter names of each stage. `has_stages` tells whether a worker's process has its stages:
        without them it is not asked to forget a step."""
        self._stages = list(stages)
        self._here, self._remotes = here, {host.id: host for host in remotes}
        self._hosts: list[Host] = [here, *remotes]
        self._host_of = {k: host for host in self._hosts for k in host.indexes}
        self._links = links
        self._results = results
        self._objective = objective
        self._step_timeout_s = step_timeout_s
        self._trained = trained
        self._ties = ties
        self._tied = TiedGradients(ties)
        self._untold: set[int] = set()  # stages whose new weights others have not taken over yet
        self._summing: Summing | None = None
        self._max_in_flight = 1
        self._info = api.StepInfo(step=0, attempt=0, train=True, micro_batches=0, num_items=1)
        self._has_stages = has_stages
        self._step_s: deque[float] = deque(maxlen=20)
        self._committed: int | None = None
        self._snapshot: tuple[_StateReader, Callable[[int, int, api.StatePart], None]] | None = None
        # From the last reports: round-trip seconds by pairs of workers that have a link, and the
        # bytes that each worker has sent straight to other workers so far.
        self.round_trips: dict[frozenset[WorkerId], float] = {}
        self.direct_bytes: dict[WorkerId, int] = {}
        self._last_progress = time.monotonic()
        self._began = time.perf_counter()
        self.check: Callable[[], None] = lambda: None
        """Called between two tasks and in waits. An error that it raises ends the step or wait."""

    @property
    def idle_s(self) -> float:
        """Seconds since anything moved, as of the present wait."""
        return time.monotonic() - self._last_progress

    def close(self) -> None:
        """End the threads of the host that is here."""
        self._here.close()

    # -- one step, in order ---------------------------------------------------------------------

    def begin(
        self, info: api.StepInfo, schedule: StepSchedule, group: api.GradientSum | None = None
    ) -> None:
        """Announce a step to every host. The gradients of a summed step go to `group`."""
        self._share_weights(self._untold)
        self._info, self._tied = info, TiedGradients(self._ties)
        self._summing = None
        if group is not None:
            take = partial(self._tied.take, last=True)
            self._summing = Summing(self._trained, self._host_of, group, take)
        self._max_in_flight = schedule.max_in_flight
        self._results.begin()
        self._began = time.perf_counter()
        self._links.expect(info.step, info.attempt)
        for host in self._hosts:
            if self._snapshot is not None:  # begun after the last step or before
                host.snapshot(self._snapshot[0].step)
            is_here = host is self._here
            part = schedule.for_process(host.indexes, relays=is_here)
            if is_here:
                self._links.plan(info.attempt, part)
            host.begin(info, part, self._summing)

    @property
    def outcomes(self) -> list[api.Outcome]:
        """The outcomes of the micro-batches of the last `run`, in order."""
        return [outcome for _, outcome in sorted(self._results.outcomes.items())]

    @contextmanager
    def judging_outcomes(self) -> Iterator[None]:
        """Put the last stage's process in front of errors within: they are about its outcomes."""
        try:
            yield
        except (NumericError, ProtocolError) as error:
            who = _name(self._host_of[self._stages[-1].index])
            raise type(error)(f"{who}: {error.message}", hint=error.hint) from error

    def run(self, batches: Sequence[api.Tensors]) -> list[float]:
        """Drive all micro-batches through the stages; return their losses in order. Raises LinkLost
        or DirectLost when a link breaks, Stalled when nothing moves any more."""
        count = len(batches)
        admission = Admission(count, self._max_in_flight)
        here = self._here
        through, outcomes = self._results.through, self._results.outcomes

        def admit(micro_batch: int) -> None:
            self._feed(micro_batch, batches[micro_batch])
            admission.admit()

        self._last_progress = time.monotonic()
        while len(through) < count or len(outcomes) < count:
            while not self._links.is_quiet() and self._receive(0):
                self._last_progress = time.monotonic()
            entering = admission.next(len(through))
            # One at a time, so that the first forward need not wait for the inputs of the others.
            if entering is not None and not here.has_inputs(0):
                admit(entering)
            elif here.run_next():
                self.check()
                self._last_progress = time.monotonic()
                self._give_gradients()
                self._read_snapshot()
            elif entering is not None:
                admit(entering)
            elif not (self._give_gradients() or self._load_sums() or self._read_snapshot()):
                left = ", ".join(str(k) for k in range(count) if k not in through)
                self._wait(partial("losses of micro-batches {}".format, left))
        return self._results.losses()

    def decode(self, texts: Texts) -> None:
        """Continue texts, in a step with `decoding`. Raises as `run`."""
        fed = taken = 0
        self._last_progress = time.monotonic()
        while not texts.is_done:
            self.check()
            while not self._links.is_quiet() and self._receive(0):
                self._last_progress = time.monotonic()
            while (outcome := self._results.outcomes.get(taken)) is not None:
                with self.judging_outcomes():
                    texts.take(outcome)
                taken += 1
            if (batch := texts.next()) is not None:
                self._feed(fed, batch)
                fed += 1
            elif self._here.run_next():
                self._last_progress = time.monotonic()
            elif not texts.is_done and taken not in self._results.outcomes:
                self._wait(partial("the token of micro-batch {}".format, taken))

    def _give_gradients(self) -> bool:
        """Hand on the gradients of stages that are done; return whether there were any."""
        if self._summing is not None:
            return self._summing.give()
        if not self._ties.targets:
            return False
        parts = [part for host in self._hosts for part in host.gradients()]
        for given in parts:
            self._tied.take(given.stage, given.part.tensors, last=given.part.last)
            given.part.release()
        return bool(parts)

    def _load_sums(self) -> bool:
        """Have stages that are done take over the sums of all replicas that have come. Returns
        whether a stage took any."""
        return self._summing is not None and self._summing.load()

    def sum_gradients(self) -> None:
        """In a summed step, after `run`: wait until every stage has the sums. Raises the errors of
        the group, LinkLost and Stalled."""
        if self._summing is None:
            return
        self._last_progress = time.monotonic()
        while not self._summing.is_done:
            if self._give_gradients() or self._load_sums():
                self._last_progress = time.monotonic()
            elif (host := self._summing.loading) is not None:
                self._wait(partial("{} to take over sums of gradients".format, _name(host)))
            else:  # waits for other replicas, which cause no event here
                self.check()
                if self._receive(_SUMS_POLL_S):
                    self._last_progress = time.monotonic()

    def _sum_tied(self) -> None:
        """Give the stages that hold tied weights the sums of the other places' gradients."""

        def are_here() -> bool:
            self._give_gradients()
            return not self._tied.waiting

        if self._ties.targets:
            self.until(are_here, "the gradients of tied weights")
        for stage in self._ties.holders:
            sums = self._tied.sums(stage).items()
            parts = in_parts((name, total, {}) for name, total in sums)
            self.load_state(stage, "tied gradients", parts)

    def report_gradients(self) -> tuple[list[api.GradientReport], dict[int, StageStatistics]]:
        """Sum tied gradients; return every stage's gradient norms, in stage order, and times."""
        gradients: dict[int, api.GradientReport] = {}
        figures: dict[int, StageFigures] = {}
        self._sum_tied()
        for host in reversed(self._hosts):
            report = self.until(host.report, f"gradient norms of {_name(host)}")
            gradients.update(report.gradients)
            figures.update(report.figures)
            self.direct_bytes[host.id] = report.direct_bytes
            for other, seconds in report.round_trips.items():
                self.round_trips[frozenset((host.id, other))] = seconds
        seconds = time.perf_counter() - self._began
        self._step_s.append(seconds)
        times: dict[int, StageStatistics] = {}
        for k, f in sorted(figures.items()):
            wait_s = max(0.0, seconds - f.forward_s - f.backward_s)
            times[k] = StageStatistics(**asdict(f), wait_s=wait_s)
        return [gradients[spec.index] for spec in self._stages], times

    def commit(
        self,
        learning_rate: float,
        grad_scale: float,
        recover: Callable[[LinkLost], None],
        adam: api.Adam | None = None,
    ) -> None:
        """Have all hosts step their optimizers, without waiting for workers. From here on the step
        is decided. `recover` mends a link over which a worker cannot be told, and calls
        `repeat_commit`."""
        info = self._info
        order = Commit(info.step, info.attempt, learning_rate, grad_scale, adam=adam)
        weights: api.Tensors = {}
        new = self._here.commit(order)
        # New weights of this process go out with the order, unless they are too large for a frame.
        if next(in_parts((name, weight, {}) for name, weight in new.items())).last:
            weights = new
        for host in self._remotes.values():
            try:
                host.commit(order, weights)
            except LinkLost as lost:
                recover(lost)
        self._committed = info.step
        told = [self._here] if weights else []
        self._untold = {k for k in self._ties.holders if self._host_of[k] not in told}

    def repeat_commit(self, worker: WorkerId) -> None:
        """Send a worker's unconfirmed order again, over a new link."""
        if worker in self._remotes:
            self._remotes[worker].repeat_commit()

    def drain_commits(self) -> None:
        """Wait until every worker has confirmed the last commit."""
        self._last_progress = time.monotonic()
        while waiting := [one for one in self._remotes.values() if not one.is_committed()]:
            self._wait(lambda: f"the commit of {', '.join(map(_name, waiting))}")

    def forget_commits(self) -> None:
        """Forget commits that workers have not confirmed, since the run goes back."""
        for host in self._remotes.values():
            host.forget_commit()

    def renew(self, worker: WorkerId) -> None:
        """Note that a worker's stages have been loaded again, in a new process."""
        self._step_s.clear()  # its first step may take longer
        self._remotes[worker].renew()

    def abort(self) -> None:
        """Forget the step everywhere; weights stay. When it returns, nothing sent before is on its
        way. After LinkLost it may be called again."""
        self._links.expect(self._info.step, _NO_ATTEMPT)
        self._here.abort()
        others = [host for host in self._remotes.values() if self._has_stages(host.id)]
        waiting = [host for host in others if not host.abort()]  # all at once
        for host in waiting:
            self.until(host.abort, f"{_name(host)} to forget the step")

    def take_spans(self) -> dict[WorkerId, list[Span]]:
        """Spans recorded since the last call, by process; times are by that process's clock."""
        taken = {host.id: host.take_spans() for host in self._hosts}
        return {host: spans for host, spans in taken.items() if spans or host == "local"}

    # -- state ----------------------------------------------------------------------------------

    def export(self) -> Iterator[Part]:
        """Yield (stage, part number, part) of the finished artefact; one part is in memory."""
        reader = _StateReader("export", self._committed, self._host_of)
        while not reader.is_done:
            stage, number, part = self.until(reader.next_part, f"the state of {_name(reader.host)}")
            yield stage, number, part
            part.release()

    def weights(self, names: Iterable[str]) -> api.Tensors:
        """These trained parameters as they are now, on the CPU."""
        wanted, weights = set(names), {}
        for stage, trained in self._trained.items():
            chosen, host = [name for name in trained if name in wanted], self._host_of[stage]
            number, done = 0, not chosen
            while not done:
                ask = partial(host.state, stage, "weights", number, None, chosen)
                part = self.until(ask, f"the weights of {_name(host)}")
                weights.update({name: tensor.clone() for name, tensor in part.tensors.items()})
                number, done = number + 1, part.last
                part.release()
            if absent := [name for name in chosen if name not in weights]:
                raise ProtocolError(f"{_name(host)} does not give the weights of {absent[0]!r}")
        return weights

    def load_weights(self, weights: api.Tensors) -> None:
        """Give some trained parameters other values; their optimizer goes on as it is. Drops an
        unfinished snapshot."""
        self._snapshot = None
        for stage, trained in self._trained.items():
            names = [name for name in trained if name in weights]
            if names:
                parts = in_parts((name, weights[name], {}) for name in names)
                self.load_state(stage, "weights", parts)
        self.share_tied_weights()

    def snapshot(self, take: Callable[[int, int, api.StatePart], None]) -> None:
        """Call `take(stage, number, part)` with every part of the state after the last commit while
        the next steps run: in this thread, at most one part between two tasks. A part's tensors are
        valid during the call. Replaces an unfinished snapshot. A snapshot whose `take` raises is
        forgotten."""
        for host in self._hosts:
            host.snapshot(self._committed)
        self._snapshot = _StateReader("checkpoint", self._committed, self._host_of), take

    @property
    def is_copied(self) -> bool:
        """Whether a snapshot has parts that `take` has not had."""
        return self._snapshot is not None

    def finish_snapshot(self) -> None:
        """Wait until `take` has had every part. After LinkLost begin with `snapshot` again."""
        while self._snapshot is not None:
            reader, _ = self._snapshot
            self.until(self._read_snapshot, f"the state of {_name(reader.host)}")

    def _read_snapshot(self) -> bool:
        """Hand the snapshot's next part to `take`, if it has come; return whether it had."""
        if self._snapshot is None:
            return False
        snapshot = reader, take = self._snapshot
        if (entry := reader.next_part()) is None:
            return False
        self._snapshot = None
        take(*entry)
        entry[2].release()
        if not reader.is_done:
            self._snapshot = snapshot
        return True

    @property
    def committed(self) -> int | None:
        """The step of the last commit, which identifies a state; None before the first."""
        return self._committed

    def rewind(self, step: int | None, state: Mapping[int, HeldState]) -> list[int]:
        """Go back to the state after the commit of `step`, held in `state` by stage. A process that
        has kept the same state uses its own copy. Returns the stages that were sent a state."""
        self._snapshot, self._committed = None, step
        digests = dict(self._here.rewind(step).digests)
        answers = [(host, host.rewind(step)) for host in self._remotes.values()]  # all at once
        for host, answer in answers:
            if answer is None:
                answer = self.until(partial(host.rewind, step), f"{_name(host)} to go back")
            digests.update(answer.digests)
        sent = [k for k, held in state.items() if digests.get(k) != held.digest]
        for stage in sent:
            self.load_state(stage, "checkpoint", state[stage].parts)
        self.share_tied_weights()
        return sent

    def load_state(self, stage: int, kind: LoadKind, parts: Iterable[api.StatePart]) -> None:
        """Have a stage take over `parts` of this kind of state (LOAD_STATE)."""
        host = self._host_of[stage]
        for number, part in enumerate(parts):
            ask = partial(host.load_state, stage, kind, number, part)
            self.until(ask, f"{_name(host)} to take over its state")

    def share_tied_weights(self) -> None:
        """Give all targets the weight of their source, after loading."""
        self._share_weights(set(self._ties.holders))

    def _share_weights(self, holders: set[int]) -> None:
        """Send tied weights of these stages to their targets. May be repeated after LinkLost."""
        self._untold = holders
        for stage in sorted(holders):
            is_here = self._host_of[stage] is self._here
            sources = self._ties.sources(stage)
            weights = self._here.tied_weights() if is_here else self.weights(sources)
            for follower, wanted in self._ties.followers(weights).items():
                parts = in_parts((name, weights[name], {}) for name in wanted)
                self.load_state(follower, "tied weights", parts)
        self._untold = set()

    def until(self, ask: Callable[[], T | None], waiting_for: str) -> T:
        """Call `ask` until it answers (not None or False), and handle messages meanwhile."""
        self._last_progress = time.monotonic()
        while not (answer := ask()):
            self._wait(lambda: waiting_for)
        return answer

    def _feed(self, micro_batch: int, tensors: api.Tensors) -> None:
        """Let a micro-batch in: each stage gets the inputs that it needs ahead of activations."""
        batch = BatchInputs(tensors)
        needed = [(s.index, self._objective.stage_inputs(s, tensors)) for s in self._stages]
        for stage, names in needed:
            self._host_of[stage].feed(stage, micro_batch, names, batch)

    def _receive(self, timeout_s: float) -> bool:
        """Hand the next event to its host; False when none came in time. Events of a worker without
        stages are dropped."""
        if (event := self._links.receive(timeout_s)) is None:
            return False
        assert event.message is not None
        host = self._remotes.get(event.worker)
        if host is None:
            event.message.release()
        else:
            host.receive(event.message, event.arrival)
        return True

    def _wait(self, waiting_for: Callable[[], str]) -> None:
        """Wait for the next event. Raises Stalled when nothing has moved for `_stall_s`."""
        self.check()
        if self._receive(self._here.waits_s or _POLL_S):
            self._last_progress = time.monotonic()
        elif time.monotonic() - self._last_progress > self._stall_s:
            raise Stalled(
                f"nothing has moved for {self._stall_s:.0f} s in step {self._info.step + 1}; "
                f"waiting for {waiting_for()}"
            )

    @property
    def _stall_s(self) -> float:
        """Seconds without movement that are a stall: `step_timeout_s`, less after fast steps."""
        if len(self._step_s) < _KNOWN_STEPS:
            return self._step_timeout_s
        longest = _PATIENCE * statistics.median(self._step_s)
        return min(self._step_timeout_s, max(_LEAST_PATIENCE_S, longest))

    def answer(self, worker: WorkerId, question: Message) -> Message | None:
        """See `RemoteHost.answer`."""
        return self._remotes[worker].answer(question)

    def answering(self, questions: Mapping[WorkerId, Message], timeout_s: float) -> set[WorkerId]:
        """The workers whose main thread answers a CONTROL request in time. Raises LinkLost."""
        deadline, left = time.monotonic() + timeout_s, dict(questions)
        while left and time.monotonic() < deadline:
            for worker in list(left):
                if (answer := self.answer(worker, left[worker])) is not None:
                    answer.release()
                    del left[worker]
            self._receive(_ANSWER_S)
        return set(questions) - set(left)


class Summing:
    """Gives the gradients of one attempt to the group, and the sums to the stages. Both go on while
    other stages compute: nothing here waits. Raises the group's errors, and LinkLost.

    `trained` has the parameter names of each stage; names of tied heads come with the gradients.
    `hosts` has the host of each stage. `on_sums(stage, sums)` gets the sums of each stage once.
    """

    def __init__(
        self,
        trained: Mapping[int, Sequence[str]],
        hosts: Mapping[int, Host],
        group: api.GradientSum,
        on_sums: Callable[[int, api.Tensors], None],
    ) -> None:
        self._names = {stage: dict.fromkeys(names) for stage, names in trained.items()}
        self._hosts = hosts
        self._group = group
        self._on_sums = on_sums
        self._given: set[int] = set()
        self._left = sorted(trained, reverse=True)  # the last stage is the first to be done
        self._loading: deque[Part] = deque()
        self._ended: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether all stages have their sums."""
        return not (self._left or self._loading)

    @property
    def loading(self) -> Host | None:
        """The host that is to take over sums now; None if none is."""
        return self._hosts[self._loading[0][0]] if self._loading else None

    def has_room(self) -> bool:
        """See `TakeEarly`. Always True: links between islands carry nothing else meanwhile."""
        return True

    def take(self, part: api.GradientPart) -> None:
        """Take gradients of a stage that still computes. May be called in another thread. An error
        that ends the step is raised by `give`, not in the middle of a task."""
        try:
            self._group.give(part)
        except (ReplicasChanged, ProtocolError) as ended:
            self._ended = ended

    def give(self) -> bool:
        """Hand the final gradients of stages to the group; return whether there were any."""
        if self._ended is not None:
            raise self._ended
        hosts = dict.fromkeys(self._hosts.values())
        parts = [part for host in hosts for part in host.gradients()]
        for part in parts:
            self._group.give(part)
            self._names[part.stage].update(dict.fromkeys(part.part.tensors))
            if part.part.last:
                self._given.add(part.stage)
            part.part.release()
        if parts and len(self._given) == len(self._names):
            self._group.end()
        return bool(parts)

    def load(self) -> bool:
        """Have a stage take over the next part of its sums; return whether it took one."""
        if not self._loading and not self._next_sums():
            return False
        stage, number, part = self._loading[0]
        taken = self._hosts[stage].load_state(stage, "gradients", number, part)
        if taken:
            self._loading.popleft()
        return taken

    def _next_sums(self) -> bool:
        """Queue the sums of one more stage for loading, if they have come."""
        for stage in self._left:
            sums = self._group.sums(tuple(self._names[stage])) if stage in self._given else None
            if sums is not None:
                self._left.remove(stage)
                self._on_sums(stage, sums)
                parts = in_parts((name, total, {}) for name, total in sums.items())
                self._loading.extend((stage, number, part) for number, part in enumerate(parts))
                return True
        return False


class _StateReader:
    """Reads the state of all stages, part by part."""

    def __init__(self, kind: StateKind, step: int | None, hosts: Mapping[int, Host]) -> None:
        self._kind = kind
        self.step = step
        self._left = sorted(hosts.items())
        self._number = 0

    @property
    def is_done(self) -> bool:
        return not self._left

    @property
    def host(self) -> Host:
        """The host whose part is next."""
        return self._left[0][1]

    def next_part(self) -> Part | None:
        """The next part; None until it has come."""
        stage, host = self._left[0]
        number = self._number
        part = host.state(stage, self._kind, number, self.step)
        if part is None:
            return None
        self._number = 0 if part.last else number + 1
        if part.last:
            self._left.pop(0)
        return stage, number, part


def _name(host: Host) -> str:
    return "the coordinator" if host.id == "local" else f"worker {host.id}"
