"""Memory needed by each stage, computed from shapes alone.

Weights, gradients and optimizer state are counted tensor by tensor. So are activations, temporary
tensors of a layer, and the loss, on tensors without data (`footprint`). A part that cannot run on
these counts as 0, and its stage says so. A stage that neither trains anything nor passes a gradient
on stores nothing for backward. All sizes are bytes.

Only tensors are counted; benchmarks/stage_memory.py compares the sums with real stages. The
allocator's own overhead comes on top.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hetero_framework import registry
from hetero_framework.config import Config, Kind, ModelConfig, StageSpec
from hetero_framework.config.objectives import shows_pictures
from hetero_framework.core.buffers import size_class
from hetero_framework.data.batches import MicroBatch
from hetero_framework.models.adapters.adapter_plan import AdapterPlan
from hetero_framework.models.adapters.trainable import adapter_plan_of
from hetero_framework.models.cut.introspect import introspect, layer_kinds
from hetero_framework.models.cut.language import (
    all_towers,
    lies_in,
    meta_model,
    on_meta,
    tower_layers,
)
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.cut.partition import ShardRange, Skeleton, skeleton_of
from hetero_framework.models.cut.tiny import stock_class
from hetero_framework.models.files.quantization import (
    modules_left_alone,
    stored_quantization,
    stored_settings,
)
from hetero_framework.models.sizing.footprint import (
    Footprint,
    Setting,
    bundle_bytes,
    bundle_forms,
    embedding_footprint,
    head_footprint,
    layer_footprint,
)
from hetero_framework.models.sizing.streaming import (
    SLOTS,
    STATES_GROUP_BYTES,
    STATES_OF_NUMBER,
    VISITING_INPUTS,
    slot_sizes,
    spread,
)
from hetero_framework.units import size

# bitsandbytes: numbers that share one scale, scales that share one scale of scales, and the
# tables that each double-quantised matrix carries (16 and 256 float32, one offset).
_BLOCK, _NESTED_BLOCK, _NF4_TABLES = 64, 256, 4 * (16 + 256 + 1)

# Numbers of optimizer state per trainable weight, by a part of the optimizer's name.
_STATES_PER_WEIGHT = {
    **{"ademamix": 3.0, "lion": 1.0, "adagrad": 1.0, "rmsprop": 1.0, "adafactor": 0.0, "sgd": 0.0},
    "": 2.0,  # Adam's kin
}

ONE_MEMORY = ("cpu", "mps")
"""Kinds of devices that use the machine's own memory."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage.

    `parameters` is the number of weights, an adapter's included, `trained` the number of trained
    values. `activations` are the bytes of `in_flight` micro-batches, each `per_micro_batch`.
    `working` is the most that layers and embedding take besides while they run, `logits` the most
    that the loss takes. `foreach` is what an optimizer that steps all weights at once needs then,
    as torch's AdamW on CUDA and XPU (the roots of all second moments). `device` is the owner's.

    Sizes are bytes on the device. `frozen` are the frozen bytes of each layer, `learned` the
    trained ones where the layers themselves are trained, `largest` the numbers of the largest
    trained parameter. `offload` layers stream these bytes from host memory; their gradients are
    there, too, and with them all states of the stage. Host memory also has the optimizer's
    `host_states`, and `host_inputs` of each micro-batch. Unless `states_move`, states stay where
    the optimizer has them. `visiting` are the states on the device while the optimizer
    steps, `tower_layers` the bytes of each frozen tower's layers, which stream if any do,
    `input_bytes` the bytes of one layer's stored input that may leave the device. Unless
    `counted`, a part of `activations`, `working` or `logits` is unknown and left out. `resident` is
    the stage with all states and inputs on its device, if some of them are not.
    """

    stage: StageSpec
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    in_flight: int
    per_micro_batch: int
    working: int = 0
    foreach: int = 0
    device: str = "auto"
    trained: int = 0
    frozen: tuple[int, ...] = ()
    learned: tuple[int, ...] = ()
    tower_layers: tuple[tuple[int, ...], ...] = ()
    largest: int = 0
    states_move: bool = True
    offload: int = 0
    host_states: int = 0
    host_inputs: int = 0
    input_bytes: int = 0
    visiting: int = 0
    counted: bool = True
    resident: StageMemory | None = None

    def holding(self, in_flight: int) -> StageMemory:
        """This stage with another number of micro-batches in flight."""
        more = (in_flight - self.in_flight) * self.per_micro_batch
        return replace(self, in_flight=in_flight, activations=self.activations + more)

    def offloading(self, count: int) -> StageMemory:
        """This stage with another number of streamed layers."""
        weights = self.weights + self._saved(self.offload) - self._saved(count)
        gradients = self.gradients + self._away(self.offload) - self._away(count)
        here = replace(self, offload=count, weights=weights, gradients=gradients)
        if not (count and any(self.learned)):
            return here
        here = here.without_states()
        # Weights and gradients visit with their states when they step: at most as many bytes again.
        room = max(here.visiting, self._room_to_step(2))
        return replace(here, visiting=room, resident=self.resident or self)

    def without_states(self) -> StageMemory:
        """This stage with the optimizer's states in host memory. On the device are three groups of
        states while the optimizer steps, one perhaps of the largest parameter."""
        if not (self.optimizer and self.states_move):
            return self
        largest = max(self.largest * STATES_OF_NUMBER, STATES_GROUP_BYTES)
        return replace(
            self,
            optimizer=0,
            visiting=min(self.optimizer, self._room_to_step()),
            foreach=min(self.foreach, largest // 2),
            host_states=self.optimizer,
            resident=self.resident or self,
        )

    def _room_to_step(self, times: int = 1) -> int:
        """The bytes of three groups of parameters, `times` those of their states."""
        groups = max(self.largest * STATES_OF_NUMBER, STATES_GROUP_BYTES) + 2 * STATES_GROUP_BYTES
        return times * min(self.trained * STATES_OF_NUMBER, groups)

    def at(self, stage: StageSpec) -> StageMemory:
        """The memory of `stage`, which is like this stage."""
        resident = self.resident and replace(self.resident, stage=stage)
        return replace(self, stage=stage, resident=resident)

    def placed(self, device: str, *, one_memory: bool) -> StageMemory:
        """This stage on a device. If that uses the machine's own memory, all is on the device."""
        here = self
        if one_memory:
            here = (self.resident or self).holding(self.in_flight).offloading(0)
        return replace(here, device=device)

    @property
    def layer_bytes(self) -> list[int]:
        """The bytes of each layer that stream."""
        if not any(self.learned):
            return list(self.frozen)
        return [sum(pair) for pair in zip(self.frozen, self.learned, strict=True)]

    def _streamed(self, count: int) -> list[int]:
        return [self.layer_bytes[k] for k in spread(count, 0, len(self.frozen))]

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained weights."""
        return self.gradients + self._away(self.offload)

    def _homes(self, count: int) -> int:
        """Bytes of gradients in host memory."""
        there = spread(count, 0, len(self.learned)) if any(self.learned) else []
        return sum(self.learned[k] for k in there)

    def _away(self, count: int) -> int:
        """Bytes of gradients that the device saves: those of three layers are there, on their
        way."""
        return max(0, self._homes(count) - 3 * max(self.learned, default=0))

    def _saved(self, count: int) -> int:
        each = [self._streamed(count), *(self.tower_layers if count else ())]
        return sum(sum(streamed) - sum(slot_sizes(streamed)) for streamed in each)

    @property
    def states(self) -> int:
        """Bytes of the optimizer's states, wherever they are."""
        return self.optimizer + self.host_states

    @property
    def host(self) -> int:
        """Bytes in host memory, beside those on the device."""
        inputs = self.in_flight * self.host_inputs
        there = sum(self._streamed(self.offload)) + self._homes(self.offload)
        there += sum(map(sum, self.tower_layers)) if self.offload else 0
        if self.offload and any(self.learned):
            there += 3 * max(self.learned)  # what powers of two leave: weights, gradients, states
        return there + self.host_states + inputs

    @property
    def index(self) -> int:
        return self.stage.index

    @property
    def kept(self) -> int:
        """Bytes held during the whole step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def step(self) -> int:
        """Further bytes while the optimizer steps, in memory that trained layers' slots lend."""
        slots = sum(slot_sizes(self._streamed(self.offload))) if any(self.learned) else 0
        one_by_one = self.device.partition(":")[0] in ("auto", *ONE_MEMORY)
        return max(0, self.visiting - slots) + (0 if one_by_one else self.foreach)

    @property
    def total(self) -> int:
        return self.kept + max(self.activations + self.passing, self.step)

    @property
    def passing(self) -> int:
        """The most for a moment, in addition to kept bytes and activations."""
        return max(self.logits, self.working)

    def __str__(self) -> str:
        steps = self.step > self.activations + self.passing
        moment = "logits" if self.logits >= self.working else "working"
        peak = ("step",) if steps else ("activations", moment)
        parts = ("weights", "gradients", "optimizer", *peak)
        sizes = [f"{name} {size(getattr(self, name))}" for name in parts if getattr(self, name)]
        host = f", and {size(self.host)} of host memory" if self.host else ""
        unknown = "" if self.counted else ", and what its layers store, which is unknown"
        return f"{size(self.total)} ({', '.join(sizes)}){host}{unknown}"


