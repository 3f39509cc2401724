"""`hetero doctor --report`: one redacted file for whoever helps.

It has the machine, the configuration, what would stop its run, and the last lines of the run's
logs. A part that fails is reported with its error, since the report is asked for when things break.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hetero_framework._version import __version__
from hetero_framework.commands.options import DEFAULT_CONFIG, key_options, load
from hetero_framework.commands.redaction import SECRET, Redaction
from hetero_framework.config.strict_json import read_object
from hetero_framework.core.files import write_file
from hetero_framework.errors import HeteroError, UserError, attempt
from hetero_framework.log import one_line

_HEAD = (
    f"Report of hetero {__version__}, redacted: no secrets, homes, users, hosts or addresses."
    "\nRead it before you send it. Names of models, data and files are in it.\n"
)
_HOST_KEYS = ("ip", "hostname", "host", "lighthouse")
_TEXTS = ("sample_prompts",)
_LINES = 60
_TAIL_BYTES = 64 * 1024


def write(arguments: argparse.Namespace) -> None:
    """Write the file. Raises OSError."""
    file = Path(arguments.config or DEFAULT_CONFIG)
    raw = attempt(partial(read_object, file)) if arguments.config or file.is_file() else None
    parts = [f"== {title}\n{_told(part)}\n" for title, part in _parts(arguments, file, raw)]
    redact = Redaction(_hosts(raw))
    text = "\n".join([_HEAD, *parts])
    write_file(Path(arguments.report), redact(text).encode("utf-8", "replace"))
    print(f"wrote {arguments.report}: read it before you send it")


def _told(part: Callable[[], str]) -> str:
    try:
        return part()
    except HeteroError as error:
        return f"error: {error}"
    except Exception:
        return traceback.format_exc()


def _parts(
    arguments: argparse.Namespace, file: Path, raw: dict[str, Any] | UserError | None
) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "machine", _machine
    if isinstance(raw, UserError):  # the lines that follow are the file's own
        yield f"configuration {file.name}", lambda: str(raw).partition("\n")[0]
    elif raw is not None:
        shown = json.dumps(_without_texts(raw), indent=2, ensure_ascii=False)
        yield f"configuration {file.name}", lambda: shown
        if arguments.config:
            yield "findings", lambda: _findings(arguments)
        with suppress(HeteroError):  # the findings tell
            output = load(arguments, saved_plan=False).output_dir
            for log in [*sorted((output / "logs").glob("*.log")), output / "events.jsonl"]:
                if log.is_file():
                    yield f"the end of {log.name}", partial(_tail, log)


def _machine() -> str:
    from hetero_framework.commands.machine_report import examine, text

    return text(examine())


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: _without_texts(v) for k, v in value.items()}
        return kept | {key: SECRET for key in _TEXTS if key in kept}
    return [_without_texts(one) for one in value] if isinstance(value, list) else value


def _findings(arguments: argparse.Namespace) -> str:
    from hetero_framework.commands import diagnosis

    options = key_options(arguments)
    config = load(arguments)
    return diagnosis.text(
        diagnosis.diagnose(config, worker_id=arguments.worker_id, options=options)
    )


def _tail(file: Path) -> str:
    with file.open("rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
        lines = log.read().decode("utf-8", "replace").splitlines()
    return "\n".join(one_line(line) for line in lines[-_LINES:])


def _hosts(value: Any, key: str = "") -> Iterator[str]:
    """The names and addresses in a configuration."""
    if isinstance(value, str) and key in _HOST_KEYS:
        yield value.rpartition(":")[0] if value.count(":") == 1 else value
    for name, item in value.items() if isinstance(value, dict) else ():
        yield from _hosts(item, name)
    for item in value if isinstance(value, list) else ():
        yield from _hosts(item, key)
