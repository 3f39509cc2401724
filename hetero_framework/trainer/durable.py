"""The durable step: the newest step whose whole state is on the coordinator.

When a process dies, the run goes back to that step. At intervals the trained weights and optimizer
states of all stages are copied to the coordinator, between the tasks of the next steps
(`Pipeline.snapshot`). When the copy is complete, finite and hashed, its step is durable and
replaces the durable step before. It is also written to `output_dir/.durable` without waiting for
the disk: it outlives this process, but not a power cut.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.engine.pipeline import HeldState
from hetero_framework.engine.stage import OPTIMIZER, WEIGHTS
from hetero_framework.engine.stage_api import StatePart
from hetero_framework.engine.state_snapshot import digest, in_parts
from hetero_framework.errors import CheckpointError, ResourceError
from hetero_framework.log import event
from hetero_framework.trainer.checkpoint import CheckpointStore, durable_store
from hetero_framework.trainer.train_state import TrainState
from hetero_framework.units import plural

SHARE = 0.05
"""Share of the time that copying may take; see `interval_steps`."""
MAX_STEPS = 100
MAX_WORK_S = 300.0
_FIRST_STEPS = 3
_SEAL_S = 600.0
_log = logging.getLogger(__name__)


def interval_steps(copy_s: float, step_s: float) -> int:
    """Steps from one copy to the next: the fewest that keep copying within SHARE of the time. An
    undisturbed copy takes `copy_s`. A failure repeats at most MAX_STEPS steps and MAX_WORK_S
    seconds of work, even if copying then takes more than SHARE."""
    wanted = math.ceil(copy_s / (SHARE * step_s))
    return max(1, min(wanted, MAX_STEPS, int(MAX_WORK_S / step_s)))


Cut = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DurableStep:
    """A step's whole state. Hosts know it by `committed`, the number of the last commit before it.
    `cut` has the layers [start, end) of each stage."""

    state: TrainState
    committed: int | None
    stages: Mapping[int, HeldState]
    cut: Cut


class DurableSteps:
    """The durable step of one run. `after_step` in the training thread keeps it fresh."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        manifest: Callable[[TrainState, dict[str, Any]], dict[str, Any]],
        beside: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        """`manifest(state, values)` is the manifest of a checkpoint; `beside()` gives tensors of
        this process that belong to the state and are never changed in place."""
        self._every = config.training.replicate_steps
        self._cut = _cut(config)
        self._cluster = cluster
        self._manifest = manifest
        self._beside = beside
        self._store = durable_store(config)
        self._newest: DurableStep | None = None
        self._sealing: Future[DurableStep | None] | None = None
        self._begun_step = 0
        self.copy_s: float | None = None
        """Seconds that the last undisturbed copy took; None before the first."""
        self._step_s: deque[float] = deque(maxlen=20)
        self._told: int | None = None

    @property
    def newest(self) -> DurableStep | None:
        """The durable step, after waiting for a later step that is being hashed and written."""
        self._take_sealed(wait_s=_SEAL_S)
        return self._newest

    def written_step(self) -> int:
        """The newest step on the disk, after waiting for a write under way; 0 without any."""
        _ = self.newest
        return max(self._store.complete_steps(), default=0)

    def take(self, state: TrainState, *, write: bool = True) -> Mapping[int, HeldState] | None:
        """Copy the present state, wait for the copy and return it by stage; None if it is not
        finite. Without `write` it stays in memory. After LinkLost, call this again."""
        newest = self.newest
        if newest is None or newest.state != state:
            began = time.monotonic()
            self._begin(state, write=write)
            self._cluster.pipeline.finish_snapshot()
            self.copy_s = time.monotonic() - began
            newest = self.newest
        return newest.stages if newest is not None and newest.state == state else None

    def after_step(self, state: TrainState, seconds: float) -> None:
        """Note that a step is done and took `seconds`. Raises LinkLost."""
        self._take_sealed()
        if not self._step_s:
            # The first commit makes the optimizer's state, so a copy has its full size now.
            self.take(state)
        self._step_s.append(seconds)
        if (
            not self._cluster.pipeline.is_copied
            and state.step - self._begun_step >= self.interval()
        ):
            self._begin(state)

    def interval(self) -> int:
        """Steps from one copy to the next, as the steps so far suggest."""
        if self._every != "auto":
            return self._every
        if len(self._step_s) < _FIRST_STEPS or self.copy_s is None:
            return MAX_STEPS
        step_s = statistics.median(self._step_s)
        steps = interval_steps(self.copy_s, step_s)
        if self._told is None or not self._told / 2 <= steps <= self._told * 2:
            self._told = steps
            share = self.copy_s / (steps * step_s)
            more = f", which takes up to {share:.0%} of the time" if share > 2 * SHARE else ""
            text = "a failure repeats at most %s, about %.0f s%s"
            chosen = event("durable steps", steps=steps, copy_s=round(self.copy_s, 3))
            _log.info(text, plural(steps, "step"), steps * step_s, more, extra=chosen)
        return steps

    def replanned(self, config: Config) -> None:
        """Note that the run has other stages now. The former stages' durable step stays."""
        self._take_sealed(wait_s=_SEAL_S)
        self._cut = _cut(config)
        self._step_s.clear()

    def rewind(self) -> TrainState | None:
        """Have every stage go back to the durable step, even if it was copied under another plan.
        Returns None if there is no durable step yet, or if its copy has changed in memory. Raises
        LinkLost and StagesLost."""
        if (step := self.newest) is None:
            return None
        self._begun_step = step.state.step
        damaged = [k for k, held in step.stages.items() if digest(held.parts) != held.digest]
        if damaged:
            text = "the copy of stage %d after step %d has changed here: test the memory"
            _log.error(text, damaged[0], step.state.step)
            self._newest = None
            return None
        if step.cut == self._cut:
            self._cluster.pipeline.rewind(step.committed, step.stages)
        else:
            self._cluster.pipeline.rewind(None, {})
            parts = [part for held in step.stages.values() for part in held.parts]
            values = {name: value for part in parts for name, value in part.values.items()}
            load_by_name(self._cluster, TensorsInMemory(parts), values)
        return step.state

    def close(self) -> None:
        """Wait for a write under way."""
        if self._sealing is not None:
            wait_for([self._sealing], _SEAL_S)

    def remove(self) -> None:
        """Remove the durable step from the disk, since the run is finished."""
        self.close()
        self._store.remove()

    # -- inside ---------------------------------------------------------------------------------

    def _begin(self, state: TrainState, *, write: bool = True) -> None:
        pipeline, copied = self._cluster.pipeline, dict[int, list[StatePart]]()
        beside = self._beside() if write else None
        seal = partial(self._seal, state, pipeline.committed, copied, beside)

        def arrived(stage: int, number: int, part: StatePart) -> None:
            # The part's tensors are valid only during this call.
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in part.tensors.items()}
            parts = copied.setdefault(stage, [])
            del parts[number:]  # read again over a new link
            parts.append(StatePart(tensors, dict(part.values), part.last))
            if sum(received[-1].last for received in copied.values()) == len(self._cut):
                self._take_sealed(wait_s=_SEAL_S)
                self._sealing = in_background(seal, "durable step")

        pipeline.snapshot(arrived)  # a link that breaks here changes nothing
        self._begun_step = state.step

    def _seal(
        self,
        state: TrainState,
        committed: int | None,
        copied: Mapping[int, list[StatePart]],
        beside: Mapping[str, torch.Tensor] | None,
    ) -> DurableStep | None:
        """Hash a state that was copied and, with the tensors `beside` it, write it; in a thread.
        None if the state is not finite."""
        for stage, parts in sorted(copied.items()):
            for part in parts:
                for name, tensor in part.tensors.items():
                    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                        bad = event("state not finite", "kept the one before", step=state.step)
                        text = "%s of stage %d is not finite after step %d; that is not kept"
                        _log.warning(text, name, stage, state.step, extra=bad)
                        return None
        stages = {k: HeldState(parts, digest(parts)) for k, parts in copied.items()}
        if beside is not None:
            try:
                write_state(self._store, state, parts_of(stages), beside, self._manifest)
            except ResourceError as error:
                failed = event("durable step not written", "it is in memory", step=state.step)
                text = "the state after step %d is in memory only: %s"
                _log.warning(text, state.step, error.message, extra=failed)
        return DurableStep(state, committed, stages, self._cut)

    def _take_sealed(self, wait_s: float = 0.0) -> None:
        if self._sealing is None or not wait_for([self._sealing], wait_s):
            return
        sealed, self._sealing = self._sealing.result(), None
        if sealed is not None:
            self._newest = sealed
            _log.debug("step %d is durable", sealed.state.step)


