"""`hetero keys`: lists, checks, revokes, rotates and exports keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_framework.commands.options import (
    CONFIG,
    KEYS,
    OutputFolder,
    flag,
    key_directory,
    load,
    option,
    overwrite,
    value,
)
from hetero_framework.errors import UserError
from hetero_framework.log import printable

EXAMPLES = """
    hetero keys list
    hetero keys check
    hetero keys revoke 2
    hetero keys rotate
    hetero keys export 1 2 --output for-the-boxes
    hetero keys revoke garage --islands
    """
OPTIONS = (
    option("action", choices=("list", "check", "revoke", "rotate", "export"), help="what to do"),
    value("workers", "ID", "workers; revoke also takes coordinator or lighthouse", nargs="*"),
    flag("--islands", "act on the keys of islands and their lighthouse, not of workers"),
    *CONFIG,
    KEYS,
    value(
        "--output", "DIR", "with export: directory for the worker-ID.pem files", type=OutputFolder
    ),
    overwrite(),
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.extras.pairing import key_management

    action, keys, workers = arguments.action, key_directory(arguments), arguments.workers
    if arguments.islands:
        keys = keys.of_islands
    if (action == "revoke") != (len(workers) == 1) and action != "export":
        raise UserError(f"hetero keys {action} takes {'one ID' if action == 'revoke' else 'no ID'}")
    if (action == "export") != (arguments.output is not None):
        raise UserError("--output DIR goes with hetero keys export, which needs it")
    config = load(arguments) if action in ("check", "export") and not arguments.islands else None
    if action == "list":
        print(printable(key_management.listing(keys)))
    elif action == "revoke":
        print(key_management.revoke(keys, workers[0]))
    elif action == "rotate":
        print(key_management.rotate(keys))
    elif action == "check":
        print(key_management.check(config, keys))
    else:
        output, folder = Path(arguments.output), "hetero_keys" + "/islands" * arguments.islands
        anew = arguments.overwrite
        for file in key_management.export(config, keys, workers, output, overwrite=anew):
            print(f"wrote {file}; copy it to {folder} on its machine (chmod 600)")
