"""The picture of a step shows every task at its place and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_framework.errors import UserError
from hetero_framework.extras.observe import pictures, timeline_picture
from hetero_framework.extras.observe.timeline_picture import (
    Bar,
    Row,
    StepPicture,
    color_of,
    draw,
    figure,
    ink_on,
    picture,
)
from tests.extras.observe.timeline_samples import record

TWO: dict[str, Any] = {
    "devices": [0, 1], "micro_batches": 3, "forward_s": [0.02, 0.02], "backward_s": [0.04, 0.04],
    "wire_s": 0.005, "update_s": 0.01,
}  # fmt: skip
EIGHT: dict[str, Any] = {
    "devices": [*range(8), *range(8)], "micro_batches": 32, "forward_s": [0.01] * 16,
    "backward_s": [0.02] * 16, "wire_s": 0.001,
}  # fmt: skip


ONE_BAR = StepPicture("t", "s", [Row("a", "stage 0", [Bar("forward", 0.0, 1.0, 0)])], 1.0)


def step_of(path: Path, settings: dict[str, Any]) -> StepPicture:
    return picture(record(path, settings, steps=[1, 2]), 1)


def texts(drawn: Any) -> list[str]:
    own = [text.get_text() for text in (*drawn.texts, *drawn.axes[0].texts)]
    return own + [text.get_text() for legend in drawn.legends for text in legend.get_texts()]


def boxes(drawn: Any, color: str) -> list[tuple[float, float]]:
    """(begin, end) in milliseconds of all bars of a colour."""
    found = []
    for bars in drawn.axes[0].collections:
        if _hex(bars) == color:
            for path in bars.get_paths():
                xs = path.vertices[:, 0]
                found.append((xs.min(), xs.max()))
    return sorted(found)


def _hex(bars: Any) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in bars.get_facecolor()[0][:3])


def test_every_task_is_at_its_time(tmp_path: Path) -> None:
    """Stage 0: F0 0-20, F1 20-40, F2 40-60 ms; stage 1 begins at 25 ms and does both in 60."""
    drawn = figure(step_of(tmp_path, TWO))
    forwards = boxes(drawn, color_of("forward", 0.0))
    for expected in ((0, 20), (20, 40), (40, 60), (25, 85), (85, 145), (20, 25)):
        assert any(box == pytest.approx(expected, abs=0.01) for box in forwards)
    backwards = boxes(drawn, color_of("backward", 0.0))
    for expected in ((25, 85), (90, 130), (150, 190), (85, 90)):
        assert any(box == pytest.approx(expected, abs=0.01) for box in backwards)
    waits = boxes(drawn, timeline_picture.PLAIN["activations"])
    assert [wait for wait in waits if wait[1] - wait[0] > 1] == [pytest.approx((0, 25), abs=0.01)]
    assert len(boxes(drawn, timeline_picture.PLAIN["update"])) == 2


def test_bound_and_ratio_are_of_this_step(tmp_path: Path) -> None:
    shown = step_of(tmp_path, TWO)
    assert any(text.startswith("bound ") for text in texts(figure(shown)))
    ratio = float(shown.subtitle.partition(" ms, ")[2].partition(" ")[0])
    assert ratio >= 1
    tasks = [bar.ended for row in shown.rows for bar in row.bars if bar.kind != "update"]
    assert ratio == pytest.approx(max(tasks) / shown.bound_s, abs=0.006)


def test_every_element_is_within_the_picture(tmp_path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    streaming = {**TWO, "copies": {1: (0.04, 0.01)}}
    for name, settings in (("two", TWO), ("streaming", streaming), ("eight", EIGHT)):
        drawn = figure(step_of(tmp_path / name, settings))
        canvas = FigureCanvasAgg(drawn)
        canvas.draw()
        renderer = canvas.get_renderer()
        page = drawn.bbox
        for text in (*drawn.texts, *drawn.axes[0].texts, *drawn.legends[0].get_texts()):
            box = text.get_window_extent(renderer)
            assert page.x0 <= box.x0 <= box.x1 <= page.x1, text
            assert page.y0 <= box.y0 <= box.y1 <= page.y1, text
    assert {str(k) for k in range(32)} <= set(texts(drawn))  # of eight processes too


def test_later_stages_of_a_process_are_darker(tmp_path: Path) -> None:
    drawn = figure(step_of(tmp_path, EIGHT))
    fills = {_hex(bars) for bars in drawn.axes[0].collections}
    for shades in timeline_picture.SHADES.values():
        assert set(shades) <= fills
    assert any("darker" in text for text in texts(drawn))
    assert not any("darker" in text for text in texts(figure(ONE_BAR)))


def brightness(color: str) -> float:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("shade", [0.0, 1 / 3, 0.5, 2 / 3, 1.0])
def test_numbers_can_be_read_on_their_colours(kind: str, shade: float) -> None:
    """Contrast as WCAG counts it: at least 3 : 1."""
    fill = color_of(kind, shade)
    values = sorted([brightness(ink_on(fill)), brightness(fill)], reverse=True)
    assert (values[0] + 0.05) / (values[1] + 0.05) >= 3


def test_blue_and_orange_differ_for_the_colour_blind() -> None:
    """Red-green blindness leaves the difference of yellow and blue: (R + G) / 2 - B."""

    def yellow(color: str) -> float:
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return (red + green) / 2 - blue

    for forward in timeline_picture.SHADES["forward"]:
        for backward in timeline_picture.SHADES["backward"]:
            assert yellow(backward) - yellow(forward) > 100


def test_picture_without_transfers_has_no_strips() -> None:
    assert not {"out", "in"} & set(texts(figure(ONE_BAR)))


def test_visits_from_host_memory_have_a_strip_and_a_legend(tmp_path: Path) -> None:
    """Of the process that has them: stage 1 computes 25-85 ms, and its weights travel for 40."""
    drawn = figure(step_of(tmp_path, {**TWO, "copies": {1: (0.04, 0.01)}}))
    assert texts(drawn).count("host") == 1
    assert {"host: to and from host memory", "waits for weights"} <= set(texts(drawn))
    copies = boxes(drawn, timeline_picture.PLAIN["visits"])
    assert any(box == pytest.approx((25, 65), abs=0.01) for box in copies)
    waits = boxes(drawn, timeline_picture.PLAIN["awaited"])
    assert any(box == pytest.approx((55, 65), abs=0.01) for box in waits)
    plain = set(texts(figure(step_of(tmp_path / "plain", TWO))))
    assert not {"host", "host: to and from host memory", "waits for weights"} & plain


@pytest.mark.parametrize(
    ("form", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_draw_writes_each_format(tmp_path: Path, form: str, magic: bytes) -> None:
    path = draw(step_of(tmp_path, TWO), tmp_path / f"a.{form}")
    assert path.read_bytes().startswith(magic)
    again = draw(step_of(tmp_path, TWO), tmp_path / f"b.{form}")
    assert again.read_bytes() == path.read_bytes()


def test_large_picture_stays_within_a_screens_reach(tmp_path: Path) -> None:
    bars = [Bar("forward", 0.0, 0.001, 0), Bar("forward", 0.999, 1.0, 1)]
    wide = StepPicture("t", "s", [Row("a", "stage 0", bars)], 1.0)
    width = int.from_bytes(draw(wide, tmp_path / "a.png").read_bytes()[16:20], "big")
    assert 3000 < width <= 5200


def test_without_matplotlib_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"(?s)needs matplotlib.*hetero-framework\[pictures\]"):
        draw(ONE_BAR, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_wrong_format_and_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)no picture format 'jpg'.*png, svg, pdf"):
        draw(ONE_BAR, tmp_path / "a.jpg")
    (tmp_path / "b.svg").mkdir()
    with pytest.raises(UserError, match="cannot write the picture"):
        draw(ONE_BAR, tmp_path / "b.svg")
