"""What the benchmarks play: the stages, times and sizes of a case.

A stage that sleeps takes its time without the CPU, so that two cores can play any number of
devices, and hands on tensors of the right size. What a step then takes is schedule and transport.
A case may have a small Llama instead, that is computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch

from benchmarks.network import Network
from hetero_framework import control
from hetero_framework.config import Config, StageSpec
from hetero_framework.core.devices import Device
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.engine.stage_api import (
    GradientReport,
    Outcome,
    Residence,
    StageInterface,
    StatePart,
    StepInfo,
    Tensors,
)
from hetero_framework.engine.state_snapshot import StateSnapshot
from hetero_framework.errors import UserError
from hetero_framework.models.cut.reuse import ReusePool
from hetero_framework.models.cut.side import Bundle
from hetero_framework.models.sizing.footprint import Form

_ROW_ELEMENTS = 1024
_STATE_FLOATS = 1 << 20


@dataclass(frozen=True)
class Llama:
    """A small model with random weights: float32, `layers` in all, rows of `tokens` tokens."""

    layers: int
    hidden_size: int = 256
    tokens: int = 256
    vocabulary: int = 1024

    def settings(self) -> dict[str, Any]:
        """The fields of transformers' LlamaConfig."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden_size // 64,
            "num_key_value_heads": self.hidden_size // 64,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
        }

    @property
    def activation_bytes(self) -> int:
        return self.tokens * self.hidden_size * 4

    def batches(self, count: int) -> list[Tensors]:
        """Micro-batches of one row of random tokens, the same in every process."""
        random = torch.Generator().manual_seed(0)
        shape = (count, 1, self.tokens)
        rows = torch.randint(self.vocabulary, shape, generator=random)
        mask = torch.ones_like(rows[0])
        return [{"input_ids": row, "attention_mask": mask, "labels": row} for row in rows]


