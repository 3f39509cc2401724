"""Pairs of settings: each is trained, or refused in words, and what changes no bit changes none.

HETERO_PAIRS_SEED draws the part that every run of the tests tries; its last lines name the seed.
"""

from __future__ import annotations

import os
import random

import pytest

from hetero_framework.config import Config
from hetero_framework.trainer.coordinator import train
from tests.extras.islands.helpers import train_islands
from tests.extras.islands.test_islands import quorums
from tests.integration.pairs import (
    ALONE,
    NEUTRAL,
    OBJECTIVES,
    REFUSALS,
    SETTINGS,
    Runs,
    same,
    weights,
)
from tests.integration.pairs import pairs as every_pair
from tests.integration.test_recovery import Killer
from tests.samples import free_ports

__all__ = ["quorums"]  # the fixture of all islands

pytestmark = pytest.mark.xdist_group("pool")
SEED = os.environ["HETERO_PAIRS_SEED"]
FEATURES = [name for name in SETTINGS if name not in (*NEUTRAL, *ALONE)]
_OF_THREADS = {"noise", "dropout", "workers", "cut", "samples"}
"""Threads share torch's random numbers, and a pool serves one island at a time."""


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    machines = pool.machines
    folder = tmp_path_factory.mktemp("pairs")
    return Runs(folder, machines["workers"][:1], machines["coordinator"]["port"])


OF_ALL = [pytest.param(name, marks=pytest.mark.xdist_group(f"pool {name}")) for name in OBJECTIVES]
"""For tests of hours: each objective may be another process's."""


def faults(found: dict[str, str]) -> list[str]:
    return [f"{which}: {said}" for which, said in found.items() if said.startswith("FAULT")]


def drawn(what: str, among: list[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    return random.Random(f"{what} {SEED}").sample(among, count)


@pytest.mark.timeout(900)  # half a minute, of a machine that does nothing else
def test_pairs_that_were_drawn_are_trained_or_refused(runs):
    among = [(name, *pair) for name in OBJECTIVES for pair in every_pair()]
    tried = drawn("pairs", among, 24)
    found = {f"{name} {'+'.join(pair)}": runs.try_pair(name, pair) for name, *pair in tried}
    assert faults(found) == [], f"HETERO_PAIRS_SEED={SEED}"


@pytest.mark.timeout(900)
def test_settings_that_were_drawn_keep_their_bits(runs):
    among = [(name, feature) for name in OBJECTIVES for feature in FEATURES]
    tried = drawn("neutral", among, 2)
    found = {f"{name} {feature}": runs.try_neutral(name, (feature,)) for name, feature in tried}
    assert faults(found) == [], f"HETERO_PAIRS_SEED={SEED}"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", SETTINGS)
@pytest.mark.parametrize("objective", OF_ALL)
def test_every_pair_is_trained_or_refused(objective, first, runs):
    mine = [pair for pair in every_pair() if pair[0] == first]
    assert faults({"+".join(pair): runs.try_pair(objective, pair) for pair in mine}) == []


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("objective", OF_ALL)
def test_every_setting_keeps_its_bits(objective, feature, runs):
    assert faults({feature: runs.try_neutral(objective, (feature,))}) == []


@pytest.mark.long
@pytest.mark.parametrize("objective", OF_ALL)
def test_a_worker_killed_in_a_step_changes_no_bit(objective, tmp_path):
    """It is one that the coordinator starts, and starts again."""
    first, second = free_ports(2)
    own = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu", "id": 1, "port": second}
    runs = Runs(tmp_path, [own], first)
    (feature,) = random.Random(f"killed {objective} {SEED}").sample(
        ["eval", "mix", "best", "dora"], 1
    )
    whole = runs.trained(runs.raw(objective, (feature,)), (feature,))
    killer = Killer({2: (1,)})
    raw = runs.raw(objective, (feature, "workers"), replicate_steps=1)
    summary = train(Config.from_dict(raw), progress=killer)
    assert not killer.at, "nothing was killed"
    assert same(whole, ([*summary.losses], weights(raw))), f"{feature}, HETERO_PAIRS_SEED={SEED}"


@pytest.mark.long
@pytest.mark.parametrize("objective", OF_ALL)
def test_islands_train_a_pair_as_one_or_refuse_it(objective, runs):
    among = [pair for pair in every_pair() if not _OF_THREADS & {*pair}]
    for pair in drawn(f"islands {objective}", among, 3):
        island = {"lighthouse": "127.0.0.1:29510", "min_islands": 2, "share": 1}
        raws = {
            name: {**runs.raw(objective, pair), "island": {**island, "name": name}}
            for name in ("a", "b")
        }
        try:
            train_islands(raws)
        except REFUSALS:
            continue
        one, other = (weights(raw) for raw in raws.values())
        assert same((None, one), (None, other)), f"{pair}, HETERO_PAIRS_SEED={SEED}"
