"""timeline.json: what every process of a run did when, in the Trace Event Format.

https://ui.perfetto.dev and chrome://tracing open the file; `read_timeline` reads it back for
`hetero timeline`. The coordinator gathers the spans of all processes (`core.trace`), puts them on
its own clock, and writes the file in one rename, again and again while the run goes on.

Rows: one group for each process; in it a row for each stage (its tasks, and the waits that they
ended), one for what each link sends and one for what it receives.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetero_framework.config import Config, layers_text
from hetero_framework.core.trace import (
    BACKWARD,
    COLLECT,
    COMMIT,
    COMPUTE,
    FORWARD,
    FORWARD_BACKWARD,
    KINDS,
    RECEIVE,
    SEND,
    Span,
)
from hetero_framework.errors import ProtocolError, UserError
from hetero_framework.visualizer.timeline_picture import Bar, Row, StepPicture

TIMELINE_FILE = "timeline.json"
FORMAT = "hetero timeline 1"
MAX_EVENTS = 400_000
"""More are not kept in memory: about 2000 steps of 4 stages and 16 micro-batches."""

WorkerId = int | str


# ------------------------------------------------------------------------------------- the nouns


@dataclass(frozen=True)
class Event:
    """A span on the coordinator's clock. `process` is a number of `Trace.processes`, `peer` the
    other process of a transfer (None otherwise), `nbytes` 0 where nobody knew."""

    kind: str
    process: int
    stage: int
    micro_batch: int
    step: int
    began: float
    ended: float
    what: str = ""
    peer: int | None = None
    nbytes: int = 0
    dtype: str = ""
    codec: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Process:
    """A process of the run: its id in the plan, its name for people, its device."""

    owner: WorkerId
    name: str
    device: str = ""


@dataclass(frozen=True)
class StageInfo:
    """A stage: which process runs it, and its layers [start, end)."""

    process: int
    start: int
    end: int

    @property
    def layers(self) -> str:
        return layers_text(self.start, self.end)


@dataclass(frozen=True)
class Trace:
    """What timeline.json holds. Times are seconds after the first event; `settings` are those of
    the run that decide about speed; `dropped` counts spans that were not kept."""

    processes: tuple[Process, ...]
    stages: tuple[StageInfo, ...]
    events: tuple[Event, ...]
    settings: Mapping[str, Any]
    dropped: int = 0

    @property
    def steps(self) -> list[int]:
        """The recorded training steps, counted from 0."""
        return sorted({event.step for event in self.events if event.kind in COMPUTE})

    def of_step(self, step: int) -> list[Event]:
        return [event for event in self.events if event.step == step]


@dataclass(frozen=True)
class Wait:
    """A pause of a process between two of its tasks.

    `reason` is what the task that ended it had been waiting for: "activations", "gradients", or
    "start" (the first stage needs nobody). `wire_s` is the part after the tensor was ready at its
    sender: time on the wire and in queues.
    """

    process: int
    stage: int
    micro_batch: int
    began: float
    ended: float
    reason: str
    wire_s: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


# --------------------------------------------------------------------------------- while it runs


class Timeline:
    """Gathers the spans of a run and writes output_dir/timeline.json.

    A file that cannot be written is reported once and ends no run.
    """

    def __init__(
        self,
        config: Config,
        *,
        devices: Mapping[WorkerId, str] | None = None,
    ) -> None:
        labels = devices or {}
        owners = list(dict.fromkeys(["local", *(spec.owner for spec in config.stages())]))
        self.path = config.output_dir / TIMELINE_FILE
        self._numbers = {owner: number for number, owner in enumerate(owners)}
        self._processes = tuple(
            Process(owner, process_name(owner), labels.get(owner, "")) for owner in owners
        )
        self._stages = tuple(
            StageInfo(self._numbers[spec.owner], spec.start, spec.end) for spec in config.stages()
        )
        self._settings = _settings(config)
        self._steps = config.training.timeline_steps
        self._events: list[Event] = []
        self._seen: set[tuple[int, int]] = set()  # (process, step) of which there are tasks
        self._written = 0
        self._dropped = 0
        self._failed = False

    def add(self, owner: WorkerId, spans: Sequence[Span], offset_s: float = 0.0) -> None:
        """Take over what a process recorded; `offset_s` is its clock minus the coordinator's.

        Raises ProtocolError for data that no Recorder made.
        """
        room = MAX_EVENTS - len(self._events)
        self._dropped += max(0, len(spans) - room)
        process = self._numbers[owner]
        events = [self._event(process, span, offset_s) for span in spans[:room]]
        self._seen.update((process, event.step) for event in events if event.kind in COMPUTE)
        self._events += events

    def step_done(self) -> None:
        """Write the file when it is complete; where all steps are recorded, whenever it has
        doubled. `write` at the end of the run writes what is left."""
        if self._steps > 0:
            # Workers' spans of a step come while the next one runs.
            if len(self._seen) == self._steps * len(self._processes):
                self.write()
        elif len(self._events) >= 2 * max(1, self._written):
            self.write()

    def write(self) -> None:
        """Write what there is, if anything is new."""
        if len(self._events) == self._written or self._failed:
            return
        self._written = len(self._events)
        text = chrome_trace(self.trace())
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8", newline="\n")
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._failed = True
            _log.warning("no timeline: cannot write %s: %s", self.path, error.strerror)

    def trace(self) -> Trace:
        """Everything recorded so far, on one clock that begins with the first event."""
        events = aligned(_with_bytes(self._events))
        zero = min((event.began for event in events), default=0.0)
        moved = [
            replace(event, began=event.began - zero, ended=event.ended - zero) for event in events
        ]
        moved.sort(key=lambda event: (event.began, event.ended))
        return Trace(self._processes, self._stages, tuple(moved), self._settings, self._dropped)

    def _event(self, process: int, span: Span, offset_s: float) -> Event:
        try:
            kind, stage, peer = span["kind"], span["stage"], span.get("peer")
            began, ended = float(span["began"]) - offset_s, float(span["ended"]) - offset_s
            numbers = (stage, span["micro_batch"], span["step"], span.get("bytes", 0))
            texts = tuple(span.get(name, "") for name in ("what", "dtype", "codec"))
            if kind == FORWARD and stage == len(self._stages) - 1:
                kind = FORWARD_BACKWARD  # the last stage's only task
            if (
                kind not in KINDS
                or not all(isinstance(number, int) for number in numbers)
                or not all(isinstance(text, str) for text in texts)
                or not 0 <= stage < len(self._stages)
                or not (math.isfinite(began) and math.isfinite(ended))
            ):
                raise ValueError
            return Event(
                kind=kind,
                process=process,
                stage=stage,
                micro_batch=numbers[1],
                step=numbers[2],
                began=began,
                ended=max(began, ended),
                what=texts[0],
                peer=None if peer is None else self._numbers[peer],
                nbytes=numbers[3],
                dtype=texts[1],
                codec=texts[2],
            )
        except (KeyError, TypeError, ValueError):
            raise ProtocolError(
                f"{self._processes[process].name} sent a span that is none: {str(span)[:200]}"
            ) from None


def process_name(owner: WorkerId) -> str:
    return "coordinator" if owner == "local" else f"worker {owner}"


def _settings(config: Config) -> dict[str, Any]:
    """The settings of the configuration that affect speed, where they are set."""
    raw = config.to_dict()
    chosen: dict[str, Any] = {name: raw[name] for name in ("links", "wire") if name in raw}
    names = ("max_in_flight", "per_device_train_batch_size", "timeline_steps")
    return chosen | {name: raw["training"][name] for name in names if name in raw["training"]}


# -------------------------------------------------------------------------------------- one clock


_log = logging.getLogger(__name__)
_Frame = tuple[int, str, int, int]  # step, type, stage, micro-batch


def transfers(events: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
    """(send, receive) of each frame that both of its ends recorded."""
    sends: dict[tuple[_Frame, int, int | None], Event] = {}
    receives = []
    for event in events:
        if event.kind == SEND:
            sends[_frame(event), event.process, event.peer] = event
        elif event.kind == RECEIVE:
            receives.append(event)
    for event in receives:
        if event.peer is not None:
            send = sends.get((_frame(event), event.peer, event.process))
            if send is not None:
                yield send, event


def _frame(event: Event) -> _Frame:
    return (event.step, event.what, event.stage, event.micro_batch)


def aligned(events: Sequence[Event]) -> list[Event]:
    """The events with each worker's clock moved as little as makes causes precede effects.

    A link measures its peer's clock to half a round trip at best; a frame, however, never has
    arrived before its sending began, and no task begins before the one whose tensor it takes has
    ended. Each such pair bounds from one side by how much one process may be moved against
    another, and chains of them bound it further. Each process in turn is moved to the inside of
    its bounds against those before it; where they exclude each other, to their middle. Each step
    by itself, since clocks drift and are measured again for each.
    """
    steps: dict[int, list[Event]] = {}
    for event in events:
        steps.setdefault(event.step, []).append(event)
    found = []
    for own in steps.values():
        shift = _shifts(own)
        found += [
            replace(e, began=e.began + shift[e.process], ended=e.ended + shift[e.process])
            for e in own
        ]
    return found


def _shifts(events: Sequence[Event]) -> dict[int, float]:
    """By how much each process's events of one step are moved; the coordinator's stay."""
    processes = sorted({event.process for event in events} | {0})
    least = dict.fromkeys(itertools.product(processes, processes), -math.inf)
    for cause, at, effect, then in _causes(events):
        least[cause, effect] = max(least[cause, effect], at - then)
    for middle, one, other in itertools.product(processes, processes, processes):
        if one != other:
            chain = least[one, middle] + least[middle, other]
            least[one, other] = max(least[one, other], chain)
    shift = {0: 0.0}
    for process in processes[1:]:
        low = max(shift[before] + least[before, process] for before in shift)
        high = min(shift[before] - least[process, before] for before in shift)
        shift[process] = (low + high) / 2 if low > high else min(max(0.0, low), high)
    return shift


def _causes(events: Sequence[Event]) -> Iterator[tuple[int, float, int, float]]:
    """(process, time) of a cause and (process, time) of its effect, for all of one step."""
    for send, receive in transfers(events):
        yield send.process, send.began, receive.process, receive.ended
    tasks = {(e.kind, e.stage, e.micro_batch): e for e in events if e.kind in COMPUTE}
    for task in tasks.values():
        before = _awaited(task, tasks)
        if before is not None and before.process != task.process:
            yield before.process, before.ended, task.process, task.began


def _awaited(task: Event, tasks: Mapping[tuple[str, int, int], Event]) -> Event | None:
    """The task of a neighbouring stage whose tensor this one takes."""
    k, stage = task.micro_batch, task.stage
    if task.kind == BACKWARD:
        behind = stage + 1
        return tasks.get((FORWARD_BACKWARD, behind, k)) or tasks.get((BACKWARD, behind, k))
    return tasks.get((FORWARD, stage - 1, k))


def _with_bytes(events: Sequence[Event]) -> list[Event]:
    """A frame's size and type, known at one of its ends at least, at all of its events."""
    known = {_frame(e): e for e in events if e.nbytes}
    return [
        replace(e, nbytes=known[_frame(e)].nbytes, dtype=known[_frame(e)].dtype)
        if e.kind in (SEND, RECEIVE) and not e.nbytes and _frame(e) in known
        else e
        for e in events
    ]


