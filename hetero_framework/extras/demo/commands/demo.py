"""`hetero demo`: makes a small model, trains it in three processes, and adapts it, offline.

1. Make a BPE tokenizer from the Python standard library's own source files, and a Llama of about 12
   million random weights.
2. Train all weights on these files, with a coordinator and two workers over TCP.
3. Train a LoRA adapter on that model with texts of another kind.
4. Train the adapter again, and kill a worker in the middle: it comes back; the result is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import psutil

from hetero_framework.commands.options import OutputFolder, at_least, option, overwrite, value
from hetero_framework.core.files import NamingOf, write_json
from hetero_framework.errors import UserError
from hetero_framework.trainer.read_metrics import read_curves

EXAMPLES = """
    hetero demo
    hetero demo --output first_try --lora-steps 24
    """
_HELP = "where everything is made (default: hetero_demo)"
OPTIONS = (
    option("--output", type=OutputFolder, metavar="DIR", default="hetero_demo", help=_HELP),
    overwrite("replace an earlier demonstration in DIR; other files in it stay"),
    value("--full-steps", "N", "steps of part 2 (default: 32)", type=at_least(1), default=32),
    value("--lora-steps", "N", "steps of part 3 (default: 12)", type=at_least(4), default=12),
)
CONFIG = Path(__file__).parents[1] / "hetero_config.json"
_MADE = ("model", "data", "full", "lora", "killed", "full_config.json", "lora_config.json")
_TEXTS, _HELD_OUT = 800, 64
_BAR = 50
_VOCABULARY = 4096
_CHARACTERS_PER_SAMPLE = 420  # a little more than data.max_length tokens
_TOKENIZER_CHARACTERS = 6_000_000
_NUM_SAMPLES = 4000
_SUMS_PER_SAMPLE = 12


def run(arguments: argparse.Namespace) -> int:
    folder, started = Path(arguments.output).absolute(), time.monotonic()
    there = [folder / name for name in _MADE if (folder / name).exists()]
    if there and not arguments.overwrite:
        raise UserError(f"{there[0]} exists already", hint="replace it with --overwrite")
    for earlier in there:
        shutil.rmtree(earlier) if earlier.is_dir() else earlier.unlink()
    data = folder / "data"
    data.mkdir(parents=True)

    say("1. a tokenizer and a random model from the Python standard library")
    files, texts = sources(), sums(_TEXTS)
    with NamingOf(folder):
        make_model(folder / "model", files)
        write_samples(data / "full.jsonl", pieces(files))
        write_samples(data / "lora.jsonl", texts[_HELD_OUT:])
        write_samples(data / "held_out.jsonl", texts[:_HELD_OUT])
    full, lora = settings(arguments.full_steps, arguments.lora_steps)
    write_json(folder / "full_config.json", full)
    write_json(folder / "lora_config.json", lora)

    say("2. full training on source code: one coordinator, two workers, TCP on this machine")
    with training(folder / "full_config.json"):
        pass
    say("3. LoRA on another kind of text, sums, on the model that part 2 trained")
    with training(folder / "lora_config.json"):
        pass
    say("4. the same again, and worker 1 is killed in the middle")
    with training(folder / "lora_config.json", 'training.output_dir="killed"') as process:
        kill_worker(folder / "killed", process, worker=1, step=arguments.lora_steps // 2)
    same = digest(folder / "killed") == digest(folder / "lora")
    print(f"the adapters of 3 and 4 are {'the same, byte for byte' if same else 'NOT THE SAME'}")

    say(f"done in {time.monotonic() - started:.0f} s")
    print("\n".join(curve(folder / "lora")))
    print(f"files: {folder / 'full' / 'model'}\n       {folder / 'lora' / 'adapter'}")
    print("\nnow with a model and data of yours: hetero train --model NAME --data FILE")
    return 0 if same else 1


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def settings(full_steps: int, lora_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configurations of full training and of LoRA, which differ in what they train."""
    full: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    full["model"] = {"name_or_path": "model"}
    full["data"] |= {"train": "data/full.jsonl"}
    full["training"] |= {"output_dir": "full", "max_steps": full_steps}
    lora = {**full, "model": {"name_or_path": "full/model"}}
    lora["data"] = {**full["data"], "train": "data/lora.jsonl", "eval": "data/held_out.jsonl"}
    lora["adapter"] = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05}
    lora["adapter"]["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    lora["training"] = {
        **full["training"],
        "output_dir": "lora",
        "max_steps": lora_steps,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": lora_steps // 4,
        "eval_on_start": True,
    }
    return full, lora


@contextmanager
def training(config: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run, and wait for its end after the block. If it fails, end the demonstration."""
    command = [sys.executable, "-P", "-m", "hetero_framework", "train", "--config", str(config)]
    with subprocess.Popen([*command, *(f"--set={one}" for one in overrides)]) as process:
        yield process
    if process.returncode:
        sys.exit(process.returncode)


def kill_worker(output: Path, run: subprocess.Popen[bytes], *, worker: int, step: int) -> None:
    """Kill a worker's process as soon as the run has done `step` steps."""
    log, metrics = output / "logs" / "coordinator.log", output / "metrics.jsonl"
    while run.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b'"grad_norm"') >= step:
            lines = log.read_text(encoding="utf-8")
            found = re.findall(rf"worker {worker}: started as process (\d+)", lines)
            psutil.Process(int(found[-1])).kill()
            return
        time.sleep(0.02)


def digest(output: Path) -> str:
    """sha256, in hex, of the weights of a run's adapter."""
    weights = output / "adapter" / "adapter_model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def curve(output: Path) -> list[str]:
    """The losses of a run's evaluations as bars."""
    steps, losses = read_curves(output)["eval_loss"]
    bars = (f"  step {step:2}  {loss:.3f}  " for step, loss in zip(steps, losses, strict=True))
    most = max(losses)
    drawn = [
        f"{bar}{'#' * round(_BAR * loss / most)}" for bar, loss in zip(bars, losses, strict=True)
    ]
    fell = 1 - losses[-1] / losses[0]
    return [f"LoRA on sums that it has not seen: the loss fell by {fell:.0%}", *drawn]


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
