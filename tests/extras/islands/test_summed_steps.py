"""Settings that all islands have to share, and the time that they wait for slower ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetero_framework.config import Config, effects
from hetero_framework.config.section import Effect, Scope
from hetero_framework.extras.islands import summed_steps
from hetero_framework.extras.islands.group import differing
from hetero_framework.extras.islands.summed_steps import SummedSteps, for_others

BASE: dict[str, Any] = {
    "coordinator": {"ip": "127.0.0.1", "device": "cpu"},
    "shard_plan": [{"id": "local", "start": 0, "end": 2}],
    "model": {"name_or_path": "m"},
    "adapter": {"r": 4},
    "data": {"train": "p.jsonl"},
    "training": {"objective": "dpo", "per_device_train_batch_size": 2},
    "island": {"name": "a", "lighthouse": "127.0.0.1:9000"},
}


@pytest.fixture(autouse=True)
def same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        summed_steps, "order_facts", lambda order, fingerprint: {"data": fingerprint}
    )


def facts(**sections: Any) -> dict[str, Any]:
    merged = {k: {**v, **sections.get(k, {})} for k, v in BASE.items() if isinstance(v, dict)}
    return facts_of(Config.from_dict({**BASE, **merged}))


def facts_of(config: Any, tokens: str = "") -> dict[str, Any]:
    prepared = SimpleNamespace(
        config=config,
        resolved=SimpleNamespace(given=config),
        data=SimpleNamespace(order=None, fingerprint=tokens),
        adapter_plan=SimpleNamespace(origin=None),
    )
    island = SimpleNamespace(
        _prepared=prepared, _island=config.island, _cluster=SimpleNamespace(fingerprint="")
    )
    return SummedSteps._facts(cast(SummedSteps, island))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {"objective": "orpo"}}, "training.objective"),
        ({"training": {"beta": 0.9}}, "training.beta"),
        ({"training": {"loss_type": "ipo"}}, "training.loss_type"),
        ({"training": {"rpo_alpha": 1.0}}, "training.rpo_alpha"),
        ({"training": {"label_smoothing": 0.1}}, "training.label_smoothing"),
        ({"training": {"max_skipped_share": 0.5}}, "training.max_skipped_share"),
        ({"adapter": {"r": 8}}, "adapter.r"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype"),
        ({"wire": {"gradients": "int8"}}, "wire.gradients"),
        ({"island": {"sync_steps": 4}}, "island.sync_steps"),
    ],
)
def test_another_setting_is_named(sections: dict[str, Any], key: str) -> None:
    if key.startswith("wire"):
        other = facts_of(Config.from_dict({**BASE, **sections}))
    else:
        other = facts(**sections)
    assert differing(facts(), other) == [key]


def test_other_data_are_named() -> None:
    config = Config.from_dict(BASE)
    assert differing(facts_of(config, "some"), facts_of(config, "others")) == ["data"]


def test_machines_and_paths_may_differ() -> None:
    other = facts(
        model={"name_or_path": "elsewhere", "attn_implementation": "eager"},
        training={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        island={"name": "b"},
        data={"train": "q.jsonl"},
    )
    assert differing(facts(), other) == []


def test_every_setting_that_changes_the_result_is_among_the_facts() -> None:
    config = Config.from_dict(BASE)
    raw = config.to_dict()
    before, missed = facts_of(config), []
    for name, effect in effects.effects().items():
        section, _, key = name.partition(".")
        if effects.scopes()[name] is Scope.PER_ISLAND or not key:
            continue
        changed = {**raw, section: {**raw[section], key: "other"}}
        kinds = "other" if name == "model.quantization" else None
        other = SimpleNamespace(
            to_dict=lambda changed=changed: changed,
            kinds=kinds,
            adapter=config.adapter,
            island=config.island,
        )
        if differing(before, facts_of(other)) != [name]:
            missed.append((name, effect))
    assert missed == []
    assert sum(effect is not Effect.FREE for effect in effects.effects().values()) > 90


def test_all_islands_wait_for_the_last_one() -> None:
    assert for_others({"a": 10.0, "b": 12.5, "c": 12.0}) == {"a": 2.5, "b": 0.0, "c": 0.5}


def test_a_single_island_waits_for_no_other() -> None:
    assert for_others({"a": 10.0}) == {"a": 0.0}
