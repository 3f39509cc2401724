"""Print the lines of each room of the package, of the whole and of its tests: `make lines`."""

from __future__ import annotations

from pathlib import Path

from tree import PACKAGE, ROOMS, ROOT


def lines(*files: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> None:
    rooms = {room: lines(*(PACKAGE / room).rglob("*.py")) for room in ROOMS}
    counted = {
        **dict(sorted(rooms.items(), key=lambda item: -item[1])),
        "beside the rooms": lines(*PACKAGE.glob("*.py")),
        "package": lines(*PACKAGE.rglob("*.py")),
        "tests": lines(*(ROOT / "tests").rglob("*.py")),
    }
    for name, count in counted.items():
        print(f"{name:20}{count:>8,}")


if __name__ == "__main__":
    main()
