"""Setup before the first step: reads and checks everything, and decides open settings."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hetero_framework import registry
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import AdapterConfig, Config, StageSpec
from hetero_framework.config.asked_extras import asked
from hetero_framework.config.objectives import shows_pictures
from hetero_framework.core.codecs import CODECS
from hetero_framework.core.devices import open_device
from hetero_framework.data.kinds import kind_of
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.engine.pipeline import Pipeline
from hetero_framework.engine.schedule.tuning import default_max_in_flight
from hetero_framework.engine.state_snapshot import STATE_PART_BYTES, in_parts
from hetero_framework.errors import ConfigError, DataError, DeviceError, PlanError
from hetero_framework.log import at_work
from hetero_framework.models.adapters.adapter_plan import PEFT_PREFIX, AdapterPlan
from hetero_framework.models.cut.attention import check_attention
from hetero_framework.models.cut.chunked_loss import chunk_tokens
from hetero_framework.models.cut.family import decided, family_of, head_for
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import first_layers, meta_model, tower_lines
from hetero_framework.models.cut.objective import ChunkedObjective
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.tiny import task_of
from hetero_framework.models.files.export import weights_beside
from hetero_framework.models.files.quantization import check_devices, devices_known, mixed_lines
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.files.weights import few
from hetero_framework.models.library import quiet_libraries
from hetero_framework.models.sizing.memory import (
    StageMemory,
    estimate_memory,
    in_flight_limits,
    offload_layers,
    recompute_stages,
    uncounted_lines,
)
from hetero_framework.models.verify.boundary_contents import (
    check_codec,
    crossing_lines,
    largest_sides,
)
from hetero_framework.models.verify.equivalence import admit, admit_adapter, why_not_chunked
from hetero_framework.trainer.continuation import contents
from hetero_framework.trainer.memory_checks import (
    Facts,
    check_memory,
    devices_of,
    host_memory_lines,
)
from hetero_framework.trainer.resolution import Resolved

Entries = Sequence[Mapping[str, Any]]
"""The entries of a shard_plan, as JSON types."""

_log = logging.getLogger(__name__)
_FRAME_MARGIN = 1 << 20
_MAX_STREAMS = 8


@dataclass(frozen=True)
class Sample:
    """A prompt as people read it, and the text that the model put behind it. `pictures` are small
    copies of the prompt's pictures, as data URLs."""

    prompt: str
    text: str
    tokens: int
    pictures: tuple[str, ...] = ()


class PromptSampler(Protocol):
    """Has the model continue a run's sample_prompts. `line` is for the user."""

    line: str

    @property
    def longest(self) -> int:
        """Number of tokens in the longest text."""

    def run(self, cluster: Cluster, config: Config, step: int) -> list[Sample]:
        """Samples after `step`, under the plan of `config`."""


@dataclass(frozen=True)
class Prepared:
    """A run's settings before any process is started, and `memory_limits`: how many micro-batches
    each stage has memory for, once the devices are known."""

    resolved: Resolved
    source: ModelSource
    tokenizer: PreTrainedTokenizerBase | None  # None for a model that reads no text
    data: TrainData
    adapter_plan: AdapterPlan | None
    memory: list[StageMemory]
    max_frame_bytes: int
    max_boundary_bytes: int
    sampler: PromptSampler | None = None
    memory_limits: tuple[int, ...] | None = None

    @property
    def config(self) -> Config:
        """The configuration for all processes."""
        return self.resolved.config

    @property
    def model_config(self) -> PretrainedConfig:
        """The model's configuration."""
        return self.source.config

    @cached_property
    def contents(self) -> dict[str, str | None]:
        """Inputs of the result that are no settings (trainer/continuation.py)."""
        return contents(self.tokenizer, self.data)


def _say(line: str) -> None:
    warning = line.removeprefix("warning: ")
    _log.log(logging.INFO if warning == line else logging.WARNING, "%s", warning)


