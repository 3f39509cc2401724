"""transformers, PEFT and torch as libraries: their errors, their notices, and quick imports."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import logging

# Errors of these libraries for a configuration that they cannot build or run.
LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StopIteration,  # for the type of a part of a model that has no weights
    StrictDataclassError,
    TypeError,
    ValueError,
)

# transformers replaces methods of its classes while it loads (`no_tie_weights`) and restores them:
# of two loads at once one restores the other's replacement, and no model is tied from then on.
# Threads also share the generator from which new weights are drawn.
ONE_AT_A_TIME = threading.Lock()

OWN_CLASS_HINT = "a class of your own is registered by the file that --import names, everywhere"


def briefly(error: BaseException) -> str:
    """An error as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


@contextmanager
def compiled_at_first_call() -> Iterator[None]:
    """Within the block `torch.compile` waits for the first call of its function.

    PEFT imports bitsandbytes, which decorates functions of its CPU fallbacks with `torch.compile`.
    The decorator alone imports the whole compiler: 1.5 of the 1.9 s of CPU time that `import peft`
    took in each process (torch 2.13, bitsandbytes 0.50)."""
    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


@contextmanager
def quiet_library() -> Iterator[None]:
    """Hide progress bars and messages below errors: tiny copies and shards provoke many."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def quiet_libraries(log_level: str) -> None:
    """Show the libraries' own progress bars and notices with log level DEBUG only."""
    if log_level != "DEBUG":
        logging.set_verbosity_error()
        logging.disable_progress_bar()
