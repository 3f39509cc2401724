"""The checks of `python -m benchmarks.gpu`; see there what each proves."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers import logging as transformers_logging

from benchmarks.network import free_ports
from hetero_framework.config import Config
from hetero_framework.core.devices import Device, DeviceEvent, open_device
from hetero_framework.core.spans import COMPUTE, RECEIVE, SEND
from hetero_framework.errors import HeteroError
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress

if TYPE_CHECKING:
    from hetero_framework.extras.observe.timeline import Trace

WORKERS = 3
_HOST = "127.0.0.1"
_ROOT = Path(__file__).resolve().parents[1]
_START_S = 180.0
_TRANSFER_S = 60.0
_WORDS = [f"word{number}" for number in range(60)]
_HIDDEN_ENOUGH = 0.5

Result = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Sizes of the models and of the work."""

    hidden: int = 512
    layers: int = 8
    steps: int = 6
    big: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        }
    )
    huge: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
    )
    big_steps: int = 6
    big_batch: int = 4
    big_length: int = 1024
    big_micro_batches: int = 16
    matrix: int = 8192
    copy_elements: int = 8 << 20
    copies: int = 24


TINY = Size(
    hidden=64,
    layers=4,
    steps=3,
    big={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
    },
    huge={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
    },
    big_steps=4,
    big_batch=2,
    big_length=32,
    big_micro_batches=4,
    matrix=256,
    copy_elements=1 << 14,
    copies=8,
)


# ------------------------------------------------------------------------------------ the program


def run(device_name: str, checks: Mapping[str, Callable[[Bench], Result]], *, tiny: bool) -> None:
    """Print what the device is, do the checks in turn, and print each result by its name.

    Ends early where the device fails for good in this process, as after a device-side assert;
    `benchmarks.gpu` does the rest in another.
    """
    try:
        device = open_device(device_name)
    except HeteroError as error:
        skip_all(checks, str(error))
        return
    if device.kind == "cpu" and device_name == "auto":
        skip_all(checks, f"this machine has no GPU that torch {torch.__version__} can use")
        return
    size = TINY if tiny else Size()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Bench(device, size, Path(folder)) as bench,
    ):
        about = {"device": device.name, "label": device.label, "tiny": tiny}
        show({**about, "compute_mode": compute_mode()})
        for name, check in checks.items():
            print(f"{name} ...", file=sys.stderr, flush=True)
            show({"check": name, **guarded(check, bench)})
            if not usable(device):
                return


def show(line: Result) -> None:
    print(json.dumps(line), flush=True)


def skip_all(checks: Iterable[str], reason: str) -> None:
    for name in checks:
        show({"check": name, "skipped": reason})


def usable(device: Device) -> bool:
    try:
        device.synchronize()
    except RuntimeError:
        return False
    return True


def compute_mode() -> str | None:
    """How processes share the cards, as nvidia-smi says; None where it is not there.

    Without the MPS daemon they take turns of milliseconds, so times of events contain the others'
    turns; with EXCLUSIVE_PROCESS a second worker on a card cannot start.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return ", ".join(sorted(set(done.stdout.split("\n")) - {""})) or None


def guarded(check: Callable[[Bench], Result], bench: Bench) -> Result:
    """The check's result; an error of a run is a result too."""
    began = time.perf_counter()
    try:
        result = check(bench)
    except Skip as skip:
        return {"skipped": str(skip)}
    except Exception as error:  # whatever it is, the other checks go on
        result = {"ok": False, "reason": f"{type(error).__name__}: {error}"[:2000]}
    with contextlib.suppress(RuntimeError):  # where the device has failed for good
        bench.device.empty_cache()
    return {**result, "seconds": round(time.perf_counter() - began, 1)}


class Skip(Exception):
    """A check that makes no sense here, and why."""


# -------------------------------------------------------------------------- workers, models, runs


