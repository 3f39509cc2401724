"""The curves of runs by step: losses, learning rate, gradient norm, and the objective's measures.

Read from metrics.jsonl, drawn by matplotlib.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_framework.extras.observe.pictures import FAINT, GRID, INK, PAPER, save, text_pt
from hetero_framework.trainer.read_metrics import MEASURES, Points, loss_of, read_curves
from hetero_framework.units import plural

CURVES_FILE = "curves.png"
_PANELS = {"loss": "loss", "learning_rate": "learning rate", "grad_norm": "gradient norm"}
# Okabe and Ito's colours, which people with any common colour blindness tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
_EVALUATION: dict[str, Any] = {"linestyle": "--", "marker": "o", "markersize": 4}
_WIDTH_PT, _HEIGHT_PT, _NAME = 760.0, 520.0, 90
_MARKED = 40  # most points of a curve whose points are marked
_DRAWN = 500  # most points drawn; a longer curve is drawn as means within least and greatest values
_LOGARITHMIC = 100.0  # greatest over least value, above which the scale is logarithmic


@dataclass(frozen=True)
class Run:
    """A run's name, and its curves by their names in metrics.jsonl."""

    name: str
    curves: Mapping[str, Points]

    @property
    def summary(self) -> str:
        """The number of steps, the last loss and the last evaluations, as text."""
        losses = self.curves.get("loss", ([], []))[1]
        parts = [plural(len(losses), "step")]
        for key, what in {"loss": "loss", **self.evaluations}.items():
            if values := self.curves.get(key, ([], []))[1]:
                parts.append(f"last {what} {values[-1]:.4g}")
        if unknown := sum(map(math.isnan, losses)):
            parts.append(f"{plural(unknown, 'loss')} not finite")
        return ", ".join(parts)

    @property
    def evaluations(self) -> dict[str, str]:
        """Names of the curves of evaluation losses, and their titles."""
        return {
            key: f"evaluation {key[len('eval_') : -len('_loss')]}"
            if key != loss_of()
            else "evaluation"
            for key in self.curves
            if key.startswith("eval_") and key.endswith("_loss")
        }

    def measures(self, panel: str) -> dict[str, str]:
        """Names of the curves in a panel of MEASURES, and their titles."""
        found = {}
        for key in self.curves:
            match = re.fullmatch(rf"(eval_(?:.*_)?)?({MEASURES[panel].pattern})", key)
            if match is not None:
                of_set = (match[1] or "").replace("eval_", "evaluation ").replace("_", " ")
                found[key] = of_set + match[2].removeprefix("rewards/").replace("_", " ")
        return found


def read_run(place: Path, name: str) -> Run:
    """The curves of an `output_dir` or a metrics.jsonl. Raises UserError where there are none."""
    return Run(name, read_curves(place))


def draw(runs: Sequence[Run], path: Path) -> Path:
    """Write `figure` as `pictures.save` does."""
    return save(lambda: figure(runs), path)


