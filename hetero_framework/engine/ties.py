"""Tied weights in several stages: summing their gradients and distributing the new weight.

A tied weight's first place in the model is its source: the stage there makes the optimizer's step.
Later places are its targets: their stages send gradients and receive the new weight. The sum begins
with the last place and goes one place back at a time, as backward passes go through a model, so
that it is the same under any cut.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from hetero_framework.engine import stage_api as api
from hetero_framework.errors import ProtocolError


class Ties:
    """The ties between a plan's stages. `targets[stage]` is {target: source} in order of places;
    the sources are on other stages. `trained` has the parameter names of each stage."""

    def __init__(
        self, targets: Mapping[int, Mapping[str, str]], trained: Mapping[int, Sequence[str]]
    ) -> None:
        holder = {name: stage for stage, names in trained.items() for name in names}
        self.targets = {stage: tied for stage, tied in sorted(targets.items()) if tied}
        self._holder = {s: holder[s] for tied in self.targets.values() for s in tied.values()}

    @property
    def holders(self) -> list[int]:
        """The stages whose weights have targets on other stages, the last stage first."""
        return sorted(set(self._holder.values()), reverse=True)

    def sources(self, stage: int) -> list[str]:
        """The weights of a stage that have targets on other stages."""
        return [source for source, holder in self._holder.items() if holder == stage]

    def followers(self, sources: Iterable[str]) -> dict[int, list[str]]:
        """For each stage with targets of these weights, the sources of its targets."""
        known = set(sources)
        wanted = {k: [*dict.fromkeys(tied.values())] for k, tied in self.targets.items()}
        followed = {k: [name for name in names if name in known] for k, names in wanted.items()}
        return {stage: names for stage, names in followed.items() if names}


class TiedGradients:
    """The gradients of targets that have come in one attempt."""

    def __init__(self, ties: Ties) -> None:
        self._ties = ties
        self._waiting = set(ties.targets)
        self._gradients: dict[str, api.Tensors] = {}  # [source][target]

    @property
    def waiting(self) -> list[int]:
        """The stages whose gradients are missing."""
        return sorted(self._waiting)

    def take(self, stage: int, gradients: api.Tensors, *, last: bool) -> None:
        """Take a part of a stage's gradients: gradients of targets are copied."""
        for name, source in self._ties.targets.get(stage, {}).items():
            if name in gradients:
                self._gradients.setdefault(source, {})[name] = gradients[name].clone()
        if last:
            self._waiting.discard(stage)

    def sums(self, holder: int) -> api.Tensors:
        """For each tied weight of a stage, the sum of its targets' gradients on other stages, once
        all have come. Leaves out weights whose targets have no gradient."""
        return {s: self._sum(s) for s in self._ties.sources(holder) if s in self._gradients}

    def _sum(self, source: str) -> Tensor:
        grads = self._gradients[source]
        if len({gradient.shape for gradient in grads.values()}) > 1:
            raise ProtocolError(f"the gradients of {', '.join(grads)} have different shapes")
        places = [name for tied in self._ties.targets.values() for name in tied if name in grads]
        return functools.reduce(operator.add, [grads[name] for name in reversed(places)])
