"""Compares a cut model with the whole one, to show that the cut does not change the result.

A tiny random copy of an architecture is trained for three steps twice: as the stock transformers
model, and as a chain of shards. Loss, every gradient and every weight must agree, so that a model
that cannot be cut is refused with the reason and never trained wrong.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from transformers import PretrainedConfig

from hetero_framework import registry
from hetero_framework.config.objectives import Task
from hetero_framework.core.cache import recall, remember
from hetero_framework.core.files import NamingOf
from hetero_framework.data.batches import num_items
from hetero_framework.errors import ArchitectureError, ConfigError
from hetero_framework.models.adapters.trainable import attach_adapter
from hetero_framework.models.cut.chunked_loss import chunked_loss, spans
from hetero_framework.models.cut.codebooks import for_model
from hetero_framework.models.cut.family import family_of
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import towers
from hetero_framework.models.cut.partition import ShardRange, ranges_between, skeleton_of
from hetero_framework.models.cut.shard import Inputs, Shard, build_shard, token_loss
from hetero_framework.models.cut.side import (
    Bundle,
    as_leaves,
    crossing,
    differentiate,
    gradients_of,
)
from hetero_framework.models.cut.tiny import probe_inputs, shrink, stock_class, task_of
from hetero_framework.models.files.source import new_names
from hetero_framework.models.files.weights import Checkpoint, whole_model
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.models.rng import seed_cpu

if TYPE_CHECKING:
    from hetero_framework.models.adapters.adapter_plan import AdapterPlan

STEPS = 3
LEARNING_RATE = 1e-3
# Relative to the largest entry of a gradient; float32 sums in another order stay far below.
TOLERANCE = 1e-4
# A gradient that is zero but for rounding (a key's bias) is measured by the largest of all.
FLOOR = 1e-3
# Lengths of loss chunks that are tried.
_CHUNKS = (2, 5, 13)
Verdict = Literal["bit-equal", "within tolerance", "refused"]


@dataclass(frozen=True)
class Comparison:
    """The outcome of one comparison, with the largest differences: of losses (absolute), of
    gradients and of trained weights (relative to each tensor's largest entry), of all steps. `half`
    says how a step in bfloat16 autocast differs, empty where no bit does. `task` is what the
    compared class does."""

    model_type: str
    verdict: Verdict
    reason: str = ""
    subject: str = "a tiny copy"
    stages: tuple[ShardRange, ...] = ()
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    weight_difference: float = 0.0
    half: str = ""
    task: Task = "causal-lm"

    @property
    def passed(self) -> bool:
        return self.verdict != "refused"


def admit(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> Comparison:
    """Compare before training, unless it is known to pass. Raises ArchitectureError if it fails."""
    if family_of(config) is not None:  # the user's code may decide, which no cache key has
        return _admitted(compare(config, ranges))
    verdict = remembered(
        "cut", config, ranges, lambda: _admitted(compare(shrink(config), ranges)).verdict
    )
    return Comparison(config.model_type, verdict, stages=tuple(ranges))


def _admitted(result: Comparison) -> Comparison:
    if not result.passed:
        raise ArchitectureError(
            f"a {result.model_type} model cannot be cut this way: {result.reason}",
            hint="hold the layers named here on one stage, or choose another architecture"
            " (docs/architectures.md lists those that pass)",
        )
    return result


def admit_adapter(config: PretrainedConfig, plan: AdapterPlan) -> None:
    """Run a tiny copy with the adapter, unless it is known to run. Raises ConfigError where it does
    not: PEFT takes a module's inputs and outputs from its class, and some routers have others."""
    lora = plan.lora_config
    decisive = (plan.modules, plan.parameters, plan.saved_modules, lora.use_dora, lora.bias)
    remembered(f"adapter {decisive!r}", config, (), lambda: _try_adapter(config, plan))


def _try_adapter(config: PretrainedConfig, plan: AdapterPlan) -> bool:
    tiny, entered = shrink(config), ["the model"]
    fresh = copy.deepcopy(plan.lora_config)
    fresh.init_lora_weights = True  # nothing to read or to decompose
    with quiet_library():
        shard = whole_shard(tiny)
        attach_adapter(shard, replace(plan, lora_config=fresh, weights=None), 0)
        for name in plan.modules:
            shard.model.get_submodule(name).register_forward_pre_hook(
                lambda *_, name=name: entered.append(name)
            )
        try:
            shard.logits(probe(tiny)[0], ())
        except LIBRARY_ERRORS as error:
            raise ConfigError(
                f"a {config.model_type} model does not run with this adapter: {entered[-1]} fails"
                f" ({briefly(error)})",
                hint=f'set "adapter.exclude_modules": ["{entered[-1].rpartition(".")[2]}"]',
            ) from error
    return True


def remembered(
    what: str,
    config: PretrainedConfig,
    ranges: Sequence[ShardRange],
    find: Callable[[], Any],
    *code: Path,
) -> Any:
    """What `find` finds out about a tiny copy, as JSON data; remembered for all that it depends on:
    also the code in models/, in the extra for models of several parts, and in the folders `code`.
    `find` raises where it refuses, so a refusal is never remembered."""
    settings = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
    package = Path(__file__).parents[2]
    extras = {entry.extra for entry in registry.entries("multimodal").values()}
    folders = [package / "models", *(package / "extras" / name for name in extras), *code]
    versions = [torch.__version__, transformers.__version__, *map(own_code, folders)]
    machine = [platform.system(), platform.machine(), torch.get_num_threads()]
    cut = [astuple(rng) for rng in ranges]
    asked = [what, settings, config._attn_implementation, cut, versions, machine]
    question = json.dumps(asked, sort_keys=True, default=str)
    if (found := recall("verdicts", question)) is None:
        found = find()
        remember("verdicts", question, found)
    return found


@functools.cache
def own_code(folder: Path) -> str:
    """A digest of the modules in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compare(
    config: PretrainedConfig, ranges: Sequence[ShardRange], checkpoint: Checkpoint | None = None
) -> Comparison:
    """Train the whole model and the chain of its shards, in float32, on the CPU. Without
    `checkpoint` the weights are random, and `config` must be tiny."""
    if (family := family_of(config)) is not None:
        compared: Comparison = family.compare(config, ranges)
        return compared
    config = deterministic(config)
    subject = "a tiny copy" if checkpoint is None else "the model itself"
    result = Comparison(config.model_type, "refused", subject=subject, stages=tuple(ranges))
    result = replace(result, task=task_of(config))
    try:
        whole, shards = build_both(config, ranges, checkpoint)
    except ArchitectureError as error:
        return replace(result, reason=error.message)
    with quiet_library():
        return _train_both(whole, Chain(shards), config, result)


def deterministic(config: PretrainedConfig) -> PretrainedConfig:
    """A copy without dropout and its kin: their draws have no counterpart in the whole model."""
    config = copy.deepcopy(config)
    if task_of(config) != "causal-lm":
        config.classifier_dropout = 0.0  # 0.1 in classes whose configuration has none
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
    return config


def whole_shard(tiny: PretrainedConfig) -> Shard:
    """A tiny model with random weights, as one shard."""
    whole = ranges_between([0, introspect(tiny).num_layers])[0]
    return build_shard(tiny, None, whole, dtype=torch.float32)


def build_both(
    config: PretrainedConfig,
    ranges: Sequence[ShardRange],
    checkpoint: Checkpoint | None,
    sees: bool = False,
) -> tuple[Any, list[Shard]]:
    """The stock model and the shards, from one checkpoint; the first has towers if it `sees`."""
    towers(config)  # puts stand-ins for parts that this machine cannot build
    stock = stock_class(config)
    with quiet_library(), tempfile.TemporaryDirectory() as directory:
        if checkpoint is None:
            with torch.random.fork_rng(devices=[]):
                seed_cpu(0)
                model = stock._from_config(config, dtype=torch.float32)
                _perturb(model)
            with NamingOf(Path(directory)):
                model.save_pretrained(directory)
            checkpoint = Checkpoint(directory)
        build = functools.partial(build_shard, config, checkpoint, dtype=torch.float32)
        shards = [build(rng, sees=sees and rng.is_first) for rng in ranges]
        whole = whole_model(stock, config, checkpoint, torch.float32)
        drawn = new_names(skeleton_of(config), whole, checkpoint)
    for shard in shards:  # a head that the checkpoint lacks: the library draws other numbers
        for name, parameter in shard.model.named_parameters():
            if name in drawn:
                whole.get_parameter(name).data.copy_(parameter.data)
    whole.train(True)
    for shard in shards:
        shard.train(True)
    return whole, shards


def _perturb(model: torch.nn.Module) -> None:
    """Move vectors away from their initial ones and zeros, so that a lost vector shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))