def _cut(config: Config) -> Cut:
    return tuple((stage.start, stage.end) for stage in config.plan.stages)


TakePart = Callable[[int, int, StatePart], None]
"""Takes a part of a state with its stage and number; its tensors are valid during the call."""
BESIDE = "beside/"
"""Prefix of the tensors in a checkpoint that belong to no stage."""


def parts_of(stages: Mapping[int, HeldState]) -> Callable[[TakePart], None]:
    """A function that calls its argument with every part of a state in memory."""

    def gather(take: TakePart) -> None:
        for stage, held in sorted(stages.items()):
            for number, part in enumerate(held.parts):
                take(stage, number, part)

    return gather


def write_state(
    store: CheckpointStore,
    state: TrainState,
    gather: Callable[[TakePart], None],
    beside: Mapping[str, torch.Tensor],
    manifest: Callable[[TrainState, dict[str, Any]], dict[str, Any]],
) -> Path:
    """Write a checkpoint of the parts that `gather` brings and of the tensors `beside` them, which
    get the number of a stage after the last. `manifest` makes the manifest of the parts' plain
    values. Raises ResourceError."""
    values, stages = dict[str, Any](), set[int]()
    with store.begin(state.step) as writer:

        def take(stage: int, number: int, part: StatePart) -> None:
            stages.add(stage)
            if part.tensors:
                writer.add(stage, number, dict(part.tensors))
            values.update(part.values)

        gather(take)
        if beside:
            writer.add(len(stages), 0, {f"{BESIDE}{name}": t for name, t in beside.items()})
        return writer.commit(manifest(state, values))


