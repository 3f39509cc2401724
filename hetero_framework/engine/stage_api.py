"""The stage interface: the contract between the engine and whatever computes.

Pipeline, executor, hosts and messages know stages only by this module. `stage.Stage` implements it;
benchmarks implement stages that sleep. A boundary carries a `Bundle`, which is empty as the first
stage's input and for gradients that are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hetero_framework.core.devices import DeviceEvent
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Decoding, StageFigures
from hetero_framework.engine.optimizer import load_state_tensors
from hetero_framework.models.cut.reuse import ReusableModules
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.cut.side import Bundle, Form

Tensors = dict[str, Tensor]
Adam = tuple[float, ...]  # beta1, beta2, epsilon and weight decay of one step
Loss = float | Tensor  # reading the number of a tensor waits for its device
States = dict[str, dict[str, Any]]  # of an optimizer, by parameter name
Transfer = tuple[str, DeviceEvent, DeviceEvent]
"""Kind (of `spans.VISITS`), beginning and end of a copy, or of a wait for a copy."""


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

    `attempt` tells a repeated step's frames from stale frames. Each loss is divided by `num_items`,
    the number of items that the objective counts in the global batch (for most models its label
    tokens). It is multiplied by `loss_scale` (fp16) before backward, and gradients are divided by
    `loss_scale` before they are read. With `summed`, other replicas' gradients are added before
    that, micro-batch k draws its random numbers as number `first_micro_batch` + k, and where the
    objective counts micro-batches, rows are counted: replicas' micro-batches differ. With
    `decoding` there is no loss: a micro-batch continues texts, see `TextGeneration`. With
    `reference` adapters are switched off. With `predicts` outcomes of an evaluation have
    predictions (extras/reporting/predictions.py). With `continues` the gradients of earlier passes
    of this step stay: several passes add up before one commit.
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
    continues: bool | None = None


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
    """A host's report after all micro-batches of a training step: gradient reports and figures by
    stage, round-trip seconds by other worker, bytes sent straight to other workers so far."""

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
        """Whether more gradients would go out at once; else they wait, up to the stage's end."""

    def take(self, part: GradientPart) -> None: ...


class GradientSum(Protocol):
    """The gradients of one step of all replicas. Methods raise errors that end the step here."""

    def give(self, part: GradientPart) -> None:
        """Take a part of this replica's gradients, with stages in any order. After a broken link a
        part may come again."""

    def end(self) -> None:
        """Note that all gradients of this replica were given; other parameters have none."""

    def sums(self, names: Sequence[str]) -> Tensors | None:
        """The summed gradients of these parameters over all replicas; None until all have come.
        Leaves out names without a gradient anywhere."""


@dataclass(frozen=True)
class RewoundState:
    """Digests by stage of the state that a host had kept of the step that the run goes back to."""

    digests: Mapping[int, str] = field(default_factory=dict)


class Snapshot(Protocol):
    """A stage's state as one step left it; see `state_snapshot.StateSnapshot`."""

    def part(self, number: int) -> StatePart: ...
    def parts(self) -> Iterator[StatePart]: ...
    def keep(self) -> None: ...


class Residence:
    """The place of one stage's tensors. This class keeps all on the device. A subclass may keep
    some in host memory, and copy them to the device in time."""

    streams: ClassVar[bool] = False
    """Whether tensors come and go while tasks run, so that each task calls `begin` and `end`."""

    trains: bool = False
    """Whether trained weights come and go too, and their gradients with them."""

    @property
    def misses(self) -> int | None:
        """How often a layer was used before its copy was asked for; None where none streams."""
        return None

    def accompany(self, shard: Shard) -> None:
        """Follow the use of this shard's layers from now on."""

    def begin(self, kind: str, micro_batch: int, following: str) -> None:
        """Note that a task begins: FORWARD (on the last stage with its backward) or BACKWARD.
        `following` is the kind of this stage's next task, as far as the order tells."""

    def end(self) -> None:
        """Note that all work of the task is queued on the device."""

    def abort(self) -> None:
        """Forget what is stored of the pass."""

    def home(self, parameter: Parameter) -> Tensor:
        """The memory in which a weight is read and written outside of tasks; call `changed` after
        writing."""
        return parameter.detach()

    def changed(self) -> None:
        """Note that weights were written at home."""

    def go_home(self) -> None:
        """Let all weights be read in the model's parameters, up to the next task."""

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """A weight's gradient of the step so far, on the device."""
        return parameter.grad

    def put_gradient(self, parameter: Parameter, gradient: Tensor) -> None:
        """Replace a weight's gradient."""
        parameter.grad = gradient

    def forget_gradients(self) -> None:
        """Drop the gradients that are not on the device."""

    def step(self, optimizer: Optimizer, scale: float = 1.0) -> None:
        """Step the optimizer. Gradients that are not on the device are multiplied by `scale`."""
        optimizer.step()

    def load(self, optimizer: Optimizer, names: Mapping[Any, str], state: States) -> None:
        """See `optimizer.load_state_tensors`."""
        load_state_tensors(optimizer, names, state)

    def settle(self) -> None:
        """Wait until the optimizer's states may be read."""

    def transfers(self) -> list[Transfer]:
        """Copies, and waits for copies, since the last call. Does not wait for any. An entry that
        ends before it begins stands for no wait."""
        return []

    def dissolve(self, modules: ReusableModules) -> ReusableModules:
        """End the residence; return the modules that are whole on the device."""
        return modules


class StageInterface(Protocol):
    """The stage interface; see `Stage`."""

    index: int
    is_first: bool
    is_last: bool
    input_requires_grad: bool
    """Whether something before this stage is trained: then this stage returns a gradient."""
    residence: Residence

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Hashes of the weights that were read (models/files/fingerprint.py); empty for none."""

    @property
    def differentiates(self) -> bool:
        """Whether a training step has a backward here: something is trained here or before."""

    @property
    def ties(self) -> Mapping[str, str]:
        """{target: source} of parameters here that are tied to a weight of an earlier stage, in the
        order of places. `gradients` gives the targets' gradients, `set_tied_weights` new
        weights."""

    @property
    def awaits_sums(self) -> bool:
        """Whether later stages have targets of weights here. `load_state` then brings the sums of
        the targets' gradients before `report_gradients`."""

    def arrival_problem(self, forms: Sequence[Form], rows: int, tokens: int) -> str | None:
        """The problem, as far as headers tell, with tensors that came for a micro-batch of this
        size; None if there is none. Called in any thread."""

    def begin(self, info: StepInfo, take: TakeEarly | None = None) -> None: ...
    def forward(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Bundle: ...
    def forward_backward(
        self, micro_batch: int, inputs: Tensors, received: Bundle
    ) -> tuple[Outcome, Bundle]: ...
    def evaluate(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Outcome: ...
    def backward(self, micro_batch: int, gradients: Bundle) -> Bundle: ...
    def gradients(self) -> Iterator[StatePart]: ...
    def report_gradients(self) -> GradientReport: ...
    def commit(self, learning_rate: float, grad_scale: float, adam: Adam | None = None) -> None: ...
    def abort(self) -> None: ...
    def trainable(self) -> list[tuple[str, tuple[int, ...]]]: ...
    def snapshot(self, *, lasting: bool = False) -> Snapshot: ...
    def export(self) -> Iterator[StatePart]: ...
    def weights(self, names: Sequence[str], number: int) -> StatePart: ...
    def load_state(self, kind: str, part: StatePart) -> None: ...
    def tied_weights(self) -> Tensors: ...
    def set_tied_weights(self, weights: Tensors) -> None: ...
