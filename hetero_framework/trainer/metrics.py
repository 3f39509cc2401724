"""metrics.jsonl: what happened in each step.

`metrics.jsonl` holds one JSON object per training step (step, epoch, loss, grad_norm,
learning_rate, tokens, tokens_per_second, step_seconds, micro_batches, pipeline_s, planned_s,
predicted_s, stages: [{index, owner, busy_s, wait_s, forward_s, backward_s, activation_s,
gradient_s, wire_s, bytes_in, bytes_out, direct_bytes_out, peak_memory, predicted: {memory}}, ...])
and one per evaluation (step, eval_loss, eval_perplexity, ...; with several sets their names under
"sets", and eval_<set>_loss, ...). A stage that streams layers also has "prefetch_misses": how often
a layer was used before its copy was asked for. A step that changed no weight has "skipped"
(non-finite, overflow or rule) and its "reason" in words. JSON has no NaN: a value that is not
finite is written as null.

A line that cannot be written is lost, and the run goes on: work is worth more than its record.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_framework.config import StageSpec
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.files import write_file
from hetero_framework.data.batches import MicroBatch, padded_count, token_count
from hetero_framework.engine.pipeline import StageStatistics
from hetero_framework.errors import DataError, ResourceError, UserError
from hetero_framework.file_trust import not_through_links
from hetero_framework.trainer.step_outcome import StepOutcome

METRICS_FILE = "metrics.jsonl"
Traffic = tuple[int, int, float, int]  # bytes in, bytes out, seconds of writing, direct bytes

_log = logging.getLogger(__name__)


class StepLines:
    """A file of JSON lines that each have a "step". A new object appends; `resume`, called first,
    makes the file what an uninterrupted run would have written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes: int | None = None  # bytes of complete lines; None before the first write
        self._num_lost = 0

    def resume(
        self, step: int, stays: Callable[[Mapping[str, Any]], bool] = bool
    ) -> list[dict[str, Any]]:
        """Drop the lines of steps after `step`, the lines for which `stays` is false, and a last
        line cut off by a crash. Return the other lines.

        The file is replaced in one rename. Raises DataError for a line without a "step".
        """
        self._bytes = None
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        kept, parsed = [], []
        for number, line in enumerate(lines, 1):
            if number == len(lines) and not line.endswith(b"\n"):
                break
            content = _parsed(line, number, self.path)
            if content["step"] <= step and stays(content):
                kept.append(line)
                parsed.append(content)
        if len(kept) != len(lines):
            try:
                write_file(self.path, b"".join(kept))
            except OSError as error:
                hint = "free some space or set another training.output_dir, then resume"
                reason = f"cannot write {self.path}: {error.strerror}"
                raise ResourceError(reason, hint=hint) from error
        return parsed

    def write(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line with its "step", and return it as it stands in the file."""
        # Values that JSON cannot hold become null.
        plain = json.loads(json.dumps(line), parse_constant=lambda name: None)
        try:
            self._append((json.dumps(plain) + "\n").encode())
        except OSError as error:
            if not self._num_lost:
                text = (
                    "cannot write %s: %s. Training goes on; its lines are lost until there is room"
                )
                _log.warning(text, self.path, error.strerror)
            self._num_lost += 1
        else:
            if self._num_lost:
                _log.warning("%s is written again; %d lines are lost", self.path, self._num_lost)
            self._num_lost = 0
        return dict(plain)

    def _append(self, data: bytes) -> None:
        """Append `data` whole, after cutting off what a failed attempt left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0, opener=not_through_links) as file:
            if self._bytes is None:
                self._bytes = file.tell()
            file.truncate(self._bytes)
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._bytes += len(data)