def figure(runs: Sequence[Run]) -> Any:
    """The curves of one run, or of several to be compared, as a matplotlib Figure."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    is_one = len(runs) == 1
    # The ends of long paths tell them apart.
    names = [run.name if len(run.name) <= _NAME else f"...{run.name[-_NAME:]}" for run in runs]
    labels = [f"{name}: {run.summary}" for name, run in zip(names, runs, strict=True)]
    title = names[0] if is_one else f"{len(runs)} runs"
    widths = [90 + text_pt(text, 9) for text in labels]
    width = max(_WIDTH_PT, 32 + text_pt(title, 14, bold=True), *widths)
    more = [panel for panel in MEASURES if any(run.measures(panel) for run in runs)]
    height = _HEIGHT_PT * (1.4 if more else 1.0) + (0 if is_one else 16 * len(runs))
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
    drawn = Figure(figsize=(width / 72, height / 72), facecolor=PAPER, layout=layout)
    rows = ["AA", "BC", *(["DE"[: len(more)] * (3 - len(more))] if more else [])]
    places = drawn.subplot_mosaic(";".join(rows), height_ratios=(3, 2, 2)[: len(rows)])
    for axes, key in zip(places.values(), (*_PANELS, *more), strict=True):
        _draw_panel(axes, runs, key)
    drawn.suptitle(title, x=0.015, ha="left", fontsize=14, weight="bold", color=INK)
    look: dict[str, Any] = {"frameon": False, "labelcolor": INK}
    if is_one:
        places["A"].set_title(runs[0].summary, loc="left", fontsize=10.5, color=FAINT)
    else:
        colors = (Line2D([], [], color=_COLOURS[k % len(_COLOURS)]) for k in range(len(runs)))
        drawn.legend(list(colors), labels, loc="outside lower left", fontsize=9, **look)
    if told := list(dict.fromkeys(name for run in runs for name in run.evaluations.values())):
        shades = [_COLOURS[k % len(_COLOURS)] if is_one else FAINT for k in range(1 + len(told))]
        kinds = [Line2D([], [], color=shades[0])]
        kinds += [Line2D([], [], color=shade, **_EVALUATION) for shade in shades[1:]]
        places["A"].legend(kinds, ["training", *told], loc="upper right", **look)
    return drawn


def _draw_panel(axes: Any, runs: Sequence[Run], panel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(facecolor="none", xmargin=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.grid(color=GRID, linewidth=0.5)
    axes.tick_params(length=0, labelsize=9, labelcolor=FAINT)
    axes.set_xlabel("step", fontsize=9.5, color=FAINT)
    label = "margin" if panel == "reward" and len(runs) > 1 else panel
    axes.set_ylabel(_PANELS.get(panel, label), fontsize=9.5, color=FAINT)
    axes.xaxis.set_major_locator(
        MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )
    finite: list[float] = []
    is_one, names = len(runs) == 1, {panel: ""}
    for number, run in enumerate(runs):
        if panel in MEASURES:  # colours tell several runs apart, so there is one measure of each
            found = run.measures(panel).items()
            names = {k: v for k, v in found if is_one or re.search("accurac|margin", k)}
        shown = {**names, **run.evaluations} if panel == "loss" else names
        whats = list(dict.fromkeys(name.removeprefix("evaluation ") for name in shown.values()))
        for key, name in shown.items():
            steps, values = run.curves.get(key, ([], []))
            finite += filter(math.isfinite, values)
            other = whats.index(name.removeprefix("evaluation ")) if is_one else 0
            look = _EVALUATION if key.startswith("eval_") else {}
            _draw_curve(axes, steps, values, _COLOURS[(number + other) % len(_COLOURS)], look)
    if panel in MEASURES and is_one:
        above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3}
        look = {"frameon": False, "labelcolor": INK, "fontsize": 8.5, **above}
        axes.legend(axes.get_lines(), names.values(), **look)
    if not finite:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=FAINT)
    elif min(finite) > 0 and max(finite) > _LOGARITHMIC * min(finite) and panel != "learning_rate":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()


def _draw_curve(
    axes: Any, steps: Sequence[int], values: Sequence[float], color: str, look: Mapping[str, Any]
) -> None:
    import numpy as np

    x, y = np.array(steps, float), np.array(values, float)
    if len(x) > _DRAWN:
        parts = np.array_split(np.arange(len(x)), _DRAWN)
        x = np.array([x[part].mean() for part in parts])
        finite = [y[part][np.isfinite(y[part])] for part in parts]
        rows = [(v.min(), v.mean(), v.max()) if v.size else (math.nan,) * 3 for v in finite]
        low, y, high = np.array(rows).T
        axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    marked = {"marker": "o", "markersize": 4} if len(x) <= _MARKED else {}
    axes.plot(x, y, color=color, linewidth=1.4, **{**marked, **look})
