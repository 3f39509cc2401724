"""A run's whole state into a checkpoint and back, keyed by parameter name.

Nothing in it speaks of processes or machines: a checkpoint of three stages resumes in five, or in
one. Random numbers and the data's order are functions of the seed and the step, so a step number is
all that is kept of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers

from hetero_framework._version import __version__
from hetero_framework.cluster.assembly import Trainable
from hetero_framework.config import Config
from hetero_framework.engine.pipeline import Pipeline
from hetero_framework.engine.stage import OPTIMIZER, WEIGHTS
from hetero_framework.engine.stage_api import StatePart
from hetero_framework.errors import CheckpointError
from hetero_framework.trainer.checkpoint import CheckpointReader, CheckpointStore
from hetero_framework.trainer.resolved import Resolved
from hetero_framework.trainer.train_state import TrainState

# What must be the same for a resumed run to be the continuation of the first one.
_SAME_MODEL = ("name_or_path", "revision", "from_config", "dtype", "quantization")
_SAME_TRAINING = (
    "seed",
    "data_seed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "train_sampling_strategy",
    "dataloader_drop_last",
    "optim",
    "fp16",
    "bf16",
)


def save(
    store: CheckpointStore,
    pipeline: Pipeline,
    resolved: Resolved,
    state: TrainState,
    data_fingerprint: str,
    base_fingerprint: str,
) -> str:
    """Gather every stage's state into `step_<n>`; returns its path.

    `base_fingerprint` is that of the weights that the run began with.

    Raises ResourceError when it cannot be written; what was written of it is removed.
    """
    values: dict[str, Any] = {}
    with store.begin(state.step) as writer:
        for stage, number, part in pipeline.read_state("checkpoint"):
            if part.tensors:
                writer.add(stage, number, part.tensors)
            values.update(part.values)
        manifest = {
            "identity": identity(resolved, data_fingerprint),
            "base": base_fingerprint,
            "config": {
                "settings": resolved.config.to_dict(),
                "base_dir": str(resolved.config.base_dir.absolute()),
            },
            "position": state.state_dict(),
            "plan": [entry.model_dump(mode="json") for entry in resolved.config.shard_plan],
            "values": values,
            "versions": {
                "hetero_framework": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        return str(writer.commit(manifest))


def load(
    reader: CheckpointReader, pipeline: Pipeline, trainable: Trainable, base_fingerprint: str
) -> TrainState:
    """Give every stage its part of a checkpoint, whatever plan wrote it.

    The caller has had `check_identity` look at it. Raises CheckpointError when it is damaged or
    lacks anything, or when the run began with other weights than those that are loaded now.
    """
    if reader.manifest.get("base", base_fingerprint) != base_fingerprint:
        raise CheckpointError(
            f"checkpoint {reader.step} began with other weights than the model has now",
            hint="put the model back as it was, or start without --resume",
        )
    states = _names_by_parameter(reader.names())
    values: dict[str, Any] = reader.manifest["values"]
    value_names = _names_by_parameter(values)
    for stage, parameters in enumerate(trainable):
        wanted = [f"{WEIGHTS}/{name}" for name, _ in parameters]
        wanted += [n for name, _ in parameters for n in states.get(name, ())]
        own = {n: values[n] for name, _ in parameters for n in value_names.get(name, ())}
        pipeline.load_state(stage, "checkpoint", _parts(reader.read(wanted), own))
    pipeline.share_tied_weight()
    return TrainState.load_state_dict(reader.manifest["position"])


def identity(resolved: Resolved, data_fingerprint: str) -> dict[str, Any]:
    """The settings, as given, that make a run what it is; machines and plan are not among them."""
    config = resolved.given
    assert config.model is not None
    model, training = config.model.model_dump(mode="json"), config.training.model_dump(mode="json")
    return {
        "model": {key: model[key] for key in _SAME_MODEL},
        "adapter": adapter_settings(config),
        "training": {key: training[key] for key in _SAME_TRAINING},
        "data": data_fingerprint,
    }


def adapter_settings(config: Config) -> dict[str, Any] | None:
    """The adapter's part of a run's identity."""
    return config.adapter.model_dump(mode="json") if config.adapter is not None else None


def check_identity(reader: CheckpointReader, resolved: Resolved, data_fingerprint: str) -> None:
    """Raise CheckpointError that names the first setting that differs from the checkpoint's."""
    ours, theirs = identity(resolved, data_fingerprint), reader.manifest["identity"]
    if theirs == ours:
        return
    if theirs["data"] != ours["data"]:
        raise CheckpointError(
            f"checkpoint {reader.step} was made with other training data than data.train holds now",
            hint="put the data back as it was (also data.max_length and format), or start afresh",
        )
    for section in ("model", "adapter", "training"):
        a, b = theirs[section] or {}, ours[section] or {}
        for key in {**a, **b}:
            if a.get(key) != b.get(key):
                raise CheckpointError(
                    f"checkpoint {reader.step} belongs to another run: {section}.{key} was "
                    f"{json.dumps(a.get(key))}, now it is {json.dumps(b.get(key))}",
                    hint="set it back, or start without --resume",
                )


def _names_by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """Optimizer entries by the parameter they belong to: "optimizer/<key>/<parameter>"."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind == OPTIMIZER:
            grouped.setdefault(rest.partition("/")[2], []).append(name)
    return grouped


def _parts(
    tensors: Iterator[dict[str, torch.Tensor]], values: dict[str, Any]
) -> Iterator[StatePart]:
    """The parts as they come, the values and the mark on a last, empty one."""
    for part in tensors:
        yield StatePart(part)
    yield StatePart({}, values, last=True)
