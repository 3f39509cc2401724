"""`hetero join`: makes this machine a worker or an island, with an invitation's token."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework.commands.options import DEFAULT_CONFIG, KEYS, key_directory, option

EXAMPLES = """
    hetero join 192.168.1.10:9998 HT1-...
    """
OPTIONS = (
    option("address", metavar="HOST:PORT", help="where `hetero invite` waits"),
    option("token", metavar="TOKEN", help="the token that `hetero invite` printed, HT1-..."),
    option(
        "--config",
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help=f"file that a worker's configuration is written to (default: {DEFAULT_CONFIG})",
    ),
    KEYS,
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.extras.pairing.key_management import join_cluster

    file = Path(arguments.config)
    joined = join_cluster(arguments.address, arguments.token, file, key_directory(arguments))
    more = "" if arguments.config == DEFAULT_CONFIG else f" --config {file}"
    more += f" --keys {arguments.keys}" if arguments.keys else ""
    if joined.identity.island is not None:
        print(f"this machine is {joined.identity}; its key is here. Next: hetero train{more}")
        return
    print(f"this machine is {joined.identity}; {file} is here. Next: hetero train{more}")
