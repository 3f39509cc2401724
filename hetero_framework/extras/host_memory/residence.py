"""The residence of a stage: which of its tensors are in host memory, and when they visit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from hetero_framework.config import Config, StageSpec
from hetero_framework.core.devices import Device
from hetero_framework.engine.stage_api import Residence, States, Transfer
from hetero_framework.extras.host_memory.admission import admit_streaming
from hetero_framework.extras.host_memory.optimizer_states import OptimizerStates
from hetero_framework.extras.host_memory.stored_inputs import StoredInputs
from hetero_framework.extras.host_memory.stored_weights import Stored
from hetero_framework.extras.host_memory.streamed_layers import StreamedLayers, load_streamed
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.reuse import ReusableModules
from hetero_framework.models.cut.shard import Shard, load_model_config

Load = Callable[[ShardRange, ReusableModules], Shard]


def reside(
    config: Config,
    spec: StageSpec,
    device: Device,
    load: Load,
    rng: ShardRange,
    kept: ReusableModules,
) -> tuple[Shard, HostMemory]:
    """Load a stage's shard, with the parts in host memory that the plan keeps there. Raises
    ConfigError for streamed layers that are trained."""
    entry, layers = config.shard_plan[spec.index], None
    if entry.offload:
        assert isinstance(entry.offload, int)
        assert config.model is not None
        model = load_model_config(config.model, config.base_dir)
        admit_streaming(model)
        stored = Stored(config, model) if entry.offload_from == "file" else None
        shard, layers = load_streamed(load, rng, kept, device, entry.offload, stored)
    else:
        shard = load(rng, kept)
    states = OptimizerStates(device) if config.offloads_optimizer(spec.index) else None
    inputs = StoredInputs(device, spec) if config.offloads_inputs(spec.index) else None
    return shard, HostMemory(layers, states, inputs)


class HostMemory(Residence):
    """Layers, optimizer states and stored inputs, each where the plan keeps them."""

    streams = True

    def __init__(
        self,
        layers: StreamedLayers | None,
        states: OptimizerStates | None,
        inputs: StoredInputs | None,
    ) -> None:
        self._layers, self._states = layers or Residence(), states or Residence()
        self._inputs = inputs or Residence()

    @property
    def misses(self) -> int | None:
        return self._layers.misses

    def accompany(self, shard: Shard) -> None:
        self._layers.accompany(shard)
        self._inputs.accompany(shard)

    def begin(self, kind: str, micro_batch: int, following: str) -> None:
        self._layers.begin(kind, micro_batch, following)
        self._inputs.begin(kind, micro_batch, following)

    def end(self) -> None:
        self._layers.end()

    def abort(self) -> None:
        self._inputs.abort()

    def step(self, optimizer: Optimizer) -> None:
        self._states.step(optimizer)

    def load(self, optimizer: Optimizer, names: Mapping[Any, str], state: States) -> None:
        self._states.load(optimizer, names, state)

    def settle(self) -> None:
        self._states.settle()

    def transfers(self) -> list[Transfer]:
        parts = (self._layers, self._states, self._inputs)
        return [transfer for part in parts for transfer in part.transfers()]

    def dissolve(self, modules: ReusableModules) -> ReusableModules:
        return self._layers.dissolve(modules)
