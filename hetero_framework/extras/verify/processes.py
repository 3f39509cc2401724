"""Trains tiny models through two real workers, as a run does, and compares with one process."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.config import Config
from hetero_framework.config.objectives import Task
from hetero_framework.core.dial import Listener
from hetero_framework.errors import HeteroError, StoppedEarly
from hetero_framework.extras.verify.verification import EQUAL, Verified
from hetero_framework.models.cut.tiny import stock_class, tiny_config
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.models.rng import seed_cpu
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress

# Every word is one letter, and the tokenizer is byte-level BPE: transformers reads the tokenizer of
# some model types as such whatever its file says.
_SPECIAL = ("<pad>", "<s>", "</s>")
_WORDS = (string.ascii_letters + string.digits)[:61]
_TEXTS = [[_WORDS[(5 * row + k * k) % 61] for k in range(6 + row % 5)] for row in range(8)]
_ROWS: dict[Task, tuple[str, list[dict[str, Any]]]] = {
    "causal-lm": ("sft", [{"text": "".join(words)} for words in _TEXTS]),
    "sequence-classification": (
        "classification",
        [{"text": "".join(words), "label": k % 2} for k, words in enumerate(_TEXTS)],
    ),
    "token-classification": (
        "token-classification",
        [{"tokens": words, "labels": [ord(word) % 2 for word in words]} for words in _TEXTS],
    ),
}


@contextmanager
def real_workers() -> Iterator[Callable[[Verified], str]]:
    """Within the block two workers serve one run after the other. The yielded function trains the
    architecture of a passed comparison through them. It returns `EQUAL` where losses and result
    are bit-equal to one process's, else the difference; empty for a task without text."""
    with TemporaryDirectory() as directory:
        folder, listeners = Path(directory), [Listener("127.0.0.1", 0) for _ in range(3)]
        here = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu", "num_threads": 1}
        machines = [{**here, "port": listener.port} for listener in listeners]
        for listener in listeners:
            listener.close()
        workers = [{**machines[k], "id": k, "models": ["*"]} for k in (1, 2)]
        about = {"coordinator": machines[0], "workers": workers}
        plan = [{"id": k or "local", "start": k, "end": k + 1} for k in range(3)]
        known = {**about, "shard_plan": plan, "training": {"output_dir": str(folder)}}
        with LocalWorkers(Config.from_dict(known), (1, 2), keep=True) as processes:
            processes.start()
            yield lambda result: _tried(result, about, folder) if result.task in _ROWS else ""


def _tried(result: Verified, about: dict[str, Any], folder: Path) -> str:
    model = folder / "model"
    try:
        with quiet_library():
            config = tiny_config(result.model_type, result.task)
            seed_cpu(0)
            stock_class(config)._from_config(config).save_pretrained(model)
            _save_tokenizer(model)
        runs = [_run(result, about, folder, cut) for cut in (False, True)]
    except StoppedEarly:
        raise
    except HeteroError as error:
        return error.message
    except LIBRARY_ERRORS as error:
        return briefly(error)
    finally:
        for name in ("model", "False", "True"):
            rmtree(folder / name, ignore_errors=True)
    (losses, files), (cut_losses, cut_files) = runs
    if losses != cut_losses:
        return f"losses {cut_losses} instead of {losses}"
    wrong = [name for name in files | cut_files if files.get(name) != cut_files.get(name)]
    return f"other weights in {wrong[0]}" if wrong else EQUAL


def _run(
    result: Verified, about: dict[str, Any], folder: Path, cut: bool
) -> tuple[tuple[float, ...], dict[str, bytes]]:
    """The losses and the written weights of one run, in one process or over the workers."""
    bounds = [(stage.start, stage.end) for stage in result.stages]
    if not cut:
        bounds, about = [(0, bounds[-1][1])], {**about, "workers": []}
    objective, rows = _ROWS[result.task]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        **about,
        "model": {"name_or_path": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl")},
        "shard_plan": [
            {"id": k or "local", "start": start, "end": end}
            for k, (start, end) in enumerate(bounds)
        ],
        "training": {
            **{"objective": objective, "output_dir": str(folder / str(cut)), "max_steps": 2},
            **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            **{"learning_rate": 1e-3, "weight_decay": 0.1, "save_strategy": "no"},
            **{"report_to": "none", "visualize": False, "log_level": "ERROR"},
        },
    }
    losses = train(Config.from_dict(settings), progress=Progress(StringIO())).losses
    written = (folder / str(cut) / "model").glob("*.safetensors")
    return losses, {path.name: path.read_bytes() for path in written}


def _save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE({w: k for k, w in enumerate((*_SPECIAL, *_WORDS))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
