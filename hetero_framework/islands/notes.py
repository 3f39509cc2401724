"""What a lighthouse remembers of groups that have finished.

The islands of a group end together. One that was away comes back to nobody: alone it would train
once more what the others have trained. So those that end leave a note, and who comes looks for it.
A question is one line, over a link of its own; torchft's clients begin theirs otherwise.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from hetero_framework.islands.rendezvous import Finished
from hetero_framework.log import one_line

OPENING = b"hetero-islands "
"""A link that begins so is for the notes."""
CLOCK = OPENING + b"clock\n"
"""Asks what time it is there."""
SINCE = OPENING + b"since\n"
"""Asks for how long islands have been there."""
OF_ISLAND = OPENING + b"of "
"""So begins a line before the bytes of torchft's client: whose link it is."""
MAX_BYTES = 8192
"""Of a question or an answer."""
_MAX_NOTES = 1000
# What reading a line of somebody else's may come to; infinity, which JSON has here, is no integer.
_NOT_SUCH = (KeyError, TypeError, ValueError, OverflowError, RecursionError)


class Notes:
    """The last groups that have finished. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[Finished, float]] = {}  # by run, in the order of their ends

    def answer(self, question: bytes) -> bytes:
        """To a line of `noting`, `looking` or CLOCK; of anything else nothing."""
        if question == CLOCK:
            return json.dumps({"clock": time.time()}).encode() + b"\n"
        try:
            said = json.loads(question.removeprefix(OPENING))
            if "note" in said:
                self._keep(_finished(said["note"]))
                return _line(None)
            found = self._find(str(said["run"]), str(said["facts"]), float(said["since_s"]))
            return _line(found)
        except (*_NOT_SUCH, AttributeError):
            return b""

    def _keep(self, finished: Finished) -> None:
        with self._lock:
            self._kept.setdefault(finished.run, (finished, time.monotonic()))
            while len(self._kept) > _MAX_NOTES:
                del self._kept[next(iter(self._kept))]

    def _find(self, run: str, facts: str, since_s: float) -> Finished | None:
        with self._lock:
            kept = [self._kept[run]] if run in self._kept else []
            if not run:
                earliest = time.monotonic() - since_s
                kept = [(note, at) for note, at in self._kept.values() if at >= earliest]
        return next((note for note, _ in reversed(kept) if note.facts == facts), None)


def noting(finished: Finished) -> bytes:
    """The line that leaves a note."""
    return OPENING + json.dumps({"note": _as_json(finished)}).encode() + b"\n"


def looking(run: str, facts: str, since_s: float) -> bytes:
    """The line that asks for one, as `Rendezvous.finished` does."""
    return OPENING + json.dumps({"run": run, "facts": facts, "since_s": since_s}).encode() + b"\n"


def found(answer: bytes) -> Finished | None:
    """What an answer says; None also where it is none, as of a lighthouse that keeps no notes."""
    try:
        said = json.loads(answer)
        return _finished(said["finished"]) if said["finished"] is not None else None
    except _NOT_SUCH:
        return None


def clock(answer: bytes) -> float | None:
    """What a lighthouse answers to CLOCK, in seconds since 1970; None of anything else."""
    try:
        return float(json.loads(answer)["clock"])
    except _NOT_SUCH:
        return None


def since_line(seconds: float) -> bytes:
    """The answer to SINCE."""
    return json.dumps({"since_s": seconds}).encode() + b"\n"


def since_s(answer: bytes) -> float:
    """What a lighthouse answers to SINCE; 0 where it is no such answer."""
    try:
        return float(json.loads(answer)["since_s"])
    except _NOT_SUCH:
        return 0.0


def _line(finished: Finished | None) -> bytes:
    said = _as_json(finished) if finished is not None else None
    return json.dumps({"finished": said}).encode() + b"\n"


def _as_json(finished: Finished) -> dict[str, Any]:
    return {
        "run": finished.run,
        "facts": finished.facts,
        "step": finished.step,
        "islands": list(finished.islands),
    }


def _finished(said: Mapping[str, Any]) -> Finished:
    islands = tuple(one_line(str(name), 64) for name in said["islands"])
    return Finished(str(said["run"]), str(said["facts"]), int(said["step"]), islands)
