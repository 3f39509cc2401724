"""Numbers formatted for people: three digits and a fitting unit."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes, in units of 1024: "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:  # four digits are one too many
            return f"{nbytes:.0f} B" if unit == "B" else f"{_digits(nbytes)} {unit}"
        nbytes /= 1024
    return f"{_digits(nbytes)} TiB"


def count(number: float) -> str:
    """A number of things, shortened: "1.20 B" for 1,200,000,000."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{_digits(number / limit)} {unit}"
    return f"{number:.0f}"


def plural(number: int, noun: str) -> str:
    """A number with its noun: "1 layer", "2 processes"."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def seconds(time_s: float) -> str:
    """A short time: "0.52 ms", "20.6 ms", "1.24 s"."""
    return f"{_digits(time_s * 1e3)} ms" if time_s < 0.9995 else f"{_digits(time_s)} s"


def clock(time_s: float) -> str:
    """A long time as "h:mm:ss"."""
    whole = int(time_s + 0.5)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def share(part: float) -> str:
    """A part of 1 in percent: "36%"."""
    return f"{round(part, 2) + 0.0:.0%}"  # + 0.0 turns -0.0 into 0.0


def bit_rate(bytes_per_s: float) -> str:
    """The speed of a link, as networks are sold: decimal bits."""
    bits = 8 * bytes_per_s
    unit, name = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s")
    return f"{_digits(bits / unit)} {name}"


def _digits(value: float) -> str:
    """Three digits at least: "1.24", "12.4", "1,240"."""
    for limit, places in ((9.995, 2), (99.95, 1)):
        if value < limit:
            return f"{value:.{places}f}"
    return f"{value:,.0f}"
