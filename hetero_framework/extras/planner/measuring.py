"""Time and memory of each part of a model on a process's device, measured with random weights.

Embedding, one layer of each kind and head run as stages of their own on the process's device, with
the adapter, types and loss of the run. Nothing is read but the model's configuration, so a machine
can be measured before it has the model.

Shapes: B rows of a micro-batch, S tokens, D hidden size.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from hetero_framework.cluster.roles import machine_of
from hetero_framework.config import Config, StageSpec
from hetero_framework.core.codecs import CODECS
from hetero_framework.core.devices import Device
from hetero_framework.core.fields import Fields, WorkerId
from hetero_framework.core.files import NamingOf
from hetero_framework.core.messages import Seconds
from hetero_framework.data.batches import padded_count
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.extras.planner import FleetProfile
from hetero_framework.extras.planner.host_link import HostLink, measured_link
from hetero_framework.extras.planner.profile import bytes_of_parts
from hetero_framework.models.adapters.trainable import export_parts
from hetero_framework.models.cut.family import family_of
from hetero_framework.models.cut.introspect import introspect, layer_kinds
from hetero_framework.models.cut.language import first_layers
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import load_shard
from hetero_framework.models.cut.side import Bundle, returning
from hetero_framework.models.files.quantization import stored_quantization
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.footprint import Setting, bundle_at
from hetero_framework.models.sizing.memory import StageMemory

_LEAST_RUNS, _MOST_RUNS = 3, 20


@dataclass(frozen=True)
class PartCost:
    """Seconds for one micro-batch, and bytes that stay until its backward pass. With recomputed
    activations `recompute_s` adds to `backward_s`, and only `recomputed_bytes` stay."""

    forward_s: Seconds
    backward_s: Seconds
    recompute_s: Seconds = 0.0
    kept_bytes: int = 0
    recomputed_bytes: int = 0


@dataclass(frozen=True)
class ModelCost:
    """Costs of a model's parts. `layers` has the cost of each kind, by the first layer of the kind;
    `kinds` has that first layer for each layer. At most `hidden_bytes`, of `hidden_dtype`, cross a
    boundary, and as many come back. `link` leads to the machine's memory; None if it is shared."""

    embedding: PartCost
    layers: dict[int, PartCost]
    head: PartCost
    kinds: list[int]
    hidden_bytes: int
    hidden_dtype: str
    link: HostLink | None = None

    def of_layers(self, name: str) -> list[float]:
        """A field of `PartCost` for each layer of the model."""
        return [getattr(self.layers[kind], name) for kind in self.kinds]

    def to_dict(self) -> dict[str, Any]:
        """The costs as plain data for a message; `from_dict` reads them back."""
        return {**asdict(self), "layers": [[k, asdict(part)] for k, part in self.layers.items()]}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelCost:
        """Read `to_dict`'s data. Raises ProtocolError, KeyError, TypeError, ValueError if wrong."""
        read = Fields(PartCost).read
        ends = {name: read(raw[name]) for name in ("embedding", "head")}
        layers = {int(k): read(part) for k, part in raw["layers"]}
        if not {*raw["kinds"]} <= layers.keys():
            raise ValueError("a layer has no cost")
        link = Fields(HostLink).read(raw["link"]) if raw.get("link") else None
        return cls(**{**raw, **ends, "layers": layers, "link": link})


def measure(
    config: Config, model: PretrainedConfig, device: Device, *, part_s: float = 0.5
) -> ModelCost:
    """Measure every part of `model`, the model of `config`, for about `part_s` seconds and at least
    three times. Raises what `load_stages` raises, and torch's error if memory runs out."""
    kinds = layer_kinds(model)
    specs = _specs(kinds)
    batch = _batch(config, model, device)
    with _random_weights(config, model, specs) as made:
        stages = load_stages(_cut(made, specs, recompute=False), specs, device)
        first, *inner, last = [_MeasuredPart(stage, batch, device, part_s) for stage in stages]
        hidden_BSD = first.output()
        entering = [_entering(config, model, spec.start, hidden_BSD) for spec in specs[1:]]
        embedding, head = first.cost(()), last.cost(entering.pop())
        plain = [part.cost(received) for part, received in zip(inner, entering, strict=True)]
        link = measured_link(device, partial(inner[0].forward, entering[0]))
        del stages, first, inner, last
        device.empty_cache()
        again = load_stages(_cut(made, specs, recompute=True), specs[1:-1], device)
        parts = [_MeasuredPart(stage, batch, device, part_s) for stage in again]
        recomputed = [part.cost(received) for part, received in zip(parts, entering, strict=True)]
    layers = {
        spec.start: replace(
            one,
            recompute_s=max(0.0, other.backward_s - one.backward_s),
            recomputed_bytes=other.kept_bytes,
        )
        for spec, one, other in zip(specs[1:-1], plain, recomputed, strict=True)
    }
    dtype = str(hidden_BSD.dtype).removeprefix("torch.")
    most = max(sum(t.nbytes for t in received) for received in ((hidden_BSD,), *entering))
    return ModelCost(embedding, layers, head, kinds, most, dtype, link)


