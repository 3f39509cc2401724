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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.engine.pipeline import HeldState
from hetero_framework.engine.stage_api import StatePart
from hetero_framework.engine.state_snapshot import digest
from hetero_framework.errors import ResourceError
from hetero_framework.log import event
from hetero_framework.trainer.checkpoint import CheckpointWriter, durable_store
from hetero_framework.trainer.state_by_parameter import TensorsInMemory, load_by_name
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


@dataclass
class _Gathering:
    """A state that is being copied."""

    state: TrainState
    committed: int | None
    write: bool
    beside: Mapping[str, torch.Tensor]
    parts: dict[int, list[StatePart]] = field(default_factory=dict)


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
        self._gathering: _Gathering | None = None
        self._sealing: Future[DurableStep | None] | None = None
        self._begun_step = 0
        self.copy_s: float | None = None
        """Seconds that the last undisturbed copy took; None before the first."""
        self._step_s: deque[float] = deque(maxlen=20)
        self._told: int | None = None

    @property
    def newest(self) -> DurableStep | None:
        """The durable step, after waiting for a later step that is being hashed and written."""
        if self._sealing is not None:
            wait_for([self._sealing], _SEAL_S)
            self._take_sealed()
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
        if self._gathering is None and state.step - self._begun_step >= self.interval():
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
        self._gathering, self._cut = None, _cut(config)
        self._step_s.clear()

    def rewind(self) -> TrainState | None:
        """Have every stage go back to the durable step, even if it was copied under another plan.
        Returns None if there is no durable step yet, or if its copy has changed in memory. Raises
        LinkLost and StagesLost."""
        if (step := self.newest) is None:
            return None
        self._gathering, self._begun_step = None, step.state.step
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
            load_by_name(self._cluster.loaded, TensorsInMemory(parts), values)
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
        pipeline = self._cluster.pipeline
        pipeline.snapshot(self._arrived)  # a link that breaks here changes nothing
        self._gathering = _Gathering(state, pipeline.committed, write, self._beside())
        self._begun_step = state.step

    def _arrived(self, stage: int, number: int, part: StatePart) -> None:
        gathering = self._gathering
        assert gathering is not None
        # The part's tensors are valid only during this call.
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in part.tensors.items()}
        parts = gathering.parts.setdefault(stage, [])
        del parts[number:]  # read again over a new link
        parts.append(StatePart(tensors, dict(part.values), part.last))
        ended = [k for k, received in gathering.parts.items() if received[-1].last]
        if len(ended) == len(self._cut):
            self._gathering = None
            self._take_sealed(wait_s=_SEAL_S)
            self._sealing = in_background(lambda: self._seal(gathering), "durable step")

    def _seal(self, gathering: _Gathering) -> DurableStep | None:
        """Hash and write the gathered state, in a thread. None if it is not finite."""
        state = gathering.state
        for stage, parts in sorted(gathering.parts.items()):
            for part in parts:
                for name, tensor in part.tensors.items():
                    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                        bad = event("state not finite", "kept the one before", step=state.step)
                        text = "%s of stage %d is not finite after step %d; that is not kept"
                        _log.warning(text, name, stage, state.step, extra=bad)
                        return None
        stages = {k: HeldState(parts, digest(parts)) for k, parts in gathering.parts.items()}
        if gathering.write:
            self._write(state, stages, gathering.beside)
        return DurableStep(state, gathering.committed, stages, self._cut)

    def _write(
        self, state: TrainState, stages: Mapping[int, HeldState], beside: Mapping[str, torch.Tensor]
    ) -> None:
        try:
            with self._store.begin(state.step) as writer:
                write_stages(writer, stages, beside, lambda values: self._manifest(state, values))
        except ResourceError as error:
            failed = event("durable step not written", "it is in memory", step=state.step)
            text = "the state after step %d is in memory only: %s"
            _log.warning(text, state.step, error.message, extra=failed)

    def _take_sealed(self, wait_s: float = 0.0) -> None:
        if self._sealing is None or not wait_for([self._sealing], wait_s):
            return
        sealed, self._sealing = self._sealing.result(), None
        if sealed is not None:
            self._newest = sealed
            _log.debug("step %d is durable", sealed.state.step)


def _cut(config: Config) -> Cut:
    return tuple((stage.start, stage.end) for stage in config.plan.stages)


def write_stages(
    writer: CheckpointWriter,
    stages: Mapping[int, HeldState],
    beside: Mapping[str, torch.Tensor],
    manifest: Callable[[dict[str, Any]], dict[str, Any]],
) -> Path:
    """Write a checkpoint of a state in memory: its `stages`, and the tensors `beside` them.
    `manifest` makes the manifest from the state's plain values."""
    values: dict[str, Any] = {}
    for stage, held in sorted(stages.items()):
        for number, part in enumerate(held.parts):
            if part.tensors:
                writer.add(stage, number, dict(part.tensors))
            values.update(part.values)
    write_beside(writer, len(stages), beside)
    return writer.commit(manifest(values))


BESIDE = "beside/"
"""Prefix of the tensors in a checkpoint that belong to no stage."""


def write_beside(writer: CheckpointWriter, number: int, beside: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors `beside` the stages as those of a stage `number`, after the last stage."""
    if beside:
        writer.add(number, 0, {f"{BESIDE}{name}": tensor for name, tensor in beside.items()})
