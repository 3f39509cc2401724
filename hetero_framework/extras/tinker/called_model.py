"""The model that calls train: one adapter, over the processes of a plan.

A step stays open between calls: several passes add up, and `optim_step` commits. What is lost with
a worker is made again: the stages go back to the durable step, and the calls since then are
repeated (`repeat`). Their results have the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from hetero_framework import log
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.engine.grad_clip import clip_factor
from hetero_framework.engine.stage import WEIGHTS
from hetero_framework.engine.stage_api import GradientReport, StepInfo
from hetero_framework.errors import CheckpointError, ConfigError, HeteroError, UserError
from hetero_framework.extras.talking.generation import Generator
from hetero_framework.extras.talking.sampling import SampleRequest, SampleResult
from hetero_framework.extras.tinker.datums import CallExamples, Limits
from hetero_framework.models.adapters.lora import explicit_settings, plan_adapter
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.files.export import OutputDirectory, write_adapter
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.library import quiet_libraries
from hetero_framework.models.sizing.memory import estimate_memory
from hetero_framework.models.verify.equivalence import admit, admit_adapter, why_not_chunked
from hetero_framework.security.access import Access
from hetero_framework.trainer.checkpoint import CheckpointReader, CheckpointStore, durable_store
from hetero_framework.trainer.continuation import versions
from hetero_framework.trainer.durable import DurableSteps, NamedTensors, load_by_name, write_state
from hetero_framework.trainer.resolution import Resolved
from hetero_framework.trainer.setup import (
    Prepared,
    fit_devices,
    largest_boundary,
    largest_frame,
    load_initial_adapter,
)
from hetero_framework.trainer.train_state import TrainState

_log = logging.getLogger(__name__)
_MOST_TOKENS = 1 << 15
_ALPHA = 32
FAULTS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that a bug raises: the call is answered as failed. All others end the server."""
_ADAM = ("beta1", "beta2", "eps", "weight_decay")
T = TypeVar("T")


