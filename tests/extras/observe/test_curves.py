"""The curves of runs: read from metrics.jsonl, every point and every text within the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hetero_framework import cli
from hetero_framework.errors import UserError
from hetero_framework.extras.observe.curves import figure, read_run

LONG = "llama-3.1-8b-instruct-qlora-nf4-r16-alpha32-dropout0.05-lr2e-4-cosine-two-cards-and-a-mac-"


def save_run(place: Path, losses: list[float | None], every: int = 0) -> Path:
    """Metrics of a run, evaluated after `every` steps, with a last line cut off by a crash."""
    lines: list[dict[str, Any]] = []
    for step, loss in enumerate(losses, 1):
        norm = None if loss is None else 2 * loss
        lines.append({"step": step, "loss": loss, "learning_rate": 1e-4, "grad_norm": norm})
        if every and step % every == 0:
            lines.append({"step": step, "eval_loss": loss, "eval_perplexity": 1.0})
    place.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (place / "metrics.jsonl").write_text(text + '{"step": 7, "lo', encoding="utf-8")
    return place


def drawn(*places: Path) -> Any:
    made = figure([read_run(place, place.name) for place in places])
    FigureCanvasAgg(made).draw()  # which puts everything in its place
    return made


def test_a_runs_figures_are_its_curves(tmp_path):
    made = drawn(save_run(tmp_path / "run", [3.0, 2.0, None, 1.0], every=2))
    lines = [line.get_xydata().tolist() for axes in made.axes for line in axes.get_lines()]
    nan = pytest.approx(float("nan"), nan_ok=True)
    assert lines == [
        [[1, 3], [2, 2], [3, nan], [4, 1]],
        [[2, 2], [4, 1]],
        [[1, 1e-4], [2, 1e-4], [3, 1e-4], [4, 1e-4]],
        [[1, 6], [2, 4], [3, nan], [4, 2]],
    ]
    assert made.axes[0]._left_title.get_text() == (
        "4 steps, last loss 1, last evaluation 1, 1 loss not finite"
    )


@pytest.mark.parametrize(
    "runs",
    [
        [(["run"], [2.0], 0)],
        [(["run"], [None] * 3, 0)],
        [(["r" * 200], [5.0 - 1e-4 * k for k in range(2000)], 100)],
        [([LONG, end], [float(k) for k in range(1, 300)], 50) for end in "abc"],
    ],
    ids=["one step", "no loss", "long", "three runs"],
)
def test_every_text_is_within_the_picture(runs, tmp_path):
    made = drawn(*(save_run(tmp_path / "".join(name), *of) for name, *of in runs))
    box, (width, height) = made.get_tightbbox(made.canvas.get_renderer()), made.get_size_inches()
    assert 0 <= box.x0 <= box.x1 <= width
    assert 0 <= box.y0 <= box.y1 <= height
    assert width < 20
    labels = [axes.get_ylabel() for axes in made.axes]
    assert labels == ["loss", "learning rate", "gradient norm"]
    assert {axes.get_xlabel() for axes in made.axes} == {"step"}
    named = [text.get_text() for legend in made.legends for text in legend.get_texts()]
    assert [name.partition(":")[0][-1] for name in named] == list("abc" if len(runs) > 1 else "")


def test_a_long_curve_keeps_its_peaks(tmp_path):
    losses: list[float | None] = [1.0] * 10_000
    losses[1234], losses[5000:5100] = 40.0, [None] * 100
    axes = drawn(save_run(tmp_path / "run", losses)).axes[0]
    values = axes.get_lines()[0].get_ydata()
    assert len(values) == 500
    assert np.isnan(values).sum() == 5
    assert axes.collections[0].get_datalim(axes.transData).y1 == 40.0


def test_values_over_several_decades_are_drawn_by_their_logarithm(tmp_path):
    made = drawn(save_run(tmp_path / "run", [1e-3, 1.0, 10.0]))
    assert [axes.get_yscale() for axes in made.axes] == ["log", "linear", "log"]
    assert "1" in [text.get_text() for text in made.axes[0].get_yticklabels()]  # not $10^{0}$


def test_plot_draws_one_run_beside_it_and_several_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path / "a", [2.0, 1.0])
    save_run(tmp_path / "b", [2.0], every=1)
    assert cli.main(["plot", "a"]) == 0
    assert cli.main(["plot", "a", "b/metrics.jsonl"]) == 0
    assert cli.main(["plot", "a", "--output", "x.svg"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"drawn: {Path('a', 'curves.png')}", "drawn: curves.png", "drawn: x.svg",
    ]  # fmt: skip
    assert (tmp_path / "a" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "evaluation" not in (tmp_path / "x.svg").read_text()


def test_wrong_runs_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"there is no metrics\.jsonl in "):
        read_run(tmp_path, "x")
    for text, said in (("", "holds no step yet"), ("{\n", "cannot read"), ("[1]\n", "cannot read")):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(UserError, match=f"metrics.jsonl.*{said}|{said}.*metrics.jsonl"):
            read_run(tmp_path, "x")


def test_plot_does_not_import_torch(tmp_path):
    save_run(tmp_path / "run", [1.0])
    code = (
        "import sys; from hetero_framework import cli\n"
        f"assert cli.main(['plot', {str(tmp_path / 'run')!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_what_an_objective_measures_has_panels_of_its_own(tmp_path):
    told = {"rewards/accuracies": 0.5, "rewards/margins": 0.1, "rewards/chosen": 0.2, "logps/x": 3}
    places = []
    for name, measured in (("dpo", told), ("labels", {"accuracy": 0.75}), ("plain", {})):
        place = save_run(tmp_path / name, [3.0, 2.0])
        lines: list[dict[str, Any]] = [{"step": n, "loss": 1.0, **measured} for n in (1, 2)]
        eval_of = {f"eval_math_{key}": value for key, value in measured.items()}
        lines.append({"step": 2, "sets": ["math"], "eval_math_loss": 1.0, **eval_of})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (place / "metrics.jsonl").write_text(text)
        places.append(place)
    alone = drawn(places[0])
    assert [axes.get_ylabel() for axes in alone.axes][3:] == ["accuracy", "reward"]
    named = [[text.get_text() for text in axes.get_legend().texts] for axes in alone.axes[3:]]
    assert named[0] == ["accuracies", "evaluation math accuracies"]
    assert set(named[1]) >= {"margins", "chosen", "evaluation math chosen"}
    (labels,) = drawn(places[1]).axes[3:]
    assert labels.get_lines()[0].get_ydata().tolist() == [0.75, 0.75]
    assert len(drawn(places[2]).axes) == 3
    both = drawn(*places)
    assert [axes.get_ylabel() for axes in both.axes][3:] == ["accuracy", "margin"]
