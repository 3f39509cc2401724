"""timeline.json holds what the processes recorded, on one clock, in the Trace Event Format."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.core.spans import COMPUTE, Span
from hetero_framework.errors import ProtocolError, UserError
from hetero_framework.extras.observe import trace_file
from hetero_framework.extras.observe.trace_file import Timeline, read_timeline
from tests.extras.observe.timeline_samples import THREE, clock, config_of, record, step_spans
from tests.waiting import WAIT_S


def timeline(folder: Path, *owners: int | str, **training: Any) -> closing[Timeline]:
    """The timeline of a run over these processes; the block ends it."""
    return closing(Timeline(config_of(owners, output_dir=str(folder), **training)))


def raw_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "timeline.json").read_text(encoding="utf-8"))


def test_a_timeline_is_read_as_it_was_recorded(tmp_path):
    read = record(tmp_path, THREE, steps=[1])
    recorded = sorted(
        (
            process, span["kind"], span["stage"], span["micro_batch"], span["step"],
            span.get("what", ""), span.get("bytes", 0), span.get("dtype", ""),
        )
        for process, spans in step_spans(**THREE, step=1).items()
        for span in spans
    )  # fmt: skip
    assert recorded == sorted(
        (e.process, e.kind, e.stage, e.micro_batch, e.step, e.what, e.nbytes, e.dtype)
        for e in read.events
    )
    assert [p.name for p in read.processes] == ["coordinator", "worker 1", "worker 2"]
    assert [(s.process, s.start, s.end) for s in read.stages] == [(0, 0, 4), (1, 4, 8), (2, 8, 12)]


@pytest.mark.parametrize("error_s", [0.0, 0.004, -0.004])
def test_file_holds_every_span_on_one_clock(tmp_path, error_s):
    """The clocks are seconds apart; what the link measured of that may be wrong by milliseconds."""
    trace = record(tmp_path, THREE, steps=[1, 2], clock_error_s=error_s)
    exact = step_spans(**THREE, step=1, clock=lambda process: 0.0)
    tasks = {
        (span["kind"], span["stage"], span["micro_batch"]): span
        for spans in exact.values()
        for span in spans
        if span["kind"] in COMPUTE
    }
    assert trace.steps == [1, 2]
    found = [event for event in trace.of_step(1) if event.kind in COMPUTE]
    assert len(found) == len(tasks) == 2 * 4 * 2 + 4  # the last stage does both at once
    for event in found:
        span = tasks[event.kind, event.stage, event.micro_batch]
        # A frame's wire time is what the alignment can be wrong by.
        assert event.began == pytest.approx(span["began"], abs=1e-6 + min(abs(error_s), 0.003))
        assert event.seconds == pytest.approx(span["ended"] - span["began"], abs=1e-8)


def test_file_is_a_chrome_trace(tmp_path):
    """What Perfetto and chrome://tracing ask for: complete events in microseconds, names, and no
    two spans of one row that overlap without one containing the other."""
    record(tmp_path, THREE, steps=[1, 2])
    raw = raw_of(tmp_path)
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    names: dict[tuple[int, int], str] = {}
    for entry in raw["traceEvents"]:
        assert entry["ph"] in ("X", "M")
        assert entry["pid"] > 0 < entry["tid"]
        if entry["ph"] == "M":
            names[entry["pid"], entry["tid"]] = entry["args"].get("name", "")
            continue
        assert entry["ts"] >= 0 <= entry["dur"]
        rows.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["dur"]))
    assert set(rows) <= set(names)
    assert len({tid for _, tid in rows}) == len(rows)
    for spans in rows.values():
        for (began, seconds), (following, _) in itertools.pairwise(spans):
            assert following >= began + seconds - 0.0021  # microseconds, rounded to 3 digits
    kinds = {entry["cat"] for entry in raw["traceEvents"] if entry["ph"] == "X"}
    assert kinds == {"forward", "backward", "forward_backward", "send", "receive", "commit"}
    first = next(e for e in raw["traceEvents"] if e.get("cat") == "forward")
    assert first["ts"] == 0.0
    assert first["dur"] == pytest.approx(10_000, abs=0.01)
    assert first["args"] == {"step": 2, "stage": 0, "micro_batch": 0}


def test_visits_from_host_memory_have_rows_of_their_own(tmp_path):
    """One for each stage and kind, beneath the stage's; a stage without any has none."""
    travels = {**THREE, "devices": [0, 1, 0], "copies": {0: (0.008, 0.002), 2: (0.03, 0.0)}}
    trace = record(tmp_path, travels, steps=[1], layers=8, offload=4)
    assert [stage.offload for stage in trace.stages] == [4, 4, 4]
    kinds = Counter((event.kind, event.stage, event.process) for event in trace.events)
    # Stage 0 has eight tasks, the last one four.
    assert kinds["weights", 0, 0] == kinds["awaited", 0, 0] == 8
    assert kinds["weights", 2, 0] == 4
    assert not [e for e in trace.events if e.stage == 1 and e.kind in ("weights", "awaited")]
    raw = raw_of(tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in raw["traceEvents"] if e["name"] == "thread_name"}
    of_coordinator = [names[row] for row in sorted(names) if row // 100_000 == 1]
    assert of_coordinator[:5] == [
        "stage 0: layers 0-7",
        "stage 0: weights from host memory",
        "stage 0: waits for weights",
        "stage 2: layers 16-23",
        "stage 2: weights from host memory",
    ]
    copies = [e for e in raw["traceEvents"] if e.get("cat") == "weights"]
    assert copies[0]["args"] == {"step": 2, "stage": 0}
    assert {names[entry["tid"]] for entry in copies} == {of_coordinator[1], of_coordinator[4]}


def test_spans_that_overlap_on_a_link_get_rows_of_their_own(tmp_path):
    send: Span = {
        "kind": "send", "stage": 1, "micro_batch": 0, "step": 1, "began": 1.0, "ended": 3.0,
        "what": "FORWARD", "peer": 1, "bytes": 8, "dtype": "float32", "codec": "",
    }  # fmt: skip
    with timeline(tmp_path, "local", 1) as made:
        made.add("local", [send, {**send, "micro_batch": 1, "began": 2.0, "ended": 4.0}])
    entries = raw_of(tmp_path)["traceEvents"]
    names = {e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert {"send to worker 1", "send to worker 1 (2)"} <= names


def test_a_forward_of_the_last_stage_is_recorded_as_both(tmp_path):
    span: Span = {"kind": "forward", "stage": 0, "micro_batch": 0, "step": 1}
    with timeline(tmp_path, "local") as made:
        made.add("local", [{**span, "began": 1.0, "ended": 2.0}])
    assert [event.kind for event in read_timeline(tmp_path).events] == ["forward_backward"]


def test_bytes_known_at_one_end_are_shown_at_both(tmp_path):
    with timeline(tmp_path, "local", 1) as made:
        for process, spans in step_spans([0, 1], 1, forward_s=[1, 1], backward_s=[1, 1]).items():
            for span in spans:
                if span["kind"] == "send":
                    span |= {"bytes": 0, "dtype": ""}
            made.add(process or "local", spans, clock(process))
    events = read_timeline(tmp_path).events
    assert [(e.nbytes, e.dtype) for e in events if e.kind == "send"] == [(1 << 20, "float32")] * 2


def steps_in(folder: Path, expected: list[int]) -> list[int]:
    """The steps in the file, which is valid JSON, once they are those that are expected."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = []
        if (folder / "timeline.json").exists():
            with contextlib.suppress(UserError):  # before its first step
                found = read_timeline(folder).steps
        if found == expected or time.monotonic() > deadline:
            return found
        threading.Event().wait(0.01)  # its writer does not tell


def test_a_step_is_written_when_all_processes_have_reported_it(tmp_path):
    """A worker's spans of a step come when the coordinator has done the next one."""
    one, two, three = (
        step_spans([0, 1], 2, forward_s=[1, 1], backward_s=[1, 1], step=step, start=9 * step)
        for step in (1, 2, 3)
    )
    with timeline(tmp_path, "local", 1) as made:
        made.add("local", one[0])
        made.add(1, [], clock(1))
        made.add("local", two[0])
        made.add(1, one[1], clock(1))
        assert steps_in(tmp_path, [1]) == [1]
        made.add("local", three[0])
        made.add(1, two[1], clock(1))
        assert steps_in(tmp_path, [1, 2]) == [1, 2]
        raw_of(tmp_path)
        made.close()
        assert read_timeline(tmp_path).steps == [1, 2, 3]
    assert len(read_timeline(tmp_path).events) == 3 * (8 + 6) - 6  # without worker 1's last
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


def test_a_step_with_lost_spans_is_written_all_the_same(tmp_path):
    with timeline(tmp_path, "local", 1) as made:
        for step in range(1, 6):
            spans = step_spans([0, 1], 1, forward_s=[1, 1], backward_s=[1, 1], step=step)
            made.add("local", spans[0])
            if step > 1:  # the link broke while the first one's were on their way
                made.add(1, spans[1], clock(1))
        assert steps_in(tmp_path, [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]


@pytest.mark.faults
@pytest.mark.alone
def test_the_training_thread_writes_no_events(tmp_path):
    """Fifty thousand cost it about a fortieth of what it takes to read them again."""
    span: Span = {"kind": "forward_backward", "stage": 0}
    seconds = 0.0
    gc.disable()  # a collection looks at all that the process holds
    try:
        with timeline(tmp_path, "local", timeline_steps=-1) as made:
            for step in range(1250):
                times = [step + k / 100 for k in range(40)]
                spans = [
                    {**span, "step": step, "micro_batch": k, "began": at, "ended": at + 0.005}
                    for k, at in enumerate(times)
                ]
                began = time.thread_time()
                made.add("local", spans)
                seconds += time.thread_time() - began
    finally:
        gc.enable()
    began = time.thread_time()
    raw = raw_of(tmp_path)
    assert seconds < (time.thread_time() - began) / 2
    assert sum(entry.get("cat") == "forward_backward" for entry in raw["traceEvents"]) == 50_000


def test_the_timeline_of_a_killed_run_is_read(tmp_path):
    """The last write may be there in part; all whole entries count."""
    whole = record(tmp_path, THREE, steps=[1, 2])
    path = tmp_path / "timeline.json"
    content = path.read_bytes()
    path.write_bytes(content[:-200])
    torn = read_timeline(tmp_path)
    assert torn.steps == [1, 2]
    assert set(torn.events) <= set(whole.events)
    path.write_bytes(content.replace(b'"forward"', b'"forward', 1))
    with pytest.raises(UserError, match="damaged"):
        read_timeline(tmp_path)


def test_no_spans_make_no_file(tmp_path):
    with timeline(tmp_path, "local") as made:
        made.add("local", [])
    assert list(tmp_path.iterdir()) == []


def test_the_timeline_is_bounded_and_counts_dropped_events(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "MAX_EVENTS", 5)
    spans = step_spans([0], 8, forward_s=[1], backward_s=[1])[0]
    with timeline(tmp_path, "local") as made:
        made.add("local", spans)
        made.add("local", spans)
    trace = read_timeline(tmp_path)
    assert (len(trace.events), trace.dropped) == (5, 11)


def test_a_disk_that_refuses_ends_no_run(tmp_path, logged):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with timeline(tmp_path / "file", "local", timeline_steps=-1) as made:
        for step in range(3):
            made.add("local", step_spans([0], 1, forward_s=[1], backward_s=[1], step=step)[0])
    assert len(logged) == 1
    assert "no timeline: cannot write" in logged[0]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "x"}, {"kind": None}, {"stage": 7}, {"stage": -1}, {"stage": "0"}, {"began": "x"},
        {"ended": math.nan}, {"micro_batch": 1.5}, {"peer": 9}, {"peer": [1]}, {"what": 3},
    ],
)  # fmt: skip
def test_spans_that_no_recorder_made_are_refused(tmp_path, change):
    """The writer's error comes out of a later `add` or of the end, never into a log alone."""
    good = step_spans([0, 1], 1, forward_s=[1, 1], backward_s=[1, 1])[1][0]
    for span in ({**good, **change}, {name: good[name] for name in good if name != "began"}):
        made = Timeline(config_of(["local", 1], output_dir=str(tmp_path)))
        made.add(1, [span])
        with pytest.raises(ProtocolError, match="worker 1 sent a span that is none"):
            made.close()


