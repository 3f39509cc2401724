"""The wire codecs: how fast they are, and what a training loses by them.

    python -m benchmarks.codecs                       # milliseconds and bytes of one tensor
    python -m benchmarks.codecs --train               # 200 steps with each, about 3 minutes

The first prints one JSON object per codec and dtype for a tensor of `--elements` (the default
makes 16.8 MB in bfloat16): median and least wall-clock and CPU milliseconds of `encode` and
`decode` with `--threads` threads, fresh result memory included, and the bytes on the wire.

`--train` trains a small random Llama of 4 layers with `train()`, cut into 4 stages: this process
and three worker processes on the loopback. A word of its texts follows from the two words before it
by fixed chances (7 : 2 : 1), so the loss falls from ln 16 = 2.8 towards 0.80, the entropy of those
chances. One JSON object per run: the mean loss of the last 20 steps, and `gap`, its relative
distance from that of the run without codec. `other seed` is a run without codec from other random
weights; it shows how much of a gap is chance. Exit code 1 when an int8 run is worse than --target.

`--slow-ms` makes encoding slower and `--levels` makes int8 coarser (127 levels for each sign is
what it has), to see that the measurements notice. `--save` keeps the results under
benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from hetero_framework.core.codecs import CODECS, Codec
from hetero_framework.core.tensors import TORCH_DTYPES, dtype_name
from hetero_framework.extras.codecs import codecs

Result = dict[str, Any]

_HOST = "127.0.0.1"
_ROOT = Path(__file__).resolve().parents[1]
_START_S = 120
_WORDS = [f"w{number}" for number in range(16)]
_CHANCES = (7, 2, 1)
_LENGTH = 63  # words; the end-of-sequence token is the 64th
_MICRO_BATCH, _MICRO_BATCHES = 8, 4
_WORKERS = 3
_LAST = 20
_RUNS = {
    "none": {},
    "bf16": {"activations": "bf16", "gradients": "bf16"},
    "int8 activations": {"activations": "int8"},
    "int8 gradients": {"gradients": "int8"},
    "int8": {"activations": "int8", "gradients": "int8"},
}
_OTHER_SEED = "other seed"


# ---------------------------------------------------------------------------------------- the speed


def measure(codec: Codec, tensor: torch.Tensor, rounds: int, slow_ms: float = 0.0) -> Result:
    """Time and size of one tensor through one codec."""

    def encode() -> list[torch.Tensor]:
        time.sleep(slow_ms / 1e3)
        return codec.encode(tensor)

    parts = codec.encode(tensor)
    wire_bytes = codec.nbytes(tensor.shape, tensor.dtype)
    return {
        "codec": codec.name,
        "dtype": dtype_name(tensor.dtype),
        "elements": tensor.numel(),
        "encode_ms": _milliseconds(encode, rounds),
        "decode_ms": _milliseconds(lambda: codec.decode(parts, tensor.shape, tensor.dtype), rounds),
        "bytes": wire_bytes,
        "share_of_bytes": round(wire_bytes / tensor.nbytes, 4),
    }


def _milliseconds(action: Callable[[], object], rounds: int) -> dict[str, float]:
    """Wall-clock median and minimum, and median CPU time of this thread."""
    for _ in range(2):
        action()
    wall, cpu = [], []
    for _ in range(rounds):
        began, cpu_began = time.perf_counter(), time.thread_time()
        action()
        cpu.append(1e3 * (time.thread_time() - cpu_began))
        wall.append(1e3 * (time.perf_counter() - began))
    found = {"median": statistics.median(wall), "min": min(wall), "cpu": statistics.median(cpu)}
    return {name: round(value, 2) for name, value in found.items()}


def speed(options: argparse.Namespace) -> list[Result]:
    torch.set_num_threads(options.threads)
    source = torch.randn(options.elements)
    results = []
    for name in options.dtypes.split(","):
        tensor = source.to(TORCH_DTYPES[name])
        for codec in CODECS.values():
            if codec.supports(tensor.dtype):
                results.append(measure(codec, tensor, options.rounds, options.slow_ms))
                print(json.dumps(results[-1]), flush=True)
    return results


# ------------------------------------------------------------------------------------- the training


def training(options: argparse.Namespace) -> list[Result]:
    """Train with every codec in turn; what each run came to."""
    names = options.runs.split(",") if options.runs else [*_RUNS, _OTHER_SEED]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        save_tokenizer(folder / "tokenizer")
        save_texts(folder / "texts.jsonl", options.steps * _MICRO_BATCH * _MICRO_BATCHES)
        machines = _machines()
        spoiler = _spoil(folder, options.levels)
        with _workers(folder, machines, spoiler):
            for run in ["none", *(run for run in names if run != "none")]:
                results.append(_train(folder, machines, run, options.steps))
                results[-1]["gap"] = results[-1]["loss"] / results[0]["loss"] - 1
                print(json.dumps(results[-1]), flush=True)
    return results


def _train(folder: Path, machines: Result, run: str, steps: int) -> Result:
    from hetero_framework.config import Config
    from hetero_framework.trainer.coordinator import train
    from hetero_framework.trainer.progress import Progress

    output = folder / run.replace(" ", "-")
    config = Config.from_dict(_config(folder, output, machines, run, steps), folder)
    began = time.perf_counter()
    with (folder / "coordinator.log").open("a", encoding="utf-8") as log:
        train(config, progress=Progress(log))
    seconds = time.perf_counter() - began
    lines = map(json.loads, (output / "metrics.jsonl").read_text("utf-8").splitlines())
    steps_done = [line for line in lines if "loss" in line]
    losses = [line["loss"] for line in steps_done]
    wire = sum(s["bytes_in"] + s["bytes_out"] for line in steps_done for s in line["stages"])
    return {
        "run": run,
        "steps": len(losses),
        "first_loss": losses[0],
        "loss": statistics.fmean(losses[-_LAST:]),
        "wire_mb_per_step": round(wire / len(losses) / 1e6, 3),
        "seconds": round(seconds, 1),
    }


def _config(folder: Path, output: Path, machines: Result, run: str, steps: int) -> Result:
    seed = 1 if run == _OTHER_SEED else 0
    return {
        **machines,
        "model": {
            "from_config": {
                "model_type": "llama",
                "vocab_size": len(_WORDS) + 3,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": _WORKERS + 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "tie_word_embeddings": False,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "dtype": "float32",
            "tokenizer": str(folder / "tokenizer"),
        },
        "data": {"train": str(folder / "texts.jsonl"), "max_length": _LENGTH + 1},
        "wire": _RUNS.get(run, {}),
        "training": {
            "output_dir": str(output),
            "seed": seed,
            "max_steps": steps,
            "per_device_train_batch_size": _MICRO_BATCH,
            "gradient_accumulation_steps": _MICRO_BATCHES,
            "learning_rate": 5e-3,
            "warmup_steps": 10,
            "lr_scheduler_type": "linear",
            "save_strategy": "no",
            "report_to": "none",
            "visualize": False,
            "timeline_steps": 0,
        },
    }


def save_tokenizer(folder: Path) -> None:
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *_WORDS]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)


def save_texts(path: Path, count: int) -> None:
    """Texts whose every word is one of three that may follow the two before it."""
    draw = random.Random(0)
    followers = {pair: draw.sample(_WORDS, 3) for pair in itertools.product(_WORDS, repeat=2)}
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            words = draw.choices(_WORDS, k=2)
            while len(words) < _LENGTH:
                words += draw.choices(followers[words[-2], words[-1]], _CHANCES)
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


def _machines() -> Result:
    in_flight = [socket.create_server((_HOST, 0)) for _ in range(_WORKERS + 1)]
    ports = [sock.getsockname()[1] for sock in in_flight]
    for sock in in_flight:
        sock.close()
    machine = {"hostname": "localhost", "ip": _HOST, "device": "cpu", "num_threads": 1}
    owners = ["local", *range(1, _WORKERS + 1)]
    return {
        "coordinator": {**machine, "port": ports[0]},
        "workers": [{**machine, "id": i, "port": ports[i]} for i in owners[1:]],
        "shard_plan": [{"id": owner, "start": i, "end": i + 1} for i, owner in enumerate(owners)],
    }


@contextlib.contextmanager
def _workers(folder: Path, machines: Result, spoiler: Path | None) -> Iterator[None]:
    """The workers of `machines`, started once and used by one training after the other."""
    config = folder / "machines.json"
    config.write_text(json.dumps(machines))
    extra = [] if spoiler is None else ["--import", str(spoiler)]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "workers.log").open("wb"))
        for worker in machines["workers"]:
            process = subprocess.Popen(
                [sys.executable, "-m", "hetero_framework", "worker", "--keep", "--supervised"]
                + ["--config", str(config), "--worker-id", str(worker["id"]), *extra],
                cwd=_ROOT,
                stdin=subprocess.PIPE,  # closed when this process ends, and with it the worker
                stdout=log,
                stderr=log,
            )
            stack.enter_context(process)
            _await_listening(process, worker["port"])
        yield


def _await_listening(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
            return
        try:
            raise SystemExit(f"a worker ended with {process.wait(timeout=0.1)}")
        except subprocess.TimeoutExpired:
            continue
    raise SystemExit(f"a worker does not listen after {_START_S} s")


def _spoil(folder: Path, levels: int | None) -> Path | None:
    """A file that makes int8 coarser where it is imported; imported here already."""
    if levels is None:
        return None
    codecs._LARGEST = levels
    file = folder / "coarse.py"
    file.write_text(
        f"from hetero_framework.extras.codecs import codecs\n\ncodecs._LARGEST = {levels}\n"
    )
    return file


# ------------------------------------------------------------------------------------- the program


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=2**23)
    parser.add_argument("--dtypes", default="bfloat16,float32", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slow-ms", type=float, default=0.0, help="slow every encoding")
    parser.add_argument("--train", action="store_true", help="the loss instead of the speed")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", help=f"some of: {', '.join([*_RUNS, _OTHER_SEED])}")
    parser.add_argument("--levels", type=int, help="make int8 coarser")
    parser.add_argument("--target", type=float, default=0.005, help="largest gap of int8")
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    results = training(options) if options.train else speed(options)
    worst = max((r["gap"] for r in results if "int8" in r.get("run", "")), default=-math.inf)
    if options.save:
        whole = {"results": results, "target": options.target if options.train else None}
        name = "codecs-train" if options.train else "codecs"
        saved = environment.save(name, {**whole, "environment": environment.describe()})
        print(f"saved {saved}", file=sys.stderr)
    return int(worst > options.target)


if __name__ == "__main__":
    sys.exit(main())
