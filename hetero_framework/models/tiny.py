"""Tiny configurations: the same architecture with narrow layers.

`shrink` keeps the number of layers, their pattern and every switch of a configuration and makes
only the widths small; `tiny_config` does so to an architecture's default configuration with few
layers. Both are deterministic.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from hetero_framework.errors import ArchitectureError

TINY_LAYERS = 6
HEADS, HEAD_DIM, HIDDEN, INNER, VOCABULARY, POSITIONS, EXPERTS = 4, 16, 64, 96, 160, 128, 4

# Widths by the names that configurations give them.
_WIDTHS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner"), INNER),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
}


def tiny_config(model_type: str) -> PretrainedConfig:
    """A tiny configuration of an architecture, by its `model_type`."""
    if model_type not in CONFIG_MAPPING:
        raise ArchitectureError(f"transformers knows no model type {model_type!r}.")
    cls: Any = CONFIG_MAPPING[model_type]
    return shrink(cls(num_hidden_layers=TINY_LAYERS))


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """`config` with tiny widths: same class, layer count, layer pattern and switches."""
    fields = config.to_dict()
    changes: dict[str, Any] = {
        name: width for name, width in _WIDTHS.items() if isinstance(fields.get(name), int)
    }
    heads = fields.get("num_attention_heads")
    groups = fields.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int):
        changes["num_key_value_heads"] = HEADS if groups == heads else 1 if groups == 1 else 2
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if fields.get(token) is not None:
            changes[token] = {"pad_token_id": 0, "bos_token_id": 1}.get(token, 2)
    fields.update(changes)
    fields.pop("quantization_config", None)
    return type(config).from_dict(fields)