def estimate_memory(
    config: Config,
    model_config: PretrainedConfig,
    *,
    max_in_flight: int | None = None,
    tokens: int | None = None,
    plan: AdapterPlan | None = None,
    in_flight: Sequence[int] | None = None,
    pictures: MicroBatch | None = None,
) -> list[StageMemory]:
    """Memory of every stage of `config`; loads nothing. Raises as `plan_adapter`, `introspect`.

    `in_flight` are the micro-batches that each stage may store, by default `max_in_flight`, else
    the configuration's, else twice the stages. The last stage holds one, and no stage more than a
    step has. `tokens` is the longest sample (default: data.max_length). Checkpointing "auto" counts
    as none. `pictures` are those of `Setting` (default: one of usual size in each row).
    """
    stages = config.plan.stages
    plan = plan or adapter_plan_of(config, model_config)
    if tokens is None:
        tokens = config.row_tokens
    if pictures is None and shows_pictures(config.training.data_kind):
        pictures = registry.find("vision", "usual")(config, tokens)
    if max_in_flight is None:
        max_in_flight = config.training.max_in_flight or 2 * len(stages)
    most = config.training.gradient_accumulation_steps
    shapes = config.per_quantization(
        config.plan.owners,
        lambda owner: shapes_of(config, model_config, plan, config.quantization(owner)),
    )
    memory = []
    known: dict[object, StageMemory] = {}  # of single layers, most of which are alike
    differentiates = False
    for spec, held in zip(stages, in_flight or [max_in_flight] * len(stages), strict=True):
        held = 1 if spec.is_last else min(held, most)
        shape = shapes[spec.owner]
        rng, trainable = ShardRange.of(spec), shape.trainable
        differentiates = differentiates or any(shape.holds(name, rng) for name in trainable)
        settings = config.shard_plan[spec.index].model_dump(exclude={"start", "end"})
        key = (str(settings), held, differentiates, shape.form(rng))
        if key not in known:
            about = (spec, shape, config, held, tokens, differentiates, pictures)
            known[key] = _stage_memory(*about)
        memory.append(known[key].at(spec))
    return memory


