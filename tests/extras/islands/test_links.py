"""Links of islands over real sockets of the loopback: accepted and refused connections, and the
messages of a session."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import pytest
import torch

from hetero_framework.core import messages as m
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import connect
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import Message
from hetero_framework.core.tensors import to_wire
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.errors import HeteroError, ProtocolError
from hetero_framework.extras.islands import island_messages as im
from hetero_framework.extras.islands import links as module
from hetero_framework.extras.islands.island_messages import Member, View
from hetero_framework.extras.islands.links import LEAVES, IslandLinks, IslandSession, MemberLost
from tests.extras.islands.helpers import links_of
from tests.waiting import WAIT_S


def nothing() -> None: ...


class Coast:
    """Islands of this process, by name."""

    def __init__(self) -> None:
        self._links: dict[str, IslandLinks] = {}

    def open(self, name: str, process: str = "1") -> IslandLinks:
        links = self._links[f"{name} {process}"] = links_of(name, process)
        return links

    def close(self) -> None:
        for links in self._links.values():
            links.close("the test is over")


@pytest.fixture
def coast(quick_ticks):
    before = set(threading.enumerate())
    with closing(Coast()) as made:
        yield made
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in left)


def view_of(*links: IslandLinks) -> View:
    return View.of([one.member for one in links])


def meeting(links: IslandLinks, view: View, timeout_s: float = WAIT_S) -> Future[IslandSession]:
    return in_background(lambda: links.meet(view, timeout_s, nothing), "meeting")


def together(*links: IslandLinks) -> list[IslandSession]:
    view = view_of(*links)
    return [found.result(WAIT_S) for found in [meeting(one, view) for one in links]]


def receive(session: IslandSession, name: str, kind: Any = "vote", number: int = 2) -> Any:
    return session.receive(number, kind, name, nothing)


def lost(session: IslandSession) -> MemberLost:
    """Once the session is over."""
    with pytest.raises(MemberLost) as found:
        session.receive(99, "vote", session.others[0], nothing)
    return found.value


def test_every_member_receives_every_message(coast):
    sessions = together(*map(coast.open, "bca"))
    assert {session.leader for session in sessions} == {"a"}
    for session in sessions:
        session.send(2, "gradients", {session.me: torch.arange(3)}, {"from": session.me})
    for session in sessions:
        for name in session.others:
            said = receive(session, name, "gradients")
            assert torch.equal(said.tensors[name], torch.arange(3))
            assert said.info == {"from": name}


def test_a_message_to_some_members_reaches_them_alone(coast):
    a, b, c = together(*map(coast.open, "abc"))
    a.send(2, "vote", info={"n": 1}, to=["c"])
    assert receive(c, "a").info == {"n": 1}
    a.send(3, "vote")
    receive(b, "a", number=3)  # what came before it over the same link is here, too
    assert not b.received(2, "vote", "a").is_whole


def test_parts_of_one_exchange_add_up_and_early_ones_wait(coast):
    a, b = together(*map(coast.open, "ab"))
    a.send(3, "losses", {"x": torch.ones(1)})
    a.send(2, "gradients", {"x": torch.ones(2)}, last=False)
    a.send(2, "gradients", {"y": torch.ones(3)}, {"n": 1})
    said = receive(b, "a", "gradients")
    assert {name: t.numel() for name, t in said.tensors.items()} == {"x": 2, "y": 3}
    b.forget(2)
    assert receive(b, "a", "losses", 3).tensors["x"].numel() == 1


def test_a_message_too_far_ahead_ends_the_session(coast):
    """Else a member could fill the memory of the others with exchanges to come."""
    a, b = together(*map(coast.open, "ab"))
    a.send(4, "losses", {"x": torch.ones(1)})
    with pytest.raises(MemberLost, match="island a"):
        receive(b, "a", "losses", 4)
    assert not b._received[4, "losses", "a"].tensors


def test_late_messages_are_dropped(coast):
    a, b = together(*map(coast.open, "ab"))
    b.forget(2)
    a.send(2, "gradients", {"x": torch.ones(1)})
    a.send(3, "vote")
    receive(b, "a", number=3)
    assert not b.received(2, "gradients", "a").is_whole
    assert not any(number <= 2 for number, _, _ in b._received)


def test_large_tensors_come_in_parts_and_whole(coast):
    a, b = together(*map(coast.open, "ab"))
    large = {f"t{k}": torch.full((1 << 22,), float(k)) for k in range(5)}  # 16 MiB each
    a.send(2, "state", large, {"position": 3})
    said = receive(b, "a", "state")
    assert said.info == {"position": 3}
    assert all(torch.equal(said.tensors[name], tensor) for name, tensor in large.items())


def test_a_member_that_leaves_is_lost_to_all_at_once(coast):
    links = list(map(coast.open, "abc"))
    a, b, c = together(*links)
    waiting = [in_background(lambda one=one: lost(one), "waiting") for one in (a, c)]
    links[1].part("it goes")
    assert [found.result(WAIT_S).name for found in waiting] == ["b", "b"]
    for session in (a, b, c):
        for tried in (
            lambda session=session: session.send(3, "vote"),
            lambda session=session: session.received(3, "vote", session.others[0]),
            session.check,
        ):
            with pytest.raises(MemberLost):
                tried()


def test_an_island_that_leaves_in_order_is_reported_as_left_not_lost(coast):
    links = list(map(coast.open, "abc"))
    a, _, c = together(*links)
    links[1].part(f"{LEAVES} (it was stopped by SIGTERM)")
    found = lost(a)
    assert str(found) == "island b leaves in order (it was stopped by SIGTERM)"
    assert found.told["event"]["what"] == "island left"
    a, c = together(links[0], links[2])
    for connection in c._links.values():
        connection.close(drain_s=0)  # as a process that is killed
    gone = lost(a)
    assert str(gone).startswith("island c: ")
    assert gone.told["event"]["what"] == "island lost"


def test_messages_sent_before_a_member_left_count(coast):
    """The leader decides on the last step, and its run is over."""
    links = coast.open("a"), coast.open("b")
    a, b = together(*links)
    a.send(2, "decision", info={"commit": True})
    links[0].part("its training is done")
    lost(b)
    assert receive(b, "a", "decision").info == {"commit": True}
    with pytest.raises(MemberLost):
        receive(b, "a", "decision", 3)


def test_a_decision_reaches_every_remaining_member(coast):
    a, b, c = together(*map(coast.open, "abc"))
    b.close("it is gone")
    lost(a)
    for name in ("b", "c"):
        a.try_send(name, 2, {"commit": True})
    while True:  # until it is here; that b has left is known before
        with suppress(MemberLost):
            assert receive(c, "a", "decision").info == {"commit": True}
            break
        c.wait_for_more(0.01)


def test_a_refused_island_learns_why_and_the_others_lose_it(coast):
    a, b, c = together(*map(coast.open, "abc"))

    def judge() -> None:
        with a.judging("b"):
            raise ProtocolError("island b says 3", hint="use one version")

    with pytest.raises(MemberLost, match="island b: island b says 3"):
        judge()
    with pytest.raises(ProtocolError) as error:
        receive(b, "a")
    assert error.value.message == ("island a does not take what this island says: island b says 3")
    assert error.value.hint == "use one version"
    b.close("it ends")
    assert lost(c).name == "b"


def test_a_refusal_after_the_session_arrives_at_the_next_meeting(coast):
    links = [coast.open(name) for name in "abc"]
    a, b, _ = together(*links)
    links[2].part("it goes")
    assert lost(b).name == "c"
    a.refuse("b", ProtocolError("island b says 3"))
    while b.wrong is None:  # until it has been told
        b.wait_for_more(0.01)
    with pytest.raises(ProtocolError, match=r"island a does not take .*: island b says 3"):
        links[1].meet(view_of(*links), WAIT_S, nothing)


def test_an_undelivered_refusal_arrives_at_the_next_meeting(coast):
    """Its link was gone before. One that was started since then is another one."""
    links = [coast.open(name) for name in "ab"]
    a, _ = together(*links)
    links[1].part("it has lost another one")
    lost(a)
    a.refuse("b", ProtocolError("island b says 3"))
    told = meeting(links[0], view_of(*links))

    def meet_and_hear() -> None:
        receive(links[1].meet(view_of(*links), WAIT_S, nothing), "a")

    with pytest.raises(ProtocolError, match=r"island a does not take .*: island b says 3"):
        meet_and_hear()
    with pytest.raises(MemberLost, match="island b: island b says 3"):
        told.result(WAIT_S)
    links[1].close("it ends")
    together(links[0], coast.open("b", "2"))


def test_parting_waits_until_all_members_are_done(coast):
    a, b, c = together(*map(coast.open, "abc"))
    parting = [in_background(partial(one.part_together, 2, nothing), "end") for one in (a, b)]
    assert not wait_for(parting, 0.2)
    c.part_together(2, nothing)
    c.close("it is done")  # and is not missed
    for found in parting:
        found.result(WAIT_S)


def test_a_member_lost_before_its_end_is_missed_at_parting(coast):
    a, b, c = together(*map(coast.open, "abc"))
    b.send(2, "vote")
    parting = in_background(lambda: a.part_together(2, nothing), "end")
    assert not wait_for([parting], 0.2)
    b.close("it is done")
    assert not wait_for([parting], 0.2)
    c.close("")
    with pytest.raises(MemberLost):
        parting.result(WAIT_S)


def test_a_broken_connection_is_a_lost_member(coast):
    a, b = together(*map(coast.open, "ab"))
    b._links["a"].stream.stop()
    assert (lost(a).name, lost(b).name) == ("b", "a")


def test_check_ends_the_waiting(coast):
    class Enough(Exception): ...

    def enough() -> None:
        raise Enough

    a, _ = together(*map(coast.open, "ab"))
    with pytest.raises(Enough):
        a.receive(2, "vote", "b", enough)
    with pytest.raises(Enough):
        coast.open("c").meet(View.of([Member("c", "1", "x"), *a.view.members]), WAIT_S, enough)


def test_the_same_members_meet_again_over_new_links(coast):
    links = list(map(coast.open, "abc"))
    old = together(*links)
    old[0].send(2, "vote", info={"of": "the old session"})
    new = together(*links)
    assert all(session.is_over for session in old)
    new[1].send(2, "vote")
    receive(new[2], "b")
    assert not new[2].received(2, "vote", "a").is_whole


def test_an_island_that_meets_before_the_view_is_known_waits(coast):
    a, b = coast.open("a"), coast.open("b")
    view = view_of(a, b)
    early = meeting(b, view)
    assert not wait_for([early], 0.3)
    session = a.meet(view, WAIT_S, nothing)
    early.result(WAIT_S).send(2, "vote")
    receive(session, "b")


def test_no_message_is_sent_before_the_welcome(coast):
    """A member says its position as soon as it has all links; thirty times, as this is a race."""
    a, b = coast.open("a"), coast.open("b")
    for _ in range(30):
        sessions = together(a, b)
        for session in sessions:
            session.send(0, "position", info={"step": 1})
        for session in sessions:
            receive(session, session.others[0], "position", 0)


def test_another_view_ends_the_meeting(coast):
    a, b, c = map(coast.open, "abc")
    waiting = meeting(a, view_of(a, b, c))
    other = meeting(b, view_of(a, b))
    with pytest.raises(MemberLost, match="it knows of other members"):
        waiting.result(WAIT_S)
    session = a.meet(view_of(a, b), WAIT_S, nothing)
    assert session.members == other.result(WAIT_S).members == ("a", "b")


def test_another_process_of_an_island_is_refused(coast):
    a, b = coast.open("a"), coast.open("b")
    view = View.of([a.member, Member("b", "another", b.member.address)])
    waiting = meeting(a, view, 2.0)
    hello = im.IslandHello("b", "1", "a", view.key, 1 << 20)
    with Stranger(a) as (connection, heard):
        answer = connection.ask(Message(hello), WAIT_S)
        assert (answer.body.code, answer.body.message) == (
            "stale",
            "the group has another process of this island",
        )
        assert not heard
    with pytest.raises(MemberLost, match="no link to it came up in 2 s"):
        waiting.result(WAIT_S)


def test_a_connection_meant_for_another_island_is_refused(coast):
    a, b = coast.open("a"), coast.open("b")
    wrong = Member("0", "1", a.member.address)
    with pytest.raises(MemberLost, match="this is island a, not 0"):
        b.meet(View.of([wrong, b.member]), WAIT_S, nothing)


def test_an_unreachable_member_counts_as_lost(coast):
    gone = coast.open("a")
    gone.close("")
    b = coast.open("b")
    with pytest.raises(MemberLost) as found:
        b.meet(view_of(gone, b), 2.0, nothing)
    assert found.value.name == "a"


# -- strangers and members that say something wrong


class Stranger:
    """A connection to an island's door, and what came over it."""

    def __init__(self, links: IslandLinks) -> None:
        host, _, port = links.member.address.rpartition(":")
        stream = connect(host, int(port), WAIT_S, who="the island")
        self.heard: list[Message] = []
        calls = (lambda _, message: self.heard.append(message), lambda *_: None)
        self.connection = Connection(stream, "the island", im.NEWCOMER, *calls)
        self.connection.start()

    def __enter__(self) -> tuple[Connection, list[Message]]:
        return self.connection, self.heard

    def __exit__(self, *_: object) -> None:
        self.connection.close(0)


