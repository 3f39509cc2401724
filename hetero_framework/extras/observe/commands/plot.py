"""`hetero plot`: draws the curves of a run, or of several to be compared."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework.commands.options import check_outputs, value, writes

EXAMPLES = """
    hetero plot runs/default
    hetero plot runs/default runs/other --output both.svg
    """
OPTIONS = (
    value("runs", "RUN", "output_dir of a run, or its metrics.jsonl", nargs="+"),
    *writes("png, svg or pdf (default: curves.png, of one run in its directory, else here)"),
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.extras.observe.curves import CURVES_FILE, draw, read_run

    places = [Path(place) for place in arguments.runs]
    beside = places[0] if places[0].is_dir() else places[0].parent
    if len(places) > 1 and arguments.output is None:
        check_outputs(arguments, CURVES_FILE)  # one run's curves.png is the run's own
    default = beside / CURVES_FILE if len(places) == 1 else Path(CURVES_FILE)
    file = draw([read_run(place, str(place)) for place in places], arguments.output or default)
    print(f"drawn: {file}")
