"""Failpoints: named places at which a process can be made to fail, for tests of faults.

The extra `faults` says what happens there, as HETERO_FAILPOINT asks. Without that variable a place
is looked up in an empty table, which costs a step nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetero_framework import registry

VARIABLE = "HETERO_FAILPOINT"
_NONE: dict[str, Any] = {}

hit: Callable[..., object] = _NONE.get
"""`hit(name)` says that a place is reached; a numeric place also gives its torch tensor."""
is_due: Callable[[str], bool] = _NONE.__contains__
"""Whether a failpoint fires at the next `hit` of this place, for callers that prepare for it."""


@contextmanager
def armed(process: str) -> Iterator[None]:
    """Within the block the failpoints of HETERO_FAILPOINT are on in this process. Raises
    ConfigError if it cannot be read."""
    global hit, is_due
    before = hit, is_due
    if text := os.environ.get(VARIABLE, "").strip():
        points = registry.needed("failpoints", VARIABLE, VARIABLE)(text, process)
        hit, is_due = points.hit, points.is_due
    try:
        yield
    finally:
        hit, is_due = before