def admitted(a: IslandLinks, name: str = "b") -> tuple[Stranger, Future[IslandSession]]:
    """Somebody who has been welcomed by `a` as island `name`."""
    view = View.of([a.member, Member(name, "1", "127.0.0.1:1")])
    waiting = meeting(a, view)
    other = Stranger(a)
    hello = Message(im.IslandHello(name, "1", "a", view.key, 1 << 20))
    answer = other.connection.ask(hello, WAIT_S)
    assert isinstance(answer.body, im.IslandWelcome)
    return other, waiting


def raw_share(**changes: Any) -> Message:
    """A share whose fields nobody has checked."""
    tensors = changes.pop("tensors", (to_wire(torch.ones(2)),))
    share = im.Share(2, "vote", True, ("x",), {})
    for key, value in changes.items():
        object.__setattr__(share, key, value)
    return Message(share, tensors)


WRONG: dict[str, Callable[[], Message]] = {
    "another kind": lambda: raw_share(kind="weights"),
    "no number": lambda: raw_share(number="2"),
    "more names than tensors": lambda: raw_share(names=("x", "y")),
    "fewer names than tensors": lambda: raw_share(names=()),
    "a name that is none": lambda: raw_share(names=(3,)),
    "info that is none": lambda: raw_share(info=[1]),
    "huge info": lambda: raw_share(info={"x": "y" * (1 << 27)}),
    "a tensor of another type": lambda: raw_share(
        tensors=(WireTensor("float1024", (2,), memoryview(bytes(8))),)
    ),
    "another greeting": lambda: Message(im.IslandHello("c", "1", "a", "", 1 << 20)),
    "a message of workers": lambda: Message(m.Aborted(1, 1)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_member_with_invalid_messages_is_lost_without_side_effects(coast, case):
    a = coast.open("a")
    other, waiting = admitted(a)
    with other, suppress(HeteroError, ValueError, TypeError, AttributeError):
        try:
            # Past the checks of the one who sends, as far as bytes can be made of it.
            other.connection.link.send(WRONG[case]())
        finally:
            other.connection.close()
    assert lost(waiting.result(WAIT_S)).name == "b"
    a_circle, _ = together(a, coast.open("b"))
    a_circle.check()


def test_a_share_right_behind_the_greeting_affects_that_link_alone(coast):
    """It comes before the welcome was sent."""
    a, b = coast.open("a"), coast.open("b")
    view = view_of(a, b)
    with Stranger(a) as (connection, _):
        connection.link.send(Message(im.IslandHello("b", "1", "a", view.key, 1 << 20)))
        with suppress(HeteroError):
            connection.link.send(raw_share())
    with suppress(MemberLost):
        a.meet(view, 0.5, nothing)
    session, _ = together(a, b)
    session.check()


def test_a_link_that_comes_up_while_a_session_ends_is_no_error(coast, monkeypatch):
    a, b = together(*map(coast.open, "ab"))
    link = a._links["b"]
    send = link.send

    def sends(message: Message) -> None:
        a.add("c", link)  # by the thread that dials
        send(message)

    monkeypatch.setattr(link, "send", sends)
    a.close("it ends")
    assert lost(b).name == "a"


def test_islands_that_wait_for_another_session_are_few(coast, monkeypatch):
    monkeypatch.setattr(module, "_MOST_WAITING", 2)
    a = coast.open("a")
    with ExitStack() as stack:
        for name in "bcd":
            other, _ = stack.enter_context(Stranger(a))
            hello = Message(im.IslandHello(name, "1", "a", "a view", 1 << 20))
            answer = other.ask(hello, WAIT_S if name == "d" else 0.05)
    assert answer.expect(m.Reject).message == "2 islands wait here"
