from __future__ import annotations

from collections.abc import Callable

import pytest

from hetero_framework.core import bandwidth_scheduler
from hetero_framework.core.bandwidth_scheduler import Direction, LinkSlot
from hetero_framework.core.planned_order import BACKWARD, FORWARD

LARGE = 16_000_000


class Wire:
    """Links over one interface that carries `rate` bytes in a second, by a clock of its own."""

    def __init__(self, *, reserves: bool, links: int = 3, knows: bool = False) -> None:
        """`knows`: each link has carried one frame alone."""
        self.now, self.rate = 0.0, 100e6
        self.direction = Direction(reserves, lambda: self.now)
        self.told: list[int] = []
        self.changed: list[int] = []
        self.links = [
            self.direction.slot(self._tell(self.told, k), self._tell(self.changed, k))
            for k in range(links)
        ]
        for link in self.links if knows else ():
            assert link.begin(LARGE)
            self.pass_by((link, 1.0))
            link.end()

    def _tell(self, who: list[int], link: int) -> Callable[[], None]:
        return lambda: who.append(link)

    def pass_by(self, *going: tuple[LinkSlot, float], nbytes: int = LARGE) -> None:
        """These links carry `nbytes` together, each its share of the interface's rate."""
        pieces = 16
        for _ in range(pieces):
            self.now += nbytes / self.rate / pieces
            for link, share in going:
                link.moved(int(nbytes / pieces * share))


def test_frames_of_an_unknown_interface_go_at_once():
    wire = Wire(reserves=True)
    assert wire.links[0].lasts_s(LARGE) == 0.0
    assert all(link.begin(LARGE) for link in wire.links)


def test_the_rate_of_the_interface_is_learned():
    wire = Wire(reserves=True, knows=True)
    assert wire.links[1].lasts_s(50_000_000) == pytest.approx(0.5)


def test_the_link_that_went_longest_ago_gets_the_next_turn():
    wire = Wire(reserves=True, knows=True)
    first, second, third = wire.links
    assert second.begin(LARGE)
    assert not third.begin(LARGE)
    assert not first.begin(LARGE)
    assert not first.begin(LARGE)  # asking again is no harm
    second.end()
    assert wire.told == [0]
    assert first.begin(LARGE)
    assert not second.begin(LARGE)
    first.end()
    assert wire.told == [0, 2]


def test_without_reservations_the_first_link_to_begin_goes():
    wire = Wire(reserves=False, knows=True)
    first, second, third = wire.links
    assert second.begin(LARGE)
    assert first.awaits_room()
    assert not third.begin(LARGE)
    second.end()
    assert wire.told == [0, 2]
    assert not third.awaits_room()
    assert third.begin(LARGE)
    assert first.awaits_room()


def test_the_next_frame_goes_shortly_before_the_last_one_ends():
    wire = Wire(reserves=True, knows=True)
    first, second, _ = wire.links
    assert first.begin(LARGE)
    assert not second.begin(LARGE)
    wire.pass_by((first, 1.0), nbytes=LARGE - 1_000_000)
    assert wire.told == []
    wire.pass_by((first, 1.0), nbytes=800_000)
    assert wire.told == [1]


def test_a_frame_that_is_given_up_loses_its_turn():
    wire = Wire(reserves=True, knows=True)
    first, second, third = wire.links
    assert first.begin(LARGE)
    assert not second.begin(LARGE)
    assert not third.begin(LARGE)
    second.end()
    first.end()
    assert wire.told == [2]
    third.end()
    assert wire.told == [2]


def test_a_link_is_told_when_it_is_no_longer_alone():
    wire = Wire(reserves=True)
    first, second, third = wire.links
    assert first.begin(LARGE)
    assert first.is_alone()
    assert second.begin(LARGE)
    assert not first.is_alone()
    third.begin(LARGE)
    assert wire.changed == [0]
    third.leave()
    assert wire.changed == [0]
    first.leave()
    assert wire.changed == [0, 1]
    assert second.is_alone()
    second.leave()
    assert not second.is_alone()
    assert wire.changed == [0, 1]


def test_a_frame_records_its_rate_and_whether_it_was_alone():
    wire = Wire(reserves=True, links=2)
    first, second = wire.links
    assert first.begin(LARGE)
    wire.pass_by((first, 1.0))
    first.end()
    assert first.was_alone
    assert first.rate == pytest.approx(wire.rate)
    assert first.begin(LARGE)
    assert second.begin(LARGE, waits=False)
    wire.pass_by((first, 0.7), (second, 0.3))
    first.end()
    second.end()
    assert not first.was_alone
    assert not second.was_alone
    assert first.rate == pytest.approx(0.7 * wire.rate)