def test_a_missing_timeline_names_the_setting(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=r"(?s)there is no timeline.*timeline_steps"):
            read_timeline(path)


def test_an_invalid_timeline_file_is_refused(tmp_path):
    record(tmp_path, THREE, steps=[1])
    path = tmp_path / "timeline.json"
    good = path.read_text(encoding="utf-8")
    raw = json.loads(good)
    number = next(i for i, e in enumerate(raw["traceEvents"]) if e.get("cat") == "forward")
    broken: list[str | bytes] = [
        "", "[]", "null", "{}", '"x"', good.replace("timeline 2", "3"),
        "[" * 100_000, b"\xff\xfe",
    ]  # fmt: skip
    for change in (
        {"ts": None}, {"ts": "NaN"}, {"dur": -1}, {"pid": 99}, {"pid": "1"}, {"args": {}},
        {"args": {"step": 1, "stage": 9}},
    ):  # fmt: skip
        events = list(raw["traceEvents"])
        events[number] = {**events[number], **change}
        broken.append(json.dumps({**raw, "traceEvents": events}))
    for text in broken:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UserError, match=r"timeline\.json"):
            read_timeline(tmp_path)


def test_file_without_steps_says_why(tmp_path):
    record(tmp_path, THREE, steps=[1])
    path, raw = tmp_path / "timeline.json", raw_of(tmp_path)
    path.write_text(json.dumps({**raw, "traceEvents": []}), encoding="utf-8")
    with pytest.raises(UserError, match=r"(?s)no steps.*second step"):
        read_timeline(path)
