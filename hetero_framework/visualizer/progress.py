"""The progress display of a run.

A live display when the output is a terminal, one plain line per logged step otherwise. Nothing
here may end a run: when the output goes away (a closed pipe, a closed terminal) the display falls
silent. No thread is started; the display is redrawn when something is reported.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hetero_framework.config import layers_text
from hetero_framework.log import printable
from hetero_framework.units import clock, share, size

REDRAW_INTERVAL_S = 0.1
_LEAST = 10
"""Columns of an owner's and a device's name, before a device is left out."""
RECENT_STEPS = 20  # the speed and the remaining time are means over so many steps


@dataclass(frozen=True)
class StageRow:
    """One line of the display: who runs which layers `[start, end)` on what."""

    owner: str
    start: int
    end: int
    device: str = ""

    @property
    def layers(self) -> str:
        return layers_text(self.start, self.end)


@dataclass
class _StageTotals:
    busy_s: float = 0.0
    busy_share: float = 0.0
    queue: int = 0
    peak_memory_bytes: int = 0


class Progress:
    """Shows a run.

    `metrics` of a step are those of metrics.jsonl: step, loss, grad_norm, learning_rate, tokens,
    tokens_per_second, step_seconds and stages, a list of mappings with index, busy_s, queue_peak,
    peak_memory, bytes_in and bytes_out. Whatever is absent is not shown. May be called from
    several threads.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._logging_steps = 1
        wants_live = _is_terminal(self._stream) if live is None else live
        self._is_live = wants_live and _is_unicode(self._stream)
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._silent = False
        self._redrawn_at = float("-inf")
        self._rows: list[StageRow] = []
        self._stages: list[_StageTotals] = []
        self._total_steps = 0
        self._resumed_step = 0
        self._step = 0
        self._first: Mapping[str, Any] | None = None
        self._last: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._num_steps = 0
        self._tokens = 0.0
        self._seconds = 0.0
        self._wire_bytes = 0

    def start(
        self,
        total_steps: int,
        stages: Sequence[StageRow] = (),
        resumed_step: int = 0,
        logging_steps: int = 1,
    ) -> None:
        """Begin; `resumed_step` is the last step that an earlier run completed.

        Without a terminal a line is printed every `logging_steps` steps, and at the end.
        """
        with self._lock:
            self._logging_steps = max(1, logging_steps)
            self._total_steps = total_steps
            self._resumed_step = self._step = resumed_step
            self._rows = list(stages)
            self._stages = [_StageTotals() for _ in stages]
            if resumed_step:
                self._print(f"resumed after step {resumed_step}")
            if self._is_live:
                self._guard(self._start_live)
            else:
                for index, row in enumerate(self._rows):
                    text = f"stage {index}: {row.owner}, {row.layers}"
                    self._print(f"{text}, {row.device}" if row.device else text)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Report one finished step."""
        with self._lock:
            self._account(metrics)
            if self._live is not None:
                self._redraw()
            elif not self._is_live and self._is_logged(self._step):
                self._print(self._step_line())

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Report one evaluation (step, eval_loss, eval_perplexity)."""
        with self._lock:
            self._evaluation = metrics
            texts = [f"step {metrics.get('step', self._step)}: evaluation"]
            for key, label in (("eval_loss", "loss"), ("eval_perplexity", "perplexity")):
                if key in metrics:
                    texts.append(f"{label} {_number(metrics[key])}")
            self._print("  ".join(texts))

    def message(self, text: str) -> None:
        """Print `text`, above the live display if there is one."""
        with self._lock:
            self._print(text)

    def close(self, summary: Mapping[str, str | os.PathLike[str]] | None = None) -> None:
        """End the display and print the summary; `summary` adds lines (label: path or text).

        Safe to call twice; the second call does nothing unless it brings a summary.
        """
        with self._lock:
            if self._live is not None:
                self._guard(self._live.stop)
                self._live = None
            self._is_live = False
            if summary is None:
                return
            lines = self._summary_lines()
            lines += [(label, _path_text(value)) for label, value in summary.items()]
            width = max(len(label) for label, _ in lines) + 2 if lines else 0
            self._print("\n".join(["", *(f"{label:<{width}}{text}" for label, text in lines)]))

    def _account(self, metrics: Mapping[str, Any]) -> None:
        self._step = int(metrics.get("step", self._step + 1))
        self._num_steps += 1
        self._last = metrics
        if self._first is None:
            self._first = metrics
        seconds = float(metrics.get("step_seconds") or 0.0)
        tokens = float(metrics.get("tokens") or 0.0)
        self._recent.append((seconds, tokens))
        self._seconds += seconds
        self._tokens += tokens
        for stage in metrics.get("stages") or ():
            for key in ("bytes_in", "bytes_out", "direct_bytes_out"):
                self._wire_bytes += int(stage.get(key) or 0)
            index = stage.get("index", -1)
            if not 0 <= index < len(self._stages):
                continue
            totals = self._stages[index]
            busy_s = float(stage.get("busy_s") or 0.0)
            totals.busy_s += busy_s
            totals.busy_share = busy_s / seconds if seconds else 0.0
            totals.queue = int(stage.get("queue_peak") or 0)
            totals.peak_memory_bytes = int(stage.get("peak_memory") or 0)

    def _is_logged(self, step: int) -> bool:
        first = self._num_steps == 1
        return first or step % self._logging_steps == 0 or step == self._total_steps

    def _step_line(self) -> str:
        return f"step {self._step}/{self._total_steps}  " + "  ".join(self._facts())

    def _facts(self) -> list[str]:
        """The numbers of the last step, the most important first."""
        last = self._last
        facts = []
        if "loss" in last:
            facts.append(f"loss {_number(last['loss'])}")
        if last.get("skipped"):
            facts.append("skipped")
        if self._speed() is not None:
            facts.append(f"{self._speed():,.0f} tokens/s")
        if self._remaining_s() is not None:
            facts.append(f"ETA {clock(self._remaining_s() or 0.0)}")
        if "grad_norm" in last:
            facts.append(f"grad_norm {_number(last['grad_norm'])}")
        if last.get("learning_rate") is not None:
            facts.append(f"lr {last['learning_rate']:.3g}")
        if last.get("step_seconds"):
            facts.append(f"{last['step_seconds']:.3g} s/step")
        return facts

    def _speed(self) -> float | None:
        seconds = sum(seconds for seconds, _ in self._recent)
        tokens = sum(tokens for _, tokens in self._recent)
        if seconds and tokens:
            return tokens / seconds
        return self._last.get("tokens_per_second")

    def _remaining_s(self) -> float | None:
        if not self._recent or self._total_steps < self._step:
            return None
        mean_s = sum(seconds for seconds, _ in self._recent) / len(self._recent)
        return mean_s * (self._total_steps - self._step)

    def _start_live(self) -> None:
        console = _Console(file=self._stream, force_terminal=True, highlight=False)
        self._live = Live(
            console=console,
            auto_refresh=False,
            get_renderable=self._render,
            vertical_overflow="ellipsis",
        )
        self._live.start(refresh=True)

    def _redraw(self) -> None:
        now = time.monotonic()
        if now - self._redrawn_at >= REDRAW_INTERVAL_S or self._step >= self._total_steps:
            self._redrawn_at = now
            live = self._live
            assert live is not None
            self._guard(live.refresh)

    def _render(self) -> Group:
        live = self._live
        width = live.console.width if live is not None else 80
        head = Text(f"step {self._step}/{self._total_steps}", style="bold")
        for fact in self._facts():
            if head.cell_len + 2 + len(fact) > width:
                break
            head.append("  ").append(fact, style="bold green" if fact[:4] == "loss" else "default")
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(
            ProgressBar(
                total=max(1, self._total_steps),
                completed=self._step,
                width=width - 1,
                complete_style="cyan",
                finished_style="green",
            )
        )
        parts: list[Any] = [head, bar]
        if self._evaluation.get("eval_loss") is not None:
            step, loss = self._evaluation.get("step"), self._evaluation["eval_loss"]
            parts.append(Text(f"evaluation at step {step}: loss {_number(loss)}", no_wrap=True))
        if self._rows:
            parts.append(self._stage_table(width))
        return Group(*parts)

    def _stage_table(self, width: int) -> Table:
        """One line per stage. Where the terminal is narrow the device's name gives way first."""
        cells = {
            "stage": [str(index) for index in range(len(self._rows))],
            "owner": [row.owner for row in self._rows],
            "layers": [
                row.layers.removeprefix("layers ").removeprefix("layer ") for row in self._rows
            ],
            "device": [row.device for row in self._rows],
            "busy": [share(totals.busy_share) for totals in self._stages],
            "queue": [str(totals.queue) for totals in self._stages],
            "memory": [
                size(totals.peak_memory_bytes) if totals.peak_memory_bytes else ""
                for totals in self._stages
            ],
        }
        cells = {name: [printable(cell) for cell in own] for name, own in cells.items()}
        widths = {name: max(map(cell_len, (name, *own))) for name, own in cells.items()}
        whole, widths["owner"] = widths["owner"], min(widths["owner"], max(_LEAST, width // 3))

        def spare() -> int:
            return width - 1 - sum(widths.values()) - 2 * (len(widths) - 1)

        for name in ("device", "queue", "layers", "memory"):
            if spare() < 0 and name == "device" and widths[name] + spare() >= _LEAST:
                widths[name] += spare()
            elif spare() < 0:
                del widths[name]
        widths["owner"] = max(1, min(whole, widths["owner"] + spare()))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name, wide in widths.items():
            right = name in ("stage", "busy", "queue", "memory")
            justify = "right" if right else "left"
            table.add_column(name, justify=justify, no_wrap=True, width=wide)  # type: ignore[arg-type]
        for index in range(len(self._rows)):
            table.add_row(*(Text(cells[name][index]) for name in widths))
        return table

    def _summary_lines(self) -> list[tuple[str, str]]:
        if self._first is None:
            return [("steps", f"none of {self._total_steps} run here")]
        first, last = self._first, self._last
        lines = [("steps", f"{first.get('step', 1)} to {self._step} of {self._total_steps}")]
        if "loss" in first:
            lines.append(("loss", f"{_number(first['loss'])} -> {_number(last.get('loss'))}"))
        if self._evaluation.get("eval_loss") is not None:
            step, loss = self._evaluation.get("step"), self._evaluation["eval_loss"]
            lines.append(("evaluation loss", f"{_number(loss)} after step {step}"))
        if self._seconds:
            lines.append(("time in steps", clock(self._seconds)))
            if self._tokens:
                lines.append(("speed", f"{self._tokens / self._seconds:,.0f} tokens/s"))
        if self._wire_bytes:
            per_step = self._wire_bytes / self._num_steps
            lines.append(("on the wire", f"{size(per_step)} per step"))
        for index, (row, totals) in enumerate(zip(self._rows, self._stages, strict=True)):
            busy = totals.busy_s / self._seconds if self._seconds else 0.0
            text = f"busy {share(busy)}  {row.owner}, {row.layers}"
            lines.append((f"stage {index}", f"{text}, {row.device}" if row.device else text))
        return lines

    def _print(self, text: str) -> None:
        plain = printable(text)
        if self._live is not None:
            live = self._live
            self._guard(
                lambda: live.console.print(Text(_encodable(plain, self._stream)), soft_wrap=True)
            )
        else:
            self._guard(lambda: self._write(_encodable(plain, self._stream) + "\n"))

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _guard(self, write: Any) -> None:
        """Call `write`; fall silent for good when the output is closed."""
        if self._silent:
            return
        try:
            write()
        except (OSError, ValueError):  # ValueError: I/O operation on closed file
            self._silent = True
            self._live = None


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process here; a display that goes away must not end a run."""
        raise BrokenPipeError


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _is_unicode(stream: TextIO) -> bool:
    """Whether bars and ellipses can be written; other terminals get plain lines."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _number(value: Any) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _path_text(value: str | os.PathLike[str]) -> str:
    return value if isinstance(value, str) else str(Path(value))
