"""Saves a run's whole state as a checkpoint and loads it again, keyed by parameter name.

State is bound to no process or machine: a checkpoint of three stages resumes in five, or in one.
Random numbers and the data's order are functions of the seed and the step, so a checkpoint keeps
only the step's number for them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config, TrainingConfig, interval
from hetero_framework.engine.stage import WEIGHTS
from hetero_framework.engine.stage_api import StatePart
from hetero_framework.errors import CheckpointError, HeteroError, ResourceError
from hetero_framework.log import event
from hetero_framework.trainer.checkpoint import CheckpointReader, CheckpointStore, durable_store
from hetero_framework.trainer.continuation import check_identity, identity, versions
from hetero_framework.trainer.durable import (
    BESIDE,
    DurableSteps,
    TakePart,
    TensorsInMemory,
    by_parameter,
    load_by_name,
    parts_of,
    write_state,
)
from hetero_framework.trainer.setup import Prepared
from hetero_framework.trainer.train_state import TrainState
from hetero_framework.units import size

_log = logging.getLogger(__name__)


class RunCheckpoints:
    """The checkpoints of one run: writes and restores them, and advises how to continue."""

    def __init__(self, store: CheckpointStore, cluster: Cluster, prepared: Prepared) -> None:
        self._store = store
        self._cluster = cluster
        self._prepared = prepared
        self._last: tuple[int, Path] | None = None  # the step, and the store's directory
        replicates = prepared.config.replicates
        durable = DurableSteps(prepared.config, cluster, self.manifest, lambda: self.beside())
        self._durable = durable if replicates else None
        self.beside: Callable[[], Mapping[str, torch.Tensor]] = dict
        """Tensors of this process that belong to the state, in addition to the stages' tensors."""
        self.restored: dict[str, torch.Tensor] = {}
        """The tensors of `beside` in the checkpoint that was loaded last."""
        self.failures = 0
        """Number of failed writes since the last checkpoint that was written."""

    def begin(self, state: TrainState) -> None:
        """Note that the run begins or goes on at `state`, which all stages have. Recovery does not
        go back further. Raises StagesLost."""
        if (durable := self._durable) is not None:
            self._cluster.retrying(lambda: durable.take(state))

    def after_step(self, state: TrainState, seconds: float) -> None:
        """Note that a step of this many seconds is done."""
        if (durable := self._durable) is not None:
            self._cluster.retrying(lambda: durable.after_step(state, seconds))

    def hold(self, state: TrainState) -> bool:
        """Keep the present state of the stages, for `rewind`; return whether that was done. Raises
        StagesLost and WorkerLeaving."""
        if (durable := self._durable) is not None:
            return self._cluster.retrying(lambda: durable.take(state)) is not None
        return state.step == 0 or self.keep(state)

    def replanned(self, prepared: Prepared) -> None:
        """Note that the run has another plan. The kept state stays, and `rewind` gives it to the
        new stages."""
        self._prepared = prepared
        if self._durable is not None:
            self._durable.replanned(prepared.config)

    def rewind(self) -> TrainState | None:
        """Have all stages go back to the newest state that is kept; None where there is none.
        Raises StagesLost."""
        if self._durable is not None:
            state = self._cluster.retrying(self._durable.rewind)
            if state is not None:
                return state
        if self._last is None:
            return None
        step, root = self._last
        self._cluster.retrying(lambda: self._cluster.pipeline.rewind(None, {}))
        return self.restore(CheckpointStore(root).open(step))

    def gather(self, take: Callable[[StatePart], None]) -> None:
        """Call `take` with every part of the stages' present state. A part's tensors are valid
        during the call. If a link breaks, the calls begin again with the first part."""
        self._cluster.retrying(lambda: self._gather(lambda stage, number, part: take(part)))

    def take_over(
        self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], state: TrainState
    ) -> None:
        """Give every stage the tensors of another replica, and go on from its `state`. Raises
        StagesLost."""
        held = TensorsInMemory([StatePart(dict(tensors))])

        def load() -> None:
            self._cluster.pipeline.rewind(None, {})
            load_by_name(self._cluster, held, values)

        self._cluster.retrying(load)
        self.begin(state)

    def keep_newest(self) -> None:
        """Make a checkpoint of the durable step, since the run ends without a worker's answer."""
        newest = self._durable.newest if self._durable is not None else None
        if newest is None or (self._last is not None and self._last[0] >= newest.state.step):
            return
        with contextlib.suppress(ResourceError):
            gather = parts_of(newest.stages)
            write_state(self._store, newest.state, gather, self.beside(), self.manifest)
            self._last = newest.state.step, self._store.root

    def close(self) -> None:
        """Wait for a write under way."""
        if self._durable is not None:
            self._durable.close()

    def finished(self) -> None:
        """Drop the state kept for going on, since the run has its result."""
        if self._durable is not None:
            self._durable.remove()

    def save(self, state: TrainState) -> ResourceError | None:
        """Gather every stage's state into `step_<n>`; log its place, or return the error."""
        return self._save(self._store, state)

    def keep(self, state: TrainState) -> bool:
        """Save before the run ends, among temporary files if `checkpoint_dir` fails. Returns False
        if both fail."""
        if not self.has(state):
            self._save(self._store, state)
        if not self.has(state):
            with contextlib.suppress(OSError):
                self._save(CheckpointStore(tempfile.mkdtemp(prefix="hetero-checkpoint-")), state)
        return self.has(state)

    def has(self, state: TrainState) -> bool:
        """Whether the last checkpoint is of this step."""
        return self._last is not None and self._last[0] == state.step

    def best(self) -> CheckpointReader | None:
        """The best checkpoint; None where there is none that can be read. As with the Trainer, no
        earlier one takes its place."""
        if (step := self._store.best_step) is None:
            return None
        try:
            return self._store.resolve(step)
        except CheckpointError as error:
            self._store.damaged.add(step)
            _log.warning("%s", error.message)
        return None

    def take(self, reader: CheckpointReader) -> None:
        """Give the stages the state of a checkpoint; the run's position stays."""
        self._cluster.retrying(lambda: self._cluster.pipeline.rewind(None, {}))
        self._cluster.retrying(lambda: self._load(reader))

    def last(self) -> CheckpointReader | None:
        """The run's last complete checkpoint; None where there is none. Raises CheckpointError
        where none can be read."""
        if self._last is None:
            return None
        step, root = self._last
        try:
            return CheckpointStore(root).resolve(step)
        except CheckpointError as error:
            _log.warning("%s", error.message)
            return CheckpointStore(root).resolve("latest")

    def restore(self, reader: CheckpointReader) -> TrainState:
        """Give every stage its part of a checkpoint that has passed `check_identity`.

        Raises CheckpointError when it is damaged or lacks anything, or when the run began with
        other weights than those that are loaded now.
        """
        state = self._cluster.retrying(lambda: self._load(reader))
        if reader.directory.parent == self._store.root:
            self._last = state.step, self._store.root
        total = self._prepared.data.total_steps
        if state.step > total:
            text = "checkpoint %d lies beyond the %d steps of this run: nothing is left to train"
            _log.warning(text, state.step, total)
        return state

    def advice(self, error: HeteroError | None = None) -> str:
        """The hint of the error, and how to continue from the saved state afterwards."""
        step, root = self._last or (0, self._store.root)
        elsewhere = f" --set checkpoint_dir={root}" if root != self._store.root else ""
        if self._durable is not None and not elsewhere:
            step = max(step, self._durable.written_step())
        if step == 0:
            go_on = "run the same command or call again to start over: nothing has been saved yet"
        elif elsewhere:
            go_on = f"continue after step {step} with --resume latest{elsewhere}"
        else:
            go_on = f"continue after step {step} with the same command or with --resume latest"
            go_on += "; --fresh begins anew (in Python: the same call, or with fresh=True)"
        return ". Then ".join(filter(None, [error.hint if error else None, go_on]))

    def _save(self, store: CheckpointStore, state: TrainState) -> ResourceError | None:
        try:
            path = self._cluster.retrying(lambda: self._write(store, state))
        except ResourceError as error:
            self.failures += 1
            failed = event("checkpoint failed", "the run goes on", step=state.step)
            text = "checkpoint %d could not be written: %s"
            _log.warning(text, state.step, error.message, extra=failed)
            return error
        self.failures = 0
        if path is None:
            return None  # reported already
        self._last = state.step, store.root
        _log.info("checkpoint: %s", path, extra=event("checkpoint written", step=state.step))
        return None

    def _write(self, store: CheckpointStore, state: TrainState) -> Path | None:
        """Write the present state of the stages; None where it is not finite."""
        gather: Callable[[TakePart], None] = self._gather
        if self._durable is not None:
            if (stages := self._durable.take(state, write=False)) is None:
                return None
            gather = parts_of(stages)
        return write_state(store, state, gather, self.beside(), self.manifest)

    def _gather(self, take: TakePart) -> None:
        self._cluster.pipeline.snapshot(take)
        self._cluster.pipeline.finish_snapshot()

    def manifest(self, state: TrainState, values: dict[str, Any]) -> dict[str, Any]:
        """The manifest of a checkpoint of `state`; `values` are the stages' plain values."""
        resolved, config = self._prepared.resolved, self._prepared.config
        settings = {"settings": config.to_dict(), "base_dir": str(config.base_dir.absolute())}
        stream = self._prepared.data.state
        return {
            **({} if stream is None else {"stream": stream}),
            "identity": identity(resolved.given, self._prepared.data.fingerprint),
            "given": resolved.given.to_dict(),
            "contents": self._prepared.contents,
            "base": self._cluster.fingerprint,
            "config": settings,
            "position": state.state_dict(),
            "plan": plan_entries(config),
            "given_plan": plan_entries(resolved.given),
            "values": values,
            "versions": versions(),
        }

    def _load(self, reader: CheckpointReader) -> TrainState:
        loaded = self._cluster.loaded
        if reader.manifest["base"] != loaded.fingerprint:
            raise CheckpointError(
                f"checkpoint {reader.step} began with other weights than the model has now",
                hint="put the model back as it was, or start without --resume",
            )
        state = TrainState.load_state_dict(reader.manifest["position"])
        self._prepared.data.restore(reader.manifest.get("stream"))
        values: dict[str, Any] = reader.manifest["values"]
        with_state = by_parameter(reader.names()).keys() | by_parameter(values).keys()
        known = {name for stage in loaded.state_names for name in stage}
        _check_content(reader, known, with_state, state)
        load_by_name(self._cluster, reader, values)
        names = [name for name in reader.names() if name.startswith(BESIDE)]
        self.restored = {name.removeprefix(BESIDE): t.clone() for name, t in reader.read(names)}
        return state


