"""Compares a cut chain with the whole chain in one step on made-up examples."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from hetero_framework.errors import ArchitectureError, ModelError
from hetero_framework.extras.chains.chain import (
    INPUT,
    ChainConfig,
    bundles,
    examples,
    members,
    part_of,
    statistics,
)
from hetero_framework.extras.chains.chain_shard import ChainShard, build_chain
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.side import (
    Bundle,
    as_leaves,
    crossing,
    differentiate,
    gradients_of,
    returning,
)
from hetero_framework.models.library import LIBRARY_ERRORS, briefly
from hetero_framework.models.rng import seed_cpu

_ROWS = 2


def chain_problem(config: ChainConfig, ranges: Sequence[ShardRange]) -> str | None:
    """The first result of the cut chain that is not bit-equal to the whole chain's; None where all
    are. Raises what `build_chain` and the user's code raise."""
    batch = examples(config, _ROWS)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_cpu(0)
        for tensor in batch.values():
            if tensor.is_floating_point():
                tensor.normal_()
        seed_cpu(0)
        expected = _of_whole(config, batch)
        cpu = torch.device("cpu")
        shards = [build_chain(config, r, dtype=torch.float32, device=cpu, seed=0) for r in ranges]
        try:
            actual = _of_shards(shards, batch, bundles(config)[-1])
        except ArchitectureError:
            raise
        except (ModelError, *LIBRARY_ERRORS) as error:
            return f"a part does not run alone ({briefly(error)}): something goes around the cut"
    different = [name for name, value in expected.items() if not _same(actual.get(name), value)]
    return f"{different[0]} differs from that of the whole" if different else None


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)


def _of_whole(config: ChainConfig, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole chain's outputs, gradients and statistics, by name."""
    whole = config.whole(_enter)
    left = members(whole.float().train()(part_of(batch, INPUT)))
    differentiate(tuple(left.values()), _ones(tuple(left.values())))
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    renamed = partial(_renamed, config)
    return _named(left, renamed(gradients)) | renamed(statistics(whole))


def _renamed(config: ChainConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = ((name.partition("."), tensor) for name, tensor in tensors.items())
    return {config.users_name(child, rest): tensor for (child, _, rest), tensor in parts}


def _enter(place: int | str) -> None:
    if isinstance(place, int):
        seed_cpu(place)


def _of_shards(
    shards: Sequence[ChainShard], batch: dict[str, Tensor], names: Iterable[str]
) -> dict[str, Tensor]:
    crossed: list[tuple[Bundle, Bundle]] = []
    left: Bundle = ()
    for shard in shards:
        shard.train()
        shard.on_enter = _enter
        received = as_leaves(crossing(left)) if left else left
        left = shard.forward(batch, received)
        crossed.append((received, left))
    outputs, gradients = dict(zip(names, left, strict=True)), _ones(left)
    for received, left in reversed(crossed):
        differentiate(left, gradients)
        gradients = gradients_of(received)
    found = _named(outputs, {})
    for shard in shards:
        trained = shard.model.named_parameters()
        own = {name: p.grad for name, p in trained if p.grad is not None}
        found |= _named({}, shard.model.users_names(own))
        found |= shard.model.users_names(shard.statistics)
    return found


def _named(outputs: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {f"the output {name}".strip(): tensor.detach() for name, tensor in outputs.items()}
    return found | {f"the gradient of {name}": tensor for name, tensor in gradients.items()}


def _ones(left: Bundle) -> Bundle:
    return tuple(torch.ones_like(tensor) for tensor in returning(left))
