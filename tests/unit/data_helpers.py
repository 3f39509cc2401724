"""A tiny tokenizer, chat templates, and configurations for the tests of hetero_framework.data."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hetero_framework.config import Config
from hetero_framework.data.examples import Examples, ExamplesBuilder

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is two and two? It is four.",
    "Below is an instruction that describes a task. Write a response.\n\n### Response:",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>"]
SPECIAL += ["<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|end|>"]
SPECIAL += ["<|assistant|>", "<|system|>"]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' + '\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(template: str | None = None, **tokens: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 370 tokens; bos <s>, eos </s>, no pad token unless given."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>", **tokens}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        **{role: token for role, token in tokens.items() if token is not None},
    )
    tokenizer.chat_template = template
    return tokenizer


def make_config(base_dir: Path, data: dict[str, Any] | None = None, **training: Any) -> Config:
    """A configuration of one machine whose relative paths start at `base_dir`."""
    model = training.pop("model", {"name_or_path": "model"})
    sections: dict[str, Any] = {
        "coordinator": {"ip": "127.0.0.1"},
        "workers": [],
        "shard_plan": [{"id": "local", "start": 0, "end": 2}],
        "model": model,
        "training": training,
    }
    if data is not None:
        sections["data"] = data
    return Config.from_dict(sections, base_dir)


def examples_of(*lengths: int) -> Examples:
    """Examples of these lengths in tokens; every token is a label."""
    builder = ExamplesBuilder()
    for length in lengths:
        builder.add([1] * length, [True] * length)
    return builder.build()


def chat(*turns: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn."""
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def trl_template(name: str) -> str:
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes, **heads))


QUIET: dict[str, Any] = {
    **{"report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_strategy": "no"},
    **{"disable_tqdm": True, "dataloader_pin_memory": False},
}
"""Arguments of a Trainer on the CPU that writes nothing."""


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