@at_work("checking the model, the data and the plan")
def prepare(
    config: Config,
    plan: Entries | None = None,
    *,
    say: Callable[[str], object] = _say,
    most: int | None = None,
) -> Prepared:
    """Read the model's configuration, the tokenizer and the data, and check the plan against them.
    `plan` replaces the plan of `config` if the run took it earlier. Raises the UserError that fits
    the problem. No process is started and no weight is read.

    `say` gets each line for the user; `most` limits the number of examples that are read.
    """
    resolved, adapter_plan = Resolved.start(decided(config)), None
    if plan is not None:
        resolved = resolved.decide("shard_plan", list(plan), "the plan that the run had taken")
    quiet_libraries(resolved.config.training.log_level)
    resolved, source = _as_its_files_hold_it(resolved, say)
    config, training = resolved.config, resolved.config.training
    own = None if training.reads_text else registry.find("data", training.data_kind)(config)
    for line in _model_lines(config, source):
        say(line)
    tokenizer, data = (None, own) if own else read_data(config, source.config, most=most)
    for line in data.report:
        say(line)
    if (head := head_for(source.model.task)) is not None:
        resolved = resolved.decide("model", *head.decided(source.model, data))
        source = ModelSource.of(resolved.config)
    config, model_config = resolved.config, source.config
    if config.adapter is not None:
        resolved, adapter_plan = _with_adapter(resolved, config.adapter, source)
    check_objective(config, model_config, adapter_plan)
    with at_work("comparing a tiny copy of the model, cut this way, with the whole"):
        _admit_cut(config, model_config, say)
    if data.settings.one_row:
        what = "data.packing" if data.settings.packing else "data.padding_free"
        settle = registry.needed("packing", "settle", what)
        resolved = settle(resolved, model_config)
    if own is None:
        resolved = resolve_loss_chunk(resolved, model_config, data.row_tokens)
    for decision in resolved.decisions:
        say(decision.reason)
    return _sized(resolved, source, tokenizer, data, adapter_plan, say)


def _sized(
    resolved: Resolved,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase | None,
    data: TrainData,
    adapter_plan: AdapterPlan | None,
    say: Callable[[str], object],
) -> Prepared:
    """The settings with the memory of the stages and the sizes of what crosses between them."""
    config, model_config = resolved.config, source.config
    memory = _stage_memory(config, model_config, data, adapter_plan)
    check_codec(config, model_config, adapter_plan, data.row_tokens)
    crossing = crossing_lines(config, model_config, data.row_tokens)
    for line in (*uncounted_lines(memory), *crossing):
        say(line)
    boundary, sampler = largest_boundary(config, model_config, data.row_tokens), None
    for sampler_of in asked("samplers", config):
        sampler = sampler_of(config, model_config, tokenizer, source.generation)
        say(sampler.line)
        boundary = max(boundary, largest_boundary(config, model_config, sampler.longest, rows=1))
    frame = largest_frame(model_config, boundary)
    about = (tokenizer, data, adapter_plan, memory, frame, boundary)
    return Prepared(resolved, source, *about, sampler)


def _model_lines(config: Config, source: ModelSource) -> Iterator[str]:
    """Check the plan, the devices and the settings against the model; lines for the user."""
    yield from codec_lines(config, source.dtype)
    config.plan.covers(introspect(source.config).num_layers, first_layers(config, source.config))
    check_devices(config, source.config, devices_known(config, ["local"]))
    here: dict[int | str, str] = {}
    with suppress(DeviceError):  # a missing device is reported later
        here = {"local": open_device(config.coordinator.device).name}
    check_attention(config, here)
    about = tower_lines(source.config, sees=shows_pictures(config.training.data_kind))
    yield from (*mixed_lines(config), *about, *source.stored_lines())
    if config.adapter is None:
        weights_beside(source)  # or raises
    _ = source.generation  # or raises
    check_compiled(config, source.config)