# ------------------------------------------------------------------------------------- the waits


def waits(trace: Trace, step: int) -> list[Wait]:
    """The pauses between the tasks of each process in one step, named by what ended them.

    The time before a process's first task counts from the step's first task anywhere.
    """
    tasks = [event for event in trace.of_step(step) if event.kind in COMPUTE]
    if not tasks:
        return []
    ready = {(event.kind, event.stage, event.micro_batch): event for event in tasks}
    start = min(event.began for event in tasks)
    found = []
    for process in range(len(trace.processes)):
        free = start
        for task in sorted((t for t in tasks if t.process == process), key=lambda t: t.began):
            if task.began > free:
                found.append(_wait(trace, task, free, ready))
            free = max(free, task.ended)
    return found


def _wait(
    trace: Trace, task: Event, free: float, tasks: Mapping[tuple[str, int, int], Event]
) -> Wait:
    reason = "start" if task.stage == 0 else "activations"
    if task.kind == BACKWARD:
        reason = "gradients"
    cause = _awaited(task, tasks)
    wire = 0.0
    if cause is not None and trace.stages[cause.stage].process != task.process:
        wire = max(0.0, task.began - max(free, cause.ended))
    return Wait(task.process, task.stage, task.micro_batch, free, task.began, reason, wire)


