"""`hetero join`: makes this machine a worker or an island, with an invitation's token."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from hetero_framework.commands.options import DEFAULT_CONFIG, KEYS, key_directory, value
from hetero_framework.config import load_config
from hetero_framework.errors import UserError, attempt
from hetero_framework.repository import resolve_model_path

EXAMPLES = """
    hetero join 192.168.1.10:9998 HT1-...
    """
OPTIONS = (
    value("address", "HOST:PORT", "where `hetero invite` waits"),
    value("token", "TOKEN", "the token that `hetero invite` printed, HT1-..."),
    value(
        "--config",
        "FILE",
        f"file that a worker's configuration is written to (default: {DEFAULT_CONFIG})",
        default=DEFAULT_CONFIG,
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
    print(f"this machine is {joined.identity}; {file} is here. Next: hetero worker{more}")
    model = load_config(file).model
    name = model.name_or_path if model is not None else None
    lacks = attempt(partial(resolve_model_path, name or ".", file.absolute().parent))
    if isinstance(lacks, UserError):
        print(f"{lacks.message} yet: {lacks.hint}")