def _entering(config: Config, model: PretrainedConfig, layer: int, hidden_BSD: Tensor) -> Bundle:
    """The inputs of a layer: this hidden state, and random side tensors of the model's shapes. If
    hidden states differ in shape, all inputs are random."""
    training, all_random = config.training, family_of(model) is not None
    if not introspect(model).sides_at(layer) and not all_random:
        return (hidden_BSD,)
    tokens = config.row_tokens
    setting = Setting(
        *(model, None, objective_of(training), hidden_BSD.dtype, None),
        *(training.train_rows, tokens),
    )
    made = []
    for shape, dtype, _ in bundle_at(setting, layer):
        tensor = torch.zeros(shape, dtype=dtype, device=hidden_BSD.device)
        made.append(tensor.normal_() if dtype.is_floating_point else tensor)
    return tuple(made) if all_random else (hidden_BSD, *made[1:])


class _MeasuredPart:
    """One stage of the model, and a micro-batch for it."""

    def __init__(
        self, stage: Stage, batch: dict[str, Tensor], device: Device, part_s: float
    ) -> None:
        self._stage, self._batch, self._device, self._part_s = stage, batch, device, part_s
        self._attempts = itertools.count()
        # As behind a trained layer: the input needs a gradient.
        stage.input_requires_grad = not stage.is_first

    def output(self) -> Tensor:
        """The hidden state that the embedding makes."""
        self._begin(train=False)
        return self._stage.forward(0, self._batch, ())[0]

    def cost(self, received: Bundle) -> PartCost:
        kept_bytes = self._kept_bytes(received)
        both: list[tuple[float, float]] = []
        began = time.monotonic()
        while len(both) < _LEAST_RUNS + 1 or time.monotonic() - began < self._part_s:
            both.append(self._run(received))
            if len(both) > _MOST_RUNS:
                break
        forwards_s, backwards_s = zip(*both[1:], strict=True)
        forward_s = statistics.median(forwards_s)
        backward_s = statistics.median(backwards_s)
        if self._stage.is_last:
            # Least times, since other work only adds. Under load the difference of medians was 0.
            backward_s = max(0.0, min(backwards_s) - min(forwards_s))
        return PartCost(forward_s, backward_s, kept_bytes=kept_bytes)

    def _run(self, received: Bundle) -> tuple[float, float]:
        """Seconds of one forward and one backward pass. The head does both in one call: for it,
        seconds of a forward pass by itself, and of that call."""
        stage, batch = self._stage, self._batch
        if stage.is_last:
            self._begin(train=False)
            forward_s = self._timed(lambda: stage.evaluate(0, batch, received))
            self._begin(train=True)
            marked = self._marked(received)
            return forward_s, self._timed(lambda: stage.forward_backward(0, batch, marked))
        self._begin(train=True)
        forward_s = self._timed(lambda: self._forward(received))
        if not stage.differentiates:
            return forward_s, 0.0
        gradients = tuple(map(torch.ones_like, returning(self._left)))
        return forward_s, self._timed(lambda: stage.backward(0, gradients))

    def _forward(self, received: Bundle) -> None:
        self._left = self._stage.forward(0, self._batch, self._marked(received))

    def _marked(self, received: Bundle) -> Bundle:
        """`received` as in training: side tensors that want a gradient have `requires_grad`."""
        marks = (False, *self._stage.side_gradients)
        pairs = zip(received, marks, strict=False)  # the first stage receives nothing
        return tuple(tensor.detach().requires_grad_(wants) for tensor, wants in pairs)

    def forward(self, received: Bundle) -> None:
        """Queue a forward pass."""
        self._begin(train=True)
        self._forward(received)

    def _kept_bytes(self, received: Bundle) -> int:
        """Bytes that autograd stores of one micro-batch: inputs count, weights do not. 0 for the
        head, which frees its bytes in the same task."""
        if self._stage.is_last or not self._stage.differentiates:
            return 0
        self._begin(train=True)
        weights = {p.untyped_storage().data_ptr() for p in self._stage.all_weights()}
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        for tensor in received:
            keep(tensor)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self._forward(received)
        return sum(storages.values())

    def _begin(self, *, train: bool) -> None:
        items = padded_count(self._batch)
        self._stage.begin(StepInfo(0, next(self._attempts), train, 1, items))

    def _timed(self, job: Callable[[], object]) -> float:
        self._device.synchronize()
        began = time.perf_counter()
        job()
        self._device.synchronize()
        return time.perf_counter() - began


def _specs(kinds: Sequence[int]) -> list[StageSpec]:
    """The stages to measure: the embedding, the first layer of each kind, the head."""
    inner = sorted(set(kinds))
    layers = [StageSpec(k, "local", i, i + 1, False, False) for k, i in enumerate(inner, 1)]
    head = StageSpec(1 + len(inner), "local", len(kinds), len(kinds), False, True)
    return [StageSpec(0, "local", 0, 0, True, False), *layers, head]


