"""Models without their weights: on the meta device, and as tiny copies with narrow layers.

`shrink` makes the widths of a configuration small and keeps all else; `tiny_config` does so to an
architecture's default configuration with few layers. The rules go by the names of fields;
exceptions stand in one table, with the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from hetero_framework.config.objectives import Task
from hetero_framework.errors import ArchitectureError
from hetero_framework.models.cut.family import family_of, head_for
from hetero_framework.models.library import OWN_CLASS_HINT

TINY_LAYERS = 6
HEADS, HEAD_DIM, HIDDEN, INNER, VOCABULARY, POSITIONS = 4, 16, 64, 96, 160, 128
EXPERTS, EXPERT_INNER, RANK, STATE, WINDOW = 4, 32, 16, 16, 8
PROBE_ROWS, PROBE_TOKENS = 2, 12


def _all(names: str, width: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), width)


# Widths by field name. Products agree: heads x head size = hidden size, and the inner size of
# state-space layers, twice the hidden size, is 8 heads of 16.
_WIDTHS: dict[str, int] = {
    **_all("hidden_size n_embd d_model emb_dim embed_dim embedding_dim embedding_size", HIDDEN),
    **_all("word_embed_proj_dim input_embedding_size output_embedding_size lru_width", HIDDEN),
    **_all("backbone_hidden_size ple_embed_dim out_hidden_size text_hidden_size", HIDDEN),
    **_all("hidden_size_global audio_hidden_size pooler_hidden_size", HIDDEN),
    **_all("num_attention_heads n_head n_heads num_heads attention_heads", HEADS),
    **_all("encoder_attention_heads decoder_attention_heads swa_num_attention_heads", HEADS),
    **_all("num_encoder_attention_heads num_decoder_attention_heads linear_num_heads", HEADS),
    **_all("linear_num_value_heads index_n_heads indexer_n_heads", HEADS),
    **_all("linear_num_key_heads", 2),
    **_all("head_dim swa_head_dim global_head_dim v_head_dim kv_channels d_head", HEAD_DIM),
    **_all("attention_head_size linear_head_dim linear_key_head_dim index_head_dim", HEAD_DIM),
    **_all("linear_value_head_dim dim_head indexer_head_dim", HEAD_DIM),
    **_all("qk_nope_head_dim qk_rope_head_dim rotary_dim", 8),
    **_all("qk_head_dim", 16),
    **_all("intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_inner dff", INNER),
    **_all("dim_ff ffn_hidden_size intermediate_size_mlp dense_intermediate_size", INNER),
    **_all("feed_forward_size shared_intermediate_size", INNER),
    **_all("moe_intermediate_size shared_expert_intermediate_size", EXPERT_INNER),
    **_all("shared_experts_intermediate_size moe_shared_expert_intermediate_size", EXPERT_INNER),
    **_all("expert_ffn_hidden_size router_hidden_size", EXPERT_INNER),
    **_all("num_experts num_local_experts n_routed_experts moe_num_experts", EXPERTS),
    **_all("zero_expert_num", 2),
    **_all("q_lora_rank kv_lora_rank o_lora_rank laurel_rank gated_norm_rank adapter_rank", RANK),
    **_all("hidden_size_per_layer_input hc_lowrank d_rel mamba_dt_rank time_step_rank", RANK),
    **_all("state_size mamba_d_state ssm_state_size", STATE),
    **_all("mamba_n_heads mamba_num_heads", 8),
    **_all("mamba_d_head mamba_head_dim mamba_headdim", 16),
    **_all("mamba_d_ssm", 2 * HIDDEN),
    **_all("n_groups mamba_n_groups mamba_ngroups", 1),
    **_all("sliding_window sliding_window_size attention_window_size local_attention", WINDOW),
    **_all("window_size chunk_size mamba_chunk_size attention_chunk_size block_size", WINDOW),
    **_all("keep_window_size rel_extent block_multiple_of", WINDOW),
    **_all("index_topk index_block_size indexer_budget", 4),
    **_all("index_topk_blocks index_kpool", 2),
    **_all("max_position_embeddings n_positions n_ctx max_seq_len model_max_length", POSITIONS),
    **_all("context_length max_target_positions max_source_positions", POSITIONS),
    **_all("original_max_position_embeddings", POSITIONS // 2),
    **_all("vocab_size vocab_size_per_layer_input decoder_vocab_size", VOCABULARY),
    **_all("unpadded_vocab_size ngram_vocab_size_base", VOCABULARY),
}

# Counts that stay as they are when small already.
_AT_MOST: dict[str, int] = {
    **_all("num_experts_per_tok num_experts_per_token moe_topk moe_k", 2),
    **_all("n_mamba_heads", 8),
    **_all("n_group num_expert_group", 2),
    **_all("topk_group", 1),
    **_all("indexer_compress_ratio split_ngram_parts", 2),
    **_all("first_k_dense_replace num_dense_layers moe_layer_start_index", 1),
    **_all("attn_layer_period layer_group_size global_attn_every_n_layers", 3),
    **_all("attn_layer_offset", 1),
}

_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")

_LAYER_COUNTS = _all(
    "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers", TINY_LAYERS
)

# Sizes that an architecture's field names do not tell, for its default configuration.
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Rotary positions of three axes; published configurations say how many frequencies each has.
_AXES = {"text_config": {"rope_parameters": {**_PLAIN_ROPE, "mrope_section": [16, 24, 24]}}}
_LAST_AXIS = {"text_config": {"rope_parameters": {**_PLAIN_ROPE, "mrope_section": [22, 22, 20]}}}
_HALF_ROPE = {**_PLAIN_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_HALF_AXES = {"text_config": {"rope_parameters": _HALF_ROPE}}
_EACH_KIND = {"rope_parameters": {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}}
_PICTURE_TOKEN = {"vocabulary_map": {"<image>": 5}}
_LAYERS = {"num_hidden_layers": TINY_LAYERS}
_HEAD_DIM = {"head_dim": HEAD_DIM}
_HYBRID = {**_LAYERS, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2}
_SLIDING = ["sliding_attention", "full_attention"] * (TINY_LAYERS // 2)
_SHARED_KV = {**_LAYERS, "num_kv_shared_layers": 2, "layer_types": _SLIDING}
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "paddleocr_vl"), _AXES),
    "ernie4_5_vl_moe": _LAST_AXIS,
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"), _HALF_AXES),
    # Sizes that the class leaves open.
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "nemotron": {"num_key_value_heads": 2},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _HEAD_DIM),
    "cohere_compass_text": _EACH_KIND,
    "cohere_compass": {"text_config": {"model_type": "cohere_compass_text", **_EACH_KIND}},
    "step3p7": {"text_config": {"sliding_window": WINDOW}},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": HIDDEN}}},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": HEAD_DIM,
            "rope_parameters": {**_PLAIN_ROPE, "mrope_section": [2, 2, 2, 2]},
        }
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "4/8"},
    # Tokens that published configurations name.
    **dict.fromkeys(("chameleon", "emu3"), _PICTURE_TOKEN),
    "qwen2_5_omni_thinker": {"vision_start_token_id": 7, **_AXES},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 7},
    # Patterns written out for the default number of layers.
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", *["sparse"] * (TINY_LAYERS - 1)],
            "num_experts_per_tok": 2,
        }
    },
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}},
    "gpt_neo": {
        "num_layers": TINY_LAYERS,
        "attention_types": [[["global", "local"], TINY_LAYERS // 2]],
    },
    "lfm2_moe": {**_LAYERS, "layer_types": ["conv", "full_attention"] * (TINY_LAYERS // 2)},
    # What the class demands of its part for text.
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": TINY_LAYERS,
            **_LAYERS,
        }
    },
    # One layer with attention would share its transformer with no other.
    **dict.fromkeys(("zamba", "zamba2"), _HYBRID),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), _SHARED_KV),
    # Without these, layers of full attention have no indexer, and no layer has an embedding.
    "qwen4_exp_text": {
        "head_dim": HEAD_DIM,
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [2, 5],
        "eos_token_id": 2,
    },
    # Multipliers that do nothing by default, as the published models have them.
    **dict.fromkeys(("granite", "granite_swa", "granitemoe", "granitemoe_swa"), _MULTIPLIERS),
    **dict.fromkeys(("granitemoehybrid", "granitemoeshared"), _MULTIPLIERS),
    # Switches without which the causal model refuses to run.
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}


_CLASSIFIERS: dict[Task, Any] = {
    "sequence-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
    "image-classification": AutoModelForImageClassification,
}


def causal_lm_types() -> list[str]:
    """All model types for which the installed transformers has a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _classifier(config: PretrainedConfig, task: Task) -> type[PreTrainedModel] | None:
    found = _CLASSIFIERS[task]._model_mapping.get(type(config), None)
    cls: type[PreTrainedModel] | None = found[0] if isinstance(found, tuple) else found
    return cls


