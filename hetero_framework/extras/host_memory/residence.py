"""The residence of a stage: which of its tensors are in host memory, and when they visit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from hetero_framework.config import Config, StageSpec
from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.engine.optimizer import load_state_tensors
from hetero_framework.errors import DeviceError
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
) -> tuple[Shard, HostMemory | None]:
    """Load a stage's shard with what the plan keeps in host memory; None where the device has no
    memory of its own. Raises DeviceError where the plan's entry asks for it there, and ConfigError
    for layers that are trained."""
    layers: StreamedLayers | None = None
    if device.one_memory:
        if named := config.offloads_of(spec.index):
            raise DeviceError(
                f"stage {spec.index}: {' and '.join(named)}: {device.name} shares the machine's one"
                " memory, so that nothing is gained",
                hint="take that out of shard_plan",
            )
        return load(rng, kept), None
    entry = config.shard_plan[spec.index]
    if entry.offload:
        assert isinstance(entry.offload, int)
        assert config.model is not None
        admit_streaming(load_model_config(config.model, config.base_dir))
        stored = Stored(config) if entry.offload_from == "file" else None
        shard, layers = load_streamed(load, rng, kept, device, entry.offload, stored)
    else:
        shard = load(rng, kept)
    states = OptimizerStates(device) if config.offloads_optimizer(spec.index) else None
    is_stored = config.training.activation_offloading and config.checkpointing(spec.index) is True
    inputs = StoredInputs(device, spec) if is_stored else None
    return shard, HostMemory(spec, layers, states, inputs)


class HostMemory:
    """See `stage_api.Residence`."""

    def __init__(
        self,
        spec: StageSpec,
        layers: StreamedLayers | None,
        states: OptimizerStates | None,
        inputs: StoredInputs | None,
    ) -> None:
        self._spec = spec
        self._layers, self._states, self._inputs = layers, states, inputs

    @property
    def misses(self) -> int | None:
        return self._layers.misses if self._layers is not None else None

    def accompany(self, shard: Shard) -> None:
        if self._layers is not None:
            shard.accompany_blocks(self._layers.around)
        if self._inputs is not None:
            shard.storing = self._inputs.storing

    def begin(self, kind: str, micro_batch: int, following: str) -> None:
        if self._layers is not None:
            self._layers.begin(kind, following)
        if self._inputs is not None:
            self._inputs.begin(kind, micro_batch, following)

    def end(self) -> None:
        if self._layers is not None:
            self._layers.end()

    def abort(self) -> None:
        if self._inputs is not None:
            self._inputs.abort()

    def step(self, optimizer: Optimizer) -> None:
        if self._states is not None:
            self._states.step(optimizer)
        else:
            optimizer.step()

    def load(
        self, optimizer: Optimizer, names: Mapping[Any, str], state: dict[str, dict[str, Any]]
    ) -> None:
        if self._states is not None:
            self._states.load(optimizer, names, state)
        else:
            load_state_tensors(optimizer, names, state)

    def settle(self) -> None:
        if self._states is not None:
            self._states.settle()

    def transfers(self) -> list[tuple[str, DeviceEvent, DeviceEvent]]:
        taken: list[tuple[str, DeviceEvent, DeviceEvent]] = []
        for part in (self._layers, self._states, self._inputs):
            if part is not None:
                taken += part.transfers
                part.transfers.clear()
        return taken

    def dissolve(self, modules: ReusableModules) -> ReusableModules:
        return self._layers.dissolve(modules) if self._layers is not None else modules
