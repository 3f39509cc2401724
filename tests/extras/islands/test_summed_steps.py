"""Settings that all islands have to share, the time that they wait for slower ones, and sums of
gradients: the same bits on all islands, in any order of arrival."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hetero_framework.config import Config, effects
from hetero_framework.config.section import Effect, Scope
from hetero_framework.engine.stage_api import GradientPart, StatePart, Tensors
from hetero_framework.errors import ProtocolError
from hetero_framework.extras.islands import summed_steps
from hetero_framework.extras.islands.group import differing
from hetero_framework.extras.islands.links import MemberLost, Received
from hetero_framework.extras.islands.summed_steps import SummedGradients, SummedSteps

NUMBER = 5
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
def same_data(monkeypatch):
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
        ({"training": {"max_skipped_steps": 9}}, "training.max_skipped_steps"),
        ({"adapter": {"r": 8}}, "adapter.r"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype"),
        ({"wire": {"gradients": "int8"}}, "wire.gradients"),
        ({"island": {"sync_steps": 4}}, "island.sync_steps"),
    ],
)
def test_another_setting_is_named(sections, key):
    if key.startswith("wire"):
        other = facts_of(Config.from_dict({**BASE, **sections}))
    else:
        other = facts(**sections)
    assert differing(facts(), other) == [key]


def test_other_data_are_named():
    config = Config.from_dict(BASE)
    assert differing(facts_of(config, "some"), facts_of(config, "others")) == ["data"]


def test_machines_and_paths_may_differ():
    other = facts(
        model={"name_or_path": "elsewhere", "attn_implementation": "eager"},
        training={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        island={"name": "b"},
        data={"train": "q.jsonl"},
    )
    assert differing(facts(), other) == []


def test_every_setting_that_changes_the_result_is_among_the_facts():
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


class Beach:
    """What all islands of a session have said, in place of links."""

    def __init__(self, members: str) -> None:
        self.members = tuple(members)
        self.said: dict[tuple[str, str], Received] = {}
        self.sent = 0


class Side:
    """One island's session on it."""

    def __init__(self, beach: Beach, me: str) -> None:
        self._beach, self.me, self.members = beach, me, beach.members
        self.others = tuple(name for name in self.members if name != me)

    def send(
        self,
        number: int,
        kind: str,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        last: bool = True,
    ) -> None:
        assert number == NUMBER
        found = self._beach.said.setdefault((self.me, kind), Received())
        found.tensors.update(tensors or {})
        found.is_whole = last
        self._beach.sent += len(tensors or {})

    def received(self, number: int, kind: str, name: str) -> Received:
        return self._beach.said.get((name, kind), Received())

    def receive(self, number: int, kind: str, name: str, check: object) -> Received:
        return self.received(number, kind, name)

    @contextmanager
    def judging(self, name: str) -> Iterator[None]:
        try:
            yield
        except ProtocolError as wrong:
            raise MemberLost(name, wrong.message) from wrong


def sums_on(members: str) -> tuple[Beach, dict[str, SummedGradients]]:
    beach = Beach(members)
    return beach, {name: SummedGradients(Side(beach, name), NUMBER) for name in members}  # type: ignore[arg-type]


def part(tensors: Tensors, stage: int = 0, last: bool = True) -> GradientPart:
    return GradientPart(stage, 0, StatePart(tensors, last=last))


def give_all(islands: Mapping[str, SummedGradients], parts: Mapping[str, Tensors]) -> None:
    for name, tensors in parts.items():
        islands[name].give(part(tensors))
        islands[name].end()


def summed(island: SummedGradients, *names: str) -> dict[str, list[float]] | None:
    found = island.sums(list(names))
    return found and {name: tensor.tolist() for name, tensor in found.items()}