def _train_both(
    whole: Any, chain: Chain, config: PretrainedConfig, result: Comparison
) -> Comparison:
    """`result` with the verdict."""

    def refused(reason: str) -> Comparison:
        crosses = "something crosses the cut beside the hidden state"
        return replace(result, reason=f"{reason}: {crosses}")

    result = replace(result, half=_half_problem(whole, chain, config))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        inputs, items = probe(config, seed=step)
        optimizer.zero_grad()
        loss = whole_step(whole, inputs, items, config)
        try:
            cut_loss = chain.forward_backward(inputs, items)
        except LIBRARY_ERRORS as error:
            return refused(f"a shard does not run alone ({briefly(error)})")
        difference = max(result.loss_difference, abs(loss - cut_loss))
        result = replace(result, loss_difference=difference)
        expected, actual = gradients(whole), chain.gradients()
        if lost := [name for name in expected if name not in actual]:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            return refused(f"no gradient reaches {', '.join(lost[:3])}{more}")
        if step == 0 and not difference <= TOLERANCE:
            return refused(f"the loss differs by {difference:.3g}")
        difference, worst = largest_difference(actual, expected)
        result = replace(result, gradient_difference=max(result.gradient_difference, difference))
        # Later gradients are those of weights that may differ.
        if step == 0 and not difference <= TOLERANCE:
            return refused(f"gradients differ by {difference:.3g} (relative), most in {worst}")
        optimizer.step()
        chain.step()
    trained = {name: p.detach() for name, p in whole.named_parameters() if name in chain.parameters}
    difference, worst = largest_difference(chain.parameters, trained)
    result = replace(result, weight_difference=difference)
    if max(result.loss_difference, result.gradient_difference, difference) == 0:
        return replace(result, verdict="bit-equal")
    if difference <= 100 * TOLERANCE and result.loss_difference <= TOLERANCE:
        return replace(result, verdict="within tolerance", reason=f"most in {worst}")
    return replace(result, reason=f"training diverges, most in {worst}")


