"""The error of predictions: each step's predicted and measured time, and the reasons for a
difference.

A run predicts every step before it begins, by the planner's simulator from the times of the steps
before, and its stages' memory from shapes. metrics.jsonl has that beside the measured values. All
seconds of stages and boundaries are of one micro-batch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hetero_framework.config import process_name
from hetero_framework.engine.schedule.simulator import Edge, Profile, simulate
from hetero_framework.engine.schedule.tuning import default_max_in_flight
from hetero_framework.errors import UserError, in_words
from hetero_framework.extras.islands.island_stats import data_step
from hetero_framework.extras.observe.bottleneck import UNEXPLAINED_BY, steps_text
from hetero_framework.tables import table
from hetero_framework.units import seconds, share, size

WorkerId = int | str

_AS_PREDICTED = 0.05
_WORTH_SAYING = 0.01  # of the measured step
_COMPUTING, _MOVING = ("forward_s", "backward_s"), ("activation_s", "gradient_s")
_HEAD = (
    *("stage", "process", "forward: predicted", "took", "backward: predicted", "took"),
    *("memory: predicted", "peak"),
)


@dataclass(frozen=True)
class StageAccount:
    """One stage: seconds of a micro-batch, and of the tensors that come to it; the last two as
    predicted at the boundary in front of it and behind it. `memory` is that of its process."""

    index: int
    owner: WorkerId
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    predicted_memory: int
    peak_memory: int


@dataclass(frozen=True)
class Cause:
    """The effect of one difference on the step, by simulation."""

    text: str
    seconds: float


@dataclass(frozen=True)
class Account:
    """Means over `steps` (counted from 1), in seconds. `causes` with `unexplained_s` are all of the
    difference between the two. `planned_s` is what the plan was to take when it was made, where
    that is known."""

    steps: tuple[int, ...]
    planned_s: float | None
    predicted_s: float
    measured_s: float
    stages: tuple[StageAccount, ...]
    causes: tuple[Cause, ...]

    @property
    def error(self) -> float:
        """How much longer than predicted the step was, as a share of the prediction."""
        return self.measured_s / self.predicted_s - 1 if self.predicted_s > 0 else 0.0

    @property
    def unexplained_s(self) -> float:
        return self.measured_s - self.predicted_s - sum(cause.seconds for cause in self.causes)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, for programs."""
        return {**asdict(self), "error": self.error, "unexplained_s": self.unexplained_s}


