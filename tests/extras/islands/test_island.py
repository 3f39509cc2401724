from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import ConfigError

ISLAND: dict[str, Any] = {"name": "garage", "lighthouse": "10.0.0.1:29510"}
FULL: dict[str, Any] = {
    "coordinator": {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"},
    "shard_plan": [{"id": "local", "start": 0, "end": 4}],
    "model": {"name_or_path": "model"},
    "data": {"train": "train.jsonl"},
}


def with_island(**settings: Any) -> dict[str, Any]:
    return {**FULL, "island": {**ISLAND, **settings}}


def test_every_setting_of_the_contract_is_there_and_comes_back():
    streaming = {
        "min_islands": 1, "sync_steps": 20, "warmup_steps": 5, "method": "diloco", "fragments": 2,
        "delay_steps": 2, "mixing": 0.5, "compression": "none", "outer_learning_rate": 0.7,
        "outer_momentum": 0.9, "share": "auto", "wait_s": 60.0,
    }  # fmt: skip
    config = Config.from_dict(with_island(**streaming))
    assert config.to_dict()["island"] == ISLAND | streaming
    assert Config.from_dict(config.to_dict()) == config


def test_name_and_lighthouse_are_enough_and_mean_a_sum_in_every_step():
    island = Config.from_dict(with_island()).island
    assert (island.sync_steps, island.min_islands, island.share) == (1, 1, "auto")
    assert Config.from_dict(FULL).setting("island") is None


@pytest.mark.parametrize(
    "settings",
    [
        {"lighthouse": "[fe80::1]:29510"},
        {"lighthouse": "light.lan:1"},
        {"share": 2},
        {"share": 0.25},
        {"sync_steps": 4, "fragments": 4},
        {"sync_steps": 5, "fragments": 2, "delay_steps": 1},
        {"sync_steps": 20, "outer_learning_rate": 1, "outer_momentum": 0},
    ],
)
def test_valid_settings_are_accepted(settings):
    Config.from_dict(with_island(**settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": None}, "island.name: must be a text, not null"),
        ({"name": "two words"}, "island.name: a name has 1 to 64 letters"),
        ({"name": "local"}, '"local" names the lighthouse; give the island another name'),
        ({"name": "-x"}, "begins with neither '.' nor '-'"),
        ({"lighthouse": "10.0.0.1"}, 'island.lighthouse: "10.0.0.1" has no port'),
        ({"lighthouse": "10.0.0.1:0"}, "has no port"),
        ({"lighthouse": "10.0.0.1:65536"}, "has no port"),
        ({"lighthouse": "http://10.0.0.1:29510"}, "an IPv6 address in front of a port needs"),
        ({"lighthouse": "http//x:29510"}, "write only the host"),
        ({"lighthouse": "fe80::1:29510"}, "needs brackets"),
        ({"lighthouse": ":29510"}, "island.lighthouse: is missing"),
        ({"min_islands": 0}, "island.min_islands: must be at least 1, not 0"),
        ({"sync_steps": 0}, "island.sync_steps: must be at least 1, not 0"),
        ({"sync_steps": "20"}, 'island.sync_steps: must be a whole number, not the text "20"'),
        ({"method": "sgd"}, 'island.method: must be "diloco" or "local_sgd"'),
        ({"fragments": 0}, "island.fragments: must be at least 1, not 0"),
        ({"fragments": 2}, "island: 2 fragments need at least as many sync_steps, not 1"),
        ({"sync_steps": 9, "fragments": 5}, "island.fragments: 5 fragments are more than the 4"),
        ({"sync_steps": 8, "fragments": 2, "delay_steps": 4}, "delay_steps must be less than 4"),
        ({"delay_steps": 1}, "delay_steps must be less than 1"),
        ({"mixing": 1.5}, "island.mixing: must be at most 1.0, not 1.5"),
        ({"mixing": -1}, "island.mixing: must be at least 0.0, not -1"),
        ({"compression": "int4"}, 'island.compression: must be "none", "bf16" or "int8"'),
        ({"outer_learning_rate": 0}, "island.outer_learning_rate: must be greater than 0.0"),
        ({"outer_momentum": 1}, "island.outer_momentum: must be less than 1.0, not 1"),
        ({"share": 0}, 'island.share: must be "auto" or greater than 0.0, not 0'),
        ({"share": "half"}, 'island.share: must be "auto" or a number, not the text "half"'),
        ({"fragment": 2}, 'island.fragment: unknown key; did you mean "fragments"?'),
    ],
)
def test_wrong_settings_name_the_place_and_the_fix(settings, expected):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(with_island(**settings))
    assert expected in str(caught.value)


def test_islands_share_no_step_whose_loss_is_of_micro_batches():
    kto = {"objective": "kto", "train_sampling_strategy": "sequential"}

    def config(loss: str, **settings: Any) -> dict[str, Any]:
        return {**with_island(**settings), "training": {**kto, "loss_type": loss}}

    Config.from_dict(config("apo_zero_unpaired"))
    Config.from_dict(config("kto", sync_steps=4))
    for shared in ({}, {"sync_steps": 4, "warmup_steps": 2}):
        with pytest.raises(ConfigError, match="kto's estimate of the KL is of a micro-batch"):
            Config.from_dict(config("kto", **shared))
