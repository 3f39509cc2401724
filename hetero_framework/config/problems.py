"""Say what is wrong in a configuration: JSON path, the problem, and what to write instead."""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from hetero_framework.config.strict_json import join_path, json_type

MAX_SHOWN = 20


@dataclass(frozen=True)
class Problem:
    """One thing to change, at a JSON path such as `workers[0].port`."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


def report(name: str, problems: Sequence[Problem]) -> str:
    """The problems as one message, at most MAX_SHOWN of them."""
    if len(problems) == 1 and name:
        return f"{name}: {problems[0]}"
    lines = [f"{name} has {len(problems)} problems:"] if name else []
    lines += [f"  {problem}" for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        lines.append(f"  ... and {len(problems) - MAX_SHOWN} more")
    return "\n".join(lines)


def problems_of(details: Sequence[Any], root: type[BaseModel], raw: Any) -> list[Problem]:
    """pydantic's error details as problems; those of one union are merged into one."""
    found: dict[str, Problem] = {}
    unions: dict[str, list[str]] = {}
    for detail in details:
        keys, is_union = _real_path(detail["loc"], raw)
        path = _path_text(keys)
        if is_union and detail["type"] in _EXPECTED:
            unions.setdefault(path, []).append(_expected(detail))
            options = " or ".join(dict.fromkeys(unions[path]))
            found[path] = Problem(path, f"must be {options}, not {_shown(detail['input'])}")
        else:
            found.setdefault(path, Problem(path, _text(detail, keys, root)))
    # A union also complains about its other form: "must be a text" for a list with one bad item.
    return [
        problem
        for path, problem in found.items()
        if not (path in unions and any(_is_below(other, path) for other in found))
    ]


def _is_below(path: str, parent: str) -> bool:
    return path.startswith((f"{parent}[", f"{parent}."))


def _real_path(loc: Sequence[str | int], raw: Any) -> tuple[list[str | int], bool]:
    """`loc` without the tags that pydantic adds for the members of a union."""
    keys: list[str | int] = []
    is_union = False
    value = raw
    for position, key in enumerate(loc):
        if isinstance(value, dict) and isinstance(key, str):
            keys.append(key)  # of a missing key, too
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int):
            keys.append(key)
            value = value[key]
        else:
            is_union = is_union or position > 0
    return keys, is_union


def _path_text(keys: Sequence[str | int]) -> str:
    path = ""
    for key in keys:
        path = join_path(path, key)
    return path


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list [...]",
    "dict_type": "an object {...}",
    "model_type": "an object {...}",
    "model_attributes_type": "an object {...}",
    "finite_number": "a finite number",
    "literal_error": "",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _expected(detail: Any) -> str:
    if detail["type"] == "literal_error":
        return str(detail["ctx"]["expected"]).replace("'", '"')
    return _EXPECTED[detail["type"]]


def _text(detail: Any, keys: Sequence[str | int], root: type[BaseModel]) -> str:
    kind, value = detail["type"], detail.get("input")
    if kind == "missing":
        description = _description(root, keys)
        return f"is missing ({description})" if description else "is missing"
    if kind == "extra_forbidden":
        return unknown_key_text(keys, root)
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"must be {words} {detail['ctx'][bound]}, not {_shown(value)}"
    if kind == "literal_error":
        near = difflib.get_close_matches(str(value).lower(), _quoted(_expected(detail)), n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        return f"must be {_expected(detail)}, not {_shown(value)}{hint}"
    if kind in _EXPECTED:
        return f"must be {_expected(detail)}, not {_shown(value)}"
    return str(detail["msg"])


def unknown_key_text(keys: Sequence[str | int], root: type[BaseModel]) -> str:
    """Why a key is not known: renamed, not supported, misplaced, or else the nearest name."""
    key, section = str(keys[-1]), _model_at(root, keys[:-1])
    section_name = str(keys[0]) if len(keys) > 1 else ""
    if (section_name, key) in _RENAMED:
        return f"unknown key; it is called {_RENAMED[section_name, key]}"
    if key in UNSUPPORTED.get(section_name, {}):
        owner = _OWNERS[section_name]
        return f"{owner}.{key} is not supported here because {UNSUPPORTED[section_name][key]}"
    names = list(section.model_fields) if section else []
    near = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.75)
    if near:
        return f'unknown key; did you mean "{near[0]}"?'
    places = [place for place, model in _sections(root) if key in model.model_fields]
    if places:
        return f'unknown key here; it belongs into "{places[0]}"'
    near = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.5)
    if near:
        return f'unknown key; did you mean "{near[0]}"?'
    if len(names) > 12:
        return "unknown key; docs/configuration.md lists the known ones"
    return f"unknown key; known are: {', '.join(names)}"


def _sections(root: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    found = [("the top level", root)]
    for name in root.model_fields:
        model = _model_at(root, [name])
        if model is not None:
            found.append((name, model))
    return found


def _model_at(root: type[BaseModel], keys: Sequence[str | int]) -> type[BaseModel] | None:
    """The section class at a JSON path."""
    model: type[BaseModel] | None = root
    for key in keys:
        if isinstance(key, int):
            continue  # lists hold one kind of section
        if model is None or key not in model.model_fields:
            return None
        model = _section_in(model.model_fields[key].annotation)
    return model


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in inner if model is not None), None)


