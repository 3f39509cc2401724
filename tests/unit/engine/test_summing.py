"""Gradients of one attempt on their way to the sums of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetero_framework.engine.stage_api import GradientPart, StatePart, Tensors
from hetero_framework.engine.summing import Summing

ONE = torch.ones(1)


class Gives:
    """A host that gives these parts, once."""

    def __init__(self, *parts: GradientPart) -> None:
        self._parts = list(parts)

    def gradients(self) -> list[GradientPart]:
        parts, self._parts = self._parts, []
        return parts


class Group:
    """Sums are there for the names in `known`."""

    def __init__(self, *known: str) -> None:
        self.known = set(known)
        self.given: list[str] = []
        self.asked: list[tuple[str, ...]] = []
        self.ended = 0

    def give(self, found: GradientPart) -> None:
        self.given += found.part.tensors

    def end(self) -> None:
        self.ended += 1

    def sums(self, names: Sequence[str]) -> Tensors | None:
        self.asked.append(tuple(names))
        return dict.fromkeys(names, ONE) if self.known >= set(names) else None


def part(stage: int, *names: str, number: int = 0, last: bool = True, **more: Any) -> GradientPart:
    return GradientPart(stage, number, StatePart(dict.fromkeys(names, ONE), last=last, **more))


def test_the_group_is_told_the_end_once_all_stages_have_given() -> None:
    group, summing = Group(), Summing({0: ["a"], 1: ["b"]})
    assert summing.hand_over([Gives(), Gives(part(1, "b"))], group)
    assert not summing.hand_over([Gives(), Gives()], group)
    assert group.ended == 0
    assert summing.hand_over([Gives(part(0, last=False)), Gives()], group)
    assert group.ended == 0
    assert summing.hand_over([Gives(part(0, "a", number=1)), Gives()], group)
    assert (group.given, group.ended) == (["b", "a"], 1)


def test_sums_of_a_stage_come_once_the_last_stage_first() -> None:
    group, summing = Group("a", "b", "c"), Summing({0: ["a"], 1: ["b", "c"], 2: []})
    summing.hand_over([Gives(part(0, "a"), part(1, "b", "c"), part(2))], group)
    found = [summing.next_sums(group) for _ in range(3)]
    assert found == [(2, {}), (1, {"b": ONE, "c": ONE}), (0, {"a": ONE})]
    assert summing.waiting == ()
    assert summing.next_sums(group) is None


def test_a_stage_that_is_ready_does_not_wait_for_one_behind_it() -> None:
    group, summing = Group("a"), Summing({0: ["a"], 1: ["b"]})
    summing.hand_over([Gives(part(0, "a"), part(1, "b"))], group)
    assert summing.next_sums(group) == (0, {"a": ONE})
    assert summing.waiting == (1,)
    group.known.add("b")
    assert summing.next_sums(group) == (1, {"b": ONE})


def test_a_stage_that_has_not_given_all_of_its_own_is_not_asked_for() -> None:
    group, summing = Group("a", "b"), Summing({0: ["a", "b"]})
    summing.hand_over([Gives(part(0, "a", last=False))], group)
    assert summing.next_sums(group) is None
    assert group.asked == []


def test_a_tied_head_is_summed_though_it_is_not_trained_by_its_stage() -> None:
    group, summing = Group("embed", "head"), Summing({0: ["embed"], 1: []})
    summing.hand_over([Gives(part(0, "embed"), part(1, "head"))], group)
    assert summing.next_sums(group) == (1, {"head": ONE})


def test_what_has_no_gradient_here_is_asked_for_all_the_same() -> None:
    """Another replica may have one."""
    group, summing = Group("a", "b"), Summing({0: ["a", "b"]})
    summing.hand_over([Gives(part(0, "b"))], group)
    summing.next_sums(group)
    assert group.asked == [("a", "b")]


def test_receive_buffers_are_given_back() -> None:
    released: list[int] = []
    group, summing = Group(), Summing({0: ["a"]})
    summing.hand_over([Gives(part(0, "a", release=lambda: released.append(1)))], group)
    assert released == [1]
