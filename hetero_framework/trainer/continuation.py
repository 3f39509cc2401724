"""Checks that a checkpoint belongs to this run: refuses some differences and reports others.

They compare the settings as given (config/effects.py says which may change) and inputs that no
setting describes: the training data as tokens, the evaluation data, the tokenizer, the chat
template and the versions of libraries. The model's weights are compared once they are loaded, and
the members of a group of islands once they meet.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from hetero_framework._version import __version__
from hetero_framework.config import Config, TrainingConfig, effects
from hetero_framework.config.section import IDENTITY, RESULT, ROUNDING
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.optimizer import LearningRate
from hetero_framework.errors import CheckpointError, UserError
from hetero_framework.trainer.checkpoint import CheckpointReader
from hetero_framework.trainer.resolution import Resolved
from hetero_framework.versions import installed

_log = logging.getLogger(__name__)

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "tokenizers", "bitsandbytes")
_CONTENTS = {
    "tokenizer": "the tokenizer differs from that of checkpoint {}; the training tokens are the"
    " same, and the result is saved with the present one",
    "chat template": "the chat template differs from that of checkpoint {}; the training tokens are"
    " the same, and the result is saved with the present one",
    "evaluation data": "the evaluation data differ from those of checkpoint {}; losses on them"
    " before and after it cannot be compared",
}


def identity(given: Config, data_fingerprint: str) -> dict[str, Any]:
    """The model, the adapter and the data that identify a run. Machines and plan do not count,
    except for the precision in which layers are held."""
    assert given.model is not None
    model = {**given.model.model_dump(mode="json"), "quantization": given.kinds}
    return {
        "model": {
            key: value
            for key, value in model.items()
            if effects.effect_of(f"model.{key}", given) is IDENTITY
        },
        "adapter": adapter_settings(given),
        "data": data_fingerprint,
    }


def adapter_settings(config: Config) -> dict[str, Any] | None:
    """The adapter's part of a run's identity."""
    return config.adapter.model_dump(mode="json") if config.adapter is not None else None


def contents(tokenizer: PreTrainedTokenizerBase | None, data: TrainData) -> dict[str, str | None]:
    """Hashes of the inputs that are no settings, by name; None for an input that does not exist."""
    known = template = None
    if tokenizer is not None:
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        known, template = _hash([vocabulary, special]), tokenizer.chat_template
    sets = {name: rows.fingerprint for name, rows in data.eval_sets.items()}
    return {
        "tokenizer": known,
        "chat template": _hash(template) if template else None,
        "evaluation data": sets.get("", _hash(sets) if sets else None),
    }


def versions() -> dict[str, str]:
    """Versions of the libraries that decide the rounding of numbers and the order of samples."""
    known = {name: installed(name) for name in _LIBRARIES}
    return {"hetero_framework": __version__} | {n: v for n, v in known.items() if v is not None}


def check_identity(
    reader: CheckpointReader, resolved: Resolved, data: TrainData, now: Mapping[str, Any]
) -> None:
    """Raise CheckpointError for data or settings that differ from the checkpoint's and must not.
    Warn of permitted differences. `now` is the `contents` of this run."""
    changed = [
        (name, line, effects.effect_of(name, resolved.given))
        for name, line in _changed(reader.manifest, resolved)
    ]
    step, manifest = reader.step, reader.manifest
    refused = [line for _, line, effect in changed if effect is IDENTITY]
    reported = [(name, line) for name, line, effect in changed if effect in (RESULT, ROUNDING)]
    if manifest["identity"]["data"] != data.fingerprint:
        was = manifest["contents"]
        deciding: tuple[str, ...] = ("data.", "model.")
        if data.order.mixes_epochs:
            deciding += ("training.max_steps", "training.num_train_epochs")
        causes = [line for name, line in reported if name.startswith(deciding)]
        for name in ("tokenizer", "chat template"):
            if was[name] != now[name]:
                causes.append(f"the {name} differs")
        because = f" ({'; '.join(causes)})" if causes else ""
        raise CheckpointError(
            f"checkpoint {step} was made with other training data than data.train holds now"
            f"{because}",
            hint="put the data back as it was (also data.max_length and format), or start afresh",
        )
    if refused:
        raise CheckpointError(
            f"checkpoint {step} belongs to another run: {'; '.join(refused)}",
            hint=f"set {'it' if len(refused) == 1 else 'them'} back, or start without --resume",
        )
    for _, line in reported:
        at = line.replace(", now it is ", f" at checkpoint {step}, now it is ", 1)
        _log.warning("%s; the run goes on with that", at)
    for line in _inputs(manifest, step, now):
        _log.warning("%s", line)
    if rate := _rate_line(manifest, resolved.given.training, data):
        _log.warning("%s", rate)


def _changed(manifest: Mapping[str, Any], resolved: Resolved) -> Iterator[tuple[str, str]]:
    """Yield (setting, "it was A, now it is B") for each setting that differs."""
    theirs, ours = effects.flat(manifest["given"]), effects.flat(resolved.given.to_dict())
    theirs["model.quantization"] = manifest["identity"]["model"]["quantization"]
    ours["model.quantization"] = resolved.given.kinds
    base = manifest["config"]["base_dir"]
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        section = name.partition(".")[0]
        both = theirs.get(section) is not None and ours.get(section) is not None
        if name != section and not (both and name in theirs and name in ours):
            continue  # reported with the section, or a setting that one version does not know
        a, b = theirs.get(name), ours.get(name)
        if a != b and not _is_same(name, a, b, base, resolved.given):
            yield name, f"{name} was {_value_text(a)}, now it is {_value_text(b)}"


def _is_same(name: str, was: Any, now: Any, base: str, config: Config) -> bool:
    """Whether two values mean the same folder, or the same modules in another order."""
    if isinstance(was, str) and isinstance(now, str):
        before, there = Path(base, os.path.expanduser(was)), config.path(now)
        return there.is_dir() and before.resolve() == there.resolve()
    names = isinstance(was, list) and isinstance(now, list) and name.startswith("adapter.")
    return names and sorted(map(str, was)) == sorted(map(str, now))


def _value_text(value: Any) -> str:
    return "given" if value is True else json.dumps(value)


def _inputs(manifest: Mapping[str, Any], step: int, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each difference in inputs that are no settings."""
    was = manifest["contents"]
    yield from (text.format(step) for name, text in _CONTENTS.items() if was[name] != now[name])
    there, here = manifest["versions"], versions()
    other = [f"{n} {v} (here {here[n]})" for n, v in there.items() if here.get(n, v) != v]
    if other:
        yield (
            f"checkpoint {step} was written with {', '.join(other)}; results are equal to the last"
            " bit only with the same versions"
        )


def _rate_line(manifest: Mapping[str, Any], now: TrainingConfig, data: TrainData) -> str | None:
    """A line on the next step's learning rate, if another schedule changes it."""
    settings = manifest["config"]["settings"]["training"]
    known = {key: value for key, value in settings.items() if key in TrainingConfig.model_fields}
    try:
        was = TrainingConfig.model_validate_json(json.dumps(known))
        order = replace(data.order, training=was)
        done = manifest["position"]["committed_steps"]
        before = LearningRate(was, order.total_steps).rate(done)
        after = LearningRate(now, data.total_steps).rate(done)
    except (ValidationError, UserError, KeyError):
        return None  # written by a version with other settings
    if before == after:
        return None
    line = f"the learning rate of the next step was {before:.2e} and is {after:.2e} now"
    if order.total_steps == data.total_steps:
        return line
    return f"{line}: its schedule runs over {data.total_steps} steps, not {order.total_steps}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
