"""Hands on final gradients before the backward pass ends, beginning with the last layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from hetero_framework.engine.stage_api import GradientPart, StatePart, TakeEarly, Tensors
from hetero_framework.models.cut.shard import weakly

EARLY_PART_BYTES = 1 << 18
"""Least bytes of a part: each part costs a frame, and a wait for the device."""


class EarlyGradients:
    """Hands on final gradients of one stage. `to_host` copies tensors into CPU memory."""

    def __init__(
        self,
        stage: int,
        parameters: Iterable[tuple[str, Parameter]],
        to_host: Callable[[Sequence[Tensor]], list[Tensor]],
    ) -> None:
        self._stage = stage
        self._parameters = list(parameters)
        self._to_host = to_host
        self._hooks: list[Any] = []  # none before the first step with a taker
        self._take: TakeEarly | None = None
        self._late: frozenset[str] | None = None  # None: outside of `last_backward`
        self._waiting: Tensors = {}
        self.given: set[str] = set()
        """The parameters whose gradients of this step have been taken."""

    def begin(self, take: TakeEarly | None) -> None:
        """Begin a step. `take` (None: no taker) gets gradients that become final in
        `last_backward`. They may share the parameter's gradient memory until the step's end."""
        self._take, self._late = take, None
        self._waiting, self.given = {}, set()
        if take is not None and not self._hooks:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(weakly(self._note_final, name))
                for name, parameter in self._parameters
            ]

    @contextmanager
    def last_backward(self, late: Iterable[str] = ()) -> Iterator[None]:
        """Within the block a gradient is final once added to, unless its parameter is `late`.
        Gradients that fill no part, or find no room, are not given early."""
        self._late = frozenset(late)
        try:
            yield
        finally:
            self._late, self._waiting = None, {}

    def close(self) -> None:
        """Remove the hooks and forget the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._parameters, self._hooks, self._waiting = [], [], {}

    def _note_final(self, name: str, parameter: Tensor) -> None:
        assert name not in self.given, f"the gradient of {name} grows after others have it"
        if self._take is None or self._late is None or name in self._late:
            return
        assert parameter.grad is not None
        self._waiting[name] = parameter.grad
        nbytes = sum(gradient.nbytes for gradient in self._waiting.values())
        if nbytes < EARLY_PART_BYTES or not self._take.has_room():
            return
        gradients, self._waiting = self._waiting, {}
        self.given.update(gradients)
        here = self._to_host(list(gradients.values()))
        part = StatePart(dict(zip(gradients, here, strict=True)))
        self._take.take(GradientPart(self._stage, 0, part))
