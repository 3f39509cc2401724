"""Who counts as being at the lighthouse, by links."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import closing

import pytest

from hetero_framework.islands import presence as module
from hetero_framework.islands.presence import Presence
from tests.unit.islands.test_tunnel import WAIT_S, wait_until


@pytest.fixture
def beaten() -> queue.Queue[str]:
    return queue.Queue()


@pytest.fixture
def presence(beaten: queue.Queue[str]) -> Iterator[Presence]:
    with closing(Presence(beaten.put)) as made:
        yield made


def test_it_beats_for_who_is_here(presence: Presence, beaten: queue.Queue[str]) -> None:
    assert presence.here() == set()
    presence.heard("link", "a:1")
    assert [beaten.get(timeout=WAIT_S) for _ in range(2)] == ["a:1", "a:1"]


def test_an_island_is_gone_with_its_last_link(presence: Presence) -> None:
    presence.heard("one", "a:1")
    presence.heard("other", "a:1")
    presence.heard("third", "b:1")
    presence.gone("one")
    presence.gone("nobody's")
    assert presence.here() == {"a:1", "b:1"}
    presence.gone("other")
    assert presence.here() == {"b:1"}


def test_for_how_long_islands_have_been_here(
    presence: Presence, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    assert presence.since_s() == 0
    for id, at in (("a:1", 101.0), ("a:1", 102.0), ("b:1", 103.0)):
        now[0] = at
        presence.heard(id, id)
    presence.gone("a:1")
    now[0] = 104.0
    assert presence.since_s() == 3
    now[0] = 103.0 + module.SILENT_S + 1
    assert presence.since_s() == 0
    presence.heard("b:1", "b:1")
    now[0] += 1
    assert presence.since_s() == 1


def test_an_island_whose_links_are_silent_is_not_here(
    presence: Presence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.3)
    presence.heard("one", "a:1")
    wait_until(lambda: presence.here() == set())
    presence.heard("other", "a:1")
    assert presence.here() == {"a:1"}