def _check_content(
    reader: CheckpointReader, trained: Set[str], with_state: Set[str], state: TrainState
) -> None:
    """Raise CheckpointError for tensors that no stage trains, and for an optimizer without state.
    `with_state` are the parameters that have optimizer state."""
    weights = {name.partition("/")[2] for name in reader.names() if name.startswith(f"{WEIGHTS}/")}
    if extra := sorted((weights | with_state) - trained):
        shown = ", ".join(extra[:8]) + (", ..." if len(extra) > 8 else "")
        raise CheckpointError(
            f"checkpoint {reader.step} has {len(extra)} tensors that no stage trains: {shown}",
            hint="it was written by a run with another model or adapter",
        )
    if state.step != reader.step:
        problem = f"it says that {state.step} steps were done"
        raise CheckpointError(f"checkpoint {reader.step} is damaged: {problem}")
    optim = reader.manifest["config"]["settings"]["training"]["optim"]
    if state.committed_steps and not with_state and optim != "sgd":
        raise CheckpointError(
            f"checkpoint {reader.step} has no optimizer state; going on without it would be "
            "another run",
            hint="to begin a new run from these weights: hetero export --checkpoint "
            f"{reader.directory} --output DIR, then name DIR in model.name_or_path (an adapter: "
            "in adapter.init_from)",
        )


