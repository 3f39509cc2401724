"""timeline.json: the events of a run in the Trace Event Format, written during the run.

https://ui.perfetto.dev and chrome://tracing open the file; `read_timeline` reads it back for
`hetero timeline`. A step is appended when all processes have reported it; then the file is valid
JSON again.

Each process has a group of rows. In it each stage has a row of tasks, and a row for each kind of
tensors that visit it from host memory. The links have rows of tensors sent and received.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from hetero_framework.config import Config
from hetero_framework.core.spans import (
    AWAITED,
    BACKWARD,
    COMMIT,
    COMPUTE,
    FORWARD,
    FORWARD_BACKWARD,
    KINDS,
    NO_MICRO_BATCH,
    RECEIVE,
    SEND,
    VISITS,
    WEIGHTS,
    Span,
)
from hetero_framework.errors import ProtocolError, UserError, in_words
from hetero_framework.extras.observe.timeline import (
    Process,
    StageInfo,
    Trace,
    TraceEvent,
    WorkerId,
    aligned,
    with_bytes,
)
from hetero_framework.file_trust import not_through_links

TIMELINE_FILE = "timeline.json"
MAX_EVENTS = 400_000
"""Most events that are kept: about 2000 steps of 4 stages and 16 micro-batches, 100 MB."""
_log = logging.getLogger(__name__)
_MOST_OPEN = 3
"""Steps that may wait for a process's spans. Spans that never come were lost with their link."""

_VISITS = {WEIGHTS: "weights from host memory", AWAITED: "waits for weights"}
_LETTERS = {FORWARD: "F", BACKWARD: "B", FORWARD_BACKWARD: "FB"}


@dataclass(frozen=True)
class About:
    """The head of the file: facts of the run whose events follow."""

    format: Literal["hetero timeline 2"]
    processes: tuple[Process, ...]
    stages: tuple[StageInfo, ...]
    settings: Mapping[str, Any]

    def event(self, fields: Mapping[str, Any]) -> TraceEvent:
        """The event with these fields. Raises ValueError if it cannot be of this run."""
        event = _EVENT.validate_python(fields)
        numbers = (event.process, event.process if event.peer is None else event.peer)
        if (
            event.kind not in KINDS
            or event.ended < event.began
            or event.stage >= len(self.stages)
            or max(numbers) >= len(self.processes)
        ):
            raise ValueError(f"an event that is none: {event}")
        return event


_EVENT, _ABOUT = TypeAdapter(TraceEvent), TypeAdapter(About)


class Timeline:
    """Gathers the spans of a run and appends them to output_dir/timeline.json.

    A thread does the work. The next `add` raises its errors, or `close` does. A file that cannot be
    written is reported once and ends no run.
    """

    def __init__(self, config: Config, *, devices: Mapping[WorkerId, str] | None = None) -> None:
        labels, stages = devices or {}, config.plan.stages
        owners = list(dict.fromkeys(["local", *(spec.owner for spec in stages)]))
        self._numbers: dict[WorkerId, int] = {owner: n for n, owner in enumerate(owners)}
        there = [e.offload if isinstance(e.offload, int) else 0 for e in config.shard_plan]
        places = [(self._numbers[s.owner], s.start, s.end, there[s.index]) for s in stages]
        self._about = About(
            "hetero timeline 2",
            tuple(Process(owner, labels.get(owner, "")) for owner in owners),
            tuple(StageInfo(*place) for place in places),
            _settings(config),
        )
        self._file = _File(config.output_dir / TIMELINE_FILE, self._about)
        self._open: dict[int, list[TraceEvent]] = {}
        self._kept = self._dropped = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="timeline")
        self._jobs: deque[Future[None]] = deque()
        self._failed = self._closed = False

    def add(self, owner: WorkerId, spans: Sequence[Span], offset_s: float = 0.0) -> None:
        """Take over the spans of a process; `offset_s` is its clock minus the coordinator's. Raises
        ProtocolError if an earlier call brought data that no Recorder made. Does nothing after
        `close`."""
        if self._closed:
            return
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
        kept = spans[: MAX_EVENTS - self._kept]
        self._kept += len(kept)
        self._dropped += len(spans) - len(kept)
        if kept:
            self._jobs.append(self._writer.submit(self._take, owner, kept, offset_s))

    def close(self) -> None:
        """Write the rest; further calls do nothing. Raises as `add` does."""
        if not self._closed:
            self._closed = True
            self._jobs.append(self._writer.submit(self._write, at_end=True))
        self._writer.shutdown()
        while self._jobs:
            self._jobs.popleft().result()

    def _take(self, owner: WorkerId, spans: Sequence[Span], offset_s: float) -> None:
        for span in spans:
            event = self._event(self._numbers[owner], span, offset_s)
            self._open.setdefault(event.step, []).append(event)
        self._write()

    def _event(self, process: int, span: Span, offset_s: float) -> TraceEvent:
        try:
            peer, kind = span.get("peer"), span["kind"]
            if kind == FORWARD and span["stage"] == len(self._about.stages) - 1:
                kind = FORWARD_BACKWARD  # the last stage's only task
            began, ended = span["began"] - offset_s, span["ended"] - offset_s
            fields = {
                "kind": kind,
                "process": process,
                "began": began,
                "ended": max(ended, began),
                "peer": None if peer is None else self._numbers[peer],
                "nbytes": span.get("bytes", 0),
            }
            return self._about.event(span | fields)
        except (KeyError, TypeError, ValueError):
            name = self._about.processes[process].name
            raise ProtocolError(f"{name} sent a span that is none: {str(span)[:200]}") from None

    def _write(self, *, at_end: bool = False) -> None:
        """Write each step that all processes have reported, or that waited for _MOST_OPEN steps."""
        steps = []
        for step in sorted(self._open):
            told = {event.process for event in self._open[step] if event.kind in COMPUTE}
            is_told = len(told) == len(self._about.processes)
            if at_end or is_told or step + _MOST_OPEN < max(self._open):
                events = aligned(with_bytes(self._open.pop(step)))
                steps.append(sorted(events, key=lambda event: (event.began, event.ended)))
        if self._failed:
            return
        try:
            self._file.write(steps, self._dropped)
        except OSError as error:
            self._failed = True
            _log.warning("no timeline: cannot write %s: %s", self._file.path, error.strerror)


