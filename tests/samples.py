"""Small real things for tests: a tokenizer, models with random weights, data files, configurations."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

WORDS = "the a model trains on many small machines and every layer keeps its own weights".split()


def save_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 300 tokens, saved into `directory`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(directory)
    return fast


def save_llama(directory: Path, *, seed: int = 0, layers: int = 6, **changes: Any) -> Path:
    """A tiny random Llama with its tokenizer, saved as a Hugging Face checkpoint."""
    tokenizer = save_tokenizer(directory)
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **changes,
    }
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(LlamaConfig(**settings)).save_pretrained(directory)
    return directory


def save_texts(path: Path, count: int, *, seed: int = 0, longest: int = 24) -> Path:
    """`count` lines of {"text": ...} with uneven lengths."""
    draw = random.Random(seed)
    lines = (
        json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(3, longest)))})
        for _ in range(count)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody uses now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return ports


def config_dict(model: Path, data: Path, output: Path, cuts: list[int], layers: int = 6) -> dict:
    """A configuration with one stage per part between `cuts`, the first one local."""
    bounds = [0, *cuts, layers]
    ports = free_ports(len(bounds) - 1)
    owners: list[Any] = ["local", *range(1, len(bounds) - 1)]
    return {
        "coordinator": {"hostname": "localhost", "ip": "127.0.0.1", "port": ports[0], "device": "cpu"},
        "workers": [
            {"id": i, "hostname": "localhost", "ip": "127.0.0.1", "port": ports[i], "device": "cpu"}
            for i in owners[1:]
        ],
        "shard_plan": [
            {"id": owner, "start": start, "end": end}
            for owner, start, end in zip(owners, bounds, bounds[1:])
        ],
        "model": {"name_or_path": str(model)},
        "data": {"train": str(data), "max_length": 64},
        "training": {
            "output_dir": str(output),
            "num_train_epochs": 3,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "max_grad_norm": 0.5,
            "save_strategy": "no",
            "report_to": "none",
            "visualize": False,
        },
    }
