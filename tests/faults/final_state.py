"""The final state of a run: its last checkpoint, its result, and the lines of its steps. To
compare with that of an undisturbed run, or of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hetero_framework.trainer.checkpoint import CheckpointStore
from tests.integration.test_parity import assert_same, weights
from tests.pools import read_metrics

_KEYS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "eval_loss")


def assert_same_run(one: Path, other: Path) -> None:
    """The same steps, and the same bits in the results."""
    assert read_metrics(one) == read_metrics(other)
    assert_same(weights(one), weights(other))


def differences(one: Path, other: Path) -> list[str]:
    """What the last checkpoints (weights and optimizer) and the results of two runs differ in."""
    stores = [CheckpointStore(output / "checkpoints") for output in (one, other)]
    steps = [store.complete_steps()[-1] for store in stores]
    if steps[0] != steps[1]:
        return [f"the last checkpoint is {steps[0]}, not {steps[1]}"]
    found = [_tensors(store, steps[0]) for store in stores]
    return _unequal("checkpoint", *found) + _unequal("result", weights(one), weights(other))


def lines(output: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says that does not depend on time."""
    read = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in _KEYS if key in line} for line in read]


def _tensors(store: CheckpointStore, step: int) -> dict[str, torch.Tensor]:
    reader = store.open(step)
    return {name: tensor.clone() for name, tensor in reader.read(reader.names())}


def _unequal(what: str, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(one.keys() | other.keys())
    return [
        f"{what}: {name}"
        for name in names
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]
