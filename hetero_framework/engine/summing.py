"""One step's gradients on their way to the sums of all replicas, and back into the stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetero_framework.engine import stage_api as api
from hetero_framework.engine.hosts import Host


class Summing:
    """What of one attempt has been given to the group, and which stages have their sums.

    `trained` are the parameters of each stage by name. A tied head, which is none of them, is known
    from what is given.
    """

    def __init__(self, trained: Mapping[int, Sequence[str]]) -> None:
        self._names = {stage: dict.fromkeys(names) for stage, names in trained.items()}
        self._given: set[int] = set()
        self._left = sorted(trained, reverse=True)  # the last stage is the first to be done

    @property
    def waiting(self) -> tuple[int, ...]:
        """The stages that do not have their sums yet."""
        return tuple(self._left)

    def hand_over(self, hosts: Iterable[Host], group: api.GradientSum) -> bool:
        """Give the group what stages are done with; whether there was anything."""
        found = [part for host in hosts for part in host.gradients()]
        for part in found:
            group.give(part)
            self._names[part.stage].update(dict.fromkeys(part.part.tensors))
            if part.part.last:
                self._given.add(part.stage)
            part.part.release()
        if found and len(self._given) == len(self._names):
            group.end()
        return bool(found)

    def next_sums(self, group: api.GradientSum) -> tuple[int, api.Tensors] | None:
        """A stage and all its sums, once; None while none has come."""
        for stage in self._left:
            sums = group.sums(tuple(self._names[stage])) if stage in self._given else None
            if sums is not None:
                self._left.remove(stage)
                return stage, sums
        return None
