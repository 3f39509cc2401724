"""The demonstration's model, tokenizer and data, made from what every Python has."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

_VOCABULARY = 4096
_CHARACTERS_PER_SAMPLE = 420  # a little more than data.max_length tokens
_TOKENIZER_CHARACTERS = 6_000_000
_NUM_SAMPLES = 4000
_SUMS_PER_SAMPLE = 12


def sources() -> list[Path]:
    """Two thirds of the standard library's modules, drawn with a fixed seed."""
    library = Path(sysconfig.get_paths()["stdlib"])
    # Tests and installed packages differ from machine to machine; the top modules hardly do.
    files = sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
    files = [file for file in files if not {"test", "site-packages"} & set(file.parts)]
    random.Random(0).shuffle(files)
    return files[: len(files) * 2 // 3]


def pieces(files: list[Path]) -> Iterator[str]:
    """Pieces of source code."""
    size = _CHARACTERS_PER_SAMPLE
    found = chain.from_iterable(
        (text[i : i + size] for i in range(0, len(text), size)) for text in _texts(files)
    )
    return islice((piece for piece in found if piece.strip()), _NUM_SAMPLES)


def sums(count: int) -> list[str]:
    """Texts of another kind: lines such as 12 + 7 = 19."""
    draw = random.Random(0)

    def line() -> str:
        one, other = draw.randrange(100), draw.randrange(100)
        return f"{one} + {other} = {one + other}"

    return ["\n".join(line() for _ in range(_SUMS_PER_SAMPLE)) for _ in range(count)]


def write_samples(path: Path, texts: Iterable[str]) -> None:
    """Write one {"text": ...} per line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def make_model(directory: Path, files: list[Path]) -> None:
    """Write a BPE tokenizer trained on `files`, and a Llama with random weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_bounded(_texts(files), _TOKENIZER_CHARACTERS), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=fast.pad_token_id,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.1f} million random weights, {len(fast)} tokens: {directory}")


def _texts(files: list[Path]) -> Iterator[str]:
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace")


def _bounded(source: Iterator[str], characters: int) -> Iterator[str]:
    for text in source:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)
