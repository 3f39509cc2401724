"""The engine: drives micro-batches through all stages, local and remote.

One thread computes and decides here; readers and writers of the links work beside it. The policy
is schedule.py's, the numbers are the stages'; this module only moves things.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero_framework import control
from hetero_framework.config import StageSpec
from hetero_framework.core.protocol import Message, MessageType
from hetero_framework.errors import PeerLostError
from hetero_framework.trainer import messages
from hetero_framework.trainer.peers import Event, LinkLost, Peers, WorkerId
from hetero_framework.trainer.runner import Arrival, StageRunner
from hetero_framework.trainer.verbs import (
    GradientReport,
    StageVerbs,
    StatePart,
    StepInfo,
    Tensors,
)

_POLL_S = 0.5


@dataclass(frozen=True)
class StageStatistics:
    """One stage in one step: seconds busy, seconds waiting, longest queue, its worker's peak."""

    busy_s: float
    wait_s: float
    queue_peak: int
    peak_memory_bytes: int


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Pipeline:
    """All stages of the model as one thing that can run a step."""

    def __init__(
        self,
        stages: Sequence[StageSpec],
        local: Sequence[StageVerbs],
        peers: Peers,
        *,
        window: int,
        step_timeout_s: float,
        local_peak_memory: Callable[[], int] = lambda: 0,
        to_host: Callable[[torch.Tensor], torch.Tensor] = _same,
        from_host: Callable[[torch.Tensor], torch.Tensor] = _same,
    ) -> None:
        """`local` are the stages of this process; the others are reached through `peers`.

        `to_host` and `from_host` move tensors between this process's device and memory that the
        wire can read.
        """
        self._stages = list(stages)
        self._runner = StageRunner(local, outbox=self)
        self._peers = peers
        self._window = window
        self._step_timeout_s = step_timeout_s
        self._local_peak_memory = local_peak_memory
        self._to_host = to_host
        self._from_host = from_host
        self._info = StepInfo(step=0, attempt=0, train=True, micro_batches=0, num_items=1)
        self._losses: dict[int, float] = {}
        self._finished: set[int] = set()
        self._replies: dict[tuple[WorkerId, MessageType], Message] = {}
        self._aborting: dict[WorkerId, object] = {}
        self._requests = 0
        self._last_progress = time.monotonic()
        self._began = time.perf_counter()
        peers.route(stages)

    # -- one step, in the order of its verbs ----------------------------------------------------

    def begin(self, info: StepInfo) -> None:
        """Announce a step to every stage."""
        self._info = info
        self._losses.clear()
        self._finished.clear()
        self._replies.clear()
        self._began = time.perf_counter()
        self._peers.expect(info.step, info.attempt)
        self._runner.begin(info)
        for worker in self._peers.workers:
            self._peers.send(worker, messages.step_message(info))

    def run(self, batches: Sequence[Tensors]) -> list[float]:
        """Drive all micro-batches forward (and backward); their losses in micro-batch order.

        Raises LinkLost when a link breaks and PeerLostError when nothing moves any more.
        """
        launched = 0
        self._last_progress = time.monotonic()
        while len(self._finished) < len(batches) or len(self._losses) < len(batches):
            self._drain()
            while launched < len(batches) and launched - len(self._finished) < self._window:
                self._launch(launched, batches[launched])
                launched += 1
            if self._runner.run_next():
                self._last_progress = time.monotonic()
                continue
            self._wait(lambda: f"losses of micro-batches {self._open_micro_batches(batches)}")
        return [self._losses[k] for k in range(len(batches))]

    def collect(self) -> list[GradientReport]:
        """Every stage's gradient norms, in stage order; tied gradients are summed on the way."""
        for worker in self._peers.workers:
            self._peers.send(worker, self._step_only(MessageType.COLLECT))
        reports: dict[int, GradientReport] = {}
        for worker in self._peers.workers:
            reports.update(messages.reports_of(self._reply(worker, MessageType.GRADIENTS)))
        tied = next(
            (r.tied_gradient for r in reports.values() if r.tied_gradient is not None), None
        )
        # From the back: where `local` holds the head too, its share is known first.
        for stage in reversed(self._runner.stages):
            report = stage.collect(tied if stage.is_first else None)
            tied = report.tied_gradient if report.tied_gradient is not None else tied
            reports[stage.index] = report
        return [reports[spec.index] for spec in self._stages]

    def commit(
        self, learning_rate: float, grad_scale: float, recover: Callable[[LinkLost], None]
    ) -> dict[int, StageStatistics]:
        """Step everywhere. Once this has begun, the step is decided: a link that breaks now is
        mended by `recover`, and the commit repeated; a worker that has done it already only
        says so.
        """
        for stage in self._runner.stages:
            stage.commit(learning_rate, grad_scale)
        tied = next((w for s in self._runner.stages if (w := s.tied_weight()) is not None), None)
        for stage in self._runner.stages:
            if stage.is_last and tied is not None:
                stage.set_tied_weight(tied)
        last_owner = self._stages[-1].owner
        pending = set(self._peers.workers)
        orders = {
            worker: messages.commit_message(
                self._info, learning_rate, grad_scale, tied if worker == last_owner else None
            )
            for worker in self._peers.workers
        }
        replies: dict[WorkerId, Message] = {}
        to_send = list(self._peers.workers)
        while pending:
            try:
                while to_send:
                    self._peers.send(to_send[0], orders[to_send[0]])
                    to_send.pop(0)
                for worker in sorted(pending, key=str):
                    replies[worker] = self._reply(worker, MessageType.COMMITTED)
                    pending.discard(worker)
            except LinkLost as lost:
                recover(lost)
                self._replies.pop((lost.worker, MessageType.COMMITTED), None)
                pending.add(lost.worker)
                if lost.worker not in to_send:
                    to_send.append(lost.worker)
        return self.statistics(replies)

    def abort(self) -> None:
        """Forget the step everywhere; weights stay as they are. When it returns, nothing that was
        sent before is on its way any more.

        After LinkLost it may be called again: a worker that is aborting already is not told twice.
        """
        self._runner.abort()
        for worker in self._peers.workers:
            link = self._peers.generation(worker)
            if self._aborting.get(worker) is not link:
                self._replies.pop((worker, MessageType.ABORTED), None)
                self._aborting[worker] = link
                self._peers.send(worker, self._step_only(MessageType.ABORT))
        for worker in [w for w in self._peers.workers if w in self._aborting]:
            self._reply(worker, MessageType.ABORTED)
            del self._aborting[worker]
        for message in self._replies.values():
            message.release()
        self._replies.clear()

    # -- state ----------------------------------------------------------------------------------

    def read_state(self, kind: str) -> Iterator[tuple[int, int, StatePart]]:
        """(stage, part number, part) of every stage; one part in memory at a time."""
        for spec in self._stages:
            if self._runner.owns(spec.index):
                for number, part in enumerate(self._runner.stage(spec.index).state(kind)):
                    yield spec.index, number, part
                continue
            number, last = 0, False
            while not last:
                self._peers.send(
                    spec.owner,
                    Message(
                        MessageType.STATE_REQUEST,
                        {"stage": spec.index, "kind": kind, "part": number},
                    ),
                )
                message = self._reply(spec.owner, MessageType.STATE)
                part = messages.state_part(message)
                yield spec.index, number, part
                message.release()
                number, last = number + 1, part.last

    def load_state(self, stage: int, kind: str, parts: Iterable[StatePart]) -> None:
        """Have a stage take over its parts of a "checkpoint", an "adapter" or a "tied" weight."""
        spec = self._stages[stage]
        for number, part in enumerate(parts):
            if self._runner.owns(stage):
                self._runner.stage(stage).load_state(kind, part)
                continue
            self._peers.send(spec.owner, messages.load_state_message(stage, kind, number, part))
            self._reply(spec.owner, MessageType.STATE_LOADED)

    def share_tied_weight(self) -> None:
        """After loading: give the head the embedding's weight where they are one."""
        tied = next((w for s in self._runner.stages if (w := s.tied_weight()) is not None), None)
        if tied is not None:
            self.load_state(len(self._stages) - 1, "tied", [StatePart({"tied": tied}, last=True)])

    # -- messages of others' making ---------------------------------------------------------------

    def control(self, worker: WorkerId, name: str, data: Any = None) -> Any:
        """Ask a worker's handler for `name`; its answer. Raises UserError when it has none."""
        self._requests += 1
        self._peers.send(worker, control.request(self._requests, name, data))
        message = self._reply(worker, MessageType.CONTROL)
        message.release()
        return control.result(message)

    # -- what stages hand on --------------------------------------------------------------------

    def hidden(self, stage: int, micro_batch: int, hidden_BSD: torch.Tensor) -> None:
        if self._runner.owns(stage):
            self._runner.put_hidden(stage, micro_batch, Arrival(hidden_BSD))
        else:
            host = self._to_host(hidden_BSD)
            message = messages.hidden_message(self._info, stage, micro_batch, host)
            self._peers.send(self._peers.owner(stage), message)

    def gradient(self, stage: int, micro_batch: int, gradient_BSD: torch.Tensor | None) -> None:
        if self._runner.owns(stage):
            self._runner.put_gradient(stage, micro_batch, Arrival(gradient_BSD))
        else:
            host = self._to_host(gradient_BSD) if gradient_BSD is not None else None
            message = messages.gradient_message(self._info, stage, micro_batch, host)
            self._peers.send(self._peers.owner(stage), message)

    def loss(self, micro_batch: int, loss: float) -> None:
        self._losses[micro_batch] = loss

    def finished(self, micro_batch: int) -> None:
        self._finished.add(micro_batch)

    # -- inside ---------------------------------------------------------------------------------

    def _launch(self, micro_batch: int, inputs: Tensors) -> None:
        """Let one more micro-batch in: what stages need of it goes ahead of the activations."""
        for spec in self._stages:
            needed = stage_inputs(spec, inputs)
            if self._runner.owns(spec.index):
                on_device = {name: self._from_host(tensor) for name, tensor in needed.items()}
                self._runner.put_inputs(spec.index, micro_batch, on_device)
            else:
                message = messages.inputs_message(self._info, spec.index, micro_batch, needed)
                self._peers.send(spec.owner, message)

    def _drain(self) -> None:
        while (event := self._peers.receive(0)) is not None:
            self._handle(event)

    def _wait(self, waiting_for: Callable[[], str]) -> None:
        """Block for the next event. Raises PeerLostError after `step_timeout_s` without any."""
        event = self._peers.receive(_POLL_S)
        if event is not None:
            self._handle(event)
        elif time.monotonic() - self._last_progress > self._step_timeout_s:
            raise PeerLostError(
                f"nothing has moved for {self._step_timeout_s:.0f} s in step "
                f"{self._info.step + 1}; waiting for {waiting_for()}",
                hint="a worker hangs or is far slower than planned: look at its screen; "
                "training.step_timeout_s sets this limit",
            )

    def _handle(self, event: Event) -> None:
        self._last_progress = time.monotonic()
        message = event.message
        assert message is not None
        kind, meta = message.type, message.meta
        if "attempt" in meta and (meta["step"], meta["attempt"]) != self._key:
            message.release()
        elif kind is MessageType.FORWARD:
            self._runner.put_hidden(meta["stage"], meta["micro_batch"], self._arrival(message))
        elif kind is MessageType.BACKWARD:
            self._runner.put_gradient(meta["stage"], meta["micro_batch"], self._arrival(message))
        elif kind is MessageType.LOSS:
            self.loss(meta["micro_batch"], meta["loss"])
            if not self._info.train:
                self.finished(meta["micro_batch"])
        elif kind is MessageType.BYE:
            raise LinkLost(event.worker, meta["reason"])
        elif kind is MessageType.CONTROL and meta.get("answers") != self._requests:
            message.release()
        else:
            self._replies[event.worker, kind] = message

    def _arrival(self, message: Message) -> Arrival:
        return messages.arrival(message, self._from_host)

    def _reply(self, worker: WorkerId, kind: MessageType) -> Message:
        self._last_progress = time.monotonic()
        while (worker, kind) not in self._replies:
            self._wait(lambda: f"{kind.name} of worker {worker}")
        return self._replies.pop((worker, kind))

    @property
    def _key(self) -> tuple[int, int]:
        return (self._info.step, self._info.attempt)

    def _step_only(self, kind: MessageType) -> Message:
        return Message(kind, {"step": self._info.step, "attempt": self._info.attempt})

    def _open_micro_batches(self, batches: Sequence[Tensors]) -> str:
        return ", ".join(str(k) for k in range(len(batches)) if k not in self._finished)

    def statistics(
        self, replies: Mapping[WorkerId, Message] | None = None
    ) -> dict[int, StageStatistics]:
        """Of the step so far: this process's stages, and those in the workers' COMMITTED."""
        seconds = time.perf_counter() - self._began
        raw = {
            index: {**values, "peak_memory_bytes": self._local_peak_memory()}
            for index, values in self._runner.statistics().items()
        }
        for message in (replies or {}).values():
            for index, values in message.meta["stats"]["stages"].items():
                raw[int(index)] = {
                    **values,
                    "peak_memory_bytes": message.meta["stats"]["peak_memory_bytes"],
                }
        return {
            index: StageStatistics(
                busy_s=values["busy_s"],
                wait_s=max(0.0, seconds - values["busy_s"]),
                queue_peak=int(values["queue_peak"]),
                peak_memory_bytes=int(values["peak_memory_bytes"]),
            )
            for index, values in sorted(raw.items())
        }


def stage_inputs(spec: StageSpec, inputs: Tensors) -> Tensors:
    """A stage's part of a micro-batch: tokens in front, labels at the end, masks everywhere."""
    return {
        name: tensor
        for name, tensor in inputs.items()
        if (name != "input_ids" or spec.is_first) and (name != "labels" or spec.is_last)
    }