def _as_its_files_hold_it(
    resolved: Resolved, say: Callable[[str], object]
) -> tuple[Resolved, ModelSource]:
    """Decide what the model's files decide about its tied weights; also return the model."""
    source, lines = ModelSource.of(resolved.config).held()
    for line in (*resolved.config.warnings(), *lines):
        say(f"warning: {line}")
    held = source.model
    if new := source.new_weights:
        begin = "they begin at random, from training.seed"
        say(f"warning: the model {held.name_or_path!r} has no weights for {few(new)}: {begin}")
    if held != resolved.config.model:
        reason = "the checkpoint holds both ends of its tied weights"
        tied = held.tie_word_embeddings
        resolved = resolved.decide("model.tie_word_embeddings", tied, reason)
    return resolved, source


def _with_adapter(
    resolved: Resolved, adapter: AdapterConfig, source: ModelSource
) -> tuple[Resolved, AdapterPlan]:
    """Plan the adapter, with the settings of the adapter that it begins with. Raises ConfigError
    also if it would not hold all weights that begin at random."""
    from hetero_framework.models.adapters.lora import explicit_settings, plan_adapter

    plan = plan_adapter(source.config, adapter, source.base_dir)
    saved = tuple(f"{name}." for name in plan.saved_modules)
    if lost := [name for name in source.new_weights if not name.startswith(saved)]:
        raise ConfigError(
            f"the checkpoint has no weights for {few(lost)}: they would begin at random, and the"
            " adapter would not bring them along",
            hint=f'name their module in "adapter.modules_to_save" ({lost[0].rpartition(".")[0]}),'
            " or train all weights",
        )
    for remark in plan.remarks:
        _log.warning("%s", remark)
    explicit = explicit_settings(adapter, plan)
    if explicit != adapter:
        reason = f"adapter: the settings are those of {adapter.init_from}"
        resolved = resolved.decide("adapter", explicit.model_dump(mode="json"), reason)
    if resolved.config.training.verify_architecture:
        admit_adapter(source.config, plan)
    return resolved, plan


def read_data(
    config: Config, model_config: PretrainedConfig, *, most: int | None = None
) -> tuple[PreTrainedTokenizerBase, TrainData]:
    """Load tokenizer and data, and check them on the model; `most` limits each set's examples."""
    tokenizer = load_tokenizer(config)
    vocab_size = model_config.get_text_config().vocab_size
    labels = kind_of(config.training.data_kind).labels
    data = load_data(
        *(config, tokenizer),
        vocab_size=vocab_size,
        most=most,
        stated=None if labels is None else labels.stated(config, model_config),
    )
    check_positions(model_config, data.row_tokens)
    return tokenizer, data


def replanned(prepared: Prepared, plan: Entries, facts: Facts, reason: str) -> Prepared:
    """The same run under another plan, decided for `reason`. Raises PlanError if the plan does not
    fit the devices, and ArchitectureError if the model cannot be cut in this way."""
    resolved = prepared.resolved.decide("shard_plan", list(plan), reason)
    config = resolved.config
    model = prepared.model_config
    config.plan.covers(introspect(model).num_layers, first_layers(config, model))
    if config.kinds != prepared.config.kinds:
        raise PlanError(
            "layers would be held in another precision, which changes the result: as"
            f" {json.dumps(config.kinds)} instead of {json.dumps(prepared.config.kinds)}",
            hint="layers move between machines of one kind of quantization only",
        )
    _admit_cut(config, prepared.model_config)
    if prepared.data.settings.one_row:
        registry.find("packing", "admit")(prepared.model_config, shard_ranges(config))
    memory = _stage_memory(config, prepared.model_config, prepared.data, prepared.adapter_plan)
    return fit_devices(replace(prepared, resolved=resolved, memory=memory), facts)


