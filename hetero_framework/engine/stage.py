"""A stage: one block of layers on one device, and the operations on it.

Micro-batches go forward and backward in ascending order on every stage, so that gradients add up in
one order under any cut and timing. Shapes: B rows of a micro-batch, S tokens, D hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from hetero_framework import registry
from hetero_framework.config import Config, StageSpec
from hetero_framework.core import failpoints
from hetero_framework.core.devices import Device, HostCopy
from hetero_framework.engine.expectation import rows_and_tokens
from hetero_framework.engine.optimizer import build_optimizer, state_tensors
from hetero_framework.engine.stage_api import (
    Adam,
    GradientPart,
    GradientReport,
    Outcome,
    Residence,
    StatePart,
    StepInfo,
    TakeEarly,
    Tensors,
)
from hetero_framework.engine.state_snapshot import Entry, StateSnapshot, in_parts
from hetero_framework.errors import CheckpointError, ProtocolError
from hetero_framework.models.adapters.trainable import (
    export_parts,
    tied_parameters,
    trainable_parameters,
)
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.reuse import ReusableModules
from hetero_framework.models.cut.shard import Shard, put_back, weakly
from hetero_framework.models.cut.side import (
    Bundle,
    Form,
    as_leaves,
    crossing,
    described,
    differentiate,
    gradients_of,
    returning,
    shown_form,
)
from hetero_framework.models.rng import ForwardSeeds
from hetero_framework.models.verify.side_tensor_checks import SideTensorChecks

WEIGHTS, OPTIMIZER = "weights", "optimizer"
EARLY_PART_BYTES = 1 << 18
"""Least bytes of a part of early gradients: each part costs a frame, and a wait for the device."""
_LIKE_THE_WEIGHT = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # of the weight's shape


class Stage:
    """One shard with its gradients and its optimizer."""

    _mode: tuple[bool, bool] | None = None  # of the modules: training, with the adapter

    def __init__(
        self,
        spec: StageSpec,
        shard: Shard,
        config: Config,
        device: Device,
        residence: Residence | None = None,
    ) -> None:
        training = config.training
        self.residence = residence or Residence()
        self.index = spec.index
        self.is_first = spec.is_first
        self.is_last = spec.is_last
        self.fingerprint = shard.fingerprint
        # Depends on the trained parameters of all stages; the pipeline sets it at the start.
        self.input_requires_grad = False
        self._shard = shard
        self._device = device
        self._objective = objective_of(training)
        self._side_checks = SideTensorChecks(shard, training)
        if training.compiles:
            shard.compile_blocks(training.torch_compile_backend, training.torch_compile_mode)
        if training.neftune_noise_alpha:
            shard.add_noise(training.neftune_noise_alpha)
        if config.checkpointing(spec.index) is True:
            shard.recompute_blocks()
        self.residence.accompany(shard)
        self._parameters = trainable_parameters(shard)
        # Parameters tied to a weight of an earlier place, in order of places; they never step.
        self._targets = tied_parameters(shard)
        named = dict(self._parameters)
        self._sources = {s: named[s] for s in sorted(shard.tied_elsewhere & named.keys())}
        self._sums_elsewhere: Tensors = {}
        # Tied weights cross the wire in every step, and may be a gigabyte each.
        self._tied_copies: dict[str, HostCopy] = defaultdict(lambda: HostCopy(device))
        self._names = {p: name for name, p in self._parameters}
        self._early = EarlyGradients(self.index, self._parameters, device.all_to_host)
        trained = list(self._names)
        self._optimizer = build_optimizer(training, shard.model, trained) if trained else None
        self._info = StepInfo(step=0, attempt=0, train=True, micro_batches=0, num_items=1)
        self._saved: dict[int, tuple[Bundle, Bundle]] = {}
        self._finite: dict[int, Tensor] = {}
        # What training changes besides the weights, and a copy from before the step.
        self._statistics = shard.statistics
        self._kept: Tensors | None = None
        self._decoder: Any = None  # a Decoder of extras/talking, while texts are continued
        self._loading: dict[str, dict[str, Any]] = {}
        self._loaded_keys: set[str] = set()
        self._seeds = ForwardSeeds(training.seed, device.seed)
        shard.on_enter = self._seeds.enter

    def dissolve(self) -> tuple[ShardRange, ReusableModules]:
        """End the stage; return its range and the modules that another shard can reuse. The rest is
        freed, even if the stage is still referenced."""
        self.abort()
        self._early.close()
        self._parameters, self._names, self._optimizer = [], {}, None
        self._targets, self._sources = {}, {}
        modules = self.residence.dissolve(self._shard.dissolve())
        self.residence = Residence()
        return self._shard.range, modules

    @property
    def side_gradients(self) -> tuple[bool, ...]:
        """For each entering side tensor, whether it wants a gradient in training."""
        return self._side_checks.trained

    # -- a step ---------------------------------------------------------------------------------

    def begin(self, info: StepInfo, take: TakeEarly | None = None) -> None:
        """Begin a step. In a summed step `take` gets gradients as soon as they are final, in the
        thread of the backward that still runs; `gradients` has the rest."""
        self._drop(keeps_gradients=bool(info.continues))
        self._info = info
        self._seeds.on, self._seeds.step = info.train, info.step
        self._seeds.first_micro_batch = info.first_micro_batch
        if info.train and self._statistics and self._kept is None:
            self._kept = {name: value.clone() for name, value in self._statistics.items()}
        if info.decoding is not None:
            self._decoder = registry.find("stages", "decoding")(self._shard, info.decoding)
        self._early.begin(take if info.summed and not self.residence.trains else None)
        if (mode := (info.train, not info.reference)) == self._mode:
            return  # both go through all modules, which would take longer than a small step
        self._mode = mode
        self._shard.train(info.train)
        if (adapter := self._shard.adapter) is not None:
            adapter.switch(self._shard.model, on=not info.reference)

    def forward(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Bundle:
        """The output for the next stage, detached; the inputs of `backward` are kept."""
        received = self._leaves(self._fitting(micro_batch, inputs, received))
        with self._running(micro_batch):
            left = self._shard.forward(inputs, received, self._cache(inputs))
        if self.differentiates:
            self._saved[micro_batch] = (received, left)
        failpoints.hit("output", left[0])
        self._note_finite(micro_batch, left[0])
        return crossing(left)

    def forward_backward(
        self, micro_batch: int, inputs: Tensors, received: Bundle
    ) -> tuple[Outcome, Bundle]:
        """On the last stage: a micro-batch's loss divided by num_items (0-d, on the device), and
        its input's gradients. In a step without a label both are 0, as in TRL."""
        received = self._leaves(self._fitting(micro_batch, inputs, received))
        chunks = self._objective.num_chunks(self._shard.config, inputs)
        with self._last_backward(micro_batch, is_one=chunks == 1):
            num_items = float(max(1, self._info.num_items))
            if self._info.summed and self._objective.item_counter(self._shard.config) is len:
                num_items /= len(inputs["labels"])  # rows were counted
            outcome = self._outcome(micro_batch, inputs, received, num_items)
        assert isinstance(outcome.loss, Tensor)
        failpoints.hit("output", outcome.loss)
        self._note_finite(micro_batch, outcome.loss)
        return outcome, gradients_of(received)

    def evaluate(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Outcome:
        """On the last stage, outside training: a micro-batch's loss, not divided (0-d), or the next
        tokens of texts."""
        received = self._fitting(micro_batch, inputs, received)
        if self._decoder is not None:
            with self._running(micro_batch):
                named = self._decoder.named(inputs, received)
            # With a loss on the device no one waits here for it to have the tokens.
            return Outcome(torch.zeros((), device=self._device.torch_device), named)
        return self._outcome(micro_batch, inputs, received, 1.0)

    def _cache(self, inputs: Tensors) -> Any:
        """The cache of the texts that the inputs belong to; None without one."""
        return self._decoder.cache(inputs) if self._decoder is not None else None

    def _outcome(
        self, micro_batch: int, inputs: Tensors, received: Bundle, num_items: float
    ) -> Outcome:
        """The loss, detached; in a training step it has been differentiated."""
        predicting: dict[str, Any] = {}
        if self._info.predicts and self._objective.predicts:
            made = registry.needed("logits", "predictions", "compute_metrics")
            predicting["predictions"] = made()
        loss, named = self._objective.loss(
            self._shard,
            inputs,
            received,
            # Filled on the device: copying a number to a GPU waits for all work queued there.
            torch.full((), num_items, device=self._device.torch_device),
            running=lambda: self._running(micro_batch),
            backward=self._scaled_backward if self.differentiates else None,
            **predicting,
        )
        return Outcome(loss, named)

    def _scaled_backward(self, loss: Tensor) -> None:
        failpoints.hit("forward-done")
        failpoints.hit("backward")
        (loss * self._info.loss_scale if self._info.loss_scale != 1.0 else loss).backward()

    def backward(self, micro_batch: int, gradients: Bundle) -> Bundle:
        """The gradients for the stage before; empty if it needs none. Only if `differentiates`."""
        received, left = self._saved.pop(micro_batch)
        expected = [(tensor.shape, tensor.dtype, False) for tensor in returning(left)]
        if [(t.shape, t.dtype, t.requires_grad) for t in gradients] != expected:
            wanted = ", ".join(starmap(shown_form, expected))
            raise ProtocolError(
                f"stage {self.index}: the gradient of micro-batch {micro_batch} is "
                f"{described(*gradients)}, expected {wanted}"
            )
        self._seeds.micro_batch = micro_batch
        with self._last_backward(micro_batch):
            differentiate(left, gradients)
        return gradients_of(received)

    def _last_backward(
        self, micro_batch: int, *, is_one: bool = True
    ) -> AbstractContextManager[None]:
        """A context for the backward of a micro-batch: in the step's last one gradients are final.
        Unless `is_one`, the micro-batch has several backwards; one goes through the blocks."""
        if micro_batch < self._info.micro_batches - 1:
            return nullcontext()
        outside = [] if is_one else [id(p) for p in self._shard.parameters_outside_blocks()]
        late = [name for name, p in self._parameters if id(p) in outside]
        return self._early.last_backward(late=late)

    # -- the decision ---------------------------------------------------------------------------

    def gradients(self) -> Iterator[StatePart]:
        """Gradients that are summed elsewhere, by parameter, in parts. In a summed step: all that
        were not taken early, for a tied weight one for each place. Otherwise: the gradients of
        `ties`. They are valid until `load_state` brings the sums of all replicas, which may have
        other names."""
        if self._info.summed:
            given = self._early.given
            rest = [(name, p) for name, p in self._parameters if name not in given]
            shares = [*rest, *self._targets.items()]
        else:
            shares = [(name, self._targets[name]) for name in self.ties]
        gradients = ((name, self.residence.gradient(p)) for name, p in shares)
        yield from in_parts(
            (name, self._on_host(name, grad), {}) for name, grad in gradients if grad is not None
        )

    def _on_host(self, name: str, gradient: Tensor) -> Tensor:
        kept = name in self._targets
        return self._tied_copies[name].of(gradient) if kept else self._device.to_host(gradient)

    @property
    def ties(self) -> dict[str, str]:
        """{target: source} of parameters trained here and tied to a weight of an earlier stage."""
        named = dict(self._parameters)
        ties = {name: self._shard.ties[name] for name in self._targets}
        return {name: source for name, source in ties.items() if source not in named}

    @property
    def awaits_sums(self) -> bool:
        """Whether `report_gradients` needs sums of the kind "tied gradients" first."""
        return bool(self._sources)

    def _add_tied(self) -> None:
        """Add up the gradients of each tied weight, from its last place to its first."""
        sums = {name: total.to(self._sources[name]) for name, total in self._sums_elsewhere.items()}
        named = dict(self._parameters)
        for name, target in reversed(self._targets.items()):
            source = self._shard.ties[name]
            if source in named and target.grad is not None:
                sums[source] = _sum(sums.get(source), target.grad)
        for name, total in sums.items():
            before = self.residence.gradient(named[name])
            self.residence.put_gradient(named[name], _sum(before, total))

    def report_gradients(self) -> GradientReport:
        """Unscale the gradients and report their norms."""
        self._add_tied()
        norms = []
        for _, parameter in self._parameters:
            if (gradient := self.residence.gradient(parameter)) is None:
                norms.append(torch.zeros((), device=parameter.device))
                continue
            if self._info.loss_scale != 1.0:
                gradient.mul_(1.0 / self._info.loss_scale)
                self.residence.put_gradient(parameter, gradient)
            norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        stacked = torch.stack(norms) if norms else torch.zeros(0)
        return GradientReport(self._device.to_host(stacked), self._nonfinite())

    def commit(self, learning_rate: float, grad_scale: float, adam: Adam | None = None) -> None:
        """Clip gradients by the coordinator's factor for all stages, and step the optimizer. `adam`
        replaces these settings of an AdamW for all parameters."""
        if self._optimizer is not None:
            for _, parameter in self._parameters:
                if parameter.grad is not None and grad_scale != 1.0:
                    parameter.grad.mul_(grad_scale)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
                if adam is not None:
                    group.update(betas=adam[:2], eps=adam[2], weight_decay=adam[3])
            if failpoints.is_due("optimizer-half"):
                self._step_half(self._optimizer, grad_scale)
            self.residence.step(self._optimizer, grad_scale)
        self._kept = None
        self.abort()

    def _step_half(self, optimizer: torch.optim.Optimizer, grad_scale: float) -> None:
        """For a failpoint: the first half of the parameters makes the step before the others."""
        parameters = [parameter for _, parameter in self._parameters]
        first, rest = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        gradients = [parameter.grad for parameter in rest]
        for parameter in rest:
            parameter.grad = None
        self.residence.step(optimizer, grad_scale)
        failpoints.hit("optimizer-half")
        for parameter in first:
            parameter.grad = None
        for parameter, gradient in zip(rest, gradients, strict=True):
            parameter.grad = gradient

    def abort(self) -> None:
        """Forget the step: drop gradients and stored activations, put statistics back."""
        self._drop(keeps_gradients=False)

    def _drop(self, *, keeps_gradients: bool) -> None:
        """Forget the pass, or all passes of the step. Gradients of tied weights have been added."""
        if not keeps_gradients:
            if self._kept is not None:
                put_back(self._statistics, self._kept)
                self._kept = None
            for _, parameter in self._parameters:
                parameter.grad = None
            self.residence.forget_gradients()
        for target in self._targets.values():
            target.grad = None
        self._sums_elsewhere = {}
        self._saved.clear()
        self._finite.clear()
        self._decoder = None
        self._early.begin(None)
        self.residence.abort()

    # -- state ----------------------------------------------------------------------------------

    def all_weights(self) -> Iterator[Tensor]:
        """All parameters, the frozen ones too."""
        yield from self._shard.model.parameters()

    def trainable(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, position in the whole model) of each parameter, in the order of `norms`."""
        return [(name, self._shard.parameter_index(name)) for name, _ in self._parameters]

    def snapshot(self, *, lasting: bool = False) -> StateSnapshot:
        """Trainable weights and optimizer state, keyed "weights/<parameter>" and
        "optimizer/<key>/<parameter>". Call its `keep` before the next commit."""
        return StateSnapshot(self._checkpoint_entries(), self._device, lasting=lasting)

    def weights(self, names: Sequence[str], number: int) -> StatePart:
        """Part `number` of these trained parameters as they are now, in memory of its own."""
        known = dict(self._parameters)
        if unknown := [name for name in names if name not in known]:
            raise ProtocolError(f"stage {self.index} trains no {unknown[0]!r}")
        weights = ((name, self.residence.home(known[name])) for name in names)
        entries: Iterator[Entry] = ((name, weight, {}) for name, weight in weights)
        return StateSnapshot(entries, self._device).part(number)

    def export(self) -> Iterator[StatePart]:
        """Tensors as the finished artefact names them, in parts."""
        self.residence.go_home()
        yield from in_parts((name, tensor, {}) for name, tensor in export_parts(self._shard))

    def _checkpoint_entries(self) -> Iterator[Entry]:
        self.residence.settle()
        states = state_tensors(self._optimizer, self._names) if self._optimizer else {}
        for name, parameter in self._parameters:
            tensors, plain = states.get(name, ({}, {}))
            values = {f"{OPTIMIZER}/{key}/{name}": value for key, value in plain.items()}
            yield f"{WEIGHTS}/{name}", self.residence.home(parameter), values
            for key, tensor in tensors.items():
                yield f"{OPTIMIZER}/{key}/{name}", tensor, {}
        for name, value in self._statistics.items():
            yield f"{WEIGHTS}/{name}", value, {}

    def load_state(self, kind: str, part: StatePart) -> None:
        """Take over a part of a "checkpoint" (of `snapshot`), "weights", an "adapter" file, "tied
        weights" by source or, in a step, "gradients" (sums over all replicas) or "tied gradients".
        Raises CheckpointError or ProtocolError for a tensor without a place here, CheckpointError
        if a weight is absent."""
        if kind == "tied weights":
            self.set_tied_weights(part.tensors)
        elif kind == "tied gradients":
            for name, total in part.tensors.items():
                self._place(self._sources, name, total)
                self._sums_elsewhere[name] = total.clone()  # it may lie in a receive buffer
        elif kind == "gradients":
            places = {**dict(self._parameters), **self._targets}
            for name, total in part.tensors.items():
                parameter = self._place(places, name, total)
                self.residence.put_gradient(parameter, total.to(parameter, copy=True))
        elif kind == "weights":
            places = dict(self._parameters)
            with torch.no_grad():
                for name, weight in part.tensors.items():
                    self.residence.home(self._place(places, name, weight)).copy_(weight)
            self.residence.changed()
        elif kind == "adapter":
            from hetero_framework.models.adapters import lora

            self._loaded_keys |= lora.load_adapter_tensors(self._shard, part.tensors)
            if part.last:
                lora.check_adapter_complete(self._shard, self._loaded_keys)
        else:
            self._load_checkpoint(part)

    def _place(
        self, places: Mapping[str, torch.nn.Parameter], name: str, value: Tensor
    ) -> torch.nn.Parameter:
        """The parameter that `value` is for. Raises ProtocolError where there is none."""
        parameter = places.get(name)
        if parameter is None or parameter.shape != value.shape:
            raise ProtocolError(
                f"stage {self.index} trains no {name!r} of shape {tuple(value.shape)}"
            )
        return parameter

    def _load_checkpoint(self, part: StatePart) -> None:
        """Load weights at once, and the optimizer's state with the last part."""
        parameters = {name: self.residence.home(p) for name, p in self._parameters}
        parameters |= self._statistics
        for full_name, value in [*part.tensors.items(), *part.values.items()]:
            kind, _, rest = full_name.partition("/")
            key, _, name = rest.partition("/") if kind == OPTIMIZER else ("weight", "", rest)
            if (parameter := parameters.get(name)) is None:
                raise CheckpointError(f"stage {self.index} has no trainable parameter {name!r}")
            is_like_it = kind == WEIGHTS or key in _LIKE_THE_WEIGHT
            if is_like_it and tuple(value.shape) != tuple(parameter.shape):
                raise CheckpointError(
                    f"{full_name}: the checkpoint has shape {tuple(value.shape)}, "
                    f"the model {tuple(parameter.shape)}",
                    hint="it was written by a run with another model or adapter",
                )
            if kind == WEIGHTS:
                assert isinstance(value, Tensor)
                put_back(parameters, {name: value})
                self._loading.setdefault(name, {})
            else:
                # A private copy: the tensor may lie in a receive buffer that is used again.
                kept = value.clone() if isinstance(value, Tensor) else value
                self._loading.setdefault(name, {})[key] = kept
        self.residence.changed()
        if part.last:
            if absent := [name for name in parameters if name not in self._loading]:
                raise CheckpointError(
                    f"the checkpoint lacks weights of stage {self.index}: {absent[:5]}"
                )
            if self._optimizer is not None:
                state = {name: values for name, values in self._loading.items() if values}
                self.residence.load(self._optimizer, self._names, state)
            self._loading = {}

    def tied_weights(self) -> Tensors:
        """The weights here that have targets on other stages."""
        return {name: self._tied_copies[name].of(p) for name, p in self._sources.items()}

    def set_tied_weights(self, weights: Tensors) -> None:
        """Copy the sources among `weights` to their targets here."""
        with torch.no_grad():
            for name, source in self.ties.items():
                if source in weights:
                    self._place(self._targets, name, weights[source]).copy_(weights[source])

    @property
    def differentiates(self) -> bool:
        return self._info.train and (
            self.input_requires_grad or bool(self._parameters) or bool(self._targets)
        )

    def _fitting(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Bundle:
        """The bundle from the stage before. Raises ProtocolError unless it has the model's side
        tensors, and hidden_states with the micro-batch's rows and tokens: torch repeats axes of
        size 1, so that a wrong bundle could pass unnoticed."""
        if self.is_first:
            return received
        size = rows_and_tokens({name: tensor.shape for name, tensor in inputs.items()})
        forms = [(tuple(t.shape), t.dtype, t.requires_grad) for t in received]
        problem = self._shard.arrival_problem(forms, size)
        train, decoding = self._info.train, self._info.decoding
        # With a cache, side tensors may also cover earlier tokens.
        exact = decoding is None or not decoding.cached
        if problem is None and size is not None:
            problem = self._side_checks.problem(received[1:], *size, train=train, exact=exact)
        if problem:
            text = f"FORWARD of micro-batch {micro_batch} for stage {self.index}: {problem}"
            raise ProtocolError(text)
        return received

    def arrival_problem(self, forms: Sequence[Form], rows: int, tokens: int) -> str | None:
        """The problem with these tensors, or None. Does not check the forms of side tensors."""
        return self._shard.arrival_problem(forms, (rows, tokens))

    def _leaves(self, received: Bundle) -> Bundle:
        needed = self._info.train and self.input_requires_grad
        return as_leaves(received) if received and needed else received

    @contextmanager
    def _running(self, micro_batch: int) -> Iterator[None]:
        self._seeds.micro_batch = micro_batch
        autocast: AbstractContextManager[Any] = nullcontext()
        if self._side_checks.autocast is not None:
            autocast = self._device.autocast(self._side_checks.autocast)
        with torch.set_grad_enabled(self.differentiates), autocast:
            yield

    def _note_finite(self, micro_batch: int, tensor: Tensor) -> None:
        # Kept on the device and read once per step: a look at it now would stall a GPU.
        if self._info.train:
            self._finite[micro_batch] = torch.isfinite(tensor.detach()).all()

    def _nonfinite(self) -> tuple[int, ...]:
        """Micro-batches whose output was not finite. One read: each read waits for the device."""
        if not self._finite:
            return ()
        finite = self._device.to_host(torch.stack(list(self._finite.values()))).tolist()
        return tuple(sorted(k for k, ok in zip(self._finite, finite, strict=True) if not ok))


class EarlyGradients:
    """Hands on final gradients of one stage before its backward pass ends, beginning with the last
    layers. `to_host` copies tensors into CPU memory."""

    def __init__(
        self,
        stage: int,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        to_host: Callable[[Sequence[Tensor]], list[Tensor]],
    ) -> None:
        self._stage = stage
        self._parameters = list(parameters)
        self._to_host = to_host
        self._hooks: list[Any] = []  # none before the first step with a taker
        self._take: TakeEarly | None = None
        self._late: frozenset[str] | None = None  # None: outside of `last_backward`
        self._waiting: Tensors = {}
        self.given: set[str] = set()
        """The parameters whose gradients of this step have been taken."""

    def begin(self, take: TakeEarly | None) -> None:
        """Begin a step. `take` (None: no taker) gets gradients that become final in
        `last_backward`. They may share the parameter's gradient memory until the step's end."""
        self._take, self._late = take, None
        self._waiting, self.given = {}, set()
        if take is not None and not self._hooks:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(weakly(self._note_final, name))
                for name, parameter in self._parameters
            ]

    @contextmanager
    def last_backward(self, late: Iterable[str] = ()) -> Iterator[None]:
        """Within the block a gradient is final once added to, unless its parameter is `late`.
        Gradients that fill no part, or find no room, are not given early."""
        self._late = frozenset(late)
        try:
            yield
        finally:
            self._late, self._waiting = None, {}

    def close(self) -> None:
        """Remove the hooks and forget the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._parameters, self._hooks, self._waiting = [], [], {}

    def _note_final(self, name: str, parameter: Tensor) -> None:
        assert name not in self.given, f"the gradient of {name} grows after others have it"
        if self._take is None or self._late is None or name in self._late:
            return
        assert parameter.grad is not None
        self._waiting[name] = parameter.grad
        nbytes = sum(gradient.nbytes for gradient in self._waiting.values())
        if nbytes < EARLY_PART_BYTES or not self._take.has_room():
            return
        gradients, self._waiting = self._waiting, {}
        self.given.update(gradients)
        here = self._to_host(list(gradients.values()))
        part = StatePart(dict(zip(gradients, here, strict=True)))
        self._take.take(GradientPart(self._stage, 0, part))


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    """`total` + `more`, in the memory of `total` if there is one."""
    return more if total is None else total.add_(more)
