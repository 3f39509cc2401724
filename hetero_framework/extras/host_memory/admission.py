"""Shows that an architecture computes the same with layers that are not there all the time.

A tiny copy runs forward and backward with layers that take turns in one slot. It must give the same
bits as a copy that has all layers on the device.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from hetero_framework.core.cache import recall, remember
from hetero_framework.core.devices import Device
from hetero_framework.core.planned_order import FORWARD
from hetero_framework.data.batches import num_items
from hetero_framework.engine.stage_api import Residence
from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.host_memory.streamed_layers import HostLayer, StreamedLayers
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import build_shard
from hetero_framework.models.cut.tiny import probe_inputs, shrink
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.models.rng import seed_cpu
from hetero_framework.models.verify.equivalence import (
    deterministic,
    gradients,
    own_code,
    question,
)


def admit_streaming(config: PretrainedConfig) -> None:
    """Try a tiny copy, unless it is known to pass. Raises ArchitectureError where it fails."""
    asked = question(f"streaming {own_code(Path(__file__).parent)}", config, ())
    if recall("verdicts", asked):
        return
    if reason := try_streaming(shrink(config)):
        raise ArchitectureError(
            f"the layers of a {config.model_type} model cannot stay in host memory: {reason}",
            hint="take offload out of shard_plan",
        )
    remember("verdicts", asked, True)


def try_streaming(tiny: PretrainedConfig) -> str:
    """The reason why a tiny model's layers cannot be streamed; empty where they can."""
    tiny = deterministic(tiny)
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
    structure = introspect(tiny)
    whole = ranges_between([0, structure.num_layers])[0]
    shard = build_shard(tiny, None, whole, dtype=torch.float32)
    blocks = dict(enumerate(shard.model.get_submodule(structure.blocks)))
    for block in blocks.values():
        block.requires_grad_(False)
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
        inputs = probe_inputs(tiny, k, ids_per_token=structure.ids_per_token)
        with torch.random.fork_rng(devices=[]):
            seed_cpu(k)  # some models draw, and no setting turns it off
            loss = shard.loss(inputs, (), torch.tensor(num_items([inputs])))
            loss.backward()
        found[f"the loss of micro-batch {k}"] = loss.detach()
    return {**found, **gradients(shard.model)}