# ------------------------------------------------------------------------------------ the picture


def picture(trace: Trace, step: int, bound_s: float | None = None) -> StepPicture:
    """One recorded step, ready to be drawn. `bound_s` is the bound of its pipeline."""
    events = trace.of_step(step)
    pauses = waits(trace, step)
    tasks = [event for event in events if event.kind in COMPUTE]
    zero = min(event.began for event in tasks)
    seconds = max(event.ended for event in tasks) - zero
    of = Counter(stage.process for stage in trace.stages)
    place = {
        k: sum(other.process == stage.process for other in trace.stages[:k])
        for k, stage in enumerate(trace.stages)
    }

    def shade(stage: int) -> float:
        return place[stage] / max(1, of[trace.stages[stage].process] - 1)

    def bar(kind: str, span: Event | Wait, tip: str, number: int | None, stage: int = 0) -> Bar:
        text = f"{tip}, {span.seconds * 1e3:.2f} ms"
        return Bar(kind, span.began - zero, span.ended - zero, number, shade(stage), text)

    def row(number: int, process: Process) -> Row:
        bars = []
        for event in events:
            if event.process != number:
                continue
            k, stage = event.micro_batch, event.stage
            if event.kind in COMPUTE:
                name = event.kind.replace("_", " and ")
                bars.append(bar(event.kind, event, f"{name} {k}, stage {stage}", k, stage))
            elif event.kind in (COLLECT, COMMIT):
                bars.append(bar("update", event, _NAMES[event.kind], None))
        for wait in pauses:
            if wait.process == number and wait.reason in ("activations", "gradients"):
                tip = f"waits for {wait.reason} {wait.micro_batch}, stage {wait.stage}"
                bars.append(bar(wait.reason, wait, tip, None))
        held = [str(k) for k, stage in enumerate(trace.stages) if stage.process == number]
        name = "stage " if len(held) == 1 else "stages "
        detail = name + ", ".join(held) if held else "no stage"
        return Row(process.name, detail, bars, moved(number, SEND), moved(number, RECEIVE))

    def moved(number: int, kind: str) -> list[Bar]:
        return [
            bar(
                FORWARD if event.what == "FORWARD" else BACKWARD,
                event,
                f"{event.what} {event.micro_batch} for stage {event.stage}, {event.nbytes} bytes",
                None,
            )
            for event in events
            if (event.process, event.kind) == (number, kind)
            and event.what in ("FORWARD", "BACKWARD")
            and event.began >= zero
        ]

    count = len({task.micro_batch for task in tasks})
    ratio = f", {seconds / bound_s:.2f} times its bound" if bound_s else ""
    return StepPicture(
        f"Step {step + 1}",
        f"{count} micro-batches, {len(trace.stages)} stages on {len(trace.processes)} processes; "
        f"the pipeline took {seconds * 1e3:,.0f} ms{ratio}",
        [row(number, process) for number, process in enumerate(trace.processes)],
        bound_s,
    )


