"""`Host`: the pipeline's interface to a process with stages, this one or a worker.

A host never waits for a peer: it answers None or False where it cannot answer yet, and the pipeline
asks again when something has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Commit, LoadKind, Message, StateKind
from hetero_framework.core.spans import Span
from hetero_framework.engine import messages
from hetero_framework.engine import stage_api as api
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.errors import ProtocolError, StoppedEarly


class StepTrouble(Exception):
    """The attempt at a step under way has ended without a result; it may be repeated once the cause
    is mended."""


class LinkLost(StepTrouble):
    """The link to one worker broke."""

    def __init__(self, worker: WorkerId, reason: str) -> None:
        super().__init__(f"worker {worker}: {reason}")
        self.worker = worker
        self.reason = reason


class DirectLost(StepTrouble):
    """The link between two workers broke; the step is repeated without it."""

    def __init__(self, one: WorkerId, other: WorkerId, reason: str) -> None:
        super().__init__(f"workers {one} and {other}: {reason}")
        self.pair = frozenset((one, other))
        self.reason = reason


class StagesLost(Exception):
    """A worker is back in a new process, without its stages: the run goes back to a kept state."""

    def __init__(self, worker: WorkerId, reason: str) -> None:
        super().__init__(f"worker {worker}: {reason}")
        self.worker = worker
        self.reason = reason


class ReplicasChanged(Exception):
    """Another replica of the model is gone; the step in flight changes no weight and is repeated
    with those that are left."""

    @property
    def told(self) -> dict[str, Any]:
        """`extra` of the log line about it."""
        return {}


class Stalled(StepTrouble):
    """Nothing has moved for too long in a step; the text names the awaited event."""


class StopWanted(Exception):
    """The run was asked to end while it waited for a worker."""


class WorkerLeaving(StoppedEarly, StepTrouble):
    """A worker was told to end, and still answers, so its state can be saved. `is_noted`: the run
    is to save it next."""

    is_noted = False

    def __init__(self, worker: WorkerId, reason: str) -> None:
        super().__init__(f"worker {worker} is leaving: {reason}")
        self.worker = worker
        self.reason = reason


@dataclass(frozen=True)
class HostEvent:
    """A message of a worker and its unpacked tensors, or the news that its link is gone. `wire`
    tells an old link's events from the present one's."""

    worker: WorkerId
    wire: Any
    message: Message | None = None
    arrival: Any = None
    lost: str | None = None


@dataclass(frozen=True)
class BatchInputs:
    """The tensors of a micro-batch, as they are and as they travel."""

    tensors: api.Tensors

    @cached_property
    def packed(self) -> dict[str, messages.PackedInput]:
        return messages.pack_inputs(self.tensors)


class Host(Protocol):
    """The stages of one process; `id` is "local" or the worker's. Raises LinkLost where it is
    remote and its link is gone. The defaults suit hosts that need not do a thing."""

    id: WorkerId
    indexes: list[int]

    @property
    def waits_s(self) -> float:
        """How long a task that could run waits for another one's turn, as of the last
        `run_next`; 0 where none does."""
        return 0.0

    def begin(
        self, info: api.StepInfo, schedule: StepSchedule, take: api.TakeEarly | None = None
    ) -> None:
        """A step begins, or begins again: whatever belongs to an earlier attempt is forgotten. In
        a summed step the host may give `take` gradients early, before their stage is done."""

    def feed(self, stage: int, micro_batch: int, names: Sequence[str], batch: BatchInputs) -> None:
        """Give a stage those tensors of a micro-batch that it needs."""

    def has_inputs(self, stage: int) -> bool:
        """Whether inputs of a micro-batch are known to wait for this stage."""
        return False

    def run_next(self) -> bool:
        """Do one task in this thread, if one is ready here; False where others do them."""
        return False

    def gradients(self) -> list[api.GradientPart]:
        """Gradients of stages that are done, each part once: all in a step that is summed, else
        those tied to weights of other stages. The caller releases them; `load_state` brings the
        sums back."""
        return []

    def report(self) -> api.HostReport | None:
        """Once in a training step, when it is done and all awaited sums have come."""

    def receive(self, message: Message, arrival: object) -> None:
        """A message of this host, where it is remote, with the result of `unpack`."""
        raise AssertionError("this process sends itself no messages")

    def commit(self, order: Commit, tied_weights: api.Tensors) -> api.Tensors:
        """Have the stages step their optimizers. This process's own host returns the new weights of
        which other stages have targets; others take over `tied_weights`, by source."""

    def is_committed(self) -> bool:
        """Whether the last `commit` is known to have been done."""
        return True

    def repeat_commit(self) -> None:
        """Over a new link: repeat an unconfirmed order."""
        return

    def forget_commit(self) -> None:
        """Forget unconfirmed orders: the run goes back."""
        return

    def abort(self) -> bool:
        """Forget the attempt; asked again until True. Then nothing of it is on its way."""

    def snapshot(self, step: int | None) -> None:
        """Keep the state after `step`, the last commit (None: before the first), readable for
        `state`, whatever is committed later."""

    def state(
        self,
        stage: int,
        kind: StateKind,
        number: int,
        step: int | None,
        names: Sequence[str] = (),
    ) -> api.StatePart | None:
        """A part of a stage's state after `step`, or, as they are now, of its weights of these
        names; in ascending order. The caller releases it."""

    def rewind(self, step: int | None) -> api.RewoundState | None:
        """The run goes on after the commit of `step`. The stages take over the state kept of it;
        the others get theirs with `load_state`. Asked again until not None."""

    def renew(self) -> None:
        """A new process has taken its place and loaded the stages: knowledge of the former one's
        state is void."""
        return

    def load_state(self, stage: int, kind: LoadKind, number: int, part: api.StatePart) -> bool:
        """Have a stage take over a part of its state; asked again until True."""

    def tied_weights(self) -> api.Tensors | None:
        """The weights of which other stages have targets, from this process's own host; None where
        `state` has to ask for them."""
        return None

    def take_spans(self) -> list[Span]:
        """Spans recorded since the last call; times are by the host's clock."""

    def close(self) -> None:
        """End its threads, if it has any."""
        return


