"""Chains as a family of models, and the comparison of a cut chain with the whole."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hetero_framework import control
from hetero_framework.config import Config, ModelConfig
from hetero_framework.errors import ArchitectureError, ModelError
from hetero_framework.extras.chains.chain import (
    INPUT,
    ChainConfig,
    ChainModel,
    bundles,
    child_flops,
    examples,
    made,
    members,
    modules_of,
    part_of,
    statistics,
)
from hetero_framework.extras.chains.chain_shard import ChainShard, build_chain
from hetero_framework.extras.chains.settings import ChainSettings
from hetero_framework.extras.chains.tensor_data import OwnExamples
from hetero_framework.models.cut.family import Family
from hetero_framework.models.cut.introspect import BlockForm, ModelStructure
from hetero_framework.models.cut.language import on_meta
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.side import (
    Bundle,
    Form,
    Side,
    as_leaves,
    crossing,
    differentiate,
    gradients_of,
    returning,
)
from hetero_framework.models.cut.tiny import PROBE_ROWS
from hetero_framework.models.library import LIBRARY_ERRORS, briefly
from hetero_framework.models.rng import seed_cpu
from hetero_framework.models.verify.equivalence import Comparison, Verdict

_ROWS = 2
_LOAD = """from safetensors.torch import load_file

chain = ...  # {} of the file that it was trained with
chain.load_state_dict(load_file("model.safetensors"))"""


class Chains(Family):
    """The family of chains: every child is a block, and no module is outside of the blocks."""

    stock_class = ChainModel

    def decided(self, config: Config) -> Config:
        """Decide the chain's forms and digest. An example counts as a row of one token."""
        data = config.data
        if config.model is None or data is None:
            return config
        model = ChainSettings.of(config.model)
        if model.chain_forms is not None or control.named(str(data.train)) is None:
            return config
        forms = OwnExamples("train", data.paths, config.training.seed).forms
        modules = modules_of(model.chain) if model.chain is not None else None
        settings = {"chain_forms": forms, "chain_modules": modules}
        return config.with_changes(model=settings, data={"max_length": 1})

    def read(self, model: ModelConfig, base_dir: Path) -> ChainConfig:
        settings = ChainSettings.of(model)
        name = str(settings.chain)
        if settings.chain_modules not in (None, found := modules_of(name)):
            raise ModelError(
                f"the file of --import on {platform.node()} makes another chain {name!r}"
                " than that of the run",
                hint="start all machines with the same file; where that makes random weights as it"
                " is imported, have a function return the nn.Sequential: it draws from"
                " training.seed",
            )
        return ChainConfig(name, forms_of(model), found)

    def structure(self, config: Any) -> ModelStructure:
        """Each tensor of a bundle after the first is a side tensor that crosses one boundary."""
        forms = bundles(config)
        count, model = len(forms) - 1, on_meta(ChainModel, config)
        sides = []
        for boundary, bundle in enumerate(forms):
            before = tuple(f"blocks.{k}." for k in range(boundary))
            weights = frozenset(n for n, _ in model.named_parameters() if n.startswith(before))
            for place, (name, (shape, dtype)) in enumerate(bundle.items()):
                where = (boundary, ((tuple, place),))
                depends = weights if dtype.is_floating_point else frozenset[str]()
                side = Side(name, boundary - 1, (where,), False, (1, *shape), dtype, depends)
                sides += [side] if place else []
        first = next(iter(forms[0].values()))
        return ModelStructure(
            model_class=ChainModel,
            blocks="blocks",
            forms=(BlockForm(0, None, 1),) * count,
            running=tuple(range(count)),
            sides=tuple(sides),
            hidden_shape=(PROBE_ROWS, *first[0]),
            tiny_width=1,
            statistics=tuple(statistics(model)),
        )

    def build(self, config: Any, rng: Any, *, dtype: Any, device: Any, seed: int) -> ChainShard:
        return build_chain(config, rng, dtype=dtype, device=device, seed=seed)

    def compare(self, config: Any, ranges: Any) -> Any:
        try:
            problem = chain_problem(config, ranges) or ""
        except ArchitectureError as error:
            problem = error.message
        except LIBRARY_ERRORS as error:
            problem = briefly(error)
        verdict: Verdict = "refused" if problem else "bit-equal"
        return Comparison(config.chain, verdict, problem, "the chain", tuple(ranges))

    def entering(self, config: Any, block: int, rows: int) -> tuple[Form, ...]:
        forms = bundles(config)[block].values()
        return tuple(((rows, *shape), dtype, dtype.is_floating_point) for shape, dtype in forms)

    def flops(self, config: Any, block: int, rows: int) -> int:
        return child_flops(config, block, rows)

    def users_names(self, model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return ChainModel.users_names(model, state)

    def card(self, config: Any) -> tuple[str, str, str]:
        return f"{config.chain}, a chain of modules", _LOAD.format(config.chain), "pytorch"

    def loading(self, weights: Path) -> str | None:
        return f"chain.load_state_dict(load_file({str(weights)!r}))"

    def load(self, fields: dict[str, Any], folder: Path) -> Any:
        """The chain that the imported file makes, with the trained weights."""
        chain = made(fields["chain"])
        parts = map(load_file, sorted(folder.glob("*.safetensors")))
        chain.load_state_dict({name: t for part in parts for name, t in part.items()})
        return chain


def forms_of(model: ModelConfig) -> dict[str, Any]:
    """The forms of a micro-batch's tensors. Raises ModelError where they are not decided."""
    forms = ChainSettings.of(model).chain_forms
    if forms is None:
        raise ModelError(
            "the forms of what the model takes are not known: no imported file has the data set"
            " that data.train names",
            hint="add --import FILE.py, with the data set, to the command",
        )
    return dict(forms)


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
    for name, value in expected.items():
        if (own := actual.get(name)) is None or not torch.equal(own, value):
            return f"{name} differs from that of the whole"
    return None


def _of_whole(config: ChainConfig, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole chain's outputs, gradients and statistics, by name."""

    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = ((name.partition("."), tensor) for name, tensor in tensors.items())
        return {config.users_name(child, rest): tensor for (child, _, rest), tensor in parts}

    whole = config.whole(_enter)
    left = members(whole.float().train()(part_of(batch, INPUT)))
    differentiate(tuple(left.values()), _ones(tuple(left.values())))
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    return _named(left, renamed(gradients)) | renamed(statistics(whole))


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


CHAINS = Chains()
