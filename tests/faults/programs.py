"""The programs of this folder, each in a process of its own: tests have threads, and have imported
much."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(program: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.faults.{program}", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def last_step(metrics: Path) -> int:
    with suppress(OSError, IndexError, ValueError, KeyError):  # none yet, or half a line
        return int(json.loads(metrics.read_bytes().splitlines()[-1])["step"])
    return 0


def told(program: str, *words: object) -> list[dict[str, Any]]:
    """The objects that it prints, one a line; it has to end in order."""
    done = run(program, *words)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
