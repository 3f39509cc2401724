"""The reference of a preference training: the model before it is trained, asked about each answer.

One pass before the first step asks it for a number for each answer. The numbers are kept with the
run's results, for a resume under any plan. They are also kept in the cache, for other runs that
compute the same numbers on the same machines.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config, StageSpec, effects
from hetero_framework.config.section import Effect, WorkerId
from hetero_framework.core.cache import recall, remember
from hetero_framework.data.batches import LazyBatches, MicroBatch
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.errors import CheckpointError, NumericError, ProtocolError
from hetero_framework.extras.preferences.pair_objective import LOGPS
from hetero_framework.extras.preferences.pairs import REFERENCE, AnswerRows
from hetero_framework.extras.preferences.preferences import can_switch
from hetero_framework.extras.preferences.settings import PreferenceSettings
from hetero_framework.trainer.continuation import versions
from hetero_framework.trainer.setup import Prepared
from hetero_framework.units import plural

_log = logging.getLogger(__name__)
REFERENCES = "references"
"""Name of the folder with the numbers, in the cache and in a run's output_dir."""


class Reference:
    """Asks the reference through a run's stages; if `is_precomputed`, before the first step."""

    def __init__(self, prepared: Prepared, devices: Mapping[WorkerId, str]) -> None:
        """`devices` are the names of the processes' devices."""
        self._prepared = prepared
        self._devices = devices
        self._can_switch = can_switch(prepared.adapter_plan)
        training = prepared.config.training
        self.is_precomputed = PreferenceSettings.of(training).precompute_ref_log_probs
        self._names = REFERENCE[training.data_kind]

    def prepare(self, cluster: Cluster, data: TrainData, step: int) -> None:
        """Give the data the numbers of the reference. Raises CheckpointError where the run is past
        its beginning and the numbers are no longer known."""
        if not self.is_precomputed:
            return
        data.examples = self._known(cluster, data, "train", data.examples, step)
        for name, rows in data.eval_sets.items():
            data.eval_sets[name] = self._known(cluster, data, f"eval {name}", rows, step)

    def _known(
        self, cluster: Cluster, data: TrainData, name: str, rows: object, step: int
    ) -> AnswerRows:
        assert isinstance(rows, AnswerRows)
        if rows.reference is not None:
            return rows
        identity = self._identity(cluster, rows)
        question = json.dumps([identity, self._way()], sort_keys=True)
        of_run = json.dumps(identity, sort_keys=True), self._prepared.config.output_dir
        kept = recall(REFERENCES, *of_run) if step > 0 else None
        kept = kept or recall(REFERENCES, question)
        if not kept:
            if step > 0 and not self._can_switch:
                raise CheckpointError(
                    "what the model said of the answers before it was trained is no longer in"
                    f" output_dir/{REFERENCES}, and the model of that time is not loaded",
                    hint="begin anew with --fresh",
                )
            _log.info("the reference is asked about %s of %s", plural(len(rows), "example"), name)
            kept = self._asked(cluster, data, rows, name)
            remember(REFERENCES, question, kept)
        remember(REFERENCES, of_run[0], kept, of_run[1])
        return replace(rows, reference=np.asarray(kept, np.float32).reshape(-1, rows.each))

    def _asked(
        self, cluster: Cluster, data: TrainData, rows: AnswerRows, name: str
    ) -> list[list[float]]:
        size = self._prepared.config.training.per_device_train_batch_size
        numbers = np.array_split(np.arange(len(rows)), range(size, len(rows), size))
        batches = LazyBatches(len(numbers), lambda k: data.collate(rows, numbers[k]))
        found = self._pass(cluster, batches, numbers, name)
        return [pair.tolist() for part in found for pair in part]

    def _pass(
        self,
        cluster: Cluster,
        batches: Sequence[MicroBatch],
        samples: Sequence[Iterable[int]],
        name: str,
    ) -> list[torch.Tensor]:
        """The reference's numbers of each micro-batch, [P, rows of each], for its `samples` of the
        set `name`. Raises ProtocolError for other shapes, NumericError for numbers not finite."""
        info = StepInfo(0, 0, False, len(batches), 1, reference=self._can_switch or None)
        cluster.run(info, batches)
        with cluster.pipeline.judging_outcomes():
            asked = zip(cluster.pipeline.outcomes, samples, strict=True)
            return [self._read(outcome.named, [*map(int, ids)], name) for outcome, ids in asked]

    def _read(self, named: Mapping[str, torch.Tensor], ids: list[int], name: str) -> torch.Tensor:
        logps, each = named.get(LOGPS, torch.empty(0, 0)), len(self._names)
        where = f"these examples of {name}, counted from 0: "
        if logps.shape != (each * len(ids),) or not logps.is_floating_point():
            text = f"the reference gave no log-probability of each answer of {where}"
            raise ProtocolError(text + ", ".join(map(str, ids)))
        found = logps.float().cpu().view(each, -1).T
        if bad := [str(k) for k, one in zip(ids, found, strict=True) if not one.isfinite().all()]:
            text = f"the reference's log-probabilities are not finite for {where}"
            hint = "look at these examples, or take bf16 or float32 in place of fp16"
            raise NumericError(text + ", ".join(bad), hint=hint)
        return found

    def added(
        self,
        cluster: Cluster,
        batches: Sequence[MicroBatch],
        samples: Sequence[Iterable[int]],
        name: str = "train",
    ) -> list[MicroBatch]:
        """The micro-batches with the numbers of the reference, asked now unless they are known."""
        if self.is_precomputed:
            return list(batches)
        found = self._pass(cluster, batches, samples, name)
        return [
            {**batch, **dict(zip(self._names, pairs.T.contiguous(), strict=True))}
            for batch, pairs in zip(batches, found, strict=True)
        ]

    def _identity(self, cluster: Cluster, rows: AnswerRows) -> list[Any]:
        """All that decides the numbers: the model, its adapter at the start, the answers."""
        config, plan = self._prepared.config, self._prepared.adapter_plan
        settings = {
            name: value
            for name, value in effects.agreed(config).items()
            if effects.effects()[name] is Effect.IDENTITY
            and not (self._can_switch and name.startswith("adapter"))
        }
        started = None if plan is None else plan.origin
        decay = PreferenceSettings.of(config.training).ld_alpha
        answers = [rows.fingerprint, rows.kind, decay]
        return [cluster.fingerprint, settings, started, answers]

    def _way(self) -> list[Any]:
        """All that rounding depends on: codecs, kernels, machines, batch size."""
        config = self._prepared.config
        rounding = {
            name: value
            for name, value in effects.of_config(config).items()
            if effects.effects()[name] is Effect.ROUNDING or name.startswith("wire.")
        }
        machines = groupby(config.plan.stages, lambda stage: self._machine(config, stage))
        held = [[machine, list(stages)[-1].end] for machine, stages in machines]
        size = config.training.per_device_train_batch_size
        return [rounding, held, torch.get_num_threads(), size, versions()]

    def _machine(self, config: Config, stage: StageSpec) -> list[Any]:
        """What computes a stage; a cut between equal machines changes nothing, unless a codec
        rounds there."""
        cut = None if config.wire.activations == "none" else stage.index
        return [self._devices.get(stage.owner), config.quantization(stage.owner), cut]
