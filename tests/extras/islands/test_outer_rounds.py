"""Islands in rounds: the island with wrong weights is found, and decisions are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hetero_framework.errors import ProtocolError
from hetero_framework.extras.islands.ledger import Ledger
from hetero_framework.extras.islands.links import MemberLost
from hetero_framework.extras.islands.outer_rounds import Round, _decided, _refuse_other_weights


class IslandSession:
    """As the one who counts votes sees it."""

    def __init__(self, me: str = "a") -> None:
        self.me = self.leader = me
        self.refused: list[str] = []

    def refuse(self, name: str, wrong: ProtocolError) -> None:
        self.refused.append(name)

    def check(self) -> None:
        if self.refused:
            raise MemberLost(self.refused[0], "refused")


def refuse(hashes: Mapping[str, Any], me: str = "a") -> list[str]:
    session = IslandSession(me)
    try:
        _refuse_other_weights(session, hashes)  # type: ignore[arg-type]
    except MemberLost:
        assert session.refused
    return session.refused


@pytest.mark.parametrize(
    ("hashes", "odd"),
    [
        ({"a": "x", "b": "x", "c": "x"}, []),
        ({"a": "x", "b": "y", "c": "x"}, ["b"]),
        ({"a": "x", "b": "y"}, ["b"]),  # of equally many the one who counts is right
        ({"a": "x", "b": None, "c": 3, "d": "y"}, ["b", "c", "d"]),
        ({"a": "x"}, []),
    ],
)
def test_the_island_with_other_weights_than_most_is_found(hashes, odd):
    assert refuse(hashes) == odd


def test_an_island_that_finds_its_own_weights_wrong_ends():
    with pytest.raises(ProtocolError, match="it has come to other weights than the others"):
        refuse({"a": "y", "b": "x", "c": "x"})


RIGHT: dict[str, Any] = {"steps": {"a": [[4, 6]], "b": []}}
ROUND = Round(4, {"a": ((2, 7),), "b": ((7, 9),)}, last=False)


def decided(decision: Mapping[str, Any]) -> dict[str, Any]:
    return _decided(decision, ROUND, Ledger(((0, 4),)), IslandSession())  # type: ignore[arg-type]


def test_a_decision_lists_the_steps_that_count():
    assert decided(RIGHT) == {"a": ((4, 6),), "b": ()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": None}, "sends no decision"),
        ({"steps": [1]}, "sends no decision"),
        ({"steps": {"a": [[4]]}}, "names no steps"),
        ({"steps": {"a": [["x", 5]]}}, "names no steps"),
        ({"steps": {"a": [[6, 4]]}}, "steps that it was not dealt"),
        ({"steps": {"a": [[3, 5]]}}, "sends no decision"),  # one of them counts already
        ({"steps": {"a": [[4, 6]], "b": [[5, 6]]}}, "island b has done steps"),
        ({"steps": {"a": [[6, 8]]}}, "steps that it was not dealt"),
        ({"steps": {"z": [[4, 5]]}}, "island z has done steps"),
    ],
)
def test_an_invalid_decision_is_refused(change, said):
    with pytest.raises(ProtocolError, match=f"island [abz] .*{said}|{said}"):
        decided({**RIGHT, **change})
