"""Compares a configured model, or a tiny model of an architecture, with its cut self."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from hetero_framework import registry
from hetero_framework.config import Config
from hetero_framework.config.objectives import Task
from hetero_framework.core.devices import open_device
from hetero_framework.data.kinds import kind_of
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.errors import ArchitectureError, UserError
from hetero_framework.models.cut.family import family_named
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model, towers
from hetero_framework.models.cut.partition import ShardRange, ranges_between
from hetero_framework.models.cut.tiny import shrink, tiny_config
from hetero_framework.models.files.quantization import stored_quantization
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.library import quiet_library
from hetero_framework.models.verify.boundary_contents import tiny_crossing
from hetero_framework.models.verify.equivalence import Comparison, compare

if TYPE_CHECKING:
    from hetero_framework.extras.padding_free.packing import Packing

# For each number: float32 weight, gradient and AdamW's two states.
_TRAINING_BYTES = 16
EQUAL = "equal"


@dataclass(frozen=True)
class Verified(Comparison):
    """A comparison. `crossing` says what crosses beside the hidden state, if anything does.
    `towers` are the modules that text does not use. `processes` is EQUAL where real workers trained
    as one process does, else the difference; empty where that was not tried. `pictures` says what
    a tiny copy did with one; empty for a class without pictures."""

    packing: Packing | None = None
    crossing: str = ""
    towers: tuple[str, ...] = ()
    processes: str = ""
    pictures: str = ""


def ranges_from_cuts(cuts: Sequence[int], layers: int) -> tuple[ShardRange, ...]:
    """Stages between the given layer numbers: (2, 5) of 6 gives 0-2, 2-5, 5-6.

    Raises ArchitectureError for cuts that are out of order or outside the model.
    """
    bounds = [0, *cuts, layers]
    # Only the ends may be without layers: they have embedding and head.
    if bounds != sorted(bounds) or len(set(cuts)) < len(cuts):
        raise ArchitectureError(
            f"cuts {', '.join(map(str, cuts))} do not fit a model of {layers} layers",
            hint=f"give ascending layer numbers between 0 and {layers}",
        )
    return ranges_between(bounds)


def verify_model(
    config: Config | None = None,
    *,
    model_type: str | None = None,
    task: Task = "causal-lm",
    cuts: Sequence[int] | None = None,
) -> Verified:
    """Compare a model with its cut self. It is the configured model, of the class that its
    objective trains (a tiny copy where its weights do not fit this machine several times), or a
    tiny model of an architecture's class for a task.

    A model is also refused where `data.padding_free` is asked for and not possible. The cut is
    `cuts`, else the configuration's plan, else two cuts over the layers.
    """
    checkpoint = None
    if config is not None and config.model is not None:
        source, _ = ModelSource.of(config).held()
        model_config = source.config
        if config.model.name_or_path is not None and _fits(model_config):
            checkpoint = source.checkpoint
        else:
            model_config = shrink(model_config)
    elif model_type is not None:
        with quiet_library():
            model_config = tiny_config(model_type, task)
            if (family := family_named(task)) is not None:
                model_config = family.tiny(model_config)
    else:
        raise ArchitectureError("there is no model to verify: name a configuration or a type")
    if cuts is not None or config is None:
        layers = introspect(model_config).num_layers
        thirds = sorted({max(1, layers // 3), max(1, layers - 1)} - {layers})
        ranges = ranges_from_cuts(thirds if cuts is None else cuts, layers)
    else:
        ranges = tuple(map(ShardRange.of, config.plan.stages))
    compared = compare(model_config, ranges, checkpoint)
    starts = [rng.start for rng in ranges[1:]]
    crossing = tiny_crossing(introspect(model_config), starts)
    result = Verified(**vars(compared), crossing=crossing, towers=towers(model_config))
    if result.towers and config is not None and config.model and config.model.name_or_path:
        result = replace(result, pictures=_with_pictures(config))
    wanted = config is not None and config.data is not None and config.data.one_row
    is_asked = wanted or (config is None and task == "causal-lm")
    if not (result.passed and is_asked and registry.installed("packing")):
        return result
    packing: Packing = registry.find("packing", "try")(model_config, ranges)
    if wanted and packing.reason:
        result = replace(result, verdict="refused", reason=f"data.padding_free: {packing.reason}")
    return replace(result, packing=packing)


def with_pictures(name: str) -> str:
    """The verdict on a tiny copy of a class with pictures, by a processor of its defaults."""
    return registry.find("vision", "try")(name) if registry.installed("vision") else ""


def _with_pictures(config: Config) -> str:
    """The verdict on a tiny copy of the configured model with pictures, by its own processor."""
    if not (registry.installed("vision") and (beside := kind_of("pictured").beside)):
        return ""
    try:
        beside(config, load_tokenizer(config))
    except UserError as error:
        return f"refused: {error.message}"
    return "admitted"


def _fits(config: PretrainedConfig) -> bool:
    """Whether two float32 copies in training, and as much again, fit this machine's free memory.
    Never for a quantised checkpoint: its whole counterpart is not in float32."""
    if stored_quantization(config) is not None:
        return False
    numbers = sum(p.numel() for p in meta_model(config).parameters())
    return 2 * 2 * _TRAINING_BYTES * numbers < open_device("cpu").memory().free