def task_of(config: PretrainedConfig) -> Task:
    """The task of the class that a configuration names; "causal-lm" if that is no classifier."""
    named = config.architectures or ()
    for task in _CLASSIFIERS:
        if (cls := _classifier(config, task)) is not None and cls.__name__ in named:
            return task
    return "causal-lm"


def stock_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The library's class of a configuration: the class named in it, if that classifies or
    generates text, else the causal language model, else the multimodal class. Raises
    ArchitectureError if there is none."""
    if (family := family_of(config)) is not None:
        return family.stock_class
    if (task := task_of(config)) != "causal-lm":
        found = _classifier(config, task)
        assert found is not None
        return found
    causal: Any = AutoModelForCausalLM._model_mapping
    mappings: list[Any] = [causal, AutoModelForMultimodalLM._model_mapping]
    classes: list[type[PreTrainedModel]]
    classes = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    named = config.architectures or ()
    if classes:
        return min(classes, key=lambda cls: cls.__name__ not in named)
    # The text part of a composite type is listed under the composite's name.
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        composite = CONFIG_MAPPING[model_type]
        if type(config) in composite.sub_configs.values():
            cls: type[PreTrainedModel] = causal[composite]
            if cls.config_class is type(config):
                return cls
    raise ArchitectureError(
        f"transformers has no causal language model for model type {config.model_type!r}",
        hint="choose a model whose config.json names a text-generation architecture",
    )


def config_for(config: PretrainedConfig, task: Task) -> PretrainedConfig:
    """`config`, or the part of a composite one that the class for a task takes. For a classifier
    the result names the class. Raises ArchitectureError if there is no class."""
    kept = [_classifier(config, one) for one in _CLASSIFIERS]
    heads = {cls.__name__ for cls in kept if cls is not None}
    named = [name for name in config.architectures or () if name not in heads]
    config.architectures = named or None
    if task == "causal-lm":
        return causal_lm_config(config)
    if _classifier(config, task) is None and config.sub_configs:
        config = causal_lm_config(config)
    cls = _classifier(config, task)
    if cls is None:
        raise ArchitectureError(
            f"transformers has no class for {task} of model type {config.model_type!r}",
            hint="choose another model, or a training.objective that generates text",
        )
    config.architectures = [cls.__name__]
    return config


def causal_lm_config(config: PretrainedConfig) -> PretrainedConfig:
    """`config`, or the part of a composite one that AutoModelForCausalLM takes: its text or its
    decoder."""
    wanted = stock_class(config).config_class if config.sub_configs else None
    part = next((name for name, cls in config.sub_configs.items() if cls is wanted), None)
    if part is None:
        return config
    text: PretrainedConfig = getattr(config, part)
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def multimodal_classes() -> dict[str, str]:
    """Model types of the library's multimodal classes, keyed by class name."""
    types: dict[str, str] = {}
    for model_type, name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items():
        types.setdefault(name, model_type)  # others are variants of the first
    return types