class Bench:
    """A card with workers on it, and what the checks train. A context manager. `workers` are the
    devices of the workers 1, 2, ... where they are not all on the card."""

    def __init__(
        self, device: Device, size: Size, folder: Path, workers: Sequence[str] | None = None
    ) -> None:
        self.device = device
        self.size = size
        self.folder = folder
        self._workers = workers or [device.name] * WORKERS
        self._machines: dict[str, Any] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._traces: dict[str, Trace] = {}

    def __enter__(self) -> Bench:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self.tokenizer = save_tokenizer(self.folder / "tokenizer")
        self.model = save_model(self.folder / "model", self.size)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # their life line
        for process in self._processes:
            try:
                process.wait(timeout=15.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []

    def _start(self) -> None:
        """Start the workers once, for all runs: importing torch takes longer than most runs."""
        count = len(self._workers)
        ports = free_ports(count + 1)
        machine: dict[str, Any] = {"hostname": "localhost", "ip": _HOST}
        machine["num_threads"] = max(1, (os.cpu_count() or 1) // (count + 1))
        self._machines = {
            "coordinator": {**machine, "device": self.device.name, "port": ports[0]},
            "workers": [
                {**machine, "device": device, "id": k, "port": ports[k], "models": ["*"]}
                for k, device in enumerate(self._workers, 1)
            ],
        }
        plan = [{"id": k or "local", "start": k, "end": k + 1} for k in range(count + 1)]
        path = self.folder / "workers.json"
        path.write_text(json.dumps({**self._machines, "shard_plan": plan}), encoding="utf-8")
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        for k in range(1, count + 1):
            with (self.folder / f"worker-{k}.log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "hetero_framework", "worker", "--keep"]
                        + ["--supervised", "--config", str(path), "--worker-id", str(k)],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=variables,
                    )
                )
        deadline = time.monotonic() + _START_S
        for k, process in enumerate(self._processes, 1):
            while not is_listening(ports[k]):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
                if process.poll() is not None or time.monotonic() > deadline:
                    log_text = (self.folder / f"worker-{k}.log").read_text(errors="replace")
                    raise RuntimeError(f"worker {k} did not start:\n{log_text[-3000:]}")

    def config(
        self,
        name: str,
        cuts: Sequence[int],
        layers: int,
        *,
        owners: Sequence[int | str] | None = None,
        coordinator: str | None = None,
        entry: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> Config:
        """Stages of [0, cuts...) on this process and one worker for each further.

        `owners` are other holders of the stages, `coordinator` another device of this process;
        `entry` are settings of the plan's entries.
        """
        bounds = [0, *cuts, layers]
        owners = owners or ["local", *range(1, len(bounds) - 1)]
        output = self.folder / "runs" / name
        training = {
            "output_dir": str(output),
            "learning_rate": 1e-3,
            "save_strategy": "no",
            "report_to": "none",
            "visualize": False,
            "logging_steps": 1,
            **sections.pop("training"),
        }
        raw = {
            "coordinator": {
                **self._machines["coordinator"],
                **({"device": coordinator} if coordinator else {}),
            },
            "workers": [w for w in self._machines["workers"] if w["id"] in owners],
            "shard_plan": [
                {"id": owner, "start": start, "end": end, **(entry or {})}
                for owner, start, end in zip(owners, bounds, bounds[1:], strict=False)
            ],
            "training": training,
            **sections,
        }
        return Config.from_dict(raw)

    def run(
        self,
        name: str,
        cuts: Sequence[int],
        layers: int,
        *,
        resume: int | None = None,
        keep: bool = False,
        progress: Quiet | None = None,
        **settings: Any,
    ) -> Run:
        """Train as `config` says. `keep` leaves the output directory, for a run that goes on from
        step `resume`."""
        config = self.config(name, cuts, layers, **settings)
        output, progress = config.output_dir, progress or Quiet()
        try:
            train(config, progress=progress, resume=resume)
            return read_run(output)
        except Exception:
            print("\n".join(f"  {name}: {line}" for line in progress.lines), file=sys.stderr)
            raise
        finally:
            # Weights of large models: a file system in memory may hold no more than one of them.
            if not keep:
                shutil.rmtree(output, ignore_errors=True)
            self.device.empty_cache()

    def big_runs(self) -> dict[str, Run]:
        """The 1.1 billion model, uncut and cut 2 and 4 ways; trained once for all checks."""
        if not hasattr(self, "_big_runs"):
            self._big_runs = dict(self._train_big())
        return self._big_runs

    def _train_big(self) -> Iterator[tuple[str, Run]]:
        for ways in (1, 2, 4):
            run = self.run(*self.big_plan(ways), **self.big_settings())
            yield ("uncut" if ways == 1 else f"cut_{ways}"), run

    def big_config(self, ways: int) -> Config:
        """The 1.1 billion model, cut so many ways."""
        return self.config(*self.big_plan(ways), **self.big_settings())

    def big_plan(self, ways: int) -> tuple[str, list[int], int]:
        layers = self.size.big["num_hidden_layers"]
        return f"big-{ways}", [layers * k // ways for k in range(1, ways)], layers

    def model_of(self, name: str, shape: dict[str, int]) -> Path:
        """Random weights, drawn on the device: a CPU may need a minute for each billion."""
        folder = self.folder / name
        if not folder.exists():
            config = LlamaConfig(max_position_embeddings=self.size.big_length, **shape)
            config.dtype = torch.bfloat16 if self.device.supports(torch.bfloat16) else torch.float16
            with self.device.torch_device:
                model = AutoModelForCausalLM.from_config(config)
            model.save_pretrained(folder)
            del model
            self.device.empty_cache()
        return folder

    def big_settings(self) -> dict[str, Any]:
        size = self.size
        lines = size.big_steps * size.big_micro_batches * size.big_batch
        texts = save_texts(self.folder / "long.jsonl", lines, shortest=size.big_length)
        return {
            "model": {
                "name_or_path": str(self.model_of("big", size.big)),
                "tokenizer": str(self.tokenizer),
            },
            "data": {"train": str(texts), "max_length": size.big_length},
            "training": {
                "max_steps": size.big_steps,
                "per_device_train_batch_size": size.big_batch,
                "gradient_accumulation_steps": size.big_micro_batches,
                "learning_rate": 1e-5,
                "timeline_steps": 2,
            },
        }


class Quiet(Progress):
    """Shows nothing: what this program prints are its results. Keeps the lines for a failure."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def start(self, *args: Any, **kwargs: Any) -> None: ...
    def step(self, *args: Any, **kwargs: Any) -> None: ...
    def evaluation(self, *args: Any, **kwargs: Any) -> None: ...
    def close(self, *args: Any, **kwargs: Any) -> None: ...

    def message(self, text: str) -> None:
        self.lines.append(text)


@dataclass(frozen=True)
class Run:
    """What a run left: (loss, gradient norm) of every step, tokens per second of every step, the
    trained weights, the timeline if it has one, the largest peak of a process in bytes."""

    steps: list[tuple[float, float]]
    speeds: list[float]
    weights: dict[str, torch.Tensor]
    trace: Trace | None
    peak_bytes: int = 0


def read_run(output: Path) -> Run:
    text = (output / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if "loss" in line]
    folder = output / "adapter" if (output / "adapter").is_dir() else output / "model"
    files = sorted(folder.glob("*.safetensors"))
    try:
        from hetero_framework.extras.observe.trace_file import read_timeline

        trace = read_timeline(output)
    except (HeteroError, ModuleNotFoundError):  # the emulated device needs no timeline
        trace = None
    return Run(
        steps=[(line["loss"], line["grad_norm"]) for line in lines],
        speeds=[line["tokens_per_second"] for line in lines],
        weights={name: tensor for file in files for name, tensor in load_file(file).items()},
        trace=trace,
        peak_bytes=max(stage["peak_memory"] for line in lines for stage in line["stages"]),
    )


def save_tokenizer(folder: Path) -> Path:
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def save_model(folder: Path, size: Size) -> Path:
    """A random Llama with its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_texts(path: Path, count: int, *, shortest: int, longest: int | None = None) -> Path:
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            words = draw.choices(_WORDS, k=draw.randint(shortest, longest or shortest))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=5.0):
        return True
    return False


# ---------------------------------------------------------------------------------- equal results


def parity_fp32(bench: Bench) -> Result:
    """All weights in float32."""
    return parity(bench, tolerance=1e-5, training={})


def parity_bf16(bench: Bench) -> Result:
    """Autocast to bfloat16, an adapter with dropout, activations computed again in the backward."""
    support = bench.device.supports(torch.bfloat16)
    if not support:
        raise Skip(support.reason)
    adapter = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1}
    training = {"bf16": True, "gradient_checkpointing": True}
    return parity(bench, tolerance=2e-2, training=training, adapter=adapter)


def lora_4bit(bench: Bench) -> Result:
    """4-bit weights under an adapter."""
    support = bench.device.four_bit()
    if not support:
        raise Skip(support.reason)
    needs_bitsandbytes(bench)
    result = parity(
        bench,
        tolerance=2e-2,
        training={"bf16": bool(bench.device.supports(torch.bfloat16)), "learning_rate": 1e-2},
        adapter={"r": 8, "lora_alpha": 16, "lora_dropout": 0.05},
        model={"quantization": "nf4"},
    )
    falls = result["losses"][-1] < result["losses"][0]
    return {**result, "ok": result["ok"] and falls, "loss_falls": falls}


def needs_bitsandbytes(bench: Bench) -> None:
    """Skips where bitsandbytes has no kernels for the card."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Skip("bitsandbytes is not installed")
    if bench.device.kind in ("mps", "cpu"):
        raise Skip(f"bitsandbytes has no such kernels for {bench.device.kind}")
    needs_hardware(bench, "kernels of bitsandbytes")


def needs_hardware(bench: Bench, what: str) -> None:
    """Skips on the emulated device of the tests, which has only what torch computes on a CPU."""
    if bench.device.label.startswith("Emulated"):
        raise Skip(f"an emulated device has no {what}")


def small_run(
    bench: Bench,
    name: str,
    cuts: Sequence[int],
    *,
    training: dict[str, Any],
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """A few steps of the small Llama. Eager attention unless `model` says otherwise: its backward
    adds in one order, which the fused ones do not promise."""
    size = bench.size
    texts = save_texts(bench.folder / "texts.jsonl", size.steps * 8, shortest=8, longest=60)
    return bench.run(
        name,
        cuts,
        size.layers,
        model={
            "name_or_path": str(bench.model),
            "attn_implementation": "eager",
            **(model or {}),
        },
        data={"train": str(texts), "max_length": 64, **(data or {})},
        training={
            "max_steps": size.steps,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "timeline_steps": 0,
            **training,
        },
        **settings,
    )


def cuts_of(layers: int) -> dict[str, list[int]]:
    """The plans that are compared: one process twice, and cut 2 and 4 ways."""
    half = layers // 2
    return {"uncut": [], "again": [], "cut_2": [half], "cut_4": [1, half, layers - 1]}


def parity(bench: Bench, *, tolerance: float, **settings: Any) -> Result:
    """One process twice, and cut 2 and 4 ways, with these settings."""
    plans = cuts_of(bench.size.layers)
    runs = {
        name: small_run(bench, f"parity-{name}", cuts, **settings) for name, cuts in plans.items()
    }
    return verdict(runs, tolerance)


def verdict(runs: dict[str, Run], tolerance: float) -> Result:
    """How the cut runs compare with "uncut", and that one with its repetition "again"."""
    whole = runs["uncut"]
    repeats = equal(whole, runs["again"])
    cut = [run for name, run in runs.items() if name not in ("uncut", "again")]
    bit_equal = all(equal(whole, run) for run in cut)
    difference = max(loss_difference(whole, run) for run in cut)
    finding = {} if repeats else {"finding": "one process does not repeat itself to the last bit"}
    return {
        "ok": bit_equal if repeats else difference <= tolerance,
        **finding,
        "bit_equal": bit_equal,
        "repeat_bit_equal": repeats,
        "max_relative_loss_difference": difference,
        "max_weight_difference": max(weight_difference(whole, run) for run in cut),
        "tolerance": 0.0 if repeats else tolerance,
        "steps": len(whole.steps),
        "losses": [loss for loss, _ in whole.steps],
    }


def equal(a: Run, b: Run) -> bool:
    """Losses, gradient norms and trained weights to the last bit."""
    return (
        a.steps == b.steps
        and a.weights.keys() == b.weights.keys()
        and all(torch.equal(tensor, b.weights[name]) for name, tensor in a.weights.items())
    )


def loss_difference(a: Run, b: Run) -> float:
    if len(a.steps) != len(b.steps):
        return math.inf
    pairs = zip(a.steps, b.steps, strict=True)
    return max(abs(one - other) / abs(one) for (one, _), (other, _) in pairs)


def weight_difference(a: Run, b: Run) -> float:
    if a.weights.keys() != b.weights.keys():
        return math.inf
    return max(
        float((tensor.float() - b.weights[name].float()).abs().max())
        for name, tensor in a.weights.items()
    )


# ----------------------------------------------------------------------------------------- copies


def copies(bench: Bench) -> Result:
    """The device's own copies beside work in its queue."""
    device, size = bench.device, bench.size
    if not device.is_async:
        raise Skip("on a CPU nothing is copied")
    needs_hardware(bench, "times")
    wrong = mixed_up(device, size.copies * 4, size.copy_elements // 4, min(2048, size.matrix))
    work = Products(device, size.matrix)
    work.queue(4).wait()
    count = 8
    while (compute_s := work.seconds(count)) < 0.3:
        count *= 2
    out = Transfers(device, size, outward=True)
    inward = Transfers(device, size, outward=False)
    for transfers in (out, inward):
        transfers.move()  # pinned memory is made, streams are made
    result: Result = {"wrong_tensors": wrong}
    hidden = []
    for name, transfers in (("out", out), ("in", inward)):
        # What arrives while the queue is long is kept until the queue is done.
        most = device.memory().free // 4 // transfers.nbytes
        rounds = math.ceil(0.8 * compute_s / timed(transfers.move))
        rounds = max(1, min(rounds, most))
        alone_s = timed(partial(transfers.move, rounds))
        # Twice: memory is taken from the driver in the first.
        both_s = min(timed(partial(beside, work, count, transfers, rounds)) for _ in range(2))
        # Nothing hidden: the times add up. All hidden: the longer one is all that is left.
        share = (compute_s + alone_s - both_s) / min(compute_s, alone_s)
        hidden.append(share)
        result[name] = {
            "gb_per_s": round(rounds * transfers.nbytes / alone_s / 1e9, 2),
            "hidden_share": round(share, 3),
            "compute_s": round(compute_s, 4),
            "copy_s": round(alone_s, 4),
            "both_s": round(both_s, 4),
        }
    result["clock_error_ms"] = round(clock_error(device) * 1e3, 4)
    clock_fine = result["clock_error_ms"] < 5.0
    # One queue (Apple's) cannot hide its copies.
    hides = min(hidden) >= _HIDDEN_ENOUGH or device.kind == "mps"
    return {"ok": wrong == 0 and hides and clock_fine, **result}


class Products:
    """Matrix products to keep the device busy."""

    def __init__(self, device: Device, width: int) -> None:
        dtype = torch.bfloat16 if device.supports(torch.bfloat16) else torch.float16
        self._device = device
        self._a = torch.ones(width, width, device=device.torch_device, dtype=dtype) / width
        self._b = self._a.clone()

    def queue(self, count: int) -> DeviceEvent:
        for _ in range(count):
            self._b = self._a @ self._b
        return self._device.record_event()

    def seconds(self, count: int) -> float:
        return timed(lambda: self.queue(count).wait())


class Transfers:
    """Tensors of a boundary's size, moved from a thread beside the computing one."""

    def __init__(self, device: Device, size: Size, *, outward: bool) -> None:
        self._device = device
        self._outward = outward
        self._count = size.copies
        self._pool = device.buffers()
        shape = (size.copy_elements,)
        self._there = torch.ones(shape, dtype=torch.bfloat16, device=device.torch_device)
        self.nbytes = self._count * size.copy_elements * 2
        view = device.allocate_host(size.copy_elements * 2)
        self._here = torch.frombuffer(view, dtype=torch.bfloat16)
        self._ready = device.record_event(self._there)
        self._ready.wait()

    def move(self, rounds: int = 1) -> None:
        for _ in range(rounds * self._count):
            if self._outward:
                _, release = self._device.copy_out(self._there, self._ready, self._pool)
                release()
            else:
                self._device.copy_in(self._here)


def beside(work: Products, count: int, transfers: Transfers, rounds: int) -> None:
    thread = threading.Thread(target=transfers.move, args=(rounds,))
    thread.start()
    work.queue(count).wait()
    thread.join()


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def mixed_up(device: Device, rounds: int, elements: int, width: int) -> int:
    """Tensors that came out wrong when one thread receives, one computes and one sends.

    Arrivals are dropped while the work on them is still queued, and the queue is kept long, so
    that memory handed out too early would be overwritten. `width`: of the matrix products that
    keep it long.
    """
    pool = device.buffers()
    arrived: list[torch.Tensor | None] = [None] * rounds
    results: list[tuple[torch.Tensor, DeviceEvent] | None] = [None] * rounds
    wrong: list[int] = []
    came, made = threading.Semaphore(0), threading.Semaphore(0)

    def receive() -> None:
        memory = torch.frombuffer(device.allocate_host(4 * elements), dtype=torch.float32)
        for k in range(rounds):
            memory.fill_(k)
            arrived[k] = device.copy_in(memory)
            came.release()

    def send() -> None:
        for k in range(rounds):
            if not made.acquire(timeout=_TRANSFER_S):
                return
            item = results[k]
            results[k] = None
            assert item is not None
            host, release = device.copy_out(*item, pool)
            if not torch.equal(host, torch.full_like(host, 2.0 * k + 1.0)):
                wrong.append(k)
            release()

    threads = [threading.Thread(target=target, daemon=True) for target in (receive, send)]
    for thread in threads:
        thread.start()
    work = Products(device, width)
    for k in range(rounds):
        if not came.acquire(timeout=_TRANSFER_S):
            return rounds
        work.queue(2)
        tensor = arrived[k]
        arrived[k] = None
        assert tensor is not None
        result = tensor * 2.0 + 1.0
        del tensor
        results[k] = (result, device.record_event(result))
        made.release()
    for thread in threads:
        thread.join(_TRANSFER_S)
    unfinished = sum(thread.is_alive() for thread in threads)
    return len(wrong) + unfinished


def clock_error(device: Device) -> float:
    """Seconds by which a event's time lies outside of when it can have been."""
    worst = 0.0
    for _ in range(20):
        before = time.perf_counter()
        event = device.record_event()
        event.wait()
        after = time.perf_counter()
        at = event.at_s
        worst = max(worst, before - at, at - after)
    return worst


# ------------------------------------------------------------------------------------------ speed


def llama_1b(bench: Bench) -> Result:
    """Tokens per second, cut against uncut, all stages on one card."""
    runs = bench.big_runs()
    speeds = {name: statistics.median(run.speeds[2:]) for name, run in runs.items()}
    losses = {name: [loss for loss, _ in run.steps] for name, run in runs.items()}
    result: Result = {
        "ok": all(math.isfinite(loss) for values in losses.values() for loss in values),
        "parameters": sum(tensor.numel() for tensor in runs["uncut"].weights.values()),
        "tokens_per_step": bench.size.big_micro_batches
        * bench.size.big_batch
        * bench.size.big_length,
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "ratio_to_uncut": {
            name: round(speed / speeds["uncut"], 3)
            for name, speed in speeds.items()
            if name != "uncut"
        },
        "peak_gib_of_a_process": {
            name: round(run.peak_bytes / 2**30, 2) for name, run in runs.items()
        },
        "losses": losses,
    }
    return result


def overlap(bench: Bench) -> Result:
    """How much of the transfers' time the processes computed, by their timelines."""
    needs_hardware(bench, "times")
    shares = {
        name: hidden_share(run.trace)
        for name, run in bench.big_runs().items()
        if run.trace is not None and name != "uncut"
    }
    if not shares:
        return {"ok": False, "reason": "no run has written a timeline"}
    needed = _HIDDEN_ENOUGH if bench.device.is_async else 0.0
    return {
        "ok": all(math.isfinite(share) and share >= needed for share in shares.values()),
        "hidden_share": {name: round(share, 3) for name, share in shares.items()},
    }


def hidden_share(trace: Trace) -> float:
    """Share of the transfers' time in which the process at that end computed; nan without any."""
    hidden = total = 0.0
    for process in range(len(trace.processes)):
        own = [event for event in trace.events if event.process == process]
        busy = sorted((event.began, event.ended) for event in own if event.kind in COMPUTE)
        for event in own:
            if event.kind in (SEND, RECEIVE):
                total += event.seconds
                hidden += covered(event.began, event.ended, busy)
    return hidden / total if total else math.nan


def covered(began: float, ended: float, spans: Sequence[tuple[float, float]]) -> float:
    """Seconds of [began, ended] inside of any of the sorted spans."""
    seconds, at = 0.0, began
    for start, stop in spans:
        start = max(start, at)
        if start >= ended:
            break
        if stop > start:
            at = min(stop, ended)
            seconds += at - start
    return seconds


CHECKS: tuple[Callable[[Bench], Result], ...] = (
    *(parity_fp32, parity_bf16, lora_4bit, copies, llama_1b, overlap),
)