def probe(config: PretrainedConfig, seed: int = 0) -> tuple[Inputs, torch.Tensor]:
    """A micro-batch of random tokens, and the number of its labels."""
    inputs = probe_inputs(config, seed, ids_per_token=introspect(config).ids_per_token)
    return inputs, torch.tensor(num_items([inputs]))


def why_not_chunked(config: PretrainedConfig) -> str | None:
    """Why the loss of this architecture cannot be computed in chunks; None where it can. A tiny
    copy computes it both ways. Raises ArchitectureError when no tiny copy runs."""
    tiny = shrink(config)
    if introspect(tiny).reports:
        return "the routers' loss is one of the whole micro-batch"
    with quiet_library():
        shard = whole_shard(tiny)
        shard.train(False)
        inputs, items = probe(tiny)
        try:
            loss = shard.loss(inputs, (), items)
            loss.backward()
            expected = _outcome(shard, loss)
            for limit in _CHUNKS:
                chunks = spans(inputs["labels"].shape, limit)
                how: Any = {"running": torch.enable_grad, "backward": torch.Tensor.backward}
                actual = _outcome(shard, chunked_loss(shard, inputs, (), items, chunks, **how))
                if lost := sorted(expected.keys() ^ actual.keys()):
                    return f"no gradient reaches {lost[0]}"
                for looked_at in ({"the loss": expected["the loss"]}, expected):
                    difference, worst = largest_difference(actual, looked_at, FLOOR)
                    if difference > TOLERANCE:
                        return f"{worst} would differ by {difference:.2g} (relative)"
        except LIBRARY_ERRORS as error:
            why = briefly(error)
            return f"what follows the layers does not run on a part of the tokens ({why})"
    return None


def _outcome(shard: Shard, loss: torch.Tensor) -> Inputs:
    """The loss and all gradients, which are taken out of the model."""
    found = {f"the gradient of {n}": t for n, t in gradients(shard.model).items()}
    shard.model.zero_grad()
    return {"the loss": loss.detach(), **found}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], floor: float = 0.0
) -> tuple[float, str]:
    """The largest difference, relative to each tensor's largest entry (at least a share `floor` of
    the largest entry of all), and where it is."""
    largest = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    least = max(floor * max(largest.values()), torch.finfo(torch.float32).tiny)
    worst, where = 0.0, ""
    for name, tensor in expected.items():
        other = actual.get(name, torch.zeros_like(tensor))
        scaled = (other.detach() - tensor).abs().max() / max(largest[name], least)
        difference = float(scaled.nan_to_num(nan=math.inf))
        if difference > worst:
            worst, where = difference, name
    return worst, where


