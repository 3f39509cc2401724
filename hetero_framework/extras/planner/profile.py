"""The profile of a fleet: each device's time per layer and memory, and the speed of the links.
`hetero plan` measures it, or a person writes it by hand.

Everything is per micro-batch, in seconds and bytes. Fields that are left out are 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from hetero_framework.config import Section
from hetero_framework.config.problems import Problem, problems_of, report, shown
from hetero_framework.config.section import WholeFile, WorkerId, with_unit
from hetero_framework.config.strict_json import read_object
from hetero_framework.errors import ConfigError
from hetero_framework.models.sizing.streaming import visit_bytes

if TYPE_CHECKING:
    from hetero_framework.models.sizing.memory import StageMemory

MAX_LAYERS = 10_000
MAX_MICRO_BATCHES = 100_000
_SHOWN_IDS = 16
_LEAST_S, _LEAST_BYTES = 1e-12, 1e-6


def _zero_or_from(least: float) -> AfterValidator:
    """Refuse numbers smaller than any machine has: their quotients would not be finite."""

    def check(value: float) -> float:
        if 0 < value < least:
            raise ValueError(f"must be 0 or at least {least:g}, not {value:g}")
        return value

    return AfterValidator(check)


Time = Annotated[float, with_unit("seconds", ge=0, le=1e9), _zero_or_from(_LEAST_S)]
Bytes = Annotated[float, with_unit("bytes", ge=0, le=1e24), _zero_or_from(_LEAST_BYTES)]


def _as_list(value: Any) -> Any:
    """A value per layer as a tuple; one number stands for all layers."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Rate = Annotated[float, with_unit("bytes per second", ge=0, le=1e24), _zero_or_from(1e-3)]
TimeOfLayers = Annotated[tuple[Time, ...], BeforeValidator(_as_list)]
BytesOfLayers = Annotated[tuple[Bytes, ...], BeforeValidator(_as_list)]
_NONE = (0.0,)
_OF_LAYERS = (
    *("layer_forward_s", "layer_backward_s", "layer_recompute_s", "layer_bytes"),
    *("activation_bytes_per_layer", "activation_bytes_recomputed", "layer_frozen_bytes"),
    *("layer_host_bytes", "layer_input_bytes", "layer_step_bytes"),
)


class DeviceProfile(Section):
    """One process and its device. A field of layers is one number for all, or a list."""

    id: WorkerId
    """ "local" (the coordinator) or the id of a worker."""
    memory_bytes: Bytes
    """Memory that the process may fill."""
    layer_forward_s: TimeOfLayers
    """Time of a layer's forward."""
    layer_backward_s: TimeOfLayers
    """Time of a layer's backward; 0 where nothing below it is trained."""
    layer_recompute_s: TimeOfLayers = _NONE
    """Extra time of a layer's backward where activations are computed again."""
    embedding_forward_s: Time = 0.0
    embedding_backward_s: Time = 0.0
    head_forward_s: Time = 0.0
    head_backward_s: Time = 0.0
    layer_bytes: BytesOfLayers = _NONE
    """Weights, gradients and optimizer state of a layer."""
    embedding_bytes: Bytes = 0.0
    head_bytes: Bytes = 0.0
    embedding_stored_bytes: Bytes = 0.0
    """Bytes that the embedding, and what sees pictures, store of each micro-batch in flight."""
    activation_bytes_per_layer: BytesOfLayers = _NONE
    """Bytes that a layer stores of each micro-batch in flight."""
    activation_bytes_recomputed: BytesOfLayers = _NONE
    """Bytes that a layer stores where activations are computed again."""
    reserved_bytes: Bytes = 0.0
    """Further bytes of the process."""
    machine: str | None = None
    """Name of the machine, for processes that share its memory; null: the process has its own."""
    host_bytes: Bytes = 0.0
    """Free memory of the machine for layers that visit the device; 0: none, or the device has no
    memory of its own."""
    layer_frozen_bytes: BytesOfLayers = _NONE
    """The part of `layer_bytes` that may visit the device; 0 for a layer that may not."""
    layer_host_bytes: BytesOfLayers = _NONE
    """A layer's optimizer states in the machine's memory; not part of `layer_bytes`."""
    embedding_host_bytes: Bytes = 0.0
    """The embedding's optimizer states in the machine's memory."""
    head_host_bytes: Bytes = 0.0
    """The head's optimizer states in the machine's memory."""
    states_follow: bool = False
    """Whether these states are on the device, a part of its other bytes, unless layers visit."""
    layer_input_bytes: BytesOfLayers = _NONE
    """A layer's stored input. Where activations are computed again, it is in the machine's memory
    until the layer's backward; 0: it stays on the device."""
    layer_step_bytes: BytesOfLayers = _NONE
    """Bytes that move in a step for a layer whose visiting part is trained; 0: it is frozen, and
    comes for each micro-batch."""
    host_to_device_bytes_per_s: Rate = 0.0
    """Rate of copies from pinned memory of the machine."""
    device_to_host_bytes_per_s: Rate = 0.0
    """Rate of copies to the machine's memory."""
    both_ways: Annotated[float, with_unit("times as long", ge=1, le=1e3)] = 1.0
    """How many times as long copies take if they go both ways at once."""
    copy_slowdown: Annotated[float, with_unit("times as long", ge=1, le=1e3)] = 1.0
    """How many times as long computing takes while layers are copied."""


