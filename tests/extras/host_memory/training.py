"""Stages of a small Llama that are trained in one process, in the order of 1F1B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hetero_framework.config import Config
from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.core.planned_order import BACKWARD, FORWARD, Lane
from hetero_framework.core.spans import VISITS, Recorder
from hetero_framework.engine.executor import Executor
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import Outcome, StatePart, StepInfo, Tensors
from tests.extras.host_memory.stages import MODEL, load, state
from tests.samples import plan_of

LAYERS, VOCABULARY = 6, 256
LORA: dict[str, Any] = {
    "adapter": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
}
_TOKENS = 20


def config(cuts: Sequence[int] = (), stage: Any = None, **settings: Any) -> Config:
    """A Llama of six layers, cut before the layers `cuts`; `stage` is of every stage's plan, and
    `settings` of the training section, but for "adapter" and "model"."""
    plan = plan_of(*(("local", end) for end in (*cuts, LAYERS)))
    model = {**MODEL, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    adapter = settings.pop("adapter", None)
    given = {"attn_implementation": "eager", **settings.pop("model", {})}
    return Config.from_dict(
        {
            "model": {"from_config": model, **given},
            "coordinator": {"device": "cpu", "ip": "127.0.0.1"},
            "shard_plan": [{**part, **(stage or {})} for part in plan],
            **({"adapter": adapter} if adapter else {}),
            "training": {"learning_rate": 1e-2, "visualize": False, **settings},
        }
    )


class Watched(Device):
    """A CPU that counts what is on the device for the time of a visit. `most`: by the name of a
    stream, the tensors and bytes that were there at once when copies of it were queued. `read`:
    where the copied tensors lay."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[str, int] = {}
        self.most: dict[str, tuple[int, int]] = {}
        self.read: list[int] = []
        self._there: dict[StorageWeakRef, int] = {}

    def queue_copies(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str, *after: DeviceEvent
    ) -> tuple[DeviceEvent, DeviceEvent]:
        for target, source in pairs:
            visitor = source if stream.endswith("out") else target
            self._there[StorageWeakRef(visitor.untyped_storage())] = visitor.nbytes
            self.read.append(source.data_ptr())
        self._there = {held: nbytes for held, nbytes in self._there.items() if not held.expired()}
        now = len(self._there), sum(self._there.values())
        self.most[stream] = max(now, self.most.get(stream, (0, 0)))
        self.copies[stream] = self.copies.get(stream, 0) + len(pairs)
        return super().queue_copies(pairs, stream, *after)


class _Sink:
    """The losses of a step; nothing else leaves the process."""

    def __init__(self) -> None:
        self.losses: dict[int, Any] = {}

    def send(self, *args: Any) -> None:
        raise AssertionError("all stages are here")

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        self.losses[micro_batch] = outcome.loss

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        pass


def one_forward_one_backward(stages: int, micro_batches: int) -> Iterator[Lane]:
    """Tasks of all stages: each has a forward for every stage behind it before its backwards."""
    begun = {(kind, s): 0 for kind in (FORWARD, BACKWARD) for s in range(stages)}
    ended = dict(begun)
    while any(begun[FORWARD, s] < micro_batches for s in range(stages)) or (
        any(begun[BACKWARD, s] < micro_batches for s in range(stages - 1))
    ):
        for s in range(stages):
            forwards, backwards = begun[FORWARD, s], begun[BACKWARD, s]
            is_full = forwards - backwards >= stages - s or forwards == micro_batches
            kind = BACKWARD if is_full and s < stages - 1 else FORWARD
            if kind == BACKWARD:
                above = (BACKWARD, s + 1) if s + 2 < stages else (FORWARD, s + 1)
                is_ready = backwards < ended[above]
            else:
                is_ready = forwards < micro_batches and (s == 0 or forwards < ended[FORWARD, s - 1])
            if is_ready:
                begun[kind, s] += 1
                yield kind, s
        ended = dict(begun)