def _admit_cut(
    config: Config, model_config: PretrainedConfig, say: Callable[[str], object] = _say
) -> None:
    if config.training.verify_architecture and len(config.shard_plan) > 1:
        result = admit(model_config, shard_ranges(config))
        what = result.subject.replace("a tiny copy", f"a tiny {result.model_type}")
        say(f"{what} cut this way equals the whole: {result.verdict}")


def _stage_memory(
    config: Config, model_config: PretrainedConfig, data: TrainData, plan: AdapterPlan | None
) -> list[StageMemory]:
    most = config.training.max_in_flight or default_max_in_flight(len(config.shard_plan))
    how: Any = {"tokens": data.row_tokens, "pictures": data.pictures, "plan": plan}
    return estimate_memory(config, model_config, max_in_flight=most, **how)


def resolve_loss_chunk(resolved: Resolved, model_config: PretrainedConfig, tokens: int) -> Resolved:
    """Decide loss_chunk_tokens; None where the loss of a micro-batch is computed whole. `tokens` is
    the length of the longest row."""
    training = resolved.config.training
    if not isinstance(objective_of(training), ChunkedObjective):
        return resolved
    rows = training.train_rows
    if training.evaluation != "no" or training.eval_on_start:
        rows = max(rows, training.eval_rows)
    size = rows * tokens
    limit, text = chunk_tokens(training.loss_chunk_tokens, model_config), ""
    if limit is not None and size <= limit:
        limit, text = None, f"the logits of a whole micro-batch, {size} tokens, fit at once"
    elif limit is not None and (reason := why_not_chunked(model_config)) is not None:
        limit, text = None, f"the logits of all tokens of a micro-batch exist at once: {reason}"
    elif limit is not None:
        text = f"the logits of {limit} tokens exist at once"
    if limit == training.loss_chunk_tokens:
        return resolved
    return resolved.decide("training.loss_chunk_tokens", limit, text)


def codec_lines(config: Config, dtype: torch.dtype) -> list[str]:
    """Lines on the effect of the `wire` section's codecs on this run's tensors of type `dtype`."""
    lines = []
    chosen = (("activations", config.wire.activations), ("gradients", config.wire.gradients))
    for what, codec in chosen if len(config.shard_plan) > 1 else ():
        support = CODECS[codec].supports(dtype)
        if not support:
            lines.append(f"wire.{what}: {support.reason}; {what} travel as they are")
        elif codec != "none":
            lines.append(
                f"wire.{what} {codec}, so the result depends on the cut. {CODECS[codec].error}"
            )
    return lines


def check_compiled(config: Config, model_config: PretrainedConfig) -> None:
    """Raise ConfigError if layers are compiled whose routers' reports the loss needs."""
    if config.training.compiles and introspect(model_config).reports:
        raise ConfigError(
            "training.torch_compile is set, but what the routers of compiled layers report does not"
            " reach the loss",
            hint='remove torch_compile, or set "model.router_aux_loss_coef": 0',
        )


def check_objective(
    config: Config, model_config: PretrainedConfig, plan: AdapterPlan | None
) -> None:
    """Raise ConfigError for an objective that this model or these settings cannot have."""
    training = config.training
    objective = objective_of(training)
    if objective.counts_tokens:
        return
    if task_of(model_config) != "causal-lm" and training.label_smoothing_factor:
        raise ConfigError(
            "training.label_smoothing_factor is for models that generate text, and"
            f" training.objective is {training.objective!r}",
            hint="leave it out",
        )
    if introspect(model_config).reports and not objective.adds_routing:
        raise ConfigError(
            f"training.objective {training.objective!r} leaves out the load-balancing loss of the"
            f" routers, which the {model_config.model_type} model's configuration switches on",
            hint='set "router_aux_loss_coef": 0 in "model" to train without it',
        )
    objective.check(plan)


