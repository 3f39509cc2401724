"""Pairs of settings under every objective, each trained for three steps of a tiny model.

A pair is trained, or refused before its first step by an error of the package. Anything else is a
fault: another exception, a refusal after a step, a loss that is no number, other bits. One pair
again, with its traceback:

    python -m tests.integration.pairs OBJECTIVE SETTING[+SETTING...]
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hetero_framework.config import Config
from hetero_framework.core.devices import Device
from hetero_framework.errors import ConfigError, DataError, ModelError
from hetero_framework.trainer.coordinator import train
from tests.extras.stored_formats import writing
from tests.extras.stored_formats.test_forms import FORMS
from tests.extras.vision.seeing import encoded, picture, save_llava
from tests.pools import Notes
from tests.samples import WORDS, free_ports, plan_of, save_llama

Raw = dict[str, Any]
LAYERS = 2
REFUSALS = ConfigError, DataError, ModelError
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
)


def _rows(kind: str, count: int, seed: int) -> list[Raw]:
    draw = random.Random(f"{kind} {seed}")

    def some(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    make: dict[str, Callable[[int], Raw]] = {
        "text": lambda k: {"text": some(4, 20)},
        "completion": lambda k: {"prompt": some(2, 8), "completion": " " + some(2, 12)},
        "chat": lambda k: {
            "messages": [
                {"role": "user", "content": some(2, 4)},
                {"role": "assistant", "content": some(2, 9)},
            ]
        },
        "pairs": lambda k: {
            "prompt": some(2, 4),
            "chosen": " " + some(2, 5),
            "rejected": " " + some(2, 6),
        },
        "rated": lambda k: {
            "prompt": some(2, 4),
            "completion": " " + some(5, 5),
            "label": k % 2 > 0,
        },
        "labelled": lambda k: {"text": some(3, 8), "label": "abc"[k % 3]},
        "numbered": lambda k: {"text": some(3, 8), "label": k % 3},
        "words": lambda k: {
            "tokens": (words := some(3, 8).split()),
            "ner_tags": [len(word) % 3 for word in words],
        },
    }
    for seen, told in (("seen", "chat"), ("seen pairs", "pairs"), ("seen rated", "rated")):
        make[seen] = lambda k, told=told: {**make[told](k), "image": f"{k % 5}.png"}
    return [make[kind](k) for k in range(count)]


@dataclass(frozen=True)
class Objective:
    """One objective, and the kind of rows that it trains on."""

    rows: str
    training: Mapping[str, Any]
    data: Mapping[str, Any]
    model: str = "dense"


def _objective(rows: str, name: str | None = None, **data: Any) -> Objective:
    training = {"objective": name} if name else {}
    if name in ("kto", "image-kto"):  # whose batches do not go by length
        training["train_sampling_strategy"] = "sequential"
    return Objective(rows, training, data, "llava" if rows.startswith("seen") else "dense")


OBJECTIVES = {
    "text": _objective("text"),
    "completion": _objective("completion", completion_only_loss=True),
    "chat": _objective("chat", assistant_only_loss=True),
    **{name: _objective("pairs", name) for name in ("dpo", "orpo", "cpo", "reward")},
    "kto": _objective("rated", "kto"),
    "classification": _objective("labelled", "classification"),
    "numbered": _objective("numbered", "classification"),
    "token-classification": _objective("words", "token-classification"),
    "image-text-to-text": _objective("seen", "image-text-to-text"),
    "image-dpo": _objective("seen pairs", "image-dpo"),
    "image-kto": _objective("seen rated", "image-kto"),
}

_EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
_TWICE = {"eval_strategy": "steps", "eval_steps": 2}
_SAMPLES = {"sample_prompts": ["the model"], "sample_steps": 2, "sample_max_new_tokens": 3}
TRAINING: dict[str, Raw] = {
    "eval": _TWICE,
    "evals": _TWICE,
    "held_out": _TWICE,
    "computed": _TWICE,
    "best": {"load_best_model_at_end": True, **_EVERY_STEP},
    "early": {"load_best_model_at_end": True, "early_stopping_patience": 1, **_EVERY_STEP},
    "epoch": {
        **{"eval_strategy": "epoch", "save_strategy": "epoch"},
        **{"num_train_epochs": 1, "max_steps": -1},
    },
    "eval_on_start": {"eval_on_start": True},
    "offload_optimizer": {"offload_optimizer": True},
    "checkpointing": {"gradient_checkpointing": True},
    "stored_inputs": {"activation_offloading": True, "gradient_checkpointing": True},
    "noise": {"neftune_noise_alpha": 5},
    "by_length": {"train_sampling_strategy": "group_by_length"},
    "token_metrics": {"token_metrics": True},
    "samples": _SAMPLES,
    "page": {"page": True},
    "chunks": {"loss_chunk_tokens": 8},
    "smoothing": {"label_smoothing_factor": 0.1},
    "accumulation": {"gradient_accumulation_steps": 5},
    "unclipped": {"max_grad_norm": 0},
    "drop_last": {"dataloader_drop_last": True},
}
ADAPTER: dict[str, Raw | None] = {
    "full": None,
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "bias": {"lora_bias": True},
    "dropout": {"lora_dropout": 0.1},
}
DATA: dict[str, Callable[[str, str, str], Raw]] = {
    "mix": lambda a, b, e: {"train": [{"path": a}, {"path": b}]},
    "weights": lambda a, b, e: {
        "train": [{"path": a, "weight": 2}, {"path": b, "weight": 1}],
        "mixing": "interleave",
    },
    "few": lambda a, b, e: {"train": [{"path": a, "max_samples": 7}]},
    "slice": lambda a, b, e: {"train": [{"path": a, "split": "train[:60%]"}]},
    "eval": lambda a, b, e: {"eval": e},
    "evals": lambda a, b, e: {"eval": {"one": e, "two": b}},
    "held_out": lambda a, b, e: {"val_set_size": 0.3},
    "pack": lambda a, b, e: {"packing": True},
    "pack_wrapped": lambda a, b, e: {"packing": True, "packing_strategy": "wrapped"},
    "pack_split": lambda a, b, e: {"packing": True, "packing_strategy": "bfd_split"},
    "padding_free": lambda a, b, e: {"padding_free": True},
    "stream": lambda a, b, e: {"streaming": True},
}
PLANS = {
    "cut": [("local", 1), ("local", 2)],
    "workers": [("local", 1), (1, 2)],
    "offload": [("local", 2)],
}
ENDINGS = {name: f".{name}" for name in ("csv", "parquet", "arrow", "jsonl.gz")}
MODELS = {"fp8": "fp8 by tensor", "gptq": "gptq 4"}
SETTINGS = tuple(dict.fromkeys([*DATA, *TRAINING, *ADAPTER, *PLANS, *ENDINGS, *MODELS, "columns"]))
_CHOICES = [("mix", "weights", "few", "slice"), ("pack", "pack_wrapped", "pack_split")]
_CHOICES += [("eval", "evals"), tuple(PLANS), tuple(ENDINGS), tuple(MODELS)]
_CHOICES += [("full", *(name for name in ADAPTER if name != "full"))]

NEUTRAL = ("page", "offload_optimizer", "eval_on_start", "workers", "parquet", "columns")
"""Of these, all at once change no bit of the result; each of `ALONE` does not either."""
ALONE = ("stored_inputs", "offload", "cut", "arrow", "jsonl.gz", "csv", "computed", "token_metrics")
_EVALUATES = {"best", "early", "epoch", "eval_on_start", "computed"}
_ENDS_ELSEWHERE = {"best", "early", "epoch"}


def pairs() -> list[tuple[str, str]]:
    """Every two settings that a configuration can have at once."""
    two = itertools.combinations(SETTINGS, 2)
    return [pair for pair in two if not any({*pair} <= {*choice} for choice in _CHOICES)]


class Counted(Notes):
    """Knows how many steps were done."""

    steps = 0

    def step(self, metrics: Mapping[str, Any]) -> None:
        super().step(metrics)
        self.steps += 1


@dataclass
class Runs:
    """Trains in a folder; `workers` are machines that listen or that a run starts itself."""

    folder: Path
    workers: list[Raw]
    port: int

    def __post_init__(self) -> None:
        dense = save_llama(self.folder / "dense", layers=LAYERS, hidden_size=64)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(dense)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(dense)
        for name, form in MODELS.items():
            writing.rewrite(dense, self.folder / name, *FORMS[form])
            for file in dense.iterdir():
                if not (self.folder / name / file.name).exists():
                    shutil.copy(file, self.folder / name)
        save_llava(self.folder / "llava", LAYERS)
        for k in range(5):
            image = picture(random.Random(k), 20 + 5 * k, 40 - 3 * k)
            (self.folder / f"{k}.png").write_bytes(encoded(image))
        self._numbers = itertools.count()

    def raw(self, objective: str, settings: tuple[str, ...], **training: Any) -> Raw:
        """The configuration of a run that no other shares its folder with."""
        about = OBJECTIVES[objective]
        ending = next((ENDINGS[name] for name in settings if name in ENDINGS), ".jsonl")
        renames = "columns" in settings
        files = [self._file(about.rows, *part, ending, renames) for part in _PARTS]
        data: Raw = {"train": files[0], "max_length": 32, **about.data}
        if renames:
            data["columns"] = {name: f"their {name}" for name in _rows(about.rows, 1, 0)[0]}
        adapter: Raw | None = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
        given = {
            **{"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            **{"learning_rate": 1e-3, "save_strategy": "no", "report_to": "none", "seed": 3},
            **{"visualize": False, "logging_steps": 1, "timeline_steps": 0},
            **{"connect_timeout_s": 180.0, **about.training},
        }
        for name in settings:
            data |= DATA[name](*files) if name in DATA else {}
            given |= TRAINING.get(name, {})
            if name in ADAPTER:
                more = ADAPTER[name]
                adapter = None if more is None or adapter is None else adapter | more
        if _EVALUATES & {*settings} and not {"eval", "val_set_size"} & data.keys():
            data["eval"] = files[2]
            given = {**_TWICE, **given} if "computed" in settings else given
        cuts = next((PLANS[name] for name in settings if name in PLANS), [("local", LAYERS)])
        plan = plan_of(*cuts)
        if "offload" in settings:
            plan[0]["offload"] = 1
        used = {stage["id"] for stage in plan}
        model = next((name for name in settings if name in MODELS), about.model)
        more_model = {"train_towers": True} if "towers" in settings else {}
        data |= {"cache_image_features": True} if "features" in settings else {}
        output = self.folder / f"run-{next(self._numbers)}"
        return {
            "coordinator": {"ip": "127.0.0.1", "device": "cpu", "port": self.port},
            "workers": [worker for worker in self.workers if worker["id"] in used],
            "shard_plan": plan,
            "model": {"name_or_path": str(self.folder / model), **more_model},
            "adapter": adapter,
            "data": data,
            "training": {"output_dir": str(output), **given, **training},
        }

    def _file(self, kind: str, name: str, count: int, ending: str, renames: bool) -> str:
        path = self.folder / f"{kind}-{name}{'-renamed' * renames}{ending}"
        if not path.exists():
            rows = _rows(kind, count, ord(name))
            for row in rows if "image" in rows[0] else ():
                row["image"] = str(self.folder / row["image"])
                if "prompt" in row:
                    row["prompt"] = f"<image> {row['prompt']}"
            if renames:
                rows = [{f"their {field}": row[field] for field in row} for row in rows]
            _write(path, rows)
        return str(path)

    def trained(
        self, raw: Raw, settings: tuple[str, ...], **how: Any
    ) -> tuple[list[float], dict[str, Tensor]]:
        """The losses and the result of a run. Raises AssertionError for a refusal after a step."""
        progress = Counted()
        given: Raw = {"compute_metrics": _hits} if "computed" in settings else {}
        try:
            with _own_memory({"offload", "stored_inputs", "offload_optimizer"} & {*settings}):
                summary = train(Config.from_dict(raw), progress=progress, **given, **how)
        except REFUSALS as error:
            if progress.steps:
                text = f"refused after step {progress.steps}: {error.message}"
                raise AssertionError(text) from error
            raise
        losses = list(summary.losses)
        assert losses, "no step"
        assert all(map(math.isfinite, losses)), f"no number: {losses}"
        return losses, weights(raw)

    def try_pair(self, objective: str, settings: tuple[str, ...]) -> str:
        """What came of it: "trained", "refused: ..." or "FAULT: ..."."""
        raw = self.raw(objective, settings)
        return self._judged(lambda: self.trained(raw, settings) and "trained")

    def try_neutral(self, objective: str, settings: tuple[str, ...]) -> str:
        """The same bits with what changes none, and after a resume under another cut."""
        return self._judged(lambda: self._neutral(objective, settings))

    def _neutral(self, objective: str, settings: tuple[str, ...]) -> str:
        whole = self.trained(self.raw(objective, settings), settings)
        free = [name for name in (*NEUTRAL, *ALONE) if self._goes_with(name, settings)]
        together = tuple(name for name in free if name in NEUTRAL)
        for more in (together, *((name,) for name in free if name in ALONE)):
            both = (*settings, *more)
            try:
                found = self.trained(self.raw(objective, both), both)
            except REFUSALS:
                if len(more) == 1:
                    continue  # try_pair looks at this refusal
                raise
            assert same(whole, found), f"other bits with {'+'.join(more)}"
        if _ENDS_ELSEWHERE & {*settings}:
            return "trained"
        raw = self.raw(objective, settings, save_strategy="steps", save_steps=1)
        self.trained(raw, settings)
        for step in (2, 3):
            shutil.rmtree(Path(raw["training"]["output_dir"]) / "checkpoints" / f"step_{step}")
        if self._goes_with("workers", settings):
            other = self.raw(objective, (*settings, "workers"))
            raw |= {key: other[key] for key in ("workers", "shard_plan")}
        resumed = self.trained(raw, settings, resume=1)[1]
        assert same((None, whole[1]), (None, resumed)), "other bits after a resume"
        return "trained"

    @staticmethod
    def _goes_with(name: str, settings: tuple[str, ...]) -> bool:
        if name in settings or (name == "eval_on_start" and {"evals", "eval"} & {*settings}):
            return False
        return not any(name in choice and {*choice} & {*settings} for choice in _CHOICES)

    @staticmethod
    def _judged(attempt: Callable[[], str]) -> str:
        try:
            return attempt()
        except REFUSALS as error:
            return f"refused: {error.message} ({error.hint})"
        except Exception as error:
            traceback.print_exc()
            at = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(at.filename).name}:{at.lineno}"
            return f"FAULT: {type(error).__name__}: {error} at {place}"


_PARTS = (("a", 14), ("b", 9), ("e", 6))


def _hits(given: Any) -> dict[str, float]:
    return {"hits": float(len(given.label_ids))}


@contextmanager
def _own_memory(needed: Any) -> Iterator[None]:
    """Where it is needed, the CPU counts as a device with a memory of its own."""
    before = vars(Device)["one_memory"]
    if needed:
        Device.one_memory = False  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Device.one_memory = before  # type: ignore[method-assign]


def _write(path: Path, rows: list[Raw]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    else:
        path.write_text(text, encoding="utf-8")


def weights(raw: Raw) -> dict[str, Tensor]:
    """The result of a run, by its configuration."""
    output = Path(raw["training"]["output_dir"])
    found = [*(output / "adapter").glob("*.safetensors"), *(output / "model").glob("*.safetensors")]
    return {name: tensor for file in found for name, tensor in load_file(file).items()}


def same(one: tuple[Any, dict[str, Tensor]], other: tuple[Any, dict[str, Tensor]]) -> bool:
    """Whether losses and tensors have the same bits."""
    (losses, a), (losses_b, b) = one, other
    return losses == losses_b and a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def main(objective: str, settings: str) -> None:
    """Try a pair, and its neutral settings, in this process alone."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ports = free_ports(2)
        worker = {"ip": "127.0.0.1", "device": "cpu", "id": 1, "port": ports[1]}
        runs, names = Runs(Path(folder), [worker], ports[0]), tuple(settings.split("+"))
        print(runs.try_pair(objective, names))
        print("neutral:", runs.try_neutral(objective, names))


if __name__ == "__main__":
    main(*sys.argv[1:])
