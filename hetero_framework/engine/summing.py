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

    `trained` has the parameter names of each stage; names of tied heads come with the gradients.
    `hosts` has the host of each stage. `on_sums(stage, sums)` gets the sums of each stage once.
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
        """The host that is to take over sums now; None if none is."""
        return self._hosts[self._loading[0][0]] if self._loading else None

    def has_room(self) -> bool:
        """Always True: the links between islands carry nothing else meanwhile."""
        return True

    def take(self, part: api.GradientPart) -> None:
        """Take gradients of a stage that still computes. May be called in another thread. An error
        that ends the step is raised by `give`, not in the middle of a task."""
        try:
            self._group.give(part)
        except (ReplicasChanged, ProtocolError) as ended:
            self._ended = ended

    def give(self) -> bool:
        """Hand the final gradients of stages to the group; return whether there were any."""
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
        """Have a stage take over the next part of its sums; return whether it took one."""
        if not self._loading and not self._next_sums():
            return False
        stage, number, part = self._loading[0]
        taken = self._hosts[stage].load_state(stage, "gradients", number, part)
        if taken:
            self._loading.popleft()
        return taken

    def _next_sums(self) -> bool:
        """Queue the sums of one more stage for loading, if they have come."""
        for stage in self._left:
            sums = self._group.sums(tuple(self._names[stage])) if stage in self._given else None
            if sums is not None:
                self._left.remove(stage)
                self._on_sums(stage, sums)
                parts = in_parts((name, total, {}) for name, total in sums.items())
                self._loading.extend((stage, number, part) for number, part in enumerate(parts))
                return True
        return False