def check_positions(model_config: PretrainedConfig, tokens: int) -> None:
    """Raise DataError when a sample is longer than the model's table of positions. Only learned
    tables have an end; rotary and other computed positions have none."""
    model = meta_model(model_config)
    words = model.get_input_embeddings()
    for name, module in model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding) and module is not words
        if is_table and ("position" in name or name.endswith("wpe")):
            # OPT and its kin keep two extra rows in front.
            rows = int(getattr(model_config.get_text_config(), "max_position_embeddings", 0))
            if rows and tokens > rows:
                raise DataError(
                    f"the longest row has {tokens} tokens, but the model has {rows} positions",
                    hint=f"set data.max_length to {rows} or less"
                    " (and data.pad_to_multiple_of, if it is set, to one of its divisors)",
                )


def shard_ranges(config: Config) -> tuple[ShardRange, ...]:
    return tuple(map(ShardRange.of, config.plan.stages))


def largest_boundary(
    config: Config, model_config: PretrainedConfig, tokens: int, rows: int | None = None
) -> int:
    """The most bytes of tensors that cross a boundary at once, under any plan: the hidden_states of
    the largest micro-batch in float32, and side tensors. `tokens` is the longest row's length.
    `rows` is by default the most rows of a training or evaluation micro-batch."""
    training, structure = config.training, introspect(model_config)
    rows = rows or max(training.train_rows, training.eval_rows)
    if (family := family_of(model_config)) is not None:
        bundles = (family.entering(model_config, k, rows) for k in range(structure.num_layers + 1))
        return max(
            sum(math.prod(shape) * max(4, dtype.itemsize) for shape, dtype, _ in forms)
            for forms in bundles
        )
    # A tiny copy may have fewer residual streams than the model.
    streams = max(structure.streams, _MAX_STREAMS) if structure.streams > 1 else 1
    width = int(model_config.get_text_config().hidden_size) * streams
    hidden = 4 * rows * structure.hidden_tokens(max(tokens, 1)) * width
    return hidden + largest_sides(config, model_config, rows, max(tokens, 1))


def largest_frame(model_config: PretrainedConfig, boundary_bytes: int) -> int:
    """Upper bound in bytes of any frame of a run. A frame holds what crosses a boundary, or a part
    of a state: STATE_PART_BYTES and at most one tensor more, with at most 8 bytes per number."""
    largest_tensor = 8 * max(p.numel() for p in meta_model(model_config).parameters())
    return max(boundary_bytes, largest_tensor + STATE_PART_BYTES) + _FRAME_MARGIN


