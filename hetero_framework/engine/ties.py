"""Tied weights in several stages: summing their gradients and distributing the new weight.

A tied weight's first place in the model is its source: that stage makes the optimizer's step.
Stages with later places of it, the targets, send their gradients and receive the new weight. The
sum begins with the last place and goes one place back at a time, as backward passes go through a
model, so that it is the same under any cut.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from hetero_framework.engine import stage_api as api


class Ties:
    """Of the stages of a plan. `targets` are by stage {target: source} in the order of places, of
    those whose source is on another stage; `trained` are the parameters of each stage by name."""

    def __init__(
        self, targets: Mapping[int, Mapping[str, str]], trained: Mapping[int, Sequence[str]]
    ) -> None:
        holder = {name: stage for stage, names in trained.items() for name in names}
        self.targets = {stage: own for stage, own in sorted(targets.items()) if own}
        self._holder = {s: holder[s] for own in self.targets.values() for s in own.values()}

    @property
    def holders(self) -> list[int]:
        """The stages that others have targets of, the last one first."""
        return sorted(set(self._holder.values()), reverse=True)

    def sources(self, stage: int) -> list[str]:
        """Of the weights that a stage holds, those that others have targets of."""
        return [source for source, holder in self._holder.items() if holder == stage]

    def followers(self, sources: Iterable[str]) -> dict[int, list[str]]:
        """The stages that have targets of some weights, and of which."""
        known = set(sources)
        wanted = {k: [*dict.fromkeys(own.values())] for k, own in self.targets.items()}
        found = {k: [name for name in own if name in known] for k, own in wanted.items()}
        return {stage: own for stage, own in found.items() if own}


class TiedGradients:
    """Of one attempt: what has come of the targets' gradients."""

    def __init__(self, ties: Ties) -> None:
        self._ties = ties
        self._waiting = set(ties.targets)
        self._found: dict[str, api.Tensors] = {}  # by source, those of its targets

    @property
    def waiting(self) -> list[int]:
        """The stages that have not given theirs."""
        return sorted(self._waiting)

    def take(self, stage: int, gradients: api.Tensors, *, last: bool) -> None:
        """A part of what a stage gave; what is needed of it is copied."""
        for name, source in self._ties.targets.get(stage, {}).items():
            if name in gradients:
                self._found.setdefault(source, {})[name] = gradients[name].clone()
        if last:
            self._waiting.discard(stage)

    def sums(self, holder: int) -> api.Tensors:
        """Once nobody is waited for: what all targets elsewhere of a stage's weights have together;
        a weight is left out that none has a gradient of."""
        return {s: self._sum(s) for s in self._ties.sources(holder) if s in self._found}

    def _sum(self, source: str) -> Tensor:
        found = self._found[source]
        places = [name for own in self._ties.targets.values() for name in own if name in found]
        return functools.reduce(operator.add, [found[name] for name in reversed(places)])
