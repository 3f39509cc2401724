"""Sums to learn, and a model of 100,000 weights that knows none of them:

    python examples/tinker/sums.py FOLDER
    hetero serve --config FOLDER/cluster.json

The second line prints what the examples beside this file need in their environment. They take any
model that `hetero serve` has; FOLDER/model is this one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tinker import types

LARGEST = 4


def sums() -> list[tuple[str, str]]:
    """Questions, and their right answers."""
    numbers = range(LARGEST + 1)
    return [(f"{a} + {b} =", f"{a + b}") for a in numbers for b in numbers]


def options(**more: Any) -> argparse.Namespace:
    """The model, and these options with their defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="as the configuration of hetero serve names it")
    for name, default in {"steps": 120, "rate": 2e-3, "seed": 0, "log": "", **more}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def example(prompt: list[int], answer: list[int], **of_answer: Any) -> types.Datum:
    """A text to be trained. Each token is the target of the one before it; what is given of the
    answer's tokens is 0 for the prompt's."""
    tokens, before = [*prompt, *answer], [0.0] * (len(prompt) - 1)
    tensors = {name: [*before, *map(float, values)] for name, values in of_answer.items()}
    inputs = {"target_tokens": tokens[1:], **tensors}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def make(folder: Path) -> None:
    """Write the model and the configuration of an endpoint on this machine."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "+", "=", *map(str, range(2 * LARGEST + 1))]
    tokenizer = Tokenizer(models.WordLevel({w: k for k, w in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    about = {"max_position_embeddings": 32, "initializer_range": 0.1, "eos_token_id": 1}
    config = LlamaConfig(vocab_size=len(words), num_attention_heads=4, **sizes, **about)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    cluster = {
        "coordinator": {
            "hostname": "localhost",
            "ip": "127.0.0.1",
            "device": "cpu",
            "num_threads": 1,
        },
        "shard_plan": [{"id": "local", "start": 0, "end": 3}],
        "model": {"name_or_path": str((folder / "model").absolute())},
        "training": {
            "per_device_train_batch_size": 32,
            "output_dir": str(folder.absolute() / "out"),
        },
    }
    (folder / "cluster.json").write_text(json.dumps(cluster, indent=1), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the model and its endpoint.")
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
