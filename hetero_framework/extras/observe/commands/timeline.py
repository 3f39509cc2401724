"""`hetero timeline`: how the time of a run's steps was spent, and which change would help most."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework import registry
from hetero_framework.commands.options import flag, option, report, value, writes
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero timeline runs/default
    hetero timeline runs/default --json
    hetero timeline runs/default --step 3 --output step3.svg
    """
OPTIONS = (
    value("place", "RUN", "output_dir of a run, or its timeline.json"),
    value("--step", "N", "step to draw (default: the last recorded)", type=int),
    option("--format", choices=("png", "svg", "pdf"), help="default: by --output"),
    *writes("picture to write (default: timeline.png beside timeline.json)", metavar="PATH"),
    flag("--json", "print JSON; draw only with --output"),
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.extras.observe import prediction_error
    from hetero_framework.extras.observe.bottleneck import diagnose, text
    from hetero_framework.extras.observe.pictures import can_draw
    from hetero_framework.extras.observe.timeline_picture import draw, picture
    from hetero_framework.extras.observe.trace_file import read_timeline

    trace = read_timeline(arguments.place)
    diagnosis = diagnose(trace)
    steps = [step + 1 for step in trace.steps]
    step = arguments.step if arguments.step is not None else diagnosis.steps[-1]
    if step not in steps:
        raise UserError(
            f"step {step} was not recorded",
            hint=f"recorded: {', '.join(map(str, steps))}; training.timeline_steps sets which",
        )
    place = Path(arguments.place)
    folder = place if place.is_dir() else place.parent
    held = prediction_error.read_account(folder, diagnosis.steps)
    figures = {**diagnosis.to_dict(), "account": held}
    shown = [text(diagnosis), *(["", *prediction_error.text(held)] if held is not None else [])]
    if registry.is_installed("islands"):
        from hetero_framework.extras.islands import island_stats

        if (between := island_stats.read_between(folder)) is not None:
            figures["islands"] = between
            shown += ["", *island_stats.text(between)]
    report(arguments, figures, lambda _: "\n".join(shown))
    if arguments.output is None and arguments.json:
        return
    if arguments.output is None and not can_draw():
        print('\nno picture: it needs matplotlib (pip install "hetero-framework[pictures]")')
        return
    output = arguments.output or folder / f"timeline.{arguments.format or 'png'}"
    file = draw(picture(trace, step - 1), output, arguments.format)
    if not arguments.json:
        print(f"\ndrawn: step {step} in {file}")