@dataclass
class Training:
    """All stages of a configuration on one device."""

    config: Config
    device: Device
    stages: list[Stage] = field(init=False)

    def __post_init__(self) -> None:
        self.stages = load(self.config, self.device)
        self._sink = _Sink()
        self._recorder = Recorder(-1)
        self._executor = Executor(self.stages, self.device, self._recorder, self._sink)  # type: ignore[arg-type]
        self._attempt = 0
        self._copy_tied()

    def visits(self) -> dict[str, int]:
        """How many of each kind were recorded since the last call."""
        return Counter(s["kind"] for s in self._recorder.take() if s["kind"] in VISITS)

    def step(
        self,
        step: int,
        micro_batches: int = 4,
        tokens: int = _TOKENS,
        before_commit: Callable[[], None] = lambda: None,
        tasks: int | None = None,
        commit: tuple[Any, ...] | None = (0.5,),
        **about: Any,
    ) -> list[float]:
        """A step with its commit: losses and gradient norms. With `tasks` it is aborted after as
        many, and changes nothing. `commit` are the gradients' scale and perhaps settings of Adam,
        None for no commit, `about` more fields of the StepInfo."""
        count, self._attempt = len(self.stages), self._attempt + 1
        info = StepInfo(step, self._attempt, True, micro_batches, micro_batches * tokens, **about)
        limits = tuple(range(count, 0, -1))
        order = one_forward_one_backward(count, micro_batches)
        schedule = StepSchedule(limits, micro_batches, tuple(order), order_timeout_s=60.0)
        self._executor.begin(info, schedule)
        for k in range(micro_batches):
            for stage in self.stages:
                self._executor.put_inputs(stage.index, k, self._inputs(stage, step, k, tokens))
        while tasks != 0 and self._executor.run_next():
            tasks = None if tasks is None else tasks - 1
        if tasks is not None:
            self._executor.abort()
            return []
        assert self._executor.is_done
        self._add_tied()
        found = [float(self._sink.losses[k]) for k in range(micro_batches)]
        found += [norm for s in self.stages for norm in s.report_gradients().norms.tolist()]
        self._executor.statistics()
        before_commit()
        for stage in self.stages if commit else ():
            self._executor.commit(stage, 1e-2 / (step + 1), *commit or ())
        self._copy_tied()
        return found

    def _add_tied(self) -> None:
        """Bring the sums of tied weights' gradients to the stages that train them."""
        sums: Tensors = {}
        for stage in reversed(self.stages):
            for part in stage.gradients() if stage.ties else ():
                for name, gradient in part.tensors.items():
                    source = stage.ties.get(name, name)
                    sums[source] = sums[source] + gradient if source in sums else gradient.clone()
        for stage in self.stages:
            if own := {name: total for name, total in sums.items() if name in stage._sources}:
                stage.load_state("tied gradients", StatePart(own, last=True))

    def _copy_tied(self) -> None:
        weights = {n: w for stage in self.stages for n, w in stage.tied_weights().items()}
        for stage in self.stages:
            stage.set_tied_weights(weights)

    def _inputs(self, stage: Stage, step: int, k: int, tokens: int) -> Tensors:
        ids = (torch.arange(2 * tokens).view(2, tokens) * (step + 3 + k) + k) % VOCABULARY
        ids = ids.to(self.device.torch_device)
        inputs = {"attention_mask": torch.ones_like(ids)}
        if stage.is_first:
            inputs["input_ids"] = ids
        if stage.is_last:
            inputs["labels"] = ids
        return inputs

    def parts(self) -> list[list[StatePart]]:
        return [list(stage.snapshot(lasting=True).parts()) for stage in self.stages]

    def state(self) -> Tensors:
        return state(self.stages)

    def load(self, parts: list[list[StatePart]]) -> None:
        for stage, of_stage in zip(self.stages, parts, strict=True):
            for part in of_stage:
                stage.load_state("checkpoint", part)

    def train(self, steps: int = 3, **how: Any) -> tuple[list[float], Tensors]:
        """Losses and norms of some steps, and the state after them."""
        return [number for step in range(steps) for number in self.step(step, **how)], self.state()


def differences(one: tuple[list[float], Tensors], other: tuple[list[float], Tensors]) -> list[str]:
    """Differences of two trainings, to the bit."""
    found = ["losses or norms"] if one[0] != other[0] else []
    found += sorted(one[1].keys() ^ other[1].keys())
    return found + [
        name
        for name, tensor in one[1].items()
        if name in other[1] and not torch.equal(tensor, other[1][name])
    ]
