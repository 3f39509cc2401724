"""The error of predictions: each step's predicted and measured time, and the reasons for a
difference.

A run predicts every step before it begins, by the planner's simulator from the times of the steps
before, and its stages' memory from shapes. metrics.jsonl has that beside the measured values. All
seconds of stages and boundaries are of one micro-batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hetero_framework.config import process_name
from hetero_framework.engine.schedule.simulator import Edge, Profile, simulate
from hetero_framework.engine.schedule.tuning import default_max_in_flight
from hetero_framework.extras.observe.bottleneck import UNEXPLAINED_BY, steps_text
from hetero_framework.tables import table
from hetero_framework.trainer.read_metrics import read_steps
from hetero_framework.units import seconds, share, size

Facts = Mapping[str, Any]
_AS_PREDICTED = 0.05
_WORTH_SAYING = 0.01  # of the measured step
_COMPUTING, _MOVING = ("forward_s", "backward_s"), ("activation_s", "gradient_s")
_HEAD = (
    *("stage", "process", "forward: predicted", "took", "backward: predicted", "took"),
    *("memory: predicted", "peak"),
)


def read_account(folder: Path, steps: Collection[int]) -> dict[str, Any] | None:
    """The account of those steps (counted from 1) of a run that its metrics.jsonl tells of, as JSON
    types; None where it tells of none. Its `causes`, each the effect of one difference by
    simulation, with `unexplained_s` are all of the difference between prediction and measurement.
    Raises UserError for a file that is damaged."""
    return read_steps(folder, lambda lines: _account(lines, steps))


def _account(lines: Sequence[Facts], steps: Collection[int]) -> dict[str, Any] | None:
    lines = [one for one in lines if data_step(one) in steps and one.get("predicted_s")]
    if not lines:
        return None
    last = lines[-1]
    m = last["micro_batches"]
    lines = [line for line in lines if line["micro_batches"] == m]
    stages = [_stage([x["stages"][k] for x in lines], m) for k in range(len(last["stages"]))]
    edges = [(s["predicted"]["latency_s"], s["predicted"]["relayed"]) for s in last["stages"][1:]]
    causes = list(_causes(stages, edges, m))
    predicted_s, measured_s = (
        statistics.fmean(line[name] for line in lines) for name in ("predicted_s", "pipeline_s")
    )
    return {
        "steps": [line["step"] for line in lines],
        "planned_s": last.get("planned_s"),  # when the plan was made
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "stages": stages,
        "causes": causes,
        "error": measured_s / predicted_s - 1 if predicted_s > 0 else 0.0,
        "unexplained_s": measured_s - predicted_s - sum(cause["seconds"] for cause in causes),
    }


def _stage(lines: Sequence[Facts], micro_batches: int) -> dict[str, Any]:
    """Seconds of a micro-batch, and of the tensors that come to the stage; the memory is that of
    its process."""

    def means(tables: Sequence[Facts], of: Sequence[str], count: int = 1) -> dict[str, float]:
        return {name: statistics.fmean(one[name] for one in tables) / count for name in of}

    last = lines[-1]
    return {
        "index": last["index"],
        "owner": last["owner"],
        "predicted": means([line["predicted"] for line in lines], _COMPUTING + _MOVING),
        "measured": means(lines, _COMPUTING, micro_batches) | means(lines, _MOVING),
        "predicted_memory": last["predicted"]["memory"],
        "peak_memory": max(line["peak_memory"] for line in lines),
    }


def _causes(
    stages: Sequence[Facts], edges: Sequence[tuple[float, bool]], micro_batches: int
) -> Iterator[dict[str, Any]]:
    """Measured values replace predicted ones, one kind after the other; the step
    is simulated each time."""
    times = [dict(stage["predicted"]) for stage in stages]
    owners = [stage["owner"] for stage in stages]

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
            values.update({name: stage["measured"][name] for name in names})
            after_s = step_s()
            was, is_ = (sum(stage[x][n] for n in names) for x in ("predicted", "measured"))
            # A slower stage may let others overlap better, by luck; that explains nothing.
            if was > 0 and (after_s - before_s) * (is_ - was) > 0:
                yield {"text": _told(stage, is_ / was, names), "seconds": after_s - before_s}
            before_s = after_s


def _told(stage: Facts, ratio: float, names: Sequence[str]) -> str:
    where = f"stage {stage['index']} on {process_name(stage['owner'])}"
    if names == _MOVING:
        return f"tensors took {ratio:.2f} times as long to come to {where}"
    how = f"{share(abs(ratio - 1))} {'slower' if ratio > 1 else 'faster'}"
    return f"{where} computed {how} than predicted"


def text(account: Facts) -> Iterator[str]:
    """The account as lines for the user."""
    took_s, rows = account["measured_s"], []
    yield (
        f"predicted and measured, {steps_text(account['steps'])}: the pipeline was to take "
        f"{seconds(account['predicted_s'])} and took {seconds(took_s)} ({account['error']:+.0%})"
    )
    if planned_s := account["planned_s"]:
        off = f"{seconds(planned_s)} ({took_s / planned_s - 1:+.0%})"
        yield f"when the plan was made a step was to take {off}"
    for stage in account["stages"]:
        forward, backward = ([stage[x][n] for x in ("predicted", "measured")] for n in _COMPUTING)
        times = [*map(seconds, forward), *map(seconds, backward)]
        if stage is account["stages"][-1]:
            times = [*(seconds(a + b) for a, b in zip(forward, backward, strict=True))]
            times += ["(both)"] * 2
        peak = size(stage["peak_memory"]) if stage["peak_memory"] else "-"
        place = (str(stage["index"]), process_name(stage["owner"]))
        rows.append((*place, *times, size(stage["predicted_memory"]), peak))
    yield from ("", *table(_HEAD, rows, left=(0, 1)))
    yield "memory is predicted for tensors; on a CPU the peak is the whole process, libraries too"
    yield ""
    if abs(account["error"]) <= _AS_PREDICTED:
        yield "as predicted, within 5 %"
        return
    rest = f"waiting that these times do not explain: {UNEXPLAINED_BY}"
    causes = sorted(account["causes"], key=lambda cause: -abs(cause["seconds"]))
    causes.append({"text": rest, "seconds": account["unexplained_s"]})
    yield "of the difference:"
    for cause_s, why in ((cause["seconds"], cause["text"]) for cause in causes):
        if abs(cause_s) >= _WORTH_SAYING * took_s:
            yield f"  {'+' if cause_s >= 0 else '-'}{seconds(abs(cause_s))}: {why}"


def data_step(line: Mapping[str, Any]) -> int:
    """The step of the data, counted from 1, that a line of metrics.jsonl is about."""
    taken = line.get("island", {}).get("data_step")
    return int(line["step"] if taken is None else taken + 1)