def plan_entries(config: Config) -> list[dict[str, Any]]:
    """The plan of a configuration as JSON types."""
    return [entry.model_dump(mode="json") for entry in config.shard_plan]


def plan_in_force(reader: CheckpointReader, config: Config) -> list[dict[str, Any]] | None:
    """The plan that a run had changed to when it wrote this checkpoint. None if the run had changed
    nothing, or if `config` has another first plan or lacks one of the plan's workers."""
    plan, given = reader.manifest["plan"], reader.manifest["given_plan"]
    if given != plan_entries(config) or plan == given:
        return None
    known = {"local", *(worker.id for worker in config.workers)}
    return plan if {entry["id"] for entry in plan} <= known else None


def newest_state(
    config: Config, store: CheckpointStore, which: int | str | None, may_lack: bool
) -> CheckpointReader | None:
    """The state that `which` names: a step or "latest", which counts the durable step too. Returns
    None if `which` is None or, with `may_lack`, if there is no state at all. Raises
    CheckpointError; only "latest" passes over damaged states."""
    if which != "latest":
        return store.resolve(which) if which is not None else None
    durable = durable_store(config)
    steps, saved = durable.complete_steps(links=True), store.complete_steps(links=True)
    if may_lack and not steps and not store.paths():
        return None
    if steps and steps[-1] > max(saved, default=-1):
        try:
            return durable.resolve(steps[-1])
        except CheckpointError as error:
            if not saved:
                raise
            _log.warning("%s; looking at the checkpoints", error.message)
    return store.resolve("latest")