def _batch(config: Config, model: PretrainedConfig, device: Device) -> dict[str, Tensor]:
    """A micro-batch of the longest samples."""
    tokens = config.row_tokens
    rows = config.training.train_rows
    dice = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_text_config().vocab_size)
    ids_BS = torch.randint(vocabulary, (rows, tokens), generator=dice)
    batch = {"input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS), "labels": ids_BS}
    batch = objective_of(config.training).probe_inputs(model, batch)
    return {name: tensor.to(device.torch_device) for name, tensor in batch.items()}


def _cut(config: Config, specs: Sequence[StageSpec], *, recompute: bool) -> Config:
    """The configuration with an entry of the plan for each spec."""
    last = len(specs) - 2
    bounds = [(0, 0), *((k, k + 1) for k in range(last)), (last, last)]
    plan = [{"id": "local", "start": start, "end": end} for start, end in bounds]
    return config.with_changes(shard_plan=plan, training={"gradient_checkpointing": recompute})


@contextmanager
def _random_weights(
    config: Config, model: PretrainedConfig, specs: Sequence[StageSpec]
) -> Iterator[Config]:
    """The configuration with a model of random weights. Weights to be quantised are read from
    files, as the library requires; the files are deleted when the block ends."""
    assert config.model is not None
    if config.model.name_or_path is None and config.model.source:  # no files are read
        yield config
        return
    fields = json.loads(model.to_json_string())
    stored = "nf4" if stored_quantization(model) == "fp4" else stored_quantization(model)
    fields.pop("quantization_config", None)
    fields.pop("architectures", None)
    section = {**config.model.model_dump(mode="json"), "revision": None, "quantization": None}
    quantization = config.model.quantization or stored
    tokenizer = config.model.tokenizer or config.model.name_or_path
    plain = {**section, "name_or_path": None, "from_config": fields, "tokenizer": tokenizer}
    if quantization is None:
        yield config.with_changes(model=plain)
        return
    with tempfile.TemporaryDirectory(prefix="hetero-measure-") as folder:
        made = config.with_changes(model=plain).model
        assert made is not None
        weights: dict[str, Tensor] = {}
        for spec in specs:
            shard = load_shard(made, config.base_dir, ShardRange.of(spec), Device(), seed=0)
            weights |= export_parts(shard)
            weights |= {name.removesuffix("."): tensor for name, tensor in shard.towers()}
        with NamingOf(Path(folder)):
            save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            (Path(folder) / "config.json").write_text(json.dumps(fields))
        read = {**plain, "name_or_path": folder, "from_config": None, "quantization": quantization}
        yield config.with_changes(model=read)


def profile_of(
    config: Config,
    memory: Mapping[WorkerId, Sequence[StageMemory]],
    costs: Mapping[WorkerId, ModelCost],
    memory_bytes: Mapping[WorkerId, float],
    links: Sequence[Mapping[str, Any]],
    host: Mapping[WorkerId, tuple[float, HostLink]],
) -> FleetProfile:
    """The fleet's profile. Of each process, `memory` is the need of embedding, layers and head,
    `memory_bytes` the limit, `host` its machine's memory and the link there, if not shared."""
    micro_batches = config.training.gradient_accumulation_steps
    devices = [
        {
            "id": id,
            "memory_bytes": memory_bytes[id],
            "layer_forward_s": cost.of_layers("forward_s"),
            "layer_backward_s": cost.of_layers("backward_s"),
            "layer_recompute_s": cost.of_layers("recompute_s"),
            "embedding_forward_s": cost.embedding.forward_s,
            "embedding_backward_s": cost.embedding.backward_s,
            "head_forward_s": cost.head.forward_s,
            "head_backward_s": cost.head.backward_s,
            **bytes_of_parts(memory[id], micro_batches, one_memory=id not in host),
            "activation_bytes_per_layer": cost.of_layers("kept_bytes"),
            "activation_bytes_recomputed": cost.of_layers("recomputed_bytes"),
            "reserved_bytes": max(part.working for part in memory[id][1:-1]),
            "machine": machine_of(config, config.machine(id)),
            **({"host_bytes": host[id][0], **asdict(host[id][1])} if id in host else {}),
        }
        for id, cost in costs.items()
    ]
    local = costs["local"]
    return FleetProfile.from_dict(
        {
            "version": 1,
            "layers": len(local.kinds),
            "first_layers": first_layers(config, ModelSource.of(config).config),
            "micro_batches": micro_batches,
            "activation_bytes": _wire_bytes(local, config.wire.activations),
            "gradient_bytes": _wire_bytes(local, config.wire.gradients),
            "embedding_is_trained": memory["local"][0].gradients > 0,
            "rows": config.training.per_device_train_batch_size,
            "devices": devices,
            "links": [dict(link) for link in links],
        },
        name="what was found",
    )


def _wire_bytes(cost: ModelCost, codec: str) -> int:
    """Bytes of a boundary's tensor on the wire."""
    dtype = getattr(torch, cost.hidden_dtype)
    return CODECS[codec].nbytes((cost.hidden_bytes // dtype.itemsize,), dtype)
