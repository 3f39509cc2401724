"""`hetero timeline`: how the time of a run's steps was spent, and which change would help most."""

from __future__ import annotations

import argparse

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
    report(arguments, diagnosis.to_dict(), lambda _: text(diagnosis))