def architecture_names(task: Task = "causal-lm") -> list[str]:
    """All model types of causal language models, and the other multimodal classes by name; or the
    model types with a class for another task."""
    if task != "causal-lm":
        return sorted(_CLASSIFIERS[task]._model_mapping._model_mapping)
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return [*causal_lm_types(), *sorted(multimodal_classes().keys() - causal)]


def tiny_config(name: str, task: Task = "causal-lm") -> PretrainedConfig:
    """A tiny configuration of an architecture, or of a multimodal class. Raises as
    `short_config`."""
    return config_for(shrink(short_config(name, task)), task)


def short_config(name: str, task: Task = "causal-lm") -> PretrainedConfig:
    """The default configuration of an architecture, or of a multimodal class, with few layers.
    Raises ArchitectureError for an unknown name, and for an architecture without a class for the
    task."""
    model_type = multimodal_classes().get(name, name)
    if model_type not in CONFIG_MAPPING:
        raise ArchitectureError(
            f"transformers knows no model type {model_type!r}", hint=OWN_CLASS_HINT
        )
    cls: Any = CONFIG_MAPPING[model_type]
    extra = _DEFAULTS.get(model_type, {})
    if name != model_type:
        extra = {**extra, "architectures": [name]}
    default = cls(**extra)
    text = config_for(default, task)
    if text is not default and text.model_type in CONFIG_MAPPING:
        return short_config(text.model_type, task)
    parts = {part: getattr(default, part, None) for part in default.sub_configs}
    kinds = {part: inner.model_type for part, inner in parts.items() if inner is not None}
    of_parts = {part: _DEFAULTS[kind] for part, kind in kinds.items() if kind in _DEFAULTS}
    settings = _merged(of_parts, extra)
    counts = _layer_counts(default.to_dict())
    return config_for(cls(**_merged(counts, settings)), task)


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The settings of both, merged also in nested configurations. Values of `other` win."""
    merged = {**one, **other}
    for name in one.keys() & other.keys():
        if isinstance(one[name], dict) and isinstance(other[name], dict):
            merged[name] = _merged(one[name], other[name])
    return merged


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """`config` with tiny widths: same class, layer count, layer pattern and switches. A family's
    configuration stays as it is."""
    if family_of(config) is not None:
        return config
    fields = _narrow(config.to_dict())
    fields.pop("quantization_config", None)
    task = task_of(config)
    if task != "causal-lm" and "is_decoder" in fields:
        fields["is_decoder"] = config.is_decoder
    if task == "image-classification" and "window_size" in fields:
        fields["window_size"] = config.window_size  # pictures are as large as by default
    tiny = type(config).from_dict(fields)
    tiny.dtype = torch.float32
    text: Any = tiny.get_text_config()
    if task != "causal-lm" and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0
    return tiny


def probe_inputs(
    config: PretrainedConfig, seed: int = 0, tokens: int = PROBE_TOKENS, ids_per_token: int = 1
) -> dict[str, torch.Tensor]:
    """A deterministic batch for a tiny model: the second row is padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = config.get_text_config().vocab_size
    shape = (PROBE_ROWS, tokens * ids_per_token)
    ids = torch.randint(3, vocabulary, shape, generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 3 * tokens // 4 * ids_per_token :] = 0
    if (head := head_for(task_of(config))) is not None:
        return head.probe(config, ids, mask, generator)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _layer_counts(fields: dict[str, Any]) -> dict[str, Any]:
    """Small values for the layer counts among the fields, also in configurations inside."""
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, int) and name in _LAYER_COUNTS:
            changes[name] = TINY_LAYERS
        elif isinstance(value, dict) and "model_type" in value and (inner := _layer_counts(value)):
            changes[name] = {"model_type": value["model_type"], **inner}
    return changes