@dataclass(frozen=True)
class Lora:
    """The adapter that a client asks for."""

    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class CalledModel:
    """One base model, and the adapter of it that is trained. All methods belong to one thread.

    `done` is the number of the last call that is part of the state; `durable` that of the durable
    step. `repeat(after, up_to)` does the calls between two numbers again.
    """

    def __init__(self, config: Config, cluster: Cluster, source: ModelSource) -> None:
        """Starts the processes."""
        self._given, self._cluster, self._source = config, cluster, source
        self._facts = cluster.start(config.plan.owners)
        self.tokenizer = load_tokenizer(config)
        text = source.config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None)
        self.limits = Limits(int(text.vocab_size), min(longest or _MOST_TOKENS, _MOST_TOKENS))
        self.kind = str(source.config.model_type)
        self.rows = config.training.per_device_train_batch_size
        self.repeat: Callable[[int, int], None] = lambda after, up_to: None
        self.done = 0
        self._config: Config | None = None
        self._open: list[CallExamples] = []
        self._added = 0  # calls of the open step whose gradients the stages have
        self._reports: list[GradientReport] = []
        self._repeats = False  # calls are done again
        self._mine: dict[str, torch.Tensor] = {}  # the trained weights, while others are in place

    # -- the model ------------------------------------------------------------------------------

    def make(self, lora: Lora, *, goes_on: bool = False) -> None:
        """Load the model with a new adapter; if it `goes_on`, with the state that a killed process
        left. Raises UserError."""
        config = self._adapted(lora)
        self._plan = plan_adapter(self._source.config, _adapter(config), config.base_dir)
        if config.training.verify_architecture:
            admit_adapter(self._source.config, self._plan)
        config, self._in_flight = self._fitted(config)
        self._config, self._step, self.done = config, TrainState(), 0
        store = durable_store(config)
        kept = store.complete_steps() if goes_on else []
        if not goes_on:
            store.remove()
        self._cluster.assemble(config, self._in_flight)
        self._durable = DurableSteps(config, self._cluster, self._manifest)
        about = config, self._source.config, self.tokenizer, self._source.generation
        self._generator = Generator(*about, most_tokens=_MOST_TOKENS)
        self._drop()
        if kept:
            self.load(store.open(kept[-1]), with_optimizer=True)
            self.done = int(self._step.group["calls"])

    def _adapted(self, lora: Lora) -> Config:
        """The configuration with this adapter; module names are those of the model's linears."""
        model = meta_model(self._source.config)
        head, modules = model.get_output_embeddings(), []
        wanted = {"attn": lora.train_attn, "mlp": lora.train_mlp}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                kind = "attn" if "attn" in name or "attention" in name else "mlp"
                take = lora.train_unembed if module is head else wanted[kind]
                modules += [name.rpartition(".")[2]] * take
        if self._source.config.get_text_config().tie_word_embeddings:
            modules = [name for name in modules if name != "lm_head"]
        if not modules:
            raise UserError("the model has no modules of the kinds that the adapter is to train")
        adapter = {"r": lora.rank, "lora_alpha": _ALPHA, "target_modules": sorted(set(modules))}
        seed = self._given.training.seed if lora.seed is None else lora.seed
        made = self._given.with_changes(adapter=adapter, training={"seed": seed})
        plan = plan_adapter(self._source.config, _adapter(made), made.base_dir)
        return made.with_changes(adapter=explicit_settings(_adapter(made), plan))

    def _fitted(self, config: Config) -> tuple[Config, tuple[int, ...] | None]:
        """The configuration with what the memory of the devices decides, and how many micro-batches
        each stage has memory for. Raises PlanError where a stage does not fit."""
        row: Any = SimpleNamespace(row_tokens=min(config.row_tokens, self.limits.longest))
        sizes = {"tokens": row.row_tokens, "plan": self._plan}
        memory = estimate_memory(config, self._source.config, **sizes)
        about = self._source, self.tokenizer, row, self._plan, memory, 0, 0
        fitted = fit_devices(Prepared(Resolved.start(config), *about), self._facts)
        return fitted.config, fitted.memory_limits

    @property
    def steps(self) -> int:
        """The number of steps that are part of the state."""
        return self._step.step

    @property
    def durable(self) -> int:
        """The number of the last call that need not be done again after a loss."""
        newest = self._durable.newest
        return int(newest.state.group["calls"]) if newest is not None else 0

    @property
    def _made(self) -> Config:
        if self._config is None:
            raise UserError("there is no model yet: create_model makes one")
        return self._config

    def _manifest(self, state: TrainState, values: dict[str, Any]) -> dict[str, Any]:
        config = self._made
        settings = {"settings": config.to_dict(), "base_dir": str(config.base_dir.absolute())}
        return {
            "base": self._cluster.fingerprint,
            "config": settings,
            "position": state.state_dict(),
            "values": values,
            "versions": versions(),
        }

    # -- recovery -------------------------------------------------------------------------------

    def _exactly(self, do: Callable[[], T]) -> T:
        """Do something, and begin again whenever a worker's process is replaced meanwhile. What a
        mistake of this program left half done on the stages is undone."""
        tries = count()

        def attempt() -> T:
            if next(tries):
                self._go_back()
            log.set_step(self._step.step + 1)
            try:
                return self._cluster.retrying(do)
            except FAULTS as error:
                if self._repeats:
                    raise HeteroError("a call cannot be done again: start anew") from error
                self._cluster.retrying(self._cluster.pipeline.drain_commits)
                self._cluster.retrying(self._cluster.pipeline.abort)
                self._go_back()
                raise

        return self._cluster.recovery.outlive(attempt)

    def _go_back(self) -> None:
        """Have all stages take the durable step, and do the calls since then again."""
        state = self._cluster.retrying(self._durable.rewind)
        if state is None:
            self._cluster.assemble(self._made, self._in_flight)
            state = TrainState()
        # Nothing is forgotten where another loss ends this in between.
        kept = self._open, 0, self.done, self._repeats
        after = int(state.group.get("calls", 0))
        self._open, self._added, self._mine, self._step = [], 0, {}, state
        _log.warning("the calls after number %d are done again", after)
        self.done, self._repeats = after, True
        try:
            self.repeat(after, kept[2])
        finally:
            self._open, self._added, self.done, self._repeats = kept

    def _drop(self) -> None:
        """Forget the open step."""
        self._open, self._added, self._reports = [], 0, []

    def _set_aside(self) -> None:
        """Void the passes of the open step; `_add_up` does them again."""
        self._added = 0
        self._cluster.pipeline.abort()

    # -- calls ----------------------------------------------------------------------------------

    def forward(self, call: CallExamples) -> tuple[list[float], list[Mapping[str, torch.Tensor]]]:
        """Losses and named tensors of the micro-batches, without gradients."""
        _ = self._made

        def run() -> tuple[list[float], list[Mapping[str, torch.Tensor]]]:
            self._set_aside()
            self._cluster.begin(self._info(len(call.batches), train=False))
            losses = self._cluster.pipeline.run(call.batches)
            return losses, self._named()

        return self._exactly(run)

    def forward_backward(
        self, call: CallExamples
    ) -> tuple[list[float], list[Mapping[str, torch.Tensor]]]:
        """As `forward`; the gradients are added to those of the open step."""
        _ = self._made
        self._open.append(call)
        try:
            losses = self._exactly(self._add_up)
        except (UserError, *FAULTS):  # the call is answered as one that failed
            self._open.pop()
            self._exactly(self._set_aside)
            raise
        return losses, self._named()

    def _add_up(self) -> list[float]:
        """Bring the gradients of all calls of the open step together; the losses of the last."""
        first, self._added = self._added, 0  # an attempt that ends early voids all
        losses: list[float] = []
        for number, call in enumerate(self._open):
            if number >= first:
                self._cluster.begin(self._info(len(call.batches), continues=number > 0))
                losses = self._cluster.pipeline.run(call.batches)
                self._reports, _ = self._cluster.pipeline.report_gradients()
        self._added = len(self._open)
        return losses

    def _info(self, batches: int, *, train: bool = True, continues: bool = False) -> StepInfo:
        about = self._step.step, 0, train, batches, 1
        return StepInfo(*about, continues=continues or None)

    def _named(self) -> list[Mapping[str, torch.Tensor]]:
        return [dict(outcome.named) for outcome in self._cluster.pipeline.outcomes]

    def optim_step(self, adam: Mapping[str, float], number: int) -> dict[str, float]:
        """Commit the open step as call `number`. Returns metrics. Raises UserError, and changes no
        weight, if a gradient is not finite."""
        _, began = self._made, time.perf_counter()
        if not self._open:
            self._open.append(CallExamples([], []))
        values = tuple(float(adam[name]) for name in _ADAM)

        def commit() -> float:
            self._add_up()
            norm = self._cluster.loaded.order.global_norm(self._reports)
            if not bool(torch.isfinite(norm)) or any(r.nonfinite for r in self._reports):
                self._drop()
                self._cluster.pipeline.abort()
                what = "a gradient is not finite: the step is dropped, and no weight changed"
                raise UserError(what)
            factor, recover = clip_factor(norm, adam["grad_clip_norm"]), self._cluster.recovery
            rate = adam["learning_rate"]
            self._cluster.pipeline.commit(rate, factor, recover.recover, values)
            return float(norm)

        norm = self._exactly(commit)
        self._drop()
        self._advance(number)
        seconds = max(time.perf_counter() - began, 1e-6)
        self._exactly(lambda: self._durable.after_step(self._step, seconds))
        return {"grad_norm": norm}

    def _advance(self, number: int) -> None:
        """Note that call `number` has changed the state."""
        self._step = replace(self._step, step=self._step.step + 1, group={"calls": number})
        self.done = number

    # -- state ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write weights and optimizer, to be loaded under any plan."""
        _ = self._made

        def write() -> None:
            self._set_aside()
            store = CheckpointStore(folder)
            write_state(store, self._step, self._gather, {}, self._manifest)

        self._exactly(write)

    def _gather(self, take: Any) -> None:
        self._cluster.pipeline.snapshot(take)
        self._cluster.pipeline.finish_snapshot()

    def load(self, reader: CheckpointReader, *, with_optimizer: bool, number: int = 0) -> None:
        """Take over a saved state as call `number`; the open step is dropped."""
        if reader.manifest["base"] != self._cluster.loaded.fingerprint:
            raise CheckpointError("that state was trained on other weights than the model has")
        tensors: NamedTensors = reader if with_optimizer else _Weights(reader)
        values = reader.manifest["values"] if with_optimizer else {}

        def load() -> None:
            self._cluster.pipeline.abort()
            self._cluster.pipeline.rewind(None, {})
            load_by_name(self._cluster, tensors, values)

        try:
            self._exactly(load)
        except UserError:
            self._exactly(self._go_back)  # a part may be loaded
            raise
        self._drop()
        if number:
            self._advance(number)
        else:
            self._step = TrainState.load_state_dict(reader.manifest["position"])
        self._exactly(lambda: self._durable.take(self._step))

    def export(self, folder: Path) -> None:
        """Write the adapter as PEFT does."""
        model, _ = self._source.model, self._made
        base = None if model.name_or_path is None else self._source.place

        def write() -> None:
            self._set_aside()
            tensors = (part.tensors for _, _, part in self._cluster.pipeline.export())
            output = OutputDirectory(folder, overwrite=True)
            about = self._plan, base, model.revision, self.tokenizer
            write_adapter(output, tensors, *about)

        self._exactly(write)

    # -- samples --------------------------------------------------------------------------------

    def sample(
        self, requests: Sequence[SampleRequest], adapter: Path | None, is_now: bool
    ) -> list[SampleResult]:
        """The samples of each request, by the weights of an `adapter` (None: of the base model) or,
        if it `is_now`, by those that are trained. Raises DataError for what the model cannot do."""

        def run() -> list[SampleResult]:
            self._set_aside()
            do = partial(self._generator.sample, self._cluster, requests, step=self._step.step)
            return do() if is_now else self._with_weights(adapter, do)

        return self._exactly(run)

    def _with_weights(self, adapter: Path | None, do: Callable[[], T]) -> T:
        """Do something while the stages have an adapter's weights, or none of an adapter."""
        pipeline, trained = self._cluster.pipeline, self._cluster.loaded.trained
        if self._mine:  # an earlier attempt ended in between
            pipeline.load_weights(self._mine)
        self._mine = pipeline.weights(name for names in trained.values() for name in names)
        if adapter is None:
            pipeline.load_weights(
                {name: torch.zeros_like(t) for name, t in self._mine.items() if "lora_B" in name}
            )
        else:
            config = self._made.with_changes(adapter={"init_from": str(adapter)})
            plan = plan_adapter(self._source.config, _adapter(config), config.base_dir)
            load_initial_adapter(plan, self._source.config, config.plan.stages, pipeline)
        try:
            result = do()
        except UserError:
            pipeline.load_weights(self._mine)
            self._mine = {}
            raise
        pipeline.load_weights(self._mine)
        self._mine = {}
        return result


