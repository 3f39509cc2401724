"""Changed profiles of the same fleet: each shows the effect of one change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hetero_framework.config import process_name
from hetero_framework.extras.planner.layout import Fleet, Layout
from hetero_framework.extras.planner.profile import FleetProfile, LinkProfile
from hetero_framework.units import bit_rate

MICRO_BATCH = "micro-batch"
CODEC = "codec"
_INT8 = 0.52  # of a 16-bit type's bytes: half, and a scale of 2 bytes for each block of 64 numbers
_WORK = (
    *("layer_forward_s", "layer_backward_s", "layer_recompute_s"),
    *("embedding_forward_s", "embedding_backward_s", "head_forward_s", "head_backward_s"),
)
_KEPT = ("activation_bytes_per_layer", "activation_bytes_recomputed")
_CARDS_GIB = (4, 8, 16)  # more, as the next larger cards have


@dataclass(frozen=True)
class Variant:
    """A changed profile. `allowed_by` is the word of `--allow` that lets the planner take it, and
    `changes` the settings that it then needs."""

    text: str
    profile: FleetProfile
    allowed_by: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)


def settings(profile: FleetProfile) -> Iterator[Variant]:
    """Variants with other settings of the run, which change the numbers of the result a little."""
    tensors = ("activation_bytes", "gradient_bytes")
    codec = {name: _INT8 * getattr(profile, name) for name in tensors}
    if any(codec.values()):
        yield Variant(
            'wire.activations and wire.gradients "int8"',
            profile.model_copy(update=codec),
            CODEC,
            {"wire": {"activations": "int8", "gradients": "int8"}},
        )
    halved: dict[str, Any] = {name: value / (2 * _INT8) for name, value in codec.items()}
    halved["micro_batches"] = 2 * profile.micro_batches
    halved["devices"] = tuple(
        device.model_copy(update={n: _halved(getattr(device, n)) for n in (*_WORK, *_KEPT)})
        for device in profile.devices
    )
    yield Variant(
        f"{2 * profile.micro_batches} micro-batches of half the size, if one of half the size takes"
        " half the time",
        profile.model_copy(update=halved),
        MICRO_BATCH,
        {"micro_batches": 2 * profile.micro_batches},
    )


def direct_links(fleet: Fleet, layout: Layout) -> Iterator[Variant]:
    """A direct link for each relayed boundary of the layout, as quick as the slower half of its
    way."""
    profile = fleet.profile
    for before, part in pairwise(layout):
        a, b = fleet.ids[before.device], fleet.ids[part.device]
        if "local" in (a, b) or part.direct or a == b:
            continue
        links = {(link.sender, link.receiver): link for link in profile.links}
        new = []
        for pair in ((a, b), (b, a)):
            legs = [links[pair[0], "local"], links["local", pair[1]]]
            fields = {
                "sender": pair[0],
                "receiver": pair[1],
                "bytes_per_s": min(leg.bytes_per_s for leg in legs),
                "latency_s": sum(leg.latency_s for leg in legs) / 2,
            }
            new.append(LinkProfile.model_validate(fields))
        kept = [link for pair, link in links.items() if pair not in ((a, b), (b, a))]
        speed = bit_rate(min(link.bytes_per_s for link in new))
        yield Variant(
            f"a direct link of {speed} between {process_name(a)} and {process_name(b)}",
            profile.model_copy(update={"links": (*kept, *new)}),
        )


def cards(fleet: Fleet, device: int) -> Iterator[Variant]:
    """More memory for a device (by its place in `Fleet.ids`), the smallest card first."""
    profile, name = fleet.profile, fleet.ids[device]
    for gib in _CARDS_GIB:
        devices = tuple(
            one.model_copy(update={"memory_bytes": one.memory_bytes + gib * 2**30})
            if one.id == name
            else one
            for one in profile.devices
        )
        yield Variant(
            f"a card with {gib} GiB more for {process_name(name)}",
            profile.model_copy(update={"devices": devices}),
        )


def _halved(value: Any) -> Any:
    return tuple(v / 2 for v in value) if isinstance(value, tuple) else value / 2