def fit_devices(prepared: Prepared, facts: Facts) -> Prepared:
    """Decide by the devices' free memory, before anything is loaded: which stages with
    checkpointing "auto" compute their layers again, how many layers the stages with offload "auto"
    stream, and how many micro-batches each stage may hold. Recomputing comes first: it costs at
    most a third of the computing, while the cost of streaming depends on the link to the device.
    Raises PlanError if a stage still does not fit its device or its machine lacks host memory,
    ConfigError for quantised weights on a device that cannot hold them, and DeviceError as
    `host_memory_lines` does."""
    resolved, config = prepared.resolved, prepared.resolved.config
    no_four_bit = {owner: fact.no_four_bit for owner, fact in facts.items()}
    check_devices(config, prepared.model_config, no_four_bit)
    check_attention(config, {owner: fact.device for owner, fact in facts.items()})

    one = {owner for owner, fact in facts.items() if fact.host_free is None}
    for line in host_memory_lines(config, one):
        _log.info("%s", line)

    def placed(memory: Iterable[StageMemory]) -> list[StageMemory]:
        on = {owner: fact.device for owner, fact in facts.items()}
        return [m.placed(on[m.stage.owner], one_memory=m.stage.owner in one) for m in memory]

    memory = placed(prepared.memory)
    devices = devices_of(config, facts)
    optional = {s.index for s in config.plan.stages if config.checkpointing(s.index) == "auto"}
    if optional:
        changed = _checkpointing(resolved, dict.fromkeys(optional, True), "").config
        data, plan = prepared.data, prepared.adapter_plan
        how: Any = {"tokens": data.row_tokens, "pictures": data.pictures, "plan": plan}
        how["in_flight"] = [m.in_flight for m in memory]
        estimated = estimate_memory(changed, prepared.model_config, **how)
        recomputing = placed(estimated)
        chosen = recompute_stages(memory, recomputing, optional, devices)
        stages = f"stage{'s' * (len(chosen) > 1)} {', '.join(map(str, sorted(chosen)))}"
        needed = f", to fit the memory: {stages}" if chosen else ": no stage needs it"
        line = f"gradient checkpointing{needed}"
        resolved = _checkpointing(resolved, {k: k in chosen for k in sorted(optional)}, line)
        memory = [recomputing[m.index] if m.index in chosen else m for m in memory]
        _log.info("%s", line)
    resolved, memory = fit_offload(resolved, memory, facts)
    memory_limits = None
    if config.training.max_in_flight is None:
        limit = config.training.gradient_accumulation_steps
        memory_limits = in_flight_limits(memory, limit, devices)
        memory = [m.holding(min(m.in_flight, memory_limits[m.index])) for m in memory]
    fitted = replace(prepared, resolved=resolved, memory=memory, memory_limits=memory_limits)
    check_memory(fitted.config, memory, facts, prepared.model_config)
    return fitted


def fit_offload(
    resolved: Resolved, memory: list[StageMemory], facts: Facts
) -> tuple[Resolved, list[StageMemory]]:
    """Decide how many layers the stages with offload "auto" stream: the fewest with which they fit,
    and none where device and host have one memory."""
    config = resolved.config
    optional = [k for k, entry in enumerate(config.shard_plan) if entry.offload == "auto"]
    if not optional:
        return resolved, memory
    apart = {k for k in optional if facts[memory[k].stage.owner].host_free is not None}
    counts = offload_layers(memory, apart, devices_of(config, facts))
    memory = [m.offloading(counts.get(m.index, m.offload)) for m in memory]
    some = [m for m in memory if counts.get(m.index)]
    said = [f"stage {m.index} streams {m.offload} of its {len(m.frozen)} layers" for m in some]
    line = f"offload, to fit the memory: {', '.join(said)}" if said else "offload: none is needed"
    for k in optional:
        resolved = resolved.decide(f"shard_plan[{k}].offload", counts.get(k, 0), line)
    _log.info("%s", line)
    return resolved, memory


def _checkpointing(resolved: Resolved, chosen: Mapping[int, bool], reason: str) -> Resolved:
    """The settings with gradient_checkpointing decided for these stages."""
    for stage, value in chosen.items():
        resolved = resolved.decide(f"shard_plan[{stage}].gradient_checkpointing", value, reason)
    return resolved


def load_initial_adapter(
    plan: AdapterPlan | None,
    model_config: PretrainedConfig,
    stages: Iterable[StageSpec],
    pipeline: Pipeline,
) -> None:
    """Give every stage its tensors of the adapter that the run starts from, if there is one. Only
    the coordinator needs the file."""
    if plan is None or plan.weights is None:
        return
    from hetero_framework.models.adapters.lora import saved_tensors

    blocks = f"{PEFT_PREFIX}{introspect(model_config).blocks}."
    for spec in stages:
        layers = {str(layer) for layer in range(spec.start, spec.end)}

        def wanted(key: str, layers: set[str] = layers) -> bool:
            # Tensors outside the blocks belong to an end of the model; a stage takes those it has.
            return not key.startswith(blocks) or key[len(blocks) :].partition(".")[0] in layers

        tensors = saved_tensors(plan, wanted)
        pipeline.load_state(spec.index, "adapter", in_parts((n, t, {}) for n, t in tensors.items()))
