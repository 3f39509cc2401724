"""A lighthouse and its clients, by torchft's quorums and by those of a stand-in."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.identity import ISLANDS
from hetero_framework.core.messages import Message
from hetero_framework.core.threads import in_background
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.errors import (
    ConfigError,
    IdentityError,
    NetworkError,
    PeerAwayError,
    ProtocolError,
)
from hetero_framework.extras.islands import island_messages as im
from hetero_framework.extras.islands import lighthouse as module
from hetero_framework.extras.islands import lighthouse_client
from hetero_framework.extras.islands.island_messages import FinishedRun, Member, View
from hetero_framework.extras.islands.lighthouse import FinishedRuns, Lighthouse
from hetero_framework.extras.islands.lighthouse_client import LighthouseClient, clock_at
from hetero_framework.extras.islands.quorums import Quorums
from hetero_framework.security import authority as x509
from hetero_framework.security.access import LOOPBACK_ONLY, Access, Keyed
from tests.certificates import keys_of
from tests.extras.islands.helpers import StandIn, serving
from tests.extras.islands.optional import need_torchft
from tests.waiting import WAIT_S, wait_until

LINK = timeouts.LIGHTHOUSE_LINK
DONE = FinishedRun("run 1", "facts", 9, ("a", "b"))


class Islands:
    def __init__(self, stack: ExitStack, quorums: Quorums, access: Access = LOOPBACK_ONLY) -> None:
        self._stack = stack
        self.lighthouse = stack.enter_context(serving(quorums, access))
        self.port = self.lighthouse.port

    def start(
        self,
        name: str,
        process: str = "1",
        lively: Callable[[], bool] = lambda: True,
        access: Access = LOOPBACK_ONLY,
    ) -> LighthouseClient:
        member = Member(name, process, f"{name}.invalid:1")
        client = LighthouseClient(("127.0.0.1", self.port), access, member, lively)
        self._stack.callback(client.close)
        return client

    def dial(self) -> Connection:
        """A link on which nothing was said yet."""
        stream, calls = connect("127.0.0.1", self.port, WAIT_S), (lambda *_: None,) * 2
        link = Connection(stream, "it", im.ISLAND, *calls, deadlines=timeouts.LIGHTHOUSE_LINK)
        self._stack.callback(link.close, 0)
        link.start()
        return link

    def here(self) -> set[str]:
        return {island.id for island in list(self.lighthouse._islands.values())}


@pytest.fixture
def opened(monkeypatch, quick_ticks):
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    monkeypatch.setattr(timeouts, "LIGHTHOUSE_LINK", LinkDeadlines(liveness_s=WAIT_S))
    before = set(threading.enumerate())
    with ExitStack() as stack:
        yield Islands(stack, StandIn())
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in left)


@pytest.fixture(params=["torchft", "stand-in"])
def islands(request, monkeypatch):
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    monkeypatch.setattr(timeouts, "LIGHTHOUSE_LINK", LinkDeadlines(liveness_s=WAIT_S))
    with ExitStack() as stack:
        if request.param == "torchft":
            need_torchft()
            yield Islands(stack, stack.enter_context(closing(Quorums())))
        else:
            yield Islands(stack, StandIn())


def asks(island: LighthouseClient, timeout_s: float = WAIT_S) -> Future[View]:
    return in_background(lambda: island.next_view(timeout_s), "island")


def waits(asked: Future[View]) -> None:
    with pytest.raises(TimeoutError):
        asked.result(0.4)


def meet(*islands: LighthouseClient) -> View:
    """The view of these, when each has asked until it has it: one that asks before the others are
    known is given one without them."""
    wanted = View.of([island._member for island in islands])

    def ask(island: LighthouseClient) -> None:
        while island.next_view(WAIT_S) != wanted:
            pass

    for found in [in_background(partial(ask, island), "island") for island in islands]:
        found.result(WAIT_S)
    return wanted


# -- views


def test_one_view_is_given_when_all_living_islands_have_asked(islands):
    a, b, c = islands.start("a", "77"), islands.start("b"), islands.start("c")
    assert meet(b, a, c).members == (
        Member("a", "77", "a.invalid:1"),
        Member("b", "1", "b.invalid:1"),
        Member("c", "1", "c.invalid:1"),
    )
    early = [asks(a), asks(c)]
    for asked in early:
        waits(asked)
    assert b.next_view(WAIT_S).names == ("a", "b", "c")
    assert [asked.result(WAIT_S).names for asked in early] == [("a", "b", "c")] * 2


def test_an_island_that_stalls_is_not_waited_for_and_comes_back(islands):
    stalls = threading.Event()
    a, b = islands.start("a"), islands.start("b", lively=lambda: not stalls.is_set())
    meet(a, b)
    stalls.set()
    assert a.next_view(WAIT_S).names == ("a",)
    # One that asks is living, whatever else is said of it.
    asked = asks(b)
    wait_until(lambda: len(islands.here()) == 2)
    waits(asked)
    assert a.next_view(WAIT_S).names == asked.result(WAIT_S).names == ("a", "b")
    stalls.clear()
    assert meet(a, b).names == ("a", "b")


def test_absent_islands_are_reported_in_time(islands):
    a, b = islands.start("a"), islands.start("b")
    meet(a, b)
    started = time.monotonic()
    with pytest.raises(PeerAwayError, match="another living island did not come") as found:
        a.next_view(0.3)
    assert time.monotonic() - started < WAIT_S
    assert found.value.exit_code == 75
    asked = asks(a)  # it can ask again
    waits(asked)
    assert b.next_view(WAIT_S).names == asked.result(WAIT_S).names == ("a", "b")


def test_an_island_that_dies_while_it_asks_is_in_no_view(islands):
    """torchft still has its question. Started again, it takes the place."""
    before, b = islands.start("a", "1"), islands.start("b")
    first = meet(before, b)
    pending = asks(before)
    waits(pending)
    before.close()
    with pytest.raises(NetworkError, match="island a has left"):
        pending.result(WAIT_S)
    # Until the lighthouse has read of the end, the island counts as one that asks.
    wait_until(lambda: len(islands.here()) == 1)
    assert b.next_view(WAIT_S).names == ("b",)
    assert meet(islands.start("a", "2"), b).key != first.key


def test_a_question_outlives_the_link_it_was_asked_on(islands):
    a, b = islands.start("a"), islands.start("b")
    meet(a, b)
    asked = asks(a)
    waits(asked)
    broken = a._link
    broken.stream.stop()
    wait_until(lambda: a._link not in (None, broken) and a._asked is a._link)
    waits(asked)
    assert b.next_view(WAIT_S).names == asked.result(WAIT_S).names == ("a", "b")


def test_islands_meet_again_at_a_restarted_lighthouse(islands, monkeypatch):
    """All that live are in its first view: it waits until they had time to come back."""
    a, b = islands.start("a"), islands.start("b")
    first = meet(a, b)
    asked = asks(a)
    waits(asked)
    islands.lighthouse.close()
    wait_until(lambda: not (a.in_reach or b.in_reach))
    monkeypatch.setattr(module, "SETTLE_S", 5.0)
    with serving(islands.lighthouse._quorums, port=islands.port):
        assert b.next_view(WAIT_S).key == asked.result(WAIT_S).key == first.key
        a.close()
        b.close()


def test_a_question_waits_until_islands_had_time_to_come(opened, monkeypatch):
    monkeypatch.setattr(module, "SETTLE_S", 1.0)
    a, began = opened.start("a"), time.monotonic()
    assert a.next_view(WAIT_S).names == ("a",)
    assert time.monotonic() - began >= 1.0
    monkeypatch.setattr(module, "SETTLE_S", 2 * WAIT_S)
    monkeypatch.setattr(opened.lighthouse, "_since", time.monotonic() - 2 * WAIT_S)
    meet(a, opened.start("b"))  # at once: somebody was there for long


def test_a_quorum_of_questions_that_are_over_is_no_view(opened):
    class Late(StandIn):
        """Answers what was asked before."""

        def ask(self, id: str, number: int, timeout_s: float) -> dict[str, int] | None:
            quorum = super().ask(id, number, timeout_s)
            stale.append(number)
            return {"gone:1": 1, **quorum} if quorum and len(stale) < 4 else quorum

    stale: list[int] = []
    late = Late()
    late.lighthouse = opened.lighthouse
    opened.lighthouse._quorums = late
    assert opened.start("a").next_view(WAIT_S).names == ("a",)
    assert stale == sorted(set(stale))
    assert len(stale) == 4


def test_a_quorum_without_an_island_that_is_here_is_no_view(opened):
    """torchft answers at once when all members of its last quorum have asked. That quorum may have
    been one island alone."""

    class Hasty(StandIn):
        def ask(self, id: str, number: int, timeout_s: float) -> dict[str, int] | None:
            if id == "a:1" and not asked.is_set():
                hasty.append(number)
                return {id: number}
            return super().ask(id, number, timeout_s)

    hasty: list[int] = []
    asked = threading.Event()
    a, b = opened.start("a"), opened.start("b")
    wait_until(lambda: opened.here() == {"a:1", "b:1"})
    quorums = Hasty()
    quorums.lighthouse = opened.lighthouse
    opened.lighthouse._quorums = quorums
    view = asks(a)
    wait_until(lambda: len(hasty) > 2)
    asked.set()
    assert b.next_view(WAIT_S).names == view.result(WAIT_S).names == ("a", "b")


# -- admission


def test_a_second_island_of_one_name_is_refused(islands, monkeypatch):
    monkeypatch.setattr(module, "NAMESAKE_S", 0.3)
    a, b = islands.start("a", "1"), islands.start("b")
    meet(a, b)
    with pytest.raises(ConfigError, match=r"another living island is called a, at a\.invalid:1"):
        islands.start("a", "2").next_view(WAIT_S)
    assert meet(a, b).names == ("a", "b")


def test_an_island_that_was_started_again_waits_for_its_dead_link(opened, monkeypatch):
    assert LINK.liveness_s < module.NAMESAKE_S
    monkeypatch.setattr(module, "NAMESAKE_S", WAIT_S)
    monkeypatch.setattr(timeouts, "LIGHTHOUSE_LINK", replace(LINK, heartbeat_s=WAIT_S))
    dead = opened.dial()  # the end of which is not noticed by a broken link
    monkeypatch.setattr(timeouts, "LIGHTHOUSE_LINK", LINK)
    assert dead.ask(Message(im.LighthouseHello(Member("a", "1", "x:1"))), WAIT_S) is not None
    assert opened.start("a", "2").next_view(WAIT_S).members[0].process == "2"


@pytest.mark.parametrize(
    ("name", "address", "problem"),
    [
        ("lighthouse", "x:1", "names the lighthouse"),
        ("a b", "x:1", "a name has 1 to 64 letters"),
        ("a", "nowhere", "no port"),
    ],
)
def test_an_invalid_member_is_refused(opened, name, address, problem):
    answer = opened.dial().ask(Message(im.LighthouseHello(Member(name, "1", address))), WAIT_S)
    assert problem in answer.expect(m.Reject).message
    assert not opened.here()


def test_the_number_of_islands_is_limited(opened, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ISLANDS", 2)
    monkeypatch.setattr(module, "NAMESAKE_S", 0.1)
    meet(opened.start("a"), opened.start("b"))
    with pytest.raises(ConfigError, match="does not want this island: there are 2 islands here"):
        opened.start("c").next_view(WAIT_S)


def test_a_message_out_of_order_ends_that_link_alone(opened):
    a = opened.start("a")
    stranger, island = opened.dial(), opened.dial()
    stranger.link.send(Message(im.NextView()))  # past `Connection.send`, which would refuse it
    assert island.ask(Message(im.LighthouseHello(Member("b", "1", "x:1"))), WAIT_S)
    island.send(Message(im.NextView()))
    island.link.send(Message(im.NextView()))
    wait_until(lambda: stranger.closed and island.closed)
    assert meet(a).names == ("a",)


def test_browsers_and_other_programs_get_nothing(opened):
    browser = http.client.HTTPConnection("127.0.0.1", opened.port, timeout=WAIT_S)
    with closing(browser):
        browser.request("GET", "/")
        with pytest.raises((http.client.HTTPException, OSError)):
            browser.getresponse()
    with closing(socket.create_connection(("127.0.0.1", opened.port), WAIT_S)) as plain:
        plain.sendall(bytes(range(256)))
        assert plain.recv(1) == b""


def keyed(folder: Path, process: str, of: str = "own") -> Keyed:
    return Keyed(keys_of(folder / f"{of}-{process}", process, of=of, kind=ISLANDS), process, None)


@pytest.fixture
def keyed_islands(tmp_path, monkeypatch, quick_ticks):
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    with ExitStack() as stack:
        yield Islands(stack, StandIn(), keyed(tmp_path, "local"))


def test_islands_come_in_by_their_keys(keyed_islands, tmp_path):
    a, b = (keyed_islands.start(name, access=keyed(tmp_path, name)) for name in "ab")
    assert meet(a, b).names == ("a", "b")
    with pytest.raises(ConfigError, match="the certificate is that of island c"):
        keyed_islands.start("d", access=keyed(tmp_path, "c")).next_view(WAIT_S)


def test_islands_with_wrong_keys_are_told_at_once(keyed_islands, tmp_path):
    revoked = keyed(tmp_path, "attic")
    access = keyed_islands.lighthouse._acceptor._access
    assert isinstance(access, Keyed)
    access.keys.revoke([x509.serial_of(revoked.keys.read("island-attic.pem"))])
    for island, problem in (
        (keyed(tmp_path, "garage", of="other"), "the lighthouse has keys of another cluster"),
        (revoked, "was revoked"),
    ):
        with pytest.raises(IdentityError, match=problem):
            keyed_islands.start(str(island.process), access=island).next_view(WAIT_S)
    with pytest.raises(NetworkError):
        keyed_islands.start("plain").next_view(0.5)
    assert not keyed_islands.here()


def test_an_island_in_the_place_of_the_lighthouse_is_not_taken_for_it(tmp_path, quick_ticks):
    with ExitStack() as stack:
        islands = Islands(stack, StandIn(), keyed(tmp_path, "attic"))
        with pytest.raises(IdentityError, match="that of island attic, expected the lighthouse"):
            islands.start("garage", access=keyed(tmp_path, "garage")).next_view(WAIT_S)


def test_joining_and_leaving_islands_are_logged(opened, logged):
    opened.start("garage").next_view(WAIT_S)
    for client in list(opened.lighthouse._islands):
        client.stream.stop()
    wait_until(lambda: "island garage has left" in logged)
    assert logged[0].startswith("island garage is here, from 127.0.0.1")


# -- a lighthouse that is not there


def nowhere(lively: Callable[[], bool] = lambda: True) -> LighthouseClient:
    with closing(Listener("127.0.0.1", 0)) as listener:
        address = ("127.0.0.1", listener.port)
    return LighthouseClient(address, LOOPBACK_ONLY, Member("a", "1", "a.invalid:1"), lively)


def test_an_unreachable_lighthouse_is_reported(monkeypatch):
    monkeypatch.setattr(lighthouse_client, "REACH_S", 3.0)
    with closing(nowhere()) as island:
        with pytest.raises(NetworkError, match="cannot reach the lighthouse at ") as found:
            island.next_view(WAIT_S)
        assert "hetero lighthouse" in str(found.value.hint)
        assert island.find_finished("run 1", "facts", 0.0) is None
        assert not island.in_reach


def test_a_bug_in_the_liveness_check_is_raised():
    def broken() -> bool:
        raise ZeroDivisionError

    with closing(nowhere(lively=broken)) as island, pytest.raises(ZeroDivisionError):
        island.next_view(WAIT_S)


# -- clocks and finished runs


def test_the_clock_can_be_asked_for_without_joining(opened):
    before = time.time()
    assert before <= clock_at(("127.0.0.1", opened.port), LOOPBACK_ONLY) <= time.time()
    assert not opened.here()


def test_a_finished_run_is_found_by_other_islands(opened, monkeypatch):
    monkeypatch.setattr(lighthouse_client, "_DIAL_S", WAIT_S)
    a, b = opened.start("a"), opened.start("b")
    assert b.find_finished("run 1", "facts", 0.0) is None
    a.note_finished(DONE)
    assert b.find_finished("run 1", "facts", 0.0) == DONE


def test_finished_runs_are_found_by_name_or_by_recent_time(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "_MAX_FINISHED", 2)
    runs = FinishedRuns()
    runs.keep(DONE)
    runs.keep(FinishedRun("run 1", "facts", 9, ("b",)))  # the first one counts
    now = 110.0
    assert runs.find("run 1", "facts", 0.0) == runs.find("", "facts", 11.0) == DONE
    for run, facts, since_s in (
        ("run 2", "facts", 99.0),
        ("run 1", "more steps", 0.0),
        ("", "other", 11.0),
        ("", "facts", 9.0),
    ):
        assert runs.find(run, facts, since_s) is None
    for run in ("run 2", "run 3"):
        runs.keep(FinishedRun(run, "facts", 9, ()))
    assert runs.find("run 1", "facts", 0.0) is None
    assert runs.find("run 3", "facts", 0.0) is not None


def test_a_closed_lighthouse_accepts_no_connection(opened):
    meet(opened.start("a"))
    opened.lighthouse.close()
    opened.lighthouse.close()
    opened.lighthouse.wait(0.0)
    with pytest.raises(NetworkError):
        connect("127.0.0.1", opened.port, 0.3)


def test_error_of_a_question_ends_the_lighthouse(opened):
    class Broken(StandIn):
        def ask(self, id: str, number: int, timeout_s: float) -> dict[str, int] | None:
            raise ZeroDivisionError

    opened.lighthouse._quorums = Broken()
    asked = asks(opened.start("a"))
    lighthouse: Lighthouse = opened.lighthouse
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: lighthouse.wait(0.01) is not None)
    assert not asked.done()


@pytest.mark.parametrize("names", ["", "b", "bb", "aab"])
def test_a_view_in_which_this_island_cannot_be_is_refused(names):
    with closing(nowhere()) as island:
        island._asked = link = cast(Connection, object())
        members = tuple(Member(name, "1", f"{name}.invalid:1") for name in names)
        with pytest.raises(ProtocolError, match="a view without this island"):
            island._received(link, Message(im.Members(members)))
