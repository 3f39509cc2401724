"""`hetero doctor --report`: everything that helps is in the file, and no secret of a run is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cli import main
from hetero_framework.commands import bug_report, machine_report
from tests.installed import needs

CONFIG: dict[str, Any] = {
    "coordinator": {"hostname": "attic", "ip": "10.9.8.7"},
    "workers": [{"id": 1, "hostname": "cellar", "ip": "10.9.8.6", "port": 29511}],
    "shard_plan": [{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 2}],
    "model": {"name_or_path": "Qwen/Qwen2.5-0.5B"},
    "training": {"output_dir": "out", "sample_prompts": ["Dear Dr. Miller, my diagnosis"]},
}
HOME = "/home/"  # no file of the repository names one
LINES = f"""\
2026-11-27 19:49:03 INFO worker 1: cellar:29511 is ready (hf_abcdefghijklmnopqrstuv)
Traceback (most recent call last):
  File "{HOME}alice/run.py", line 7, in <module>
ValueError: no
"""
PLANTED = ("attic", "cellar", "10.9.8", "hf_", "alice", "Miller")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_with_logs(folder: Path) -> None:
    (folder / "c.json").write_text(json.dumps(CONFIG))
    logs = folder / "out" / "logs"
    logs.mkdir(parents=True)
    (logs / "coordinator.log").write_text("early\n" * 100 + LINES)
    (logs / "worker-1.log").write_bytes(b"\xff\x1b[2J dialled 10.9.8.7:9998\n")
    (folder / "out" / "events.jsonl").write_text('{"what": "worker lost", "host": "cellar"}\n')


@needs("talking")
def test_the_report_has_all_parts_and_nothing_that_was_planted(here: Path) -> None:
    run_with_logs(here)
    assert main(["doctor", "--config", "c.json", "--report", "report.txt"]) == 0
    text = (here / "report.txt").read_text(encoding="utf-8")
    assert [word for word in PLANTED if word in text] == []
    for word in (
        *(
            "torch 2.",
            "device cpu",
            "== configuration c.json",
            '"name_or_path": "Qwen/Qwen2.5-0.5B"',
        ),
        *("== findings", "== the end of coordinator.log", "ValueError: no", "worker lost"),
        *("== the end of worker-1.log", "~/run.py"),
    ):
        assert word in text
    assert "\x1b" not in text
    assert text.count("early") < bug_report._LINES
    hosts = re.findall(r'"ip": "(host-\d+)"', text)
    assert f"dialled {hosts[0]}:9998" in text


def test_the_file_of_the_folder_is_taken_and_nobody_is_asked(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "hetero_config.json").write_text(json.dumps(CONFIG))
    assert main(["doctor", "--report", "report.txt"]) == 0
    text = (here / "report.txt").read_text(encoding="utf-8")
    assert "== configuration hetero_config.json" in text
    assert "== findings" not in text


def test_parts_that_fail_say_so_and_the_others_are_there(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "c.json").write_text('{"training": {"sample_prompts": ["Dear Dr. Miller"],}}')
    monkeypatch.setattr(machine_report, "list_devices", lambda: 1 / 0)
    assert main(["doctor", "--config", "c.json", "--report", "report.txt"]) == 0
    text = (here / "report.txt").read_text(encoding="utf-8")
    assert "ZeroDivisionError" in text
    assert "c.json, line 1" in text
    assert "Miller" not in text


def test_without_a_configuration_the_machine_is_reported(here: Path) -> None:
    assert main(["doctor", "--report", "report.txt"]) == 0
    assert "==" in (here / "report.txt").read_text(encoding="utf-8")
    assert main(["doctor", "--report", "report.txt"]) == 2  # it is there
    assert main(["doctor", "--report", "report.txt", "--overwrite"]) == 0
