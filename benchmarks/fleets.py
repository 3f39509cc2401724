"""Random fleets on paper, for the planner's benchmarks and tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hetero_framework.extras.planner import FleetProfile
from hetero_framework.extras.planner.host_link import HostLink
from hetero_framework.extras.planner.known_devices import KnownDevice, host_memory, known_device

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


# Layers, hidden size, that of the MLP, and tokens of the vocabulary: Llama of 3B, 8B and 13B, Qwen
# of 32B.
_MODELS = (
    *((28, 3072, 8192, 128256), (32, 4096, 14336, 128256)),
    *((40, 5120, 13824, 32000), (64, 5120, 27648, 152064)),
)
_CARDS = (
    *("RTX 4090 +64GB", "RTX 3090 +64GB", "RX 7900 XTX +64GB", "RTX 3060 +32GB", "A100 80GB"),
    *("RTX 4070 Ti SUPER +32GB", "RTX 4060 Ti 16GB +32GB", "RTX 5090 +128GB", "Arc B580 +32GB"),
    *("Apple M2 Max 64GB", "Apple M4 Pro 48GB", "DGX Spark", "Ryzen AI Max+ 395 128GB", "L4 +64GB"),
    *("RTX 2080 Ti +32GB", "16-core CPU 64GB"),
)
_MATRICES, _ADAPTERS = 9, 14  # tensors of a layer: seven products and two norms; A and B of each

Seconds = Callable[..., float]


def estimated_fleet(draw: random.Random, seconds: Sequence[Seconds]) -> list[FleetProfile]:
    """A model with an adapter on machines with a device of the table each, as each of `seconds`
    (like `KnownDevice.seconds`) estimates it."""
    layers, *job = draw.choice(_MODELS)
    tokens, packed = draw.choice((512, 1024, 2048, 4096)), draw.random() < 0.5
    devices = [known_device(name) for name in draw.sample(_CARDS, draw.randint(2, 4))]
    rate, m = draw.choice((GIGABIT, 2.5 * GIGABIT, 10 * GIGABIT)), draw.choice((4, 8, 16, 32))
    ids = ["local", *range(1, len(devices))]
    links = [
        {"from": a, "to": b, "bytes_per_s": rate, "latency_s": 3e-4}
        for a in ids
        for b in ids
        if a != b
    ]
    return [
        FleetProfile.from_dict(
            {
                "version": 1,
                "layers": layers,
                "micro_batches": m,
                "activation_bytes": 2 * tokens * job[0],
                "gradient_bytes": 2 * tokens * job[0],
                "embedding_is_trained": False,
                "devices": [
                    {"id": id, **_estimated(device, job, tokens, packed, estimate)}
                    for id, device in zip(ids, devices, strict=True)
                ],
                "links": links,
            }
        )
        for estimate in seconds
    ]


def _estimated(
    device: KnownDevice, job: Sequence[int], tokens: int, packed: bool, estimate: Seconds
) -> dict[str, Any]:
    """The work of a device for a row of `tokens`. `packed`: weights have 4 bits, not on a Mac."""
    width, wide, vocabulary = job
    packed &= device.kind != "apple"
    numbers, kept = 4 * width**2 + 3 * width * wide, 2.0 * tokens * (16 * width + 3 * wide)
    weights, head = (0.56 if packed else 2.0) * numbers, 2.0 * vocabulary * width
    products, attention = 2.0 * tokens * numbers, 4.0 * tokens**2 * width
    unpacked = float(numbers * packed)
    moved, logits = weights + 2.0 * unpacked + 2.0 * kept, 8.0 * tokens * vocabulary

    def seconds(flops: float, nbytes: float, unpacked: float = 0.0, tensors: int = 1) -> float:
        return estimate(device, flops, nbytes, unpacked, half=True, width=width, tensors=tensors)

    tensors = _MATRICES + _ADAPTERS
    forward_s = seconds(products + attention, moved, unpacked, tensors)
    head_s = seconds(tokens * head, head + logits)
    link = HostLink(device.host_link, device.host_link, 1.0, host_memory()["copy_slowdown"])
    return {
        "memory_bytes": device.usable_bytes,
        "layer_forward_s": forward_s,
        "layer_backward_s": seconds(products + 2 * attention, moved, unpacked, tensors),
        "layer_recompute_s": forward_s,
        "head_forward_s": head_s,
        "head_backward_s": head_s,
        "layer_bytes": weights,
        "layer_frozen_bytes": weights * bool(device.host_bytes),
        "embedding_bytes": head,
        "head_bytes": head + logits,
        "activation_bytes_per_layer": kept,
        "activation_bytes_recomputed": 2.0 * tokens * width,
        "host_bytes": device.usable_host_bytes,
        **(asdict(link) if device.host_bytes else {}),
    }


def seconds_before(
    device: KnownDevice, flops: float, nbytes: float, unpacked: float, *, half: bool, **_: Any
) -> float:
    """The estimate before it was fitted on published speeds: one share of the arithmetic for all
    GPUs, and unpacking as traffic that hides behind it."""
    compute, start_s = {"apple": (0.5, 5e-4), "cpu": (0.5, 2e-4)}.get(device.kind, (0.45, 3e-4))
    peak = compute * (device.half_flops if half else device.float_flops)
    rate = device.bandwidth * device.efficiency.bandwidth
    return start_s + max(flops / peak, (nbytes + 2 * unpacked) / rate)
