"""The whole job on one machine, offline: make a small model, train it in three processes, adapt it.

    make demo        or        python examples/demo.py

1. Train a BPE tokenizer on the Python standard library's own source files, and make a Llama of
   about 12 million random weights.
2. Train all of them from hetero_config.json: a coordinator and two workers, over TCP.
3. Train a LoRA adapter on other files, on the model that part 2 trained.
4. Train it again, and kill a worker in the middle: it comes back, and the adapter is the same.

Everything lands in runs/demo, which is emptied first.
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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "runs" / "demo"
CONFIG = ROOT / "hetero_config.json"

VOCABULARY = 4096
CHARACTERS_PER_SAMPLE = 420  # a little more than data.max_length tokens
TOKENIZER_CHARACTERS = 6_000_000
NUM_SAMPLES = 4000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full-steps", type=int, help="steps of full training (default: config)")
    parser.add_argument("--lora-steps", type=int, default=12, help="steps of LoRA training")
    arguments = parser.parse_args()
    started = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    (RUN / "data").mkdir(parents=True)

    say("1. a tokenizer and a random model from the Python standard library")
    first, second = split_sources()
    make_model(RUN / "model", first)
    write_samples(RUN / "data" / "full.jsonl", first)
    write_samples(RUN / "data" / "lora.jsonl", second)

    say("2. full training: one coordinator, two workers, TCP on this machine")
    override = (
        [] if arguments.full_steps is None else [f"training.max_steps={arguments.full_steps}"]
    )
    train(CONFIG, override)

    say("3. LoRA on other files, on the model that part 2 trained")
    lora_config = RUN / "lora_config.json"
    lora_config.write_text(json.dumps(lora_settings(arguments.lora_steps), indent=2) + "\n")
    train(lora_config, [])

    say("4. the same again, and worker 1 is killed in the middle")
    output = RUN / "killed"
    with training(lora_config, [f"training.output_dir={output}"]) as run:
        kill_worker(output, run, worker=1, step=arguments.lora_steps // 2)
    same = digest(output) == digest(RUN / "lora")
    print(f"the adapters of 3 and 4 are {'the same, byte for byte' if same else 'NOT THE SAME'}")

    say(f"done in {time.monotonic() - started:.0f} s")
    for label, output in (("full training", RUN / "full"), ("LoRA", RUN / "lora")):
        print("\n".join(summary(label, output)))
    print(f"files: {RUN / 'full' / 'model'}\n       {RUN / 'lora' / 'adapter'}")
    return 0 if same else 1


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def split_sources() -> tuple[list[Path], list[Path]]:
    """The standard library's own modules in two halves, drawn the same way everywhere."""
    library = Path(sysconfig.get_paths()["stdlib"])
    # Tests and installed packages differ from machine to machine; the top modules hardly do.
    files = sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
    files = [file for file in files if not {"test", "site-packages"} & set(file.parts)]
    random.Random(0).shuffle(files)
    middle = len(files) * 2 // 3
    return files[:middle], files[middle:]


def texts(files: list[Path]) -> Iterator[str]:
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace")


def write_samples(path: Path, files: list[Path]) -> None:
    """Pieces of source code, one {"text": ...} per line."""
    pieces = chain.from_iterable(
        (text[i : i + CHARACTERS_PER_SAMPLE] for i in range(0, len(text), CHARACTERS_PER_SAMPLE))
        for text in texts(files)
    )
    with path.open("w", encoding="utf-8") as file:
        for piece in islice((p for p in pieces if p.strip()), NUM_SAMPLES):
            file.write(json.dumps({"text": piece}) + "\n")


def make_model(directory: Path, files: list[Path]) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(bounded(texts(files), TOKENIZER_CHARACTERS), trainer)
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


def bounded(source: Iterator[str], characters: int) -> Iterator[str]:
    for text in source:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def lora_settings(steps: int) -> dict[str, Any]:
    """The shipped configuration, turned to LoRA on what the first training left."""
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    config["model"] = {"name_or_path": str(RUN / "full" / "model")}
    config["data"] = {**config["data"], "train": str(RUN / "data" / "lora.jsonl")}
    config["adapter"] = {
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    config["training"] = {
        **config["training"],
        "output_dir": str(RUN / "lora"),
        "max_steps": steps,
        "learning_rate": 2e-3,
        "warmup_steps": 2,
    }
    return config


def train(config: Path, overrides: list[str]) -> None:
    with training(config, overrides):
        pass


@contextmanager
def training(config: Path, overrides: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A run, whose end is waited for behind the block; its failure ends the demonstration."""
    command = [sys.executable, str(ROOT / "examples" / "train.py"), "--config", str(config)]
    for override in overrides:
        command += ["--set", override]
    with subprocess.Popen(command) as run:
        yield run
    if run.returncode:
        sys.exit(run.returncode)


def kill_worker(output: Path, run: subprocess.Popen[bytes], *, worker: int, step: int) -> None:
    """Kill a worker's process as soon as the run has done `step` steps."""
    log, metrics = output / "logs" / "coordinator.log", output / "metrics.jsonl"
    while run.poll() is None:
        if metrics.exists() and len(metrics.read_bytes().splitlines()) >= step:
            lines = log.read_text(encoding="utf-8")
            found = re.findall(rf"worker {worker}: started as process (\d+)", lines)
            psutil.Process(int(found[-1])).kill()
            return
        time.sleep(0.02)


def digest(output: Path) -> str:
    """Of a run's adapter."""
    weights = output / "adapter" / "adapter_model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def summary(label: str, output: Path) -> list[str]:
    """What a run's metrics say, in a few lines."""
    text = (output / "metrics.jsonl").read_text(encoding="utf-8")
    steps = [line for line in map(json.loads, text.splitlines()) if "loss" in line]
    seconds = sum(step["step_seconds"] for step in steps)
    tokens = sum(step["tokens"] for step in steps)
    ways = ("bytes_in", "bytes_out", "direct_bytes_out")
    wire = sum(s[way] for step in steps for s in step["stages"] for way in ways) / len(steps)
    busy = [
        sum(step["stages"][k]["busy_s"] for step in steps) / seconds
        for k in range(len(steps[0]["stages"]))
    ]
    return [
        f"{label}: loss {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f} in {len(steps)} steps, "
        f"{tokens / seconds:,.0f} tokens/s, {wire / 2**20:.1f} MiB on the wire per step",
        "  stages busy: " + ", ".join(f"{share:.0%}" for share in busy) + f"; {output}",
    ]


if __name__ == "__main__":
    sys.exit(main())
