"""The profile of a fleet, from measured or estimated costs of a model's parts on each process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetero_framework.config import Config
from hetero_framework.core.codecs import CODECS
from hetero_framework.core.fields import WorkerId
from hetero_framework.extras.planner import FleetProfile
from hetero_framework.extras.planner.measuring import ModelCost
from hetero_framework.models.sizing.memory import StageMemory


def profile_of(
    config: Config,
    memory: Mapping[WorkerId, Sequence[StageMemory]],
    costs: Mapping[WorkerId, ModelCost],
    memory_bytes: Mapping[WorkerId, float],
    links: Sequence[Mapping[str, Any]],
) -> FleetProfile:
    """`memory` is that of embedding, layers and head as each process holds them, `memory_bytes`
    its limit."""
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
            "layer_bytes": [part.kept for part in layers],
            "embedding_bytes": embedding.kept,
            "head_bytes": head.kept + head.logits,
            "activation_bytes_per_layer": cost.of_layers("kept_bytes"),
            "activation_bytes_recomputed": cost.of_layers("recomputed_bytes"),
            "reserved_bytes": max(part.working for part in (embedding, *layers)),
        }
        for id, cost in costs.items()
        for embedding, *layers, head in [memory[id]]
    ]
    local = costs["local"]
    return FleetProfile.from_dict(
        {
            "version": 1,
            "layers": len(local.kinds),
            "micro_batches": config.training.gradient_accumulation_steps,
            "activation_bytes": _wire_bytes(local, config.wire.activations),
            "gradient_bytes": _wire_bytes(local, config.wire.gradients),
            "embedding_is_trained": memory["local"][0].gradients > 0,
            "devices": devices,
            "links": [dict(link) for link in links],
        },
        name="what was found",
    )


def _wire_bytes(cost: ModelCost, codec: str) -> int:
    """Bytes of a boundary's tensor on the wire."""
    dtype = getattr(torch, cost.hidden_dtype)
    return CODECS[codec].nbytes((cost.hidden_bytes // dtype.itemsize,), dtype)
