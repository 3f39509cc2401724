"""TensorBoard's events of a run.

They hold the numbers of each line of metrics.jsonl as train/<name> and eval/<name>, except the
numbers of single stages, and samples as texts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero_framework.trainer.metrics import is_evaluation
from hetero_framework.trainer.observers import Due, Observer, RunStart, Watched
from hetero_framework.trainer.setup import Sample
from hetero_framework.trainer.train_state import TrainState

_log = logging.getLogger(__name__)


class TensorBoard(Observer):
    """Writes event files into the run's logging_dir, if TensorBoard is installed. Their names end
    in the run's id. The run goes on without events that cannot be written."""

    def __init__(self, run: Watched) -> None:
        self._directory = run.placed.prepared.config.logging_dir
        self._run_id, self._step = "", 0
        self._board: Any = None
        self._has_failed = False

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        self._run_id, self._step = run.run_id, state.step

    def went_back(self, state: TrainState) -> None:
        self._step = state.step
        self.close(failed=False)  # a new file hides the repeated steps of this one
        self._board = None

    def step_end(self, state: TrainState, line: Mapping[str, Any], due: Due) -> None:
        self._show(line)

    def evaluated(self, state: TrainState, metrics: Mapping[str, Any], due: Due) -> None:
        self._show(metrics)

    def sampled(self, state: TrainState, samples: Sequence[Sample]) -> None:
        def show(board: Any) -> None:
            for number, sample in enumerate(samples):
                text = f"{sample.prompt}\n\n{sample.text}"
                board.add_text(f"samples/{number}", text, state.step)

        self._on_board(show)

    def close(self, failed: bool) -> None:
        if self._board is not None:
            self._on_board(lambda board: board.close())

    def _show(self, line: Mapping[str, Any]) -> None:
        group = "eval" if is_evaluation(line) else "train"

        def show(board: Any) -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for all numbers: with more, the step would wait for the writer's thread.
            values = [
                Summary.Value(tag=f"{group}/{key.removeprefix('eval_')}", simple_value=value)
                for key, value in line.items()
                if key != "step" and type(value) in (int, float) and math.isfinite(value)
            ]
            board.file_writer.add_summary(Summary(value=values), line["step"])

        self._on_board(show)

    def _on_board(self, show: Callable[[Any], object]) -> None:
        """Call `show` with the writer, which is opened first. A failure is told, and ends this."""
        if self._has_failed:
            return
        try:
            if self._board is None:
                from torch.utils.tensorboard import SummaryWriter

                # purge_step hides the events of steps that a crash left behind and this run
                # repeats, but also other runs' in this directory. A fresh run does without.
                purge = self._step + 1 if self._step else None
                suffix, place = f".{self._run_id}", str(self._directory)
                self._board = SummaryWriter(place, purge_step=purge, filename_suffix=suffix)
            show(self._board)
        except ImportError:
            self._has_failed = True
            _log.warning("report_to asks for tensorboard, which is not installed: no event files")
        except (OSError, ValueError) as error:  # ValueError: its file is closed
            self._has_failed = True
            _log.warning("cannot write TensorBoard events: %s", error)
