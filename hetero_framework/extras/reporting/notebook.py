"""The progress of a run in a notebook, with the bar and table of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from transformers.utils.notebook import NotebookTrainingTracker

from hetero_framework.trainer.progress import Progress, computed

_LOSS = "Training Loss"


class NotebookProgress(Progress):
    """Shows steps in a bar, and the losses of logged and evaluated steps in a table. The training
    loss is the mean over the steps since the row before. All other lines are printed."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self._table = NotebookTrainingTracker(0, ["Step", _LOSS])
        self._losses: list[float] = []
        self._mean: float | str = "No log"

    def start(self, total_steps: int, *shown: Any, **more: Any) -> None:
        super().start(total_steps, *shown, **more)
        self._table.total = total_steps
        self._table.update(self._step)

    def step(self, metrics: Mapping[str, Any]) -> None:
        if metrics.get("loss") is not None:
            self._losses.append(metrics["loss"])
        super().step(metrics)
        self._table.update(self._step)

    def _logged(self) -> None:
        if self._losses:
            self._mean = fmean(self._losses)
            self._losses = []
        self._row({})

    def _evaluated(self, metrics: Mapping[str, Any], name: str) -> None:
        self._step = metrics["step"]
        found = {"validation loss": metrics["eval_loss"], **dict(computed(metrics))}
        named = {f"{name} {key}".replace("_", " ").strip(): x for key, x in found.items()}
        self._row({key.title(): value for key, value in named.items()})

    def _row(self, found: Mapping[str, Any]) -> None:
        """Write a row of the last step, or into it."""
        self._table.write_line({"Step": self._step, _LOSS: self._mean, **found})
        self._table.update(self._step, force_update=True)
