import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from hetero_framework.errors import ArchitectureError
from hetero_framework.models.cut.tiny import (
    architecture_names,
    causal_lm_types,
    probe_inputs,
    shrink,
    stock_class,
    tiny_config,
)

LARGE_ENOUGH = 1_000_000


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gpt2", "opt", "deepseek_v3", "qwen3_next", "gemma3", "bamba", "gpt_oss", "mpt"],
)
def test_tiny_model_is_small_and_runs(model_type):
    config = tiny_config(model_type)
    model = stock_class(config)._from_config(config)
    inputs = {k: v for k, v in probe_inputs(config).items() if k != "labels"}
    assert torch.isfinite(model(**inputs, use_cache=False).logits).all()
    text = {p for n, p in model.named_parameters() if "vision" not in n}
    assert sum(p.numel() for p in text) < LARGE_ENOUGH


def test_shrink_keeps_layers_pattern_and_switches():
    config = Qwen3NextConfig(num_hidden_layers=12, num_key_value_heads=2, num_attention_heads=16)
    tiny = shrink(config)
    assert tiny.num_hidden_layers == 12
    assert tiny.layer_types == config.layer_types
    assert tiny.num_key_value_heads < tiny.num_attention_heads
    assert tiny.hidden_act == config.hidden_act
    assert tiny.hidden_size < config.hidden_size


def test_shrink_keeps_multi_query_and_full_heads_apart():
    full, multi = LlamaConfig(num_key_value_heads=32), LlamaConfig(num_key_value_heads=1)
    assert shrink(full).num_key_value_heads == shrink(full).num_attention_heads
    assert shrink(multi).num_key_value_heads == 1


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.1] * 48, "long_factor": [2.0] * 48}
LONGER = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(head_dim=128, num_hidden_layers=2, rope_scaling=LLAMA3),
        Phi3Config(pad_token_id=32000, num_hidden_layers=2, rope_scaling=LONGROPE, **LONGER),
        Qwen3Config(num_hidden_layers=2, rope_scaling=YARN),
    ],
    ids=["llama3", "longrope", "yarn"],
)
def test_scaled_rotary_embeddings_shrink(config):
    tiny = shrink(config)
    assert tiny.rope_parameters["rope_type"] == config.rope_parameters["rope_type"]
    model = stock_class(tiny)._from_config(tiny)
    inputs = probe_inputs(tiny)
    assert torch.isfinite(model(**inputs, use_cache=False).loss)


@pytest.mark.parametrize(
    ("sections", "narrow"),
    [([16, 24, 24], [4, 2, 2]), ([22, 22, 20], [2, 2, 4]), ([4, 4, 4, 4], [2, 2, 2, 2])],
)
def test_rotary_sections_shrink_with_the_same_one_apart(sections, narrow):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    assert shrink(LlamaConfig(rope_parameters=rope)).rope_parameters["mrope_section"] == narrow


def test_classes_have_names_of_their_own_beside_the_types():
    names = architecture_names()
    assert len(names) == len(set(names))
    assert {"llama4", "Llama4ForConditionalGeneration"} <= set(names)
    assert "Gemma3ForConditionalGeneration" not in names  # what the type gemma3 stands for
    config = tiny_config("Llama4ForConditionalGeneration")
    assert stock_class(config).__name__ == "Llama4ForConditionalGeneration"
    assert config.get_text_config().hidden_size < 100


def test_parts_of_a_composite_have_their_own_settings():
    text = tiny_config("Qwen4ExpForConditionalGeneration").text_config
    assert (text.num_hidden_layers, text.ple_layer_ids) == (6, [2, 5])
    # No setting of a part goes for want of another, nor its type.
    assert tiny_config("Exaone4_5_ForConditionalGeneration").text_config.num_hidden_layers == 6
    assert tiny_config("FastVlmForConditionalGeneration").vision_config.hidden_size


def test_shrink_is_idempotent_and_leaves_its_argument_alone():
    config = LlamaConfig()
    before = config.to_dict()
    once = shrink(config)
    assert config.to_dict() == before
    assert shrink(once).to_dict() == once.to_dict()


def test_shrink_drops_quantization_and_takes_float32():
    config = LlamaConfig(dtype="bfloat16", quantization_config={"quant_method": "bitsandbytes"})
    tiny = shrink(config)
    assert not hasattr(tiny, "quantization_config")
    assert tiny.dtype == torch.float32


def test_special_tokens_fit_the_tiny_vocabulary():
    config = shrink(
        LlamaConfig(vocab_size=128256, bos_token_id=128000, eos_token_id=[128001, 128009])
    )
    assert config.bos_token_id < config.vocab_size
    assert AutoModelForCausalLM.from_config(config).config.eos_token_id < config.vocab_size


def test_unknown_type_is_refused():
    with pytest.raises(ArchitectureError, match="no_such_type"):
        tiny_config("no_such_type")


def test_the_model_types_cover_the_library():
    types = causal_lm_types()
    assert len(types) == len(set(types)) > 150
    assert {"llama", "gpt2", "qwen3_next", "gpt_oss"} <= set(types)
