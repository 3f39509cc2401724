"""Metrics that the user computes of an evaluation's predictions, as for transformers' Trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hetero_framework import control
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.engine.stage_api import Outcome, StepInfo
from hetero_framework.errors import CallbackError, ConfigError, ProtocolError
from hetero_framework.extras.reporting.predictions import PLAIN, predictions
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.trainer.metrics import SPEED, metric_name
from hetero_framework.trainer.python_data import COMPUTE, PREPROCESS, ComputedMetrics, Given
from hetero_framework.trainer.setup import Prepared

_PADDING = -100


class UserMetrics(ComputedMetrics):
    """The user's `compute`, which gets an EvalPrediction and gives metrics by name."""

    def __init__(self, compute: Any, prepared: Prepared) -> None:
        self._compute, self._prepared = compute, prepared
        self._preprocesses = control.function(PREPROCESS) is not None

    def try_out(
        self, cluster: Cluster, step: int, evaluate: Callable[[str], Mapping[str, Any]]
    ) -> None:
        """Compute metrics of one micro-batch, so that a missing or failing function ends the run
        before its first step. A function that fails on so few labels is tried on all labels."""
        data, objective = self._prepared.data, objective_of(self._prepared.config.training)
        if not (sets := data.eval_sets):
            return
        name = next(iter(sets))
        batch = data.eval_batches(name)[0]
        cluster.run(StepInfo(step, 0, False, 1, 1, predicts=True), [batch])
        outcomes = cluster.pipeline.outcomes
        about = [batch[objective.label_name]], metric_name(name, ""), SPEED
        try:
            with cluster.pipeline.judging_outcomes():
                self._predictions(outcomes)
            try:
                made = self.of_set(outcomes, *about)
                self._check_best({metric_name(of, m): v for of in sets for m, v in made.items()})
            except CallbackError:
                every = {of: evaluate(of).items() for of in sets}
                self._check_best({metric_name(of, m): v for of in sets for m, v in every[of]})
        except CallbackError as error:
            raise ConfigError(error.message, hint=error.hint) from error

    def _check_best(self, line: Mapping[str, Any]) -> None:
        """Raise CallbackError if not every evaluation gives the metric for the best model and
        `line` has no number for it."""
        config = self._prepared.config
        try:
            config.check_metric(objective_of(config.training).evaluated)
        except ConfigError:
            metric = str(config.training.metric).removeprefix("eval_")
            check_best(f"eval_{metric}", line)

    def _predictions(self, outcomes: Sequence[Outcome]) -> list[Any]:
        """Predictions of each micro-batch. Raises CallbackError if the user's function fails."""
        read = partial(predictions, preprocesses=self._preprocesses)
        return [read(outcome.named) for outcome in outcomes]

    def of_set(
        self,
        outcomes: Sequence[Outcome],
        labels: Sequence[Tensor],
        prefix: str,
        taken: Collection[str],
    ) -> dict[str, Any]:
        from transformers import EvalPrediction  # brings PEFT
        from transformers.trainer_utils import denumpify_detensorize

        parts = self._predictions(outcomes)
        for one, told in zip(outcomes, labels, strict=True):
            shapes = [one.named[name].shape for name in PLAIN & one.named.keys()]
            if any(shape[:1] != told.shape[:1] for shape in shapes):
                raise ProtocolError("the last stage gave predictions of other rows than its own")
        with control.users_code(f"{COMPUTE} failed"):
            made: Any = _joined(parts) if isinstance(parts[0], Tensor) else None
            if made is None:
                made = tuple(map(_joined, zip(*parts, strict=True)))
            given = self._compute(EvalPrediction(predictions=made, label_ids=_joined(labels)))
            if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
                raise TypeError(f"it gave a {type(given).__name__}, not metrics by name")
            plain = denumpify_detensorize(dict(given))
            json.dumps(plain)
        found = {name.removeprefix(prefix): value for name, value in plain.items()}
        if clash := sorted(found.keys() & set(taken)):
            text = f"{COMPUTE} gives {clash[0]!r}, as every evaluation does"
            raise CallbackError(text, hint="give it another name")
        return found


def check_best(metric: str, line: Mapping[str, Any]) -> None:
    """Raise CallbackError if an evaluation's `line` has no number for the metric that decides on
    the best model."""
    what = f"training.metric_for_best_model is {metric}, which"
    if metric not in line:
        found = ", ".join(name for name in line if name.startswith("eval_"))
        raise CallbackError(f"{what} no evaluation gives; they give {found}")
    if not isinstance(line[metric], int | float):
        raise CallbackError(f"{what} {COMPUTE} gives as {line[metric]!r:.60}, not as a number")


def of_run(given: Given, prepared: Prepared) -> ComputedMetrics | None:
    """The metrics that the user computes in a run; None without a function for them. Raises
    ConfigError if the predictions cannot be made."""
    compute = given.get(COMPUTE) or control.function(COMPUTE)
    if compute is None:
        return None
    if given.get(PREPROCESS) and (last := prepared.config.plan.stages[-1].owner) != "local":
        raise ConfigError(
            f"{PREPROCESS} was given to train(), but the logits are in another process, that of"
            f" worker {last}",
            hint=f"write it as {PREPROCESS} into a Python file, and name that with --import where"
            " the worker is started, and here (hetero_framework.control.import_file, which workers"
            ' started by this process follow); or end shard_plan with a stage of "local"',
        )
    training = prepared.config.training
    if not objective_of(training).predicts:
        raise ConfigError(
            f'there is no {COMPUTE} for training.objective "{training.objective}", which makes no'
            " predictions",
            hint="leave it out",
        )
    if introspect(prepared.model_config).ids_per_token > 1:
        kind = prepared.model_config.model_type
        raise ConfigError(
            f"there is no {COMPUTE} for a {kind} model, each of whose tokens has several labels",
            hint="leave it out",
        )
    return UserMetrics(compute, prepared)


def _joined(parts: Sequence[Tensor]) -> np.ndarray:
    """Tensors of micro-batches one after another, padded on the right as the Trainer does."""
    parts = [torch.atleast_1d(part) for part in parts]
    if parts[0].ndim > 1:
        width = max(part.shape[1] for part in parts)
        deeper = [0, 0] * (parts[0].ndim - 2)  # axes after the tokens stay as they are
        parts = [pad(p, [*deeper, 0, width - p.shape[1]], value=_PADDING) for p in parts]
    whole = torch.cat(parts)
    return (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy()
