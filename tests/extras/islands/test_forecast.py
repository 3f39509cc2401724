from __future__ import annotations

from hetero_framework.extras.islands.forecast import island_lines, short_run
from hetero_framework.extras.islands.settings import IslandConfig


def island(**settings: object) -> IslandConfig:
    named = {"name": "attic", "lighthouse": "10.0.0.1:29510"}
    return IslandConfig.model_validate({**named, **settings})


def test_traffic_of_an_island_is_forecast() -> None:
    [every_step] = island_lines(island(), 1 << 20)
    assert "sums its gradients: 4.00 MiB to each other island" in every_step
    sends, keeps = island_lines(island(sync_steps=100, compression="int8"), 1 << 20)
    assert "about 100 steps alone" in sends
    assert "973 KiB to each other island, in 1 fragment: 1/421 of gradients" in sends
    assert "keeps 8.00 MiB" in keeps


def test_a_run_too_short_for_averages_gets_a_warning() -> None:
    rounds = island(sync_steps=20)
    assert short_run(rounds, 4000, 2) is None
    assert "399 steps are 9 rounds of 2 islands" in (short_run(rounds, 399, 2) or "")
    assert short_run(island(), 10, 2) is None
    assert "island.warmup_steps 80 would do better" in (short_run(rounds, 800, 2) or "")
    assert short_run(island(sync_steps=20, warmup_steps=80), 800, 2) is None
    assert short_run(island(sync_steps=20, warmup_steps=80), 399, 2) is not None
    assert [line for line in island_lines(rounds, 10, 100) if line.startswith("warning: ")]