def uncounted_lines(memory: Iterable[StageMemory]) -> list[str]:
    """A warning of the stages of which not all memory can be counted; none where all can."""
    stages = ", ".join(str(m.index) for m in memory if not m.counted)
    line = (
        f"warning: stage {stages} needs more memory than is said: its model does not run on tensors"
        " without data, so what it stores of a micro-batch is unknown before it runs"
    )
    return [line] if stages else []


def memory_of_parts(
    config: Config,
    model_config: PretrainedConfig,
    layers: int,
    plan: AdapterPlan | None = None,
    tokens: int | None = None,
    pictures: MicroBatch | None = None,
) -> list[StageMemory]:
    """Memory of the embedding, of each of the model's `layers` and of the head alone, one
    micro-batch in flight. Arguments and errors as of `estimate_memory`."""
    bounds = [(0, 0), *((k, k + 1) for k in range(layers)), (layers, layers)]
    entries = [{"id": "local", "start": start, "end": end} for start, end in bounds]
    config = config.with_changes(shard_plan=entries)
    how: Any = {"tokens": tokens, "plan": plan, "pictures": pictures}
    return estimate_memory(config, model_config, max_in_flight=1, **how)


def recomputing(config: Config) -> Config:
    """The configuration with "auto" replaced: by checkpointing, and by as many streamed layers as
    save memory."""
    plan = config.to_dict()["shard_plan"]
    for index, entry in enumerate(plan):
        if config.checkpointing(index) == "auto":
            entry["gradient_checkpointing"] = True
        if entry["offload"] == "auto":
            layers = entry["end"] - entry["start"]
            entry["offload"] = layers - layers % SLOTS
    return config.with_changes(shard_plan=plan)


