"""`hetero lighthouse`: the service through which islands find each other. Only it needs torchft."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_framework.commands.options import ACCESS, at_least, key_options, value
from hetero_framework.errors import StoppedEarly, UserError

if TYPE_CHECKING:
    from hetero_framework.security.access import KeyOptions
    from hetero_framework.security.keys import KeyDirectory

EXAMPLES = """
    hetero lighthouse
    hetero lighthouse --bind 192.168.1.10:29510 --min-islands 2
    """
OPTIONS = (
    value(
        "--bind",
        "HOST:PORT",
        "listening address, the islands' island.lighthouse (default: 127.0.0.1:29510)",
        default="127.0.0.1:29510",
    ),
    value(
        "--min-islands",
        "N",
        "minimum number of islands before training starts (default: 1)",
        type=at_least(1),
        default=1,
    ),
    value("--keys", "DIR", "default: hetero_keys; those of islands are in it"),
    ACCESS[1],
)


def run(arguments: argparse.Namespace) -> None:
    from hetero_framework.security.keys import FOLDER, KeyDirectory

    keys = KeyDirectory(Path(arguments.keys or FOLDER).absolute())
    serve(arguments.bind, arguments.min_islands, keys.of_islands, key_options(arguments))


def serve(
    bind: str,
    min_islands: int,
    keys: KeyDirectory,
    options: KeyOptions,
    say: Callable[[str], None] = print,
) -> None:
    """Serve at `bind`, "host:port", until a signal ends it with StoppedEarly. `keys` is the key
    directory of islands. Raises UserError, IdentityError, and NetworkError for a port in use."""
    from hetero_framework.config import host_and_port, split_address
    from hetero_framework.core import timeouts
    from hetero_framework.core.dial import Listener
    from hetero_framework.extras.islands.lighthouse import Lighthouse
    from hetero_framework.extras.islands.quorums import Quorums
    from hetero_framework.security.access import lighthouse_access
    from hetero_framework.trainer.signals import StopRequest

    try:
        host, port = split_address(bind)
    except ValueError as error:
        raise UserError(f"--bind: {error}") from None
    access = lighthouse_access(keys, host, options)
    with StopRequest() as stop:
        try:
            with (
                closing(Listener(host, port)) as listener,
                closing(Quorums(min_islands)) as quorums,
                closing(Lighthouse(listener, access, quorums)) as lighthouse,
            ):
                say(_welcome(host_and_port(host, port), access.encrypts))
                while True:
                    lighthouse.wait(timeouts.TICK_S)
        except KeyboardInterrupt:
            name = stop.requested or "Ctrl-C"
            text = f"stopped by {name}; islands find it again when the same command has run"
            raise StoppedEarly(text) from None


def _welcome(where: str, encrypts: bool) -> str:
    if encrypts:
        return f"the lighthouse is at {where}; `hetero invite --island NAME` lets an island in"
    return (
        f"the lighthouse is at {where}, without authentication; for islands elsewhere make keys"
        " (`hetero invite --island NAME`) and start it with --bind and this machine's address"
    )
