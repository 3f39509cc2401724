"""`Host`: the pipeline's interface to a process with stages, this process or a worker.

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
from hetero_framework.engine import stage_api as api
from hetero_framework.engine import wire_forms
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.errors import ProtocolError, StoppedEarly


class StepTrouble(Exception):
    """The present attempt at a step has ended without a result. The step may be repeated once the
    cause is mended."""


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
    """Another replica of the model is gone. The step in flight changes no weight and is repeated
    with the replicas that are left."""

    @property
    def told(self) -> dict[str, Any]:
        """`extra` of the log line about this change."""
        return {}


class Stalled(StepTrouble):
    """Nothing has moved for too long in a step; the text names the awaited event."""


class StopWanted(Exception):
    """The run was asked to end while it waited for a worker."""


class WorkerLeaving(StoppedEarly, StepTrouble):
    """A worker was told to end, and still answers, so its state can be saved. `is_noted`: recovery
    has seen this, and the run saves the state next."""

    is_noted = False

    def __init__(self, worker: WorkerId, reason: str) -> None:
        super().__init__(f"worker {worker} is leaving: {reason}")
        self.worker = worker
        self.reason = reason


@dataclass(frozen=True)
class HostEvent:
    """A message of a worker and its unpacked tensors, or the news that its link is gone. `wire` is
    the link, so that events of a replaced link can be told apart."""

    worker: WorkerId
    wire: Any
    message: Message | None = None
    arrival: Any = None
    lost: str | None = None


@dataclass(frozen=True)
class BatchInputs:
    """The input tensors of a micro-batch, as they are and as they travel (`packed`)."""

    tensors: api.Tensors

    @cached_property
    def packed(self) -> dict[str, wire_forms.PackedInput]:
        return wire_forms.pack_inputs(self.tensors)


class Host(Protocol):
    """The stages of one process. `id` is "local" or the worker's id. Methods of a remote host raise
    LinkLost when its link is gone. The default methods suit hosts with nothing to do there."""

    id: WorkerId
    indexes: list[int]

    @property
    def waits_s(self) -> float:
        """Seconds until `run_next` is worth another call, since a ready task waits for its turn; 0
        where none waits."""
        return 0.0

    def begin(
        self, info: api.StepInfo, schedule: StepSchedule, take: api.TakeEarly | None = None
    ) -> None:
        """Begin a step, or begin it again, and forget what belongs to an earlier attempt. In a
        summed step the host may give `take` gradients early, before their stage is done."""

    def feed(self, stage: int, micro_batch: int, names: Sequence[str], batch: BatchInputs) -> None:
        """Give a stage the inputs of a micro-batch that it needs: `names` of `batch`."""

    def has_inputs(self, stage: int) -> bool:
        """Whether inputs of a micro-batch are known to wait for this stage."""
        return False

    def run_next(self) -> bool:
        """Do one task in this thread; False if none is ready, or another process does them."""
        return False

    def gradients(self) -> list[api.GradientPart]:
        """Gradients of stages that are done, each part once. A summed step gives all gradients, any
        other step only gradients of weights tied to other stages. The caller releases them;
        `load_state` brings the sums back."""
        return []

    def report(self) -> api.HostReport | None:
        """The report, once in a training step, when all work is done and awaited sums are here."""

    def receive(self, message: Message, arrival: object) -> None:
        """Take a message from this host, if it is remote, with the result of `unpack`."""
        raise AssertionError("this process sends itself no messages")

    def commit(self, order: Commit, tied_weights: api.Tensors) -> api.Tensors:
        """Have the stages step their optimizers. The local host returns its new weights that other
        stages are tied to; other hosts take over `tied_weights`, by source."""

    def is_committed(self) -> bool:
        """Whether the last `commit` is known to have been done."""
        return True

    def repeat_commit(self) -> None:
        """Send an unconfirmed order again, over a new link."""
        return

    def forget_commit(self) -> None:
        """Forget unconfirmed orders: the run goes back to an earlier state."""
        return

    def abort(self) -> bool:
        """Forget the attempt. Asked again until True: then no message of it is on its way."""

    def snapshot(self, step: int | None) -> None:
        """Keep the state after `step` readable for `state`, whatever is committed later. `step` is
        the last commit; None: before the first."""

    def state(
        self, stage: int, kind: StateKind, number: int, step: int | None, names: Sequence[str] = ()
    ) -> api.StatePart | None:
        """Part `number` of a stage's state after `step`, or of its present weights `names`; None
        until it has come. Asked for in ascending order. The caller releases it."""

    def rewind(self, step: int | None) -> api.RewoundState | None:
        """Go back to the state after the commit of `step`. Stages that kept it take it over; others
        get it with `load_state`. Asked again until not None."""

    def renew(self) -> None:
        """Forget what is known of a former process: a new one has loaded the stages."""
        return

    def load_state(self, stage: int, kind: LoadKind, number: int, part: api.StatePart) -> bool:
        """Have a stage take over a part of its state; asked again until True."""

    def tied_weights(self) -> api.Tensors | None:
        """The local host's weights that other stages are tied to; None: `state` has to ask for
        them."""
        return None

    def take_spans(self) -> list[Span]:
        """Spans recorded since the last call; times are by the host's clock."""

    def close(self) -> None:
        """End the host's threads, if it has any."""
        return


class Links(Protocol):
    """The links to the workers. Methods raise LinkLost for a link that is gone."""

    is_quiet: Callable[[], bool]
    """Whether `receive` would have to wait."""

    def expect(self, step: int, attempt: int) -> None:
        """From now on pass on boundary tensors of this attempt only."""

    def plan(self, attempt: int, schedule: StepSchedule) -> None:
        """Order the large tensors of this attempt as in the schedule."""

    def generation(self, worker_id: WorkerId) -> object: ...
    def send(self, worker_id: WorkerId, message: Message) -> None: ...
    def ping(self, worker_id: WorkerId) -> None: ...

    def receive(self, timeout_s: float) -> HostEvent | None:
        """The next event; None when none came in time. Raises LinkLost or DirectLost, and the
        error that a worker reports."""


class StepResults:
    """Outcomes and finished micro-batches of the present attempt. Raises ProtocolError for a
    micro-batch that the attempt does not have, or that has come before."""

    def __init__(self) -> None:
        self.outcomes: dict[int, api.Outcome] = {}
        self.through: set[int] = set()
        """The finished micro-batches."""

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
        """The losses in micro-batch order. Waits once for the device that has them."""
        losses = [self.outcomes[k].loss for k in sorted(self.outcomes)]
        tensors = [loss for loss in losses if isinstance(loss, torch.Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else [])
        return [next(read) if isinstance(loss, torch.Tensor) else loss for loss in losses]
