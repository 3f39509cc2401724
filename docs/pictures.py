"""Write the README's pictures: `make demo` first, then `python docs/pictures.py` (not on Windows).

All of them show the demo: two screens of a run in a terminal in which worker 1 is killed, and the
machines. It takes some minutes and needs Graphviz.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
DEMO = Path("runs", "demo")
HETERO = (sys.executable, "-m", "hetero_framework")
COLUMNS, LINES = 100, 60
KILLED_AT = 6  # of the demonstration's 12 steps with LoRA
SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px "DejaVu Sans Mono", Menlo, Consolas,
  monospace; }}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    os.chdir(ROOT)
    run_with_a_death()
    drawn = ["--output", str(IMAGES / "architecture.svg"), "--overwrite"]
    subprocess.run([*HETERO, "diagram", *drawn], check=True)


def run_with_a_death() -> None:
    """The live table in a run's middle, and what its screen shows after worker 1 was killed."""
    settings = json.loads((DEMO / "lora_config.json").read_text(encoding="utf-8"))
    settings["training"] |= {"output_dir": "pictured", "per_device_train_batch_size": 2}
    (DEMO / "lora.json").write_text(json.dumps(settings))
    shutil.rmtree(DEMO / "pictured", ignore_errors=True)
    command = [*HETERO, "train", "--config", "lora.json"]
    written, pictures = "", 0
    for written in terminal(command, DEMO):
        steps = [int(step) for step in re.findall(r"step (\d+)/", written)] or [0]
        if not pictures and steps[-1] >= KILLED_AT:
            save("live", "hetero train --config lora.json", screen(written))
            (pid,) = re.findall(r"worker 1: started as process (\d+)", written)
            os.kill(int(pid), signal.SIGKILL)
            pictures = 1
        elif pictures == 1 and steps[-1] >= KILLED_AT + 2:
            recovery = screen(written).partition("warning: lost the link")
            save("recovery", f"after kill -9 {pid}", "".join(recovery[1:]))
            pictures = 2
    print("the last screen:", screen(written), sep="\n")


def terminal(command: Sequence[str], folder: Path) -> Iterator[str]:
    """Run a command in a terminal, and yield all that it has written whenever its display is whole:
    nothing has come for a moment. Raises CalledProcessError when it fails."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    written, shown = "", ""
    with subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs) as run:
        os.close(theirs)
        while True:
            ended = run.poll() is not None
            if select.select([ours], [], [], 0.03)[0] and (came := _read(ours)):
                written += came
            elif written != shown:
                yield written
                shown = written
            elif ended:
                break
    os.close(ours)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 1 << 16).decode("utf-8", "replace")
    except OSError:  # Linux: the other side is closed
        return ""


def screen(written: str) -> str:
    """The screen of a terminal after `written`: text with colours, and tables that rich redraws."""
    rows, row, over = [""], 0, False
    for part in filter(None, re.split(r"(\x1b\[[?\d;]*[A-Za-z]|\r|\n)", written)):
        if over and part[0] not in "\r\n\x1b":  # written over what stands there
            rows[row], part = "", part + rows[row][len(part) :]
        over = part == "\r"
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part.startswith("\x1b[") and part.endswith("A"):
            row -= int(part[2:-1])
        elif part != "\r" and not (part.startswith("\x1b") and part[-1] in "lh"):
            rows[row] += part
    return "\n".join(rows).rstrip()


def save(name: str, title: str, text: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text.replace(f"{DEMO.resolve()}/", "")))
    drawn = console.export_svg(title=title, code_format=SVG, unique_id=name)
    (IMAGES / f"{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