class _Weights:
    """The weights of a checkpoint, without the optimizer."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def names(self) -> Sequence[str]:
        return [name for name in self._reader.names() if name.startswith(f"{WEIGHTS}/")]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return self._reader.read(names)


def prepared(config: Config) -> tuple[Config, ModelSource]:
    """The settings of an endpoint, and its model. Raises UserError for what it cannot have."""
    config.require("model")
    training = config.training
    if training.fp16:
        raise ConfigError("hetero serve does not train in fp16", hint="bf16 needs no loss scale")
    if not training.optim.startswith("adamw_torch"):
        problem = f"training.optim {training.optim!r} does not take Adam's numbers with each call"
        raise ConfigError(problem, hint='set it to "adamw_torch"')
    if config.adapter is not None:
        _log.info("the adapter of the configuration is not used: clients say rank and modules")
    quiet_libraries(training.log_level)
    changes: dict[str, Any] = {"objective": "calls", "max_grad_norm": 0.0}
    # A call has any number of micro-batches; the check of the memory counts those under way.
    changes["gradient_accumulation_steps"] = 2 * len(config.shard_plan)
    config = config.with_changes(adapter=None, training=changes)
    source = ModelSource.of(config)
    config.plan.covers(introspect(source.config).num_layers)
    if why_not_chunked(source.config) is not None:
        config = config.with_changes(training={"loss_chunk_tokens": None})
    if training.verify_architecture and len(config.shard_plan) > 1:
        admit(source.config, tuple(map(ShardRange.of, config.plan.stages)))
    return config, source


def cluster_for(config: Config, source: ModelSource, access: Access, run_id: str) -> Cluster:
    """The processes of the plan, to be started."""
    boundary = largest_boundary(config, source.config, _MOST_TOKENS)
    structure = introspect(source.config)
    return Cluster(
        config,
        max_frame_bytes=largest_frame(source.config, boundary),
        max_boundary_bytes=boundary,
        run_id=run_id,
        access=access,
        id_layers=structure.id_readers,
        statistics=structure.statistics,
    )


def _adapter(config: Config) -> Any:
    assert config.adapter is not None
    return config.adapter
