"""Time and memory of tokenising many short texts, beside `datasets.map` with two processes.

    python -m benchmarks.tokenising [--rows 1000000] [--pairs 3]

Each way runs in a process of its own, in turn, with nothing cached, and reads the same JSON lines.
Prints one JSON object: of each way the median seconds, the CPU seconds of all its processes and the
peak memory of its first one in MiB, and `ratio`, that of the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = 3000
VOCABULARY = 8000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--way", choices=_WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(_measured(arguments.way, arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make(folder, arguments.rows)
        found = {way: list[dict[str, float]]() for way in _WAYS}
        for _ in range(arguments.pairs):
            for way in _WAYS:
                found[way].append(_in_a_process(way, folder))
    medians = {
        way: {key: round(statistics.median(each[key] for each in runs), 2) for key in runs[0]}
        for way, runs in found.items()
    }
    ratio = medians["ours"]["seconds"] / medians["datasets"]["seconds"]
    print(json.dumps({"rows": arguments.rows, **medians, "ratio": round(ratio, 3)}))


def _make(folder: Path, count: int) -> None:
    """Rows of 8 to 25 words, and a tokenizer that was trained on some of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(WORDS)]
    texts = [
        " ".join(draw.choices(words, k=draw.randint(8, 25))) for _ in range(min(count, 50_000))
    ]
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(count):
            file.write(json.dumps({"text": texts[number % len(texts)]}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.save_pretrained(folder / "tokenizer")


def _in_a_process(way: str, folder: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        environment = {
            **os.environ,
            "HETERO_CACHE": cache,
            "HF_DATASETS_CACHE": cache,
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "benchmarks.tokenising", "--way", way]
        done = subprocess.run(
            [*command, "--folder", str(folder)], env=environment, capture_output=True, check=True
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measured(way: str, folder: Path) -> dict[str, float]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    begin = time.perf_counter()
    _WAYS[way](folder, tokenizer)
    seconds = time.perf_counter() - begin
    own, others = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    cpu = sum(use.ru_utime + use.ru_stime for use in (own, others))
    return {"seconds": seconds, "cpu_s": cpu, "peak_mib": own.ru_maxrss / 1024}


def _ours(folder: Path, tokenizer: object) -> None:
    from hetero_framework.config import Config
    from hetero_framework.data.train_data import load_data

    config = Config.from_dict(
        {
            "coordinator": {"ip": "127.0.0.1"},
            "workers": [],
            "shard_plan": [{"id": "local", "start": 0, "end": 1}],
            "model": {"name_or_path": "tokenizer"},
            "data": {"train": "rows.jsonl"},
        },
        folder,
    )
    load_data(config, tokenizer)  # type: ignore[arg-type]


def _datasets(folder: Path, tokenizer: object) -> None:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()

    def tokenised(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch["text"])["input_ids"]  # type: ignore[operator]
        return {"input_ids": [[*each, tokenizer.eos_token_id] for each in ids]}  # type: ignore[attr-defined]

    rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    rows.map(tokenised, batched=True, num_proc=2, remove_columns=["text"])


_WAYS = {"ours": _ours, "datasets": _datasets}


if __name__ == "__main__":
    main()
