"""The schema of hetero_config.json: one source of truth.

`hetero schema` and docs/configuration.md are generated from it. Values are validated strictly (no
"9999" for 9999), and all problems of a file are reported at once with their JSON paths.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PrivateAttr,
    StrictBool,
    StrictInt,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hetero_framework import registry
from hetero_framework.config.cards import with_cards
from hetero_framework.config.composition import disagreements, schema_for
from hetero_framework.config.expressions import EXPRESSIONS, expression, expressions
from hetero_framework.config.host_names import checked_host, host_and_port, normal_host
from hetero_framework.config.idle import GivenNames, idle_lines
from hetero_framework.config.objectives import (
    Needs,
    Task,
    needs_if_known,
    objectives_of_texts,
    objectives_reading,
    reads_text,
    rows_of,
)
from hetero_framework.config.plan import Plan, PlanEntry, StageSpec, owner_problems, plan_problems
from hetero_framework.config.problems import Problem, problems_of, report, shown, without_harmless
from hetero_framework.config.section import (
    ALL_ISLANDS,
    FREE,
    IDENTITY,
    ON_CARD,
    PER_ISLAND,
    RESULT,
    ROUNDING,
    SOURCE,
    STEPS_OR_SHARE,
    TIMELESS,
    MicroBatches,
    Name,
    NameOf,
    Port,
    ReadIf,
    Samples,
    Seconds,
    Section,
    Seed,
    Steps,
    Tokens,
    WholeFile,
    WorkerId,
    checked_id,
    whole_samples,
    whole_steps,
    with_unit,
)
from hetero_framework.config.text_limits import text_problems
from hetero_framework.errors import ConfigError, PlanError

AUTO = "auto"
"""In place of shard_plan's entries: a run plans by itself."""
MOST_SOURCES = 64
"""Most sources of data.train, whose losses are told apart."""
RESULT_DIRS = ("model", "adapter")
"""Folders in output_dir of the result of a run that trains all weights, and of an adapter."""
COORDINATOR_PORT = 9998
WORKER_PORT = 9999
LIGHTHOUSE_PORT = 29510
"""Where `hetero lighthouse` listens unless it is told otherwise."""
_T = TypeVar("_T")
Kind = Literal["nf4", "int8"]
"""How bitsandbytes holds weights."""
_DEVICE = re.compile(r"auto|cpu|([a-z][a-z0-9_]*)(:\d+)?")
_KINDS = ("auto", "cpu", "cuda", "rocm", "xpu", "mps", "npu", "musa", "mlu", "hpu")
_NO_KINDS = ("gpu", "nvidia", "amd", "intel", "apple", "metal", "hip")
_Attention = Literal[
    "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "per_sample"
]


_ALWAYS = ReadIf("training")
_EVALUATES = ReadIf("training.eval_strategy!=no or training.eval_on_start")
_SHUFFLES = ReadIf("train_sampling_strategy!=sequential")
_BY_EPOCHS = ReadIf("max_steps=-1")
_WARMS = ReadIf("lr_scheduler_type!=constant")
_BENDS = ReadIf("lr_scheduler_type!=constant|constant_with_warmup")
_HAS_BETAS = ReadIf("optim!=adafactor|sgd|adagrad|rmsprop*")
_HAS_EPSILON = ReadIf("optim!=adafactor|sgd|adagrad|rmsprop*|*lion*")
_HAS_ARGS = ReadIf(
    "optim!=adamw_torch|adamw_torch_fused|adamw_8bit|adamw_bnb_8bit|paged_adamw*|*lion*|adafactor"
)
_LOGS = ReadIf("logging_strategy=steps or eval_strategy=steps")
_HAS_BEST = ReadIf(
    "metric_for_best_model or load_best_model_at_end or early_stopping_patience"
    " or save_strategy=best"
)
_STOPS = ReadIf("early_stopping_patience")
_DRAWN = ReadIf("visualize")
_ROW_TOKENS = 1024  # where data.max_length is not set
_RECOMPUTES = ReadIf("gradient_checkpointing or shard_plan.gradient_checkpointing=True")
_Reporter = Annotated[str, NameOf("reporters", "training.report_to", ("all", "none"))]
_HAS_ADAPTER = ReadIf("adapter")
Host = Annotated[str, AfterValidator(checked_host)]


def _for(setting: str) -> ReadIf:
    """The condition that the objective's entry in the registry names the setting."""
    return ReadIf(partial(objectives_reading, setting))


class Machine(Section):
    """Fields that a coordinator and a worker share."""

    effect = FREE

    hostname: str | None = None
    """Host name, as `hostname` prints it; used to find out which role a machine has."""
    ip: Host
    """Address at which other machines reach it: IPv4, IPv6 (without brackets) or a DNS name.
    Elsewhere: host, address, addr, ip_address."""
    device: str = "auto"
    """Device of the process: "auto", "cpu", "cuda", "cuda:1", "rocm:0", "mps", "xpu:0". "auto"
    takes the first accelerator, else the CPU. Elsewhere: gpu, cuda."""
    devices: tuple[str, ...] | Literal["all"] | None = None
    """Instead of `device`, several of one machine, each of which gets a process: ["cuda:0",
    "cuda:1"]. The second of worker 1 is called "1@2" in shard_plan; a port counts up from that of
    the entry. "all": all accelerators of the machine. A worker's are known once the machine has
    joined (`hetero invite`)."""
    num_threads: Annotated[int | None, with_unit("threads", ge=1)] = None
    """CPU threads of the process, unless OMP_NUM_THREADS is set. null: the cores of the machine,
    shared evenly by the processes of the plan on it. Elsewhere: threads, cpu_threads,
    omp_num_threads."""
    quantization: Literal["nf4", "int8", "none"] | None = None
    """Quantisation of the layers that the process holds, instead of model.quantization. "none" is
    full precision, for a device that cannot do 4 bits next to others that can. null: as the model
    has it. A layer keeps its kind throughout a run: it moves between machines of one kind only."""

    @field_validator("devices")
    @classmethod
    def _lists_devices(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("device", "auto") != "auto":
            raise ValueError("goes without device, which names one; leave one of them out")
        if value == ():
            raise ValueError("names no device")
        return value

    @field_validator("device")
    @classmethod
    def _device_has_a_known_form(cls, value: str) -> str:
        kind = value.partition(":")[0]
        # Only its machine knows whether it has an accelerator of that name.
        misspelt = kind not in _KINDS and difflib.get_close_matches(kind, _KINDS, cutoff=0.75)
        if not _DEVICE.fullmatch(value) or kind in _NO_KINDS or misspelt:
            raise ValueError(
                f'{shown(value)} is not a device; use "auto", "cpu", "cuda", "cuda:1", "rocm:0",'
                ' "mps", "xpu:0" or torch\'s name of another accelerator, such as "npu:0"'
            )
        return value


class CoordinatorConfig(Machine):
    """The process that owns data, schedule and checkpoints and runs the "local" stages."""

    port: Port = COORDINATOR_PORT
    """Port on which `hetero invite` waits, and on which a run waits for workers without a port."""


class WorkerConfig(Machine):
    """One worker process; it owns one device."""

    id: WorkerId
    """Name of the worker in shard_plan: a number or a text, not "local". Elsewhere: name,
    worker_id, owner, worker."""
    ip: Host = Field(
        default_factory=lambda before: before.get("hostname") or "", validate_default=True
    )
    """As coordinator.ip. Not given: `hostname`. Elsewhere: host, address, addr, ip_address."""
    port: Port | None = None
    """Port on which the worker listens for the coordinator. null: it listens nowhere and dials the
    coordinator's ip and port, from behind a home router or with an address that changes."""
    num_gpus: int = 1
    """Always 1: `devices` names several of a machine."""
    models: tuple[Name, ...] | None = None
    """Models that a coordinator may have this worker load beside model and adapter of the worker's
    own file: folders (relative to it) and hub names, as patterns like "meta-llama/*"; "*" is
    everything. Counts in the worker's own file only."""

    @property
    def dials(self) -> bool:
        """Whether the worker dials the coordinator; the coordinator dials the others."""
        return self.port is None

    @property
    def address(self) -> str:
        """The address that the coordinator dials; for a worker that dials, its ip and "(dials)"."""
        return f"{self.ip} (dials)" if self.port is None else host_and_port(self.ip, self.port)

    @field_validator("num_gpus")
    @classmethod
    def _one_gpu(cls, value: int) -> int:
        if value != 1:
            raise ValueError(
                'must be 1: name the GPUs of a machine in "devices", as in ["cuda:0", "cuda:1"]'
            )
        return value

    @field_validator("id")
    @classmethod
    def _id_is_usable(cls, value: int | str) -> int | str:
        if value == "local":
            raise ValueError('"local" names the coordinator; give the worker another id')
        if isinstance(value, str):
            machine, at, number = value.partition("@")  # "box@2" is the second card of box
            checked_id(machine, "an id")
            if at and not (number.isascii() and number.isdigit() and int(number) > 1):
                raise ValueError('after the "@" of an id comes the number of a card, from 2 on')
        if isinstance(value, int) and value < 0:
            raise ValueError("a worker id is not negative")
        return value


class ModelConfig(Section):
    """The model: a directory, a hub name, or a configuration for random weights. Paths in this file
    start at its folder; ~ is the home folder of each machine, environment variables are refused."""

    effect = IDENTITY

    name_or_path: Annotated[Name | None, PER_ISLAND, SOURCE] = None
    """Directory of a Hugging Face checkpoint (relative to this file), or a name on the hub.
    Elsewhere: base_model, model, model_name, model_id, model_name_or_path, model_path,
    pretrained_model_name_or_path, base_model_name_or_path, model.name, model.path."""
    revision: Annotated[str | None, PER_ISLAND] = None
    """Branch, tag or commit on the hub. null: the default branch. Elsewhere: revision_of_model,
    model_revision, adapter.revision."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], ON_CARD] = "auto"
    """Type of the weights: "auto" takes what the checkpoint says, as in transformers. Elsewhere:
    torch_dtype."""
    quantization: Annotated[Kind | None, ON_CARD] = None
    """Quantise the frozen weights while loading, with bitsandbytes: "nf4" (4 bits) or "int8". Needs
    an adapter. Not needed for checkpoints that are quantised already. A machine may differ: see
    coordinator.quantization."""
    attn_implementation: Annotated[_Attention | None, ROUNDING] = None
    """Attention of transformers. null: transformers' choice. "per_sample" is ours, for
    data.padding_free: it takes each sample of a row by itself. Kernels from the hub are refused:
    they are native code. Elsewhere: attn_impl."""
    router_aux_loss_coef: float | None = Field(default=None, ge=0)
    """Mixtures of experts: weight of the routers' load-balancing loss, which the model adds to the
    loss of each micro-batch, as under transformers' Trainer (TRL's SFTTrainer divides it by
    gradient_accumulation_steps, and has it by default). 0: none. null: as the model's configuration
    says. Elsewhere: aux_loss_coef, moe_aux_loss_coef, training.router_aux_loss_coef,
    data.router_aux_loss_coef."""
    tie_word_embeddings: bool | None = None
    """Whether the head is the embedding. null: as in transformers, what config.json says, unless
    the checkpoint holds a head with other numbers."""
    from_config: Annotated[dict[str, Any] | None, SOURCE] = None
    """Instead of name_or_path: the model's configuration (with model_type), to start from random
    weights drawn from training.seed."""
    tokenizer: Annotated[Name | None, RESULT, PER_ISLAND] = None
    """Directory or hub name of the tokenizer when it is not with the model. Elsewhere:
    tokenizer_config, tokenizer_name, tokenizer_path, tokenizer_name_or_path."""
    _objective: str = PrivateAttr("sft")  # training.objective of the whole configuration
    _has_towers: bool = PrivateAttr(False)

    def quantized(self, kind: Kind | None) -> ModelConfig:
        """This section with the weights held as `kind`."""
        return self.changed(quantization=kind)

    def changed(self, **settings: Any) -> ModelConfig:
        """This section with other settings. Raises ValueError where these are not valid."""
        changed = type(self).model_validate({**self.model_dump(), **settings})
        changed._objective, changed._has_towers = self._objective, self._has_towers
        return changed

    def for_objective(self, objective: str) -> ModelConfig:
        """This section in a configuration with this training.objective."""
        changed = self.changed()
        changed._objective = objective
        return changed

    @property
    def needs(self) -> Needs:
        """The data and the task that the run's objective is trained with."""
        return needs_if_known(self._objective)

    @property
    def task(self) -> Task:
        """The task of its head, which the objective of the run decides."""
        return self.needs.task

    @property
    def trained_towers(self) -> bool | tuple[str, ...]:
        """Whether modules that see are trained, or the names of those that are."""
        return self._has_towers

    def with_towers(self) -> ModelConfig:
        """This section for a model that modules that see are a part of."""
        changed = self.changed()
        changed._has_towers = True
        return changed

    @property
    def source(self) -> str | None:
        """The name or path of the model's source; None for from_config."""
        given = (value for value in self._sources().values() if isinstance(value, str))
        return next(given, None)

    def _sources(self) -> dict[str, Any]:
        fields = type(self).model_fields.items()
        return {name: getattr(self, name) for name, field in fields if SOURCE in field.metadata}

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        names = [*(sources := self._sources())]
        if sum(value is not None for value in sources.values()) != 1:
            known = f"{', '.join(names[:-1])} or {names[-1]}"
            raise ValueError(f"give {known}, exactly one of them")
        if self.from_config is not None and not isinstance(self.from_config.get("model_type"), str):
            raise ValueError('from_config needs a "model_type", for example "llama"')
        if self.name_or_path is None and self.quantization is not None:
            raise ValueError(f"quantization {_NEEDS_STORED}")
        if self.from_config is not None and self.revision is not None:
            raise ValueError("revision belongs to name_or_path, not to from_config")
        return self


