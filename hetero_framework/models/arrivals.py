"""What a stage expects to arrive for a micro-batch beside the hidden state.

What a peer sends is held against this before anything is computed with it. Shapes and types are
those of the part that makes a side tensor, run on tensors without data; whether a gradient is
wanted follows from what is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from hetero_framework.config import TrainingConfig
from hetero_framework.models.footprint import Form, Setting, bundle_at
from hetero_framework.models.introspect import LIBRARY_ERRORS, one_line
from hetero_framework.models.objective import objective_of
from hetero_framework.models.shard import Shard
from hetero_framework.models.side import Bundle, Side, shown, shown_form

_log = logging.getLogger(__name__)


class Arrivals:
    """The side tensors that enter one shard, of micro-batches of any size; `trained` tells for
    each whether it wants a gradient in training."""

    def __init__(self, shard: Shard, training: TrainingConfig) -> None:
        self._sides, self._block = shard.entering, shard.range.start
        self.trained = tuple(_is_trained(shard, side) for side in self._sides)
        plan = shard.adapter.plan if shard.adapter is not None else None
        half = torch.float16 if training.fp16 else None
        autocast = torch.bfloat16 if training.bf16 else half
        self._setting = Setting(
            shard.config, plan, objective_of(training), shard.dtype, autocast, 0, 0
        )
        # Which operations autocast leaves in float32 is the device's choice; over a quantised base
        # it is the kernel's.
        mixed = autocast is not None or shard.is_quantized
        self._floats = {torch.float32, autocast, shard.dtype} if mixed else set()
        self._forms: dict[tuple[int, int], Sequence[Form] | None] = {}

    def problem(self, sides: Bundle, rows: int, tokens: int, *, train: bool) -> str | None:
        """What is wrong with the side tensors of a micro-batch of so many tokens a row; None where
        nothing is. There are as many as the model has there."""
        if not sides:
            return None
        forms = self._expected(rows, tokens)
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
                return f"{side.name} is {shown(tensor)}, expected {expected}"
        return None

    def _expected(self, rows: int, tokens: int) -> Sequence[Form] | None:
        """Shapes and types; None where the parts that make them do not run without numbers."""
        if (rows, tokens) not in self._forms:
            setting = replace(self._setting, rows=rows, tokens=tokens)
            try:
                self._forms[rows, tokens] = bundle_at(setting, self._block)[1:]
            except LIBRARY_ERRORS as error:
                _log.debug("no shapes of what enters layer %d: %s", self._block, one_line(error))
                self._forms[rows, tokens] = None
        return self._forms[rows, tokens]


def _is_trained(shard: Shard, side: Side) -> bool:
    if shard.adapter is not None:
        return shard.adapter.plan.trains(side.weights)
    return bool(side.weights)
