"""The stage interface: the contract between the engine and whatever computes.

Pipeline, executor, hosts and messages import this module alone. `stage.Stage` implements it;
benchmarks implement stages that sleep. A boundary carries a `Bundle`, which is empty as the first
stage's input and for gradients that are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.optim import Optimizer

from hetero_framework.core.devices import DeviceEvent
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Decoding, StageFigures
from hetero_framework.engine.optimizer import load_state_tensors
from hetero_framework.models.cut.reuse import ReusableModules
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.cut.side import Bundle, Form

Tensors = dict[str, Tensor]
Loss = float | Tensor  # reading the number of a tensor waits for its device
States = dict[str, dict[str, Any]]  # an optimizer's, by the name of the parameter
Transfer = tuple[str, DeviceEvent, DeviceEvent]
"""Kind (of `spans.VISITS`), beginning and end of a copy, or of a wait for one."""


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Outcome:
    """The last stage's result for a micro-batch: the loss, and further tensors by name."""

    loss: Loss
    named: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Arrival:
    """The tensors that crossed a boundary; `release` gives its receive buffer back."""

    tensors: Bundle = ()
    release: Callable[[], None] = _nothing


@dataclass(frozen=True)
class StepInfo:
    """A step, as every stage must know it before its first micro-batch.

    Every loss is divided by `num_items`, what the objective counts of the whole global batch (its
    label tokens, for most models), and multiplied by `loss_scale` (fp16) before backward; gradients
    are divided by that before anybody looks at them. `attempt` tells a repeated step's frames from
    stale ones. With `summed` other replicas' gradients are added before that; this one's
    micro-batches draw their random numbers as if `first_micro_batch` of the others' came before
    them. With `decoding` there is no loss: a micro-batch continues a text, see `TextGeneration`. In
    a pass of the `reference` adapters are switched off. With `predicts` outcomes of an evaluation
    have predictions (extras/reporting/predictions.py).
    """

    step: int
    attempt: int
    train: bool
    micro_batches: int
    num_items: int
    loss_scale: float = 1.0
    summed: bool = False
    first_micro_batch: int = 0
    decoding: Decoding | None = None
    reference: bool | None = None
    predicts: bool | None = None


@dataclass(frozen=True)
class GradientReport:
    """A stage's share of the decision on a step.

    `norms` are float32 2-norms of the unscaled gradients, by trainable parameter in the stage's
    order. `nonfinite` are the micro-batches whose output here was not finite.
    """

    norms: Tensor
    nonfinite: tuple[int, ...] = ()


@dataclass(frozen=True)
class HostReport:
    """A host's report after all micro-batches of a training step: its stages' gradients and
    figures; seconds there and back to other workers, and bytes sent straight to them so far."""

    gradients: Mapping[int, GradientReport]
    figures: Mapping[int, StageFigures]
    round_trips: Mapping[WorkerId, float] = field(default_factory=dict)
    direct_bytes: int = 0


@dataclass(frozen=True)
class StatePart:
    """A bounded part of a stage's state. `release` gives the tensors' receive buffer back."""

    tensors: Tensors
    values: dict[str, Any] = field(default_factory=dict)
    last: bool = False
    release: Callable[[], None] = _nothing


@dataclass(frozen=True)
class GradientPart:
    """A part of one stage's gradients."""

    stage: int
    number: int
    part: StatePart


class TakeEarly(Protocol):
    """Gets gradients while their stage still computes, in the thread that differentiates. Raises
    nothing."""

    def has_room(self) -> bool:
        """Whether more would go out at once. Else they wait for that, or for their stage's end."""

    def take(self, part: GradientPart) -> None: ...


class GradientSum(Protocol):
    """The gradients of one step of all replicas. Methods raise errors that end the step here."""

    def give(self, part: GradientPart) -> None:
        """A part of this replica's, in any order of stages; one that was given before, since a link
        broke, may come again."""

    def end(self) -> None:
        """All of this replica's have been given; other parameters have no gradient here."""

    def sums(self, names: Sequence[str]) -> Tensors | None:
        """The gradients of these parameters over all replicas; None until all are there. Leaves out
        names without a gradient anywhere."""