@dataclass(frozen=True)
class StepReport:
    """A step that is done, in `seconds`. `stages` are the times of each stage, `traffic` is each
    worker's before and after the step, and `measured` are more entries for the step's line."""

    step: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    outcome: StepOutcome
    seconds: float
    batches: Sequence[MicroBatch]
    stages: Mapping[int, StageStatistics]
    traffic: tuple[Mapping[WorkerId, Traffic], Mapping[WorkerId, Traffic]]
    measured: Mapping[str, Any]

    def line(
        self,
        stages: Iterable[StageSpec],
        memory_bytes: Mapping[WorkerId, int],
        *,
        planned_s: float | None,
        predicted_s: float | None,
    ) -> dict[str, Any]:
        """The step's line of metrics.jsonl. `memory_bytes` is the prediction by process;
        `planned_s` and `predicted_s` are the step's time by the plan and by the schedule."""
        tokens = sum(map(token_count, self.batches))
        skipped = {"skipped": self.outcome.skip, "reason": self.outcome.reason}
        return {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "tokens": tokens,
            "padded_tokens": sum(map(padded_count, self.batches)),
            "tokens_per_second": tokens / self.seconds,
            "step_seconds": self.seconds,
            "micro_batches": len(self.batches),
            "pipeline_s": max(stage.step_s for stage in self.stages.values()),
            "planned_s": planned_s,
            "predicted_s": predicted_s,
            **({} if self.outcome.commits else skipped),
            **self.measured,
            "stages": self._stages(stages, memory_bytes),
        }

    def _stages(
        self, stages: Iterable[StageSpec], memory_bytes: Mapping[WorkerId, int]
    ) -> list[dict[str, Any]]:
        """The figures of each stage."""
        before, after = self.traffic
        lines, none = [], (0, 0, 0.0, 0)
        moved = {
            worker: tuple(n - b for n, b in zip(now, before.get(worker, none), strict=True))
            for worker, now in after.items()
        }
        for spec in stages:
            figures = self.stages[spec.index]
            # A worker's links are counted once.
            bytes_in, bytes_out, wire_s, direct_bytes = moved.pop(spec.owner, none)
            lines.append(
                {
                    "index": spec.index,
                    "owner": spec.owner,
                    "busy_s": figures.busy_s,
                    "forward_s": figures.forward_s,
                    "backward_s": figures.backward_s,
                    "wait_s": figures.wait_s,
                    "activation_s": figures.arrive_forward_s,
                    "gradient_s": figures.arrive_backward_s,
                    "wire_s": wire_s,
                    "bytes_in": bytes_in,
                    "bytes_out": bytes_out,
                    "direct_bytes_out": direct_bytes,
                    "queue_peak": figures.queue_peak,
                    "held_peak": figures.in_flight_peak,
                    "peak_memory": figures.peak_memory_bytes,
                    "predicted": {"memory": memory_bytes.get(spec.owner, 0)},
                }
            )
            if figures.prefetch_misses is not None:
                lines[-1]["prefetch_misses"] = figures.prefetch_misses
        return lines


SPEED = ("runtime", "samples_per_second", "steps_per_second")
"""Numbers that the Trainer logs with the metrics of an evaluation."""


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is about an evaluation, not about a step."""
    return "loss" not in line


def metric_name(of_set: str, name: str) -> str:
    """The Trainer's name for a metric of an evaluation set; "" is a set without a name."""
    return f"eval_{of_set}_{name}" if of_set else f"eval_{name}"


def by_set(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics of each set in an evaluation's line, named as if it were the only set: {"math":
    {"eval_loss": ...}}. "" is a set without a name."""
    found: dict[str, dict[str, Any]] = {name: {} for name in line.get("sets", [""])}
    for key, value in line.items():
        fitting = [name for name in found if key.startswith(metric_name(name, ""))]
        if fitting:  # the name of one set may begin with another's
            name = max(fitting, key=len)
            found[name][f"eval_{key.removeprefix(metric_name(name, ''))}"] = value
    return found


def _parsed(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(line)
        step = content["step"]
    except (ValueError, KeyError, TypeError):
        step = None
    if not isinstance(step, int):
        hint = "move the file away or set another training.output_dir"
        raise DataError(f"{path}, line {number}: this is not a line of metrics", hint=hint)
    return dict(content)