def parts_by_process(
    config: Config, model_config: PretrainedConfig, owners: Collection[int | str]
) -> dict[int | str, list[StageMemory]]:
    """`memory_of_parts` as each of these processes holds them."""
    layers = introspect(model_config).num_layers
    return config.per_quantization(
        owners, lambda owner: memory_of_parts(config.held_by(owner), model_config, layers)
    )


def recompute_stages(
    plain: Sequence[StageMemory],
    recomputing: Sequence[StageMemory],
    optional: Collection[int],
    devices: Iterable[tuple[Collection[int | str], int]],
) -> set[int]:
    """The fewest `optional` stages to recompute in the backward so that every device fits; all of a
    device's optional stages where even these are not enough. `plain` and `recomputing` are all
    stages without and with recomputation, `devices` the owners and the free bytes of each."""
    chosen = set()
    for owners, free in devices:
        here = [m for m in plain if m.stage.owner in owners]
        needed = sum(m.total for m in here)
        saved = {m.index: m.total - recomputing[m.index].total for m in here if m.index in optional}
        # Stages that save most first: fewer would not save as much.
        for index in sorted(saved, key=lambda k: (-saved[k], k)):
            if needed <= free or saved[index] <= 0:
                break
            chosen.add(index)
            needed -= saved[index]
    return chosen


def offload_layers(
    memory: Sequence[StageMemory],
    optional: Collection[int],
    devices: Iterable[tuple[Collection[int | str], int]],
) -> dict[int, int]:
    """{stage: streamed layers} of `optional` stages: the fewest so that every device fits, all of a
    device's where even these are not enough. The number is even: an odd number saves no more than
    the even number below it, and two save nothing. `devices` as for `recompute_stages`."""
    chosen = dict.fromkeys(optional, 0)
    for owners, free in devices:
        here = [m for m in memory if m.stage.owner in owners]
        needed = sum(m.total for m in here)
        # One stage after the other, since each has slots: large layers first.
        streaming = [m for m in here if m.index in chosen]
        for m in sorted(streaming, key=lambda m: -max(m.layer_bytes, default=0)):
            for count in range(2 * SLOTS, len(m.frozen) + 1, SLOTS):
                less = m.offloading(count)
                if needed > free and less.total < m.total:
                    needed -= m.total - less.total
                    m, chosen[m.index] = less, count
    return chosen


def in_flight_limits(
    memory: Sequence[StageMemory], limit: int, devices: Iterable[tuple[Collection[int | str], int]]
) -> tuple[int, ...]:
    """The number of micro-batches that fit each stage's memory, 1 to `limit`; equal for all stages
    of a device. `devices` as for `recompute_stages`."""
    limits = [limit] * len(memory)
    for owners, free in devices:
        stages = [m for m in memory if m.stage.owner in owners]
        spare = free - sum(m.kept + m.holding(0).activations + m.passing for m in stages)
        once = sum(m.per_micro_batch for m in stages if m.stage.is_last)
        each = sum(m.per_micro_batch for m in stages if not m.stage.is_last)
        most = (spare - once) // each if each else limit
        for m in stages:
            limits[m.index] = max(1, min(limit, most))
    return tuple(limits)


_shapes: dict[tuple[object, ...], Shapes] = {}


def shapes_of(
    config: Config, model_config: PretrainedConfig, plan: AdapterPlan | None, kind: Kind | None
) -> Shapes:
    """The sizes of a model whose weights are held as `kind` says; computed once."""
    assert config.model is not None
    model, quantizes = config.model.quantized(kind), config.quantizes
    given = (model_config.to_json_string(), model_config._attn_implementation, plan and plan.key)
    key = (*given, model.dtype, kind, quantizes)
    if key not in _shapes:
        _shapes[key] = Shapes(model_config, model, plan, quantizes=quantizes)
    return _shapes[key]