REWRITING_INITS = ("pissa", "olora")
"""Values of adapter.init_lora_weights that take their share out of the base's weights."""

_NEEDS_STORED = "needs stored weights (name_or_path)"
REWRITES_QUANTISED = "it rewrites the base's weights, which quantised ones would round away"


class AdapterConfig(Section):
    """LoRA, with the names and defaults of peft.LoraConfig."""

    effect = IDENTITY
    read_if = ReadIf("init_from=null")

    r: Annotated[int, ON_CARD] = Field(default=8, ge=1)
    """Rank of the update matrices. Elsewhere: rank, lora_r, lora_rank."""
    lora_alpha: Annotated[float, ON_CARD] = Field(default=8, gt=0)
    """Scale: the update is multiplied by lora_alpha / r. Elsewhere: alpha."""
    lora_dropout: Annotated[float, with_unit("probability", ge=0, lt=1), ON_CARD] = 0.0
    """Dropout before the update. Elsewhere: dropout."""
    target_modules: Annotated[str | tuple[str, ...] | None, ON_CARD] = None
    """Modules that get an update: a list of names, "all-linear", or a regular expression. null:
    PEFT's choice for the architecture. Elsewhere: lora_target_modules, lora_target."""
    target_parameters: tuple[str, ...] | None = None
    """Parameters that get an update directly, such as the fused experts "mlp.experts.down_proj".
    Elsewhere: lora_target_parameters."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Modules that get no update although target_modules names them."""
    modules_to_save: Annotated[tuple[str, ...] | None, ON_CARD] = None
    """Modules that are trained in full and saved with the adapter. Elsewhere:
    lora_modules_to_save."""
    bias: Annotated[Literal["none", "all", "lora_only"], ON_CARD] = "none"
    """Which biases are trained."""
    lora_bias: Annotated[bool, ON_CARD] = False
    """Whether the update has its own bias. `hetero merge` folds it into the layer's bias."""
    use_rslora: Annotated[bool, ON_CARD] = False
    """Scale by lora_alpha / sqrt(r). Elsewhere: rslora, peft_use_rslora."""
    use_dora: Annotated[bool, ON_CARD] = False
    """Weight-decomposed LoRA (DoRA). Elsewhere: dora, peft_use_dora."""
    init_lora_weights: StrictBool | Literal["gaussian", "orthogonal", "pissa", "olora"] = True
    """true: A Kaiming-uniform, B zero (no change at the start). "pissa" and "olora" begin with the
    largest part of each weight and take it out of the base, whenever the adapter is loaded: they
    need a base that is not quantised, and a decomposition of each weight while loading. Methods
    that need data (EVA, CorDA, LoRA-GA), LoftQ, and pissa_niter_N, whose random numbers are in no
    file, are not supported. Elsewhere: peft_init_lora_weights."""
    layers_to_transform: StrictInt | tuple[int, ...] | None = None
    """Only these layers (numbers of the whole model). null: all. Elsewhere:
    peft_layers_to_transform."""
    layers_pattern: Annotated[str | tuple[str, ...] | None, ReadIf("layers_to_transform")] = None
    """Name of the layer list, for layers_to_transform. Elsewhere: peft_layers_pattern."""
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    """Ranks that differ from r, by module name or expression. Elsewhere: lora_rank_pattern."""
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    """Scales that differ from lora_alpha, by module name or expression. Elsewhere:
    lora_alpha_pattern."""
    fan_in_fan_out: bool = False
    """Whether layers store (in, out), as GPT-2's Conv1D does. Elsewhere: lora_fan_in_fan_out."""
    autocast_adapter_dtype: Annotated[bool | None, _ALWAYS] = None
    """Type of the update matrices over a base in bfloat16 or float16, or quantised. true: float32.
    false: the base's; bfloat16 over a quantised one. null: as PEFT and TRL's SFTTrainer have it:
    float32, or bfloat16 over a quantised base. Elsewhere: peft_autocast_adapter_dtype."""
    init_from: Annotated[Name | None, PER_ISLAND, _ALWAYS] = None
    """Directory of an existing PEFT LoRA adapter to continue (relative to this file). Its own
    settings then replace those of this section. Elsewhere: adapter_path, adapter_name_or_path,
    lora_model_dir."""

    @field_validator(*EXPRESSIONS)
    @classmethod
    def _holds_expressions(cls, value: Any, info: ValidationInfo) -> Any:
        for text in expressions(str(info.field_name), value):
            expression(str(info.field_name), text)
        return value


_Paths = str | tuple[str, ...]
_Format = Literal["auto", "text", "prompt_completion", "messages", "alpaca", "tokens", "preference"]
_MIXES = "data.mixing=interleave"
SAMPLES_OR_SHARE = "samples, or a share of all when below 1"


