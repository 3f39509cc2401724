"""timeline.json holds what the processes recorded, on one clock, in the Trace Event Format."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.core.trace import COMPUTE, Span
from hetero_framework.errors import ProtocolError, UserError
from hetero_framework.profiling import timeline
from hetero_framework.profiling.timeline import (
    Timeline,
    Trace,
    aligned,
    read_timeline,
    transfers,
    waits,
)
from tests.unit.timeline_samples import clock, config_of, record, step_spans

THREE: dict[str, Any] = {
    "devices": [0, 1, 2],
    "micro_batches": 4,
    "forward_s": [0.01, 0.02, 0.01],
    "backward_s": [0.02, 0.04, 0.02],
    "wire_s": 0.003,
    "update_s": 0.005,
}


def spans_by_process(trace: Trace) -> list[tuple[Any, ...]]:
    return sorted(
        (e.process, e.kind, e.stage, e.micro_batch, e.step, e.what, str(e.peer), e.nbytes, e.dtype)
        for e in trace.events
    )


@pytest.mark.parametrize("error_s", [0.0, 0.004, -0.004])
def test_file_holds_every_span_on_one_clock(tmp_path: Path, error_s: float) -> None:
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


def test_what_is_read_is_what_was_gathered(tmp_path: Path) -> None:
    gathered = record(tmp_path, THREE, steps=[1])
    read = read_timeline(tmp_path)
    assert spans_by_process(read) == spans_by_process(gathered)
    assert [p.name for p in read.processes] == ["coordinator", "worker 1", "worker 2"]
    assert read.stages == gathered.stages
    assert read.settings == gathered.settings
    for name in ("began", "ended"):
        one, other = (sorted(getattr(e, name) for e in t.events) for t in (read, gathered))
        assert one == pytest.approx(other, abs=4e-9)


@pytest.mark.parametrize("error_s", [0.0, 0.01, -0.01, 3.0])
def test_no_frame_arrives_before_it_is_sent(tmp_path: Path, error_s: float) -> None:
    trace = record(tmp_path, {**THREE, "relay": False}, steps=[1, 2], clock_error_s=error_s)
    pairs = list(transfers(trace.events))
    assert len(pairs) == 2 * 2 * 2 * 4  # steps, boundaries, directions, micro-batches
    assert all(receive.ended >= send.began - 1e-9 for send, receive in pairs)


def test_clocks_that_are_right_are_left_alone(tmp_path: Path) -> None:
    events = record(tmp_path, THREE, steps=[1]).events
    assert aligned(events) == list(events)


def test_a_clock_that_drifts_is_put_in_the_middle(tmp_path: Path) -> None:
    """Where no shift makes every frame arrive after it was sent, errors are shared evenly."""
    trace = record(tmp_path, {**THREE, "devices": [0, 1, 0]}, steps=[1])
    torn = []
    for event in trace.events:
        late = 0.1 if event.process == 1 and event.kind == "send" else 0.0
        torn.append(timeline.replace(event, began=event.began + late, ended=event.ended + late))
    gaps = [receive.ended - send.began for send, receive in transfers(aligned(torn))]
    assert -0.06 < min(gaps) < 0


def test_file_is_a_chrome_trace(tmp_path: Path) -> None:
    """What Perfetto and chrome://tracing ask for: complete events in microseconds, names, and no
    two spans of one row that overlap without one containing the other."""
    record(tmp_path, THREE, steps=[1, 2])
    raw = json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8"))
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    names: dict[tuple[int, int], str] = {}
    flows: dict[int, list[Any]] = {}
    for entry in raw["traceEvents"]:
        assert entry["ph"] in ("X", "M", "s", "f")
        assert entry["pid"] > 0 < entry["tid"]
        if entry["ph"] in "sf":
            flows.setdefault(entry["id"], []).append(entry)
            continue
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
    assert len(flows) == 2 * 2 * 2 * 4  # steps, boundaries, directions, micro-batches
    for leaves, arrives in flows.values():
        assert (leaves["ph"], arrives["ph"], arrives["bp"]) == ("s", "f", "e")
        assert leaves["pid"] != arrives["pid"]
        for end in (leaves, arrives):
            inside = [
                began <= end["ts"] <= began + seconds
                for began, seconds in rows[end["pid"], end["tid"]]
            ]
            assert any(inside)
    kinds = {entry["cat"] for entry in raw["traceEvents"] if entry["ph"] == "X"}
    assert kinds == {
        "forward", "backward", "forward_backward", "send", "receive", "commit", "wait",
    }  # fmt: skip
    first = next(e for e in raw["traceEvents"] if e.get("cat") == "forward")
    assert first["ts"] == 0.0
    assert first["dur"] == pytest.approx(10_000, abs=0.01)
    assert first["args"] == {"step": 2, "stage": 0, "micro_batch": 0}


def test_spans_that_overlap_on_a_link_get_rows_of_their_own(tmp_path: Path) -> None:
    timelines = Timeline(config_of(["local", 1], output_dir=str(tmp_path)))
    send: Span = {
        "kind": "send", "stage": 1, "micro_batch": 0, "step": 1, "began": 1.0, "ended": 3.0,
        "what": "FORWARD", "peer": 1, "bytes": 8, "dtype": "float32", "codec": "",
    }  # fmt: skip
    timelines.add("local", [send, {**send, "micro_batch": 1, "began": 2.0, "ended": 4.0}])
    raw = json.loads(timeline.chrome_trace(timelines.trace()))
    names = [e["args"]["name"] for e in raw["traceEvents"] if e["name"] == "thread_name"]
    assert "send to worker 1" in names
    assert "send to worker 1 (2)" in names


def test_waits_are_the_rest_of_the_time_and_say_for_what(tmp_path: Path) -> None:
    """Two stages, two micro-batches, 1 s on the wire: every moment is known."""
    settings: dict[str, Any] = {
        "devices": [0, 1], "micro_batches": 2, "forward_s": [2.0, 1.0], "backward_s": [2.0, 3.0],
        "wire_s": 1.0,
    }  # fmt: skip
    trace = record(tmp_path, settings, steps=[1])
    # stage 0: F0 0-2, F1 2-4, B0 8-10, B1 12-14; stage 1: FB0 3-7, FB1 7-11.
    found = [
        (w.process, w.reason, round(w.began, 6), round(w.ended, 6), round(w.wire_s, 6))
        for w in waits(trace, 1)
    ]
    assert found == [
        (0, "gradients", 4.0, 8.0, 1.0),
        (0, "gradients", 10.0, 12.0, 1.0),
        (1, "activations", 0.0, 3.0, 1.0),
    ]


def test_a_last_stage_that_says_forward_has_done_both(tmp_path: Path) -> None:
    timelines = Timeline(config_of(["local"], output_dir=str(tmp_path)))
    span: Span = {"kind": "forward", "stage": 0, "micro_batch": 0, "step": 1}
    timelines.add("local", [{**span, "began": 1.0, "ended": 2.0}])
    assert [event.kind for event in timelines.trace().events] == ["forward_backward"]


def test_bytes_that_only_one_end_knew_are_everywhere(tmp_path: Path) -> None:
    timelines = Timeline(config_of(["local", 1], output_dir=str(tmp_path)))
    for process, spans in step_spans([0, 1], 1, forward_s=[1, 1], backward_s=[1, 1]).items():
        for span in spans:
            if span["kind"] == "send":
                span |= {"bytes": 0, "dtype": ""}
        timelines.add(process or "local", spans, clock(process))
    sent = [(e.nbytes, e.dtype) for e in timelines.trace().events if e.kind == "send"]
    assert sent == [(1 << 20, "float32")] * 2


# -- writing ----------------------------------------------------------------------------------


def test_file_is_written_once_when_all_steps_are_there(tmp_path: Path) -> None:
    """A worker's spans of a step come when the coordinator has done the next one."""
    config = config_of(["local", 1], output_dir=str(tmp_path), timeline_steps=2)
    timelines = Timeline(config)
    late: list[Span] = []
    written = []
    for step in range(1, 5):
        spans: dict[int, list[Span]] = {0: [], 1: []}
        if step <= 2:
            spans = step_spans([0, 1], 2, forward_s=[1, 1], backward_s=[1, 1], step=step)
        timelines.add("local", spans[0])
        timelines.add(1, late, clock(1))
        late = spans[1]
        timelines.step_done()
        written.append((tmp_path / "timeline.json").exists())
    assert written == [False, False, True, True]
    assert len(read_timeline(tmp_path).events) == 2 * (6 + 8)
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


