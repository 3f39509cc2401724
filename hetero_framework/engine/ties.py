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
from hetero_framework.errors import ProtocolError


class Ties:
    """The ties between a plan's stages. `targets` are by stage {target: source}, in the order of
    places, with the source on another stage; `trained` are the parameters of each stage by name."""

    def __init__(
        self, targets: Mapping[int, Mapping[str, str]], trained: Mapping[int, Sequence[str]]
    ) -> None:
        holder = {name: stage for stage, names in trained.items() for name in names}
        self.targets = {stage: tied for stage, tied in sorted(targets.items()) if tied}
        self._holder = {s: holder[s] for tied in self.targets.values() for s in tied.values()}

    @property
    def holders(self) -> list[int]:
        """The stages with a source of targets on others, the last one first."""
        return sorted(set(self._holder.values()), reverse=True)

    def sources(self, stage: int) -> list[str]:
        """The weights of a stage of which others have targets."""
        return [source for source, holder in self._holder.items() if holder == stage]

    def followers(self, sources: Iterable[str]) -> dict[int, list[str]]:
        """The stages with targets of these weights, and their sources."""
        known = set(sources)
        wanted = {k: [*dict.fromkeys(tied.values())] for k, tied in self.targets.items()}
        followed = {k: [name for name in names if name in known] for k, names in wanted.items()}
        return {stage: names for stage, names in followed.items() if names}


class TiedGradients:
    """The gradients of targets that have come in one attempt."""

    def __init__(self, ties: Ties) -> None:
        self._ties = ties
        self._waiting = set(ties.targets)
        self._gradients: dict[str, api.Tensors] = {}  # by source, those of its targets

    @property
    def waiting(self) -> list[int]:
        """The stages whose gradients are missing."""
        return sorted(self._waiting)

    def take(self, stage: int, gradients: api.Tensors, *, last: bool) -> None:
        """Take a part of a stage's gradients; those of targets are copied."""
        for name, source in self._ties.targets.get(stage, {}).items():
            if name in gradients:
                self._gradients.setdefault(source, {})[name] = gradients[name].clone()
        if last:
            self._waiting.discard(stage)

    def sums(self, holder: int) -> api.Tensors:
        """Once all have come: the sums over the targets elsewhere of a stage's weights, but for
        weights whose targets have no gradient."""
        return {s: self._sum(s) for s in self._ties.sources(holder) if s in self._gradients}

    def _sum(self, source: str) -> Tensor:
        grads = self._gradients[source]
        if len({gradient.shape for gradient in grads.values()}) > 1:
            raise ProtocolError(f"the gradients of {', '.join(grads)} have different shapes")
        places = [name for tied in self._ties.targets.values() for name in tied if name in grads]
        return functools.reduce(operator.add, [grads[name] for name in reversed(places)])