def test_a_link_slow_in_a_full_interface_may_be_quick_alone():
    """And who is slow in one that is not full leaves room."""
    wire = Wire(reserves=True, links=2, knows=True)
    first, second = wire.links
    for _ in range(8):
        assert first.begin(LARGE)
        assert second.begin(LARGE, waits=False)
        wire.pass_by((first, 0.5), (second, 0.5))
        first.end()
        second.end()
    assert first.begin(LARGE)
    assert not second.begin(LARGE)


def test_a_link_to_a_slow_peer_leaves_room_for_another():
    wire = Wire(reserves=True, knows=True)
    slow, quick, other = wire.links
    for _ in range(8):  # a tenth of the interface; what was learned before is forgotten
        assert slow.begin(LARGE)
        wire.pass_by((slow, 0.1))
        slow.end()
    assert slow.begin(LARGE)
    assert quick.begin(LARGE)
    assert not other.begin(LARGE)
    assert wire.told == []


def test_frames_that_shared_the_interface_count_as_filling_it():
    wire = Wire(reserves=True, links=2)
    first, second = wire.links
    for _ in range(8):
        assert first.begin(LARGE, waits=False)
        assert second.begin(LARGE, waits=False)
        wire.pass_by((first, 2 / 3), (second, 1 / 3))
        first.end()
        second.end()
    assert second.begin(LARGE)
    assert not first.begin(LARGE)


def test_a_faster_interface_than_was_known_is_found():
    """Two links of 100 MB/s each on 200 MB/s that have never met: once in a while both go."""
    wire = Wire(reserves=True, links=2, knows=True)
    first, second = wire.links
    waits = 0
    while first.begin(LARGE) and not second.begin(LARGE):
        waits += 1
        first.end()
        second.end()
    assert waits == bandwidth_scheduler._PROBE - 1
    wire.rate = 200e6
    wire.pass_by((first, 0.5), (second, 0.5), nbytes=2 * LARGE)
    first.end()
    second.end()
    for _ in range(8):
        assert first.begin(LARGE, waits=False)
        wire.pass_by((first, 0.5), nbytes=2 * LARGE)
        first.end()
    assert first.begin(LARGE)
    assert second.begin(LARGE)


# ---- in the planned order

F1, F2, B0 = (FORWARD, 1), (FORWARD, 2), (BACKWARD, 0)


def test_the_planned_link_of_those_that_wait_goes_first():
    wire = Wire(reserves=True, knows=True)
    wire.direction.plan(7, [F1, B0, F2], order_timeout_s=9.0)
    first, second, third = wire.links
    assert third.begin(LARGE, F1)
    third.went(F1, 7, 0)
    assert not first.begin(LARGE, F2)  # went longest ago
    assert not second.begin(LARGE, B0)
    third.end()
    assert wire.told == [1]


@pytest.mark.parametrize("reserves", [True, False])
def test_a_frame_waits_for_another_ones_turn_for_the_timeout_only(reserves):
    wire = Wire(reserves=reserves, knows=True)
    wire.direction.plan(7, [F1, B0, F2], order_timeout_s=0.25)
    first, second, _ = wire.links
    assert first.awaits_room(B0)
    assert not first.begin(LARGE, B0)
    assert first.left_s() == pytest.approx(0.25)
    wire.now += 0.26
    assert first.left_s() == 0.0
    assert first.begin(LARGE, B0)
    first.went(B0, 7, 0)
    first.end()
    assert second.begin(LARGE, F2)  # F1 was waited for


def test_a_link_that_insists_waits_only_for_room():
    wire = Wire(reserves=True, knows=True)
    wire.direction.plan(7, [F1, B0, F2], order_timeout_s=9.0)
    first, second, third = wire.links
    assert not first.begin(LARGE, B0)
    assert first.begin(LARGE, B0, insists=True)
    assert not second.begin(LARGE, F2, insists=True)
    first.end()
    assert wire.told == [1]
    second.end()
    assert not third.begin(LARGE, F2)
    assert wire.told == [1]


def test_frames_that_came_before_the_plan_of_their_attempt_count():
    """Another worker may have heard of the step before us; what is left of the last one is not in
    the plan."""
    wire = Wire(reserves=True, knows=True)
    first, second, _ = wire.links
    first.went(F1, 7, 0)
    second.went(B0, 6, 3)
    wire.direction.plan(7, [F1, B0, F2], order_timeout_s=9.0)
    assert second.begin(LARGE, B0)
    second.end()
    assert not first.begin(LARGE, F2)


def test_a_new_plan_releases_frames_that_wait_by_the_old_one():
    wire = Wire(reserves=True, knows=True)
    wire.direction.plan(7, [F1, B0], order_timeout_s=9.0)
    assert not wire.links[2].begin(LARGE, B0)
    wire.direction.plan(8, [], order_timeout_s=0.0)
    assert wire.told == [2]