@dataclass(frozen=True)
class RewoundState:
    """The state that a host had kept of the step that the run goes back to: digests by stage."""

    digests: Mapping[int, str] = field(default_factory=dict)


class Snapshot(Protocol):
    """A stage's state as one step left it; see `state_snapshot.StateSnapshot`."""

    def part(self, number: int) -> StatePart: ...
    def parts(self) -> Iterator[StatePart]: ...
    def keep(self) -> None: ...


class Residence:
    """The places of one stage's tensors: here its device, for all of them. Others may keep some in
    host memory, from where they come to the device in time."""

    streams: ClassVar[bool] = False
    """Whether tensors come and go while tasks run, so that it has to hear of each task."""

    @property
    def misses(self) -> int | None:
        """How often a layer was used before its copy had been asked for; None where none
        streams."""
        return None

    def accompany(self, shard: Shard) -> None:
        """Hear of the use of this shard's layers from now on."""

    def begin(self, kind: str, micro_batch: int, following: str) -> None:
        """A task begins: FORWARD (on the last stage with its backward) or BACKWARD. `following` is
        the kind of this stage's next task, as far as the order tells."""

    def end(self) -> None:
        """All work of the task is queued."""

    def abort(self) -> None:
        """The step is forgotten."""

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer."""
        optimizer.step()

    def load(self, optimizer: Optimizer, names: Mapping[Any, str], state: States) -> None:
        """See `optimizer.load_state_tensors`."""
        load_state_tensors(optimizer, names, state)

    def settle(self) -> None:
        """Wait until the optimizer's states may be read."""

    def transfers(self) -> list[Transfer]:
        """The copies, and waits for them, since the last call; waits for none. A wait that ends
        before it begins was none."""
        return []

    def dissolve(self, modules: ReusableModules) -> ReusableModules:
        """End it; the modules that are whole on the device."""
        return modules


class StageInterface(Protocol):
    """The stage interface; see `Stage`."""

    index: int
    is_first: bool
    is_last: bool
    input_requires_grad: bool
    """Whether something before this stage is trained: it then returns a gradient."""
    residence: Residence

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Hashes of the weights it was read from (models/files/fingerprint.py); empty for none."""

    @property
    def differentiates(self) -> bool:
        """Whether a training step has a backward here: something is trained here or before."""

    @property
    def ties(self) -> Mapping[str, str]:
        """{target: source} of trained parameters that are a weight of an earlier stage, in the
        order of places; `gradients` gives these, and `set_tied_weights` brings the new weight."""

    @property
    def awaits_sums(self) -> bool:
        """Whether later stages have such targets of weights here: `load_state` brings the sums of
        their gradients before `report_gradients`."""

    def arrival_problem(self, forms: Sequence[Form], rows: int, tokens: int) -> str | None:
        """Problems, as far as headers tell, with the tensors that came for a micro-batch of
        this size; None where nothing is. Called in any thread."""

    def begin(self, info: StepInfo, take: TakeEarly | None = None) -> None: ...
    def forward(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Bundle: ...
    def forward_backward(
        self, micro_batch: int, inputs: Tensors, received: Bundle
    ) -> tuple[Outcome, Bundle]: ...
    def evaluate(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Outcome: ...
    def backward(self, micro_batch: int, gradients: Bundle) -> Bundle: ...
    def gradients(self) -> Iterator[StatePart]: ...
    def report_gradients(self) -> GradientReport: ...
    def commit(self, learning_rate: float, grad_scale: float) -> None: ...
    def abort(self) -> None: ...
    def trainable(self) -> list[tuple[str, tuple[int, ...]]]: ...
    def snapshot(self, *, lasting: bool = False) -> Snapshot: ...
    def export(self) -> Iterator[StatePart]: ...
    def weights(self, names: Sequence[str], number: int) -> StatePart: ...
    def load_state(self, kind: str, part: StatePart) -> None: ...
    def tied_weights(self) -> Tensors: ...
    def set_tied_weights(self, weights: Tensors) -> None: ...