class Shapes:
    """Sizes of everything in the whole model, to be asked by stage."""

    def __init__(
        self,
        config: PretrainedConfig,
        model: ModelConfig,
        plan: AdapterPlan | None,
        *,
        quantizes: bool = False,
    ) -> None:
        """`quantizes`: weights of the model are quantised, here or on other machines."""
        whole = meta_model(config)
        self._config, self._plan = config, plan
        self.skeleton = skeleton_of(config)
        self.text = config.get_text_config()
        stored: Any = config.dtype or torch.float32
        dtype = stored if model.dtype == "auto" else getattr(torch, model.dtype)
        self._dtype: torch.dtype = dtype
        self.dtype = str(dtype).removeprefix("torch.")
        self.number_bytes = int(dtype.itemsize)
        quantization = model.quantization or stored_quantization(config)
        sizes = _module_sizes(whole, quantization, config)
        named = dict(whole.named_parameters(remove_duplicate=False))
        self.numbers = {name: p.numel() for name, p in named.items()}
        self.weights = {n: sizes.get(n, k * self.number_bytes) for n, k in self.numbers.items()}
        self.of_matrices = {name: p.shape for name, p in named.items() if p.dim() > 1}
        modules = whole.named_modules()
        self.embeddings = {name for name, m in modules if isinstance(m, nn.Embedding)}
        named_buffers = whole.named_buffers()
        seen = all_towers(config)  # small, and on the first stage alone
        self.buffers = {n: b.nbytes for n, b in named_buffers if not lies_in(n, seen)}
        self.trains_everything = plan is None
        quantizes |= quantization is not None
        self.trainable = self._trainable(whole, plan, quantizes)

    @cached_property
    def towers(self) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Bytes of the weights of the model's towers, and of the layers of each."""
        model = on_meta(stock_class(self._config), self._config)
        named, gone = model.named_parameters(), self.skeleton.towers
        modules = [m for name, m in model.named_modules() if name in gone]
        layers = [[self._bytes_of(layer) for layer in tower_layers(m)] for m in modules]
        total = self.number_bytes * sum(p.numel() for name, p in named if lies_in(name, gone))
        return total, tuple(tuple(sizes) for sizes in layers if len(sizes) > SLOTS)

    def _bytes_of(self, module: nn.Module) -> int:
        return self.number_bytes * sum(p.numel() for p in module.parameters())

    @cached_property
    def kinds(self) -> list[int]:
        """For each layer, the first layer of its kind."""
        return layer_kinds(self._config)

    @cached_property
    def _by_layer(self) -> dict[int | None, list[tuple[str, object]]]:
        """Name within the layer, and size, of every tensor, by layer; None: outside the layers."""
        found: dict[int | None, list[tuple[str, object]]] = defaultdict(list)
        for sizes in (self.weights, self.trainable, self.buffers):
            for name, nbytes in sizes.items():
                layer = self.skeleton.layer_of(name)
                local = name.removeprefix(f"{self.skeleton.structure.blocks}.{layer}.")
                found[layer].append((local, nbytes))
        return found

    def form(self, rng: ShardRange) -> object:
        """A key that is equal for shards of one layer that take the same memory."""
        if rng.is_first or rng.is_last or rng.end != rng.start + 1:
            return rng
        layer, skeleton = rng.start, self.skeleton
        outside = [name for name, _ in self._by_layer[None] if self.holds(name, rng)]
        sides = skeleton.structure.sides_at(layer)
        own = (*self._by_layer[layer], *outside, *skeleton.targets(rng))
        return self.kinds[layer], sides, own

    def setting(self, config: Config, tokens: int) -> Setting:
        """The setting of micro-batches with `tokens` tokens per row."""
        training, rows = config.training, config.training.train_rows
        if config.data is not None and config.data.one_row:
            rows, tokens = 1, rows * tokens
        half = torch.float16 if training.fp16 else None
        return Setting(
            self._config,
            self._plan,
            objective_of(training),
            self._dtype,
            torch.bfloat16 if training.bf16 else half,
            rows,
            tokens,
        )

    def _trainable(
        self, whole: PreTrainedModel, plan: AdapterPlan | None, quantized: bool
    ) -> dict[str, tuple[int, int]]:
        """{trained parameter: (numbers, bytes of one)}."""
        if plan is None:
            floats = [(n, p) for n, p in whole.named_parameters() if p.requires_grad]
            return {name: (p.numel(), self.number_bytes) for name, p in floats}
        adapter_bytes = plan.number_bytes(self.number_bytes, quantized=quantized)
        return {
            name: (math.prod(shape), adapter_bytes if ".lora_" in name else self.number_bytes)
            for name, shape in plan.trainable.items()
        }

    def holds(self, name: str, rng: ShardRange) -> bool:
        """Whether a stage has a parameter, an adapter's included."""
        parts = name.split(".")
        while parts and name not in self.weights and ".".join(parts) not in self.skeleton.modules:
            parts.pop()
        return self.skeleton.holds(name if name in self.weights else ".".join(parts), rng)


