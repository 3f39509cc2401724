"""Random fleets on paper, for the planner's benchmarks and tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hetero_framework.extras.planner import FleetProfile

GIGABIT = 117e6
_LAYER_BYTES = 4e8
_KEPT_BYTES, _RECOMPUTED_BYTES = 6e7, 8e6


def random_fleet(
    draw: random.Random,
    devices: int,
    layers: int,
    micro_batches: int,
    *,
    tight: bool = False,
    speeds: Sequence[float] = (GIGABIT,),
    direct: float = 1.0,
    layer_s: float = 0.03,
    unlike: float = 4.0,
    tensor_bytes: float = 8e6,
    kinds: int | None = None,
) -> FleetProfile:
    """A coordinator and workers that are up to `unlike` times as fast as each other.

    Each link has one of `speeds` (bytes per second); two workers have one of their own with
    probability `direct`. With `tight` the devices together hold 1.0 to 2.2 times the weights, and a
    few micro-batches. With `kinds` there are so many different devices.
    """
    cards = [_card(draw, devices, layers, tight, layer_s, unlike) for _ in range(kinds or devices)]
    found = []
    for k in range(devices):
        card = cards[draw.randrange(kinds)] if kinds else cards[k]
        found.append({"id": "local" if k == 0 else k, **card})
    ids = [device["id"] for device in found]
    links = []
    for k, a in enumerate(ids):
        for b in ids[k + 1 :]:
            if k == 0 or draw.random() < direct:
                speed = draw.choice(speeds)
                same = {"bytes_per_s": speed, "latency_s": 0.0004}
                links += [{"from": a, "to": b, **same}, {"from": b, "to": a, **same}]
    return FleetProfile.from_dict(
        {
            "version": 1,
            "layers": layers,
            "micro_batches": micro_batches,
            "activation_bytes": tensor_bytes,
            "gradient_bytes": tensor_bytes,
            "devices": found,
            "links": links,
        }
    )


def _card(
    draw: random.Random, devices: int, layers: int, tight: bool, layer_s: float, unlike: float
) -> dict[str, Any]:
    forward_s = layer_s / 3 * unlike ** draw.uniform(-0.5, 0.5)
    memory = 1e12
    if tight:
        share = layers / devices
        memory = share * (_LAYER_BYTES * draw.uniform(1.0, 2.2) + 1e8 * draw.uniform(1, 4))
    return {
        "memory_bytes": memory,
        "layer_forward_s": forward_s,
        "layer_backward_s": 2 * forward_s,
        "layer_recompute_s": forward_s,
        "embedding_forward_s": 0.1 * forward_s,
        "head_forward_s": 2 * forward_s,
        "head_backward_s": 4 * forward_s,
        "layer_bytes": _LAYER_BYTES,
        "embedding_bytes": _LAYER_BYTES / 2,
        "head_bytes": _LAYER_BYTES / 2,
        "activation_bytes_per_layer": _KEPT_BYTES,
        "activation_bytes_recomputed": _RECOMPUTED_BYTES,
    }
