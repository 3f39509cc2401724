"""`hetero check`: validates configuration, model and data before a run."""

from __future__ import annotations

import argparse

from hetero_framework import registry
from hetero_framework.commands.options import CONFIG, IMPORT, JSON, at_least, load, report, value

EXAMPLES = """
    hetero check
    hetero check --show 3
    hetero check --config hetero_config.json --json
    hetero check --set training.per_device_train_batch_size=4
    """
OPTIONS = (
    *CONFIG,
    IMPORT,
    value(
        "--show",
        "N",
        "print the first N examples: their tokens, which of them the loss covers, and what is"
        " cut off",
        type=at_least(1),
        default=0,
    ),
    JSON,
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.commands.preflight import preflight

    config = load(arguments)
    preflight(config, data=False)
    from hetero_framework.commands.check_report import check, text

    facts = check(config, show=arguments.show)
    report(arguments, facts, text)
    if facts["examples"] and not arguments.json:
        print()
        registry.needed("views", "examples", "--show")(facts["examples"])
