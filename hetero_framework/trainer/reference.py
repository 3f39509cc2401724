"""The reference of a preference training: what the model said of each answer before it was
trained.

It is asked in one pass before the first step, of a number for each answer, which are kept in the
cache for the run that goes on, and for others with the same model and data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.core.cache import recall, remember
from hetero_framework.data import LazyBatches, MicroBatch, TrainData
from hetero_framework.data.pairs import REFERENCE, AnswerRows
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.errors import CheckpointError, ProtocolError
from hetero_framework.models.cut.preferences import LOGPS
from hetero_framework.trainer.continuation import versions
from hetero_framework.trainer.setup import Prepared, can_switch
from hetero_framework.units import plural

_log = logging.getLogger(__name__)
_KIND = "references"


class Reference:
    """Asks the reference through the stages of a run. `is_precomputed`: all of it is known."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._can_switch = can_switch(prepared.adapter_plan)
        training = prepared.config.training
        self.is_precomputed = training.precompute_ref_log_probs
        self._names = REFERENCE[training.data_kind]

    def prepare(self, cluster: Cluster, data: TrainData, step: int) -> None:
        """Give the data the numbers of the reference. Raises CheckpointError where the run is past
        its beginning and they are no longer known."""
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
        question = self._question(cluster, rows)
        kept = recall(_KIND, question)
        if kept is None:
            if step > 0 and not self._can_switch:
                raise CheckpointError(
                    "what the model said of the answers before it was trained is no longer in the"
                    " cache, and the model of that time is not loaded",
                    hint="begin anew with --fresh",
                )
            _log.info("the reference is asked about %s of %s", plural(len(rows), "example"), name)
            kept = self._asked(cluster, data, rows)
            remember(_KIND, question, kept)
        return replace(rows, reference=np.asarray(kept, np.float32).reshape(-1, rows.each))

    def _asked(self, cluster: Cluster, data: TrainData, rows: AnswerRows) -> list[list[float]]:
        size = self._prepared.config.training.per_device_train_batch_size
        numbers = np.array_split(np.arange(len(rows)), range(size, len(rows), size))
        batches = LazyBatches(len(numbers), lambda k: data.collate(rows, numbers[k]))
        return [pair.tolist() for part in self._pass(cluster, batches) for pair in part]

    def _pass(self, cluster: Cluster, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The numbers of each micro-batch's examples, [P, rows of each]."""
        info = StepInfo(0, 0, False, len(batches), 1, reference=self._can_switch or None)

        def run() -> None:
            cluster.begin(info)
            cluster.pipeline.run(batches)

        cluster.retrying(run)
        found = []
        for outcome in cluster.pipeline.outcomes:
            logps, each = outcome.named.get(LOGPS, torch.empty(0, 0)), len(self._names)
            if logps.dim() != 1 or len(logps) % each or not logps.is_floating_point():
                raise ProtocolError("the last stage gave no log-probabilities of answers")
            found.append(logps.float().cpu().view(each, -1).T)
        return found

    def added(self, cluster: Cluster, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the numbers of the reference, asked now unless they are known."""
        if self.is_precomputed:
            return list(batches)
        found = self._pass(cluster, batches)
        return [
            {**batch, **dict(zip(self._names, pairs.T.contiguous(), strict=True))}
            for batch, pairs in zip(batches, found, strict=True)
        ]

    def _question(self, cluster: Cluster, rows: AnswerRows) -> str:
        """Everything on which the numbers depend."""
        config, plan = self._prepared.config, self._prepared.adapter_plan
        training, raw = config.training, config.to_dict()
        settings = {name: getattr(training, name) for name in ("bf16", "fp16", "ld_alpha")}
        adapter = None if self._can_switch or plan is None else raw["adapter"]
        started = None
        if plan is not None and plan.weights is not None:
            started = [str(plan.weights), plan.weights.stat().st_mtime_ns]
        padding = self._prepared.data.settings.pad_to_multiple_of
        size = training.per_device_train_batch_size, training.loss_chunk_tokens, padding
        model = [cluster.fingerprint, raw["model"]]
        asked = [model, adapter, started, rows.fingerprint, settings, size, versions()]
        return json.dumps(asked, sort_keys=True, default=str)