class LinkProfile(Section):
    """One direction of the link between two processes."""

    model_config = ConfigDict(populate_by_name=True)

    sender: WorkerId = Field(alias="from")
    """The sender."""
    receiver: WorkerId = Field(alias="to")
    """The receiver."""
    bytes_per_s: Annotated[float, with_unit("bytes per second", ge=1e-3, le=1e24)]
    """Rate at which large frames arrive."""
    latency_s: Time = 0.0
    """Delay of the first byte."""


class FleetProfile(WholeFile):
    """A model and the fleet that may train it. A pair of workers without a link in both directions
    is relayed by the coordinator."""

    version: Literal[1]
    """Version of this file's format."""
    layers: Annotated[int, with_unit("layers", ge=1, le=MAX_LAYERS)]
    """Layers of the model, without embedding and head."""
    micro_batches: Annotated[int, with_unit("micro-batches", ge=1, le=MAX_MICRO_BATCHES)]
    """Micro-batches in a step."""
    activation_bytes: Bytes = 0.0
    """Bytes that cross a boundary forward."""
    gradient_bytes: Bytes = 0.0
    """Bytes that cross a boundary backward."""
    embedding_is_trained: bool | None = None
    """Whether gradients go back as far as the embedding. By default they do where the first layer
    is trained."""
    first_layers: Annotated[int, with_unit("layers", ge=0, le=MAX_LAYERS)] = 0
    """The fewest layers of the first stage; more than 0 where the model adds pictures to layers."""
    rows: Annotated[int, with_unit("samples", ge=0, le=MAX_MICRO_BATCHES)] = 0
    """Samples of a micro-batch; 0: unknown."""
    devices: tuple[DeviceProfile, ...]
    """The processes."""
    links: tuple[LinkProfile, ...] = ()
    """Their links, one entry for each direction."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, name: str = "profile") -> FleetProfile:
        """The profile in a dictionary of JSON types. Raises ConfigError with all problems."""
        valid: dict[str, Any] = {}
        problems: list[Problem] = []
        try:
            profile = cls.model_validate_json(json.dumps(raw), context=valid)
        except ValidationError as error:
            problems = problems_of(error.errors(include_url=False), cls, raw)
        problems += _disagreements(raw, valid)
        if problems:
            raise ConfigError(report(name, problems))
        return profile

    def to_dict(self) -> dict[str, Any]:
        """JSON types; `from_dict` reads it back."""
        raw = self.model_dump(mode="json", by_alias=True)
        for device in raw["devices"]:
            for field in _OF_LAYERS:
                if len(values := device[field]) == 1 < self.layers:
                    device[field] = values[0]
        return raw


def bytes_of_parts(
    memory: Sequence[StageMemory], micro_batches: int, *, one_memory: bool = False
) -> dict[str, Any]:
    """Fields of a `DeviceProfile`: the needs of embedding, layers and head on the device.
    `one_memory`: the device shares the machine's memory."""
    embedding, *layers, head = (part.placed(part.device, one_memory=one_memory) for part in memory)
    visits = not any(map(sum, (part.frozen for part in layers)))  # all are trained
    moves = visits and all(part.states_move for part in layers)
    follow = moves and not one_memory and not any(part.host_states for part in layers)
    away = [part.states if follow else part.host_states for part in (embedding, *layers, head)]
    trained = [p.kept if moves else p.weights + p.gradients for p in layers]
    moved = [visit_bytes(p.weights, p.gradients, p.states * moves, micro_batches) for p in layers]
    of_layers = max(part.working for part in layers)
    return {
        "layer_bytes": [part.kept for part in layers],
        "layer_frozen_bytes": trained if visits else [sum(part.frozen) for part in layers],
        "layer_step_bytes": [bytes_ * visits for bytes_ in moved],
        "embedding_bytes": embedding.kept + max(0, embedding.working - of_layers),
        "embedding_stored_bytes": embedding.per_micro_batch,
        "head_bytes": head.kept + head.logits,
        "activation_bytes_per_layer": [part.per_micro_batch for part in layers],
        "layer_host_bytes": away[1:-1],
        "embedding_host_bytes": away[0],
        "head_host_bytes": away[-1],
        "states_follow": follow,
        "layer_input_bytes": [part.input_bytes for part in layers],
    }


