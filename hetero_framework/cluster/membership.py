"""The presence of a run's workers: a table of states, events and the actions that follow.

`TABLE[state, event]` gives the next state and the actions, which `recovery.Recovery` carries out.
The table is complete: any event in any state is mended, waited for or reported, and is never an
internal error. Nothing else in the package knows which workers are present.

A worker whose process died comes back as FRESH: it loads its stages again, and all workers go back
to the last durable step (REJOIN). A worker that does not come back is given up through a single
action, GIVE_UP: the run ends, or goes on without it under another plan.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from hetero_framework.core.fields import WorkerId
from hetero_framework.units import clock

MAX_RECOVERIES = 5
"""Maximum losses of the link of one worker within one step."""


class WorkerState(Enum):
    """State of a worker in the run."""

    ABSENT = "it has not been dialled yet"
    JOINING = "its link is being opened, or is open and waits for the plan"
    LOADING = "it loads its stages; nothing is lost with it"
    READY = "its stages take part"
    SPARE = "its link is open, and the plan has no layers for it"
    LOST = "its link is gone; the worker keeps its stages for the longest outage"
    LEAVING = "it will end soon, and still answers"
    LEFT = "it does not take part; it may come back"


class Event(Enum):
    """What may happen to a worker."""

    DIAL = "the coordinator drops its link, if it has one, and dials"
    FRESH = "it said WELCOME and has no stages of this run"
    BACK = "it said WELCOME and has its stages"
    PLANNED = "the plan says which stages it loads"
    LOADED = "it said READY and has stages"
    SPARED = "it said READY and has no stages"
    LINK_LOST = "its link broke"
    LEAVING = "it said that it will end soon"
    GONE = "its process has ended, or it did not come back in time"


class Action(Enum):
    """The coordinator's answer to an event."""

    DIAL = "open its link again; FRESH, BACK or GONE follows"
    SET_UP = "send it the plan"
    REPEAT_COMMIT = "repeat the commit that it has not confirmed"
    REJOIN = "go back to the last durable step, with a process that loads the stages anew"
    HAND_OVER = "stop the run while the worker still answers, so that no step is lost"
    GIVE_UP = "report why it is gone; the caller decides what becomes of the run"
    AWAIT = "dial it while the run goes on; FRESH or BACK follows when it is there"


_S, _E, _A = WorkerState, Event, Action
_ROWS: dict[Event, dict[WorkerState, tuple[WorkerState, tuple[Action, ...]]]] = {
    # Happens at the start of a run, and after a worker was let go, for its next process.
    _E.DIAL: dict.fromkeys(_S, (_S.JOINING, ())),
    _E.FRESH: {
        _S.ABSENT: (_S.SPARE, ()),  # it was awaited, and has no layers yet
        _S.JOINING: (_S.JOINING, ()),
        _S.LOADING: (_S.LOADING, (_A.SET_UP,)),
        _S.READY: (_S.JOINING, (_A.REJOIN,)),
        _S.SPARE: (_S.SPARE, ()),
        _S.LOST: (_S.JOINING, (_A.REJOIN,)),
        _S.LEAVING: (_S.JOINING, (_A.REJOIN,)),
        _S.LEFT: (_S.SPARE, ()),
    },
    _E.BACK: {
        _S.ABSENT: (_S.SPARE, ()),
        # The coordinator was started again; the worker's stages are older than its checkpoint.
        _S.JOINING: (_S.JOINING, ()),
        _S.LOADING: (_S.LOADING, (_A.SET_UP,)),
        _S.READY: (_S.READY, (_A.REPEAT_COMMIT,)),
        _S.SPARE: (_S.SPARE, ()),
        _S.LOST: (_S.READY, (_A.REPEAT_COMMIT,)),
        _S.LEAVING: (_S.LEAVING, (_A.REPEAT_COMMIT,)),
        _S.LEFT: (_S.SPARE, ()),
    },
    _E.PLANNED: {
        _S.ABSENT: (_S.ABSENT, ()),
        _S.JOINING: (_S.LOADING, (_A.SET_UP,)),
        # Its answers about the former plan, which come over the old link, must not count.
        _S.LOADING: (_S.LOADING, (_A.DIAL,)),
        _S.READY: (_S.LOADING, (_A.SET_UP,)),  # all load again
        _S.SPARE: (_S.LOADING, (_A.SET_UP,)),
        _S.LOST: (_S.LOADING, (_A.DIAL,)),
        _S.LEAVING: (_S.LOADING, (_A.SET_UP,)),
        _S.LEFT: (_S.LEFT, ()),
    },
    # READY for an earlier plan changes nothing in the other states.
    _E.LOADED: {state: (_S.READY if state is _S.LOADING else state, ()) for state in _S},
    _E.SPARED: {state: (_S.SPARE if state is _S.LOADING else state, ()) for state in _S},
    _E.LINK_LOST: {
        _S.ABSENT: (_S.ABSENT, ()),
        _S.JOINING: (_S.JOINING, (_A.DIAL,)),
        _S.LOADING: (_S.LOADING, (_A.DIAL,)),
        _S.READY: (_S.LOST, (_A.DIAL,)),
        _S.SPARE: (_S.LEFT, (_A.AWAIT,)),  # it holds nothing, so the run does not wait
        _S.LOST: (_S.LOST, (_A.DIAL,)),  # in the handshake
        _S.LEAVING: (_S.LOST, (_A.DIAL,)),  # before it handed its state over
        _S.LEFT: (_S.LEFT, (_A.GIVE_UP,)),
    },
    # Nothing is lost with a worker without stages: its link breaks next, and that is mended.
    _E.LEAVING: {
        _S.ABSENT: (_S.ABSENT, ()),
        _S.JOINING: (_S.JOINING, ()),
        _S.LOADING: (_S.LOADING, ()),
        _S.READY: (_S.LEAVING, (_A.HAND_OVER,)),
        _S.SPARE: (_S.LEFT, (_A.AWAIT,)),
        _S.LOST: (_S.LOST, ()),
        _S.LEAVING: (_S.LEAVING, (_A.HAND_OVER,)),
        _S.LEFT: (_S.LEFT, ()),
    },
    _E.GONE: {state: (_S.LEFT, (_A.AWAIT if state is _S.SPARE else _A.GIVE_UP,)) for state in _S},
}
TABLE = {(state, event): row[state] for event, row in _ROWS.items() for state in _S}


