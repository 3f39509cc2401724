"""The examples of `hetero check --show` on a terminal and in a file."""

from __future__ import annotations

import io
import re

import pytest

from hetero_framework.extras.observe.token_view import print_examples


def test_show_uses_colour_instead_of_brackets_on_a_terminal() -> None:
    example = {"where": "a:1", "tokens": 3, "trained": 1, "left_out": ["thinking"]}
    example["pieces"] = [("one", False), (" two\n", True), ("three", False)]

    class Terminal(io.StringIO):
        encoding = "ascii"

        def isatty(self) -> bool:
            return True

    for encoding, marks in (("utf-8", "⟦│⟧"), ("ascii", "[[|]]")):
        plain = Terminal()
        plain.encoding = encoding
        plain.isatty = lambda: False  # type: ignore[method-assign]
        print_examples([example], plain)
        assert all(mark in plain.getvalue() for mark in marks)
        assert " two" in plain.getvalue()
        assert "\x1b" not in plain.getvalue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", "30")
        patch.delenv("NO_COLOR", raising=False)
        terminal = Terminal()
        print_examples([example], terminal)
    shown = terminal.getvalue()
    assert "\x1b[1;32m two\\n\x1b[0m" in shown
    assert "[[" not in shown
    plain_lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in shown.splitlines()]
    assert max(map(len, plain_lines)) <= 30
