"""The GPU checks without a GPU: their output then, and that each can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_checks
from benchmarks.gpu_checks import Run, covered, hidden_share, mixed_up, verdict
from hetero_framework.core.devices import Device
from hetero_framework.extras.observe.timeline import Process, StageInfo, Trace, TraceEvent

WHOLE = Run([(2.0, 1.0), (1.5, 0.9)], [10.0, 11.0], {"w": torch.ones(3)}, None)


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_without_a_gpu_every_check_is_skipped_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu_checks, "open_device", lambda name: Device())
    assert gpu.main(["--here"]) == 0
    results = printed(capsys)
    assert [result["check"] for result in results] == list(gpu.CHECKS)
    assert all("no GPU" in result["skipped"] for result in results)


def test_unknown_device_and_check_are_named(capsys):
    assert gpu.main(["--here", "--device", "cuda:77", "--only", "copies"]) == 0
    assert "no device 'cuda:77'" in printed(capsys)[0]["skipped"]
    with pytest.raises(SystemExit):
        gpu.main(["--only", "parity"])
    assert "no such check: parity" in capsys.readouterr().err


def test_missing_packages_are_named_with_wheels_to_bring(capsys, monkeypatch):
    monkeypatch.setitem(gpu._PACKAGES, "no_such_package", "no-such-package")
    assert gpu.main([]) == 2
    reason = printed(capsys)[0]["reason"]
    assert "pip install no-such-package" in reason
    assert "--dest wheels no-such-package" in reason


def supervised(
    monkeypatch: pytest.MonkeyPatch, program: str, checks: str, minutes: float = 5
) -> list[dict[str, Any]]:
    """What `supervise` shows where the process that does the checks is `program`; the checks are
    its arguments."""
    made = subprocess.Popen

    def popen(command: list[str], **settings: Any) -> Any:
        names = command[command.index("--only") + 1].split(",")
        return made([sys.executable, "-c", f"{IMPORTS}{program}", *names], **settings)

    monkeypatch.setattr(gpu.subprocess, "Popen", popen)
    shown: list[dict[str, Any]] = []
    options = gpu.arguments(["--only", checks, "--minutes", str(minutes)])
    gpu.supervise(options, shown.append)
    return shown


IMPORTS = """
import json, os, sys, time
print('{"device": "card:0"}', flush=True)
names = sys.argv[1:]
def done(name, **result): print(json.dumps({"check": name, **result}), flush=True)
"""
THREE = "codecs,copies,tied"


def test_each_check_is_shown_once(monkeypatch):
    program = "print('of a library')\nfor name in names: done(name, ok=True)"
    about, *results = supervised(monkeypatch, program, THREE)
    assert about == {"device": "card:0"}
    assert results == [{"check": name, "ok": True} for name in THREE.split(",")]


def test_a_check_that_ends_its_process_ends_no_other(monkeypatch):
    program = "for name in names:\n  if name == 'copies': os._exit(134)\n  done(name, ok=True)"
    results = [line for line in supervised(monkeypatch, program, THREE) if "check" in line]
    assert [line["ok"] for line in results] == [True, False, True]
    assert "exit code 134" in results[1]["reason"]


def test_a_device_that_failed_for_good_is_left_to_a_new_process(monkeypatch):
    shown = supervised(monkeypatch, "done(names[0], ok=False)", THREE)
    assert [line.get("check") for line in shown if "check" in line] == THREE.split(",")
    assert sum("device" in line for line in shown) == 3


def test_a_check_that_hangs_ends_after_its_share(monkeypatch):
    monkeypatch.setattr(gpu, "_SHARES", 0.05)
    program = "for name in names:\n  if name == 'copies': time.sleep(600)\n  done(name, ok=True)"
    results = [line for line in supervised(monkeypatch, program, THREE, 3.0) if "check" in line]
    assert [line["ok"] for line in results] == [True, False, True]
    assert "share" in results[1]["reason"]


def test_what_there_was_no_time_for_has_not_passed(monkeypatch):
    assert supervised(monkeypatch, "", THREE, 0.0) == [
        {"check": name, "ok": False, "reason": "not run: 0 minutes over"}
        for name in THREE.split(",")
    ]


def test_a_process_that_cannot_start_is_told_once(monkeypatch):
    monkeypatch.setitem(globals(), "IMPORTS", "")
    (only,) = supervised(monkeypatch, "raise SystemExit(3)", THREE)
    assert only["check"] == "start"
    assert "exit code 3" in only["reason"]


def test_every_check_that_is_named_exists():
    assert list(gpu.all_checks()) == list(gpu.CHECKS)


def test_the_verdict_requires_equal_bits_on_repeatable_devices():
    near = replace(WHOLE, steps=[(2.0, 1.0), (1.5 + 1e-9, 0.9)])
    other_weights = replace(WHOLE, weights={"w": torch.full((3,), 1.25)})
    runs = {"uncut": WHOLE, "again": WHOLE, "cut_2": WHOLE, "cut_4": WHOLE}
    assert verdict(runs, 1e-5)["ok"]
    assert not verdict({**runs, "cut_4": near}, 1e-5)["ok"]
    # Where it does not repeat itself, what is asked for is the tolerance.
    assert verdict({**runs, "again": near, "cut_4": near}, 1e-5)["ok"]
    assert not verdict({**runs, "again": near, "cut_4": near}, 1e-12)["ok"]
    # ... and that is a finding of its own.
    assert "does not repeat" in verdict({**runs, "again": near, "cut_4": near}, 1e-5)["finding"]
    assert "finding" not in verdict(runs, 1e-5)
    broken = verdict({**runs, "cut_2": other_weights}, 1e-5)
    assert (broken["ok"], broken["bit_equal"]) == (False, False)
    assert broken["max_weight_difference"] == 0.25
    assert not verdict({**runs, "cut_2": replace(WHOLE, weights={})}, 1e-5)["ok"]


def test_errors_of_a_run_are_results():
    class Bench:
        device = Device()

    def fail(bench: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def skip(bench: Any) -> Any:
        raise gpu_checks.Skip("not here")

    failed = gpu_checks.guarded(fail, Bench())  # type: ignore[arg-type]
    assert failed["ok"] is False
    assert "illegal memory access" in failed["reason"]
    assert gpu_checks.guarded(skip, Bench()) == {"skipped": "not here"}  # type: ignore[arg-type]


class Copying(Device):
    """Keeps its promises as a device of its own does."""

    def copies_in(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in tensors]


def test_mixed_up_tensors_are_noticed():
    assert mixed_up(Copying(), rounds=8, elements=64, width=4) == 0
    # The CPU hands over the memory itself, which this check fills again at once.
    memory = torch.zeros(64)

    class Reusing(Device):
        def copies_in(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            memory.copy_(tensors[0])
            memory.add_(0.5)  # as if the next one had come in between
            return [memory]

    assert mixed_up(Reusing(), rounds=8, elements=64, width=4) == 8


def test_covered_seconds():
    spans = [(1.0, 2.0), (1.5, 3.0), (5.0, 6.0)]
    assert covered(0.0, 1.0, spans) == 0.0
    assert covered(0.0, 10.0, spans) == pytest.approx(3.0)
    assert covered(1.25, 2.5, spans) == pytest.approx(1.25)
    assert covered(2.5, 5.25, spans) == pytest.approx(0.75)


def test_hidden_share_counts_only_the_own_process():
    def event(kind: str, process: int, began: float, ended: float) -> TraceEvent:
        return TraceEvent(kind, process, process, 0, 1, began, ended)

    processes = (Process("local", "coordinator"), Process(1, "worker 1"))
    events = (
        event("forward", 0, 0.0, 1.0),
        event("send", 0, 0.5, 1.5),  # half of it hidden
        event("receive", 1, 0.5, 1.5),  # its own process computes later
        event("forward_backward", 1, 1.5, 3.0),
    )
    trace = Trace(processes, (StageInfo(0, 0, 1), StageInfo(1, 1, 2)), events, {})
    assert hidden_share(trace) == pytest.approx(0.25)
    idle = Trace(trace.processes, trace.stages, trace.events[:1], {})
    assert hidden_share(idle) != hidden_share(idle)  # nan