def test_rest_is_written_at_the_end(tmp_path: Path) -> None:
    config = config_of(["local"], output_dir=str(tmp_path), timeline_steps=-1)
    timelines = Timeline(config)
    for step in range(7):
        spans = step_spans([0], 1, forward_s=[1], backward_s=[1], step=step)
        timelines.add("local", spans[0])
        timelines.step_done()
    assert len(read_timeline(tmp_path).steps) == 4  # 1, 2, 4, then 8
    timelines.write()
    assert len(read_timeline(tmp_path).steps) == 7


def test_no_spans_make_no_file(tmp_path: Path) -> None:
    timelines = Timeline(config_of(["local"], output_dir=str(tmp_path)))
    timelines.add("local", [])
    timelines.step_done()
    timelines.write()
    assert list(tmp_path.iterdir()) == []


def test_timeline_is_bounded_and_says_what_it_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MAX_EVENTS", 5)
    timelines = Timeline(config_of(["local"], output_dir=str(tmp_path)))
    spans = step_spans([0], 8, forward_s=[1], backward_s=[1])[0]
    timelines.add("local", spans)
    timelines.add("local", spans)
    timelines.write()
    trace = read_timeline(tmp_path)
    assert (len(trace.events), trace.dropped) == (5, 11)


def test_a_disk_that_refuses_ends_no_run(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    config = config_of(["local"], output_dir=str(tmp_path / "file"), timeline_steps=-1)
    timelines = Timeline(config)
    for step in range(3):
        timelines.add("local", step_spans([0], 1, forward_s=[1], backward_s=[1], step=step)[0])
        timelines.step_done()
    assert len(logged) == 1
    assert "no timeline: cannot write" in logged[0]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "x"}, {"kind": None}, {"stage": 7}, {"stage": -1}, {"stage": "0"}, {"began": "x"},
        {"ended": math.nan}, {"micro_batch": 1.5}, {"peer": 9}, {"peer": [1]}, {"what": 3},
    ],
)  # fmt: skip
def test_spans_that_no_recorder_made_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    timelines = Timeline(config_of(["local", 1], output_dir=str(tmp_path)))
    span = step_spans([0, 1], 1, forward_s=[1, 1], backward_s=[1, 1])[1][0]
    with pytest.raises(ProtocolError, match="worker 1 sent a span that is none"):
        timelines.add(1, [{**span, **change}])
    span.pop("began")
    with pytest.raises(ProtocolError, match="worker 1"):
        timelines.add(1, [span])


# -- wrong inputs -----------------------------------------------------------------------------


def test_no_file_says_how_to_get_one(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=r"(?s)there is no timeline.*timeline_steps"):
            read_timeline(path)


def test_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    record(tmp_path, THREE, steps=[1])
    path = tmp_path / "timeline.json"
    good = path.read_text(encoding="utf-8")
    raw = json.loads(good)
    number = next(i for i, e in enumerate(raw["traceEvents"]) if e.get("cat") == "forward")
    broken: list[str | bytes] = [
        "", "[]", "null", "{}", '"x"', good[: len(good) // 2], good.replace("timeline 1", "2"),
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


def test_file_without_steps_says_why(tmp_path: Path) -> None:
    record(tmp_path, THREE, steps=[1])
    path = tmp_path / "timeline.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**raw, "traceEvents": []}), encoding="utf-8")
    with pytest.raises(UserError, match=r"(?s)no steps.*second step"):
        read_timeline(path)