# ------------------------------------------------------------------------------- to and from JSON

_ROWS = 10_000
"""Rows of process n have the numbers after _ROWS (n + 1), and its pid is n + 1: viewers take 0 for
the idle process, and want a thread's number once."""
_UPDATE_ROW = 999
_SEND_ROW = 1000
_RECEIVE_ROW = 5000
_NAMES = {
    FORWARD: "F",
    BACKWARD: "B",
    FORWARD_BACKWARD: "FB",
    COLLECT: "collect gradients",
    COMMIT: "optimizer step",
}


def chrome_trace(trace: Trace) -> str:
    """The text of timeline.json. Timestamps are in microseconds, as the format wants them."""
    about = {
        "format": FORMAT,
        "processes": [{"owner": p.owner, "device": p.device} for p in trace.processes],
        "stages": [{"process": s.process, "start": s.start, "end": s.end} for s in trace.stages],
        "settings": dict(trace.settings),
        "dropped": trace.dropped,
    }
    rows = _Rows(trace)
    spans = [_complete(event, *rows.of_event(event)) for event in trace.events]
    spans += [
        {
            "name": f"wait for {wait.reason}",
            "cat": "wait",
            "ph": "X",
            "pid": wait.process + 1,
            "tid": rows.of_stage(wait.stage),
            "ts": _micro(wait.began),
            "dur": _micro(wait.seconds),
            "args": {
                "step": step + 1,
                "stage": wait.stage,
                "micro_batch": wait.micro_batch,
                "on_the_wire_ms": round(wait.wire_s * 1e3, 3),
            },
        }
        for step in trace.steps
        for wait in waits(trace, step)
    ]
    spans.sort(key=lambda span: (span["ts"], -span["dur"]))
    lines = [json.dumps(entry) for entry in [*rows.metadata(), *spans, *_arrows(trace, rows)]]
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about})[:-1]
    return head + ', "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"


