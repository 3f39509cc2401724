"""Hardware, versions and load, for the head of every benchmark result; and what other virtual
machines took while something was measured."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from hetero_framework.core.devices import list_devices

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "msgpack", "psutil")


def describe() -> dict[str, Any]:
    """What a result must carry to be compared with another one."""
    memory = psutil.virtual_memory()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": [f"{device.name}: {device.label}" for device in list_devices()],
        "cpu_count": psutil.cpu_count(),
        "memory_total_bytes": memory.total,
        "load_average_1min": round(psutil.getloadavg()[0], 2),
    }


class Stolen:
    """The processors' time that a virtual machine wanted and did not get since this was made. The
    load average does not show it, and with a tenth of it threads wake milliseconds late."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float | None:
        """Of the time of all processors; None where the system does not count it."""
        now = psutil.cpu_times()
        if not hasattr(now, "steal"):
            return None
        # `user` has the guests' time in it.
        counted = set(now._fields) - {"guest", "guest_nice"}
        passed = sum(getattr(now, name) - getattr(self._before, name) for name in counted)
        return round((now.steal - self._before.steal) / passed, 3) if passed else 0.0


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `result` to results/<name>-<date>.json and return the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{datetime.date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def commits_since(result: dict[str, Any]) -> int | None:
    """How often the package has changed since the commit that a kept result is of; None where that
    is unknown."""
    commit = str(result.get("environment", {}).get("commit")).removesuffix("-dirty")
    counted = _git("rev-list", "--count", f"{commit}..HEAD", "--", "../hetero_framework")
    return int(counted) if counted else None


def _commit() -> str | None:
    """The commit of the sources, with a mark when they were changed since; None without git."""
    return _git("describe", "--always", "--dirty", "--abbrev=12")


def _git(*arguments: str) -> str | None:
    """What git prints; None where it cannot say."""
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return answer.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
