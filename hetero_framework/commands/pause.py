"""`hetero pause`: frees a worker's machine until `hetero resume`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from hetero_framework import units
from hetero_framework.cluster.pausing import PausableWorker, PauseFile, PauseState, supervised
from hetero_framework.commands.options import value
from hetero_framework.core import timeouts
from hetero_framework.errors import PeerLostError, UserError, in_words

EXAMPLES = """
    hetero pause 1
    hetero pause 1 --address 192.168.1.20:9999
    """
OPTIONS = (
    value("worker_id", "ID", "the worker, as the configuration names it"),
    value(
        "--address",
        "HOST:PORT",
        "its listening address, if several workers of that name are served here",
    ),
)
_PATIENCE_S = timeouts.RELEASE_S + timeouts.EXIT_S


def run(arguments: argparse.Namespace) -> None:
    print(pause(arguments.worker_id, arguments.address))


def pause(worker_id: str, address: str | None = None) -> str:
    """Have a worker of this machine leave its run and free its memory; return text for the user.
    Raises UserError if no worker of that id is served here, PeerLostError without an answer."""
    pause_file, worker = _find(worker_id, address)
    if not _want(pause_file, True) and worker.state == PauseState.PAUSED.value:
        return f"worker {worker_id} is paused already; it goes on after: hetero resume {worker_id}"
    paused = _await(pause_file, worker, lambda now: now.state == PauseState.PAUSED.value)
    freed = f" ({units.size(paused.freed_bytes)} of it)" * (paused.freed_bytes > 0)
    return (
        f"worker {worker_id} is paused: its process has ended, its memory{freed} and its device "
        f"are free\nit goes on after: hetero resume {worker_id}"
    )


def resume(worker_id: str, address: str | None = None) -> str:
    """Have a paused worker of this machine started again. Raises as `pause` does."""
    pause_file, worker = _find(worker_id, address)
    if not _want(pause_file, False) and worker.state == PauseState.RUNNING.value:
        return f"worker {worker_id} is not paused"
    _await(pause_file, worker, lambda now: now.state == PauseState.RUNNING.value)
    return f"worker {worker_id} is started again; its run goes on when it is ready"


def _find(worker_id: str, address: str | None) -> tuple[PauseFile, PausableWorker]:
    """The only worker with this id and, if given, this address."""
    known = supervised(worker_id)
    if address is not None:
        known = [(pause_file, worker) for pause_file, worker in known if worker.address == address]
    where = f" at {address}" if address is not None else ""
    if not known:
        raise UserError(
            f"no worker {worker_id}{where} is served on this machine by this user",
            hint="it is paused where it runs: on its machine, as the user who started hetero worker"
            " or hetero train there. Workers of the coordinator's own machine end with the run",
        )
    if len(known) > 1:
        addresses = ", ".join(worker.address for _, worker in known)
        raise UserError(
            f"several workers {worker_id} are served on this machine: {addresses}",
            hint="say which one: --address HOST:PORT",
        )
    return known[0]


def _want(pause_file: PauseFile, paused: bool) -> bool:
    try:
        return pause_file.want_pause(paused)
    except OSError as error:
        raise UserError(f"cannot tell the worker's supervisor: {in_words(error)}") from error


def _await(
    pause_file: PauseFile, before: PausableWorker, is_done: Callable[[PausableWorker], bool]
) -> PausableWorker:
    """The worker's state once `is_done` holds."""
    deadline = time.monotonic() + _PATIENCE_S
    while not ((state := pause_file.worker()) is not None and is_done(state)):
        if time.monotonic() > deadline or not pause_file.is_held():
            raise PeerLostError(
                f"the supervisor of worker {before.id} (process {before.pid}) does not answer",
                hint="look at its screen; the wish stays, and it is granted when it is started",
            )
        time.sleep(timeouts.TICK_S)
    return state
