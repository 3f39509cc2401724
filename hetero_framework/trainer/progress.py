"""The progress of a run: a live display on a terminal, else one plain line per logged step.

Nothing here may end a run: when the output goes away (a closed pipe, a closed terminal) the display
falls silent. No thread is started; the display is redrawn when something is reported.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hetero_framework import registry
from hetero_framework.config import EVALUATED, layers_text, process_name
from hetero_framework.log import printable
from hetero_framework.units import clock, share, size

_REDRAW_INTERVAL_S = 0.1
_RECENT_STEPS = 20  # speed and remaining time are means over these


@dataclass
class StageRow:
    """One line of the display: layers `[start, end)` with their process and device."""

    owner: str
    start: int
    end: int
    device: str = ""
    away: str | None = field(default=None, init=False)
    busy_s: float = field(default=0.0, init=False)
    last: Mapping[str, Any] = field(default_factory=dict, init=False)

    def __str__(self) -> str:
        parts = (self.owner, layers_text(self.start, self.end), self.device)
        return ", ".join(filter(None, parts))

    def state(self, step_s: float | None) -> str:
        """Busy share and peak memory of the last step, or the reason why the process is away."""
        busy = share(self.last.get("busy_s", 0.0) / step_s if step_s else 0.0)
        peak = self.last.get("peak_memory")
        return self.away or f"busy {busy:>4}" + (f"  {size(peak):>8}" if peak else "")


class Progress:
    """Shows a run. `metrics` is a line of metrics.jsonl; what the line lacks is not shown. May be
    called from several threads."""

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self.has_terminal = _is_terminal(self._stream)
        wants_live = self.has_terminal if live is None else live
        # Without UTF a terminal cannot show bars and ellipses, so it gets plain lines.
        self._is_live = wants_live and self._encoding.lower().startswith("utf")
        self._console = _Console(
            file=self._stream,
            force_terminal=self._is_live,
            force_jupyter=False,
            highlight=False,
            emoji=False,
        )
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._silent = False
        self._redrawn_at = float("-inf")
        self._stages: list[StageRow] = []
        self._logging_steps, self._unit = 1, "tokens"
        self._measures: Sequence[str] = ()
        self._total_steps = self._step = self._num_steps = 0
        self._first: Mapping[str, Any] = {}
        self._last: Mapping[str, Any] = {}
        self._evaluations: dict[str, str] = {}  # by set
        # Of each recent step: the step before it, its seconds and its tokens.
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_RECENT_STEPS)
        self._tokens = self._seconds = 0.0
        self._wire_bytes = self._between = 0  # bytes within this star, and to other islands

    def start(
        self,
        total_steps: int,
        stages: Sequence[StageRow] = (),
        resumed_step: int = 0,
        logging_steps: int = 1,
        unit: str = "tokens",
        measures: Sequence[str] = (),
    ) -> None:
        """Begin the display; `resumed_step` is the last step that an earlier run completed. Without
        a terminal a line is printed every `logging_steps` steps and at the end. It shows the speed
        in `unit`s, and the metrics that `measures` names."""
        with self._lock:
            self._unit, self._measures = unit, measures
            self._logging_steps = max(1, logging_steps)
            self._total_steps, self._step = total_steps, resumed_step
            if resumed_step:
                self._print(f"resumed after step {resumed_step}")
            self.replanned(stages)
            if self._is_live:
                self._guard(self._start_live)

    def replanned(self, stages: Sequence[StageRow]) -> None:
        """Show these stages from now on."""
        with self._lock:
            self._stages = [replace(row) for row in stages]
            for index, row in enumerate([] if self._is_live else self._stages):
                self._print(f"stage {index}: {row}")

    def away(self, worker: int | str, state: str | None) -> None:
        """Show at its stages the `state` of a worker that is waited for ("away 0:02:10"); None:
        the worker is back. The code that waits logs the wait."""
        with self._lock:
            rows = [row for row in self._stages if row.owner == process_name(worker)]
            for row in rows:
                row.away = state
            if rows and self._live is not None:
                self._guard(self._live.refresh)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Report one finished step."""
        with self._lock:
            before = self._step
            self._account(metrics)
            is_last = self._step >= self._total_steps
            # With islands a step may count for several.
            is_logged = self._step // self._logging_steps > before // self._logging_steps
            if self._live is not None:
                if is_last or time.monotonic() - self._redrawn_at >= _REDRAW_INTERVAL_S:
                    self._redrawn_at = time.monotonic()
                    self._guard(self._live.refresh)
            elif self._num_steps == 1 or is_logged or is_last:
                self._logged()

    def _logged(self) -> None:
        """Show the last step."""
        self._print("  ".join((*self._facts(), *self._measured())))

    def evaluation(self, metrics: Mapping[str, Any], name: str = "") -> None:
        """Report the evaluation (step, eval_loss, eval_perplexity) of the set of this name."""
        with self._lock:
            step, loss = metrics["step"], _number(metrics["eval_loss"])
            self._evaluations[name] = f"{name} {loss} after step {step}".lstrip()
            self._evaluated(metrics, name)

    def _evaluated(self, metrics: Mapping[str, Any], name: str) -> None:
        """Show an evaluation."""
        what = f"evaluation {name}".rstrip()
        line = f"step {metrics['step']}: {what}  loss {_number(metrics['eval_loss'])}"
        if (perplexity := metrics.get("eval_perplexity")) is not None:
            line += f"  perplexity {_number(perplexity)}"
        if (accuracy := metrics.get("eval_mean_token_accuracy")) is not None:
            line += f"  token accuracy {accuracy:.4f}"
        self._print(line + "".join(f"  {key} {value:.4g}" for key, value in computed(metrics)))

    def message(self, text: str) -> None:
        """Print `text`, above the live display if there is one."""
        with self._lock:
            self._print(text)

    def close(self, summary: Mapping[str, str | os.PathLike[str]] | None = None) -> None:
        """End the display and print the summary, to which `summary` adds lines (label: path or
        text); None: print nothing. Safe to call twice."""
        with self._lock:
            if self._live is not None:
                self._guard(self._live.stop)
                self._live = None
            if summary is None:
                return
            lines = [*self._summary_lines(), *((k, os.fspath(v)) for k, v in summary.items())]
            width = max(len(label) for label, _ in lines) + 2
            self._print("\n".join(["", *(f"{label:<{width}}{text}" for label, text in lines)]))

    def _account(self, metrics: Mapping[str, Any]) -> None:
        before, self._step = self._step, metrics["step"]
        self._num_steps += 1
        self._first, self._last = self._first or metrics, metrics
        seconds, tokens = metrics.get("step_seconds", 0.0), metrics.get("tokens", 0)
        self._recent.append((before, seconds, tokens))
        self._seconds += seconds
        self._tokens += tokens
        island = metrics.get("island", {})
        self._between += island.get("bytes_in", 0) + island.get("bytes_out", 0)
        for row, stage in zip(self._stages, metrics.get("stages", ()), strict=False):
            for key in ("bytes_in", "bytes_out", "direct_bytes_out"):
                self._wire_bytes += stage.get(key, 0)
            row.busy_s += stage.get("busy_s", 0.0)
            row.last = stage

    def _facts(self) -> Iterator[str]:
        """The step and its numbers, the most important first."""
        last = self._last
        yield f"step {self._step}/{self._total_steps}"
        if "loss" in last:
            yield f"loss {_number(last['loss'])}"
        if "skipped" in last:
            yield f"skipped ({last['skipped']})"
        if self._recent:
            begun, seconds, tokens = zip(*self._recent, strict=True)
            if sum(seconds) and sum(tokens):
                yield f"{sum(tokens) / sum(seconds):,.0f} {self._unit}/s"
            left = max(0, self._total_steps - self._step)
            yield f"ETA {clock(left * sum(seconds) / max(1, self._step - begun[0]))}"
        if "grad_norm" in last:
            yield f"grad_norm {_number(last['grad_norm'])}"
        if last.get("learning_rate") is not None:
            yield f"lr {last['learning_rate']:.3g}"
        if last.get("step_seconds"):
            yield f"{last['step_seconds']:.3g} s/step"
        if "island" in last:
            yield f"islands {', '.join(last['island']['members'])}"

    def _measured(self) -> list[str]:
        found = ((name, self._last.get(name)) for name in self._measures)
        names = ((name.removeprefix("mean_").replace("_", " "), x) for name, x in found)
        return [f"{name} {value:.4f}" for name, value in names if value is not None]

    def _start_live(self) -> None:
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            get_renderable=self._render,
            vertical_overflow="ellipsis",
        )
        self._live.start(refresh=True)

    def _render(self) -> Group:
        """The numbers of the step, a bar, metrics, evaluations, and a line for each stage. A line
        that the terminal cannot hold ends with an ellipsis."""
        place, *facts = self._facts()
        shown = [Text(fact, "bold green" if fact[:4] == "loss" else "") for fact in facts]
        head = _line("  ").join([Text(place, "bold"), *shown])
        bar = Table.grid()  # a bar alone does not end its line
        total, width = max(1, self._total_steps), self._console.width - 1
        bar.add_row(ProgressBar(total, self._step, width, complete_style="cyan"))
        step_s = self._last.get("step_seconds")
        lines = ["  ".join(self._measured())] if self._measured() else []
        lines += [f"evaluation loss {told}" for told in self._evaluations.values()]
        lines += [f"stage {k}  {row.state(step_s)}  {row}" for k, row in enumerate(self._stages)]
        return Group(head, bar, *map(_line, lines))

    def _summary_lines(self) -> list[tuple[str, str]]:
        first, last = self._first, self._last
        if not first:
            return [("steps", f"none of {self._total_steps} run here")]
        lines = [("steps", f"{first['step']} to {self._step} of {self._total_steps}")]
        if "loss" in first:
            lines.append(("loss", f"{_number(first['loss'])} -> {_number(last['loss'])}"))
        lines += [("evaluation loss", told) for told in self._evaluations.values()]
        if self._seconds:
            lines.append(("time in steps", clock(self._seconds)))
            if self._tokens:
                lines.append(("speed", f"{self._tokens / self._seconds:,.0f} {self._unit}/s"))
        moved = {"between islands": self._between, "on the wire": self._wire_bytes}
        for label, nbytes in moved.items():
            if nbytes:
                lines.append((label, f"{size(nbytes / self._num_steps)} per step"))
        for index, row in enumerate(self._stages):
            busy = row.busy_s / self._seconds if self._seconds else 0.0
            lines.append((f"stage {index}", f"busy {share(busy)}  {row}"))
        return lines

    def _print(self, text: str) -> None:
        plain = printable(text).encode(self._encoding, "replace").decode(self._encoding)
        self._guard(lambda: self._console.print(Text(plain), soft_wrap=True))

    def _guard(self, write: Callable[[], object]) -> None:
        """Call `write`; fall silent for good when the output is closed."""
        if self._silent:
            return
        try:
            write()
        except (OSError, ValueError):  # ValueError: I/O operation on closed file
            self._silent = True
            self._live = None


def display() -> Progress:
    """A display for the place where this process runs: a terminal, a file, or a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel") and "notebook" in registry.installed("displays"):
        shown: Progress = registry.find("displays", "notebook")()
        return shown
    return Progress()


def computed(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The names and values of an evaluation's metrics that not every evaluation has."""
    for key, value in metrics.items():
        name = key.removeprefix("eval_")
        if name not in EVALUATED and key != name and type(value) in (int, float):
            yield name, value


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise an error instead of ending the process as rich does: the run must go on."""
        raise BrokenPipeError


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _line(text: str) -> Text:
    """A text that stays in one line."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