def _module_sizes(
    model: PreTrainedModel, quantization: str | None, config: PretrainedConfig
) -> dict[str, int]:
    """Bytes of the weights that bitsandbytes quantises, statistics included."""
    if quantization is None:
        return {}
    settings = stored_settings(config)
    skipped = settings.get("llm_int8_skip_modules") or modules_left_alone(config)
    double = bool(settings.get("bnb_4bit_use_double_quant", True)) if settings else True
    sizes = {}
    for name, module in model.named_modules():
        linear = type(module) is nn.Linear or isinstance(module, Conv1D)
        if linear and not any(name == skip or name.endswith(f".{skip}") for skip in skipped):
            count = module.weight.numel()
            rows = count // module.weight.shape[-1]
            sizes[f"{name}.weight"] = (
                count + 4 * rows if quantization == "int8" else _four_bit_size(count, double)
            )
    return sizes


def _four_bit_size(count: int, double: bool) -> int:
    blocks = math.ceil(count / _BLOCK)
    scales = blocks + 4 * math.ceil(blocks / _NESTED_BLOCK) if double else 4 * blocks
    return math.ceil(count / 2) + scales + (_NF4_TABLES if double else 4 * 16)


def _stage_memory(
    spec: StageSpec,
    shapes: Shapes,
    config: Config,
    in_flight: int,
    tokens: int,
    differentiates: bool,
    pictures: MicroBatch | None,
) -> StageMemory:
    training, skeleton, rng = config.training, shapes.skeleton, ShardRange.of(spec)
    device = (config.coordinator if spec.owner == "local" else config.worker(spec.owner)).device
    held = {name: size for name, size in shapes.weights.items() if skeleton.holds(name, rng)}
    targets = skeleton.targets(rng)
    _drop_tied(held, skeleton, rng)
    trained = {n: v for n, v in shapes.trainable.items() if shapes.holds(n, rng)}
    gradients = stepped = sum(count * size for count, size in trained.values())
    if shapes.trains_everything:
        # Each place of a tied weight collects a gradient; only the first has optimizer state.
        gradients += sum(shapes.weights[target] for target in targets)
    added = sum(count * size for name, (count, size) in trained.items() if name not in held)
    here = {None, *range(rng.start, rng.end)}
    buffers = sum(n for name, n in shapes.buffers.items() if skeleton.layer_of(name) in here)
    sees = rng.is_first and shows_pictures(training.data_kind)
    towers, in_towers = shapes.towers if sees else (0, ())
    setting = replace(shapes.setting(config, tokens), pictures=pictures)
    running = _running(spec, setting, shapes, config, differentiates)
    learns = trained if shapes.trains_everything else {}
    frozen = _by_layer(spec, shapes, {n: size for n, size in held.items() if n not in trained})
    learned = _by_layer(spec, shapes, {n: size for n, size in held.items() if n in learns})
    resident = StageMemory(
        stage=spec,
        parameters=sum(shapes.numbers[name] for name in held)
        + sum(count for name, (count, _) in trained.items() if name not in held),
        weights=sum(held.values()) + added + buffers + towers,
        gradients=gradients,
        trained=sum(count for count, _ in trained.values()),
        optimizer=_optimizer_bytes(training.optim, trained, shapes.embeddings),
        activations=in_flight * running.per_micro_batch,
        in_flight=in_flight,
        **vars(running),
        foreach=stepped if training.optim == "adamw_torch" else 0,
        device=device,
        frozen=frozen,
        learned=learned,
        tower_layers=in_towers,
        largest=max((count for count, _ in trained.values()), default=0),
        states_move=not keeps_states(training.optim),
    )
    memory = _partly_away(resident, shapes, config, tokens, differentiates)
    return memory.placed(device, one_memory=device.partition(":")[0] in ONE_MEMORY)


def _drop_tied(held: dict[str, int], skeleton: Skeleton, rng: ShardRange) -> None:
    """Leave one of the tied weights of a part, for there is one storage for all."""
    first = {skeleton.ties[target]: target for target in reversed(skeleton.targets(rng))}
    for target in skeleton.targets(rng):
        if first[source := skeleton.ties[target]] != target or skeleton.holds(source, rng):
            held.pop(target)


