import re

import pytest
from transformers import Llama4Config, LlamaConfig, LlamaForCausalLM

from hetero_framework.errors import ArchitectureError
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import lies_in, model_class, pattern, towers
from hetero_framework.models.cut.tiny import stock_class, tiny_config


def test_a_model_of_one_part_is_its_own_class():
    config = LlamaConfig()
    assert towers(config) == ()
    assert model_class(config) is LlamaForCausalLM


def test_the_checkpoint_says_which_class_a_composite_configuration_means():
    config = Llama4Config()
    assert stock_class(config).__name__ == "Llama4ForCausalLM"
    config.architectures = ["Llama4ForConditionalGeneration"]
    assert stock_class(config).__name__ == "Llama4ForConditionalGeneration"
    config.architectures = ["Llama4ForSequenceClassification"]  # of no class that generates
    assert stock_class(config).__name__ == "Llama4ForCausalLM"


def test_names_in_towers():
    gone = ("model.vision", "newline")
    assert lies_in("model.vision.layers.0", gone)
    assert not lies_in("model.vision_language.layers.0", gone)
    for name in ("model.vision", "model.vision.a.b", "newline", "model.visions", "modelxvision"):
        assert bool(re.fullmatch(pattern(gone), name)) == lies_in(name, gone)


def test_the_refusal_of_other_blocks_names_them():
    with pytest.raises(ArchitectureError, match="the model's own code goes backward"):
        introspect(tiny_config("reformer"))
