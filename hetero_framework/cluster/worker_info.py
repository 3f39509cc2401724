"""Facts about a worker's machine for `hetero doctor`: versions and clock.

Importing this module registers the answer.
"""

from __future__ import annotations

import platform
import time
from typing import Any

from hetero_framework import control, versions
from hetero_framework._version import __version__

ABOUT = "hetero.about"


def facts() -> dict[str, Any]:
    """Versions by package, and the clock in seconds."""
    libraries = {name: versions.installed(name) for name in versions.LIBRARIES}
    return {
        "versions": {"hetero_framework": __version__, "Python": platform.python_version()}
        | libraries,
        "clock": time.time(),
    }


@control.on(ABOUT)
def _about(data: Any) -> dict[str, Any]:
    return facts()
