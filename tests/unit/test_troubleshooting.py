"""docs/troubleshooting.md quotes real messages: each heading is found in the code as it stands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.installed import whole

pytestmark = whole  # the pages tell of all

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


def templates() -> set[str]:
    """Every string of the package, with "..." for what is filled in."""
    found = set()
    for file in (ROOT / "hetero_framework").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                found.add("".join(map(str, parts)))
    return found


@pytest.fixture(scope="module")
def code():
    return templates()


def test_the_page_has_messages():
    assert len(QUOTED) > 20
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("message", QUOTED)
def test_quoted_message_is_in_the_code(message, code):
    assert any(message in text for text in code)


def test_every_message_has_a_cause_and_a_fix():
    for section in re.split(r"^###? ", PAGE, flags=re.MULTILINE)[1:]:
        if section.startswith("`"):
            assert "Cause:" in section, section
            assert "Fix:" in section, section