def load_profile(path: str | Path) -> FleetProfile:
    """The profile in a file. Raises ConfigError that lists all problems with their paths."""
    file = Path(path)
    if not file.exists():
        hint = "`hetero plan --measure --save-profile FILE` writes one"
        raise ConfigError(f"profile {file} does not exist", hint=hint)
    return FleetProfile.from_dict(read_object(file), name=str(path))


def ids_text(ids: Sequence[int | str]) -> str:
    """The ids of devices in a message; of many, only the first ids."""
    more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
    return ", ".join(map(shown, ids[:_SHOWN_IDS])) + more


def _disagreements(raw: dict[str, Any], valid: dict[str, Any]) -> Iterator[Problem]:
    """Contradictions between fields that are valid by themselves."""
    devices: tuple[DeviceProfile, ...] = valid.get("devices", ())
    ids = [device.id for device in devices]
    if "devices" in valid and "local" not in ids:
        yield Problem("devices", 'none has the id "local": the coordinator holds the first stage')
    first: dict[int | str, int] = {}
    for i, device_id in enumerate(ids):
        if first.setdefault(device_id, i) != i:
            text = f"{shown(device_id)} is the id of devices[{first[device_id]}] too"
            yield Problem(f"devices[{i}].id", text)
    for i in range(len(devices) if "layers" in valid else 0):
        for field in _OF_LAYERS:
            given = raw["devices"][i].get(field)
            if isinstance(given, list | tuple) and len(given) != valid["layers"]:
                text = f"has {len(given)} entries, but there are {valid['layers']} layers"
                yield Problem(f"devices[{i}].{field}", text)
    if devices and "links" in valid:
        yield from _link_problems(ids, valid["links"])


def _link_problems(ids: list[int | str], links: tuple[LinkProfile, ...]) -> Iterator[Problem]:
    seen: dict[tuple[int | str, int | str], int] = {}
    there_are = dict.fromkeys(ids)
    known = ids_text(ids)
    for i, link in enumerate(links):
        for end, device_id in (("from", link.sender), ("to", link.receiver)):
            if device_id not in there_are:
                text = f"{shown(device_id)} is not a device; there are: {known}"
                yield Problem(f"links[{i}].{end}", text)
        if link.sender == link.receiver:
            yield Problem(f"links[{i}]", f"goes from {shown(link.sender)} to itself")
        pair = (link.sender, link.receiver)
        if pair in seen:
            yield Problem(f"links[{i}]", f"says the same direction as links[{seen[pair]}]")
        seen.setdefault(pair, i)
    for worker in there_are:
        for pair in (("local", worker), (worker, "local")):
            if worker != "local" and "local" in there_are and pair not in seen:
                there = f"from {shown(pair[0])} to {shown(pair[1])}"
                text = f"none goes {there}; the coordinator talks with every worker, both ways"
                yield Problem("links", text)
