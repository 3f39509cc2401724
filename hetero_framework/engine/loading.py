"""Loads a stage from a plan's entry and makes it ready to train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from hetero_framework import registry
from hetero_framework.config import Config, ModelConfig, StageSpec, TrainingConfig
from hetero_framework.config.objectives import shows_pictures
from hetero_framework.core import failpoints
from hetero_framework.core.devices import Device
from hetero_framework.core.messages import LoadedStage, Parameter
from hetero_framework.engine.out_of_memory import explaining
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import StageInterface
from hetero_framework.errors import DeviceError
from hetero_framework.models.adapters.trainable import adapter_plan_of, attach_adapter
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.reuse import ReusableModules, ReusePool
from hetero_framework.models.cut.shard import Shard, load_shard
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_libraries

BuildStages = Callable[[Config, Sequence[StageSpec], Device, ReusePool], Sequence[StageInterface]]
"""`load_stages`, or what replaces it to build other stages (benchmarks have stages that sleep)."""
_log = logging.getLogger(__name__)


def take_apart(stages: Iterable[StageInterface], config: Config) -> ReusePool:
    """End the former stages of `config`; return their reusable modules, for `load_stages`."""
    pool = ReusePool(_origin(config))
    for stage in stages:
        if isinstance(stage, Stage):
            pool.add(*stage.dissolve())
    return pool


def _origin(config: Config) -> object:
    """The settings that decide which frozen weights a process loads."""
    kinds = tuple(machine.quantization for machine in (config.coordinator, *config.workers))
    return config.model, kinds, config.base_dir, config.training.seed


def report_of(stage: StageInterface) -> LoadedStage:
    """The report of a stage that this process has loaded."""
    trainable = tuple(Parameter(*entry) for entry in stage.trainable())
    return LoadedStage(stage.index, trainable, dict(stage.fingerprint), dict(stage.ties))


def load_stages(
    config: Config, specs: Sequence[StageSpec], device: Device, pool: ReusePool | None = None
) -> list[Stage]:
    """Load the stages of one process onto its device. Modules of earlier stages in `pool` are not
    read again; unused modules are freed first. Raises ModelError, OutOfMemory, ConfigError when the
    adapter does not fit the model, and DeviceError as the two checks below."""
    assert config.model is not None
    spans = [ShardRange.of(spec) for spec in specs]
    kept = (pool or ReusePool()).hand_out(_origin(config), spans)
    quiet_libraries(config.training.log_level)
    seed = config.training.seed
    check_types(config, device)
    if config.training.compiles:
        check_compiler(config.training, device)
    plan = None
    stages = []
    for spec, span, there in zip(specs, spans, kept, strict=True):
        with explaining(f"loading {spec.layers}", device):
            model = config.model.quantized(config.quantization(spec.owner))

            def load(rng: ShardRange, kept: ReusableModules, model: ModelConfig = model) -> Shard:
                """Load layers with their adapter."""
                nonlocal plan
                shard = load_shard(model, config.base_dir, rng, device, seed=seed, kept=kept)
                shard.is_quantized |= config.quantizes
                failpoints.hit("load")
                plan = plan or adapter_plan_of(config, shard.config)
                attach_adapter(shard, plan, seed)
                if rng.is_first and shows_pictures(model.needs.data):
                    registry.find("shards", "seeing")(shard, config, device)
                return shard

            if config.uses_host_memory(spec.index) and not device.one_memory:
                what = f"shard_plan[{spec.index}]: host memory for tensors of the device"
                reside = registry.needed("stages", "host_memory", what)
                shard, residence = reside(config, spec, device, load, span, there)
            else:
                shard, residence = load(span, there), None
            stages.append(Stage(spec, shard, config, device, residence))
    return stages


def check_types(config: Config, device: Device) -> None:
    """Warn of types that the device only emulates. Raises DeviceError for a type that it lacks."""
    training, wanted = config.training, {"model.dtype": ModelSource.of(config).dtype}
    if training.bf16 or training.fp16:
        setting = "training.bf16" if training.bf16 else "training.fp16"
        wanted[setting] = torch.bfloat16 if training.bf16 else torch.float16
    for setting, dtype in wanted.items():
        support = device.supports(dtype)
        if support.emulated:
            _log.warning("%s is emulated on %s: %s", setting, device.label, support.reason)
        elif not support:
            raise DeviceError(
                f"{device.label} cannot compute in {str(dtype).removeprefix('torch.')}"
                f" ({setting}): {support.reason}",
                hint="choose another model.dtype, or training.fp16 instead of bf16",
            )


def check_compiler(training: TrainingConfig, device: Device) -> None:
    """Compile something small. Raises DeviceError when that cannot be done here."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    backend, mode = training.torch_compile_backend or "inductor", training.torch_compile_mode
    try:
        torch.compile(double, backend=backend, mode=mode)(torch.ones(2, device=device.torch_device))
    except LIBRARY_ERRORS as error:
        raise DeviceError(
            f"torch.compile with the backend {backend!r} does not work on {device.label}:"
            f" {briefly(error)}",
            hint="install a compiler (g++ or clang for a CPU, Triton for a GPU), choose another"
            " training.torch_compile_backend, or set training.torch_compile to false",
        ) from error