def _settings(config: Config) -> dict[str, Any]:
    """The settings that affect speed, of those that the configuration sets."""
    raw = config.to_dict()
    chosen: dict[str, Any] = {name: raw[name] for name in ("links", "wire") if name in raw}
    names = ("max_in_flight", "per_device_train_batch_size", "timeline_steps")
    return chosen | {name: raw["training"][name] for name in names if name in raw["training"]}


class _File:
    """The file. New entries overwrite its closing brackets, which are then written again."""

    def __init__(self, path: Path, about: About) -> None:
        self.path = path
        self._about = about
        self._rows = _Rows(about)
        self._zero: float | None = None
        self._end = 0  # bytes before the closing brackets

    def write(self, steps: Sequence[Sequence[TraceEvent]], dropped: int) -> None:
        """Append steps, if any, and the end that makes the file valid JSON. Raises OSError."""
        text = "".join(map(self._step, steps))
        if not self._end and text:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            open(self.path, "wb", opener=not_through_links).close()
            about = json.dumps({"displayTimeUnit": "ms", "otherData": asdict(self._about)})
            text = about[:-1] + ', "traceEvents": [' + text[1:]
        if self._end or text:
            with open(self.path, "r+b", opener=not_through_links) as file:
                file.seek(self._end)
                content = text.encode()
                file.write(content + _tail(dropped).encode())
            self._end += len(content)

    def _step(self, events: Sequence[TraceEvent]) -> str:
        if self._zero is None:
            self._zero = events[0].began
        zero = self._zero
        moved = [replace(e, began=e.began - zero, ended=e.ended - zero) for e in events]
        return "".join(f",\n{json.dumps(entry)}" for entry in self._entries(moved))

    def _entries(self, events: Sequence[TraceEvent]) -> Iterator[dict[str, Any]]:
        entries = [_complete(event, *self._rows.of_event(event)) for event in events]
        yield from self._rows.new_names()
        yield from sorted(entries, key=lambda entry: (entry["ts"], -entry["dur"]))


def _tail(dropped: int) -> str:
    return f'\n], "dropped": {dropped}}}\n'


_ROWS = 100_000
"""The rows of process n are numbered from _ROWS (n + 1), and its pid is n + 1. Viewers take pid 0
for the idle process, and want each thread's number once."""
_UPDATE_ROW = 9_990
_SEND_ROW = 10_000
_RECEIVE_ROW = 50_000


