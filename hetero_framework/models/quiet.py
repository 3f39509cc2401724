"""Keep transformers' notices off the screen where they are of no use to the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import logging


@contextmanager
def quiet_library() -> Iterator[None]:
    """No progress bars and no messages below errors: tiny copies and shards provoke many."""
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
