"""`hetero diagram`: draws the machines and the layers that each of them holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework.commands.options import CONFIG, check_outputs, load, option, writes
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero diagram --format svg --output architecture.svg
    hetero diagram --config hetero_config.json --format mmd --output -
    """
OPTIONS = (
    *CONFIG,
    option(
        "--format",
        choices=("png", "svg", "pdf", "mmd"),
        help="default: by --output, else training.visualization_format; mmd is Mermaid text, and"
        " without Graphviz the others are plainer",
    ),
    *writes('file, or "-" for Mermaid text on the screen (default: architecture.FORMAT)'),
)


def run(arguments: argparse.Namespace) -> None:
    config = load(arguments)
    from hetero_framework.extras.observe.diagram import Diagram, to_mermaid
    from hetero_framework.extras.observe.diagram_figure import draw

    if arguments.output == "-":
        if arguments.format not in (None, "mmd"):
            raise UserError("only Mermaid text can be printed; use --format mmd or --output FILE")
        print(to_mermaid(Diagram.of(config)).rstrip())
        return
    form = arguments.format
    if form is None and arguments.output is None:
        form = config.training.visualization_format
    output = Path(arguments.output or f"architecture.{form}")
    check_outputs(arguments, output)
    print(draw(config, output, form))
