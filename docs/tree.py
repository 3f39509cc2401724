"""Write the tree of the package into docs/maintainers/modules.md: `python docs/tree.py`.

Every module's line is the first one of its own docstring, so that the page cannot say anything
else than the code.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hetero_framework"
PAGE = ROOT / "docs" / "maintainers" / "modules.md"
# From the bottom up: imports point to earlier rooms only.
HEART = ("core", "config", "security", "data", "models", "engine", "cluster", "trainer")
ROOMS = (*HEART, "commands", "extras")
_BEGIN, _END = "<!-- generated: tree -->\n", "<!-- end -->"


def summary(file: Path) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def tree() -> str:
    """The package as it is: its rooms in the order of imports, and each module's first line."""
    lines = ["```text", "hetero_framework/"]
    lines += [_line(2, file.name, summary(file)) for file in _modules(PACKAGE)]
    for room in ROOMS:
        lines += _folder(2, PACKAGE / room)
    return "\n".join([*lines, "```\n"])


def render(page: str) -> str:
    """The page with its tree written anew."""
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + tree() + _END + rest.partition(_END)[2]


def _modules(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("*.py")) if not file.name.startswith("__")]


def _folder(indent: int, folder: Path) -> list[str]:
    """A room or one of its shelves: shelves first, then modules."""
    lines = [_line(indent, f"{folder.name}/", summary(folder / "__init__.py"))]
    for shelf in sorted(file.parent for file in folder.glob("*/__init__.py")):
        lines += _folder(indent + 2, shelf)
    return lines + [_line(indent + 2, file.name, summary(file)) for file in _modules(folder)]


def _line(indent: int, name: str, text: str) -> str:
    return f"{' ' * indent}{name + ' ':{26 - indent}}{text}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