@dataclass
class Absence:
    """When a worker went away, and the reason that it gave, if any."""

    reason: str | None = None
    since: float = field(default_factory=lambda: time.monotonic())

    def __str__(self) -> str:
        """For a table: "away 0:02:10"."""
        return f"away {clock(time.monotonic() - self.since)}"


class Membership:
    """The workers of a run, and how often their links broke since the last step was done."""

    def __init__(self, workers: Iterable[WorkerId]) -> None:
        self._states = dict.fromkeys(workers, WorkerState.ABSENT)
        self._losses: Counter[WorkerId] = Counter()
        self._absences: dict[WorkerId, Absence] = {}

    def on(self, worker: WorkerId, event: Event) -> tuple[Action, ...]:
        """Note an event; return the actions, in order. A link that broke too often counts as
        gone."""
        if event is Event.LINK_LOST:
            self._losses[worker] += 1
            if self._losses[worker] > MAX_RECOVERIES:
                event = Event.GONE
        self._states[worker], actions = TABLE[self._states[worker], event]
        return actions

    def state(self, worker: WorkerId) -> WorkerState:
        return self._states[worker]

    def those(self, *states: WorkerState) -> list[WorkerId]:
        """The workers in one of these states."""
        return [worker for worker, state in self._states.items() if state in states]

    @property
    def away(self) -> list[WorkerId]:
        """The workers that are not here."""
        return self.those(WorkerState.ABSENT, WorkerState.LEFT)

    def has_stages(self, worker: WorkerId) -> bool:
        """Whether a worker's process holds stages of the plan in force."""
        return self._states[worker] in (WorkerState.READY, WorkerState.LOST, WorkerState.LEAVING)

    def losses(self, worker: WorkerId) -> int:
        """Number of times that a worker's link broke since `settled`."""
        return self._losses[worker]

    def settled(self) -> None:
        """Note that a step, or another action that was repeated for a lost link, is done."""
        self._losses.clear()

    # Callable from any thread, since absent workers are dialled in threads of their own.

    def leaves(self, worker: WorkerId, reason: str) -> None:
        """Note that a worker has announced its end."""
        self._absences[worker] = Absence(reason)

    def absence(self, worker: WorkerId) -> Absence:
        """The absence of a worker; it begins now, unless it is known already."""
        return self._absences.setdefault(worker, Absence())

    def answers(self, worker: WorkerId, is_same_process: bool) -> None:
        """Note that a worker has been reached; the same process as before may be leaving still."""
        absence = self._absences.get(worker)
        if absence is not None and not (is_same_process and absence.reason):
            del self._absences[worker]