def _complete(event: Event, row: int, name: str) -> dict[str, Any]:
    args: dict[str, Any] = {"step": event.step + 1, "stage": event.stage}
    if event.micro_batch >= 0:
        args["micro_batch"] = event.micro_batch
    if event.kind in (SEND, RECEIVE):
        args |= {"what": event.what, "peer": event.peer, "bytes": event.nbytes}
        args |= {"dtype": event.dtype, "codec": event.codec}
    return {
        "name": name,
        "cat": event.kind,
        "ph": "X",
        "pid": event.process + 1,
        "tid": row,
        "ts": _micro(event.began),
        "dur": _micro(event.ended) - _micro(event.began),
        "args": args,
    }


def _arrows(trace: Trace, rows: _Rows) -> Iterator[dict[str, Any]]:
    """Flow events: an arrow from each task to the one at another process that took its tensor."""
    number = 0
    for step in trace.steps:
        tasks = {
            (e.kind, e.stage, e.micro_batch): e for e in trace.of_step(step) if e.kind in COMPUTE
        }
        for task in tasks.values():
            before = _awaited(task, tasks)
            if before is None or before.process == task.process:
                continue
            number += 1
            # The arrow leaves just before the end: at the end the next task of the row begins.
            leaves = max(before.began, before.ended - 1e-8)
            for phase, event, at in (("s", before, leaves), ("f", task, task.began)):
                yield {
                    "name": "tensor",
                    "cat": "tensor",
                    "ph": phase,
                    "id": number,
                    "pid": event.process + 1,
                    "tid": rows.of_stage(event.stage),
                    "ts": _micro(at),
                    **({"bp": "e"} if phase == "f" else {}),
                }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