def _by_layer(spec: StageSpec, shapes: Shapes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sums of sizes of weights, by layer of a stage."""
    sums = dict.fromkeys(range(spec.start, spec.end), 0)
    for name, nbytes in sizes.items():
        if (layer := shapes.skeleton.layer_of(name)) is not None:
            sums[layer] += nbytes
    return tuple(sums.values())


def _partly_away(
    memory: StageMemory,
    shapes: Shapes,
    config: Config,
    tokens: int,
    differentiates: bool,
) -> StageMemory:
    """The stage with what its plan keeps in host memory; an `offload` of "auto" counts as 0. On the
    device are: three inputs of recomputed layers, in use or on their way; the stage's own input;
    the input of the model's last layer, whose backward follows at once."""
    spec, resident = memory.stage, memory
    if config.offloads_optimizer(spec.index):
        memory = memory.without_states()
    if config.training.activation_offloading and differentiates:
        shape, dtype, _ = bundle_forms(shapes.setting(config, tokens), spec.start)[0]
        each = math.prod(shape) * dtype.itemsize
        memory = replace(memory, input_bytes=each, resident=resident)
        inputs = spec.end - spec.start - spec.is_last - (not spec.is_first)
        if config.checkpointing(spec.index) is True and inputs > VISITING_INPUTS:
            memory = replace(
                memory,
                activations=memory.activations - memory.in_flight * inputs * each,
                per_micro_batch=memory.per_micro_batch - inputs * each,
                working=memory.working + VISITING_INPUTS * each,
                host_inputs=inputs * size_class(each),
            )
    offload = config.shard_plan[spec.index].offload
    return memory.offloading(offload if isinstance(offload, int) else 0)


def keeps_states(optim: str) -> bool:
    """Whether the states of an optimizer stay where they are with offload_optimizer: torchao's
    states have a tensor class of their own, and paged states are in host memory already."""
    return "paged" in optim or optim in ("adamw_torch_4bit", "adamw_torch_8bit")


def _optimizer_bytes(
    optim: str, trained: Mapping[str, tuple[int, int]], embeddings: Set[str]
) -> int:
    """Bytes of the states of transformers' optimizer `optim`. Adafactor's one number per row and
    column is left out; a paged state counts like one on the device. Embeddings have 32-bit states
    in bitsandbytes' 8-bit optimizers."""
    states = next(n for part, n in _STATES_PER_WEIGHT.items() if part in optim)
    bits = 8 if "8bit" in optim else 4 if "4bit" in optim else None
    total = 0.0
    for name, (count, stored) in trained.items():
        module = name.removesuffix(".weight").partition(".modules_to_save.")[0]
        is_wide = bits == 8 and "torch" not in optim and module in embeddings
        total += count * states * (4 if is_wide else bits / 8 if bits else stored)
    return int(total)


@dataclass(frozen=True)
class _Running:
    """Bytes that a stage takes while it runs: for each micro-batch in flight, for a moment in its
    layers, and for the loss. `counted` is False where a part of the stage could not be counted."""

    per_micro_batch: int
    working: int
    logits: int
    counted: bool


def _running(
    spec: StageSpec, setting: Setting, shapes: Shapes, config: Config, differentiates: bool
) -> _Running:
    kinds, is_unknown = shapes.kinds, spec.is_first and setting.pictures == {}
    recompute = config.checkpointing(spec.index) is True
    parts: list[Footprint | None] = [embedding_footprint(setting)] if spec.is_first else []
    setting = replace(setting, pictures=None)  # each layer is counted once
    parts += [
        layer_footprint(setting, kinds[k], recompute=recompute, train=differentiates)
        for k in range(spec.start, spec.end)
    ]
    head = head_footprint(setting) if spec.is_last else None
    counted = None not in parts and not is_unknown and not (spec.is_last and head is None)
    inner = [part for part in parts if part is not None]
    hidden = 0 if spec.is_first else bundle_bytes(setting, spec.start)
    shared = max((part.shared for part in inner), default=0)
    working = behind = 0
    for part in reversed(inner):
        # In a part's forward, parts behind it have not run; in its backward, they hold nothing.
        working = max(working, part.passing - behind)
        behind += part.kept - part.shared
    logits = head.passing if head is not None else 0
    if not differentiates:
        return _Running(0, hidden + working, logits, counted)
    return _Running(hidden + shared + behind, working, logits, counted)
