"""`hetero resume`: starts a paused worker of this machine again."""

from __future__ import annotations

import argparse

from hetero_framework.commands.pause import OPTIONS as OPTIONS
from hetero_framework.commands.pause import resume

EXAMPLES = """
    hetero resume 1
    hetero resume 1 --address 192.168.1.20:9999
    """


def run(arguments: argparse.Namespace) -> None:
    print(resume(arguments.worker_id, arguments.address))
