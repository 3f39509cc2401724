"""Positions of islands, the choice of the source, and how an island joins the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.errors import (
    ConfigError,
    GroupFinished,
    HeteroError,
    IdentityError,
    NetworkError,
    PeerAwayError,
    ProtocolError,
)
from hetero_framework.extras.islands import group as module
from hetero_framework.extras.islands.group import Group, Position, SessionStart, behind, source_of
from hetero_framework.extras.islands.island_messages import FinishedRun, Member, View
from hetero_framework.extras.islands.lighthouse import FinishedRuns
from hetero_framework.extras.islands.lighthouse_client import LighthouseClient
from tests.extras.islands.helpers import links_of
from tests.waiting import WAIT_S

FACTS = {"data": "d", "island.sync_steps": 1}
VIEW = View.of([Member("a", "1", "x"), Member("b", "1", "x")])


def at(step: int, lineage: str = "", *, trains=False, done=False, run="", **facts) -> Position:
    return Position(step, lineage, trains, facts or FACTS, is_done=done, run=run)


# -- positions


@pytest.mark.parametrize(
    ("positions", "source", "others"),
    [
        # All begin: one gives its bits to all.
        ({"a": at(0), "b": at(0), "c": at(0)}, "a", "bc"),
        # Those that were started again take over from the one that trains, however far they were.
        ({"a": at(9, "x"), "b": at(4, "y", trains=True)}, "b", "a"),
        # One has heard the last decision, the others have not.
        ({"a": at(4, "x", trains=True), "b": at(5, "y", trains=True), "c": at(4, "x", trains=True)},
         "b", "ac"),
        # Equally far, on two ways: the way of the most.
        ({"a": at(4, "x", trains=True), "b": at(4, "y", trains=True), "c": at(4, "y", trains=True)},
         "b", "a"),
        # Nobody has trained since the start: the furthest checkpoint.
        ({"a": at(2, "x"), "b": at(3, "x"), "c": at(3, "x")}, "b", "a"),
        # Nothing to do.
        ({"a": at(4, "x", trains=True), "b": at(4, "x", trains=True)}, "a", ""),
        # One of three has another configuration.
        ({"a": at(0, data="other"), "b": at(0), "c": at(0)}, "b", "ac"),
    ],
)  # fmt: skip
def test_source_and_members_behind_follow_from_positions(positions, source, others):
    assert source_of(positions) == source
    assert behind(positions, source) == list(others)
    said = {name: Position.of(position.as_info()) for name, position in positions.items()}
    assert source_of(said) == source  # the others come to the same from what they hear
    assert source_of(dict(reversed(positions.items()))) == source


def test_positions_agree_after_the_same_commits_alone():
    begun = at(0, "seed")
    one, same = begun.after_commit(1, VIEW), begun.after_commit(1, VIEW)
    assert one == same
    assert one.trains
    other = View.of([Member("a", "1", "x"), Member("b", "2", "x")])
    assert begun.after_commit(1, other).lineage != one.lineage
    assert at(0, "twig").after_commit(1, VIEW).lineage != one.lineage


@pytest.mark.parametrize(
    "change",
    [
        {"step": "3"}, {"step": True}, {"step": -1}, {"step": 2**60},
        {"lineage": None}, {"trains": 1}, {"done": 0},
        {"facts": 3}, {"says": "auto"}, {"facts": [1]},
    ],
)  # fmt: skip
def test_an_invalid_position_is_refused(change):
    with pytest.raises(ProtocolError, match="sends no position"):
        Position.of({**at(0).as_info(), **change})
    missing = at(0).as_info()
    del missing[next(iter(change))]
    with pytest.raises(ProtocolError, match="sends no position"):
        Position.of(missing)


# -- a group


class Answers(LighthouseClient):
    """A lighthouse that answers what a test puts down, or waits for it."""

    def __init__(self) -> None:
        self._there = threading.Condition()
        self._answers: deque[View | HeteroError] = deque()
        self.asked = 0
        self.closed = False
        self.runs = FinishedRuns()

    def note_finished(self, finished: FinishedRun) -> None:
        self.runs.keep(finished)

    def find_finished(self, run: str, facts: str, since_s: float) -> FinishedRun | None:
        return self.runs.find(run, facts, since_s)

    def put(self, *answers: View | HeteroError) -> None:
        with self._there:
            self._answers.extend(answers)
            self._there.notify_all()

    def next_view(self, timeout_s: float) -> View:
        with self._there:
            self.asked += 1
            self._there.notify_all()
            came = self._there.wait_for(lambda: self._answers or self.closed, WAIT_S)
            if not came or self.closed:
                raise NetworkError("closed")
            answer = self._answers.popleft()
        if isinstance(answer, HeteroError):
            raise answer
        return answer

    in_reach = True  # type: ignore[assignment]

    def close(self) -> None:
        with self._there:
            self.closed = True
            self._there.notify_all()

    def until_asked(self, times: int) -> None:
        with self._there:
            assert self._there.wait_for(lambda: self.asked >= times, WAIT_S)


class Island:
    def __init__(
        self, name: str, min_islands: int, check: Callable[[], None], wait_s: float
    ) -> None:
        self.answers = Answers()
        self.links = links_of(name)
        self.group = Group(self.answers, self.links, min_islands, check, wait_s)

    def joins(self, position: Position) -> Future[SessionStart]:
        return in_background(lambda: self.group.join(position), "joining")


Open = Callable[..., Island]


@pytest.fixture
def start(quick_ticks):
    with ExitStack() as stack:

        def opened(
            name: str,
            min_islands: int = 1,
            check: Callable[[], None] = lambda: None,
            wait_s: float = 1e9,
        ) -> Island:
            made = Island(name, min_islands, check, wait_s)
            stack.callback(made.group.close, "the test is over")
            return made

        yield opened


def view_of(*islands: Island) -> View:
    return View.of([one.links.member for one in islands])


def show(*islands: Island, views: int = 1) -> None:
    """Each of these is answered that they are all here."""
    for one in islands:
        one.answers.put(*[view_of(*islands)] * views)


def joined(positions: dict[Island, Position], views: int = 1) -> list[SessionStart]:
    """These, of so many views in turn: the first is met, the next answer `stay`."""
    show(*positions, views=views)
    asked = [one.joins(position) for one, position in positions.items()]
    return [found.result(WAIT_S) for found in asked]


def test_all_members_choose_the_same_source(start):
    islands = {start("a"): at(0), start("b"): at(3, "x", trains=True), start("c"): at(3, "y")}
    for found in joined(islands):
        assert found.session.members == ("a", "b", "c")
        assert (found.source, found.behind) == ("b", ("a", "c"))


def test_fewer_than_min_islands_wait_and_say_so(start, logged):
    a, b = start("a", 2), start("b", 2)
    waiting = a.joins(at(0))
    a.answers.put(view_of(a))
    a.answers.until_asked(2)
    assert a.group.waits
    show(a, b)
    b.joins(at(0)).result(WAIT_S)
    assert waiting.result(WAIT_S).session.members == ("a", "b")
    assert not a.group.waits
    assert sum("1 island here, 2 are wanted" in line for line in logged) == 1


def test_a_differing_island_is_told_the_setting_and_the_others_go_on(start):
    a, b, c = start("a"), start("b"), start("c")
    show(a, b, c)
    odd = a.joins(at(0, **{**FACTS, "data": "other"}))
    others = [b.joins(at(0)), c.joins(at(0))]
    with pytest.raises(ConfigError) as error:
        odd.result(WAIT_S)
    assert error.value.message == (
        "island a does not train what island b does: data is 'other' here, and 'd' there"
    )
    assert [found.result(WAIT_S).source for found in others] == ["b", "b"]
    a.group.close("it ends")
    show(b, c)
    assert not b.group.stay()
    asked = [one.joins(at(0)) for one in (b, c)]
    assert [found.result(WAIT_S).session.members for found in asked] == [("b", "c")] * 2


def test_a_newcomer_with_other_settings_does_not_stop_the_group(start):
    a, b = start("a"), start("b")
    show(a, b)
    new, old = a.joins(at(50, data="other")), b.joins(at(3, "x", trains=True))
    with pytest.raises(ConfigError, match="data is 'other' here"):
        new.result(WAIT_S)
    assert old.result(WAIT_S).source == "b"


def test_members_stay_while_the_lighthouse_is_away(start, logged):
    a, b = start("a"), start("b")
    joined({a: at(0), b: at(0)}, views=2)
    for trouble in (NetworkError("no lighthouse"), PeerAwayError("nobody asks")):
        assert a.group.stay()
        a.answers.put(trouble)
    assert a.group.stay()
    assert any("no lighthouse; the members stay as they are" in line for line in logged)


@pytest.mark.parametrize("error", [NetworkError("it is gone"), PeerAwayError("they are late")])
def test_joining_waits_for_a_lighthouse_that_has_gone_away(error, start, logged, monkeypatch):
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    a = start("a")
    joined({a: at(0)})
    a.group.leave("it joins again")
    a.answers.put(error, error, view_of(a))
    assert a.joins(at(0)).result(WAIT_S).session.members == ("a",)
    assert sum("asking again until it answers" in line for line in logged) == 1


@pytest.mark.parametrize(
    "error", [IdentityError("wrong keys"), NetworkError("nobody"), ConfigError("two of one name")]
)
def test_a_run_that_cannot_begin_ends_with_why(error, start):
    a = start("a")
    a.answers.put(error)
    with pytest.raises(type(error), match=error.message):
        a.joins(at(0)).result(WAIT_S)


def test_keys_that_count_no_more_end_the_wait_for_others(start):
    a = start("a")
    a.answers.put(view_of(a), IdentityError("its certificate was revoked"))
    a.joins(at(0)).result(WAIT_S)
    with pytest.raises(IdentityError, match="revoked"):
        a.joins(at(0)).result(WAIT_S)


def test_a_newcomer_joins_before_the_next_step(start):
    a, b, c = start("a"), start("b"), start("c")
    joined({a: at(0), b: at(0)}, views=2)
    assert a.group.stay()
    assert b.group.stay()
    newcomer = c.joins(at(0))
    show(a, b, c)
    assert not a.group.stay()
    assert not b.group.stay()
    asked = [one.joins(at(4, "x", trains=True)) for one in (a, b)]
    for found in [newcomer, *asked]:
        assert found.result(WAIT_S).behind == ("c",)


def test_members_that_are_not_answered_go_on_without_waiting(start):
    """What they have asked is answered when the lighthouse is there again."""
    a, b = start("a"), start("b")
    joined({a: at(0), b: at(0)})
    a.answers.in_reach = False
    assert a.group.stay()
    assert a.group.stay()
    assert a.answers.asked == 2
    a.answers.in_reach = True
    a.answers.put(view_of(a))
    assert not a.group.stay()


def test_all_members_that_have_joined_ask_for_the_next_view(start):
    """Who waited for the others has asked already, and would lag behind them from step to step."""
    a, b = start("a"), start("b")
    show(a, b)
    early = b.joins(at(0))
    b.answers.until_asked(2)
    for found in (early, a.joins(at(0))):
        found.result(WAIT_S)
    a.answers.until_asked(2)
    assert b.answers.asked == 2


def test_a_meeting_to_which_not_all_come_ends_with_the_next_view(start, monkeypatch):
    """One member has died or waits for the next view: it would dial, or be dialled."""
    monkeypatch.setattr(module, "_MEET_S", 2 * WAIT_S)
    for here, away in (("a", "b"), ("d", "c")):
        one, other = start(here), start(away)
        one.answers.put(view_of(one, other))
        waiting = one.joins(at(0))
        one.answers.until_asked(2)
        assert not waiting.done()
        one.answers.put(view_of(one))
        assert waiting.result(WAIT_S).session.members == (here,)


def test_a_newcomer_waits_until_the_others_finish_their_step(start):
    a, b = start("a"), start("b")
    show(a, b)
    early = b.joins(at(0))
    b.answers.until_asked(2)  # and is not answered: a has not asked again
    assert a.joins(at(3, "x", trains=True)).result(WAIT_S).behind == ("b",)
    assert early.result(WAIT_S).source == "a"
    b.answers.put(view_of(a, b))
    assert b.group.stay()  # by the answer to what it asked then
    b.answers.until_asked(3)


def test_a_view_that_came_before_a_member_was_lost_is_used(start):
    """Else who dropped it and who did not would wait for each other."""
    a, b = start("a"), start("b")
    first = joined({a: at(0), b: at(0)}, views=2)
    assert a.group.stay()
    assert b.group.stay()
    first[1].session.close("")
    show(a, b)
    assert not b.group.stay()
    asked = [one.joins(at(0)) for one in (a, b)]
    assert [found.result(WAIT_S).session.members for found in asked] == [("a", "b")] * 2


def test_check_ends_the_waiting_for_others(start):
    class Stop(Exception): ...

    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise Stop

    a = start("a", 2, check)
    waiting = a.joins(at(0))
    a.answers.until_asked(1)
    assert not wait_for([waiting], 0.2)
    stop.set()
    with pytest.raises(Stop):
        waiting.result(WAIT_S)
    assert not a.group.waits


class Unsaid(Position):
    def as_info(self) -> dict[str, Any]:
        return {}


def test_an_island_without_a_position_ends_and_the_others_go_on(start):
    a, b, c = start("a"), start("b"), start("c")
    show(a, b, c)
    asked = [one.joins(at(0)) for one in (a, c)]

    def come() -> None:
        session = b.joins(Unsaid(facts=FACTS)).result(WAIT_S).session
        session.receive(1, "state", "a", lambda: None)  # where it has heard the others before

    with pytest.raises(ProtocolError, match=r"does not take what this island says: .*no position"):
        come()
    b.group.close("it ends")
    show(a, c)
    assert [found.result(WAIT_S).session.members for found in asked] == [("a", "c")] * 2


# -- the end


def test_an_island_that_joins_after_the_end_is_told(start):
    """A former member is known by the run; a new one is told if they finished on its way."""
    a, b, c, other = start("a"), start("b"), start("c"), start("d")
    done = at(9, "x", run="1")
    [found] = joined({a: done})
    for one in (b, c, other):
        one.answers.runs = a.answers.runs
    early = start("e")
    early.answers.runs = a.answers.runs
    c.group._opened -= WAIT_S  # long before they finish, however busy the machine is
    a.group.finish(found.session, done, 9)
    for one, position in ((b, at(4, "y", run="1")), (c, at(0))):
        one.answers.put(view_of(one))
        with pytest.raises(GroupFinished, match="after step 9, without island") as error:
            one.joins(position).result(WAIT_S)
        assert "the result is with a" in str(error.value)
        assert error.value.exit_code == 0
    later = start("f")
    later.answers.runs = a.answers.runs
    for one, position in (
        (other, at(4, "y", run="2")),  # another run
        (early, at(0, data="other")),  # of other data
        (later, at(0)),  # begun after the others had finished: anew
    ):
        one.answers.put(view_of(one))
        assert one.joins(position).result(WAIT_S).source == one.links.member.name


def test_the_final_state_is_given_below_min_islands_too(start):
    a, b = start("a", 3), start("b", 3)
    found = joined({a: at(8, "x", trains=True), b: at(9, "y", trains=True, done=True)})
    assert [(one.source, one.behind) for one in found] == [("b", ("a",))] * 2


def test_too_few_islands_end_after_a_while(start):
    a = start("a", 2, wait_s=0.1)
    a.answers.put(view_of(a), view_of(a))
    with pytest.raises(PeerAwayError, match=r"of the 2 islands .* there were 1 island for 0 s: a"):
        a.joins(at(0)).result(WAIT_S)
