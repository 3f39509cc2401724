"""The gradients of one step, summed over all islands: the same bits on each, under any plan.

Every island sends its gradients to every other island, and adds all gradients in the order of the
islands' names, in float32 or wider. The order of arrival does not matter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_framework.core import failpoints
from hetero_framework.engine.stage_api import GradientPart, Tensors
from hetero_framework.errors import ProtocolError
from hetero_framework.extras.islands.links import SAME_VERSION, Check, IslandSession


class SummedGradients:
    """A `GradientSum` of exchange `number` of a session. Raises MemberLost, also for a member whose
    gradients have another shape than most. When a step is begun again, nothing is sent twice."""

    def __init__(self, session: IslandSession, number: int) -> None:
        self._session = session
        self._number = number
        self._local: Tensors = {}
        self._losses: dict[str, list[float]] = {}
        self._began = time.monotonic()
        self._ended_at: float | None = None  # when the local gradients were complete

    def give(self, gradients: GradientPart) -> None:
        new = {
            name: gradient.clone()
            for name, gradient in gradients.part.tensors.items()
            if name not in self._local
        }
        self._local.update(new)
        failpoints.hit("island-gradients")
        if new:
            self._session.send(self._number, "gradients", new, last=False)

    def end(self) -> None:
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self._session.send(self._number, "gradients")

    @property
    def since_end_s(self) -> float:
        """Seconds since `end`, spent on transfers or on waiting for slower islands."""
        return 0.0 if self._ended_at is None else time.monotonic() - self._ended_at

    def seconds_per(self, samples: int) -> float:
        """Seconds per sample without waiting for others; 0 where there were no samples."""
        if self._ended_at is None or not samples:
            return 0.0
        return (self._ended_at - self._began) / samples

    def sums(self, names: Sequence[str]) -> Tensors | None:
        parts: list[tuple[str, Tensors, bool]] = []
        for member in self._session.members:
            if member == self._session.me:
                parts.append((member, self._local, True))
            else:
                received = self._session.received(self._number, "gradients", member)
                parts.append((member, received.tensors, received.is_whole))
        sums: Tensors = {}
        for name in names:
            if not all(whole or name in tensors for _, tensors, whole in parts):
                return None
            shares = [(member, tensors[name]) for member, tensors, _ in parts if name in tensors]
            if shares:
                sums[name] = self._sum(name, shares)
        return sums

    def losses(self, local: Sequence[float], check: Check) -> list[float]:
        """The losses of all islands' micro-batches."""
        values = torch.tensor(list(local), dtype=torch.float64)
        self._session.send(self._number, "losses", {"losses": values})
        self._losses = {self._session.me: list(local)}
        for name in self._session.others:
            received = self._session.receive(self._number, "losses", name, check).tensors
            with self._session.judging(name):
                if received.keys() != {"losses"} or received["losses"].dtype != torch.float64:
                    raise ProtocolError(f"island {name} sends no losses")
            self._losses[name] = received["losses"].flatten().tolist()
        return [loss for losses in self._losses.values() for loss in losses]

    def nonfinite(self) -> list[str]:
        """The members whose losses or gradients are not all finite."""
        return [name for name in self._session.members if not self._is_finite(name)]

    def _is_finite(self, name: str) -> bool:
        tensors = self._local
        if name != self._session.me:
            tensors = self._session.received(self._number, "gradients", name).tensors
        numbers = [torch.tensor(self._losses.get(name, [])), *tensors.values()]
        return all(bool(tensor.isfinite().all()) for tensor in numbers)

    def _sum(self, name: str, shares: Sequence[tuple[str, Tensor]]) -> Tensor:
        """The sum in the order of the members. The most frequent shape is right, in a tie the first
        member's: all islands blame the same member. Raises ProtocolError for this island."""
        kinds = {member: (tensor.shape, tensor.dtype) for member, tensor in shares}
        [(right, _)] = Counter(kinds.values()).most_common(1)
        for member in [member for member, kind in kinds.items() if kind != right]:
            wrong = f"island {member} sends a gradient of {name} of another shape or type"
            if member == self._session.me:
                raise ProtocolError(f"{wrong} than the others", hint=SAME_VERSION)
            with self._session.judging(member):
                raise ProtocolError(wrong)
        (_, first), *rest = shares
        total = first if not rest else first.to(torch.promote_types(first.dtype, torch.float32))
        for _, share in rest:
            total = total + share.to(total.dtype)
        return total.to(first.dtype)
