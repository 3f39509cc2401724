"""Shared by all tests: no model hub, no threads or processes left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
from contextlib import ExitStack
from importlib.metadata import version

import pytest
from hypothesis import settings
from packaging.version import Version

from hetero_framework.core import timeouts
from hetero_framework.log import Lines, log_to
from tests import greedy_buffers

pytest_plugins = ["tests.pools", "tests.alone"]
greedy_buffers.install()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread per process: parity to the last bit is promised for equal thread counts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A machine that does something else too is no reason to fail.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
# Nothing is remembered between tests; those of what is remembered choose a directory.
os.environ.setdefault("HETERO_CACHE", "")

# Of the pairs of settings that are tried (tests/integration/test_pairs.py); of all processes alike.
os.environ.setdefault("HETERO_PAIRS_SEED", str(random.SystemRandom().randrange(10**6)))

# A suite that was started in the background or under nohup ignores these, and so would all that it
# starts.
for _name, _usual in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    _number = getattr(signal, _name, None)  # Windows has no SIGHUP
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


# What transformers does differently before the version of requirements.txt, or does not have yet.
_NEWER = "5.23"
_NEED_NEWER = (
    "test_codebooks.py::test_every_codebook_trains",
    "test_codebooks.py::test_the_loss_is_the_mean",
    "test_codebooks.py::test_a_model_has_as_many_ids_a_token_as_embeddings_to_add_up[musicgen-4]",
    "test_side.py::test_a_tensor_crosses_every_boundary",
    "test_side.py::test_hidden_states_that_the_model_keeps_using",
    "test_towers.py::test_a_class_that_the_library_cannot_build_says_so[gemma4_assistant]",
    "test_composites.py::test_the_loss_of_all_routers_passes_to_the_bit",
    "test_equivalence.py::test_the_loss_of_all_routers_passes_to_the_bit[jetmoe]",
    "test_composites.py::test_an_architecture_that_does_not_run_in_autocast",
    "test_equivalence.py::test_tensors_made_between_blocks_stay",
    "test_missing_parts.py::",
    "test_side_tensor_checks.py::test_a_few_runs_determine_the_shapes",
    "test_composites.py::test_noise_needs_one_embedding",
    "test_boundary_contents.py::test_bytes_of_side_tensors_are_reported",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))  # other work may run beside
    if Version(version("transformers")) >= Version(_NEWER):
        return
    skip = pytest.mark.skip(reason=f"needs transformers {_NEWER}")
    for item in items:
        if any(name in item.nodeid for name in _NEED_NEWER):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"HETERO_PAIRS_SEED={os.environ['HETERO_PAIRS_SEED']}")


def pytest_collection() -> None:
    gc.disable()  # as in an import (log.py): nothing that is collected is garbage


def pytest_collection_finish() -> None:
    gc.enable()
    _freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Nothing of what is there by now is garbage, and no collection looks at it again.

    The product collects whenever a process lets its stages go. With torch, transformers, all test
    modules, and what earlier tests had imported, that took 1.6 s late in a run of all tests: 170 s
    in tests/extras/reporting/test_callbacks.py alone, now 20 s. What the tests of a file make is
    found as before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_ticks(monkeypatch):
    """Threads look at their deadlines more often. Only for tests that assert nothing about how soon
    a thread is woken: to close a listener and a link takes a tick each, half a second."""
    monkeypatch.setattr(timeouts, "TICK_S", 0.02)


@pytest.fixture
def logged():
    """The package's log lines, as they come."""
    lines: list[str] = []
    with log_to("INFO", Lines(lambda level, text: lines.append(text))):
        yield lines


@pytest.fixture
def stack():
    """A stack that closes, at the end of the test, the contexts that the test entered in it."""
    with ExitStack() as made:
        yield made
