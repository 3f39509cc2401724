"""Troubles, events and results of a step: what stages, their links and the pipeline share."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Message
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
