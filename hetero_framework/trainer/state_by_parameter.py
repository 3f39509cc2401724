"""A run's state by parameter name, given to the stages of whatever plan is in force.

Weights are "weights/<parameter>", optimizer state "optimizer/<key>/<parameter>", as tensors or as
plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from hetero_framework.cluster.loaded_pipeline import LoadedPipeline
from hetero_framework.engine.stage import OPTIMIZER, WEIGHTS
from hetero_framework.engine.stage_api import StatePart
from hetero_framework.engine.state_snapshot import in_parts
from hetero_framework.errors import CheckpointError


class NamedTensors(Protocol):
    """Tensors by name, on a disk or in memory; a `CheckpointReader` is one."""

    def names(self) -> Sequence[str]: ...
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each named tensor with its name. Raises CheckpointError for an absent name."""


class TensorsInMemory:
    """The tensors of state parts."""

    def __init__(self, parts: Iterable[StatePart]) -> None:
        self._tensors = {name: t for part in parts for name, t in part.tensors.items()}

    def names(self) -> Sequence[str]:
        return sorted(self._tensors)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            if name not in self._tensors:
                raise CheckpointError(f"there is no tensor {name!r} in it")
            yield name, self._tensors[name]


def load_by_name(loaded: LoadedPipeline, tensors: NamedTensors, values: Mapping[str, Any]) -> None:
    """Have every stage take over its trained parameters. Raises LinkLost and StagesLost, and
    CheckpointError for a weight without a tensor."""
    states, value_names = by_parameter(tensors.names()), by_parameter(values)
    for stage, parameters in enumerate(loaded.state_names):
        wanted: dict[str, dict[str, Any]] = {}
        for name in parameters:
            wanted[f"{WEIGHTS}/{name}"] = {n: values[n] for n in value_names.get(name, ())}
            wanted.update({n: {} for n in states.get(name, ())})
        entries = ((name, tensor, wanted[name]) for name, tensor in tensors.read(wanted))
        loaded.pipeline.load_state(stage, "checkpoint", in_parts(entries))
    loaded.pipeline.share_tied_weights()


def by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """The names "optimizer/<key>/<parameter>" among these, by parameter."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind == OPTIMIZER:
            grouped.setdefault(rest.partition("/")[2], []).append(name)
    return grouped
