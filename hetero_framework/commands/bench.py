"""`hetero bench`: measures the configured machines, links and plan."""

from __future__ import annotations

import argparse

from hetero_framework.commands.options import (
    ACCESS,
    CONFIG,
    JSON,
    ROLE_HELP,
    access_for,
    at_least,
    check_coordinator,
    load,
    option,
    report,
)
from hetero_framework.commands.preflight import preflight

EXAMPLES = """
    hetero bench --config hetero_config.json
    hetero bench --config hetero_config.json --steps 8 --mb 32 --json
    """
OPTIONS = (
    *CONFIG,
    option(
        "--steps",
        type=at_least(2),
        default=4,
        metavar="N",
        help="training steps to compute and forget; the first does not count (default 4)",
    ),
    option(
        "--mb",
        type=at_least(1),
        default=8,
        metavar="N",
        help="size of the messages that measure the links, in 10^6 bytes (default 8)",
    ),
    option("--role", choices=("coordinator",), help=ROLE_HELP),
    *ACCESS,
    JSON,
)


def run(arguments: argparse.Namespace) -> None:
    config = load(arguments)
    check_coordinator(config, arguments)
    preflight(config, data=False)
    from hetero_framework.commands.bench_report import bench, text

    access, nbytes = access_for(config, "local", arguments), arguments.mb * 10**6
    found = bench(config, steps=arguments.steps, nbytes=nbytes, access=access)
    report(arguments, found, text)