class _Rows:
    """Numbers and names of the rows. Spans of one row must not overlap, or a viewer nests them:
    what overlaps on a link (it has several threads) goes to a further row of that link."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._names: dict[tuple[int, int], str] = {}
        self._free: dict[int, float] = {}
        for index, stage in enumerate(trace.stages):
            row = self.of_stage(index)
            self._names[stage.process, row] = f"stage {index}: {stage.layers}"

    def of_stage(self, stage: int) -> int:
        return _ROWS * (self._trace.stages[stage].process + 1) + stage + 1

    def of_event(self, event: Event) -> tuple[int, str]:
        """(row, name) of an event; to be asked in the order of their beginnings."""
        if event.kind in COMPUTE:
            return self.of_stage(event.stage), f"{_NAMES[event.kind]}{event.micro_batch}"
        first = _ROWS * (event.process + 1)
        if event.kind in (COLLECT, COMMIT):
            return self._lane(event, first + _UPDATE_ROW, "update"), _NAMES[event.kind]
        outward, peer = event.kind == SEND, event.peer or 0
        label = f"{'send to' if outward else 'receive from'} {self._trace.processes[peer].name}"
        row = self._lane(event, first + (_SEND_ROW if outward else _RECEIVE_ROW) + 10 * peer, label)
        return row, f"{event.what} {event.micro_batch} for stage {event.stage}"

    def _lane(self, event: Event, row: int, label: str) -> int:
        lane = 0
        while self._free.get(row + lane, -math.inf) > event.began and lane < 9:
            lane += 1
        self._free[row + lane] = event.ended
        self._names[event.process, row + lane] = f"{label} ({lane + 1})" if lane else label
        return row + lane

    def metadata(self) -> Iterator[dict[str, Any]]:
        for number, process in enumerate(self._trace.processes):
            device = f" ({process.device})" if process.device else ""
            pid, main = number + 1, _ROWS * (number + 1)
            yield _metadata("process_name", pid, main, process.name + device)
            yield _metadata("process_sort_index", pid, main, number)
        for (number, row), name in sorted(self._names.items()):
            yield _metadata("thread_name", number + 1, row, name)
            yield _metadata("thread_sort_index", number + 1, row, row)


def _metadata(what: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    args = {"sort_index" if what.endswith("sort_index") else "name": value}
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def read_timeline(run: str | os.PathLike[str]) -> Trace:
    """Read timeline.json of a run's output directory, or a file of that form.

    Raises UserError that says what to do when there is none, or it is not one of ours.
    """
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
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"cannot read {path}: {reason}") from None
    try:
        trace = _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged, or no timeline of this program ({type(error).__name__}: {error})",
            hint="run again to write a new one",
        ) from None
    if not trace.steps:
        raise UserError(
            f"{path} has no steps",
            hint="the run ended before its second step, or training.timeline_steps was 0",
        )
    return trace


def _parse(raw: Any) -> Trace:
    about = raw["otherData"]
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']!r}")
    processes = tuple(
        Process(p["owner"], process_name(p["owner"]), str(p["device"])) for p in about["processes"]
    )
    stages = tuple(
        StageInfo(_index(s["process"], processes), int(s["start"]), int(s["end"]))
        for s in about["stages"]
    )
    events = tuple(
        _parse_event(entry, processes, stages)
        for entry in raw["traceEvents"]
        if entry["ph"] == "X" and entry["cat"] in KINDS
    )
    return Trace(processes, stages, events, dict(about["settings"]), int(about["dropped"]))


def _parse_event(
    entry: Any, processes: Collection[Process], stages: Collection[StageInfo]
) -> Event:
    args = entry["args"]
    began, seconds = float(entry["ts"]) / 1e6, float(entry["dur"]) / 1e6
    if not (math.isfinite(began) and math.isfinite(seconds) and seconds >= 0):
        raise ValueError("a time that is none")
    peer = args.get("peer")
    return Event(
        kind=entry["cat"],
        process=_index(entry["pid"] - 1, processes),
        stage=_index(args["stage"], stages),
        micro_batch=int(args.get("micro_batch", -1)),
        step=int(args["step"]) - 1,
        began=began,
        ended=began + seconds,
        what=str(args.get("what", "")),
        peer=None if peer is None else _index(peer, processes),
        nbytes=int(args.get("bytes", 0)),
        dtype=str(args.get("dtype", "")),
        codec=str(args.get("codec", "")),
    )


def _index(value: Any, things: Collection[Any]) -> int:
    if not isinstance(value, int) or not 0 <= value < len(things):
        raise ValueError(f"number {value!r} of {len(things)}")
    return value
