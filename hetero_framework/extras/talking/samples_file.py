"""samples.jsonl: the texts that a model continues while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from hetero_framework.trainer.metrics import StepLines
from hetero_framework.trainer.observers import Due, Observer, RunStart, Watched
from hetero_framework.trainer.setup import Sample
from hetero_framework.trainer.train_state import TrainState

SAMPLES_FILE = "samples.jsonl"


class SamplesFile(Observer):
    """Writes samples.jsonl."""

    def __init__(self, run: Watched) -> None:
        self._lines = StepLines(run.placed.prepared.config.output_dir / SAMPLES_FILE)

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        if any(line["step"] == state.step for line in self._lines.resume(state.step)):
            due.done.add("sample")

    def went_back(self, state: TrainState) -> None:
        self._lines.resume(state.step)

    def sampled(self, state: TrainState, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._lines.write({"step": state.step, **asdict(sample)})