def of(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((2,), value, dtype=dtype)


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_gradients_are_added_by_name_in_any_arrival_order(order):
    """In float32 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    _, islands = sums_on("abc")
    values = {"a": 1e8, "b": 1.0, "c": -1e8}
    give_all(islands, {name: {"x": of(values[name])} for name in order})
    for island in islands.values():
        assert summed(island, "x") == {"x": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("values", "dtype", "total"),
    [
        ([2048.0, 1.0, 1.0], torch.float16, 2050.0),  # there 2048 + 1 is 2048
        ([1 + 1e-12] * 2, torch.float64, 2 + 2e-12),
    ],
)
def test_sums_of_at_least_float32_are_rounded_once(values, dtype, total):
    _, islands = sums_on("abc"[: len(values)])
    give_all(islands, {k: {"x": of(v, dtype)} for k, v in zip(islands, values, strict=True)})
    for island in islands.values():
        found = island.sums(["x"])["x"]
        assert (found.dtype, found.tolist()) == (dtype, [total] * 2)


def test_a_single_island_keeps_its_own_bits():
    _, islands = sums_on("a")
    own = torch.randn(5).to(torch.bfloat16)
    give_all(islands, {"a": {"x": own}})
    assert torch.equal(islands["a"].sums(["x"])["x"], own)


def test_gradients_are_summed_over_the_islands_that_have_them():
    _, islands = sums_on("abc")
    give_all(islands, {"a": {"x": of(1)}, "b": {"x": of(2), "y": of(3)}, "c": {}})
    for island in islands.values():
        assert summed(island, "x", "y", "z") == {"x": [3, 3], "y": [3, 3]}


def test_sums_wait_for_the_gradients_of_all_islands():
    _, islands = sums_on("ab")
    islands["a"].give(part({"x": of(1), "y": of(1)}))
    assert summed(islands["a"], "x") is None
    islands["b"].give(part({"x": of(2)}))
    assert summed(islands["a"], "x", "y") is None  # y may come
    assert summed(islands["a"], "x") == {"x": [3, 3]}
    islands["b"].end()
    assert summed(islands["a"], "x", "y") == {"x": [3, 3], "y": [1, 1]}


def test_a_gradient_given_twice_is_sent_once_and_the_first_counts():
    beach, islands = sums_on("ab")
    first = of(1)
    islands["a"].give(part({"x": first}))
    first.fill_(99)  # the stage's buffer is used again
    islands["a"].give(part({"x": of(7), "y": of(2)}))
    islands["a"].end()
    islands["a"].end()
    give_all(islands, {"b": {"x": of(1), "y": of(1)}})
    assert beach.sent == 4
    for island in islands.values():
        assert summed(island, "x", "y") == {"x": [2, 2], "y": [3, 3]}


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.float16)])
@pytest.mark.parametrize("members", ["cab", "bc", "abcd"])
def test_the_island_with_another_gradient_shape_is_blamed_by_all(other, members):
    """Of two it is the second by name. Also by one that has none itself."""
    _, islands = sums_on("".join(sorted(members)))
    odd = max(members[:3])
    given = {name: {"x": other if name == odd else of(1)} for name in members if name != "d"}
    give_all(islands, {name: given.get(name, {}) for name in members})
    for name, island in islands.items():
        error = ProtocolError if name == odd else MemberLost
        with pytest.raises(error, match=f"island {odd} sends a gradient of x of another shape"):
            island.sums(["x"])


def test_losses_are_those_of_all_islands():
    beach, islands = sums_on("ab")
    for name, own in (("a", [0.5]), ("b", [0.25, 1 / 3])):
        Side(beach, name).send(NUMBER, "losses", {"losses": torch.tensor(own, dtype=torch.float64)})
    assert sorted(islands["b"].losses([0.25, 1 / 3], lambda: None)) == [0.25, 1 / 3, 0.5]


@pytest.mark.parametrize(
    "said", [{}, {"losses": torch.ones(1)}, {"x": torch.ones(1, dtype=torch.float64)}]
)
def test_invalid_losses_are_refused(said):
    beach, islands = sums_on("ab")
    Side(beach, "b").send(NUMBER, "losses", said)
    with pytest.raises(MemberLost, match="island b sends no losses"):
        islands["a"].losses([1.0], lambda: None)


def test_the_islands_with_values_that_are_not_finite_are_known():
    _, islands = sums_on("abc")
    give_all(islands, {"a": {"w": of(1)}, "b": {"w": of(math.nan)}, "c": {"w": of(2)}})
    for name, loss in {"a": 1.0, "b": 2.0, "c": -math.inf}.items():
        islands[name]._session.send(NUMBER, "losses", {"losses": of(loss, torch.float64)})
    for name in "abc":
        islands[name].losses([-math.inf if name == "c" else 1.0], lambda: None)
        assert islands[name].nonfinite() == ["b", "c"]
