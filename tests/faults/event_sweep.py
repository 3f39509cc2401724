"""Every pair of a worker's event and another worker's state, with real processes.

    python -m tests.faults.event_sweep DIRECTORY [STATE/EVENT ...]

For each pair a run is made: worker 2 is brought into STATE, which a failpoint makes last, and then
EVENT happens to worker 1. Then the supervisor's or user's part follows: ended processes are
started again. All processes are forked from one that has imported everything. Prints a JSON
object a line: the pair, what differs from an undisturbed run, and how the run ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks import machines
from benchmarks.machines import Child, Machines
from tests.faults.kill_matrix import COORDINATOR, NEEDED, Here, configurations, differences

VICTIM, OTHER = "worker-1", "worker-2"
STEPS = 6
SILENT_S = 90.0
ABSENCE_S = 2.0

STATES: dict[str, tuple[str, str]] = {
    # Whose failpoint makes it last, and which; without one the other is started only afterwards.
    "connecting": ("", ""),
    "greeting": (OTHER, "join:sleep:1.5"),
    "loading": (OTHER, "load:sleep:1.5"),
    "ready": (VICTIM, "load:sleep:1.5"),
    "training": (OTHER, "forward@3:sleep:1.5"),
    "evaluating": (OTHER, "evaluation:sleep:1.5"),
    "checkpointing": (OTHER, "state-part:sleep:1.5"),
    "exporting": (OTHER, "gather:sleep:1.5"),
    "replanning": (OTHER, "load:sleep:1.5"),  # it was done without, and gets layers again
    # The same one.
    "own-greeting": (VICTIM, "join:sleep:1.5"),
    "own-step": (VICTIM, "backward@3:sleep:1.5"),
    "own-evaluation": (VICTIM, "evaluation:sleep:1.5"),
    "own-checkpoint": (VICTIM, "state-part:sleep:1.5"),
    "own-export": (VICTIM, "gather:sleep:1.5"),
}
EVENTS = ("SIGTERM", "SIGKILL", "SIGHUP", "cut")
PAIRS = [f"{state}/{event}" for state in STATES for event in EVENTS]
FEW = ["loading/SIGTERM"]
"""Of the default suite."""


def work(connection: Connection, name: str, point: str, raw: dict[str, Any], at: str) -> None:
    """A worker's process; it is told "cut" and, as a supervisor tells it, why to end."""
    from hetero_framework.cluster.stop_signals import StopSignals
    from hetero_framework.cluster.worker import serve
    from hetero_framework.config import Config
    from hetero_framework.core import stream
    from hetero_framework.engine.loading import load_stages

    os.environ["HETERO_FAILPOINT"] = f"{name}/{point}" if point else ""
    _say_into(Path(at), name)
    sockets: list[socket.socket] = []
    begin, orders = stream.PlainStream.__init__, StopSignals()

    def noted(self: stream.PlainStream, sock: socket.socket) -> None:
        sockets.append(sock)
        begin(self, sock)

    stream.PlainStream.__init__ = noted  # type: ignore[method-assign]

    def obey() -> None:
        with suppress(EOFError, OSError):
            while order := connection.recv():
                if order != "cut":
                    orders.from_parent(order)
                for sock in list(sockets) if order == "cut" else ():
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=obey, daemon=True).start()
    serve(Config.from_dict(raw), int(name[-1]), build=load_stages, keep=True, orders=orders)


def coordinate(connection: Connection, raw: dict[str, Any], at: str, replans: bool) -> None:
    from hetero_framework.cluster.local_workers import LocalWorkers
    from hetero_framework.config import Config
    from hetero_framework.core import timeouts
    from hetero_framework.trainer.coordinator import train
    from tests.faults.networked import Tell

    timeouts.REPLAN_S = ABSENCE_S
    if replans:  # else the run may be over before a new process of worker 2 is there
        os.environ["HETERO_FAILPOINT"] = "coordinator/step@*:sleep:0.7"
    _say_into(Path(at), COORDINATOR)
    config = Config.from_dict(raw)
    train(config, progress=Tell(connection), workers=LocalWorkers(config, ()), replan=replans)
    connection.send(("done", None))


def _say_into(at: Path, name: str) -> None:
    with (at / f"{name}.log").open("ab", buffering=0) as said:
        for screen in (sys.stdout, sys.stderr):
            os.dup2(said.fileno(), screen.fileno())


