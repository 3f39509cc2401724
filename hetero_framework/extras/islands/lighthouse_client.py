"""An island's link to its lighthouse, which is opened again whenever it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from hetero_framework.config import host_and_port
from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import connect
from hetero_framework.core.messages import Message
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.errors import (
    ConfigError,
    HeteroError,
    IdentityError,
    NetworkError,
    PeerAwayError,
    ProtocolError,
)
from hetero_framework.extras.islands import island_messages as im
from hetero_framework.extras.islands.island_messages import FinishedRun, Member, View
from hetero_framework.security.access import Access

REACH_S = 60.0
"""Time without a lighthouse after which a question for the next view fails."""
_DIAL_S = 2.0
"""Seconds for one attempt: the pauses of longer attempts would exceed `lighthouse.SETTLE_S`."""
_ANSWER_S = 5.0
"""Seconds for an answer: longer than `lighthouse.NAMESAKE_S`."""


class LighthouseClient:
    """Keeps `member` at the lighthouse of `address`. The other islands wait for it while it asks
    for a view and while `lively()`, called from a thread, is true."""

    def __init__(
        self, address: tuple[str, int], access: Access, member: Member, lively: Callable[[], bool]
    ) -> None:
        self._address, self._access, self._member = address, access, member
        self._lively = lively
        self._changed = threading.Condition()
        self._link: Connection | None = None
        self._asked: Connection | None = None  # the link on which the next view was asked for
        self._view: View | None = None  # has come, and was not taken yet
        self._asks = False
        self._lost_at = time.monotonic()
        self._trouble: NetworkError | None = None  # the reason why there is no link
        self._closed = threading.Event()
        self._keeping = in_background(self._keep, "link to the lighthouse")

    @property
    def in_reach(self) -> bool:
        """Whether an answer can be expected soon after all have asked."""
        return self._link is not None

    def next_view(self, timeout_s: float) -> View:
        """The next view, of this island and all others that ask; all living islands have to ask.
        For one thread at a time. Raises NetworkError when it cannot be asked for, PeerAwayError
        when the others did not ask in time, and ConfigError when another living island has this
        island's name."""
        deadline = time.monotonic() + timeout_s
        self._asks = True
        try:
            while (view := self._view) is None:
                self._check(deadline)
                link = self._link
                if link is not None and link is not self._asked:
                    self._asked = link
                    with suppress(HeteroError):
                        link.send(Message(im.NextView()))
                with self._changed:
                    self._changed.wait_for(lambda: self._view, timeouts.ANSWER_TICK_S)
        finally:
            self._asks, self._view = False, None
        return view

    def note_finished(self, finished: FinishedRun) -> None:
        """Note a finished run for members that come when all others are gone. Raises nothing."""
        self._ask(im.Finished(finished))

    def find_finished(self, run: str, facts: str, since_s: float) -> FinishedRun | None:
        """The finished `run`; without a name, a run that trained `facts` and finished within the
        last `since_s` seconds. None where there is no such run, or no answer comes."""
        return self._ask(im.FindFinished(run, facts, since_s))

    def close(self) -> None:
        """Leave for good. Safe to call twice, and from other threads."""
        self._closed.set()
        wait_for([self._keeping], timeouts.EXIT_S)

    # -- questions ------------------------------------------------------------------------------

    def _ask(self, question: m.Body) -> FinishedRun | None:
        with self._changed:
            link = self._changed.wait_for(lambda: self._link, _DIAL_S)
        with suppress(HeteroError):
            answer = link.ask(Message(question), _ANSWER_S, self._closed) if link else None
            if answer is not None and isinstance(answer.body, im.Finished):
                return answer.body.run
        return None

    def _check(self, deadline: float) -> None:
        """Raise the reason why there will be no view, or none in time."""
        if self._closed.is_set():
            raise NetworkError(f"island {self._member.name} has left the others")
        if self._keeping.done():
            self._keeping.result()  # always raises
        is_late = (now := time.monotonic()) >= deadline
        helps = not isinstance(self._trouble, IdentityError) and now - self._lost_at < REACH_S
        if not self.in_reach and (is_late or not helps):
            raise self._trouble or _no_lighthouse(self._address, "no link to it came up")
        if is_late:
            self._leave("it waited in vain")
            raise PeerAwayError(
                f"island {self._member.name} waited in vain: another living island did not come"
                " to synchronise",
                hint="see what the other islands say; --resume latest goes on from the last"
                " checkpoint",
            )

    # -- the link -------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Open the link where there is none, and leave while the island stalls. Raises errors that
        waiting cannot mend."""
        try:
            while not self._closed.is_set():
                if not (self._asks or self._lively()):
                    self._leave("it stalls")
                elif not self.in_reach:
                    self._join()
                self._closed.wait(timeouts.ANSWER_TICK_S)
        finally:
            self._leave("it ends")

    def _join(self) -> None:
        try:
            link, _ = _open(
                self._address, self._access, self._member, self._received, self._lost, self._closed
            )
        except NetworkError as error:
            self._trouble = error  # until the lighthouse is there again
            return
        with self._changed:
            self._link, self._trouble = link, None
            self._changed.notify_all()
        if link.closed:  # before `_lost` could know it
            self._lost(link, None)

    def _leave(self, reason: str) -> None:
        with self._changed:
            link, self._link, self._view = self._link, None, None
            self._lost_at = time.monotonic()
            self._changed.notify_all()
        if link is not None:
            with suppress(HeteroError):
                link.send(Message(m.Bye(reason)))
            link.close(timeouts.LAST_WORD_S)

    def _received(self, link: Connection, message: Message) -> None:
        with self._changed:
            if isinstance(message.body, im.Members) and link is self._asked:
                view = View.of(message.body.members)
                if self._member not in view.members or len({*view.names}) < len(view.names):
                    raise ProtocolError("a view without this island, or with a name twice")
                self._view, self._asked = view, None
                self._changed.notify_all()

    def _lost(self, link: Connection, reason: HeteroError | None) -> None:
        with self._changed:
            if link is self._link:
                self._link, self._lost_at = None, time.monotonic()
                self._changed.notify_all()


def clock_at(address: tuple[str, int], access: Access) -> float:
    """The clock of the machine of the lighthouse at `address`, in seconds since 1970. Raises
    NetworkError, IdentityError and ConfigError."""
    link, clock = _open(address, access, None)
    link.close(drain_s=0)
    return clock


def _open(
    address: tuple[str, int],
    access: Access,
    member: Member | None,
    received: Callable[[Connection, Message], None] = lambda link, message: None,
    lost: Callable[[Connection, HeteroError | None], None] = lambda link, reason: None,
    stop: threading.Event | None = None,
) -> tuple[Connection, float]:
    """A link to the lighthouse, and its clock. Raises NetworkError, IdentityError where keys are
    wrong, and ConfigError where the lighthouse does not want this island."""
    who, problem = "the lighthouse", "it said nothing"
    secure = partial(access.dialled, process="local")
    try:
        stream = connect(*address, _DIAL_S, who=who, stop=stop, secure=secure)
    except IdentityError:
        raise
    except NetworkError as error:
        hint = f"start `hetero lighthouse` there; the firewall has to let TCP port {address[1]} in"
        raise NetworkError(error.message, hint=hint) from None
    deadlines = timeouts.LIGHTHOUSE_LINK
    link = Connection(stream, who, im.ISLAND, received, lost, deadlines=deadlines)
    link.start()
    try:
        answer = link.ask(Message(im.LighthouseHello(member)), _ANSWER_S, stop)
    except HeteroError as error:
        problem, answer = error.message, None
    if answer is not None and isinstance(answer.body, im.LighthouseWelcome):
        return link, answer.body.clock
    link.close(drain_s=0)
    if answer is not None and isinstance(answer.body, m.Reject):
        text = f"the lighthouse does not want this island: {answer.body.message}"
        raise ConfigError(text, hint=answer.body.hint)
    raise _no_lighthouse(address, problem)


def _no_lighthouse(address: tuple[str, int], problem: str) -> NetworkError:
    return NetworkError(
        f"no lighthouse answers at {host_and_port(*address)}: {problem}",
        hint="start `hetero lighthouse` there, or look what else has its port",
    )
