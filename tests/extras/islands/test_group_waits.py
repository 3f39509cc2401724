"""A group's waits while it cannot learn its members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hetero_framework.errors import (
    ConfigError,
    HeteroError,
    IdentityError,
    NetworkError,
    PeerAwayError,
)
from hetero_framework.extras.islands import group as module
from hetero_framework.extras.islands.group import Group, Position
from hetero_framework.extras.islands.island_messages import Member, View
from hetero_framework.extras.islands.lighthouse_client import LighthouseClient
from hetero_framework.extras.islands.links import IslandLinks
from hetero_framework.security.access import LOOPBACK_ONLY


class Answers(LighthouseClient):
    """A lighthouse that gives these, one after the other; an alone island's view is `None`."""

    def __init__(self, *given: HeteroError | None) -> None:
        self._given = list(given)
        self.me: Member | None = None

    def next_view(self, timeout_s: float) -> View:
        answer = self._given.pop(0)
        if answer is not None:
            raise answer
        assert self.me is not None
        return View.of([self.me])

    in_reach = True  # type: ignore[assignment]

    def note_finished(self, finished: Any) -> None: ...

    def find_finished(self, run: str, facts: str, since_s: float) -> None: ...

    def close(self) -> None:
        pass


@contextmanager
def group_with(*given: HeteroError | None) -> Iterator[Group]:
    answers = Answers(*given)
    links = IslandLinks(
        "a", "1", LOOPBACK_ONLY, "127.0.0.1", max_frame_bytes=1 << 20, liveness_s=15.0
    )
    answers.me = links.member
    made = Group(answers, links, 1, lambda: None)
    try:
        yield made
    finally:
        made.close("the test is over")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)


@pytest.mark.parametrize(
    "error", [IdentityError("wrong keys"), NetworkError("nobody"), ConfigError("two of one name")]
)
def test_a_run_that_cannot_begin_ends_with_why(error: HeteroError) -> None:
    with group_with(error) as group, pytest.raises(type(error), match=error.message):
        group.join(Position())


@pytest.mark.parametrize("error", [NetworkError("it is gone"), PeerAwayError("they are late")])
def test_lighthouse_that_has_answered_is_asked_again(error: HeteroError, logged: list[str]) -> None:
    with group_with(None, error, None) as group:
        assert group.join(Position()).session.me == "a"
        assert group.join(Position()).session.me == "a"
    assert any("asking again until it answers" in line for line in logged)


def test_keys_that_count_no_more_end_the_wait_for_others() -> None:
    refused: Any = IdentityError("its certificate was revoked")
    with group_with(None, refused) as group:
        group.join(Position())
        with pytest.raises(IdentityError, match="revoked"):
            group.join(Position())
