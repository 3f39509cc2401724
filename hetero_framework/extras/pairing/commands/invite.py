"""`hetero invite`: lets another machine join as a worker or an island."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework.commands.options import (
    CONFIG,
    KEYS,
    at_least,
    key_directory,
    load,
    repeated,
    value,
)
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero invite 1
    hetero invite 1 2 --config cluster.json
    hetero invite --island garage --bind 192.168.1.10
    """
OPTIONS = (
    value("workers", "ID", "worker ID in the configuration, or one that is added", nargs="*"),
    repeated(
        "--island",
        "NAME",
        "invite the coordinator of this island, on the lighthouse's machine; may be repeated",
        dest="islands",
    ),
    *CONFIG,
    KEYS,
    value("--port", "N", "port to wait at (default: the coordinator's)", type=at_least(1)),
    value(
        "--bind",
        "HOST",
        "with --island: this machine's address as islands reach it (default: that of"
        " island.lighthouse in the configuration; without one, its main address)",
    ),
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.extras.pairing import key_management

    file, keys, port = Path(arguments.config), key_directory(arguments), arguments.port
    if bool(arguments.workers) == bool(arguments.islands):
        raise UserError("hetero invite takes IDs of workers or --island NAME")
    if arguments.bind is not None and not arguments.islands:
        raise UserError("--bind HOST goes with hetero invite --island")
    if not arguments.islands:
        config = load(arguments, saved_plan=False, devices=False)
        key_management.invite(config, file, keys, arguments.workers, port)
        return
    config = load(arguments, devices=False) if file.exists() else None
    address = key_management.lighthouse_address(config, arguments.bind)
    key_management.invite_islands(keys.of_islands, arguments.islands, address, port)
