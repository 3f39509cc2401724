"""The legal order of messages on one connection, as a table that both sides share.

A connection is in one phase. `ORDER[phase]` maps each message type that is legal there to the
phase that follows; who may send it is in `protocol.SPEC`. Both sides advance their own `Session`
when they send and when they receive.

Messages cross on the way, so the table allows what can still arrive from before the other side
knew: after ABORT a worker's earlier messages still come in, and activations that another worker
sent before it aborted are still relayed. They carry their `attempt`; an old one is dropped.
"""

from __future__ import annotations

import threading
from enum import Enum

from hetero_framework.core.frames import (
    COORDINATOR,
    DIALLER,
    EITHER,
    LISTENER,
    SPEC,
    WORKER,
    Message,
    MessageType,
    check_version,
)
from hetero_framework.errors import ProtocolError


class Phase(Enum):
    """Where a connection stands."""

    OPEN = "connected; HELLO comes first, between workers PEER_HELLO"
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


_M = MessageType
_ANYTIME = (_M.ERROR, _M.HEARTBEAT)
_AFTER_WELCOME = (_M.LOG, _M.CONTROL, _M.PEER_LOST)
_STATE = (_M.STATE_REQUEST, _M.STATE, _M.LOAD_STATE, _M.STATE_LOADED)
_BOUNDARY = (_M.FORWARD, _M.BACKWARD)
_DATA = (_M.INPUTS, *_BOUNDARY)
PEER_PHASES = (Phase.PEER_GREETING, Phase.FLOWING)
"""Of a link between two workers."""


def _order() -> dict[Phase, dict[MessageType, Phase]]:
    moves: dict[Phase, dict[MessageType, Phase]] = {
        Phase.OPEN: {
            _M.HELLO: Phase.GREETING,
            _M.PEER_HELLO: Phase.PEER_GREETING,
            _M.REJECT: Phase.CLOSED,
        },
        Phase.GREETING: {_M.WELCOME: Phase.WELCOMED, _M.REJECT: Phase.CLOSED},
        # A worker that kept its stages over a lost link goes on where the run stands.
        Phase.WELCOMED: {
            _M.SETUP: Phase.LOADING,
            _M.ABORT: Phase.ABORTING,
            _M.COMMIT: Phase.IDLE,
            _M.REJECT: Phase.CLOSED,
        },
        Phase.LOADING: {_M.READY: Phase.READY},
        Phase.READY: {_M.START: Phase.IDLE, _M.SETUP: Phase.LOADING},
        Phase.IDLE: {_M.STEP: Phase.STEP, _M.ABORT: Phase.ABORTING, _M.SETUP: Phase.LOADING},
        Phase.STEP: {_M.GRADIENT_NORMS: Phase.COLLECTED, _M.ABORT: Phase.ABORTING},
        # The last LOSS ends an evaluation; whatever is legal between steps may follow it.
        Phase.EVALUATION: {_M.STEP: Phase.STEP, _M.ABORT: Phase.ABORTING},
        # COMMITTED is not awaited: the next step may have begun when it comes.
        Phase.COLLECTED: {_M.COMMIT: Phase.IDLE, _M.ABORT: Phase.ABORTING},
        Phase.ABORTING: {_M.ABORTED: Phase.IDLE},
        Phase.PEER_GREETING: {_M.PEER_WELCOME: Phase.FLOWING, _M.REJECT: Phase.CLOSED},
        Phase.FLOWING: {},
        Phase.CLOSED: {},
    }
    stay: dict[Phase, tuple[MessageType, ...]] = {
        Phase.READY: (*_STATE, _M.CONNECT, _M.CONNECTED),
        # Old activations may still be relayed to a worker that has aborted already.
        Phase.IDLE: (*_STATE, *_DATA, _M.COMMITTED),
        # A state that was asked for before STEP may still be arriving.
        Phase.STEP: (*_DATA, _M.LOSS, _M.BACKWARD_DONE, _M.STATE, _M.STATE_LOADED, _M.COMMITTED),
        Phase.EVALUATION: (*_STATE, *_DATA, _M.LOSS, _M.COMMITTED),
        Phase.COLLECTED: _DATA,
        Phase.ABORTING: (
            *_DATA,
            _M.LOSS,
            _M.BACKWARD_DONE,
            _M.GRADIENT_NORMS,
            _M.STATE,
            _M.STATE_LOADED,
            _M.COMMITTED,
        ),
        Phase.FLOWING: (*_BOUNDARY, _M.CONTROL),
    }
    for phase, table in moves.items():
        table.update(dict.fromkeys(stay.get(phase, ()), phase))
        if phase is Phase.CLOSED:
            continue
        table.update(dict.fromkeys(_ANYTIME, phase))
        table[_M.BYE] = Phase.CLOSED
        if phase not in (Phase.OPEN, Phase.GREETING, *PEER_PHASES):
            table.update(dict.fromkeys(_AFTER_WELCOME, phase))
    return moves


ORDER = _order()

ROLES = {COORDINATOR: WORKER, WORKER: COORDINATOR, DIALLER: LISTENER, LISTENER: DIALLER}
"""Each role on a connection and the role of the other side."""


def legal(role: str, phase: Phase) -> list[MessageType]:
    """What `role` (one of ROLES) may send in this phase."""
    return [kind for kind in ORDER[phase] if SPEC[kind].sender in (role, EITHER)]


class Session:
    """One side's view of a connection. Safe to use from several threads.

    Call `send` before a message is handed to the link, so that its answer cannot overtake the
    phase; call `receive` for every message that arrives. Both raise ProtocolError when the
    message is out of order, in which case the phase does not change.
    """

    def __init__(self, role: str) -> None:
        if role not in ROLES:
            raise ValueError(f"role {role!r}")
        self.role = role
        self.peer = ROLES[role]
        self._phase = Phase.OPEN
        self._lock = threading.Lock()

    @property
    def phase(self) -> Phase:
        return self._phase

    def send(self, message: Message) -> None:
        """Record that this side sends `message`; ProtocolError when it may not (our own bug)."""
        self._advance(message, self.role, "we tried to send")

    def receive(self, message: Message) -> None:
        """Record that `message` came; ProtocolError when the peer may not send it now."""
        check_version(message)
        self._advance(message, self.peer, f"the {self.peer} sent")

    def _advance(self, message: Message, sender: str, who: str) -> None:
        with self._lock:
            phase = self._phase
            if message.type not in legal(sender, phase):
                names = ", ".join(kind.name for kind in legal(sender, phase)) or "nothing"
                raise ProtocolError(
                    f"{who} {message.type.name} out of order: {phase.name} "
                    f"({phase.value}) allows {names}"
                )
            following = ORDER[phase][message.type]
            if message.type is MessageType.STEP and not message.meta["train"]:
                following = Phase.EVALUATION
            self._phase = following