class DataSource(Section):
    """One of several sources of data.train. Settings that it leaves out are those of data."""

    path: _Paths
    """Its data, of the same forms as data.train."""
    name: str | None = None
    """Name in metrics and on the screen. null: the name of its first file or folder."""
    weight: Annotated[float | None, Field(gt=0)] = None
    """Its share of the samples when sources are interleaved, relative to the other weights."""
    max_samples: Samples | None = None
    """Take at most the first samples. null: all."""
    split: Name | None = None
    """Split, or a slice of one. null: data.train_split."""
    dataset_config: str | None = None
    """Configuration (subset) name. null: data.dataset_config."""
    format: _Format | None = None
    """Layout of a sample. null: data.format."""
    columns: dict[Name, Name] | None = None
    """Columns to rename. null: data.columns."""

    @property
    def label(self) -> str:
        """The name of the source; if it is not given, made of its path."""
        if self.name is not None:
            return self.name
        first = self.path if isinstance(self.path, str) else self.path[0]
        last = first.rstrip("/\\*").replace("\\", "/").rpartition("/")[2]
        return re.sub(r"[^\w.-]", "_", last.partition(".")[0] or last).lstrip(".-") or "data"


_Entry = Annotated[
    Annotated[str, Tag("Path")] | Annotated[DataSource, Tag("DataSource")],
    Discriminator(lambda entry: "Path" if isinstance(entry, str) else "DataSource"),
]


