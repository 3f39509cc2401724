"""Checks of arriving side tensors: the shapes, types and gradients that a stage expects.

A peer's tensors pass these checks before anything is computed with them. Shapes and types come from
running the part that makes a side tensor on tensors without data; whether a gradient is wanted
follows from which weights are trained.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import torch

from hetero_framework.config import TrainingConfig
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.cut.side import Bundle, Form, described, shown_form
from hetero_framework.models.library import LIBRARY_ERRORS, briefly
from hetero_framework.models.sizing.footprint import Setting, bundle_at

_log = logging.getLogger(__name__)

# (rows, tokens) at which forms are counted, two numbers of each. Tokens are fewer and more than in
# any data, so that growth that stops (the k best of many tokens) shows. The last confirms the rule.
_PROBES = ((3, 2), (5, 2), (3, 1 << 21), (5, 1 << 21), (4, 37))
_COUNTED = 3  # sizes that are counted one by one; data with rows of one length have no more


class SideTensorChecks:
    """Checks the side tensors that enter one shard, of micro-batches of any size; `trained` tells
    for each side tensor whether it wants a gradient in training."""

    def __init__(self, shard: Shard, training: TrainingConfig) -> None:
        self._sides, self._block = shard.entering, shard.range.start
        plan = shard.adapter.plan if shard.adapter is not None else None
        self.trained = tuple(
            bool(side.weights) if plan is None else plan.trains(side.weights)
            for side in self._sides
        )
        # LoRA's update has the type of the output that it is added to.
        plan = plan if plan is not None and plan.saved_modules else None
        half = torch.float16 if training.fp16 else None
        self.autocast = autocast = torch.bfloat16 if training.bf16 else half
        """The type in which autocast computes; None: it is off."""
        self._setting = Setting(
            shard.config, plan, objective_of(training), shard.dtype, autocast, 0, 0
        )
        # Which operations autocast leaves in float32 is the device's choice; over a quantised base
        # it is the kernel's.
        mixed = autocast is not None or shard.is_quantized
        self._floats = {torch.float32, autocast, shard.dtype} if mixed else set()
        self._forms: dict[tuple[int, int], Sequence[Form] | None] = {}

    def problem(
        self, sides: Bundle, rows: int, tokens: int, *, train: bool, exact: bool = True
    ) -> str | None:
        """The problem with the side tensors of a micro-batch of `tokens` tokens per row; None if
        there is none. Their number must be right. Unless `exact`, of shapes only the number of axes
        is checked."""
        if not sides:
            return None
        forms = self._expected(rows, tokens) if exact else None
        for place, (tensor, side) in enumerate(zip(sides, self._sides, strict=True)):
            wants = train and self.trained[place]
            if forms is None:
                expected = shown_form(side.shape, side.dtype, wants) + " in a tiny copy"
                alike = tensor.dim() == len(side.shape)
                alike &= tensor.is_floating_point() == side.dtype.is_floating_point
            else:
                shape, dtype, _ = forms[place]
                expected = shown_form(shape, dtype, wants)
                types = self._floats | {dtype} if dtype.is_floating_point else {dtype}
                alike = tensor.shape == shape and tensor.dtype in types
            if not alike or tensor.requires_grad != wants:
                return f"{side.name} is {described(tensor)}, expected {expected}"
        return None

    def _expected(self, rows: int, tokens: int) -> Sequence[Form] | None:
        """The forms; None where the parts that make the tensors do not run without numbers."""
        if (rows, tokens) not in self._forms:
            many = len(self._forms) >= _COUNTED
            if many and (rules := self._rules) is not None:
                return [(tuple(rule(rows, tokens) for rule in axes), t, w) for axes, t, w in rules]
            self._forms[rows, tokens] = self._counted(rows, tokens)
        return self._forms[rows, tokens]

    @cached_property
    def _rules(self) -> list[tuple[list[_Axis], torch.dtype, bool]] | None:
        """The forms for any size of micro-batch, where a few sizes show their rule. Counting takes
        a tenth of a second and more, and every micro-batch may have another length."""
        counted = [self._counted(rows, tokens) for rows, tokens in _PROBES]
        if any(forms is None for forms in counted):
            return None
        rules = []
        for alike in zip(*(forms for forms in counted if forms is not None), strict=True):
            shapes, dtypes = [shape for shape, _, _ in alike], {dtype for _, dtype, _ in alike}
            if len(dtypes) > 1 or len({len(shape) for shape in shapes}) > 1:
                return None
            axes = [_axis(sizes) for sizes in zip(*shapes, strict=True)]
            rules.append(([axis for axis in axes if axis is not None], *alike[0][1:]))
            if None in axes:
                return None
        return rules

    def _counted(self, rows: int, tokens: int) -> Sequence[Form] | None:
        setting = replace(self._setting, rows=rows, tokens=tokens)
        try:
            return bundle_at(setting, self._block)[1:]
        except LIBRARY_ERRORS as error:
            _log.debug("no shapes of what enters layer %d: %s", self._block, briefly(error))
            return None


@dataclass(frozen=True)
class _Axis:
    """A size that is a sum of these multiples of 1, rows, tokens, and both."""

    one: Fraction
    rows: Fraction
    tokens: Fraction
    both: Fraction

    def __call__(self, rows: int, tokens: int) -> int:
        size = self.one + self.rows * rows + self.tokens * tokens + self.both * rows * tokens
        return int(size) if size.denominator == 1 else -1


def _axis(sizes: Sequence[int]) -> _Axis | None:
    """The rule that the sizes at the `_PROBES` follow; None for another rule (a minimum, say)."""
    (r, t), (r_more, _), (_, t_more) = _PROBES[:3]
    here, more_rows, more_tokens, more_of_both = sizes[:4]
    each = (r_more - r) * (t_more - t)
    both = Fraction(more_of_both - more_rows - more_tokens + here, each)
    by_rows = Fraction(more_rows - here, r_more - r) - both * t
    by_tokens = Fraction(more_tokens - here, t_more - t) - both * r
    axis = _Axis(here - by_rows * r - by_tokens * t - both * r * t, by_rows, by_tokens, both)
    fits = all(axis(*probe) == size for probe, size in zip(_PROBES, sizes, strict=True))
    return axis if fits else None
