"""Stages of a small Llama that are trained in one process, in the order of 1F1B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hetero_framework.config import Config
from hetero_framework.core.devices import Device
from hetero_framework.core.planned_order import BACKWARD, FORWARD, Lane
from hetero_framework.core.spans import VISITS, Recorder
from hetero_framework.engine.executor import Executor
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import Outcome, StatePart, StepInfo, Tensors

LAYERS, VOCABULARY, WIDTH = 6, 256, 32
LORA: dict[str, Any] = {
    "adapter": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
}
_TOKENS = 20


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device with a memory of its own."""
    monkeypatch.setattr(Device, "one_memory", False)


def config(
    cuts: Sequence[int] = (), stage: dict[str, Any] | None = None, **settings: Any
) -> Config:
    """A Llama of six layers, cut before the layers `cuts`; `stage` is of every stage's plan, and
    `settings` of the training section, but for "adapter" and "model"."""
    ends = [*cuts, LAYERS]
    plan = [
        {"id": "local", "start": start, "end": end, **(stage or {})}
        for start, end in zip([0, *cuts], ends, strict=True)
    ]
    model = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    adapter = settings.pop("adapter", None)
    given = {"attn_implementation": "eager", **settings.pop("model", {})}
    return Config.from_dict(
        {
            "model": {"from_config": model, **given},
            "coordinator": {"device": "cpu", "ip": "127.0.0.1"},
            "shard_plan": plan,
            **({"adapter": adapter} if adapter else {}),
            "training": {"learning_rate": 1e-2, "visualize": False, **settings},
        }
    )


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
        self.stages = load_stages(self.config, self.config.plan.stages, self.device)
        trains = False
        for stage in self.stages:
            stage.input_requires_grad = trains
            trains = trains or bool(stage.trainable())
        self._sink = _Sink()
        self._recorder = Recorder(-1)
        self._executor = Executor(self.stages, self.device, self._recorder, self._sink)  # type: ignore[arg-type]
        self._attempt = 0

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
    ) -> list[float]:
        """A step with its commit: losses and gradient norms. With `tasks` it is aborted after as
        many, and changes nothing."""
        count, self._attempt = len(self.stages), self._attempt + 1
        info = StepInfo(step, self._attempt, True, micro_batches, micro_batches * tokens)
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
        found = [float(self._sink.losses[k]) for k in range(micro_batches)]
        found += [norm for s in self.stages for norm in s.report_gradients().norms.tolist()]
        self._executor.statistics()
        before_commit()
        for stage in self.stages:
            self._executor.commit(stage, 1e-2 / (step + 1), 0.5)
        return found

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
        """The state of each stage."""
        return [list(stage.snapshot(lasting=True).parts()) for stage in self.stages]

    def state(self) -> Tensors:
        return {
            f"{k}/{name}": tensor
            for k, parts in enumerate(self.parts())
            for part in parts
            for name, tensor in part.tensors.items()
        }

    def load(self, parts: list[list[StatePart]]) -> None:
        for stage, of_stage in zip(self.stages, parts, strict=True):
            for part in of_stage:
                stage.load_state("checkpoint", part)

    def train(self, steps: int = 3, **how: Any) -> tuple[list[float], Tensors]:
        """Losses and norms of some steps, and the state after them."""
        found = [number for step in range(steps) for number in self.step(step, **how)]
        return found, self.state()


def differences(one: tuple[list[float], Tensors], other: tuple[list[float], Tensors]) -> list[str]:
    """Differences of two trainings, to the bit."""
    found = ["losses or norms"] if one[0] != other[0] else []
    found += sorted(one[1].keys() ^ other[1].keys())
    return found + [
        name
        for name, tensor in one[1].items()
        if name in other[1] and not torch.equal(tensor, other[1][name])
    ]
