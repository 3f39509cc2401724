"""Train one language model over several machines; where it is cut does not change the result.

`from hetero_framework import load_config, train` does what the command line does. Importing the
package does not import torch; the names below are loaded on first use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hetero_framework._version import __version__

__all__ = ["__version__", "load_config", "train"]

# Threads of torch on the CPU sleep while they wait. By default they spin, which is quicker on a
# machine that does nothing else (docs/performance.md) and many times slower on one that does. torch
# reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from hetero_framework.api import train
    from hetero_framework.config import load_config


def __getattr__(name: str) -> Any:
    if name == "load_config":
        from hetero_framework.config import load_config

        return load_config
    if name == "train":
        from hetero_framework.api import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
