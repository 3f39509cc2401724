"""The processes of a benchmark: one for each machine, started quickly and ended for certain.

Where the system can fork, all come from one server process that has imported torch already; on a
machine with few cores that saves most of the time of a benchmark. A process ends with the program
that started it, however that ends, and no answer is waited for without a limit.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol

import torch

from hetero_framework.errors import HeteroError

_END_S = 5.0
_PRELOAD = ["benchmarks.machines", "hetero_framework.cluster.cluster", "torch.distributed"]


class Room(Protocol):
    """Where a process goes before it does anything (`network.Place`)."""

    def enter(self) -> None: ...


class Child:
    """A process of a benchmark and the connection to it."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self._process = process
        self._connection = connection

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Minus the number of a signal; None while it lives."""
        self._process.join(0)
        return self._process.exitcode

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`: readable when it has said something or ended."""
        return self._connection.fileno()

    def send(self, value: Any) -> None:
        self._connection.send(value)

    def receive(self, timeout_s: float) -> Any:
        """What the process sends next. Raises HeteroError when it failed, ended or is silent."""
        if not self._connection.poll(timeout_s):
            raise HeteroError(f"{self._process.name} has said nothing for {timeout_s:.0f} s")
        try:
            value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_END_S)
            raise HeteroError(f"{self._process.name} ended with {self._process.exitcode}") from None
        if isinstance(value, _Failure):
            raise HeteroError(f"{self._process.name} failed: {value.text}")
        return value

    def end(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def join(self) -> None:
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


class _Failure:
    """What a process says when it raised."""

    def __init__(self, text: str) -> None:
        self.text = text


class Machines:
    """The processes of one benchmark; a context manager that leaves none behind."""

    def __init__(self, *, share: bool = True) -> None:
        """`share`: processes may share the memory of what they have imported. It becomes their own
        little by little, which looks like growth where memory is measured."""
        forks = share and "forkserver" in multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context("forkserver" if forks else "spawn")
        # Names of hosts are looked up in vain in a namespace; torch would warn of each.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if forks:
            self._context.set_forkserver_preload(_PRELOAD)
        self._children: list[Child] = []

    def start(self, room: Room, function: Callable[..., None], *args: Any) -> Child:
        """Run `function(connection, *args)` in a process of its own in `room`, one thread."""
        near, far = self._context.Pipe()
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_main,
            args=(room, far, function, args),
            name=f"{function.__name__} {len(self._children)}",
            daemon=True,
        )
        process.start()
        far.close()
        child = Child(process, near)
        self._children.append(child)
        return child

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.end()
        for child in self._children:
            child.join()


def run_program(main: Callable[[], None]) -> None:
    """Run a benchmark's `main`: a known error is one line, Ctrl-C none."""
    try:
        main()
    except HeteroError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _main(
    room: Room, connection: Connection, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    # Ctrl-C is the parent's affair; it ends the others in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        room.enter()
        function(connection, *args)
    except Exception as error:
        # Whatever it is, the program that waits for this process is told.
        connection.send(_Failure(_in_words(error)))
        sys.exit(1)


def _in_words(error: BaseException) -> str:
    """An error and what caused it, without the lines of code between."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
        cause = cause.__cause__
    return ", because of ".join(texts)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