class Pair:
    """One run, in which one event happens to worker 1 while worker 2 is in a state."""

    def __init__(self, at: Path, raw: dict[str, Any], pair: str, started: Machines) -> None:
        self._at, self._raw, self._started = at, raw, started
        self._state, self._event = pair.split("/")
        self._children: dict[str, Child] = {}
        self._said: list[str] = []
        self._is_done = False
        at.mkdir(parents=True)

    def run(self) -> None:
        """Raises AssertionError where the run ends otherwise than with its result."""
        owner, point = STATES[self._state]
        late = self._state == "replanning"
        first = {VICTIM: "", OTHER: ""}
        if owner and not late:
            first[owner] = point
        if self._state == "connecting":
            del first[OTHER]
        for name, armed in first.items():
            self._begin(name, armed)
        self._children[COORDINATOR] = self._started.start(
            Here(), coordinate, self._raw, str(self._at), late
        )
        if self._state == "connecting":
            self._until(lambda: "serving the run" in self._log(VICTIM))
        elif late:
            self._until(lambda: "step 2" in self._said)
            self._signal(OTHER, signal.SIGKILL)
            self._until(lambda: self._heard(": the run goes on after step"))
            self._begin(OTHER, point)
        if owner:
            self._until(lambda: f"{owner}/{point} fires" in self._log(owner))
        self._happen()
        if self._state == "connecting":
            self._begin(OTHER, "")
        self._until(lambda: self._is_done)

    def _happen(self) -> None:
        if self._event == "cut":
            self._children[VICTIM].send("cut")
            return
        self._signal(VICTIM, getattr(signal, self._event))
        self._begin(VICTIM, "")

    def _signal(self, name: str, number: signal.Signals) -> None:
        child = self._children[name]
        os.kill(child.pid, number)
        self._until(lambda: child.exit_code is not None)

    def _begin(self, name: str, point: str) -> None:
        self._children[name] = self._started.start(
            Here(), work, name, point, self._raw, str(self._at)
        )

    def _until(self, condition: Callable[[], bool]) -> None:
        """Hear the coordinator until something is so."""
        deadline = time.monotonic() + SILENT_S
        coordinator = self._children.get(COORDINATOR)
        while not condition():
            assert time.monotonic() < deadline, f"nothing has happened for {SILENT_S} s"
            if coordinator is None or self._is_done or not wait([coordinator], 0.05):
                time.sleep(0.02 if self._is_done else 0)  # nothing announces what a process does
                continue
            try:
                what, value = coordinator.receive(0)
            except machines.HeteroError as ended:
                raise AssertionError(f"the coordinator: {ended}") from None
            self._is_done = what == "done"
            self._said.append(f"step {value}" if what == "step" else str(value))

    def _heard(self, text: str) -> bool:
        return any(text in line for line in self._said)

    def _log(self, name: str) -> str:
        with suppress(OSError):
            return (self._at / f"{name}.log").read_text(errors="replace")
        return ""

    def said(self) -> str:
        """The end of what everybody said."""
        logs = "\n".join(f"-- {name}\n{self._log(name)[-2500:]}" for name in (VICTIM, OTHER))
        return "\n".join([*self._said[-40:], logs])


def sweep(at: Path, pairs: list[str]) -> int:
    """Run these pairs, and say of each what has become of it; how many were wrong."""
    machines._PRELOAD += NEEDED
    cut, whole = configurations(at, STEPS)
    for raw in (cut, whole):
        raw["training"] |= {"save_steps": 3, "eval_steps": 3}
    with Machines() as started:
        (at / "whole").mkdir()
        calm = started.start(Here(), coordinate, whole, str(at / "whole"), False)
        while calm.receive(SILENT_S)[0] != "done":
            pass
    wrong = 0
    for pair in pairs:
        place = at / pair.replace("/", "-")
        raw = {**cut, "training": {**cut["training"], "output_dir": str(place / "run")}}
        began, found, ended = time.monotonic(), [], "finished"
        with Machines() as started:
            one = Pair(place, raw, pair, started)
            try:
                one.run()
                found = differences(place / "run", at / "whole" / "run")
            except AssertionError as error:
                ended = f"{error}\n{one.said()}"
        wrong += bool(found) or ended != "finished"
        seconds = round(time.monotonic() - began, 1)
        print(json.dumps({"pair": pair, "differences": found, "end": ended, "s": seconds}))
        sys.stdout.flush()
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, sweep(Path(sys.argv[1]), sys.argv[2:] or PAIRS)))
