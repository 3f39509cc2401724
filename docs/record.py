"""Write docs/images/demo.svg: `python docs/record.py` runs `hetero demo` in a terminal and
records its screen (not on Windows; some minutes).

A picture without scripts: each line has the times at which it is there. A viewer that plays no
animations, or is told to avoid motion, shows the last screen.
"""

from __future__ import annotations

import html
import os
import platform
import re
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pictures import COLUMNS, IMAGES, ROOT, screen, terminal
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

Frame = tuple[float, list[str]]
"""Seconds since the start, and the lines of the whole output, each at most as wide as the screen
and already drawn as SVG."""

ROWS = 28
WAIT_S = 0.25  # at most, where nothing new can be read
LINE_S = 0.14  # to read a new line
LAST_S = 6.0
MOST_BYTES = 150_000
CHARACTER, LINE, TOP, EDGE = 8.43, 18, 34, 12
FONT = '"DejaVu Sans Mono",Menlo,Consolas,monospace'


def main() -> None:
    began, frames = time.monotonic(), []
    for written in terminal([sys.executable, "examples/demo.py"], ROOT):
        frames.append((time.monotonic() - began, lines(screen(written))))
    svg = draw(paced(frames), f"hetero demo ({frames[-1][0]:.0f} s, shortened)")
    check(svg)
    (IMAGES / "demo.svg").write_text(svg, encoding="utf-8")
    print(f"{len(frames)} screens, {len(svg) / 1e3:.0f} kB")


def lines(shown: str) -> list[str]:
    """The lines of a screen's text, paths shortened and long ones wrapped."""
    drawn = []
    for row in shown.replace(f"{ROOT}{os.sep}", "").split("\n"):
        text = Text.from_ansi(row)
        parts = text.divide(range(COLUMNS, len(text), COLUMNS)) if len(text) > COLUMNS else [text]
        drawn += [draw_line(part) for part in parts]
    return drawn


def draw_line(text: Text) -> str:
    """A line, with a `tspan` element for each part that looks different."""
    drawn = ""
    for segment in text.render(Console(color_system="truecolor", width=COLUMNS)):
        words = html.escape(segment.text, quote=False)
        found = look(segment.style or Style())
        drawn += f"<tspan{found}>{words}</tspan>" if found else words
    return drawn.removesuffix("\n")


def look(style: Style) -> str:
    found = ""
    if style.color is not None and not style.color.is_default:
        triplet = style.color.get_truecolor(SVG_EXPORT_THEME)
        found += f' fill="{triplet.hex}"'
    if style.dim:
        found += ' opacity=".7"'
    if style.bold:
        found += ' font-weight="bold"'
    return found


def paced(frames: list[Frame]) -> list[Frame]:
    """The frames at the times of the recording: long waits shortened, time to read given."""
    now, made = 0.0, []
    for (at, shown), (then, _) in pairwise([*frames, frames[-1]]):
        new = len(shown) - len(made[-1][1]) if made else len(shown)
        made.append((now, shown))
        now += max(min(then - at, WAIT_S), LINE_S * max(0, new))
    return [*made, (now + LAST_S, [])]


def draw(frames: list[Frame], title: str) -> str:
    """The animation; the last frame ends it."""
    whole_s, last = frames[-1][0], len(frames) - 2
    spans: dict[tuple[int, int], list[str]] = {}
    open_lines: dict[int, tuple[str, int]] = {}
    for k, (_, shown) in enumerate(frames):
        for row in [*open_lines]:
            text, since = open_lines[row]
            if k > last or row >= len(shown) or shown[row] != text:
                spans.setdefault((since, k), []).append(place(row, text))
                del open_lines[row]
        for row, text in enumerate(shown):
            if text and row not in open_lines:
                open_lines[row] = (text, k)

    def percent(k: int) -> str:
        return f"{100 * frames[k][0] / whole_s:.2f}%"

    rules, groups = [], []
    for n, ((since, until), drawn) in enumerate(spans.items()):
        stays = until > last
        steps = [(percent(since), "visible"), *([] if stays else [(percent(until), "hidden")])]
        steps = steps if since == 0 else [("0%", "hidden"), *steps]
        changes = "".join(f"{at}{{visibility:{how}}}" for at, how in steps)
        rules.append(f"#l{n}{{animation-name:k{n}}}@keyframes k{n}{{{changes}}}")
        hidden = "" if stays else ' visibility="hidden"'
        groups.append(f'<g id="l{n}"{hidden}>{"".join(drawn)}</g>')
    tops = [max(0, len(shown) - ROWS) * LINE for _, shown in frames[:-1]]
    moves = [k for k, top in enumerate(tops) if k == 0 or top != tops[k - 1]]
    scrolls = "".join(f"{percent(k)}{{transform:translateY(-{tops[k]}px)}}" for k in moves)
    rules.append(f"#all{{animation-name:scroll}}@keyframes scroll{{{scrolls}}}")
    width, height = round(COLUMNS * CHARACTER + 2 * EDGE), TOP + ROWS * LINE + EDGE
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {width} {height}">
<title>{html.escape(title)}</title>
<style>
text{{font:14px {FONT};fill:#d0d3d1;white-space:pre}}
@media (prefers-reduced-motion:no-preference){{
g{{animation:{whole_s:.1f}s step-end infinite}}
{"".join(rules)}
}}
</style>
<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="#292929" stroke="#777"/>
<text x="{width / 2}" y="22" text-anchor="middle" font-weight="bold">{html.escape(title)}</text>
<svg x="{EDGE}" y="{TOP}" width="{width - 2 * EDGE}" height="{ROWS * LINE}">
<g id="all" transform="translate(0,-{tops[-1]})">
{"".join(groups)}
</g>
</svg>
</svg>
"""


def place(row: int, drawn: str) -> str:
    wide = len(html.unescape(re.sub("<[^>]*>", "", drawn)))
    y = row * LINE + 14
    return f'<text y="{y}" textLength="{wide * CHARACTER:.0f}">{drawn}</text>'


def check(svg: str) -> None:
    """Refuse a recording that names this machine, or is too large for a page."""
    named = [platform.node(), str(ROOT), str(Path.home()), *platform.node().split(".")[:1]]
    found = [name for name in named if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", svg)]
    if found or len(svg.encode()) > MOST_BYTES:
        sys.exit(f"{len(svg.encode())} bytes; it names {found}")


if __name__ == "__main__":
    main()
