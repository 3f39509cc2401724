"""Sums one step's gradients over all replicas and gives the sums back to the stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from hetero_framework.engine import stage_api as api
from hetero_framework.engine.hosts import Host, ReplicasChanged
from hetero_framework.engine.state_snapshot import in_parts
from hetero_framework.errors import ProtocolError


class Summing:
    """Gives the gradients of one attempt to the group, and the sums to the stages. Both go on while
    other stages compute: nothing here waits. Raises the group's errors, and LinkLost.

    `trained` are the parameters of each stage by name, without a tied head, which the gradients
    name. `hosts` are by stage. `on_sums(stage, sums)` gets those of each stage, once.
    """

    def __init__(
        self,
        trained: Mapping[int, Sequence[str]],
        hosts: Mapping[int, Host],
        group: api.GradientSum,
        on_sums: Callable[[int, api.Tensors], None],
    ) -> None:
        self._names = {stage: dict.fromkeys(names) for stage, names in trained.items()}
        self._hosts = hosts
        self._group = group
        self._on_sums = on_sums
        self._given: set[int] = set()
        self._left = sorted(trained, reverse=True)  # the last stage is the first to be done
        self._loading: deque[tuple[int, int, api.StatePart]] = deque()  # stage, number, part
        self._ended: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether all stages have their sums."""
        return not (self._left or self._loading)

    @property
    def loading(self) -> Host | None:
        """Workers that have not confirmed the sums that they were sent."""
        return self._hosts[self._loading[0][0]] if self._loading else None

    def has_room(self) -> bool:
        """The links between islands carry nothing else meanwhile."""
        return True

    def take(self, part: api.GradientPart) -> None:
        """Of a stage that still computes; may be called in another thread. An error that ends the
        step is raised by `give`, not in the middle of a task."""
        try:
            self._group.give(part)
        except (ReplicasChanged, ProtocolError) as ended:
            self._ended = ended

    def give(self) -> bool:
        """Hand on the final gradients of stages; whether there were any."""
        if self._ended is not None:
            raise self._ended
        hosts = dict.fromkeys(self._hosts.values())
        parts = [part for host in hosts for part in host.gradients()]
        for part in parts:
            self._group.give(part)
            self._names[part.stage].update(dict.fromkeys(part.part.tensors))
            if part.part.last:
                self._given.add(part.stage)
            part.part.release()
        if parts and len(self._given) == len(self._names):
            self._group.end()
        return bool(parts)

    def load(self) -> bool:
        """Go on with having stages take over their sums; whether one has taken a part."""
        if not self._loading and not self._next_sums():
            return False
        stage, number, part = self._loading[0]
        taken = self._hosts[stage].load_state(stage, "gradients", number, part)
        if taken:
            self._loading.popleft()
        return taken

    def _next_sums(self) -> bool:
        """Queue the sums of one more stage for loading, if they are there."""
        for stage in self._left:
            sums = self._group.sums(tuple(self._names[stage])) if stage in self._given else None
            if sums is not None:
                self._left.remove(stage)
                self._on_sums(stage, sums)
                parts = in_parts((name, total, {}) for name, total in sums.items())
                self._loading.extend((stage, number, part) for number, part in enumerate(parts))
                return True
        return False
