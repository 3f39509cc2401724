"""The result of a run whose workers are gone when it is gathered: made of the last checkpoint.

The coordinator has every stage's weights there; an adapter needs nothing else, a whole model is
read and written block by block (models/files/restore.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from hetero_framework.engine.stage import WEIGHTS
from hetero_framework.errors import HeteroError, PeerLostError
from hetero_framework.log import event
from hetero_framework.models.files.export import OutputDirectory
from hetero_framework.models.files.restore import Read, finished_tensors
from hetero_framework.trainer.checkpoint import CheckpointReader
from hetero_framework.trainer.outputs import write_result
from hetero_framework.trainer.run_checkpoint import RunCheckpoints
from hetero_framework.trainer.setup import Prepared
from hetero_framework.trainer.train_state import TrainState

_log = logging.getLogger(__name__)


def export_last_checkpoint(
    prepared: Prepared, checkpoints: RunCheckpoints, state: TrainState, lost: PeerLostError
) -> Path:
    """Write the result from the last checkpoint and return its directory. Raises `lost`, or its
    like with what the result contains, where that is not the state after the last step."""
    try:
        reader = checkpoints.last()
        if reader is None:
            raise lost
        directory = _write(prepared, reader)
    except PeerLostError:
        raise
    except (HeteroError, OSError) as error:
        _log.warning("no result could be made of the last checkpoint: %s", error)
        raise lost from error
    total = prepared.data.total_steps
    what = f"step {reader.step} of {total}" + (", the last one" if reader.step == total else "")
    said = f"{directory} is made of the checkpoint of {what}"
    rescued = event("result rescued", "made of a checkpoint", step=reader.step, reason=lost.message)
    _log.warning("%s; %s", lost.message, said, extra=rescued)
    if reader.step < state.step:
        raise PeerLostError(f"{lost.message}; {said}", hint=lost.hint)
    return directory


def trained_weights(reader: CheckpointReader) -> Read:
    """Reads a checkpoint's weights by parameter name."""

    def read(names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        found = reader.read([f"{WEIGHTS}/{name}" for name in names])
        return {name.removeprefix(f"{WEIGHTS}/"): tensor for name, tensor in found}

    return read


def _write(prepared: Prepared, reader: CheckpointReader) -> Path:
    config, plan = prepared.config, prepared.adapter_plan
    assert config.model is not None
    output = OutputDirectory(config.result_dir, overwrite=True)
    tensors = finished_tensors(config.model, config.base_dir, plan, trained_weights(reader))
    about = (prepared.model_config, prepared.generation, prepared.tokenizer)
    write_result(output, config, plan, *about, tensors)
    return config.result_dir