class DataConfig(Section):
    """Training and evaluation data; names follow TRL's SFTConfig where it has them."""

    scope = PER_ISLAND
    read_if = ReadIf(objectives_of_texts)

    train: Annotated[str | tuple[_Entry, ...] | None, _ALWAYS] = None
    """Training data, needed unless Python gives train_dataset: file(s) (.json, .jsonl, .parquet,
    .txt, .csv, .arrow), a folder of them, a folder that `datasets` saved, a dataset name, or
    Megatron's .bin and .idx by their prefix, also a blend: ["0.3", "a", "0.7", "b"]. Or a list of
    sources: [{"path": "a.jsonl", "weight": 2}, "b.jsonl"], with settings path, name, weight,
    max_samples, split, dataset_config, format, columns. Relative paths start at this file's folder.
    Elsewhere: train_file, train_files, train_data, dataset, dataset_name, dataset_path,
    datasets."""
    mixing: Literal["concatenate", "interleave"] = "concatenate"
    """Several sources: one after another, or by turns, drawn by their weights if they have some.
    The samples' order is then drawn from all, unless train_sampling_strategy is sequential."""
    stopping_strategy: Annotated[
        Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"],
        ReadIf(_MIXES),
    ] = "first_exhausted"
    """When interleaving ends, as in datasets.interleave_datasets: at the end of the first source,
    or of all (shorter ones begin again, unless without replacement)."""
    eval: Annotated[_Paths | dict[str, _Paths] | None, _EVALUATES] = None
    """Evaluation data, of the forms of train; see training.eval_steps. Or several sets by their
    names: {"math": "m.jsonl", "chat": "c.jsonl"} gives eval_math_loss, eval_chat_loss, ...
    Elsewhere: eval_file, eval_files, eval_data, eval_dataset, validation, validation_file,
    validation_files, val_data, test_datasets, data.test, data.valid."""
    val_set_size: Annotated[
        float | None, with_unit(SAMPLES_OR_SHARE, gt=0), AfterValidator(whole_samples), _EVALUATES
    ] = None
    """Hold out this many samples of the training data, or this share of them, for evaluation, drawn
    by the seed. Elsewhere: val_size, test_size, test_split_size."""
    format: Annotated[_Format, ON_CARD] = "auto"
    """Layout of a sample. auto: by the columns that are present. Elsewhere: dataset_type,
    dataset_format."""
    columns: dict[Name, Name] | None = None
    """Columns to rename before the layout is chosen: {"prompt": "question"} uses the column
    question as prompt. Elsewhere: column_mapping, rename_columns."""
    dataset_config: str | None = None
    """Configuration (subset) name for a dataset of the hub or a folder with a README."""
    train_split: Name = "train"
    """Split for training, or a slice of one: train[:1000], train[10%:]. A file is one split.
    Elsewhere: dataset_train_split."""
    eval_split: Annotated[Name, ReadIf("eval")] = "test"
    """Split for evaluation, or a slice of one. For a file, test and train both mean all of it.
    Elsewhere: dataset_test_split."""
    dataset_text_field: Annotated[Name, _for("dataset_text_field")] = "text"
    """Column that holds the text in the text format. Elsewhere: text_field, text_column,
    datasets.field, datasets.text_column."""
    max_length: Annotated[Tokens | None, ON_CARD] = 1024
    """Longer samples are cut to this length and counted. null: no limit. Elsewhere: max_seq_length,
    max_seq_len, seq_length, seq_len, sequence_len, cutoff_len, model_max_length, block_size."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of a long sample is kept."""
    add_eos: Annotated[bool, _for("add_eos")] = True
    """Append the end-of-sequence token to text, completion and Alpaca samples that lack it, as TRL
    does."""
    completion_only_loss: Annotated[bool | None, _for("completion_only_loss"), ON_CARD] = None
    """Loss on the completion only. null: yes for prompt/completion and Alpaca data. Elsewhere:
    train_on_completions, response_only."""
    assistant_only_loss: Annotated[bool | None, _for("assistant_only_loss"), ON_CARD] = None
    """Conversations: loss on the assistant's turns only. null: yes for messages (TRL's default is
    false), no for prompt/completion, where the completion decides."""
    chat_template_path: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, for example enable_thinking."""
    eos_token: str | None = None
    """End-of-sequence token. null: the tokenizer's. Elsewhere: special_tokens.eos_token."""
    pad_token: str | None = None
    """Padding token. null: the tokenizer's, else its end-of-sequence token. Elsewhere:
    special_tokens.pad_token."""
    pad_to_multiple_of: Annotated[Tokens | None, ROUNDING] = None
    """Pad each micro-batch to a multiple of this. null: to its longest sample."""
    padding_free: Annotated[bool, ROUNDING] = False
    """Put the samples of a micro-batch one after another into one row instead of padding them;
    checked on a tiny copy of the model before training."""
    packing: bool = False
    """Put samples together into rows of about max_length tokens before training, as TRL does."""
    packing_strategy: Annotated[Literal["bfd", "bfd_split", "wrapped"], ReadIf("data.packing")] = (
        "bfd"
    )
    """How rows are filled. bfd: whole samples, cut at max_length; bfd_split: longer ones are split;
    wrapped: one stream of tokens, in which samples see each other."""
    eval_packing: Annotated[bool | None, ReadIf("data.packing")] = None
    """Pack evaluation data too. null: as packing."""

    streaming: bool = False
    """Read and tokenise training data while the run goes on, without holding them. Needs
    training.max_steps; rows are shuffled within blocks."""

    @field_validator("train", "eval")
    @classmethod
    def _names_something(cls, value: Any) -> Any:
        for part in value.values() or [()] if isinstance(value, dict) else [value]:
            names = part if isinstance(part, tuple) else (part,)
            paths = [name.path if isinstance(name, DataSource) else name for name in names]
            if not names or "" in paths or () in paths:
                raise ValueError("names no data; give a file, a list of files or a dataset name")
        return value

    @field_validator("train")
    @classmethod
    def _sources_have_names_of_their_own(cls, value: Any) -> Any:
        sources = _sources(value)
        labels = [checked_id(source.label, "the name of a source") for source in sources]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"two sources are called {shown(twice[0])}; give one another name")
        if len(sources) > MOST_SOURCES:
            raise ValueError(f"names {len(sources)} sources, and at most {MOST_SOURCES} are mixed")
        return value

    @field_validator("eval")
    @classmethod
    def _sets_have_names_of_their_own(cls, value: Any) -> Any:
        """No metric of one set has the name of another's."""
        taken = dict.fromkeys(EVALUATED, "an only set")
        for name in value if isinstance(value, dict) else ():
            checked_id(name, "the name of an evaluation set")
            for metric in EVALUATED:
                other = taken.setdefault(f"{name}_{metric}", f"the set {shown(name)}")
                if other != f"the set {shown(name)}":
                    text = f"eval_{name}_{metric} would be a metric of {other} too"
                    raise ValueError(f"{text}; call the set {shown(name)} otherwise")
        return value

    @field_validator("columns")
    @classmethod
    def _columns_have_one_name(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value and len({*value.values()}) < len(value):
            raise ValueError("gives one column two names")
        return value

    @property
    def eval_sets(self) -> dict[str, _Paths]:
        """Evaluation data by the names of the sets; "" is the name of a set without one."""
        if isinstance(self.eval, dict):
            return self.eval
        return {} if self.eval is None else {"": self.eval}

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluation data."""
        return self.eval is not None or self.val_set_size is not None

    @property
    def sources(self) -> list[DataSource]:
        """The sources of data.train, if it names sources and not just their paths."""
        return _sources(self.train)

    @property
    def parts(self) -> list[DataConfig]:
        """These settings once for each source of data.train, with its path as `train` (`paths`)."""
        if not self.sources:
            return [self]
        of_one = self.of_one_source
        return [type(self).model_validate(of_one | _overrides(each)) for each in self.sources]

    @property
    def of_one_source(self) -> dict[str, Any]:
        """The settings, other than its path, that decide what is read of a source."""
        others = {"train", "eval", "mixing", "stopping_strategy", "val_set_size", "streaming"}
        return self.model_dump(exclude=others)

    @property
    def of_stream(self) -> dict[str, Any]:
        """The settings that decide the examples of a stream, but for the text of a template."""
        others = {"eval", "eval_split", "eval_packing", "packing", "packing_strategy"}
        others |= {"pad_token", "pad_to_multiple_of", "padding_free", "chat_template_path"}
        return self.model_dump(mode="json", exclude=others)

    @property
    def for_texts(self) -> str | None:
        """The name of a setting that is on and is for texts alone, if there is one."""
        given = {"packing": self.packing, "padding_free": self.padding_free}
        return next(
            (name for name, is_on in {**given, "streaming": self.streaming}.items() if is_on), None
        )

    @property
    def paths(self) -> _Paths:
        """`train` where it names no sources."""
        return cast(_Paths, self.train)

    @property
    def origins(self) -> list[_Paths]:
        """All that the data are read from."""
        return [*(part.paths for part in self.parts), *self.eval_sets.values()]

    @model_validator(mode="after")
    def _pads_or_not(self) -> DataConfig:
        if self.padding_free and self.pad_to_multiple_of is not None:
            raise ValueError("padding_free leaves nothing to pad; remove pad_to_multiple_of")
        if self.packing and self.max_length is None:
            raise ValueError("packing fills rows up to max_length; set it to a number")
        if self.packing and self.truncation_mode == "keep_end":
            raise ValueError("packing keeps the start of a long sample; remove truncation_mode")
        if self.streaming and self.packing:
            raise ValueError("streaming goes without packing; remove one of them")
        if self.streaming and self.val_set_size is not None:
            raise ValueError("streaming holds nothing out; remove val_set_size, and set eval")
        if self.streaming and self.max_length is None:
            raise ValueError("streaming needs max_length: the longest sample is not known before")
        if self.packing and self.packing_strategy == "wrapped" and self.padding_free:
            raise ValueError('rows of packing_strategy "wrapped" are full; remove padding_free')
        return self

    @model_validator(mode="after")
    def _mixes(self) -> DataConfig:
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and self.mixing == "concatenate":
            raise ValueError(
                'weights of sources are for mixing "interleave"; set it, or remove them'
            )
        if any(weighted) and not all(weighted):
            raise ValueError("some sources have a weight and some have none; give each one")
        if self.mixing == "interleave" and len(self.sources) < 2:
            raise ValueError('mixing "interleave" needs two sources: {"path": ...} in data.train')
        if self.val_set_size is not None and self.eval is not None:
            raise ValueError("val_set_size holds out training data; remove it, or eval")
        return self

    @property
    def one_row(self) -> bool:
        """Whether a micro-batch is one row, in which samples do not see each other."""
        return self.padding_free or (self.packing and self.packing_strategy != "wrapped")

    def packs(self, name: str) -> bool:
        """Whether the set of this name ("train", "eval" or "eval.NAME") is packed."""
        given = self.eval_packing if name.startswith("eval") else None
        return self.packing if given is None else self.packing and given


def _sources(train: Any) -> list[DataSource]:
    """The sources of data.train, if it gives at least one with settings."""
    entries = train if isinstance(train, tuple) else ()
    if not any(isinstance(entry, DataSource) for entry in entries):
        return []
    return [DataSource(path=entry) if isinstance(entry, str) else entry for entry in entries]


def _overrides(source: DataSource) -> dict[str, Any]:
    names = {"train_split": "split"}
    names |= {name: name for name in ("dataset_config", "format", "columns")}
    values = {name: getattr(source, own) for name, own in names.items()}
    return {"train": source.path} | {k: v for k, v in values.items() if v is not None}


_REFUSED = {
    "max_steps": ((0,), "must be -1 (no limit) or at least 1"),
    "lr_scheduler_type": (
        ("reduce_lr_on_plateau", "greedy"),
        "{} depends on evaluation results; use a schedule of the step number",
    ),
    "torch_compile_mode": (
        ("reduce-overhead", "max-autotune"),
        "{} uses CUDA graphs, which keep the results of one forward at a time, and a pipeline needs"
        ' several; use "max-autotune-no-cudagraphs"',
    ),
}


EVALUATED = (
    *("loss", "token_loss", "perplexity", "entropy", "mean_token_accuracy", "num_tokens"),
    *("samples", "batches", "tokens", "seconds", "runtime"),
    *("samples_per_second", "steps_per_second"),
)
"""All that an evaluation gives by itself, under names that begin with "eval_" or "eval_<set>_"."""
TOKEN_METRICS = ("entropy", "mean_token_accuracy")
"""What training.token_metrics measures as means over micro-batches, in TRL's order."""


class TrainingConfig(Section):
    """Training settings: those of transformers.TrainingArguments, by its names, then our own."""

    output_dir: Annotated[Name, FREE, TIMELESS] = "runs/default"
    """Directory of the results (relative to this file): adapter or checkpoint, metrics.jsonl,
    diagram, logs. Elsewhere: out_dir, save_dir."""
    objective: Annotated[Name, IDENTITY] = "sft"
    """The kind of training. "sft": the next token of texts, "image-text-to-text": of texts with
    pictures; "dpo", "orpo" and "cpo": the chosen answer of a pair rather than the rejected one,
    "kto": answers rated one by one, "image-dpo" and "image-kto": with pictures; "reward": a number
    for each answer; "classification", "token-classification": labels. --import may register
    others."""
    seed: Annotated[Seed, IDENTITY, ON_CARD, TIMELESS] = 42
    """Seed of weights, order, dropout and noise. Elsewhere: random_seed."""
    data_seed: Annotated[Seed | None, IDENTITY, PER_ISLAND, _SHUFFLES, TIMELESS] = None
    """Seed of the sample order. null: seed."""
    num_train_epochs: Annotated[
        float, with_unit("epochs", gt=0), PER_ISLAND, _BY_EPOCHS, ON_CARD, TIMELESS
    ] = 3.0
    """Passes over the training data. Elsewhere: epochs, num_epochs, n_epochs, max_epochs,
    train_epochs."""
    max_steps: Annotated[int, with_unit("steps", ge=-1), PER_ISLAND, ON_CARD, TIMELESS] = -1
    """Optimizer steps to train; -1: as num_train_epochs says. Elsewhere: steps, num_steps, n_steps,
    max_train_steps, num_train_steps, total_steps."""
    per_device_train_batch_size: Annotated[Samples, IDENTITY, PER_ISLAND, ON_CARD] = 8
    """Samples in a micro-batch. Elsewhere: batch_size, micro_batch_size, train_batch_size,
    per_device_batch_size, per_gpu_train_batch_size."""
    per_device_eval_batch_size: Annotated[
        Samples, FREE, ReadIf("data.eval or data.val_set_size")
    ] = 8
    """Samples in an evaluation micro-batch. Elsewhere: eval_batch_size, per_gpu_eval_batch_size."""
    gradient_accumulation_steps: Annotated[
        MicroBatches, IDENTITY, PER_ISLAND, ON_CARD, TIMELESS
    ] = 1
    """Micro-batches in a step. At least twice the number of stages keep the pipeline full.
    Elsewhere: gradient_accumulation, grad_accum, grad_accum_steps, accumulate_grad_batches,
    micro_batches, num_micro_batches."""
    learning_rate: Annotated[float, ON_CARD, TIMELESS] = Field(default=5e-5, ge=0)
    """Peak learning rate. Elsewhere: lr."""
    warmup_steps: Annotated[
        float, with_unit(STEPS_OR_SHARE, ge=0), AfterValidator(whole_steps), _WARMS, ON_CARD
    ] = 0
    """Linear warm-up: steps, or a share of all steps when below 1. Elsewhere: warmup,
    num_warmup_steps."""
    warmup_ratio: Annotated[float | None, _WARMS] = Field(default=None, ge=0, le=1)
    """Linear warm-up as a share of all steps; instead of warmup_steps."""
    lr_scheduler_type: Annotated[Name, ON_CARD] = "linear"
    """Schedule of transformers: "linear", "cosine", ... Elsewhere: lr_scheduler, scheduler,
    lr_schedule."""
    lr_scheduler_kwargs: Annotated[dict[str, Any], _BENDS] = Field(default_factory=dict)
    """Further arguments of the schedule."""
    weight_decay: Annotated[float, ON_CARD] = Field(default=0.0, ge=0)
    """Weight decay; not applied to biases and norms, as in transformers."""
    adam_beta1: Annotated[float, _HAS_BETAS] = Field(default=0.9, ge=0, lt=1)
    """Adam's first beta. Elsewhere: beta1."""
    adam_beta2: Annotated[float, _HAS_BETAS] = Field(default=0.999, ge=0, lt=1)
    """Adam's second beta. Elsewhere: beta2."""
    adam_epsilon: Annotated[float, _HAS_EPSILON] = Field(default=1e-8, ge=0)
    """Adam's epsilon. Elsewhere: eps, epsilon."""
    max_grad_norm: Annotated[float, ON_CARD] = Field(default=1.0, ge=0)
    """Gradients are clipped to this global norm over all stages; 0: never. Elsewhere: grad_clip,
    gradient_clipping, clip_grad_norm, max_norm."""
    label_smoothing_factor: Annotated[
        float, with_unit("share", ge=0, le=1), _for("label_smoothing_factor"), ON_CARD
    ] = 0.0
    """Share of each label that goes to all tokens alike. The loss, also of an evaluation, is that
    of transformers' Trainer: divided by the number of labels in all micro-batches of a step, and
    without what routers add (router_aux_loss_coef). eval_perplexity follows from it. Multimodal
    classes, too, learn the next token, as under TRL; the Trainer does not shift their labels."""
    neftune_noise_alpha: Annotated[float | None, ON_CARD] = Field(default=None, ge=0)
    """NEFTune: uniform noise on the embeddings in training, within this / sqrt(tokens of a row x
    hidden size). It is drawn anew in each step from seed, step and micro-batch, as dropout is: the
    same whatever the cut, but other numbers than transformers draws. null or 0: none. Elsewhere:
    noisy_embedding_alpha."""
    optim: Annotated[Name, IDENTITY, ON_CARD] = "adamw_torch"
    """Optimizer, by its name in transformers (whose default is adamw_torch_fused). Elsewhere:
    optimizer."""
    optim_args: Annotated[str | None, IDENTITY, _HAS_ARGS] = None
    """Further arguments of the optimizer, as "name=value,name=value"."""
    logging_strategy: Annotated[Literal["no", "steps", "epoch"], FREE] = "steps"
    """When to print a line and to tell callbacks. metrics.jsonl has every step."""
    logging_steps: Annotated[Steps, FREE, _LOGS] = 1
    """Steps from one line on the screen to the next, with logging_strategy "steps". Elsewhere:
    log_interval, log_every, log_steps."""
    logging_first_step: Annotated[bool, FREE] = False
    """Tell callbacks of the first step too; the screen shows it anyway."""
    logging_nan_inf_filter: Annotated[bool, FREE] = True
    """Count a loss that is not finite as the mean of those before it, in what is logged."""
    include_num_input_tokens_seen: Annotated[
        StrictBool | Literal["all", "non_padding", "no"], FREE
    ] = "no"
    """Tell callbacks how many tokens were trained on: "all" (or true) with padding."""
    token_metrics: Annotated[bool, FREE, _for("token_metrics")] = False
    """Measure also, as TRL's SFTTrainer does, mean_token_accuracy (the share of label tokens that
    the model finds likeliest), entropy (of its predictions, in nats), both as means over
    micro-batches, and num_tokens (trained on so far): in training, and in evaluations as
    eval_mean_token_accuracy and so on. It costs one more pass over the logits."""
    save_strategy: Annotated[Literal["no", "steps", "epoch", "best"], FREE] = "steps"
    """When to save checkpoints. "best": after an evaluation that is better than all before."""
    save_steps: Annotated[Steps, FREE, ReadIf("save_strategy=steps")] = 500
    """Checkpoint interval for save_strategy "steps". Elsewhere: save_interval, save_every,
    checkpoint_steps."""
    save_total_limit: Annotated[int | None, FREE] = Field(default=None, ge=1)
    """Checkpoints to keep; older ones are deleted, the best one never. null: all. Elsewhere:
    keep_checkpoints, max_checkpoints."""
    eval_strategy: Annotated[Literal["no", "steps", "epoch"] | None, FREE] = None
    """When to evaluate. null: "steps" when eval_steps is given, else "no". Elsewhere:
    evaluation_strategy."""
    eval_steps: Annotated[Steps | None, FREE] = None
    """Evaluation interval for "steps". null: logging_steps. Elsewhere: eval_interval,
    eval_every."""
    eval_on_start: Annotated[bool, FREE] = False
    """Evaluate once before the first step."""
    eval_delay: Annotated[float, FREE, ReadIf("eval_strategy!=no")] = Field(default=0, ge=0)
    """Steps, or epochs with eval_strategy "epoch", before the first evaluation."""
    load_best_model_at_end: Annotated[bool, FREE] = False
    """Make the result of the best checkpoint, not of the last step. Evaluation and saving then
    have the same strategy, and save_steps is a multiple of eval_steps."""
    metric_for_best_model: Annotated[Name | None, FREE] = None
    """The metric of an evaluation that decides, with or without "eval_" in front: "loss",
    "token_loss", "perplexity", one of token_metrics or of compute_metrics; of several sets
    "math_loss" and so on. null: "loss", where one is needed."""
    greater_is_better: Annotated[bool | None, FREE, _HAS_BEST] = None
    """Whether a larger value is better. null: yes, unless the metric's name ends in "loss" or is
    "perplexity"."""
    early_stopping_patience: Annotated[int | None, FREE] = Field(default=None, ge=1)
    """Stop after this many evaluations in a row that are not better than the best one. Elsewhere:
    early_stopping_steps."""
    early_stopping_threshold: Annotated[float, FREE, _STOPS] = Field(default=0.0, ge=0)
    """How much better an evaluation has to be, to count for early_stopping_patience."""
    bf16: Annotated[bool, IDENTITY, ON_CARD] = False
    """Compute in bfloat16 autocast; weights keep their type."""
    fp16: Annotated[bool, IDENTITY, ON_CARD] = False
    """Compute in float16 autocast with one loss scale for all stages."""
    gradient_checkpointing: Annotated[StrictBool | Literal["auto"], FREE, TIMELESS] = False
    """Store only the input of each layer, and compute the layer again in its backward. "auto": on
    as few stages as it takes for every process to fit its device's free memory. Elsewhere:
    activation_checkpointing, grad_checkpointing."""
    activation_offloading: Annotated[bool, FREE, TIMELESS, _RECOMPUTES] = False
    """Keep the stored inputs of layers that are computed again (gradient_checkpointing) in host
    memory until their backward."""
    offload_optimizer: Annotated[bool, FREE, TIMELESS] = False
    """Keep the optimizer's states in host memory; a layer's states visit the device for that
    layer's step. A stage of the plan may say otherwise."""
    loss_chunk_tokens: Annotated[
        Annotated[int, with_unit("tokens", ge=2)] | Literal["auto"] | None,
        ROUNDING,
        _for("loss_chunk_tokens"),
    ] = "auto"
    """Tokens whose logits exist at once: the loss of a longer micro-batch is computed and
    differentiated in chunks. "auto": chunks of 2**26 logits, so that small micro-batches stay
    whole. null: never in chunks."""
    torch_compile: Annotated[bool, ROUNDING] = False
    """Compile every layer with torch.compile. Results differ from uncompiled ones in rounding. A
    backend or a mode switches it on too, as in transformers. Elsewhere: compile."""
    torch_compile_backend: Annotated[Name | None, ROUNDING] = None
    """Backend of torch.compile. null: inductor."""
    torch_compile_mode: Annotated[Name | None, ROUNDING] = None
    """Mode of torch.compile, such as "max-autotune-no-cudagraphs". null: torch's default. Modes
    with CUDA graphs are refused."""
    dataloader_drop_last: Annotated[bool, IDENTITY] = False
    """Drop the last incomplete micro-batch."""
    train_sampling_strategy: Annotated[
        Literal["random", "sequential", "group_by_length"], IDENTITY
    ] = "random"
    """Order of the samples. "group_by_length" puts samples of about equal length together, the
    longest first, as transformers does. The order follows from seed and epoch; under transformers'
    Trainer, dropout and evaluations change the order of later epochs, too."""
    report_to: Annotated[tuple[_Reporter, ...], FREE] = ("tensorboard",)
    """Further records beside metrics.jsonl: a name or a list, "all" (that are installed), or
    "none"."""
    logging_dir: Annotated[Name | None, FREE, ReadIf("report_to=tensorboard|all"), TIMELESS] = None
    """TensorBoard directory. null: output_dir/tensorboard. Elsewhere: log_dir, tensorboard_dir."""
    visualize: Annotated[bool, FREE] = True
    """Draw the diagram of the machines into output_dir, and at the end the run's curves
    (curves.png)."""
    visualization_format: Annotated[Literal["png", "svg", "pdf", "mmd"], FREE, _DRAWN] = "png"
    """Format of the diagram; mmd is Mermaid text. Graphviz draws it, else matplotlib."""
    page: Annotated[bool | None, FREE] = None
    """Serve a page that shows the run and steers it, to browsers of this machine; `hetero watch`
    prints its address. null: if the run has a terminal."""
    timeline_steps: Annotated[int, with_unit("steps", ge=-1), FREE] = 3
    """Steps after the first whose tasks and transfers are written into output_dir/timeline.json,
    which `hetero timeline` explains. 0: none, -1: all that are done under the plan that the run
    begins with."""
    log_level: Annotated[str, FREE] = "INFO"
    """Lines of this level and above are shown: DEBUG, INFO, WARNING or ERROR."""
    connect_timeout_s: Annotated[Seconds, FREE] = 300.0
    """How long the coordinator tries to reach all workers."""
    load_timeout_s: Annotated[Seconds, FREE] = 3600.0
    """Longest time in which the workers may load their stages, downloads included."""
    rejoin_wait_s: Annotated[Seconds | None, FREE] = 600.0
    """Longest outage of a worker that a run survives: how long the coordinator waits for its link
    or its process to come back, and how long a worker keeps its stages for the coordinator. null:
    without a limit, for a worker whose machine is needed for something else for hours."""
    replicate_steps: Annotated[
        Literal["auto"] | Annotated[int, with_unit("steps", ge=0)], FREE, _HAS_ADAPTER
    ] = "auto"
    """Steps from one copy of the adapters and their optimizer on the coordinator to the next; a
    worker that dies costs at most that many steps. "auto": as often as takes at most 5 % of the
    time. 0: never (a lost worker costs the steps since the last checkpoint). With full training
    nothing is copied."""
    step_timeout_s: Annotated[Seconds, FREE] = 600.0
    """Longest wait for a stage in a step before the run is given up."""
    liveness_timeout_s: Annotated[float, with_unit("seconds", ge=3), FREE] = 15.0
    """A peer that is silent for this long is lost (heartbeats come every 2 s)."""
    max_skipped_steps: Annotated[int, with_unit("steps", ge=0), FREE, ALL_ISLANDS] = 5
    """Stop when more than this many steps in a row had a non-finite loss or gradient, or when more
    than this many in all, and more than 1 % of the run's steps, had one. Steps that only made the
    loss scale of fp16 smaller count for neither."""
    probe_longest_batch: Annotated[bool, FREE] = True
    """Before the first step, run the longest micro-batch of the run once, forward and backward, so
    that a lack of memory shows at once. It changes nothing else, and is left out where the first
    step has a micro-batch of that size."""
    max_in_flight: Annotated[MicroBatches | None, FREE, TIMELESS] = None
    """Micro-batches in the pipeline at once. null: sized from the measured times of stages and
    links, within each device's memory."""
    verify_architecture: Annotated[bool, FREE] = True
    """Before training, cut a tiny random model of the same architecture as the plan does, and
    refuse when it differs from the uncut model; and run a tiny model with the adapter."""

    @property
    def longest_outage_s(self) -> float:
        """`rejoin_wait_s` as a number: infinity for null."""
        return math.inf if self.rejoin_wait_s is None else self.rejoin_wait_s

    @field_validator("report_to", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """A name or a list, as TrainingArguments takes it."""
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)):
            return value
        if "none" in names and len(names) > 1:
            raise ValueError('"none" goes with no other name; take it out, or the others')
        return () if list(names) == ["none"] else tuple(names)

    @field_validator("log_level")
    @classmethod
    def _log_level_is_known(cls, value: str) -> str:
        if value.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError(f"{shown(value)} is not one of DEBUG, INFO, WARNING, ERROR")
        return value.upper()

    @field_validator(*_REFUSED)
    @classmethod
    def _is_not_refused(cls, value: Any, info: ValidationInfo) -> Any:
        values, why = _REFUSED[str(info.field_name)]
        if value in values:
            raise ValueError(why.format(shown(value)))
        return value

    @model_validator(mode="after")
    def _no_contradiction(self) -> TrainingConfig:
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 exclude each other; set one of them to false")
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("give warmup_steps or warmup_ratio, not both")
        if self.eval_steps is not None and self.eval_strategy in ("no", "epoch"):
            raise ValueError(
                f'eval_steps needs eval_strategy "steps", but it is "{self.eval_strategy}"'
            )
        self._check_best()
        return self

    @property
    def order_seed(self) -> int:
        """The seed of the samples' order."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def data_kind(self) -> str:
        """The data that the objective is trained on."""
        return needs_if_known(self.objective).data

    @property
    def reads_text(self) -> bool:
        """Whether the data are texts, and not a data set of an imported file."""
        return reads_text(self.data_kind)

    @property
    def train_rows(self) -> int:
        """Rows of a micro-batch."""
        return self.per_device_train_batch_size * rows_of(self.data_kind)

    @property
    def eval_rows(self) -> int:
        """Rows of a micro-batch of an evaluation."""
        return self.per_device_eval_batch_size * rows_of(self.data_kind)

    def _check_best(self) -> None:
        """Check the Trainer's rules for settings that depend on evaluations."""
        if self.metric is None:
            return
        name = "load_best_model_at_end" if self.load_best_model_at_end else "metric_for_best_model"
        name = "early_stopping_patience" if self.early_stopping_patience else name
        if self.evaluation == "no":
            raise ValueError(f'{name} needs evaluations: set eval_strategy to "steps" or "epoch"')
        if not self.load_best_model_at_end or self.save_strategy == "best":
            return
        if self.evaluation != self.save_strategy:
            raise ValueError(
                "load_best_model_at_end needs a checkpoint for each evaluation, but eval_strategy"
                f' is "{self.evaluation}" and save_strategy "{self.save_strategy}"; set both alike'
            )
        save, evaluate = self.save_steps, self.eval_steps or self.logging_steps
        if self.evaluation == "steps" and not _is_multiple(save, evaluate):
            raise ValueError(
                "load_best_model_at_end needs a save_steps that is a multiple of eval_steps, but"
                f" they are {save:g} and {evaluate:g}"
            )

    @property
    def has_tensorboard(self) -> bool:
        """Whether TensorBoard's files are wanted."""
        return "tensorboard" in self.report_to or "all" in self.report_to

    @property
    def metric(self) -> str | None:
        """metric_for_best_model with its default, where any setting needs it."""
        needed = self.load_best_model_at_end or self.early_stopping_patience is not None
        needed = needed or self.save_strategy == "best"
        return self.metric_for_best_model or ("loss" if needed else None)

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled; a backend or a mode says so too, as in transformers."""
        named = self.torch_compile_backend or self.torch_compile_mode
        return self.torch_compile or named is not None

    @property
    def evaluation(self) -> Literal["no", "steps", "epoch"]:
        """When to evaluate, with the null of eval_strategy resolved."""
        return self.eval_strategy or ("steps" if self.eval_steps is not None else "no")

    def warmup(self, total_steps: int) -> int:
        """Warm-up steps of a run of `total_steps`, rounded up as transformers does."""
        if self.warmup_ratio:
            return math.ceil(total_steps * self.warmup_ratio)
        return interval(self.warmup_steps, total_steps)


class WireConfig(Section):
    """How the tensors between stages are written. Anything but "none" changes the tensors, and so
    the training, a little: for networks that are slower than the devices."""

    read_if = ReadIf("workers")

    activations: Literal["none", "bf16", "int8"] = "none"
    """Hidden states, forward. "none": as they are. "bf16": float32 rounded to bfloat16, half the
    bytes. "int8": 8 bits with a scale per 64 values, 0.52 of the bytes of a 16-bit type, 0.26 of
    float32."""
    gradients: Literal["none", "bf16", "int8"] = "none"
    """Gradients of the hidden states, backward; as for activations."""


def interval(value: float, total_steps: int) -> int:
    """A number of steps; below 1 it is a share of `total_steps`, rounded up (transformers)."""
    return int(value) if value >= 1 else math.ceil(total_steps * value)


def _is_multiple(value: float, of: float) -> bool:
    """Whether `value` is a multiple of `of`, both being whole numbers or both shares."""
    return (value < 1) == (of < 1) and round(value * 1e6) % round(of * 1e6) == 0


def _entries_or_auto(entries: tuple[PlanEntry, ...]) -> Any:
    return [entry.model_dump(mode="json") for entry in entries] or AUTO


def _allow_auto(schema: dict[str, Any]) -> None:
    entries = {name: schema.pop(name) for name in ("type", "items")}
    schema["anyOf"] = [{**entries, "minItems": 1}, {"const": AUTO}]


class Config(WholeFile):
    """hetero_config.json: who takes part, who holds which layers, what is trained and how."""

    model_config = ConfigDict(validate_default=True)

    version: Annotated[Literal["1", "1.0", "0.1.0"], FREE] = "1"
    """Version of this file's format."""
    coordinator: Annotated[CoordinatorConfig, FREE]
    """The machine that drives the training."""
    workers: Annotated[tuple[WorkerConfig, ...], FREE] = ()
    """The worker processes; one per device. Elsewhere: nodes, machines, hosts."""
    shard_plan: Annotated[tuple[PlanEntry, ...], PlainSerializer(_entries_or_auto), FREE] = Field(
        json_schema_extra=_allow_auto
    )
    """Which layers are where, in the order of the model; or "auto": a run measures the machines
    when it begins, and keeps the plan that it makes with its results. Elsewhere: plan, stages,
    pipeline, device_map, layers."""
    model: Annotated[ModelConfig | None, IDENTITY] = None
    """The model to train."""
    adapter: Annotated[AdapterConfig | None, IDENTITY] = None
    """LoRA settings. null: all weights are trained. Elsewhere: lora, lora_config, peft,
    peft_config."""
    data: DataConfig | None = None
    """Training and evaluation data."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """How to train."""
    links: Annotated[Literal["auto", "relay", "direct"], FREE] = "auto"
    """How tensors travel between two workers: "direct" over a link of their own, "relay" through
    the coordinator, "auto" directly where the workers reach each other."""
    wire: WireConfig = Field(default_factory=WireConfig)
    """How tensors between stages are written."""
    checkpoint_dir: Annotated[Name | None, FREE] = None
    """Directory of the checkpoints. null: output_dir/checkpoints."""
    resume_step: Annotated[Literal["latest"] | StrictInt | None, FREE] = None
    """Continue from the checkpoint of this step, or from the "latest". null or 0: start from the
    beginning."""

    _base_dir: Path = PrivateAttr(default_factory=Path.cwd)
    _quantizes: bool | None = PrivateAttr(None)
    _left_out: tuple[str, ...] = PrivateAttr(default=())
    _given: GivenNames = PrivateAttr(default=GivenNames())

    @field_validator("resume_step")
    @classmethod
    def _resume_step_is_a_step(cls, value: str | int | None) -> str | int | None:
        if isinstance(value, int) and value < 0:
            raise ValueError('must be a step number, "latest" or null')
        return value or None

    @classmethod
    def from_dict(
        cls,
        raw: dict[str, Any],
        base_dir: str | os.PathLike[str] | None = None,
        *,
        name: str = "configuration",
    ) -> Config:
        """Validate a dictionary of JSON types; relative paths start at `base_dir`, else at the
        current directory. ConfigError has all problems; PlanError when all are in the plan."""
        valid: dict[str, Any] = {}
        raw, known = with_cards(raw), registry.entries("sections")
        unset = [k for k, v in raw.items() if v is None and (k in known or registry.lacking(k))]
        raw = {key: v for key, v in raw.items() if key not in unset}
        raw, left_out = without_harmless(raw, schema_for(Config, raw))
        schema = schema_for(Config, raw)
        problems = list(text_problems(raw))
        # Inside, an empty list stands for "auto": there is no plan yet.
        is_auto = raw.get("shard_plan") == AUTO
        given = {**raw, "shard_plan": []} if is_auto else raw
        try:
            config = schema.model_validate_json(json.dumps(given, default=_json), context=valid)
        except ValidationError as error:
            found = {problem.path for problem in problems}
            invalid = problems_of(error.errors(include_url=False), schema, raw)
            problems += [problem for problem in invalid if problem.path not in found]
        if is_auto:
            valid.pop("shard_plan", None)
        problems += [*_disagreements(valid), *disagreements(schema, valid)]
        if problems:
            in_plan = all(problem.path.startswith("shard_plan") for problem in problems)
            raise (PlanError if in_plan else ConfigError)(report(name, problems))
        config._base_dir = Path(base_dir or Path.cwd()).absolute()
        config._left_out = tuple(left_out)
        config._given = GivenNames(_given(config, raw))
        if config.model is not None:
            config.model._objective = config.training.objective
        return config

    def with_changes(self, **sections: Any) -> Config:
        """A copy with other sections, validated as in `from_dict`. A dictionary changes single
        settings of its section; anything else replaces the section."""
        raw = self.to_dict()
        for name, new in sections.items():
            old = raw.get(name)
            raw[name] = {**old, **new} if isinstance(new, dict) and old is not None else new
        changed = type(self).from_dict(raw, self._base_dir)
        changed._quantizes = self._quantizes
        changed._left_out, changed._given = self._left_out, self._given
        return changed

    def setting(self, name: str) -> Any:
        """The value of "island", "training.beta" and so on; None for a setting of an extra that the
        file does not ask for."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part, None)
        return value

    def to_dict(self) -> dict[str, Any]:
        """All settings, defaults included, as JSON types; `from_dict` reads them back."""
        return self.model_dump(mode="json")

    @property
    def base_dir(self) -> Path:
        """The folder at which relative paths start: that of the configuration file."""
        return self._base_dir

    def path(self, value: str | os.PathLike[str]) -> Path:
        """`value` as an absolute path; `~` is expanded."""
        return Path(os.path.normpath(self._base_dir / os.path.expanduser(value)))

    @property
    def output_dir(self) -> Path:
        """Directory of the results."""
        return self.path(self.training.output_dir)

    @property
    def result_dir(self) -> Path:
        """Where the finished artefact goes: an adapter, or a whole model."""
        return self.output_dir / RESULT_DIRS[self.adapter is not None]

    @property
    def replicates(self) -> bool:
        """Whether the trained state is copied to the coordinator between checkpoints."""
        return self.adapter is not None and self.training.replicate_steps != 0

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path(self.checkpoint_dir or self.output_dir / "checkpoints")

    @property
    def logging_dir(self) -> Path:
        """Directory of the TensorBoard events."""
        return self.path(self.training.logging_dir or self.output_dir / "tensorboard")

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan: shard_plan is "auto" until a run has made one."""
        return bool(self.shard_plan)

    @property
    def plan(self) -> Plan:
        """The plan. Raises PlanError where there is none yet."""
        if not self.is_planned:
            raise PlanError(
                'shard_plan is "auto", and no plan has been made yet',
                hint="`hetero train` measures the machines and makes one when it begins; `hetero"
                " plan --measure --write` makes one now, `hetero plan --dry-run` estimates one",
            )
        return Plan(self.shard_plan)

    @property
    def planned_workers(self) -> tuple[WorkerConfig, ...]:
        """The workers that hold a stage; the others take no part. All, where there is no plan."""
        if not self.is_planned:
            return self.workers
        owners = self.plan.owners
        return tuple(worker for worker in self.workers if worker.id in owners)

    def checkpointing(self, index: int) -> bool | Literal["auto"]:
        """Whether the stage of that index computes its layers again in the backward."""
        setting = self.shard_plan[index].gradient_checkpointing
        return self.training.gradient_checkpointing if setting is None else setting

    @property
    def row_tokens(self) -> int:
        """The most tokens of a row, as far as the settings tell."""
        return (self.data.max_length if self.data else None) or _ROW_TOKENS

    def offloads_optimizer(self, index: int) -> bool:
        """Whether the stage of that index keeps its optimizer's states in host memory."""
        setting = self.shard_plan[index].offload_optimizer
        return self.training.offload_optimizer if setting is None else setting

    def offloads_inputs(self, index: int) -> bool:
        """Whether the stage of that index keeps its layers' stored inputs in host memory."""
        return self.training.activation_offloading and self.checkpointing(index) is True

    def uses_host_memory(self, index: int) -> bool:
        """Whether some tensors of the stage of that index stay in host memory."""
        streams = bool(self.shard_plan[index].offload)
        return streams or self.offloads_optimizer(index) or self.offloads_inputs(index)

    def quantization(self, owner: int | str) -> Kind | None:
        """How a process holds the frozen weights of its stages; None: in full precision, or as the
        checkpoint stores them."""
        kind = self.machine(owner).quantization
        if kind is None:
            return self.model.quantization if self.model is not None else None
        return kind if kind != "none" else None

    def per_quantization(
        self, owners: Collection[int | str], make: Callable[[int | str], _T]
    ) -> dict[int | str, _T]:
        """`make(owner)` for each of these processes, called once per kind of `quantization`."""
        made: dict[Kind | None, _T] = {}
        for owner in owners:
            if (kind := self.quantization(owner)) not in made:
                made[kind] = make(owner)
        return {owner: made[self.quantization(owner)] for owner in owners}

    @property
    def kinds(self) -> Kind | dict[str, str] | None:
        """The `quantization` of all stages. Where processes differ, {kind: stages in words}, with
        "none" for full precision."""
        stages = self.plan.stages
        kinds = [self.quantization(spec.owner) for spec in stages]
        if len({*kinds}) == 1:
            return kinds[0]
        spans: list[tuple[str, StageSpec]] = []
        for kind, spec in zip((kind or "none" for kind in kinds), stages, strict=True):
            if spans and spans[-1][0] == kind:
                before = spans.pop()[1]
                spec = replace(spec, start=before.start, is_first=before.is_first)
            spans.append((kind, spec))
        return {
            kind: ", ".join(spec.contents for other, spec in spans if other == kind)
            for kind in dict(spans)
        }

    def contents(self, stage: StageSpec) -> str:
        """All that a stage holds, in words; only a model of texts has an embedding and a head."""
        return stage.contents if self.training.reads_text else stage.layers

    @property
    def quantizes(self) -> bool:
        """Whether any process that takes part quantises weights."""
        if self._quantizes is not None:
            return self._quantizes
        takes_part = ["local", *(worker.id for worker in self.planned_workers)]
        return any(self.quantization(owner) is not None for owner in takes_part)

    def held_by(self, owner: int | str) -> Config:
        """The configuration with all processes holding the model as `owner` does."""
        kind, inherited = {"quantization": self.quantization(owner)}, {"quantization": None}
        workers = [{**worker, **inherited} for worker in self.to_dict()["workers"]]
        held = self.with_changes(model=kind, coordinator=inherited, workers=workers)
        held._quantizes = self.quantizes
        return held

    def machine(self, owner: int | str) -> CoordinatorConfig | WorkerConfig:
        """The entry of a process of the plan: "local" or the id of a worker."""
        return self.coordinator if owner == "local" else self.worker(owner)

    def worker(self, worker_id: int | str) -> WorkerConfig:
        """The worker of that id; 1 and "1" name the same. Raises ConfigError."""
        workers = {str(worker.id): worker for worker in self.workers}
        if worker := workers.get(str(worker_id)):
            return worker
        known = ", ".join(workers) or "none"
        raise ConfigError(f"there is no worker {shown(worker_id)}; the configuration has: {known}")

    def require(self, *sections: str, name: str = "") -> None:
        """Raise ConfigError when one of `sections` ("model", "data"), needed data or a needed
        tokenizer is absent. `name` is the configuration's, for errors."""
        missing = [name for name in sections if getattr(self, name) is None]
        if missing:
            names = " and ".join(f'"{name}"' for name in missing)
            raise ConfigError(
                f"the configuration has no {names} section, which this command needs",
                hint="`hetero init --model ... --data ...` writes them; docs/configuration.md"
                " lists all settings",
            )
        if problems := list(_absent(self)):
            raise ConfigError(report(name, problems))

    def spare_base_model(self) -> None:
        """Raise ConfigError if a directory that a run writes is that of its base model."""
        name = self.model and self.model.name_or_path
        base = self.path(name).resolve() if name else None
        written = [self.output_dir, self.result_dir, self.checkpoints]
        if self.training.has_tensorboard:
            written.append(self.logging_dir)
        if base is not None and base.is_dir() and base in {path.resolve() for path in written}:
            raise ConfigError(
                f"the run would write into the directory of its base model, {base}",
                hint="choose another training.output_dir (--output-dir DIR), checkpoint_dir or"
                " logging_dir, or move the model",
            )

    def check_metric(
        self, of_objective: Sequence[str] | None = None, *, computes: bool = False
    ) -> None:
        """Raise ConfigError if no evaluation gives the metric that decides on the best model. Where
        the user `computes` metrics, the first evaluation shows that. `of_objective` are the metrics
        of the objective; without them only "sft" is checked."""
        training = self.training
        known = ["loss", *(of_objective or ())]
        if of_objective is None:
            known += ["token_loss", "perplexity"]
            known += [*TOKEN_METRICS, "num_tokens"] * training.token_metrics
        if self.data is not None and self.data.eval_sets and "" not in self.data.eval_sets:
            known = [f"{name}_{metric}" for name in self.data.eval_sets for metric in known]
        is_known = of_objective is not None or training.objective == "sft"
        metric = training.metric if is_known and not computes else None
        if metric is not None and metric.removeprefix("eval_") not in known:
            of_tokens = needs_if_known(training.objective).task == "causal-lm"
            more = "; training.token_metrics gives more" * (of_tokens > training.token_metrics)
            more += ", and compute_metrics any, of train() or of a file named with --import"
            raise ConfigError(
                f"training.metric_for_best_model is {shown(metric)}, which no evaluation gives",
                hint=f"choose one of {', '.join(known)}{more}",
            )

    def warnings(self) -> tuple[str, ...]:
        """Lines about settings that are probably a mistake, and settings that were left out."""
        idle = [worker for worker in self.workers if worker not in self.planned_workers]
        warnings = [
            *self._left_out,
            *idle_lines(self, self._given),
            *(
                f"worker {shown(worker.id)} has no entry in shard_plan and takes no part"
                for worker in idle
            ),
        ]
        for k, entry in enumerate(self.shard_plan):
            if entry.offload in (1, 2, 3):
                warnings.append(
                    f"shard_plan[{k}].offload {entry.offload} saves no memory, since two of its"
                    " layers have a place on the device; 4 is the least that does"
                )
        stages, m = len(self.shard_plan), self.training.gradient_accumulation_steps
        if m < stages:
            warnings.append(
                f"training.gradient_accumulation_steps is {m}, fewer than the {stages} stages; most"
                " of them will wait most of the time"
            )
        return tuple(warnings)


