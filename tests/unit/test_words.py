"""Words that were replaced do not come back as names.

docs/maintainers/architecture.md has the glossary.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hetero_framework"
INSTEAD = {
    "anatomy": "introspect",
    "dal": "devices",
    "hop": "edge",
    "meeting": "peer_links",
    "notify": "logging",
    "played": "simulated",
    "preparation": "setup",
    "verbs": "stage interface",
    "wizard": "init",
}
ALLOWED = {"notify_all", "run_wizard"}


def names(tree: ast.AST) -> Iterator[str]:
    """Every name that the code gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_old_words_are_not_used_as_names(file: Path) -> None:
    used = {file.stem, *names(ast.parse(file.read_text(encoding="utf-8")))} - ALLOWED
    found = {f"{name}: say {INSTEAD[w]}" for name in used for w in words(name) & INSTEAD.keys()}
    assert not found


def test_an_old_word_is_noticed() -> None:
    assert "hop" in words("_HopSeconds")
    assert "notify" in words("set_notify")
