"""A description of the tensors that cross a plan's boundaries beside the hidden state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from hetero_framework.config import Config
from hetero_framework.core.codecs import CODECS
from hetero_framework.errors import ConfigError
from hetero_framework.models.adapters.adapter_plan import AdapterPlan
from hetero_framework.models.cut.introspect import ModelStructure, introspect
from hetero_framework.models.cut.language import meta_model
from hetero_framework.models.cut.partition import ShardRange, skeleton_of
from hetero_framework.models.cut.side import Form, Side
from hetero_framework.models.cut.tiny import PROBE_ROWS, PROBE_TOKENS
from hetero_framework.models.sizing.footprint import Setting, bundle_forms
from hetero_framework.models.sizing.memory import Shapes
from hetero_framework.units import plural, size

_LARGE = 2.0
"""Side tensors larger than this many hidden states are warned of."""


def crossing_lines(config: Config, model: PretrainedConfig, tokens: int) -> list[str]:
    """A line for each boundary of the plan that carries more than the hidden state, for rows of
    `tokens` tokens, with "warning: " in front where it carries much more. Also a line for each
    weight that is trained in several processes. Most models have no line."""
    lines = []
    for layer in dict.fromkeys(spec.start for spec in config.plan.stages if not spec.is_first):
        sides = introspect(model).sides_at(layer)
        if not sides:
            continue
        setting = _setting(config, model, tokens)
        count = setting.rows * setting.tokens
        hidden, *others = (_bytes(form) / count for form in bundle_forms(setting, layer))
        line = (
            f"in front of layer {layer}, {size(round(sum(others)))} of side tensors per token cross"
            f" the boundary beside {size(round(hidden))} of hidden state: {_names(sides)}"
        )
        factor = sum(others) / hidden
        line += f"; that is {factor:.1f} times as much" if factor > _LARGE else ""
        lines.append(f"warning: {line}" if factor > _LARGE else line)
    return lines + _tied_lines(config, model)


def _tied_lines(config: Config, model: PretrainedConfig) -> list[str]:
    """Lines on weights in several processes, see `engine/ties.py`; none for a run of an adapter."""
    if config.adapter is not None:
        return []
    whole, lines = skeleton_of(model), []
    for source in dict.fromkeys(whole.ties.values()):
        targets = [target for target, other in whole.ties.items() if other == source]
        home, *owners = (
            next(s.owner for s in config.plan.stages if whole.holds(name, ShardRange.of(s)))
            for name in (source, *targets)
        )
        away = [owner for owner in owners if owner != home]
        if not away:
            continue
        itemsize = _setting(config, model, 1).dtype.itemsize
        nbytes = itemsize * meta_model(model).get_parameter(source).numel()
        lines.append(
            f"{source} and {', '.join(targets)} are one weight in"
            f" {plural(len({home, *away}), 'process')}: each step sends"
            f" {size(nbytes * len(away))} of gradients and {size(nbytes * len(set(away)))} of new"
            " weights for it"
        )
    return lines


def check_codec(
    config: Config, model: PretrainedConfig, plan: AdapterPlan | None, tokens: int
) -> None:
    """Raise ConfigError where the codec of gradients takes the hidden state's gradient and not a
    side tensor's. If it takes neither, both travel as they are. `plan` is the adapter's."""
    codec = CODECS[config.wire.gradients]
    structure = introspect(model)
    for layer in dict.fromkeys(spec.start for spec in config.plan.stages if not spec.is_first):
        sides = structure.sides_at(layer)
        if not sides:
            continue
        (_, hidden_dtype, _), *forms = bundle_forms(_setting(config, model, tokens), layer)
        for side, (_, dtype, _) in zip(sides, forms, strict=True):
            support = codec.supports(dtype)
            wants = bool(side.weights) if plan is None else plan.trains(side.weights)
            if wants and codec.supports(hidden_dtype) and not support:
                raise ConfigError(
                    f"wire.gradients {codec.name} cannot take the gradient of {side.name}, which"
                    f" crosses in front of layer {layer}: {support.reason}",
                    hint='set "wire.gradients" to another codec or to "none"',
                )


def tiny_crossing(structure: ModelStructure, boundaries: Iterable[int]) -> str:
    """The side tensors at the fullest of these boundaries of a tiny copy, and
    which layers read token ids; empty for most models."""
    tokens, parts = PROBE_ROWS * PROBE_TOKENS, []
    most = max(map(structure.sides_at, boundaries), key=_tiny_bytes, default=())
    if most:
        hidden = 4 * math.prod(structure.hidden_shape) // tokens
        beside = round(_tiny_bytes(most) / tokens)
        parts.append(f"{beside} bytes a token beside {hidden} of hidden state: {_names(most)}")
    if structure.id_readers:
        parts.append(f"token ids go to layers {', '.join(map(str, sorted(structure.id_readers)))}")
    return "; ".join(parts)


def _tiny_bytes(sides: Sequence[Side]) -> int:
    return sum(math.prod(side.shape) * side.dtype.itemsize for side in sides)


def _names(sides: Sequence[Side]) -> str:
    counts = Counter(side.name for side in sides)
    return ", ".join(f"{name} x {n}" if n > 1 else name for name, n in counts.items())


def largest_sides(config: Config, model: PretrainedConfig, rows: int, tokens: int) -> int:
    """The most bytes of side tensors that cross together, under any plan, for a micro-batch of
    `rows` rows of `tokens` tokens with float32 activations."""
    structure = introspect(model)
    boundaries = [k for k in range(structure.num_layers + 1) if structure.sides_at(k)]
    if not boundaries:
        return 0
    setting = replace(_setting(config, model, tokens), dtype=torch.float32, rows=rows)
    return max(sum(map(_bytes, bundle_forms(setting, k)[1:])) for k in boundaries)


def _setting(config: Config, model: PretrainedConfig, tokens: int) -> Setting:
    assert config.model is not None
    return Shapes(model, config.model, None).setting(config, tokens)


def _bytes(form: Form) -> int:
    shape, dtype, _ = form
    return math.prod(shape) * dtype.itemsize
