"""Facts about a worker's machine for `hetero doctor`: versions, clock, free disk space.

Importing this module registers the answer.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_framework import control, versions
from hetero_framework._version import __version__
from hetero_framework.core import failpoints

ABOUT = "hetero.about"


def facts() -> dict[str, Any]:
    """Versions by package, the clock in seconds, free bytes in the cache of models."""
    libraries = {name: versions.installed(name) for name in versions.LIBRARIES}
    return {
        "versions": {"hetero_framework": __version__, "Python": platform.python_version()}
        | libraries,
        "clock": time.time(),
        "cache_free": free_bytes(model_cache()),
        "failpoint": bool(os.environ.get(failpoints.VARIABLE)),
    }


def model_cache() -> Path:
    """The directory in which this machine keeps models of the hub."""
    from huggingface_hub.constants import HF_HUB_CACHE  # slow

    return Path(HF_HUB_CACHE)


def free_bytes(directory: Path) -> int | None:
    """Free bytes on the disk of a directory, which need not exist; None where that is unknown."""
    for path in (directory, *directory.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(path).free
    return None


@control.on(ABOUT)
def _about(data: Any) -> dict[str, Any]:
    return facts()
