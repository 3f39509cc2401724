"""The page of a run, in its coordinator."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from hetero_framework.core.files import write_private
from hetero_framework.core.spans import COMMIT, COMPUTE, SEND, Span, is_span
from hetero_framework.errors import in_words
from hetero_framework.extras.watch.page_server import PageServer, news_of
from hetero_framework.trainer.observers import Due, Observer, Placement, RunStart, Watched
from hetero_framework.trainer.train_state import TrainState

_MOST_SPANS = 10_000
_log = logging.getLogger(__name__)


class RunPage(Observer):
    """Serves the page of a run. An action that a viewer asks for is done between two steps."""

    def __init__(self, run: Watched) -> None:
        config = run.placed.prepared.config
        self._run, self.folder = run, config.output_dir
        self.name: str = config.setting("island.name") or self.folder.name
        self._shown: dict[str, Any] = {"steers": True, "state": "running", "noted": 0}
        self._serving, self._changed, self._step = ExitStack(), threading.Condition(), 0
        self._pauses = self._waits = self._saves = self._is_saving = self._stops = False
        self._spans: dict[int, list[Any]] = {}

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        self._step = state.step
        self._shown |= {"total": run.total_steps, "unit": run.unit}
        self.replanned(run.placed)
        self._run.at_end(self._serving.close)  # so that the last event is shown
        self._serving.enter_context(suppress(OSError))
        try:
            server = self._serving.enter_context(PageServer([self]))
        except OSError as error:
            _log.warning("the run goes on without a page: %s", in_words(error))
            return
        file = self.folder / "page.json"
        self._serving.callback(file.unlink, missing_ok=True)
        with suppress(OSError):  # a full disk; the command says that there is no page
            write_private(file, json.dumps({"address": server.address}).encode())
        if (screen := self._run.screen) is not None and screen.has_terminal:
            screen.message(f"the run's page: {server.address}")  # which is not for files of logs
        else:
            _log.info("the run has a page; hetero watch %s prints its address", self.folder)

    def replanned(self, placed: Placement) -> None:
        self._spans.clear()
        self._shown |= {"machines": _machines(placed), "flow": None}

    def news(self, closing: threading.Event) -> Iterator[bytes]:
        return news_of(self.folder, self._shown, closing)

    def act(self, action: str) -> str | None:
        with self._changed:
            if self._stops:
                return "the run stops already"
            if action == "checkpoint" and self._step == 0:
                return "there is nothing to save before the first step"
            self._saves |= action == "checkpoint"
            self._pauses = action == "pause" or (self._pauses and action == "checkpoint")
            if action == "stop":
                self._stops = True
                self._run.stop("the page")
            self._show()
            self._changed.notify_all()
        return None

    def between(self, state: TrainState, due: Due) -> None:
        with self._changed:
            if self._is_saving:
                self._note(
                    "No checkpoint is written here: the log says why, or another island saves."
                )
            self._is_saving, self._saves, self._waits = self._saves, False, self._pauses
            due.save |= self._is_saving
            self._show()
            if self._pauses and not self._is_saving:
                self._changed.wait(0.2)  # the caller looks for signals
            due.is_held = self._pauses

    def saved(self, state: TrainState, due: Due) -> None:
        self._is_saving = False
        self._show()
        self._note(f"The checkpoint of step {state.step} is written.")

    def step_end(self, state: TrainState, line: Mapping[str, Any], due: Due) -> None:
        self._step = state.step
        # A worker's spans of a step come with its next answer.
        for step in [step for step in self._spans if step + 2 <= state.step]:
            self._shown["flow"] = {"step": step + 1, "spans": self._spans.pop(step)}

    def went_back(self, state: TrainState) -> None:
        self._step = state.step
        self._spans.clear()

    def spans(self, owner: int | str, spans: Sequence[Span], offset_s: float) -> None:
        for span in filter(is_span, spans):
            if (kind := span["kind"]) in (*COMPUTE, COMMIT, SEND):
                times = span["began"] - offset_s, span["ended"] - offset_s
                about = span["micro_batch"], span.get("peer"), span.get("bytes", 0)
                kept = self._spans.setdefault(span["step"], [])
                kept += [[owner, kind, *times, *about]] * (len(kept) < _MOST_SPANS)

    def close(self, failed: bool) -> None:
        ends = "failed" if failed else "finished"
        with self._changed:
            self._stops = True
            self._shown["state"] = "stopped" if failed and self._run.should_stop() else ends

    def _note(self, text: str) -> None:
        """Show a note once; the same text may come again."""
        self._shown |= {"note": text, "noted": self._shown["noted"] + 1}

    def _show(self) -> None:
        held = ("paused" if self._waits else "pausing") if self._pauses else "running"
        saving = "saving" if self._saves or self._is_saving else held
        self._shown["state"] = "stopping" if self._stops else saving


def _machines(placed: Placement) -> list[dict[str, Any]]:
    """The processes with their layers and devices, in the order of their first stages."""
    config, found = placed.prepared.config, dict[str | int, dict[str, Any]]()
    for stage, memory in zip(config.plan.stages, placed.prepared.memory, strict=True):
        fact, host = placed.facts[stage.owner], config.machine(stage.owner).hostname
        machine = found.setdefault(stage.owner, {"owner": stage.owner, "layers": []})
        machine |= {"host": host, "device": fact.label, "memory": fact.memory_total}
        machine["layers"].append(stage.layers)
        machine["planned"] = machine.get("planned", 0) + memory.total
    return list(found.values())
