"""Observers of a run that draw it: its timeline, the diagram of its machines, and its curves."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hetero_framework.core.spans import ALL_STEPS, Span, is_span
from hetero_framework.errors import HeteroError, ProtocolError
from hetero_framework.extras.observe import curves
from hetero_framework.extras.observe.curves import CURVES_FILE
from hetero_framework.extras.observe.diagram import DiagramDetails
from hetero_framework.extras.observe.diagram_figure import draw
from hetero_framework.extras.observe.trace_file import TIMELINE_FILE, Timeline
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.trainer.observers import Due, Observer, Placement, RunStart, Watched
from hetero_framework.trainer.outputs import command
from hetero_framework.trainer.train_state import TrainState

_log = logging.getLogger(__name__)


class TimelineFile(Observer):
    """Writes timeline.json, with the steps of one plan."""

    def __init__(self, run: Watched) -> None:
        config, facts = run.placed.prepared.config, run.placed.facts
        labels = {owner: fact.label for owner, fact in facts.items()}
        self._output, self._count = config.output_dir, config.training.timeline_steps
        self._steps: list[int] = []  # the steps in the file
        self._timeline = Timeline(config, devices=labels)

    def replanned(self, placed: Placement) -> None:
        self._timeline.close()

    def spans(self, owner: int | str, spans: Sequence[Span], offset_s: float) -> None:
        if not all(map(is_span, spans)):
            text = f"worker {owner}: COMMITTED holds what is not a span"
            raise ProtocolError(text)
        if self._count != ALL_STEPS:  # a run page has further steps recorded
            self._steps = sorted({*self._steps, *(s["step"] for s in spans)})[: self._count]
            spans = [span for span in spans if span["step"] in self._steps]
        self._timeline.add(owner, spans, offset_s)

    def exported(self, state: TrainState) -> None:
        self._timeline.close()

    def leaves(self) -> Mapping[str, str | Path]:
        file = self._output / TIMELINE_FILE
        advice = command("hetero", "timeline", self._output)
        return {"timeline": file, **({"where time went": advice} if file.exists() else {})}

    def close(self, failed: bool) -> None:
        try:
            self._timeline.close()
        except ProtocolError:
            if not failed:
                raise


class RunPictures(Observer):
    """Draws the machines under each plan, and curves.png at the end."""

    def __init__(self, run: Watched) -> None:
        self._config = run.placed.prepared.config
        form = self._config.training.visualization_format
        self._diagram = self._config.output_dir / f"architecture.{form}"

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        self._draw_diagram(run.placed)

    def replanned(self, placed: Placement) -> None:
        self._draw_diagram(placed)

    def exported(self, state: TrainState) -> None:
        output = self._config.output_dir
        with _optional("the curves are"):
            curves.draw([curves.read_run(output, output.name)], output / CURVES_FILE)

    def leaves(self) -> Mapping[str, str | Path]:
        output = self._config.output_dir
        return {"diagram": self._diagram, "curves": output / CURVES_FILE}

    def _draw_diagram(self, placed: Placement) -> None:
        """Draw the machines as a file in the output directory."""
        prepared = placed.prepared
        config, model = prepared.config, prepared.config.model
        assert model is not None
        details = DiagramDetails(
            model=model.source or prepared.model_config.model_type,
            num_layers=introspect(prepared.model_config).num_layers,
            parameters={m.index: m.parameters for m in prepared.memory},
            memory_bytes={m.index: m.total for m in prepared.memory},
            devices={owner: fact.label for owner, fact in placed.facts.items()},
            direct=placed.direct,
        )
        with _optional("the diagram of the machines is"):
            draw(config, self._diagram, details=details)


@contextmanager
def _optional(what: str) -> Iterator[None]:
    """Within the block, a failed picture is logged and ends no run."""
    try:
        yield
    except (HeteroError, ImportError, OSError, RuntimeError, ValueError) as error:
        _log.warning("%s not drawn: %s", what, getattr(error, "message", error))
