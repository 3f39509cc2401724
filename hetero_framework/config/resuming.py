"""The effect of each setting on resuming: refused, reported or ignored when it has changed.

Each setting of the schema stands in exactly one of the three groups; docs/configuration.md shows
which. Settings that say where the training data are and how they become tokens are in REPORTED: the
resulting tokens are compared instead, and other ones are refused (trainer/continuation.py).
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel


def _listed(**sections: str) -> frozenset[str]:
    return frozenset(f"{s}.{name}" for s, names in sections.items() for name in names.split())


REFUSED = frozenset({"model", "adapter"}) | _listed(
    model="name_or_path revision dtype quantization router_aux_loss_coef from_config"
    " tie_word_embeddings num_labels problem_type label_names pad_token_id chain",
    adapter="r lora_alpha lora_dropout target_modules target_parameters exclude_modules"
    " modules_to_save bias use_rslora use_dora init_lora_weights layers_to_transform layers_pattern"
    " rank_pattern alpha_pattern fan_in_fan_out autocast_adapter_dtype init_from",
    training="seed data_seed per_device_train_batch_size gradient_accumulation_steps"
    " train_sampling_strategy dataloader_drop_last optim optim_args fp16 bf16 objective",
)
"""The run would not be the same one: another value is refused."""

REPORTED = frozenset({"data", "training", "wire", "island"}) | _listed(
    model="attn_implementation tokenizer",
    data="train eval format dataset_config train_split eval_split dataset_text_field max_length"
    " truncation_mode add_eos completion_only_loss assistant_only_loss chat_template_path"
    " chat_template_kwargs eos_token pad_token pad_to_multiple_of padding_free",
    training="num_train_epochs max_steps learning_rate warmup_steps warmup_ratio lr_scheduler_type"
    " lr_scheduler_kwargs weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm"
    " label_smoothing_factor neftune_noise_alpha loss_chunk_tokens torch_compile"
    " torch_compile_backend torch_compile_mode loss_type loss_weights beta label_smoothing"
    " cpo_alpha simpo_gamma rpo_alpha use_weighting ld_alpha discopop_tau"
    " center_rewards_coefficient precompute_ref_log_probs"
    " desirable_weight undesirable_weight",
    wire="activations gradients",
    island="sync_steps warmup_steps method fragments delay_steps mixing compression"
    " outer_learning_rate outer_momentum outer_nesterov share",
)
"""Settings that change the result, if only in rounding; a change is reported with the old value."""

FREE = frozenset(
    {"version", "coordinator", "workers", "shard_plan", "links", "checkpoint_dir", "resume_step"}
) | _listed(
    model="chain_forms chain_modules",
    coordinator="hostname ip device num_threads port quantization",
    workers="hostname ip device num_threads port quantization id models num_gpus",
    shard_plan="id start end is_last links gradient_checkpointing",
    training="output_dir per_device_eval_batch_size logging_steps save_strategy save_steps"
    " save_total_limit eval_strategy eval_steps eval_on_start gradient_checkpointing report_to"
    " eval_delay load_best_model_at_end metric_for_best_model greater_is_better"
    " early_stopping_patience early_stopping_threshold run_name project logging_strategy"
    " push_to_hub hub_model_id hub_strategy hub_private_repo hub_revision"
    " logging_first_step logging_nan_inf_filter include_num_input_tokens_seen token_metrics"
    " sample_prompts sample_steps sample_max_new_tokens sample_temperature sample_top_p"
    " logging_dir visualize visualization_format timeline_steps log_level connect_timeout_s"
    " load_timeout_s rejoin_wait_s replan replicate_steps step_timeout_s liveness_timeout_s"
    " max_skipped_steps max_skipped_share probe_longest_batch max_in_flight verify_architecture",
    island="name lighthouse min_islands wait_s",
)
"""The trained result is the same whatever it is. In which precision the layers are held, by machine
or not, is compared as model.quantization."""


def settings(root: type[BaseModel]) -> Iterator[str]:
    """All settings of a schema: "links", "training", "training.seed", "workers.port", ..."""
    for name, field in root.model_fields.items():
        yield name
        for section in _sections(field.annotation):
            yield from (f"{name}.{key.alias or k}" for k, key in section.model_fields.items())


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON types by such names; a section that is present is also True by its name."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        settings[name] = value
        if isinstance(value, dict):
            settings[name] = True
            settings |= {f"{name}.{key}": item for key, item in value.items()}
    return settings


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections(argument)
