"""`hetero timeline`: how the time of a run's steps was spent, and which change would help most."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework import registry
from hetero_framework.commands.options import flag, report, value

EXAMPLES = """
    hetero timeline runs/default
    hetero timeline runs/default --json
    """
OPTIONS = (
    value("place", "RUN", "output_dir of a run, or its timeline.json"),
    flag("--json", "print JSON"),
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.extras.observe.bottleneck import diagnose, text
    from hetero_framework.extras.observe.trace_file import read_timeline

    diagnosis = diagnose(read_timeline(arguments.place))
    figures, shown = diagnosis.to_dict(), [text(diagnosis)]
    if registry.is_installed("islands"):
        from hetero_framework.extras.islands import island_stats

        place = Path(arguments.place)
        folder = place if place.is_dir() else place.parent
        if (between := island_stats.read_between(folder)) is not None:
            figures["islands"] = between
            shown += ["", *island_stats.text(between)]
    report(arguments, figures, lambda _: "\n".join(shown))