def _description(root: type[BaseModel], keys: Sequence[str | int]) -> str:
    section = _model_at(root, keys[:-1])
    field = section.model_fields.get(str(keys[-1])) if section else None
    text = (field.description or "") if field else ""
    return text.split(". ")[0].rstrip(".")


def _quoted(text: str) -> list[str]:
    return text.split('"')[1::2]


def shown(value: Any) -> str:
    """A value in a message: as JSON, short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _shown(value: Any) -> str:
    """A wrong value in a message: its type when it is long, else the value itself."""
    if isinstance(value, (dict, list, tuple)):
        return json_type(value)
    return f"the text {shown(value)}" if isinstance(value, str) else shown(value)


_OWNERS = {"training": "TrainingArguments", "adapter": "LoraConfig", "data": "SFTConfig"}
_RENAMED = {
    ("training", "evaluation_strategy"): '"eval_strategy"',
    ("training", "lr"): '"learning_rate"',
    ("training", "epochs"): '"num_train_epochs"',
    ("training", "batch_size"): '"per_device_train_batch_size"',
    ("training", "activation_checkpointing"): '"gradient_checkpointing"',
    ("training", "resume_from_checkpoint"): 'resume_step, at the top level ("latest" or a number)',
    ("training", "checkpoint_dir"): "checkpoint_dir, at the top level",
    ("training", "max_length"): "data.max_length",
    ("training", "max_seq_length"): "data.max_length",
    ("training", "attn_implementation"): "model.attn_implementation",
    ("data", "max_seq_length"): '"max_length"',
    ("model", "torch_dtype"): '"dtype"',
    ("model", "load_in_4bit"): 'quantization, with the value "nf4"',
    ("model", "load_in_8bit"): 'quantization, with the value "int8"',
    ("model", "name"): '"name_or_path"',
    ("model", "path"): '"name_or_path"',
    ("model", "pretrained_model_name_or_path"): '"name_or_path"',
}
_ONE_DEVICE = "each process owns one device and shard_plan says who holds what"
_NO_HUB = "results stay in output_dir; upload the finished adapter with the `hf` command"
_LOSS = "the loss is computed on the last stage, as the mean over label tokens only"
_CHECKPOINT = "checkpoints always hold the whole state, so that a run resumes exactly"
_EVALUATION = "evaluation reports loss and perplexity; nothing else is collected"
_PLAIN_LOADING = "batches are made in the coordinator as a pure function of seed and step"
_SCREEN = "the screen and metrics.jsonl are always written"
_ROWS = (
    "a step has the samples of transformers' Trainer; padding_free puts those of a micro-batch"
    " into one row"
)
_REWRITES = "it changes the base weights or needs data at the start, which a shard does not have"
_LORA_ONLY = "only LoRA, rsLoRA and DoRA are cut exactly"
_LAST = "the last state is the result; earlier ones are in checkpoint_dir"
_PRECISION = "model.dtype, bf16 and fp16 decide the precision"

UNSUPPORTED: Mapping[str, Mapping[str, str]] = {
    "training": {
        "optim_target_modules": "layer-wise optimizers (GaLore, APOLLO) are not cut",
        "average_tokens_across_devices": "the loss is always that of all label tokens of a step",
        "label_smoothing_factor": _LOSS,
        "bf16_full_eval": _PRECISION,
        "fp16_full_eval": _PRECISION,
        "half_precision_backend": _PRECISION,
        "tf32": _PRECISION,
        "activation_checkpointing_kwargs": "the recompute is always the exact, non-reentrant one",
        "gradient_checkpointing_kwargs": "the recompute is always the exact, non-reentrant one",
        "use_liger_kernel": "its fused kernels replace code that shards run unchanged",
        "liger_kernel_config": "its fused kernels replace code that shards run unchanged",
        "use_cache": "training has no key/value cache",
        "neftune_noise_alpha": "its noise would depend on the process",
        "torch_empty_cache_steps": "memory is released when it is needed",
        "auto_find_batch_size": "another batch size gives another result; see `hetero check`",
        "logging_strategy": "logging_steps alone decides",
        "logging_first_step": "the first step is always in metrics.jsonl",
        "log_on_each_node": "the coordinator alone reports",
        "logging_nan_inf_filter": "a non-finite loss is reported and skipped, never masked",
        "include_num_input_tokens_seen": "tokens are always counted in metrics.jsonl",
        "log_level_replica": "workers use log_level",
        "disable_tqdm": _SCREEN,
        "run_name": _SCREEN,
        "project": _SCREEN,
        "trackio_space_id": _SCREEN,
        "trackio_bucket_id": _SCREEN,
        "trackio_static_space_id": _SCREEN,
        "eval_delay": "evaluation starts with the first interval",
        "prediction_loss_only": _EVALUATION,
        "eval_do_concat_batches": _EVALUATION,
        "eval_use_gather_object": _EVALUATION,
        "eval_accumulation_steps": _EVALUATION,
        "include_for_metrics": _EVALUATION,
        "include_inputs_for_metrics": _EVALUATION,
        "batch_eval_metrics": _EVALUATION,
        "save_only_model": _CHECKPOINT,
        "save_on_each_node": "the coordinator keeps the checkpoint of all stages",
        "save_safetensors": "files are always safetensors",
        "enable_jit_checkpoint": "Ctrl-C already saves a checkpoint",
        "push_to_hub": _NO_HUB,
        "hub_token": _NO_HUB,
        "hub_private_repo": _NO_HUB,
        "hub_model_id": _NO_HUB,
        "hub_strategy": _NO_HUB,
        "hub_always_push": _NO_HUB,
        "hub_revision": _NO_HUB,
        "load_best_model_at_end": _LAST,
        "metric_for_best_model": _LAST,
        "greater_is_better": _LAST,
        "ignore_data_skip": "a resumed run always continues at its place in the data",
        "restore_callback_states_from_checkpoint": "there are no Trainer callbacks",
        "overwrite_output_dir": "a run never deletes another's results",
        "full_determinism": "runs are deterministic on the CPU in any case",
        "use_cpu": 'the device is chosen per machine: set "device": "cpu" there',
        "no_cuda": 'the device is chosen per machine: set "device": "cpu" there',
        "accelerator_config": _ONE_DEVICE,
        "parallelism_config": _ONE_DEVICE,
        "dataloader_num_workers": _PLAIN_LOADING,
        "dataloader_pin_memory": _PLAIN_LOADING,
        "dataloader_persistent_workers": _PLAIN_LOADING,
        "dataloader_prefetch_factor": _PLAIN_LOADING,
        "dataloader_multiprocessing_context": _PLAIN_LOADING,
        "dataloader_in_order": _PLAIN_LOADING,
        "remove_unused_columns": "columns that the format does not know are always ignored",
        "label_names": _LOSS,
        "group_by_length": 'train_sampling_strategy offers "random" and "sequential"',
        "length_column_name": 'train_sampling_strategy offers "random" and "sequential"',
        "ddp_find_unused_parameters": _ONE_DEVICE,
        "ddp_bucket_cap_mb": _ONE_DEVICE,
        "ddp_broadcast_buffers": _ONE_DEVICE,
        "ddp_static_graph": _ONE_DEVICE,
        "ddp_backend": _ONE_DEVICE,
        "ddp_timeout": "connect_timeout_s, step_timeout_s and liveness_timeout_s bound every wait",
        "fsdp": _ONE_DEVICE,
        "fsdp_config": _ONE_DEVICE,
        "deepspeed": _ONE_DEVICE,
        "local_rank": "roles come from this file, --role and --worker-id",
        "debug": "it is a command line option: --debug",
        "skip_memory_metrics": "peak memory is always in metrics.jsonl",
        "do_train": "`hetero train` trains",
        "do_eval": "eval_steps or eval_strategy decide",
        "do_predict": "this system trains only",
    },
    "adapter": {
        "task_type": "it is always CAUSAL_LM",
        "peft_type": "it is always LORA",
        "peft_version": "PEFT writes it when the adapter is saved",
        "base_model_name_or_path": "model.name_or_path says it",
        "revision": "model.revision says it",
        "inference_mode": "an adapter is trained here",
        "auto_mapping": _LORA_ONLY,
        "megatron_config": _LORA_ONLY,
        "megatron_core": _LORA_ONLY,
        "trainable_token_indices": _LORA_ONLY,
        "loftq_config": _REWRITES,
        "eva_config": _REWRITES,
        "corda_config": _REWRITES,
        "lora_ga_config": _REWRITES,
        "alora_invocation_tokens": _LORA_ONLY,
        "use_qalora": _LORA_ONLY,
        "qalora_group_size": _LORA_ONLY,
        "layer_replication": "it changes the number of layers that shard_plan cuts",
        "runtime_config": _LORA_ONLY,
        "lora_bias": _LORA_ONLY,
        "arrow_config": _LORA_ONLY,
        "velora_config": _LORA_ONLY,
        "monteclora_config": _LORA_ONLY,
        "use_bdlora": _LORA_ONLY,
        "kasa_config": _LORA_ONLY,
        "ensure_weight_tying": _LORA_ONLY,
    },
    "data": {
        "packing": _ROWS,
        "packing_strategy": _ROWS,
        "eval_packing": _ROWS,
        "loss_type": _LOSS,
        "router_aux_loss_coef": "the routers' auxiliary loss joins all layers in one number",
        "shuffle_dataset": "training.train_sampling_strategy and seed decide the order",
        "activation_offloading": "use training.gradient_checkpointing",
        "trust_remote_code": "code from the hub is never run",
        "model_init_kwargs": "the model section has these settings",
        "dataset_kwargs": "the data section has these settings",
        "dataset_num_proc": _PLAIN_LOADING,
    },
}