# Weights are "weights/<parameter>", optimizer state "optimizer/<key>/<parameter>", as tensors or as
# plain values: the stages of any plan can take them over.


class NamedTensors(Protocol):
    """Tensors by name, on a disk or in memory; a `CheckpointReader` is one."""

    def names(self) -> Sequence[str]: ...
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each named tensor with its name. Raises CheckpointError for an absent name."""


class TensorsInMemory:
    """The tensors of state parts."""

    def __init__(self, parts: Iterable[StatePart]) -> None:
        self._tensors = {name: t for part in parts for name, t in part.tensors.items()}

    def names(self) -> Sequence[str]:
        return sorted(self._tensors)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            if name not in self._tensors:
                raise CheckpointError(f"there is no tensor {name!r} in it")
            yield name, self._tensors[name]


def load_by_name(cluster: Cluster, tensors: NamedTensors, values: Mapping[str, Any]) -> None:
    """Have every stage take over its trained parameters. Raises LinkLost and StagesLost, and
    CheckpointError for a weight without a tensor."""
    states, value_names = by_parameter(tensors.names()), by_parameter(values)
    for stage, parameters in enumerate(cluster.loaded.state_names):
        wanted: dict[str, dict[str, Any]] = {}
        for name in parameters:
            wanted[f"{WEIGHTS}/{name}"] = {n: values[n] for n in value_names.get(name, ())}
            wanted.update({n: {} for n in states.get(name, ())})
        entries = ((name, tensor, wanted[name]) for name, tensor in tensors.read(wanted))
        cluster.pipeline.load_state(stage, "checkpoint", in_parts(entries))
    cluster.pipeline.share_tied_weights()


def by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """The names "optimizer/<key>/<parameter>" among these, by parameter."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind == OPTIMIZER:
            grouped.setdefault(rest.partition("/")[2], []).append(name)
    return grouped
