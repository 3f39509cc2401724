"""Print the lines of the heart, of each extra, of the package and its tests: `make lines`."""

from __future__ import annotations

from pathlib import Path

from tree import HEART, PACKAGE, ROOT


def lines(*files: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> None:
    heart = {room: lines(*(PACKAGE / room).rglob("*.py")) for room in HEART}
    extras = {
        f"extras/{folder.parent.name}": lines(*folder.parent.rglob("*.py"))
        for folder in sorted(PACKAGE.glob("extras/*/__init__.py"))
    }
    counted = {
        **heart,
        "heart": sum(heart.values()),
        **extras,
        "extras": sum(extras.values()),
        "commands": lines(*(PACKAGE / "commands").rglob("*.py")),
        "beside the rooms": lines(*PACKAGE.glob("*.py")),
        "package": lines(*PACKAGE.rglob("*.py")),
        "tests": lines(*(ROOT / "tests").rglob("*.py")),
    }
    for name, count in counted.items():
        print(f"{name:24}{count:>8,}")


if __name__ == "__main__":
    main()
