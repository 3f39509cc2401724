"""Gradients of one attempt on their way to the sums of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hetero_framework.core.messages import LoadKind
from hetero_framework.engine import state_snapshot
from hetero_framework.engine.hosts import Host, ReplicasChanged
from hetero_framework.engine.stage_api import GradientPart, StatePart, Tensors
from hetero_framework.engine.summing import Summing
from hetero_framework.errors import ProtocolError

ONE = torch.ones(1)


class Holder(Host):
    """A host that gives what is put into `parts`, once, and takes sums as soon as it `confirms`."""

    def __init__(self) -> None:
        self.parts: list[GradientPart] = []
        self.loaded: list[tuple[int, list[str]]] = []
        self.confirms = True

    def gradients(self) -> list[GradientPart]:
        parts, self.parts = self.parts, []
        return parts

    def load_state(self, stage: int, kind: LoadKind, number: int, part: StatePart) -> bool:
        assert kind == "gradients"
        if self.confirms:
            self.loaded.append((stage, list(part.tensors)))
        return self.confirms


class Group:
    """Sums are there for the names in `known`."""

    def __init__(self, *known: str) -> None:
        self.known = set(known)
        self.given: list[str] = []
        self.asked: list[tuple[str, ...]] = []
        self.ended = 0
        self.fails: Exception | None = None

    def give(self, found: GradientPart) -> None:
        if self.fails is not None:
            raise self.fails
        self.given += found.part.tensors

    def end(self) -> None:
        self.ended += 1

    def sums(self, names: Sequence[str]) -> Tensors | None:
        self.asked.append(tuple(names))
        return dict.fromkeys(names, ONE) if self.known >= set(names) else None


def part(stage: int, *names: str, number: int = 0, last: bool = True, **more: Any) -> GradientPart:
    return GradientPart(stage, number, StatePart(dict.fromkeys(names, ONE), last=last, **more))


class Case:
    """One host with all stages."""

    def __init__(self, trained: dict[int, list[str]], *known: str) -> None:
        self.host, self.group = Holder(), Group(*known)
        self.found: dict[int, Tensors] = {}
        hosts = dict.fromkeys(trained, self.host)
        self.summing = Summing(trained, hosts, self.group, self.found.__setitem__)

    def give(self, *parts: GradientPart) -> bool:
        self.host.parts += parts
        return self.summing.give()

    def load_all(self) -> list[tuple[int, list[str]]]:
        while self.summing.load():
            pass
        return self.host.loaded


def test_the_group_is_told_the_end_once_all_stages_have_given() -> None:
    case = Case({0: ["a"], 1: ["b"]})
    assert case.give(part(1, "b"))
    assert not case.give()
    assert case.group.ended == 0
    assert case.give(part(0, last=False))
    assert case.group.ended == 0
    assert case.give(part(0, "a", number=1))
    assert (case.group.given, case.group.ended) == (["b", "a"], 1)


def test_sums_of_a_stage_come_once_the_last_stage_first() -> None:
    case = Case({0: ["a"], 1: ["b", "c"], 2: []}, "a", "b", "c")
    case.give(part(0, "a"), part(1, "b", "c"), part(2))
    assert not case.summing.is_done
    assert case.load_all() == [(2, []), (1, ["b", "c"]), (0, ["a"])]
    assert case.found == {2: {}, 1: {"b": ONE, "c": ONE}, 0: {"a": ONE}}
    assert case.summing.is_done
    assert not case.summing.load()


def test_sums_of_a_ready_stage_do_not_wait_for_a_later_stage() -> None:
    case = Case({0: ["a"], 1: ["b"]}, "a")
    case.give(part(0, "a"), part(1, "b"))
    assert case.load_all() == [(0, ["a"])]
    assert not case.summing.is_done
    case.group.known.add("b")
    assert case.load_all() == [(0, ["a"]), (1, ["b"])]


def test_sums_are_taken_over_when_the_host_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_snapshot, "STATE_PART_BYTES", 4)
    case = Case({0: ["a", "b"]}, "a", "b")
    case.give(part(0, "a", "b"))
    assert case.summing.loading is None
    case.host.confirms = False
    for _ in range(2):
        assert not case.summing.load()  # it returns at once
        assert case.summing.loading is case.host
    assert case.group.asked == [("a", "b")]
    case.host.confirms = True
    assert case.summing.load()
    assert not case.summing.is_done
    assert case.load_all() == [(0, ["a"]), (0, ["b"])]
    assert case.summing.is_done


def test_sums_are_requested_after_all_gradients_of_a_stage() -> None:
    case = Case({0: ["a", "b"]}, "a", "b")
    case.summing.take(part(0, "a", last=False))
    case.give(part(0, last=False))
    assert not case.summing.load()
    assert case.group.asked == []
    case.give(part(0, "b"))
    assert case.group.given == ["a", "b"]
    assert case.load_all() == [(0, ["a", "b"])]


@pytest.mark.parametrize("ended", [ReplicasChanged("b is gone"), ProtocolError("not so")])
def test_an_error_within_a_task_is_raised_after_the_task(ended: Exception) -> None:
    case = Case({0: ["a", "b"]})
    case.group.fails = ended
    case.summing.take(part(0, "a", last=False))
    case.group.fails = None
    with pytest.raises(type(ended), match=str(ended)):
        case.summing.give()


def test_a_tied_head_is_summed_at_a_stage_that_does_not_train_it() -> None:
    case = Case({0: ["embed"], 1: []}, "embed", "head")
    case.give(part(0, "embed"), part(1, "head"))
    assert case.load_all()[0] == (1, ["head"])


def test_parameters_without_gradient_here_are_requested_too() -> None:
    """Another replica may have one."""
    case = Case({0: ["a", "b"]}, "a", "b")
    case.give(part(0, "b"))
    case.summing.load()
    assert case.group.asked == [("a", "b")]


def test_receive_buffers_are_given_back() -> None:
    released: list[int] = []
    case = Case({0: ["a"]})
    case.give(part(0, "a", release=lambda: released.append(1)))
    assert released == [1]
