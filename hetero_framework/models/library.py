"""What the model libraries raise, and how it is told."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

# On a configuration that they cannot build or run.
LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def one_line(error: BaseException) -> str:
    """An error as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
