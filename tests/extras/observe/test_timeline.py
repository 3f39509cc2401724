"""Events of all processes are on one clock, and time without computing is waiting. The command
`hetero timeline`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_framework import cli
from hetero_framework.extras.observe.timeline import aligned, transfers, waits
from tests.extras.observe.timeline_samples import THREE, record
from tests.unit.test_cli import run_process


@pytest.mark.parametrize("error_s", [0.0, 0.01, -0.01, 3.0])
def test_no_frame_arrives_before_it_is_sent(tmp_path, error_s):
    trace = record(tmp_path, {**THREE, "relay": False}, steps=[1, 2], clock_error_s=error_s)
    pairs = list(transfers(trace.events))
    assert len(pairs) == 2 * 2 * 2 * 4  # steps, boundaries, directions, micro-batches
    assert all(receive.ended >= send.began - 1e-9 for send, receive in pairs)


def test_clocks_that_are_right_are_left_alone(tmp_path):
    events = record(tmp_path, THREE, steps=[1]).events
    moved = aligned(events)
    # The file keeps billionths of a second.
    for name in ("began", "ended"):
        were, are = ([getattr(event, name) for event in own] for own in (events, moved))
        assert are == pytest.approx(were, abs=3e-9)


def test_errors_of_a_drifting_clock_are_shared_evenly(tmp_path):
    """Where no shift makes every frame arrive after it was sent, errors are shared evenly."""
    trace = record(tmp_path, {**THREE, "devices": [0, 1, 0]}, steps=[1])
    torn = []
    for event in trace.events:
        late = 0.1 if event.process == 1 and event.kind == "send" else 0.0
        torn.append(replace(event, began=event.began + late, ended=event.ended + late))
    gaps = [receive.ended - send.began for send, receive in transfers(aligned(torn))]
    assert -0.06 < min(gaps) < 0


def test_waits_are_the_remaining_time_with_their_cause(tmp_path):
    """Two stages, two micro-batches, 1 s on the wire: every moment is known."""
    settings: dict[str, Any] = {
        "devices": [0, 1], "micro_batches": 2, "forward_s": [2.0, 1.0], "backward_s": [2.0, 3.0],
        "wire_s": 1.0,
    }  # fmt: skip
    trace = record(tmp_path, settings, steps=[1])
    # stage 0: F0 0-2, F1 2-4, B0 8-10, B1 12-14; stage 1: FB0 3-7, FB1 7-11.
    found = [
        (w.process, w.reason, round(w.began, 6), round(w.ended, 6), round(w.wire_s, 6))
        for w in sorted(waits(trace.stages, trace.of_step(1)), key=lambda w: (w.process, w.began))
    ]
    assert found == [
        (0, "gradients", 4.0, 8.0, 1.0),
        (0, "gradients", 10.0, 12.0, 1.0),
        (1, "activations", 0.0, 3.0, 1.0),
    ]


ALONE = {"devices": [0], "micro_batches": 1, "forward_s": [1], "backward_s": [1]}


def test_timeline_explains_a_run(tmp_path, capsys):
    steps = {"devices": [0, 1], "micro_batches": 2, "forward_s": [1, 1], "backward_s": [2, 2]}
    record(tmp_path, steps, steps=[1, 2])
    assert cli.main(["timeline", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("steps 2 to 3: 2 micro-batches through 2 stages")


def test_timeline_reports_wrong_input(tmp_path, capsys):
    assert cli.main(["timeline", str(tmp_path)]) == 2
    assert "there is no timeline" in capsys.readouterr().err
    record(tmp_path, ALONE, steps=[1])
    (tmp_path / "timeline.json").write_text("{", encoding="utf-8")
    assert cli.main(["timeline", str(tmp_path)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_timeline_does_not_import_torch(tmp_path):
    record(tmp_path, ALONE, steps=[1])
    program = (
        "import sys\n"
        "import hetero_framework.cli as cli\n"
        "code = cli.main(['timeline', sys.argv[1]])\n"
        "sys.exit(code or ('imported torch' if 'torch' in sys.modules else 0))\n"
    )
    done = run_process("-c", program, str(tmp_path))
    assert done.returncode == 0, done.stderr