@dataclass(frozen=True)
class Load:
    """What is played: devices, stages, times and sizes.

    `forward_s` and `backward_s` have one entry for each of `devices * chunks` stages; stage k is
    on device k modulo `devices`. `lengths` are relative lengths of the micro-batches, taken in
    turn: their time and their bytes are in proportion. `slow_s` makes every forward slower than
    the bound is told, to see that a measurement notices. With a `llama` nothing sleeps: the times
    are what was measured (`timed`). Every stage that sleeps has `state_bytes` of weights and
    optimizer, which its commits leave as they are.
    """

    devices: int
    micro_batches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: int
    chunks: int = 1
    lengths: tuple[float, ...] = (1.0,)
    slow_s: float = 0.0
    llama: Llama | None = None
    state_bytes: int = 0

    @classmethod
    def computing(cls, devices: int, micro_batches: int, llama: Llama, *, chunks: int = 1) -> Load:
        """A case with a real model; its times are not known yet."""
        unknown = (0.0,) * (devices * chunks)
        nbytes = llama.activation_bytes
        return cls(devices, micro_batches, unknown, unknown, nbytes, chunks, llama=llama)

    @classmethod
    def of(
        cls,
        devices: int,
        micro_batches: int,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        activation_bytes: int,
        *,
        chunks: int = 1,
        lengths: Sequence[float] = (1.0,),
        slow_s: float = 0.0,
    ) -> Load:
        """Times as the command line gives them: one for all devices, one for each device (a
        device's chunks share it evenly), or one for each stage.
        """
        return cls(
            devices,
            micro_batches,
            _per_stage(forward_s, devices, chunks),
            _per_stage(backward_s, devices, chunks),
            activation_bytes,
            chunks,
            tuple(lengths),
            slow_s,
        )

    @property
    def stages(self) -> int:
        return self.devices * self.chunks

    def device_of(self, stage: int) -> int:
        return stage % self.devices

    def length(self, micro_batch: int) -> float:
        return self.lengths[micro_batch % len(self.lengths)]

    @property
    def mean_length(self) -> float:
        return sum(self.length(k) for k in range(self.micro_batches)) / self.micro_batches

    def with_chunks(self, chunks: int) -> Load:
        """The same work on the same devices, cut into another number of stages."""
        if chunks == self.chunks:
            return self
        device_s = [
            [sum(times[d :: self.devices]) / chunks for d in range(self.devices)] * chunks
            for times in (self.forward_s, self.backward_s)
        ]
        return replace(
            self,
            forward_s=tuple(device_s[0]),
            backward_s=tuple(device_s[1]),
            chunks=chunks,
            slow_s=self.slow_s * self.chunks / chunks,
        )

    def timed(self, forward_s: Sequence[float], backward_s: Sequence[float]) -> Load:
        """The case with the seconds that its stages took for a micro-batch."""
        return replace(self, forward_s=tuple(forward_s), backward_s=tuple(backward_s))

    def layers_of(self, stage: int) -> range:
        """The layers of a stage: one where stages sleep, else an even share of the model's."""
        per_stage = self.llama.layers // self.stages if self.llama is not None else 1
        return range(stage * per_stage, (stage + 1) * per_stage)

    def plan(self) -> list[dict[str, Any]]:
        """The entries of `shard_plan`."""
        layers = [self.layers_of(k) for k in range(self.stages)]
        return [
            {"id": self.device_of(k) or "local", "start": own.start, "end": own.stop}
            for k, own in enumerate(layers)
        ]

    def profile(
        self,
        network: Network,
        *,
        relayed: bool,
        wire_share: tuple[float, float] = (1.0, 1.0),
        devices: Sequence[int] | None = None,
    ) -> Profile:
        """The case for `planner.bounds.step_bound`. `wire_share`: bytes of an activation and of a
        gradient on the wire, as a share of `activation_bytes`. Micro-batches of several lengths
        count as their mean.
        """
        places = list(devices) if devices is not None else [*range(self.devices)] * self.chunks
        mean = self.mean_length
        seconds = network.transfer_s(self.activation_bytes) * mean
        edges = []
        for before, after in pairwise(places):
            through = relayed and 0 not in (before, after)
            edges.append(
                Edge(
                    forward_s=seconds * wire_share[0],
                    backward_s=seconds * wire_share[1],
                    latency_s=network.delay_s / 2 * (2 if through else 1),
                    relay=0 if through else None,
                )
            )
        return Profile.of(
            [seconds * mean for seconds in self.forward_s],
            [seconds * mean for seconds in self.backward_s],
            devices=places,
            edges=edges,
        )

    def build(
        self, config: Config, specs: Sequence[StageSpec], device: Device, pool: ReusePool
    ) -> list[StageInterface]:
        """The stages of one process, for `Cluster` and `worker.serve`."""
        if self.llama is not None:
            return list(load_stages(config, specs, device, pool))
        _sleepers.clear()
        return [SleepStage(spec, self) for spec in specs]

    def batches(self) -> list[Tensors]:
        """A step's micro-batches; of a few tokens each where stages sleep."""
        if self.llama is not None:
            return self.llama.batches(self.micro_batches)
        tokens = torch.ones(1, 16, dtype=torch.int64)
        batch = {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
        return [batch] * self.micro_batches


def boundary(nbytes: int) -> torch.Tensor:
    """A tensor [1, rows, 1024] of bfloat16 of about `nbytes`."""
    rows = max(1, nbytes // (2 * _ROW_ELEMENTS))
    return torch.ones(1, rows, _ROW_ELEMENTS, dtype=torch.bfloat16)


class Sleeper:
    """Sleeps for a stage, and counts how long that really took.

    Sleeping takes longer than asked, on some machines by half a millisecond in the median; a bound
    that knows only what was asked would blame the pipeline for it.
    """

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0

    def sleep(self, forward_s: float, backward_s: float, slow_s: float = 0.0) -> None:
        """Sleep for the sum; `slow_s` of it is not counted, as no bound is told of it."""
        began = time.perf_counter()
        time.sleep(forward_s + backward_s + slow_s)
        slept = time.perf_counter() - began - slow_s
        share = forward_s / (forward_s + backward_s) if forward_s + backward_s else 0.0
        self.forward_s += slept * share
        self.backward_s += slept * (1 - share)

    def take(self) -> tuple[float, float]:
        """Seconds forward and backward since the last call."""
        taken = (self.forward_s, self.backward_s)
        self.forward_s = self.backward_s = 0.0
        return taken


_sleepers: dict[int, Sleeper] = {}


@control.on("slept")
def slept(data: Any = None) -> dict[str, list[float]]:
    """Seconds that each stage of this process slept, forward and backward, since the last call."""
    return {str(stage): list(sleeper.take()) for stage, sleeper in _sleepers.items()}


class SleepStage:
    """A stage that takes its time and hands on tensors of the right size."""

    input_requires_grad = True
    residence = Residence()
    differentiates = True
    awaits_sums = False
    fingerprint: ClassVar[dict[str, str]] = {}
    ties: ClassVar[dict[str, str]] = {}

    def __init__(self, spec: StageSpec, load: Load) -> None:
        self.index = spec.index
        self.is_first = spec.is_first
        self.is_last = spec.is_last
        self._load = load
        self._forward_s = load.forward_s[spec.index]
        self._backward_s = load.backward_s[spec.index]
        nbytes = load.activation_bytes
        self._results = {s: boundary(int(nbytes * s)) for s in dict.fromkeys(load.lengths)}
        self._sleeper = _sleepers[spec.index] = Sleeper()
        floats = torch.rand(load.state_bytes // 4)
        self._state = list(floats.split(_STATE_FLOATS)) if load.state_bytes else []

    def arrival_problem(self, forms: Sequence[Form], rows: int, tokens: int) -> str | None:
        """Any size will do."""

    def begin(self, info: StepInfo, take: Any = None) -> None:
        """Nothing to prepare."""

    def forward(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Bundle:
        length = self._load.length(micro_batch)
        self._sleeper.sleep(self._forward_s * length, 0.0, self._load.slow_s)
        return (self._results[length],)

    def forward_backward(
        self, micro_batch: int, inputs: Tensors, received: Bundle
    ) -> tuple[Outcome, Bundle]:
        length = self._load.length(micro_batch)
        self._sleeper.sleep(self._forward_s * length, self._backward_s * length, self._load.slow_s)
        return Outcome(1.0), (self._results[length],)

    def evaluate(self, micro_batch: int, inputs: Tensors, received: Bundle) -> Outcome:
        self._sleeper.sleep(
            self._forward_s * self._load.length(micro_batch), 0.0, self._load.slow_s
        )
        return Outcome(1.0)

    def backward(self, micro_batch: int, gradients: Bundle) -> Bundle:
        length = self._load.length(micro_batch)
        self._sleeper.sleep(0.0, self._backward_s * length)
        return () if self.is_first else (self._results[length],)

    def gradients(self) -> Iterator[StatePart]:
        yield StatePart({}, last=True)

    def report_gradients(self) -> GradientReport:
        return GradientReport(torch.ones(1))

    def commit(self, learning_rate: float, grad_scale: float) -> None:
        """No weights, nothing to step."""

    def abort(self) -> None:
        """Nothing is kept."""

    def trainable(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"stage{self.index}.weight", (self.index,))]

    def snapshot(self, *, lasting: bool = False) -> StateSnapshot:
        states = enumerate(self._state)
        entries = ((f"optimizer/{k}/stage{self.index}.weight", t, {}) for k, t in states)
        return StateSnapshot(entries, Device(), lasting=lasting)

    def export(self) -> Iterator[StatePart]:
        yield StatePart({}, last=True)

    def weights(self, names: Sequence[str], number: int) -> StatePart:
        return StatePart({}, last=True)

    def load_state(self, kind: str, part: StatePart) -> None:
        """No state."""

    def tied_weights(self) -> Tensors:
        return {}

    def set_tied_weights(self, weights: Tensors) -> None:
        """No weights."""


def _per_stage(times: Sequence[float], devices: int, chunks: int) -> tuple[float, ...]:
    if len(times) == devices * chunks:
        return tuple(times)
    if len(times) == 1:
        times = list(times) * devices
    if len(times) != devices:
        raise UserError(
            f"{len(times)} times for {devices} devices with {chunks} chunk(s) each",
            hint="give one for all, one for each device, or one for each stage",
        )
    return tuple([seconds / chunks for seconds in times] * chunks)