def _complete(event: TraceEvent, row: int, name: str) -> dict[str, Any]:
    args: dict[str, Any] = {"step": event.step + 1, "stage": event.stage}
    if event.micro_batch >= 0:
        args["micro_batch"] = event.micro_batch
    if event.kind in (SEND, RECEIVE):
        args |= {"what": event.what, "peer": event.peer, "bytes": event.nbytes}
        args |= {"dtype": event.dtype, "codec": event.codec}
    began = _micro(event.began)
    times = {"ts": began, "dur": _micro(event.ended) - began}
    place = {"pid": row // _ROWS, "tid": row}
    return {"name": name, "cat": event.kind, "ph": "X", **place, **times, "args": args}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


class _Rows:
    """Numbers and names of the rows. Spans of one row must not overlap, or a viewer nests them. So
    overlapping spans of a link, which has several threads, go to further rows of the link."""

    def __init__(self, about: About) -> None:
        self._processes, self._stages = about.processes, about.stages
        self._names: dict[int, str] = {}
        self._named: set[int] = set()
        self._free: dict[int, float] = {}
        for index, stage in enumerate(self._stages):
            self._names[self.of_stage(index)] = f"stage {index}: {stage.layers}"

    def of_stage(self, stage: int) -> int:
        return _ROWS * (self._stages[stage].process + 1) + 10 * stage + 1

    def of_event(self, event: TraceEvent) -> tuple[int, str]:
        """(row, name) of an event. Called for events in the order in which they began."""
        if event.kind in COMPUTE:
            return self.of_stage(event.stage), f"{_LETTERS[event.kind]}{event.micro_batch}"
        if event.kind in VISITS:
            row = self.of_stage(event.stage) + 1 + VISITS.index(event.kind)
            self._names[row] = f"stage {event.stage}: {_VISITS.get(event.kind, event.kind)}"
            return row, event.kind
        first = _ROWS * (event.process + 1)
        if event.kind == COMMIT:
            return self._lane(event, first + _UPDATE_ROW, "update"), "optimizer step"
        outward, peer = event.kind == SEND, event.peer or 0
        label = f"{'send to' if outward else 'receive from'} {self._processes[peer].name}"
        row = self._lane(event, first + (_SEND_ROW if outward else _RECEIVE_ROW) + 10 * peer, label)
        return row, f"{event.what} {event.micro_batch} for stage {event.stage}"

    def _lane(self, event: TraceEvent, row: int, label: str) -> int:
        lane = 0
        while self._free.get(row + lane, -math.inf) > event.began and lane < 9:
            lane += 1
        self._free[row + lane] = event.ended
        self._names[row + lane] = f"{label} ({lane + 1})" if lane else label
        return row + lane

    def new_names(self) -> Iterator[dict[str, Any]]:
        """Names of processes and rows that have not been written yet."""
        if not self._named:
            for number, process in enumerate(self._processes):
                device = f" ({process.device})" if process.device else ""
                main = _ROWS * (number + 1)
                yield _metadata("process_name", main, process.name + device)
                yield _metadata("process_sort_index", main, number)
        for row in sorted(set(self._names) - self._named):
            yield _metadata("thread_name", row, self._names[row])
            yield _metadata("thread_sort_index", row, row)
        self._named |= set(self._names)


def _metadata(what: str, row: int, value: str | int) -> dict[str, Any]:
    args = {"sort_index" if what.endswith("sort_index") else "name": value}
    return {"name": what, "ph": "M", "pid": row // _ROWS, "tid": row, "args": args}


def read_timeline(run: str | os.PathLike[str]) -> Trace:
    """Read timeline.json of a run's output directory, or a file of that form. Raises UserError if
    there is no such file, or if this program has not written it."""
    path = Path(run)
    if path.is_dir():
        path = path / TIMELINE_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"there is no timeline: {path} does not exist",
            hint="give the output_dir of a run that did two steps at least; "
            "training.timeline_steps says how many are recorded (0: none)",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {in_words(error)}") from None
    try:
        trace = _parse(_json(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged, or no timeline of this program ({type(error).__name__}: {error})",
            hint="run again to write a new one",
        ) from None
    if not trace.steps:
        hint = "the run ended before its second step, or training.timeline_steps was 0"
        raise UserError(f"{path} has no steps", hint=hint)
    return trace


def _json(text: str) -> Any:
    """The parsed file. If its writer was killed while writing, all whole entries of it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        head, *lines = text.split("\n")
        raw = json.loads(head + _tail(0))
        for number, line in enumerate(lines):
            try:
                raw["traceEvents"].append(json.loads(line.rstrip(",")))
            except json.JSONDecodeError:
                if number < len(lines) - 1:
                    raise
        return raw


def _parse(raw: Any) -> Trace:
    about = _ABOUT.validate_python(raw["otherData"])
    if any(stage.process >= len(about.processes) for stage in about.stages):
        raise ValueError("a stage of no process")
    spans = [e for e in raw["traceEvents"] if e["ph"] == "X" and e["cat"] in KINDS]
    events = tuple(_parse_event(entry, about) for entry in spans)
    return Trace(about.processes, about.stages, events, about.settings, int(raw["dropped"]))


def _parse_event(entry: Any, about: About) -> TraceEvent:
    args, began = entry["args"], entry["ts"] / 1e6
    fields = {
        "kind": entry["cat"],
        "process": entry["pid"] - 1,
        "micro_batch": args.get("micro_batch", NO_MICRO_BATCH),
        "step": args["step"] - 1,
        "began": began,
        "ended": began + entry["dur"] / 1e6,
        "nbytes": args.get("bytes", 0),
    }
    return about.event(args | fields)
