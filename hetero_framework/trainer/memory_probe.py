"""Runs the longest micro-batch once before the first step, so that a lack of memory shows early.

The probe is an attempt at the next step that is aborted, as after a broken link: it changes no
weight, no optimizer state and no random number (docs/maintainers/internals.md, "Numbers").
"""

from __future__ import annotations

import logging

from transformers import PretrainedConfig

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import TrainingConfig
from hetero_framework.data.batches import MicroBatch, padded_count
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.out_of_memory import HOST_HINT
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.errors import OutOfMemory
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.trainer.train_state import TrainState
from hetero_framework.units import plural

_log = logging.getLogger(__name__)


def probe_longest_batch(
    cluster: Cluster,
    data: TrainData,
    training: TrainingConfig,
    model: PretrainedConfig,
    state: TrainState,
) -> None:
    """Run the longest micro-batch forward and backward on every stage, unless the next step has it.
    Raises OutOfMemory with advice."""
    largest = data.largest_batch(state.position) if training.probe_longest_batch else None
    if largest is None or largest[0] == state.position:
        return
    step, batch = largest
    # Stand-ins for the reference model's values, which may not have been computed yet.
    batch = {**objective_of(training).probe_inputs(model, batch), **batch}
    info = StepInfo(state.step, 0, True, 1, padded_count(batch), state.loss_scale.value)
    try:
        cluster.run(info, [batch])
    except OutOfMemory as error:
        raise advised(error, batch, training, "the longest micro-batch of the run,") from error
    cluster.retrying(cluster.pipeline.abort)
    where = f" in step {step + 1}" * (step < data.total_steps)
    _log.info("the longest micro-batch of the run, %s%s, fits", shape(batch), where)


def shape(batch: MicroBatch) -> str:
    """Rows and tokens of a micro-batch: "4 x 2,048 tokens"."""
    if "input_ids" not in batch:
        return plural(padded_count(batch), "example")
    rows, tokens = batch["input_ids"].shape
    return f"{rows} x {tokens:,} tokens"


def advised(
    error: OutOfMemory, batch: MicroBatch, training: TrainingConfig, what: str
) -> OutOfMemory:
    """The error, with the shape of the micro-batch and with changes that would need less memory."""
    rows, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    smaller = "lower data.max_length"
    if rows > 1:
        smaller = (
            f"try per_device_train_batch_size {rows // 2} with gradient_accumulation_steps "
            f"{accumulation * 2}, or lower data.max_length"
        )
    again = "" if training.gradient_checkpointing is True else "gradient_checkpointing, or "
    hint = f"{smaller}; or {again}fewer layers for that machine (`hetero check` shows what each"
    hint = HOST_HINT if error.hint == HOST_HINT else f"{hint} stage needs)"
    return OutOfMemory(f"{what} {shape(batch)}, does not fit: {error.message}", hint=hint)