def same_run(
    reader: CheckpointReader, prepared: Prepared, *, must: bool
) -> CheckpointReader | None:
    """`reader` if its checkpoint is of this run, else None; with `must` raises CheckpointError."""
    try:
        check_identity(reader, prepared.resolved, prepared.data, prepared.contents)
    except CheckpointError as error:
        if must:
            raise
        _log.warning("the run that was cut short here is another one (%s)", error.message)
        return None
    what = "the run that was cut short here goes on after step %d (--fresh begins anew)"
    if not must:
        _log.info(what, reader.step)
    return reader


def warn_of_a_small_disk(prepared: Prepared, store: CheckpointStore, done: int) -> None:
    """Warn if the disk lacks room for the checkpoints that the run adds, at least two. `done` is
    the number of steps done. Raises CheckpointError if the directory cannot be read."""
    training = prepared.config.training
    if training.save_strategy == "no":
        return
    data = prepared.data
    most = checkpoints_at_once(training, data.total_steps, data.steps_per_epoch)
    there = sum(step <= done for step in store.complete_steps()) if done else 0
    nbytes = sum(memory.trained_bytes + memory.states for memory in prepared.memory)
    needed = nbytes * max(most - there, 2)
    try:
        folders = (store.root, *store.root.absolute().parents)
        free = shutil.disk_usage(next(path for path in folders if path.exists())).free
    except OSError as error:
        _log.warning("the free space for checkpoints in %s is not known: %s", store.root, error)
        return
    if free < needed:
        _log.warning(
            "a checkpoint takes about %s, and the run writes up to %d beside each other: %s are "
            "needed, %s are free in %s. Free some, lower training.save_total_limit or set another "
            "checkpoint_dir; a checkpoint that does not fit is left out",
            *(size(nbytes), max(most - there, 2), size(needed), size(free), store.root),
        )


def checkpoints_at_once(training: TrainingConfig, total_steps: int, steps_per_epoch: int) -> int:
    """The most checkpoints that the run has on its disk at once, including the one being written;
    at least 2."""
    every = steps_per_epoch
    if training.save_strategy == "steps":
        every = interval(training.save_steps, total_steps)
    saves = math.ceil(total_steps / every)  # the last one is at the end, whatever the interval
    limit = training.save_total_limit
    return max(2, saves if limit is None else min(saves, limit + 1))
