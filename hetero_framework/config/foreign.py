"""Settings under the names of other tools: what each is called here, or why there is none.

foreign_names.json lists the fields of transformers.TrainingArguments, peft.LoraConfig and TRL's
SFTConfig that are no settings here; `python docs/generate.py` adds those of the installed versions.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

OWNERS = {"training": "TrainingArguments", "adapter": "LoraConfig", "data": "SFTConfig"}
FILE = Path(__file__).with_name("foreign_names.json")

# What is called so here <- names that peft, trl, axolotl, llama-factory and others use.
_CALLED = {
    "training.learning_rate": "lr",
    "training.num_train_epochs": "epochs num_epochs n_epochs max_epochs train_epochs",
    "training.max_steps": "steps num_steps n_steps max_train_steps num_train_steps total_steps",
    "training.per_device_train_batch_size": "batch_size micro_batch_size train_batch_size"
    " per_device_batch_size per_gpu_train_batch_size",
    "training.per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size",
    "training.gradient_accumulation_steps": "gradient_accumulation grad_accum grad_accum_steps"
    " accumulate_grad_batches micro_batches num_micro_batches",
    "training.warmup_steps": "warmup num_warmup_steps",
    "training.lr_scheduler_type": "lr_scheduler scheduler lr_schedule",
    "training.optim": "optimizer",
    "training.max_grad_norm": "grad_clip gradient_clipping clip_grad_norm max_norm",
    "training.gradient_checkpointing": "activation_checkpointing grad_checkpointing",
    "training.eval_strategy": "evaluation_strategy",
    "training.eval_steps": "eval_interval eval_every",
    "training.save_steps": "save_interval save_every checkpoint_steps",
    "training.save_total_limit": "keep_checkpoints max_checkpoints",
    "training.logging_steps": "log_interval log_every log_steps",
    "training.torch_compile": "compile",
    "training.seed": "random_seed",
    "training.adam_beta1": "beta1",
    "training.adam_beta2": "beta2",
    "training.adam_epsilon": "eps epsilon",
    "training.bf16 (or training.fp16)": "mixed_precision precision",
    "training.logging_dir": "log_dir tensorboard_dir",
    "training.output_dir": "out_dir save_dir",
    "training.train_sampling_strategy": "shuffle shuffle_dataset",
    'resume_step ("latest" or a number), at the top level': "resume resume_from_checkpoint",
    "model.name_or_path": "base_model model_name model_id model_name_or_path model_path"
    " pretrained_model_name_or_path base_model_name_or_path model.name model.path",
    "model.dtype": "torch_dtype",
    'model.quantization, with the value "nf4"': "load_in_4bit",
    'model.quantization, with the value "int8"': "load_in_8bit",
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "model.attn_implementation": "attn_impl attention flash_attention use_flash_attention"
    " use_flash_attention_2",
    "adapter.r": "rank lora_r lora_rank",
    "adapter.lora_alpha": "alpha",
    "adapter.lora_dropout": "dropout",
    "adapter.target_modules": "lora_target_modules lora_target lora_target_linear",
    "adapter.modules_to_save": "lora_modules_to_save",
    "adapter.use_dora": "dora peft_use_dora",
    "adapter.use_rslora": "rslora peft_use_rslora",
    "adapter.init_from": "adapter_path adapter_name_or_path lora_model_dir",
    "data.max_length": "max_seq_length max_seq_len seq_length seq_len sequence_len cutoff_len"
    " model_max_length block_size",
    "data.train": "train_file train_files train_data dataset dataset_name dataset_path datasets",
    "data.eval": "eval_file eval_data eval_dataset validation validation_file val_data"
    " test_datasets data.test data.valid",
    "data.format": "dataset_type dataset_format",
    "data.dataset_text_field": "text_field text_column",
    "data.chat_template_path": "chat_template",
    "data.completion_only_loss": "train_on_completions response_only",
    "data.completion_only_loss, which says the opposite": "train_on_inputs train_on_prompts",
    "model.revision": "adapter.revision",
    "adapter": "lora lora_config peft peft_config",
    "workers": "nodes machines hosts",
    "shard_plan": "plan stages pipeline device_map layers",
}
_CALLED_OF_MACHINES = {
    "ip": "host address addr ip_address",
    "id": "name worker_id owner worker",
    "num_threads": "threads cpu_threads omp_num_threads",
    "device": "gpu cuda",
}
# Why there is none <- names, as a regular expression.
_REASONS = {
    "each process owns one device, and shard_plan says who holds what": r"fsdp.*|deepspeed|ddp_.*"
    r"|accelerator_config|parallelism_config|local_rank|(num_|n_)?gpus?|num_nodes|nnodes|world_size"
    r"|nproc_per_node|.*(tensor|pipeline|context|data)_parallel.*|[tpdc]p_size",
    "a run ends after max_steps or num_train_epochs": r"early_stopping.*",
    "the files of data.train are read one after the other, then put in one order": r".*mixing.*"
    r"|mixture|interleave.*|.*probabilities|sampling_weights",
    "results stay in output_dir; upload the finished adapter with the `hf` command": r"push_to_hub"
    r"|hub_.*",
    "the records are metrics.jsonl, the screen and TensorBoard": r"(use_)?(wandb|mlflow|comet).*"
    r"|run_name|project|trackio_.*",
    "the screen and metrics.jsonl are always written": r"disable_tqdm|logging_first_step",
    "logging_steps alone decides": r"logging_strategy",
    "the last state is the result; earlier ones are in checkpoint_dir": r"load_best_model_at_end"
    r"|metric_for_best_model|greater_is_better",
    "checkpoints always hold the whole state, so that a run resumes exactly": r"save_only_model"
    r"|save_on_each_node",
    "files are always safetensors": r"save_safetensors",
    "a run never deletes another's results": r"overwrite_output_dir",
    "the loss is computed on the last stage, as the mean over label tokens only": r"loss_type"
    r"|label_smoothing.*|label_names",
    "model.dtype, bf16 and fp16 decide the precision": r".*_full_eval|half_precision_backend|tf32",
    "the recompute is always the exact, non-reentrant one": r".*_checkpointing_kwargs",
    "its fused kernels replace code that shards run unchanged": r".*liger_kernel.*",
    "its noise would depend on the process": r"neftune_noise_alpha",
    "another batch size gives another result; see `hetero check`": r"auto_find_batch_size",
    "layer-wise optimizers (GaLore, APOLLO) are not cut": r"optim_target_modules|galore.*",
    "batches are made in the coordinator as a pure function of seed and step": r"dataloader_.*"
    r"|dataset_num_proc|num_workers",
    'the device is chosen per machine: set "device": "cpu" there': r"(use|no)_(cpu|cuda)",
    "`hetero train` trains, and eval_steps or eval_strategy decide": r"do_(train|eval)",
    "it is a command line option: --debug": r"debug",
    "a resumed run always continues at its place in the data": r"ignore_data_skip",
    "it is always a LoRA adapter of a causal language model": r"task_type|peft_type"
    r"|peft_version|inference_mode|auto_mapping",
    "it changes the base weights or needs data at the start, which a shard does not have": r"loftq"
    r".*|eva_config|corda_config|lora_ga_config",
    "it changes the number of layers that shard_plan cuts": r"layer_replication",
    "a step has the samples of transformers' Trainer; padding_free puts those of a micro-batch into"
    " one row": r"(sample_|eval_)?packing.*",
    'train_sampling_strategy offers "random" and "sequential"': r"group_by_length"
    r"|length_column_name",
    "code from the hub is never run": r"trust_remote_code",
    "the routers' auxiliary loss joins all layers in one number": r"router_aux_loss_coef",
}
_OTHERWISE = {"adapter": "only LoRA, rsLoRA and DoRA are cut exactly"}


def own_name(section: str, key: str) -> str | None:
    """What `key` of a section of the file ("" for the top level) is called here; None: unknown."""
    names = _CALLED_OF_MACHINES if section in ("coordinator", "workers", "shard_plan") else _CALLED
    for here, others in names.items():
        if key in others.split() or f"{section}.{key}" in others.split():
            place, _, name = here.partition(".")
            short = name if place == section and name.isidentifier() else here
            return f'"{short}"' if short.isidentifier() else short
    return None


def refusal_of(section: str, key: str) -> str | None:
    """Why there is no setting `key`; None where nobody else has one either."""
    fields = unsupported()
    for owner in (section, *fields):
        if key in fields.get(owner, {}):
            reason = fields[owner][key]
            because = f" because {reason}" if reason else ""
            return f"{OWNERS[owner]}.{key} is not supported here{because}"
    reason = _reason(key)
    return f"there is no such setting: {reason}" if reason else None


@cache
def unsupported() -> dict[str, dict[str, str]]:
    """Section of the file -> field of another tool's class -> why there is none here, or ""."""
    listed = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        section: {
            name: _reason(name) or _OTHERWISE.get(section, "")
            for name in names
            if own_name(section, name) is None
        }
        for section, names in listed.items()
    }


def _reason(key: str) -> str:
    return next((why for why, names in _REASONS.items() if re.fullmatch(names, key)), "")
