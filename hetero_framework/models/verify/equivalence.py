"""Compares a cut model with the whole one, to show that the cut does not change the result.

A tiny random copy of an architecture is trained for three steps twice: as the stock transformers
model, and as a chain of shards. Loss, every gradient and every weight must agree, so that a model
that cannot be cut is refused with the reason and never trained wrong.

For `data.padding_free` another tiny copy gets samples in one row, whole and cut, and must give the
same loss and gradients as in padded rows.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from transformers import PretrainedConfig

from hetero_framework.config.objectives import Task
from hetero_framework.core.cache import recall, remember
from hetero_framework.core.devices import open_device
from hetero_framework.data.batches import collate, num_items, pack
from hetero_framework.data.examples import ExamplesBuilder
from hetero_framework.errors import ArchitectureError, ConfigError
from hetero_framework.models.adapters.trainable import attach_adapter
from hetero_framework.models.cut.chunked_loss import chunked_loss, spans
from hetero_framework.models.cut.codebooks import for_model
from hetero_framework.models.cut.family import family_named, family_of
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model, towers
from hetero_framework.models.cut.partition import ShardRange, Skeleton, ranges_between
from hetero_framework.models.cut.shard import (
    Inputs,
    Shard,
    build_shard,
    load_model_config,
    new_names,
    token_loss,
)
from hetero_framework.models.cut.side import (
    Bundle,
    as_leaves,
    crossing,
    differentiate,
    gradients_of,
)
from hetero_framework.models.cut.tiny import (
    probe_inputs,
    shrink,
    stock_class,
    task_of,
    tiny_config,
)
from hetero_framework.models.cut.varlen_attention import VARLEN, register_per_sample
from hetero_framework.models.files.quantization import stored_quantization
from hetero_framework.models.files.stated import as_held
from hetero_framework.models.files.weights import Checkpoint
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.models.rng import seed_cpu
from hetero_framework.models.verify.boundary_contents import tiny_crossing
from hetero_framework.repository import resolve_model_path

if TYPE_CHECKING:
    from hetero_framework.config import Config
    from hetero_framework.models.adapters.adapter_plan import AdapterPlan

STEPS = 3
LEARNING_RATE = 1e-3
# Relative to the largest entry of a gradient; float32 sums in another order stay far below.
TOLERANCE = 1e-4
# One row instead of many rounds otherwise: of all architectures the ones that keep samples apart
# differ by 2e-5 or less, the others by 0.09 or more.
PACKING_TOLERANCE = 1e-3
# A gradient that is zero but for rounding (a key's bias) is measured by the largest of all.
_FLOOR = 1e-3
# Lengths of loss chunks that are tried.
_CHUNKS = (2, 5, 13)
# Longer than the sliding windows of tiny models (8), together longer than their positions (128).
_PACKED_LENGTHS = (23, 2, 31, 12, 19, 27, 9, 14)
# float32 weight, gradient and AdamW's two states.
_TRAINING_BYTES = 16

Verdict = Literal["bit-equal", "within tolerance", "refused"]


@dataclass(frozen=True)
class Packing:
    """Whether samples may share a row (`data.padding_free`): the reason against it, if any, and the
    attention implementation to train with (None: the model's own choice)."""

    attention: str | None
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """The outcome of one comparison, with the largest differences: of losses (absolute), of
    gradients and of trained weights (relative to each tensor's largest entry), of all steps. `half`
    says how a step in bfloat16 autocast differs, empty where no bit does. `crossing` is what
    crosses beside the hidden state, if anything does, and `towers` are what text does not use.
    `task` is what the compared class does."""

    model_type: str
    verdict: Verdict
    reason: str = ""
    subject: str = "a tiny copy"
    stages: tuple[ShardRange, ...] = ()
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    weight_difference: float = 0.0
    half: str = ""
    packing: Packing | None = None
    crossing: str = ""
    towers: tuple[str, ...] = ()
    task: Task = "causal-lm"

    @property
    def passed(self) -> bool:
        return self.verdict != "refused"


def ranges_from_cuts(cuts: Sequence[int], layers: int) -> tuple[ShardRange, ...]:
    """Stages between the given layer numbers: (2, 5) of 6 gives 0-2, 2-5, 5-6.

    Raises ArchitectureError for cuts that are out of order or outside the model.
    """
    bounds = [0, *cuts, layers]
    # Only the ends may be without layers: they have embedding and head.
    if bounds != sorted(bounds) or len(set(cuts)) < len(cuts):
        raise ArchitectureError(
            f"cuts {', '.join(map(str, cuts))} do not fit a model of {layers} layers",
            hint=f"give ascending layer numbers between 0 and {layers}",
        )
    return ranges_between(bounds)


def verify_model(
    config: Config | None = None,
    *,
    model_type: str | None = None,
    task: Task = "causal-lm",
    cuts: Sequence[int] | None = None,
) -> Comparison:
    """Compare the configured model (a tiny copy of it where its weights do not fit this machine
    several times), of the class that its objective trains, or a tiny one of an architecture and of
    its class for a task, with its cut self.

    It is refused also where `data.padding_free` is asked for and not possible. The cut is `cuts`,
    else the configuration's plan, else two cuts over the layers.
    """
    checkpoint = None
    if config is not None and config.model is not None:
        held, _ = as_held(config.model, config.base_dir)
        model_config = load_model_config(held, config.base_dir)
        if config.model.name_or_path is not None and _fits(model_config):
            source = resolve_model_path(str(config.model.name_or_path), config.base_dir)
            checkpoint = Checkpoint(source, config.model.revision)
        else:
            model_config = shrink(model_config)
    elif model_type is not None:
        with quiet_library():
            model_config = tiny_config(model_type, task)
            if (family := family_named(task)) is not None:
                model_config = family.tiny(model_config)
    else:
        raise ArchitectureError("there is no model to verify: name a configuration or a type")
    if cuts is not None or config is None:
        layers = introspect(model_config).num_layers
        thirds = sorted({max(1, layers // 3), max(1, layers - 1)} - {layers})
        ranges = ranges_from_cuts(thirds if cuts is None else cuts, layers)
    else:
        ranges = tuple(map(ShardRange.of, config.plan.stages))
    result = compare(model_config, ranges, checkpoint)
    starts = [rng.start for rng in ranges[1:]]
    result = replace(result, crossing=tiny_crossing(introspect(model_config), starts))
    result = replace(result, towers=towers(model_config))
    wanted = config is not None and config.data is not None and config.data.padding_free
    if not result.passed or not (wanted or (config is None and task == "causal-lm")):
        return result
    packing = try_packing(model_config, ranges)
    if wanted and packing.reason:
        result = replace(result, verdict="refused", reason=f"data.padding_free: {packing.reason}")
    return replace(result, packing=packing)


def _fits(config: PretrainedConfig) -> bool:
    """Whether two float32 copies in training, and as much again, fit this machine's free memory.
    Never for a quantised checkpoint: its whole counterpart is not in float32."""
    if stored_quantization(config) is not None:
        return False
    numbers = sum(p.numel() for p in meta_model(config).parameters())
    return 2 * 2 * _TRAINING_BYTES * numbers < open_device("cpu").memory().free


def admit(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> Comparison:
    """Compare before training, or remember that it passed. Raises ArchitectureError if not."""
    if family_of(config) is not None:  # what decides may be the user's code, unknown by its name
        return _admitted(compare(config, ranges))
    asked = question("cut", config, ranges)
    if verdict := recall("verdicts", asked):
        return Comparison(config.model_type, verdict, stages=tuple(ranges))
    result = _admitted(compare(shrink(config), ranges))
    remember("verdicts", asked, result.verdict)
    return result


def _admitted(result: Comparison) -> Comparison:
    if not result.passed:
        raise ArchitectureError(
            f"a {result.model_type} model cannot be cut this way: {result.reason}",
            hint="hold the layers named here on one stage, or choose another architecture"
            " (docs/architectures.md lists those that pass)",
        )
    return result


def admit_packing(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> str | None:
    """`Packing.attention` for training with `data.padding_free`, remembered. Raises
    ArchitectureError where samples of one row would see each other."""
    asked = question("packing", config, ranges)
    if answer := recall("verdicts", asked):
        attention: str | None = answer["attention"]
        return attention
    packing = try_packing(config, ranges)
    if packing.reason:
        raise ArchitectureError(
            f"a {config.model_type} model cannot be trained with data.padding_free:"
            f" {packing.reason}",
            hint="set data.padding_free to false (docs/architectures.md lists the architectures"
            " that can do without padding)",
        )
    remember("verdicts", asked, {"attention": packing.attention})
    return packing.attention


def admit_adapter(config: PretrainedConfig, plan: AdapterPlan) -> None:
    """Run a tiny copy with the adapter, or remember that it ran. Raises ConfigError where it does
    not: PEFT tells by its class what a module takes and gives, which some routers do not hold to.
    """
    asked = question(f"adapter {_settings(plan)}", config, ())
    if recall("verdicts", asked):
        return
    tiny = shrink(config)
    whole = ranges_between([0, introspect(tiny).num_layers])[0]
    inputs, entered = _probe_inputs(tiny), ["the model"]
    with quiet_library():
        shard = build_shard(tiny, None, whole, dtype=torch.float32)
        attach_adapter(shard, _fresh(plan), 0)
        for name in plan.modules:
            shard.model.get_submodule(name).register_forward_pre_hook(
                lambda *_, name=name: entered.append(name)
            )
        try:
            shard.logits(inputs, ())
        except LIBRARY_ERRORS as error:
            raise ConfigError(
                f"a {config.model_type} model does not run with this adapter: {entered[-1]} fails"
                f" ({briefly(error)})",
                hint=f'set "adapter.exclude_modules": ["{entered[-1].rpartition(".")[2]}"]',
            ) from error
    remember("verdicts", asked, True)


def _settings(plan: AdapterPlan) -> str:
    """The settings that decide how an adapter's modules run."""
    config = plan.lora_config
    return repr((plan.modules, plan.parameters, plan.saved_modules, config.use_dora, config.bias))


def _fresh(plan: AdapterPlan) -> AdapterPlan:
    """The same with nothing to read or to decompose."""
    config = copy.deepcopy(plan.lora_config)
    config.init_lora_weights = True
    return replace(plan, lora_config=config, weights=None)


def question(what: str, config: PretrainedConfig, ranges: Sequence[ShardRange]) -> str:
    """Everything on which an answer about a tiny copy depends, the code of models/ included, and of
    the extra for models of several parts."""
    settings = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
    package = Path(__file__).parents[2]
    extras = {entry.extra for entry in registry.entries("multimodal").values()}
    code = [own_code(package / "models"), *(own_code(package / "extras" / name) for name in extras)]
    versions = [torch.__version__, transformers.__version__, *code]
    machine = [platform.system(), platform.machine(), torch.get_num_threads()]
    cut = [astuple(rng) for rng in ranges]
    asked = [what, settings, config._attn_implementation, cut, versions, machine]
    return json.dumps(asked, sort_keys=True, default=str)


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
        return _train_both(whole, _Chain(shards), config, result)


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


def build_both(
    config: PretrainedConfig, ranges: Sequence[ShardRange], checkpoint: Checkpoint | None
) -> tuple[Any, list[Shard]]:
    """The stock model and the shards, from one checkpoint."""
    towers(config)  # has what this machine cannot build of it stood in for
    stock = stock_class(config)
    with quiet_library(), tempfile.TemporaryDirectory() as directory:
        if checkpoint is None:
            with torch.random.fork_rng(devices=[]):
                seed_cpu(0)
                model = stock._from_config(config, dtype=torch.float32)
                _perturb(model)
            model.save_pretrained(directory)
            checkpoint = Checkpoint(directory)
        shards = [build_shard(config, checkpoint, rng, dtype=torch.float32) for rng in ranges]
        whole = stock.from_pretrained(
            checkpoint.source,
            config=config,
            revision=checkpoint.revision or "main",
            dtype=torch.float32,
            use_safetensors=True,
        )
        drawn = new_names(Skeleton(config, introspect(config)), whole, checkpoint)
    for shard in shards:  # a head that the checkpoint lacks: the library draws other numbers
        for name, parameter in shard.model.named_parameters():
            if name in drawn:
                whole.get_parameter(name).data.copy_(parameter.data)
    whole.train(True)
    for shard in shards:
        shard.train(True)
    return whole, shards


def _perturb(model: torch.nn.Module) -> None:
    """Move vectors off their initial ones and zeros, so that a lost one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))


def _train_both(
    whole: Any, chain: _Chain, config: PretrainedConfig, result: Comparison
) -> Comparison:
    """`result` with the verdict."""

    def refused(reason: str) -> Comparison:
        crosses = "something crosses the cut beside the hidden state"
        return replace(result, reason=f"{reason}: {crosses}")

    result = replace(result, half=_half_problem(whole, chain, config))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        inputs = _probe_inputs(config, seed=step)
        items = torch.tensor(num_items([inputs]))
        optimizer.zero_grad()
        loss = _whole_step(whole, inputs, items, config)
        try:
            cut_loss = chain.forward_backward(inputs, items)
        except LIBRARY_ERRORS as error:
            return refused(f"a shard does not run alone ({briefly(error)})")
        difference = max(result.loss_difference, abs(loss - cut_loss.item()))
        result = replace(result, loss_difference=difference)
        expected, actual = _gradients(whole), chain.gradients()
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


def _probe_inputs(config: PretrainedConfig, seed: int = 0) -> Inputs:
    return probe_inputs(config, seed, ids_per_token=introspect(config).ids_per_token)


def why_not_chunked(config: PretrainedConfig) -> str | None:
    """Why the loss of this architecture cannot be computed in chunks; None where it can. A tiny
    copy computes it both ways. Raises ArchitectureError when none runs."""
    tiny = shrink(config)
    if introspect(tiny).reports:
        return "the routers' loss is one of the whole micro-batch"
    whole = ranges_between([0, introspect(tiny).num_layers])[0]
    with quiet_library():
        shard = build_shard(tiny, None, whole, dtype=torch.float32)
        shard.train(False)
        inputs = _probe_inputs(tiny)
        items = torch.tensor(num_items([inputs]))
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
                    difference, worst = largest_difference(actual, looked_at, _FLOOR)
                    if difference > TOLERANCE:
                        return f"{worst} would differ by {difference:.2g} (relative)"
        except LIBRARY_ERRORS as error:
            why = briefly(error)
            return f"what follows the layers does not run on a part of the tokens ({why})"
    return None


def _outcome(shard: Shard, loss: torch.Tensor) -> Inputs:
    """The loss and all gradients, which are taken out of the model."""
    gradients = {f"the gradient of {n}": t for n, t in _gradients(shard.model).items()}
    shard.model.zero_grad()
    return {"the loss": loss.detach(), **gradients}


def try_packing(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> Packing:
    """Whether samples of one row train as in padded rows, on a tiny copy, and by which attention.

    `VARLEN` is preferred to the library's mask over the row, which costs more. It also stands for
    kernels of variable lengths, which do not run on a CPU: the positions are the same.
    """
    asked = config._attn_implementation
    tried: dict[str | None, str | None] = {VARLEN: VARLEN, asked: asked}
    if asked is not None and "flash" in asked:
        tried = {VARLEN: asked}
    elif asked == "flex_attention":
        tried = {None: asked}  # the same mask functions
    elif asked not in (None, "sdpa"):
        tried = {asked: asked}
    reason = ""
    register_per_sample()
    try:
        config = deterministic(shrink(config))
        samples = _Samples(config)
        for attention, chosen in tried.items():
            config._attn_implementation = attention
            reason = _packing_problem(config, samples, ranges)
            if not reason:
                return Packing(chosen)
    except LIBRARY_ERRORS as error:
        reason = f"its tiny copy does not run ({briefly(error)})"
    return Packing(None, reason)


class _Samples:
    """Some samples in one row, and a whole model's results on them in padded rows."""

    def __init__(self, config: PretrainedConfig) -> None:
        text = config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        builder = ExamplesBuilder()
        for length in _PACKED_LENGTHS:
            ids = torch.randint(3, int(text.vocab_size), (length,), generator=generator).tolist()
            builder.add(ids, [True] * length)
        examples, rows = builder.build(), range(len(_PACKED_LENGTHS))
        self.packed = pack(examples, rows)
        self.items = torch.tensor(float(num_items([self.packed])))
        padded = collate(examples, rows, max(0, getattr(text, "pad_token_id", None) or 0))
        whole, _ = build_both(config, [], None)
        self.loss = _whole_step(whole, padded, self.items, config)
        self.gradients = _gradients(whole)


def _packing_problem(
    config: PretrainedConfig, samples: _Samples, ranges: Sequence[ShardRange]
) -> str:
    """Why samples cannot share a row under the configured attention; empty where they can: first
    the whole model, in one row and padded; then the chain of shards and the whole, in one row."""
    try:
        whole, shards = build_both(config, ranges, None)
        loss = _whole_step(whole, samples.packed, samples.items, config)
        gradients = _gradients(whole)
        difference, worst = largest_difference(gradients, samples.gradients, _FLOOR)
        if not max(difference, abs(loss - samples.loss)) <= PACKING_TOLERANCE:
            return (
                "samples that share a row do not stay apart: gradients differ from those of"
                f" padded rows by {difference:.2g} (relative), most in {worst}"
            )
        chain = _Chain(shards)
        with quiet_library():
            cut_loss = float(chain.forward_backward(samples.packed, samples.items))
    except ArchitectureError as error:
        return error.message
    except LIBRARY_ERRORS as error:
        return f"it cannot take many samples in one row ({briefly(error)})"
    difference, worst = largest_difference(chain.gradients(), gradients)
    if max(difference, abs(cut_loss - loss)) <= TOLERANCE:
        return ""
    return f"a cut changes gradients of one row by {difference:.2g} (relative), most in {worst}"


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], floor: float = 0.0
) -> tuple[float, str]:
    """The largest difference, relative to each tensor's largest entry (at least a share `floor` of
    the largest of all), and where it is."""
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


def _half_problem(whole: Any, chain: _Chain, config: PretrainedConfig) -> str:
    """How a cut changes the loss or the gradients in bfloat16 autocast; empty where it changes no
    bit. Trains nothing."""
    inputs = _probe_inputs(config)
    items, half = torch.tensor(num_items([inputs])), torch.bfloat16
    who = "the whole model does not run"
    # Some routers draw among gates that are equal in 16 bits in training.
    for part in (whole, chain):
        part.train(False)
    try:
        loss = _whole_step(whole, inputs, items, config, half)
        expected = {"the loss": torch.tensor(loss), **_gradients(whole)}
        who = "a shard does not run alone"
        actual = {"the loss": chain.forward_backward(inputs, items, half), **chain.gradients()}
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


def _whole_step(
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


class _Chain:
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
    ) -> torch.Tensor:
        """The loss; gradients are left in the parameters, those of a tied weight's places summed
        from the last one on."""
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
        return loss.detach()

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
