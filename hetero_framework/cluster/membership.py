"""Who takes part in a run, as a table: what happens to a worker, and what is to be done then.

`TABLE[state, event]` is the following state and the actions, which `assembly.Cluster` carries out.
It has every pair: whatever happens to one worker, in whatever state it and the others are, is
mended, waited for or said, and never an error of our own.
A worker whose process died comes back as FRESH: it loads its stages again, and all go back to the
last durable step (REJOIN). One that does not come back is given up through one action, GIVE_UP,
wherever it was noticed: the run ends, or goes on without it under another plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum

WorkerId = int | str

MAX_RECOVERIES = 5
"""Maximum losses of the link of one worker within one step."""


class State(Enum):
    """What a worker is to the run."""

    ABSENT = "nobody has dialled it yet"
    JOINING = "its link is being opened, or stands and waits for the plan"
    LOADING = "it loads its stages; nothing is lost with it"
    READY = "its stages take part"
    SPARE = "its link stands, and the plan has no layers for it"
    LOST = "its link is gone; its stages wait for it as long as an outage may last"
    LEAVING = "it will end soon, and still answers"
    LEFT = "it takes no part; it may come back"


class Event(Enum):
    """What may happen to it."""

    DIAL = "its link is let go, if it has one, and the coordinator dials"
    FRESH = "it said WELCOME and has no stages of this run"
    BACK = "it said WELCOME and has its stages"
    PLANNED = "it is known what it shall load"
    LOADED = "it said READY, and knows what its stages need"
    SPARED = "it said READY, and has no stages"
    LINK_LOST = "its link broke"
    LEAVING = "it said that it will end soon"
    GONE = "its process has ended, or it did not come back in time"


class Action(Enum):
    """What is to be done about it."""

    DIAL = "open its link again; FRESH, BACK or GONE follows"
    SET_UP = "send it the plan"
    REPEAT_COMMIT = "tell it again what it has not confirmed"
    REJOIN = "go back to the last durable step, with a process that loads the stages anew"
    HAND_OVER = "stop the run while it still answers, so that nothing is lost"
    GIVE_UP = "say why it is gone; what becomes of the run is not decided here"
    AWAIT = "have it dialled while the run goes on; FRESH or BACK follows when it is there"


_S, _E, _A = State, Event, Action
_ROWS: dict[Event, dict[State, tuple[State, tuple[Action, ...]]]] = {
    # At the start of a run, for one that was let go, and for one that takes its place.
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
        # A coordinator that was started again; the worker's stages are of before its checkpoint.
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
        # What it says of the plan before must not count: that comes over the old link.
        _S.LOADING: (_S.LOADING, (_A.DIAL,)),
        _S.READY: (_S.LOADING, (_A.SET_UP,)),  # all begin anew
        _S.SPARE: (_S.LOADING, (_A.SET_UP,)),
        _S.LOST: (_S.LOADING, (_A.DIAL,)),
        _S.LEAVING: (_S.LOADING, (_A.SET_UP,)),
        _S.LEFT: (_S.LEFT, ()),
    },
    # Of an earlier plan, where it is not awaited.
    _E.LOADED: {state: (_S.READY if state is _S.LOADING else state, ()) for state in _S},
    _E.SPARED: {state: (_S.SPARE if state is _S.LOADING else state, ()) for state in _S},
    _E.LINK_LOST: {
        _S.ABSENT: (_S.ABSENT, ()),
        _S.JOINING: (_S.JOINING, (_A.DIAL,)),
        _S.LOADING: (_S.LOADING, (_A.DIAL,)),
        _S.READY: (_S.LOST, (_A.DIAL,)),
        _S.SPARE: (_S.LEFT, (_A.AWAIT,)),  # nobody waits for one that holds nothing
        _S.LOST: (_S.LOST, (_A.DIAL,)),  # in the handshake
        _S.LEAVING: (_S.LOST, (_A.DIAL,)),  # before its state was handed over
        _S.LEFT: (_S.LEFT, (_A.GIVE_UP,)),
    },
    # Nothing is lost with one that has no stages yet: its link breaks next, and that is mended.
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


class Membership:
    """The workers of a run, and how often their links broke since the last step was done."""

    def __init__(self, workers: Iterable[WorkerId]) -> None:
        self._states = dict.fromkeys(workers, State.ABSENT)
        self._losses: Counter[WorkerId] = Counter()

    def losses(self, worker: WorkerId) -> int:
        """How often its link broke since `settled`."""
        return self._losses[worker]

    def on(self, worker: WorkerId, event: Event) -> tuple[Action, ...]:
        """Note what happened; what is to be done about it, in order. A link that broke too often
        counts as gone."""
        if event is Event.LINK_LOST:
            self._losses[worker] += 1
            if self._losses[worker] > MAX_RECOVERIES:
                event = Event.GONE
        self._states[worker], actions = TABLE[self._states[worker], event]
        return actions

    def state(self, worker: WorkerId) -> State:
        """What it is to the run now."""
        return self._states[worker]

    def those(self, *states: State) -> list[WorkerId]:
        """The workers in one of these states."""
        return [worker for worker, found in self._states.items() if found in states]

    def settled(self) -> None:
        """A step, or what else was repeated for a lost link, is done."""
        self._losses.clear()
