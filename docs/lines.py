"""Hold the sizes of the package to the bounds of docs/bounds.toml: `make lines`.

    python docs/lines.py            print every size beside its bound; exit 1 where one is above it
    python docs/lines.py --lower    also lower each bound that is more than 2 % above its size

To raise a bound, write into docs/maintainers/decisions.md what the lines buy, and edit the file.
"""

from __future__ import annotations

import argparse
import ast
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tree import HEART, PACKAGE, ROOT

BOUNDS = ROOT / "docs" / "bounds.toml"
LONG = 50
"""Lines of a function from which on it counts as long."""
_SLACK = 1.02
_HEAD = """# The largest sizes that `make lines` permits; `docs/lines.py --lower` lowers them.
# Raising one needs an entry in docs/maintainers/decisions.md that says what the lines buy.
"""


def lines(*files: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def sizes() -> dict[str, dict[str, int]]:
    """The sizes of the checkout, by section and name as in docs/bounds.toml."""
    heart = {room: lines(*(PACKAGE / room).rglob("*.py")) for room in HEART}
    extras = {
        folder.parent.name: lines(*folder.parent.rglob("*.py"))
        for folder in sorted(PACKAGE.glob("extras/*/__init__.py"))
    }
    whole = {
        "heart": sum(heart.values()),
        "extras": sum(extras.values()),
        "commands": lines(*(PACKAGE / "commands").rglob("*.py")),
        "beside_the_rooms": lines(*PACKAGE.glob("*.py")),
        "package": lines(*PACKAGE.rglob("*.py")),
        "tests": lines(*(ROOT / "tests").rglob("*.py")),
    }
    return {"whole": whole, "shape": shape(), "heart": heart, "extras": extras}


def shape() -> dict[str, int]:
    """Counts of long functions, of the largest class' attributes, and of modules used once."""
    trees = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): ast.parse(
            file.read_text(encoding="utf-8")
        )
        for file in PACKAGE.rglob("*.py")
        if file.name != "__init__.py"
    }
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    imports = Counter(
        name for tree in trees.values() for name in {*_imported(tree)} if name in trees
    )
    return {
        "functions_over_50_lines": sum(_length(one) > LONG for one in functions),
        "attributes_of_the_largest_class": max(
            len(_attributes(node)) for node in nodes if isinstance(node, ast.ClassDef)
        ),
        "modules_with_one_importer": sum(count == 1 for count in imports.values()),
    }


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def _attributes(cls: ast.ClassDef) -> set[str]:
    """The names that methods assign on self."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _imported(tree: ast.Module) -> Iterator[str]:
    """Every module of an import; of `from a import b` both a and a.b, as b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def written(bounds: Mapping[str, Mapping[str, int]]) -> str:
    """The text of docs/bounds.toml."""
    sections = (
        f"[{section}]\n" + "".join(f"{name} = {bound}\n" for name, bound in rows.items())
        for section, rows in bounds.items()
    )
    return "\n".join([_HEAD, *sections])


def main() -> int:
    parser = argparse.ArgumentParser(description="hold the package to docs/bounds.toml")
    parser.add_argument("--lower", action="store_true", help="lower bounds that are too high")
    lower = parser.parse_args().lower
    bounds = tomllib.loads(BOUNDS.read_text(encoding="utf-8"))
    above, loose = [], []
    now = sizes()
    for section, rows in now.items():
        for name, size in rows.items():
            bound = bounds.get(section, {}).get(name)
            print(f"{name:34}{size:>8,}{'' if bound is None else f' of {bound:,}'}")
            if bound is None or size > bound:
                above.append(f"[{section}] {name}: {size:,}, bound {bound}")
            elif bound > _SLACK * size:
                loose.append((section, name))
    if lower:
        kept = {section: {**bounds.get(section, {})} for section in now}
        for section, name in loose:
            kept[section][name] = now[section][name]
        there = {s: {n: b for n, b in rows.items() if n in now[s]} for s, rows in kept.items()}
        BOUNDS.write_text(written(there), encoding="utf-8")
    for line in above:
        print(f"above its bound: {line}")
    return 1 if above else 0


if __name__ == "__main__":
    raise SystemExit(main())
