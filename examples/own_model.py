"""A model class of your own, cut and trained like any other (docs/models.md).

python examples/own_model.py        # writes a tokenizer and texts to runs/own_model
hetero verify --config examples/own_model.json --import examples/own_model.py
hetero train --config examples/own_model.json --import examples/own_model.py
"""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class MixerConfig(PretrainedConfig):
    model_type = "running_mean_mixer"

    def __init__(self, vocab_size=256, hidden_size=32, num_hidden_layers=4, **others):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**others)


class Mixer(nn.Module):
    """Mixes each token with the mean of the tokens up to it."""

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, mask):
        normed = self.norm(hidden_states) * mask
        means = normed.cumsum(1) / mask.cumsum(1).clamp(min=1)
        return hidden_states + torch.tanh(self.mix(torch.cat([normed, means], dim=-1)))


class MixerForCausalLM(PreTrainedModel):
    config_class = MixerConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Mixer(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, labels=None, **others):
        hidden_states = self.embed_tokens(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask[..., None].to(hidden_states.dtype))
        logits, loss = self.lm_head(hidden_states), None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **others)
        return CausalLMOutput(loss=loss, logits=logits)


AutoConfig.register(MixerConfig.model_type, MixerConfig)
AutoModelForCausalLM.register(MixerConfig, MixerForCausalLM)

if __name__ == "__main__":
    folder = Path("runs/own_model")
    vocabulary = {letter: k for k, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    end = {"pad_token": "!", "eos_token": "!"}
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **end)
    whole.save_pretrained(folder / "tokenizer")
    lines = [json.dumps({"text": f"{k} and {k} make {2 * k}. " * 8}) for k in range(400)]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
