"""The legal order of messages on one connection, as a table that both sides share.

`ORDER[phase]` maps each message type that is legal there to the phase that follows; its `spec` has
its sender. Both sides advance their own `Session` when they send and when they receive.

Messages cross on the way, so the table allows messages that the other side sent before it knew:
after ABORT a worker's earlier messages still come in, and activations that another worker sent
before it aborted are still relayed. They carry their `attempt`; an old one is dropped. After our
own BYE or REJECT, messages that were legal before it may still come in, and are not handled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from hetero_framework.core import messages as m
from hetero_framework.core.messages import Body, Message, OtherVersion
from hetero_framework.errors import ProtocolError


class Phase(Enum):
    """Where a connection stands."""

    OPEN = (
        "connected; HELLO comes first, CALL where a worker dials, PEER_HELLO between workers, an "
        "extra's own greeting on its connections"
    )
    CALLED = "the worker has dialled; HELLO follows when the coordinator wants it"
    GREETING = "HELLO is sent; the worker answers"
    WELCOMED = "the worker accepted; SETUP follows, or ABORT or COMMIT after a lost link"
    LOADING = "the worker loads its stages"
    READY = "the stages are loaded; START follows"
    IDLE = "between steps"
    STEP = "a training step is running"
    EVALUATION = "an evaluation pass is running; nothing of it is committed"
    COLLECTED = "the gradient norms are in; the coordinator decides"
    ABORTING = "the worker forgets the attempt"
    PEER_GREETING = "PEER_HELLO is sent; the other worker answers"
    FLOWING = "two workers exchange tensors"
    CLOSED = "REJECT or BYE was sent; nothing follows"


_ANYTIME = (m.Error, m.Heartbeat)
_TROUBLE = (m.PeerLost, m.StepFailed, m.Leaving)
_TURNS = (m.AskTurn, m.Turn, m.ArrivalRate)
_AFTER_WELCOME = (m.Log, m.Control, *_TROUBLE, m.Connect, m.Connected, m.Quit, *_TURNS)
_READING = (m.StateRequest, m.State, m.StateLoaded)
_STATE = (*_READING, m.LoadState, m.Rewind, m.Rewound)
_BOUNDARY = (m.Forward, m.Backward)
_DATA = (m.Inputs, *_BOUNDARY)
_STEP_RESULTS = (*_READING, *_DATA, m.Loss, m.BackwardDone, m.Gradients, m.Committed)
PEER_PHASES = (Phase.PEER_GREETING, Phase.FLOWING)
"""The phases of a link between two workers."""
Moves = dict[Enum, dict[type[Body], Enum]]
"""The legal messages of each phase, and the phases that follow."""


def _order() -> Moves:
    moves: Moves = {
        Phase.OPEN: {
            m.Hello: Phase.GREETING,
            m.Call: Phase.CALLED,
            m.PeerHello: Phase.PEER_GREETING,
            m.Reject: Phase.CLOSED,
        },
        Phase.CALLED: {m.Hello: Phase.GREETING, m.Reject: Phase.CLOSED},
        Phase.GREETING: {m.Welcome: Phase.WELCOMED, m.Reject: Phase.CLOSED},
        # A worker that kept its stages over a lost link goes on where the run stands.
        Phase.WELCOMED: {
            m.Setup: Phase.LOADING,
            m.Abort: Phase.ABORTING,
            m.Commit: Phase.IDLE,
            m.Reject: Phase.CLOSED,
        },
        Phase.LOADING: {m.Ready: Phase.READY},
        Phase.READY: {m.Start: Phase.IDLE, m.Setup: Phase.LOADING},
        Phase.IDLE: {m.Step: Phase.STEP, m.Abort: Phase.ABORTING, m.Setup: Phase.LOADING},
        Phase.STEP: {m.GradientNorms: Phase.COLLECTED, m.Abort: Phase.ABORTING},
        # STEP with `train` false leads here: the one rule that a message's type does not tell. The
        # last LOSS ends an evaluation but looks like any other LOSS, so all that is legal between
        # steps is legal here, too. Nothing of it is committed.
        Phase.EVALUATION: {m.Step: Phase.STEP, m.Abort: Phase.ABORTING},
        # COMMITTED is not awaited: the next step may have begun when it comes.
        # A STEP that `continues` adds to the gradients that are there.
        Phase.COLLECTED: {m.Commit: Phase.IDLE, m.Step: Phase.STEP, m.Abort: Phase.ABORTING},
        Phase.ABORTING: {m.Aborted: Phase.IDLE},
        Phase.PEER_GREETING: {m.PeerWelcome: Phase.FLOWING, m.Reject: Phase.CLOSED},
        Phase.FLOWING: {},
        Phase.CLOSED: {},
    }
    stay: dict[Enum, tuple[type[Body], ...]] = {
        Phase.READY: _STATE,
        # Old activations may still be relayed to a worker that has aborted already.
        Phase.IDLE: (*_STATE, *_DATA, m.Committed),
        # A snapshot is read while the next step runs.
        Phase.STEP: (*_STEP_RESULTS, m.LoadState),
        Phase.EVALUATION: (*_STATE, *_DATA, m.Loss, m.Committed),
        Phase.COLLECTED: (*_READING, *_DATA, m.Committed),
        Phase.ABORTING: (*_STEP_RESULTS, m.GradientNorms),
        Phase.FLOWING: (*_BOUNDARY, m.Control, *_TURNS),
    }
    for phase, table in moves.items():
        table.update(dict.fromkeys(stay.get(phase, ()), phase))
        if phase is Phase.CLOSED:
            continue
        _in_every_phase(phase, table)
        if phase not in (Phase.OPEN, Phase.CALLED, Phase.GREETING, *PEER_PHASES):
            table.update(dict.fromkeys(_AFTER_WELCOME, phase))
    return moves


def _in_every_phase(phase: Enum, table: dict[type[Body], Enum]) -> None:
    table.update(dict.fromkeys(_ANYTIME, phase))
    table[m.Bye] = Phase.CLOSED


ORDER = _order()

ROLES = {
    **{m.COORDINATOR: m.WORKER, m.WORKER: m.COORDINATOR},
    **{m.DIALLER: m.LISTENER, m.LISTENER: m.DIALLER},
}
"""Each role on a connection and the role of the other side."""

ANSWERS: set[type[Body]] = {m.Welcome, m.PeerWelcome, m.Reject, m.Error, m.Bye}
"""The messages that end the wait of a side that has greeted or asked."""


@dataclass(frozen=True)
class Dialogue:
    """The connections that an extra opens, and the roles of the two sides."""

    where: str
    one: str
    other: str


CONVERSATIONS: dict[Dialogue, list[Enum]] = {}
"""The dialogues of the extras that are loaded, with their phases."""


def converse(of: Dialogue, moves: Moves, answers: Iterable[type[Body]]) -> None:
    """Add the messages of an extra's connections to ORDER. In `moves` the messages of Phase.OPEN
    are its greeting; every new phase allows ERROR, HEARTBEAT and BYE, too."""
    for phase, table in moves.items():
        _in_every_phase(phase, ORDER.setdefault(phase, {}))
        ORDER[phase].update(table)
    ROLES.update({of.one: of.other, of.other: of.one})
    ANSWERS.update(answers)
    CONVERSATIONS[of] = [phase for phase in moves if phase is not Phase.OPEN]


def legal(role: str, phase: Enum) -> list[type[Body]]:
    """The messages that `role` (one of ROLES) may send in this phase."""
    return [kind for kind in ORDER[phase] if kind.spec.sender in (role, m.EITHER)]


class Session:
    """One side's view of a connection. Safe to use from several threads. `send` and `receive` raise
    ProtocolError for a message out of order, and the phase stays."""

    def __init__(self, role: str) -> None:
        if role not in ROLES:
            raise ValueError(f"role {role!r}")
        self.role, self.peer = role, ROLES[role]
        self.phase: Enum = Phase.OPEN
        self._crossing: Enum | None = None
        """The peer's phase until it has read our BYE or REJECT."""
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Record that `message` goes. Call it before the link sends: the answer must come after."""
        self._advance(message, self.role, "we tried to send")

    def check(self, body: Body) -> None:
        """Raise what `receive` would, for a message of which only the header has come."""
        with self._lock:
            self._following(body, self.peer, f"the {self.peer} sends")

    def receive(self, message: Message) -> bool:
        """Record that `message` came, and return whether to handle it: not if it was sent before
        the peer had read our BYE or REJECT."""
        if isinstance(message.body, OtherVersion):
            raise message.body.error()
        return self._advance(message, self.peer, f"the {self.peer} sent")

    def _advance(self, message: Message, sender: str, who: str) -> bool:
        body = message.body
        with self._lock:
            following = self._following(body, sender, who)
            if sender == self.peer and self._crossing is not None:
                self._crossing = following
                return False
            if sender == self.role and following is Phase.CLOSED:
                self._crossing = self.phase
            self.phase = following
            return True

    def _following(self, body: Body, sender: str, who: str) -> Enum:
        """The phase after `body`. `_lock` is held."""
        phase = self.phase
        if sender == self.peer and self._crossing is not None:
            phase = self._crossing
        following = ORDER[phase].get(type(body))
        if isinstance(body, m.Step) and phase is Phase.COLLECTED and not body.continues:
            following = None  # it would drop gradients before they are committed
        if following is None or body.spec.sender not in (sender, m.EITHER):
            names = ", ".join(kind.spec.name for kind in legal(sender, phase)) or "nothing"
            where = f"{phase.name} ({phase.value}) allows {names}"
            raise ProtocolError(f"{who} {body.spec.name} out of order: {where}")
        return Phase.EVALUATION if isinstance(body, m.Step) and not body.train else following