def _half_problem(whole: Any, chain: Chain, config: PretrainedConfig) -> str:
    """How a cut changes the loss or the gradients in bfloat16 autocast; empty where it changes no
    bit. Trains nothing."""
    inputs, items = probe(config)
    half, who = torch.bfloat16, "the whole model does not run"
    # In training mode some routers draw among gates that are equal in 16 bits.
    for part in (whole, chain):
        part.train(False)
    try:
        loss = whole_step(whole, inputs, items, config, half)
        expected = {"the loss": torch.tensor(loss), **gradients(whole)}
        who = "a shard does not run alone"
        loss = chain.forward_backward(inputs, items, half)
        actual = {"the loss": torch.tensor(loss), **chain.gradients()}
    except LIBRARY_ERRORS as error:
        return f"{who} ({briefly(error)})"
    finally:
        whole.zero_grad()
        for part in (whole, chain):
            part.train(True)
    difference, worst = largest_difference(actual, expected)
    return f"differs by {difference:.1e} (relative), most in {worst}" if difference else ""


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype, enabled=dtype is not None)


def whole_step(
    whole: Any,
    inputs: Inputs,
    items: torch.Tensor,
    config: PretrainedConfig,
    autocast: torch.dtype | None = None,
) -> float:
    """The loss of the model in one piece; gradients are left in its parameters."""
    structure = introspect(config)
    inputs = for_model(inputs, structure.ids_per_token)
    with quiet_library():
        with _autocast(autocast):
            if task_of(config) != "causal-lm":
                loss = whole(**inputs, use_cache=False).loss
            elif structure.loss_counts_items:
                loss = whole(**inputs, num_items_in_batch=items, use_cache=False).loss
            else:
                without = {name: value for name, value in inputs.items() if name != "labels"}
                logits = whole(**without, use_cache=False).logits
                loss = token_loss(whole, logits, inputs["labels"], items)
        loss.backward()
    return float(loss.detach())


class Chain:
    """Shards in a row in one process, each with its own optimizer."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards, self._last = shards, shards[-1]
        self.parameters: dict[str, torch.nn.Parameter] = {
            name: parameter
            for shard in shards
            for name, parameter in shard.model.named_parameters()
        }
        self._ties = {name: source for shard in shards for name, source in shard.ties.items()}
        self._optimizers = []
        for shard in shards:
            named = shard.model.named_parameters()
            params = [parameter for name, parameter in named if name not in self._ties]
            self._optimizers.append(torch.optim.AdamW(params, lr=LEARNING_RATE) if params else None)

    def forward_backward(
        self, inputs: Inputs, items: torch.Tensor, autocast: torch.dtype | None = None
    ) -> float:
        """Return the loss; leave the gradients in the parameters. A tied weight's gradients are
        summed from its last place to its first."""
        for shard in self._shards:
            shard.model.zero_grad()
        received: Bundle = ()
        boundaries = []
        for shard in self._shards[:-1]:
            with _autocast(autocast):
                left = shard.forward(inputs, received)
            received = as_leaves(crossing(left))
            boundaries.append((left, received))
        with _autocast(autocast):
            if self._last.task != "causal-lm":
                loss, _ = self._last.classify(inputs, received)
            else:
                loss = self._last.loss(inputs, received, items)
        loss.backward()
        for left, received in reversed(boundaries):
            differentiate(left, gradients_of(received))
        sums: dict[str, torch.Tensor] = {}
        for name in [*reversed(self._ties), *dict.fromkeys(self._ties.values())]:
            source, gradient = self._ties.get(name, name), self.parameters[name].grad
            if gradient is not None:
                sums[source] = sums[source] + gradient if source in sums else gradient
        for name in {*self._ties, *self._ties.values()}:
            total = sums.get(self._ties.get(name, name))
            self.parameters[name].grad = None if total is None else total.clone()
        return float(loss.detach())

    def train(self, mode: bool) -> None:
        for shard in self._shards:
            shard.train(mode)

    def step(self) -> None:
        for optimizer in self._optimizers:
            if optimizer is not None:
                optimizer.step()
        with torch.no_grad():
            for target, source in self._ties.items():
                self.parameters[target].copy_(self.parameters[source])

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
