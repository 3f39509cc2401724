"""`StageHost`: the stages of one process, the coordinator's or a worker's.

One thread uses a `StageHost`. Tensors that leave the stages go to its `StepSink`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from hetero_framework.config import Config
from hetero_framework.core import failpoints
from hetero_framework.core import messages as m
from hetero_framework.core.devices import Device
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import LoadKind, Message, StateKind
from hetero_framework.core.spans import Span
from hetero_framework.engine import stage_api as api
from hetero_framework.engine.boundary_io import (
    ArrivalMeter,
    BoundaryIO,
    StepSink,
    inputs_in,
    move_in,
)
from hetero_framework.engine.executor import Executor
from hetero_framework.engine.expectation import Expectation
from hetero_framework.engine.hosts import BatchInputs
from hetero_framework.engine.out_of_memory import explaining
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.state_snapshot import digest
from hetero_framework.errors import ProtocolError


class StageHost:
    """Stages that are in this process. `last_step` is the last step committed here (None:
    none yet); `schedule` is the schedule of the last step that began. A lack of memory raises
    StepOutOfMemory (the attempt may be repeated), but in a commit OutOfMemory, which is final."""

    def __init__(
        self,
        stages: Sequence[api.StageInterface],
        config: Config,
        device: Device,
        meter: ArrivalMeter,
        sink: StepSink,
        *,
        id: WorkerId = "local",
        keeps_state: bool = False,
    ) -> None:
        """A worker's sink gets losses as numbers; the coordinator's sink may get tensors. With
        `keeps_state` the last snapshot stays in memory, for `rewind`."""
        self.id = id
        self.config = config
        self.stages = list(stages)
        self.indexes = [stage.index for stage in stages]
        self.last_step: int | None = None
        self.schedule = StepSchedule(())
        self._device = device
        self._meter = meter
        self._keeps_state = keeps_state
        self.expectation = Expectation(stages)
        """Checks boundary tensors for the readers of links."""
        self._io = BoundaryIO(
            device,
            config.wire,
            sink,
            self.expectation,
            outcome_is_awaited=id != "local",
            flush_timeout_s=config.training.step_timeout_s,
        )
        self._executor = Executor(stages, device, meter.recorder, self._io)
        self._last_attempt = -1
        self._began: tuple[int, bool] | None = None
        self._reported = False
        self._given: set[int] = set()  # stages whose gradients were handed out
        self._summed: set[int] = set()  # stages that have the sums of all replicas
        self._tied_sums: set[int] = set()  # stages that have the sums of their targets
        self._early: list[tuple[Message, Any]] = []
        self._snapshots: dict[int, api.Snapshot] = {}
        self._snapshot_step: int | None = None
        self._export: Iterator[api.StatePart] = iter(())
        self._exported: tuple[int, int] | None = None

    @property
    def info(self) -> api.StepInfo | None:
        """The attempt that began last; None before the first and after `abort`."""
        return self._executor.info

    # -- a step ---------------------------------------------------------------------------------

    def begin(
        self, info: api.StepInfo, schedule: StepSchedule, take: api.TakeEarly | None = None
    ) -> None:
        """Begin a step, or begin it again, and forget what belongs to an earlier attempt. In a
        summed step `take` gets gradients early, before their stage is done."""
        with self._explaining("begin of a step", info):
            failpoints.hit("step")
            self._device.reset_peak_memory()
            self.expectation.begin(info.attempt, info.micro_batches)
            self._last_attempt, self._reported, self.schedule = info.attempt, False, schedule
            self._given, self._summed, self._tied_sums = set(), set(), set()
            self._executor.begin(info, schedule, take)
        if self._began == (info.step, info.train) and info.decoding is None:
            self._device.empty_cache()  # repeated, maybe since memory ran out somewhere
        self._began = info.step, info.train
        early, self._early = self._early, []
        for message, arrival in early:
            self.data(message, arrival)

    def feed(self, stage: int, micro_batch: int, names: Sequence[str], batch: BatchInputs) -> None:
        """Give a stage the inputs of a micro-batch that it needs: `names` of `batch`."""
        with self._explaining(f"stage {stage}, inputs of micro-batch {micro_batch}", self.info):
            inputs = inputs_in(self._device, {name: batch.tensors[name] for name in names})
        info, shapes = self._executor.info, {name: t.shape for name, t in inputs.items()}
        if info is not None:
            self.expectation.inputs(info.attempt, stage, micro_batch, shapes)
        self._executor.put_inputs(stage, micro_batch, inputs)

    def has_inputs(self, stage: int) -> bool:
        """Whether inputs of a micro-batch wait for this stage."""
        return self._executor.has_inputs(stage)

    def data(self, message: Message, arrival: Any) -> None:
        """Take INPUTS, FORWARD or BACKWARD with the result of `unpack`, of this attempt or of a
        later attempt, if another worker has heard of that before us."""
        body = message.body
        assert isinstance(body, (m.Inputs, m.BoundaryTensor))
        info, executor = self._executor.info, self._executor
        if body.attempt > (info.attempt if info is not None else self._last_attempt):
            self._early.append((message, arrival))
            return
        if not self.is_running(body.step, body.attempt):
            message.release()
            return
        here: Any = arrival
        if self._device.one_thread:
            where = f"stage {body.stage}, {message.name} of micro-batch {body.micro_batch}"
            with self._explaining(where, self.info):
                here = move_in(self._device, arrival)
        if isinstance(body, m.Inputs):
            executor.put_inputs(body.stage, body.micro_batch, here)
        elif isinstance(body, m.Forward):
            executor.put_hidden(body.stage, body.micro_batch, here)
        else:
            executor.put_gradient(body.stage, body.micro_batch, here)

    def run_next(self) -> bool:
        """Do one task in this thread; False if none is ready and has its turn."""
        return self._executor.run_next()

    @property
    def waits_s(self) -> float:
        """See `Executor.waits_s`."""
        return self._executor.waits_s

    def gradients(self) -> list[api.GradientPart]:
        """Gradients of stages that are done, each part once. A summed step gives all gradients, any
        other step only gradients of weights tied to other stages. The caller releases them;
        `load_state` brings the sums back."""
        info = self._executor.info
        if info is None or not info.train:
            return []
        gradients = []
        for stage in self.stages if info.summed else [s for s in self.stages if s.ties]:
            if stage.index not in self._given and self._executor.is_through(stage.index):
                self._given.add(stage.index)
                with self._explaining(f"gradients of stage {stage.index}", self.info):
                    parts = enumerate(stage.gradients())
                    gradients += [api.GradientPart(stage.index, k, part) for k, part in parts]
        return gradients

    def report(self) -> api.HostReport | None:
        """The report, once in a training step, when all work is done and awaited sums are here."""
        info = self._executor.info
        if self._reported or info is None or not info.train or not self._executor.is_done:
            return None
        if info.summed and len(self._summed) < len(self.stages):
            return None
        if any(s.awaits_sums and s.index not in self._tied_sums for s in self.stages):
            return None
        self._reported = True
        self._io.flush()
        gradients: dict[int, api.GradientReport] = {}
        with self._explaining("norms of the gradients", self.info):
            failpoints.hit("norms")
            for stage in self.stages:
                gradients[stage.index] = stage.report_gradients()
        arrivals, peak = self._meter.take(), self._device.peak_memory()
        figures = {
            index: replace(
                counted,
                peak_memory_bytes=peak,
                arrive_forward_s=arrivals["forward"].get(index, 0.0),
                arrive_backward_s=arrivals["backward"].get(index, 0.0),
            )
            for index, counted in self._executor.statistics().items()
        }
        return api.HostReport(gradients, figures)

    def commit(self, order: m.Commit, tied_weights: api.Tensors | None = None) -> api.Tensors:
        """Have the stages step their optimizers, or change nothing when repeated. Returns the new
        weights that other stages are tied to. Raises ProtocolError for another attempt's order."""
        if self.last_step == order.step:
            return {}
        if not self.is_running(order.step, order.attempt):
            asked = f"COMMIT of step {order.step}, attempt {order.attempt}"
            raise ProtocolError(f"{asked}, whose gradients are not here")
        if order.adam is not None and len(order.adam) != 4:
            raise ProtocolError(f"COMMIT has {len(order.adam)} settings of Adam instead of 4")
        failpoints.hit("commit")
        for snapshot in self._snapshots.values():
            snapshot.keep()
        for stage in self.stages:
            with self._explaining(f"stage {stage.index}, step of the optimizer", None):
                self._executor.commit(stage, order.learning_rate, order.grad_scale, order.adam)
        self.last_step = order.step
        weights = self.tied_weights()
        if new := {**(tied_weights or {}), **weights}:
            for stage in self.stages:
                stage.set_tied_weights(new)
        failpoints.hit("commit-done")
        return weights

    def abort(self) -> None:
        """Forget the attempt."""
        failpoints.hit("abort")
        self._io.flush()
        self._executor.abort()

    # -- state ----------------------------------------------------------------------------------

    def snapshot(self, step: int | None) -> None:
        """Keep the state after `step` (None: before the first) readable for `state`, whatever is
        committed later. Raises ProtocolError if another step is committed."""
        if self._snapshots and self._snapshot_step == step:
            return
        if self.last_step != step:
            news = f"step {self.last_step} is committed"
            raise ProtocolError(f"the state after step {step} is gone: {news}")
        self._snapshots = {s.index: s.snapshot(lasting=self._keeps_state) for s in self.stages}
        self._snapshot_step = step

    def state(
        self, stage: int, kind: StateKind, number: int, step: int | None, names: Sequence[str] = ()
    ) -> api.StatePart:
        """Part `number` of a stage's "checkpoint" after `step`, of its "export", or of its present
        "weights" `names`. Parts are asked for in ascending order. The caller releases them."""
        live = self._executor.stage(stage)
        if kind == "weights":
            return live.weights(names, number)
        if kind == "export":
            failpoints.hit("gather")
            return self._export_part(stage, number)
        failpoints.hit("state-part")
        self.snapshot(step)
        if number == 0 and self.last_step == step:
            # Read from the start again: nothing has changed since.
            self._snapshots[stage] = live.snapshot(lasting=self._keeps_state)
        return self._snapshots[stage].part(number)

    def _export_part(self, stage: int, number: int) -> api.StatePart:
        if number == 0:
            self._export = self._executor.stage(stage).export()
        elif self._exported != (stage, number - 1):
            raise ProtocolError(f"state part {number} of stage {stage} was asked for out of order")
        if (part := next(self._export, None)) is None:
            raise ProtocolError(f"stage {stage} has no state part {number}")
        self._exported = (stage, number)
        return part

    def rewind(self, step: int | None) -> api.RewoundState:
        """Go back to the state after the commit of `step`. Stages that kept it take it over; others
        get it with `load_state`."""
        kept = self._snapshots if self._keeps_state and self._snapshot_step == step else {}
        self._snapshots, self.last_step = kept, step
        digests = {}
        for index, snapshot in kept.items():
            for part in snapshot.parts():
                self._executor.stage(index).load_state("checkpoint", part)
            digests[index] = digest(snapshot.parts())
        return api.RewoundState(digests)

    def load_state(self, stage: int, kind: LoadKind, number: int, part: api.StatePart) -> bool:
        """Have a stage take over a part of its state."""
        failpoints.hit("load-state")
        if kind in ("gradients", "tied gradients"):
            self._take_sums(stage, kind, part)
            return True
        if kind != "tied weights":
            self._snapshots = {}
        self._executor.stage(stage).load_state(kind, part)
        return True

    def _take_sums(self, stage: int, kind: LoadKind, part: api.StatePart) -> None:
        """Give a stage its sums. Raises ProtocolError if the stage waits for none."""
        live = self._executor.stage(stage)
        is_tied = kind == "tied gradients"
        waits = live.awaits_sums and not self._reported if is_tied else stage in self._given
        had = self._tied_sums if is_tied else self._summed
        if not waits or stage in had or self._executor.info is None:
            raise ProtocolError(f"sums of gradients came for stage {stage}, which waits for none")
        with self._explaining(f"sums of stage {stage}", self.info):
            live.load_state(kind, part)
        if part.last:
            had.add(stage)

    def tied_weights(self) -> api.Tensors:
        """The weights here that other stages are tied to."""
        return {name: w for stage in self.stages for name, w in stage.tied_weights().items()}

    def take_spans(self) -> list[Span]:
        """Spans recorded since the last call; times are by this process's clock."""
        return self._meter.recorder.take()

    def flush(self) -> None:
        """See `Sender.flush`."""
        self._io.flush()

    def close(self) -> None:
        self.expectation.close()
        self._io.close()

    def _explaining(self, where: str, info: api.StepInfo | None) -> AbstractContextManager[None]:
        attempt = None if info is None else (info.step, info.attempt)
        return explaining(where, self._device, attempt)

    def is_running(self, step: int, attempt: int) -> bool:
        """Whether this attempt has begun here and is not forgotten."""
        info = self._executor.info
        return info is not None and (step, attempt) == (info.step, info.attempt)
