"""Replaced words do not come back as names, nor sentences that are read twice.

docs/maintainers/internals.md has the glossary.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hetero_framework"
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/maintainers/*.md")}
    - {ROOT / "CHANGELOG.md", ROOT / "docs" / "architectures.md"}
)
READ_TWICE = re.compile(
    r"\bso (long|often|many|much)\b|\bof \w+ it is said\b|\bbelongs? into\b|\bnobody is asked\b",
    re.I,
)
# A question, or what a sentence must not begin with, since its subject is hidden.
QUESTION = re.compile(r"(Who|Whoever|Whom|Whose|What)\b[^?]*$")
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


def test_old_words_are_not_used_as_names():
    for file in PACKAGE.rglob("*.py"):
        used = {file.stem, *names(ast.parse(file.read_text(encoding="utf-8")))} - ALLOWED
        found = {f"{name}: say {INSTEAD[w]}" for name in used for w in words(name) & INSTEAD.keys()}
        assert not found, file


def test_an_old_word_is_noticed():
    assert "hop" in words("_HopSeconds")
    assert "notify" in words("set_notify")


def sentences(page: Path) -> list[str]:
    """The prose of a page, without code, headings and tables' bars."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^#.*$|^ {4,}\S.*$", "", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=[-|*] |\d+\. )|\||(?<=[.!?:;]) ", text)
    return [" ".join(part.split()).lstrip("-* ") for part in parts]


def test_a_sentence_of_a_page_names_its_subject():
    for page in PAGES:
        assert [s for s in sentences(page) if QUESTION.match(s) or READ_TWICE.search(s)] == [], page


def test_a_module_docstring_begins_with_its_subject():
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert [line for line in text.splitlines() if READ_TWICE.search(line)] == [], file
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        assert not re.match(r"(Who|Whom|Whose|What|Where|Whether|Which|How)\b", first), file


def test_a_sentence_that_is_read_twice_is_noticed():
    assert READ_TWICE.search("So long a link may be silent")
    assert QUESTION.match("Whoever connects is asked")
    assert not QUESTION.match("What does it do?")
