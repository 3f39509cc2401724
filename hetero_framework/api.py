"""Training from Python: `train` takes a configuration, or a model and data as TRL's trainers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from hetero_framework import registry
from hetero_framework.commands.first_run import proposed
from hetero_framework.commands.init import LORA, QLORA, Answers
from hetero_framework.config import Config, load_config
from hetero_framework.config.objectives import needs_of
from hetero_framework.errors import ConfigError, UserError

if TYPE_CHECKING:
    from hetero_framework.trainer.coordinator import RunSummary

_PRESETS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": LORA},
    "qlora": {"adapter": LORA, "model": QLORA},
}


def train(
    config: Config | None = None,
    *,
    model: str | PathLike[str] | None = None,
    adapter: Any = None,
    data: Mapping[str, Any] | None = None,
    training: Any = None,
    **more: Any,
) -> RunSummary:
    """Train, from start to finish, and return a summary; its `load()` is the trained model.

    Args:
        config: What and where to train, as `load_config` returns it. Instead, give `model`: then
            this machine trains with all its cards.
        model: Name on the hub, or folder.
        adapter: "lora", "qlora", a dictionary of its settings, or peft's LoraConfig. None trains
            all weights.
        data: Settings of the section "data", such as {"max_length": 2048}; "train" in it names data
            instead of `train_dataset`.
        training: Settings of the section "training", or an object: TrainingArguments, SFTConfig,
            DPOConfig, KTOConfig, RewardConfig, ...
        more: train_dataset, eval_dataset, processing_class, callbacks, compute_metrics, resume,
            fresh and what else `hetero_framework.trainer.coordinator.train` takes.

    Raises the HeteroError that fits the failure.
    """
    given = {"adapter": adapter, "data": data, "training": training}
    if config is None:
        if model is None:
            raise UserError("train() needs a configuration, or model=... and data")
        if not isinstance(model, str | PathLike):
            raise UserError(
                f"model is a {type(model).__name__}, but each process loads its own layers",
                hint="give the name or folder that it was loaded from, or save it first:"
                " model.save_pretrained(FOLDER), with its tokenizer beside it",
            )
        if data is not None and not isinstance(data, Mapping):
            raise UserError(f"data: {data!r} is no dictionary", hint='give {"train": ...}')
        config = _configured(fspath(model), adapter, data, training, more)
    elif also := [name for name, value in {"model": model, **given}.items() if value is not None]:
        raise UserError(f"{' and '.join(also)}: the configuration says it; give one of them")
    elif not isinstance(config, Config):
        raise UserError(f"config is a {type(config).__name__}", hint="train(load_config(...))")
    from hetero_framework.trainer.coordinator import train as run  # imports torch

    return run(config, **more)


def _configured(model: str, adapter: Any, data: Any, training: Any, given: Any) -> Config:
    """The configuration of a run here. Raises ConfigError."""
    raw: dict[str, Any] = {"model": {"name_or_path": model}, "data": dict(data or {})}
    sets = {"train": given.get("train_dataset"), "eval": given.get("eval_dataset")}
    known = {"model.name_or_path": model, "data.train": "given"}
    if sets["eval"] is not None or {"eval", "val_set_size"} & raw["data"].keys():
        known["data.eval"] = "given"
    twice = {name for name, rows in sets.items() if rows is not None} & raw["data"].keys()
    if twice or (sets["eval"] is not None and raw["data"].get("val_set_size")):
        name = min(twice, default="val_set_size")
        other = "train_dataset" if name == "train" else "eval_dataset"
        raise ConfigError(f"data.{name} and {other} both name data", hint="give one of them")
    raw |= {"adapter": None, "training": {}}
    if isinstance(adapter, str):
        if adapter not in _PRESETS:
            raise ConfigError(f'adapter {adapter!r} is not "lora" or "qlora"')
        preset = _PRESETS[adapter]
        raw["model"] |= preset.get("model", {})
        adapter = preset["adapter"]
    theirs = [None if isinstance(part, Mapping) else part for part in (adapter, training)]
    if objects := [part for part in theirs if part is not None]:
        convert = registry.needed("conversions", "objects", type(objects[0]).__name__)
        found = convert(*theirs, known)
        for name in sets:
            found["data"].pop(name, None)
        taken = found if theirs[1] is not None else {"adapter": found["adapter"]}
        raw |= {
            name: None if part is None else {**part, **(raw[name] or {})}
            for name, part in taken.items()
        }
    if isinstance(adapter, Mapping):
        raw["adapter"] = dict(adapter)
    if isinstance(training, Mapping):
        raw["training"] |= training
    objective = raw["training"].get("objective") or _told(sets["train"])
    if objective is not None and theirs[1] is None:
        # What this kind of data needs, as `hetero init` writes it.
        needed = registry.facts("data", needs_of(objective).data).get("training", {})
        raw["training"] = {**needed, "objective": objective, **raw["training"]}
    here = proposed(Answers(device="cpu" if getattr(training, "use_cpu", False) else None))
    return load_config({**here, **raw})


def _told(rows: Any) -> str | None:
    """The objective that the first row tells; None where there is none, or it cannot be looked at
    without using it up."""
    if not isinstance(rows, Iterable) or iter(rows) is rows:
        return None
    from hetero_framework.data.kinds import objectives_of  # imports torch
    from hetero_framework.data.sources import Record

    first = next(iter(rows), None)
    if not isinstance(first, Mapping):
        return None
    return next(iter(objectives_of(Record("train_dataset[0]", dict(first)))), None)
