"""Profiles of fleets, for the tests of the planner."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from hetero_framework.extras.planner import FleetProfile
from hetero_framework.extras.planner.layout import Fleet, Rules

GB = 1e9


def device(name: int | str, **changes: Any) -> dict[str, Any]:
    """A device that takes 1 and 2 ms for a layer of 1 GB, and keeps 0.1 GB of a micro-batch."""
    return {
        **{"id": name, "memory_bytes": 1000 * GB, "layer_bytes": GB},
        **{"layer_forward_s": 0.001, "layer_backward_s": 0.002, "layer_recompute_s": 0.001},
        **{"activation_bytes_per_layer": 0.1 * GB, "activation_bytes_recomputed": 0.01 * GB},
        **changes,
    }


def card(name: int | str, **changes: Any) -> dict[str, Any]:
    """A device with 100 GB of its machine's memory, from which a layer of 1 GB comes in 0.5 ms."""
    memory = {"host_bytes": 100 * GB, "host_to_device_bytes_per_s": 2000 * GB}
    own = {**memory, "layer_frozen_bytes": GB, "machine": f"pc-{name}"}
    return device(name, **{**own, **changes})


def raw_fleet(
    devices: list[dict[str, Any]],
    *,
    layers: int = 8,
    micro_batches: int = 8,
    speed: float = 1e9,
    direct: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """A profile as of JSON; all links are alike, those between workers only with `direct`."""
    ids = [one["id"] for one in devices]
    links = [
        {"from": a, "to": b, "bytes_per_s": speed, "latency_s": 1e-5}
        for a in ids
        for b in ids
        if a != b and (direct or "local" in (a, b))
    ]
    sizes = {"layers": layers, "micro_batches": micro_batches}
    sizes |= {"activation_bytes": 1e5, "gradient_bytes": 1e5}
    return {"version": 1, **sizes, "devices": devices, "links": links, **changes}


def fleet_of(*devices: dict[str, Any], **settings: Any) -> FleetProfile:
    return FleetProfile.from_dict(raw_fleet(list(devices), **settings))


def with_link(profile: FleetProfile, ends: tuple[Any, Any], **changes: float) -> FleetProfile:
    """With this direction of a link changed."""
    links = (
        link.model_copy(update=changes if (link.sender, link.receiver) == ends else {})
        for link in profile.links
    )
    return profile.model_copy(update={"links": tuple(links)})


def rules_of(profile: FleetProfile, **changes: Any) -> Rules:
    """What a search of all devices may choose: everything but interleaving."""
    fleet = Fleet(profile)
    settings: dict[str, Any] = {"checkpointing": True, "chunks": False, **changes}
    return Rules(fleet, tuple(range(len(fleet.ids))), {}, **settings)


@st.composite
def profiles_of_fleets(
    draw: st.DrawFn,
    *,
    most_devices: int = 4,
    most_layers: int = 7,
    tight: bool = False,
    uneven: bool = False,
) -> FleetProfile:
    """Unlike devices, with and without links between workers, heads, and little memory; `uneven`:
    layers and links differ too, and the lowest layers may be frozen."""
    layers = draw(st.integers(1, most_layers))
    frozen = draw(st.integers(0, layers)) if uneven else 0
    devices = []
    for k in range(draw(st.integers(1, most_devices))):
        forward_s = draw(st.integers(1, 9)) / 1000
        least = 1.2 * GB * layers if tight and k == 0 else 0.5 * GB
        memory = draw(st.floats(least, 2 * GB * layers)) if tight else 1000 * GB
        head_s = draw(st.integers(0, 5)) / 1000
        scales = [draw(st.sampled_from([1.0, 1.1, 2.0])) if uneven else 1.0 for _ in range(layers)]
        forward = [scale * forward_s for scale in scales]
        backward = [2 * seconds * (layer >= frozen) for layer, seconds in enumerate(forward)]
        times = {"layer_forward_s": forward, "layer_backward_s": backward}
        times |= {"head_forward_s": head_s, "head_backward_s": 2 * head_s}
        times["layer_recompute_s"] = forward_s
        devices.append(device(k or "local", memory_bytes=memory, **times))
    settings = {"layers": layers, "micro_batches": draw(st.integers(1, 8))}
    settings |= {"speed": draw(st.sampled_from([1e7, 1e8, 1e9])), "direct": draw(st.booleans())}
    raw = raw_fleet(devices, **settings)
    for link in raw["links"] if uneven else ():
        link["bytes_per_s"] *= draw(st.sampled_from([0.1, 1.0, 1.3]))
        link["latency_s"] *= draw(st.sampled_from([1.0, 50.0]))
    return FleetProfile.from_dict(raw)