def _narrow(fields: dict[str, Any]) -> dict[str, Any]:
    """All fields with widths made small, recursively."""
    narrow = dict(fields)
    for name, value in fields.items():
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            narrow[name] = _narrow(value)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int) and name in _WIDTHS and value > 0:
            narrow[name] = _WIDTHS[name]
        elif isinstance(value, list) and name in _WIDTHS:
            narrow[name] = [_WIDTHS[name]] * len(value)
        elif isinstance(value, int) and name in _AT_MOST:
            narrow[name] = min(value, _AT_MOST[name])
    for rule in (_key_value_heads, _related, _rotary, _tokens):
        narrow.update(rule(fields))
    return narrow


def _key_value_heads(fields: dict[str, Any]) -> dict[str, Any]:
    """Key-value heads: all heads, one, or two, where the original has all, one, or some."""
    changes = {}
    for name in _KEY_VALUE_HEADS:
        groups = fields.get(name)
        heads = fields.get("num_attention_heads", fields.get("swa_num_attention_heads"))
        if isinstance(groups, int):
            changes[name] = HEADS if groups == heads else 1 if groups == 1 else 2
    return changes


def _related(fields: dict[str, Any]) -> dict[str, Any]:
    """Widths that follow from other widths; `is_decoder` becomes true."""
    changes: dict[str, Any] = {}
    rotary = fields.get("qk_rope_head_dim")
    if rotary is not None and fields.get("head_dim") == rotary:
        changes["head_dim"] = _WIDTHS["qk_rope_head_dim"]
    if "state_size" in fields and "num_heads" in fields:
        # State-space heads share the inner size, twice the hidden size.
        changes["num_heads"] = 2 * HIDDEN // HEAD_DIM
    inner = fields.get("attention_hidden_size")
    if isinstance(inner, int):
        changes["attention_hidden_size"] = HIDDEN * max(1, inner // fields["hidden_size"])
        if fields.get("attention_head_dim"):
            changes["attention_head_dim"] = changes["attention_hidden_size"] // HEADS
    if fields.get("is_decoder") is False:
        changes["is_decoder"] = True
    return changes


def _rotary(fields: dict[str, Any]) -> dict[str, Any]:
    """Lists with one entry per rotary frequency, or with sizes of sections of frequencies."""
    frequencies = int(HEAD_DIM * fields.get("partial_rotary_factor", 1.0)) // 2
    factors = fields.keys() & {"short_factor", "long_factor"}
    changes: dict[str, Any] = {name: [1.0] * frequencies for name in factors}
    sections = fields.get("mrope_section")
    if isinstance(sections, list):
        # What does not divide evenly goes to the section whose size differs already.
        odd = next((i for i, size in enumerate(sections) if sections.count(size) == 1), 0)
        narrow = [frequencies // len(sections)] * len(sections)
        narrow[odd] = frequencies - sum(narrow) + narrow[odd]
        changes["mrope_section"] = narrow
    return changes


def _tokens(fields: dict[str, Any]) -> dict[str, Any]:
    """Special tokens inside the tiny vocabulary: padding 0, begin 1, end 2, others from the top."""
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    changes: dict[str, Any] = {}
    top = VOCABULARY
    for name, value in fields.items():
        # Per-layer settings are keyed by number.
        is_token = str(name).endswith(("token_id", "token_index"))
        if not is_token or value is None or value == -1:
            continue
        top -= 1
        changes[name] = known.get(name, top)
    return changes
