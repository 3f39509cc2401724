"""torchft's lighthouse, where it is installed and where it is not."""

from __future__ import annotations

import builtins
import re
import sys
import time
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework.core.threads import in_background
from hetero_framework.errors import UserError
from hetero_framework.extras.islands import quorums as module
from hetero_framework.extras.islands.quorums import Quorums
from tests.extras.islands.optional import need_torchft
from tests.pools import leaving_nothing


def test_a_quorum_has_all_living_replicas_and_the_numbers_of_their_questions():
    need_torchft()
    with leaving_nothing():
        with closing(Quorums(min_islands=2)) as quorums:
            quorums.beat("a")
            quorums.beat("b")
            first = in_background(lambda: quorums.ask("a", 1, 30.0), "a")
            assert quorums.ask("b", 2, 30.0) == first.result(30.0) == {"a": 1, "b": 2}
            began = time.monotonic()
            assert quorums.ask("a", 3, 0.3) is None  # fewer than 2 do not meet
            assert time.monotonic() - began < 30.0
        quorums.beat("a")  # by a thread that has not noticed the end
        assert quorums.ask("a", 4, 0.3) is None


@pytest.mark.parametrize(
    ("system", "machine", "hint"),
    [
        ("linux", "x86_64", r'pip install "hetero-framework\[islands\]"'),
        ("linux", "aarch64", "Linux x86-64 alone"),
        ("darwin", "arm64", "Linux x86-64 alone"),
        ("win32", "AMD64", "Linux x86-64 alone"),
    ],
)
def test_missing_torchft_is_reported_with_the_package(monkeypatch, system, machine, hint):
    imported: Callable[..., Any] = builtins.__import__

    def without_torchft(name: str, *more: Any) -> Any:
        if name == "torchft":
            raise ModuleNotFoundError("No module named 'torchft'")
        return imported(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_torchft)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    with pytest.raises(UserError, match="a lighthouse needs torchft") as found:
        Quorums()
    assert re.search(hint, str(found.value.hint))


def test_an_old_torchft_is_refused(monkeypatch):
    old = SimpleNamespace(coordination=SimpleNamespace(LighthouseClient=object))
    monkeypatch.setitem(sys.modules, "torchft", old)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="too old"):
        Quorums()