def read_account(folder: Path, steps: Collection[int]) -> Account | None:
    """The account of those steps (counted from 1) of a run that its metrics.jsonl tells of; None
    where it tells of none. Raises UserError for a file that is damaged."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return None
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        known = [one for one in lines if data_step(one) in steps and one.get("predicted_s")]
        return _account(known) if known else None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"cannot read {file}: {in_words(error)}") from None


def _account(lines: Sequence[Mapping[str, Any]]) -> Account:
    last = lines[-1]
    m = last["micro_batches"]
    lines = [line for line in lines if line["micro_batches"] == m]
    stages = tuple(_stage([x["stages"][k] for x in lines], m) for k in range(len(last["stages"])))
    edges = [(s["predicted"]["latency_s"], s["predicted"]["relayed"]) for s in last["stages"][1:]]
    return Account(
        tuple(line["step"] for line in lines),
        last.get("planned_s"),
        statistics.fmean(line["predicted_s"] for line in lines),
        statistics.fmean(line["pipeline_s"] for line in lines),
        stages,
        tuple(_causes(stages, edges, m)),
    )


def _stage(lines: Sequence[Mapping[str, Any]], micro_batches: int) -> StageAccount:
    def means(tables: Sequence[Mapping[str, Any]], of: Sequence[str], count: int = 1) -> Any:
        return {name: statistics.fmean(one[name] for one in tables) / count for name in of}

    last = lines[-1]
    return StageAccount(
        last["index"],
        last["owner"],
        means([line["predicted"] for line in lines], _COMPUTING + _MOVING),
        means(lines, _COMPUTING, micro_batches) | means(lines, _MOVING),
        last["predicted"]["memory"],
        max(line["peak_memory"] for line in lines),
    )


def _causes(
    stages: Sequence[StageAccount], edges: Sequence[tuple[float, bool]], micro_batches: int
) -> Iterator[Cause]:
    """Measured values replace predicted ones, one kind after the other; the step
    is simulated each time."""
    times = [dict(stage.predicted) for stage in stages]
    owners = [stage.owner for stage in stages]

    def step_s() -> float:
        joined = [
            Edge(after["activation_s"], before["gradient_s"], latency_s, 0 if relayed else None)
            for (before, after), (latency_s, relayed) in zip(pairwise(times), edges, strict=True)
        ]
        forward_s, backward_s = ([one[name] for one in times] for name in _COMPUTING)
        devices = [owners.index(owner) for owner in owners]
        profile = Profile.of(forward_s, backward_s, devices=devices, edges=joined)
        # Always by one schedule: a better one for other times would look like a gain.
        return simulate(profile, micro_batches, default_max_in_flight(len(times))).seconds

    before_s = step_s()
    for names in (_COMPUTING, _MOVING):
        for stage, values in zip(stages, times, strict=True):
            values.update({name: stage.measured[name] for name in names})
            after_s = step_s()
            was, is_ = (sum(d[n] for n in names) for d in (stage.predicted, stage.measured))
            # A slower stage may let others overlap better, by luck; that explains nothing.
            if was > 0 and (after_s - before_s) * (is_ - was) > 0:
                yield Cause(_told(stage, is_ / was, names), after_s - before_s)
            before_s = after_s


def _told(stage: StageAccount, ratio: float, names: Sequence[str]) -> str:
    where = f"stage {stage.index} on {process_name(stage.owner)}"
    if names == _MOVING:
        return f"tensors took {ratio:.2f} times as long to come to {where}"
    how = f"{share(abs(ratio - 1))} {'slower' if ratio > 1 else 'faster'}"
    return f"{where} computed {how} than predicted"


def text(account: Account) -> list[str]:
    """The account as lines for the user."""
    planned = []
    if account.planned_s:
        off = f"{seconds(account.planned_s)} ({account.measured_s / account.planned_s - 1:+.0%})"
        planned = [f"when the plan was made a step was to take {off}"]
    return [
        f"predicted and measured, {steps_text(account.steps)}: the pipeline was to take "
        f"{seconds(account.predicted_s)} and took {seconds(account.measured_s)} "
        f"({account.error:+.0%})",
        *planned,
        "",
        *table(_HEAD, [_row(account, stage) for stage in account.stages], left=(0, 1)),
        "memory is predicted for tensors; on a CPU the peak is the whole process, libraries too",
        "",
        *_reasons(account),
    ]


def _row(account: Account, stage: StageAccount) -> tuple[str, ...]:
    forward, backward = ([x[n] for x in (stage.predicted, stage.measured)] for n in _COMPUTING)
    shown = [*map(seconds, forward), *map(seconds, backward)]
    if stage.index == len(account.stages) - 1:
        shown = [*(seconds(a + b) for a, b in zip(forward, backward, strict=True)), *["(both)"] * 2]
    memory = (size(stage.predicted_memory), size(stage.peak_memory) if stage.peak_memory else "-")
    return (str(stage.index), process_name(stage.owner), *shown, *memory)


def _reasons(account: Account) -> list[str]:
    if abs(account.error) <= _AS_PREDICTED:
        return ["as predicted, within 5 %"]
    rest = f"waiting that these times do not explain: {UNEXPLAINED_BY}"
    causes = [*sorted(account.causes, key=lambda cause: -abs(cause.seconds))]
    causes.append(Cause(rest, account.unexplained_s))
    shown = [c for c in causes if abs(c.seconds) >= _WORTH_SAYING * account.measured_s]
    signed = [f"  {'+' if c.seconds >= 0 else '-'}{seconds(abs(c.seconds))}" for c in shown]
    return ["of the difference:", *(f"{s}: {c.text}" for s, c in zip(signed, shown, strict=True))]
