from __future__ import annotations

import io

import pytest

from hetero_framework.data import display as module
from hetero_framework.data.display import display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_display_is_on_a_terminal_only_and_gone_at_the_end(
    stream: io.StringIO, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(module, "_QUIET_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with display("tokenising data.train") as show:
        show("1,000 examples")
        show("2,000 examples")
    assert ("tokenising data.train: " in stream.getvalue()) == shown


def test_quick_work_has_no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with display("tokenising data.train") as show:
        show("1 example")
    assert stream.getvalue() == ""