def _disagreements(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Contradictions between sections; `parts` has only those that are valid alone."""
    model, data, training = parts.get("model"), parts.get("data"), parts.get("training")
    workers, plan = parts.get("workers"), parts.get("shard_plan")
    if plan is not None:
        yield from plan_problems(plan)
    if workers is not None:
        yield from _address_problems(parts.get("coordinator"), workers)
    if plan is not None and workers is not None:
        yield from owner_problems(plan, [worker.id for worker in workers])
    yield from _weight_problems(parts)
    if training is None:
        return
    if data is not None and data.streaming:
        if training.max_steps < 1:
            text = "is needed with data.streaming: the length of a stream is not known"
            yield Problem("training.max_steps", text)
        if training.train_sampling_strategy == "group_by_length":
            text = "needs all lengths before the first step; remove it, or data.streaming"
            yield Problem("training.train_sampling_strategy", text)
    if not training.reads_text and parts.get("adapter") is not None:
        yield Problem("adapter", "is for models of texts; take it out")
    if not training.reads_text and training.activation_offloading:
        yield Problem("training.activation_offloading", "is for models of texts; set it to false")
    if training.label_smoothing_factor and model is not None and model.router_aux_loss_coef:
        yield Problem(
            "model.router_aux_loss_coef",
            "is no part of the loss with training.label_smoothing_factor, as in transformers; set"
            " one of them to 0",
        )


def _weight_problems(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems with trained or rewritten weights that are quantised, halved or in host memory."""
    model, adapter, training = (parts.get(name) for name in ("model", "adapter", "training"))
    quantised, changes = _quantised(parts), ""
    if adapter is not None and adapter.init_lora_weights in REWRITING_INITS:
        changes = "adapter.init_lora_weights rewrites theirs; set offload to 0"
        if quantised:
            yield Problem("adapter.init_lora_weights", REWRITES_QUANTISED)
    if "adapter" in parts and adapter is None and model is not None:
        text = (
            "quantised weights cannot be trained; add an adapter section (LoRA) or set it to null"
        )
        yield from (Problem(path, text) for path in quantised)
        if model.dtype == "float16" and training is not None and training.fp16:
            text = 'needs float32 weights when all are trained; set model.dtype to "float32"'
            yield Problem("training.fp16", text)
    for index, entry in enumerate(parts.get("shard_plan") or ()):
        if entry.offload and training is not None and not training.reads_text:
            yield Problem(f"shard_plan[{index}].offload", "is for models of texts; set it to 0")
        elif changes and entry.offload not in (0, "auto"):
            text = f"layers can stay in host memory as they are stored, and {changes}"
            yield Problem(f"shard_plan[{index}].offload", text)
    if model is not None and model.from_config is not None:
        yield from (Problem(path, _NEEDS_STORED) for path in quantised)


def _absent(config: Config) -> Iterator[Problem]:
    """Problems with data and a tokenizer that the sections need and lack."""
    model, data, training = config.model, config.data, config.training
    if data is None:
        return
    if data.train is None:
        missing = "is missing; give files or a dataset name, in Python train_dataset"
        yield Problem("data.train", missing)
    if training.reads_text and model is not None and model.from_config and not model.tokenizer:
        yield Problem("model.tokenizer", "is needed: from_config brings no tokenizer")
    if not data.evaluates:
        for name, given in (
            ("eval_steps", training.eval_steps is not None),
            ("eval_strategy", training.eval_strategy in ("steps", "epoch")),
            ("eval_on_start", training.eval_on_start),
        ):
            if given:
                yield Problem(f"training.{name}", "needs evaluation data; set data.eval")


def _quantised(parts: Mapping[str, Any]) -> list[str]:
    """The paths at which the valid sections ask for quantised weights."""
    named = [("model", parts.get("model")), ("coordinator", parts.get("coordinator"))]
    named += [(f"workers[{k}]", worker) for k, worker in enumerate(parts.get("workers") or ())]
    asked = (None, "none")
    return [
        f"{name}.quantization"
        for name, section in named
        if section is not None and section.quantization not in asked
    ]


def _address_problems(
    coordinator: CoordinatorConfig | None, workers: Sequence[WorkerConfig]
) -> Iterator[Problem]:
    """Ids and addresses that are used twice."""
    ids: dict[str, int] = {}
    addresses: dict[tuple[str, int], str] = {}
    if coordinator is not None:
        host = normal_host(coordinator.ip)
        addresses[host, coordinator.port] = "the coordinator"
        if host in ("0.0.0.0", "::") and any(worker.dials for worker in workers):
            yield Problem(
                "coordinator.ip",
                f"{coordinator.ip} is not an address to dial, and workers without a port dial it;"
                " write the one of the machine",
            )
    for i, worker in enumerate(workers):
        here = f"workers[{i}]"
        first = ids.setdefault(str(worker.id), i)
        if first != i:
            yield Problem(f"{here}.id", f"{shown(worker.id)} is the id of workers[{first}] too")
        host = normal_host(worker.ip)
        if host in ("0.0.0.0", "::"):
            yield Problem(
                f"{here}.ip",
                f"{worker.ip} is not an address to connect to; write the one of the machine",
            )
        if worker.port is None:
            continue
        other = addresses.setdefault((host, worker.port), here)
        if other != here:
            yield Problem(
                f"{here}.port",
                f"{worker.ip} port {worker.port} is that of {other} too; give each its own",
            )


def _given(config: Config, raw: dict[str, Any]) -> Iterator[str]:
    """The settings that the user has chosen, as "training.beta". A section with at least half of
    its settings was written by a run: only its settings that differ from the default count."""
    for name, section in config:
        if not isinstance(section, Section) or not isinstance(raw.get(name), dict):
            continue
        fields = type(section).model_fields
        for key in fields.keys() & raw[name].keys():
            value = getattr(section, key)
            is_default = value == fields[key].get_default(call_default_factory=True)
            if not is_default or (value and 2 * len(raw[name]) < len(fields)):
                yield f"{name}.{key}"


def _json(value: Any) -> Any:
    """A value that is not a JSON type by itself: a section or a path."""
    return value.model_dump(mode="json") if isinstance(value, Section) else os.fspath(value)
