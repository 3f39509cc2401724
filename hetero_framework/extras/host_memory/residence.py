"""The residence of a stage: which of its tensors are in host memory, and when they visit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from transformers import PretrainedConfig

from hetero_framework.config import Config, StageSpec
from hetero_framework.core.devices import Device
from hetero_framework.core.planned_order import FORWARD
from hetero_framework.engine.stage_api import Residence, States, Transfer
from hetero_framework.errors import ArchitectureError, DeviceError
from hetero_framework.extras.host_memory.optimizer_states import OptimizerStates
from hetero_framework.extras.host_memory.stored_inputs import StoredInputs
from hetero_framework.extras.host_memory.streamed_layers import (
    HostLayer,
    StreamedLayers,
    load_streamed,
    stream_tower,
)
from hetero_framework.extras.host_memory.visiting_weights import VisitingWeights
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import tower_layers
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.reuse import ReusableModules
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.cut.tiny import shrink
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.models.rng import seed_cpu
from hetero_framework.models.sizing.streaming import SLOTS
from hetero_framework.models.verify.equivalence import (
    deterministic,
    gradients,
    probe,
    remembered,
    whole_shard,
)

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
    ConfigError for streamed layers that differ from what is stored."""
    entry, layers = config.shard_plan[spec.index], None
    if entry.offload:
        assert isinstance(entry.offload, int)
        admit_streaming(ModelSource.of(config).config)
        if trains := config.adapter is None:
            check_trained_may_visit(device.torch_device)
        shard, layers = load_streamed(load, rng, kept, device, entry.offload, trains=trains)
    else:
        shard = load(rng, kept)
    towers = [
        stream_tower(device, tower)
        for tower in shard.tower_modules
        if entry.offload and len(tower_layers(tower)) > SLOTS
    ]
    visiting = layers.weights if layers and layers.weights.homes else None
    away = visiting is not None or config.offloads_optimizer(spec.index)
    states = OptimizerStates(device, visiting) if away else None
    inputs = StoredInputs(device, spec) if config.offloads_inputs(spec.index) else None
    return shard, HostMemory(layers, states, inputs, towers)


def check_trained_may_visit(device: torch.device) -> None:
    """Raise DeviceError where torch lets no parameter be read in host memory, as results are."""
    try:
        Parameter(torch.empty(1, device=device)).data = torch.empty(1)
    except RuntimeError as error:
        raise DeviceError(
            f"layers that are trained cannot stay in host memory beside {device}: {briefly(error)}",
            hint="set offload to 0 in shard_plan; training.offload_optimizer saves memory, too",
        ) from error


class HostMemory(Residence):
    """Layers, optimizer states and stored inputs, each where the plan keeps them."""

    streams = True

    def __init__(
        self,
        layers: StreamedLayers | None,
        states: OptimizerStates | None,
        inputs: StoredInputs | None,
        towers: Sequence[StreamedLayers] = (),
    ) -> None:
        self._layers, self._states = layers or Residence(), states or Residence()
        self._lend = layers.lend if layers else lambda: None
        self._inputs, self._towers = inputs or Residence(), towers
        self._weights = layers.weights if layers else VisitingWeights(Device(), [])
        self.trains = bool(self._weights.homes)

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

    def home(self, parameter: Parameter) -> Tensor:
        return self._weights.homes.get(parameter, parameter.detach())

    def changed(self) -> None:
        self._layers.changed()

    def go_home(self) -> None:
        self._layers.go_home()

    def gradient(self, parameter: Parameter) -> Tensor | None:
        return self._weights.gradient(parameter)

    def put_gradient(self, parameter: Parameter, gradient: Tensor) -> None:
        self._weights.put_gradient(parameter, gradient)

    def forget_gradients(self) -> None:
        self._weights.forget_gradients()

    def step(self, optimizer: Optimizer, scale: float = 1.0) -> None:
        self._lend()
        self._states.step(optimizer, scale)
        self.changed()

    def load(self, optimizer: Optimizer, names: Mapping[Any, str], state: States) -> None:
        self._states.load(optimizer, names, state)

    def settle(self) -> None:
        self._states.settle()

    def transfers(self) -> list[Transfer]:
        visitors = (self._layers, self._weights, self._states, self._inputs, *self._towers)
        return [transfer for kind in visitors for transfer in kind.transfers()]

    def dissolve(self, modules: ReusableModules) -> ReusableModules:
        for tower in self._towers:
            tower.dissolve(ReusableModules({}, {}, {}))
        return self._layers.dissolve(modules)


def admit_streaming(config: PretrainedConfig) -> None:
    """Show that an architecture computes the same with layers that come and go, unless it is known
    to pass. Raises ArchitectureError where it fails."""

    def tried() -> bool:
        if reason := try_streaming(shrink(config)):
            raise ArchitectureError(
                f"the layers of a {config.model_type} model cannot stay in host memory: {reason}",
                hint="take offload out of shard_plan",
            )
        return True

    remembered("streaming", config, (), tried, Path(__file__).parent)


def try_streaming(tiny: PretrainedConfig) -> str:
    """The reason why a tiny model's layers cannot be streamed; empty where they can. The
    model must give the same bits with one slot for all layers as with all layers on the device."""
    for recomputes in (False, True):
        try:
            with quiet_library():
                plain, streamed = (_outcome(tiny, recomputes, one) for one in (False, True))
        except LIBRARY_ERRORS as error:
            return f"it does not run ({briefly(error)})"
        for name, tensor in plain.items():
            if name not in streamed or not torch.equal(tensor, streamed[name]):
                return f"{name} differs: its layers are used out of order"
    return ""


def _outcome(tiny: PretrainedConfig, recomputes: bool, streams: bool) -> dict[str, torch.Tensor]:
    """The losses of two micro-batches, and the gradients of all weights outside the layers."""
    shard = whole_shard(deterministic(tiny))
    listed = shard.model.get_submodule(introspect(tiny).blocks).requires_grad_(False)
    blocks = dict(enumerate(listed))
    if recomputes:
        shard.recompute_blocks()
    visitors = Residence()
    if streams:
        hosts = {k: HostLayer(Device(), block) for k, block in blocks.items()}
        visitors = StreamedLayers(Device(), hosts, is_last=True, in_turn=1)
    visitors.accompany(shard)
    shard.train(True)
    found = {}
    for k in range(2):
        visitors.begin(FORWARD, k, FORWARD)
        inputs, items = probe(tiny, seed=k)
        with torch.random.fork_rng(devices=[]):
            seed_cpu(k)  # some models draw, and no setting turns it off
            loss = shard.loss(inputs, (), items)
            loss.backward()
        found[f"the loss of micro-batch {k}"] = loss.detach()
    return {**found, **gradients(shard.model)}
