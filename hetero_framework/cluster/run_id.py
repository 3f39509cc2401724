"""The id of the run that writes into a directory; workers serve the run of one id."""

from __future__ import annotations

import platform
import re
import secrets
from contextlib import suppress
from pathlib import Path

from hetero_framework.core.files import write_file
from hetero_framework.file_trust import read_own

RUN_FILE = ".run"


def run_id_of(output_dir: Path) -> str:
    """The id of the run that writes into `output_dir`, which is created. A coordinator that is
    started again has the same id, so workers give up the stages of the dead one. Two coordinators
    that begin at once may have two ids, but the directory's lock stops one. Raises OSError."""
    output_dir.mkdir(parents=True, exist_ok=True)
    file = output_dir / RUN_FILE
    here = f"{platform.node()}:{output_dir.resolve()}"  # a copy of the directory is another run
    with suppress(OSError, ValueError):
        run_id, place = read_own(file).decode().split("\n", 1)
        if place == here and re.fullmatch("[0-9a-f]{16}", run_id):
            return run_id
    run_id = secrets.token_hex(8)
    write_file(file, f"{run_id}\n{here}".encode())
    return run_id
