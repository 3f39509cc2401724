from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.planner import FleetProfile, plan
from hetero_framework.planner.chains import chains
from tests.unit.planner.fleets import device, fleet_of, rules_of

Pairs = Iterable[tuple[int, int]]


def linked(workers: int, pairs: Pairs, **settings: object) -> FleetProfile:
    """A star with direct links between these pairs of workers only."""
    devices = [device(k or "local") for k in range(workers + 1)]
    profile = fleet_of(*devices, **{"speed": 1e8, **settings})
    there = {frozenset(pair) for pair in pairs}
    links = tuple(
        link
        for link in profile.links
        if "local" in (link.sender, link.receiver) or {link.sender, link.receiver} in there
    )
    return profile.model_copy(update={"links": links})


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_neighbours_in_a_chain_are_linked_and_nobody_comes_twice(data: st.DataObject) -> None:
    numbers = st.integers(1, 9)
    pairs = data.draw(st.sets(st.tuples(numbers, numbers).filter(lambda pair: pair[0] != pair[1])))
    rules = rules_of(linked(9, pairs))
    for chain in chains(rules):
        assert len(set(chain)) == len(chain) > 1
        assert 0 not in chain
        assert all(rules.fleet.can_go_direct(a, b) for a, b in pairwise(chain))


def test_a_way_through_all_is_found_and_none_is_looked_for_where_all_or_none_are_linked() -> None:
    order = list(range(1, 41))
    random.Random(1).shuffle(order)
    way = list(pairwise(order))
    assert max(map(len, chains(rules_of(linked(40, way))))) == 40
    every = [(a, b) for a in order for b in order if a < b]
    for pairs in (every, []):
        assert chains(rules_of(linked(40, pairs))) == []


def test_of_many_workers_those_that_are_linked_are_taken() -> None:
    """Of 110 workers that differ in nothing else 12 are linked, in a row; the coordinator could
    relay one boundary in the time of a layer."""
    row = list(range(95, 107))
    found = plan(linked(110, pairwise(row), layers=13, micro_batches=16), allow=())
    used = [entry["id"] for entry in found.shard_plan]
    assert used in (["local", *row], ["local", *reversed(row)])
    assert [entry.get("links") for entry in found.shard_plan[2:]] == ["direct"] * 11
