"""Makes the result of a run from a checkpoint, without the run's workers.

For `hetero export`, and for a run whose workers are gone when the result is gathered. A checkpoint
has the trained weights of every stage. An adapter needs nothing else. A whole model is read and
written block by block.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from hetero_framework.config import Config, load_config
from hetero_framework.core.devices import open_device
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.engine.stage import WEIGHTS
from hetero_framework.errors import CheckpointError, HeteroError, PeerLostError
from hetero_framework.log import event
from hetero_framework.models.adapters.adapter_plan import AdapterPlan
from hetero_framework.models.adapters.trainable import (
    adapter_plan_of,
    attach_adapter,
    export_parts,
    trainable_parameters,
)
from hetero_framework.models.cut.family import decided
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import load_shard
from hetero_framework.models.files.export import OutputDirectory, Tensors
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.library import quiet_libraries
from hetero_framework.trainer.checkpoint import MANIFEST, CheckpointReader, CheckpointStore
from hetero_framework.trainer.continuation import adapter_settings
from hetero_framework.trainer.outputs import write_result
from hetero_framework.trainer.run_checkpoint import RunCheckpoints
from hetero_framework.trainer.setup import Prepared
from hetero_framework.trainer.train_state import TrainState

_log = logging.getLogger(__name__)


def export_last_checkpoint(
    prepared: Prepared,
    checkpoints: RunCheckpoints,
    state: TrainState,
    lost: PeerLostError,
    best: CheckpointReader | None = None,
) -> Path:
    """Write the result from `best`, or else from the last checkpoint, and return its directory.
    Raises `lost` where there is no checkpoint, and, where the result lacks the last steps, a
    PeerLostError that names the result."""
    try:
        reader = best or checkpoints.last()
        if reader is None:
            raise lost
        config, plan, directory = prepared.config, prepared.adapter_plan, prepared.config.result_dir
        output, source = OutputDirectory(directory, overwrite=True), prepared.source
        tensors = _tensors(reader, source, plan)
        write_result(output, config, plan, source, prepared.tokenizer, tensors, reader.step)
    except PeerLostError:
        raise
    except (HeteroError, OSError) as error:
        _log.warning("no result could be made of the last checkpoint: %s", error)
        raise lost from error
    total = prepared.data.total_steps
    what = f"step {reader.step} of {total}" + (", the last one" if reader.step == total else "")
    what += ", the best one" * (reader is best)
    text = f"{directory} is made of the checkpoint of {what}"
    rescued = event("result rescued", "made of a checkpoint", step=reader.step, reason=lost.message)
    _log.warning("%s; %s", lost.message, text, extra=rescued)
    if reader.step < state.step and reader is not best:
        raise PeerLostError(f"{lost.message}; {text}", hint=lost.hint)
    return directory


def export_checkpoint(
    place: Path, output: OutputDirectory, config_file: Path | None = None
) -> CheckpointReader:
    """Write the result of the run as if it had ended at this checkpoint; return the checkpoint.

    `place` is a `step_N` directory, or a run's `output_dir` or `checkpoint_dir`, of which the
    latest checkpoint counts. `config_file` replaces the checkpoint's own configuration. Raises
    CheckpointError for a checkpoint that is damaged or does not fit, ModelError and DataError.
    """
    reader = _find(place)
    output.check(reader.directory, place)
    config = _configuration(reader, config_file)
    quiet_libraries(config.training.log_level)
    source, _ = ModelSource.of(config).held()
    tied = source.model.tie_word_embeddings
    config = config.with_changes(model={"tie_word_embeddings": tied})
    plan = adapter_plan_of(config, source.config)
    tokenizer = load_tokenizer(config) if config.training.reads_text else None
    tensors = _tensors(reader, source, plan)
    write_result(output, config, plan, source, tokenizer, tensors, reader.step)
    return reader


def _find(place: Path) -> CheckpointReader:
    place = place.absolute()
    if (place / MANIFEST).is_file():
        if (step := re.fullmatch(r"step_(\d+)", place.name)) is None:
            raise CheckpointError(
                f"{place} is a checkpoint, but not called step_N", hint="give it its name back"
            )
        return CheckpointStore(place.parent).open(int(step[1]))
    root = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    if not root.is_dir():
        raise CheckpointError(
            f"there is no directory {place}",
            hint="give a step_N directory, or the output_dir of a run",
        )
    return CheckpointStore(root).resolve("latest")


def _configuration(reader: CheckpointReader, file: Path | None) -> Config:
    """The run's configuration, or `file`'s, which has to have the same adapter section."""
    if file is None:
        saved = reader.manifest.get("config")
        if saved is None:
            raise CheckpointError(
                f"checkpoint {reader.step} is of a version that kept no configuration in it",
                hint="name the run's: --config FILE",
            )
        name = str(reader.directory)
        return decided(Config.from_dict(saved["settings"], saved["base_dir"], name=name))
    config = decided(load_config(file))
    config.require("model")
    if adapter_settings(config) != reader.manifest["identity"]["adapter"]:
        raise CheckpointError(
            f"checkpoint {reader.step} was made with another adapter section than that of {file}",
            hint="give the configuration of the run that wrote it, or none",
        )
    return config


def _tensors(
    reader: CheckpointReader, source: ModelSource, plan: AdapterPlan | None
) -> Iterator[Tensors]:
    """The tensors of the result. An adapter that leaves the embeddings alone reads nothing of the
    base model; otherwise the base model is read block by block."""
    if plan is not None and not plan.embedding_tensors:
        from hetero_framework.models.adapters.lora import tensors_of_plan

        yield tensors_of_plan(source.config, plan, _weights(reader, plan.trainable))
        return
    settings = source.model.quantized(None)
    for span in ranges_between(range(introspect(source.config).num_layers + 1)):
        shard = load_shard(settings, source.base_dir, span, open_device("cpu"), seed=0)
        attach_adapter(shard, plan, seed=0)
        trained = dict(trainable_parameters(shard))
        places: dict[str, torch.Tensor] = {**trained, **shard.statistics}
        for name, tensor in _weights(reader, places).items():
            places[name].data = tensor
        yield dict(export_parts(shard))


def _weights(reader: CheckpointReader, names: Iterable[str]) -> Tensors:
    """A checkpoint's weights by parameter name."""
    read = reader.read([f"{WEIGHTS}/{name}" for name in names])
    return {name.removeprefix(f"{WEIGHTS}/"): tensor for name, tensor in read}