class Links(Protocol):
    """The links to the workers. Raises LinkLost for one that is gone."""

    is_quiet: Callable[[], bool]
    """Whether `receive` would have to wait."""

    def expect(self, step: int, attempt: int) -> None:
        """Pass on boundary tensors of this attempt alone from now on."""

    def plan(self, attempt: int, schedule: StepSchedule) -> None:
        """Large tensors of this attempt keep to the order of the schedule."""

    def generation(self, worker_id: WorkerId) -> object: ...
    def send(self, worker_id: WorkerId, message: Message) -> None: ...
    def ping(self, worker_id: WorkerId) -> None: ...

    def receive(self, timeout_s: float) -> HostEvent | None:
        """The next event; None when none came in time. Raises LinkLost or DirectLost, and the
        error that a worker reports."""


class StepResults:
    """Outcomes and finished micro-batches of the attempt that runs. Raises ProtocolError for one
    that it does not have, or has already."""

    def __init__(self) -> None:
        self.outcomes: dict[int, api.Outcome] = {}
        self.through: set[int] = set()
        """The finished ones."""

    def begin(self) -> None:
        self.outcomes.clear()
        self.through.clear()

    def outcome(self, info: api.StepInfo, micro_batch: int, outcome: api.Outcome) -> None:
        self._check(info, micro_batch, self.outcomes)
        self.outcomes[micro_batch] = outcome
        if not info.train:
            self.through.add(micro_batch)

    def finished(self, info: api.StepInfo, micro_batch: int) -> None:
        self._check(info, micro_batch, self.through)
        self.through.add(micro_batch)

    @staticmethod
    def _check(info: api.StepInfo, micro_batch: int, known: Container[int]) -> None:
        if micro_batch >= info.micro_batches:
            text = f"the end of micro-batch {micro_batch} came; the step has {info.micro_batches}"
            raise ProtocolError(text)
        if micro_batch in known:
            raise ProtocolError(f"the end of micro-batch {micro_batch} came a second time")

    def losses(self) -> list[float]:
        """In micro-batch order. Waits once for the device that has them."""
        losses = [self.outcomes[k].loss for k in sorted(self.outcomes)]
        tensors = [loss for loss in losses if isinstance(loss, torch.Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else [])
        return [next(read) if isinstance(loss, torch.Tensor) else loss for loss in losses]
