"""Numbers and names as people read them; used by the display and the diagram."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def bytes_text(nbytes: float) -> str:
    """A number of bytes with a binary unit: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def count_text(count: float) -> str:
    """A number of things, shortened: "1.2 B" for 1,200,000,000."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f}"


def duration_text(seconds: float) -> str:
    """Seconds as "h:mm:ss"."""
    whole = int(seconds + 0.5)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> list[str]:
    """Lines with aligned columns; those numbered in `left` on their left edge."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]
