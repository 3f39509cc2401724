"""The picture of a step shows every task where and when it was."""

from __future__ import annotations

import os
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.errors import UserError
from hetero_framework.profiling.timeline import picture
from hetero_framework.visualizer import timeline_picture
from hetero_framework.visualizer.scene import Scene, text_width, to_svg
from hetero_framework.visualizer.timeline_picture import Bar, Row, StepPicture, draw, layout
from tests.unit.timeline_samples import record

GOLDEN = Path(__file__).parents[2] / "golden" / "timeline.svg"
needs_graphviz = pytest.mark.skipif(shutil.which("neato") is None, reason="no Graphviz")
TWO: dict[str, Any] = {
    "devices": [0, 1], "micro_batches": 3, "forward_s": [0.02, 0.02], "backward_s": [0.04, 0.04],
    "wire_s": 0.005, "update_s": 0.01,
}  # fmt: skip
EIGHT: dict[str, Any] = {
    "devices": [*range(8), *range(8)], "micro_batches": 32, "forward_s": [0.01] * 16,
    "backward_s": [0.02] * 16, "wire_s": 0.001,
}  # fmt: skip


def step_of(path: Path, settings: dict[str, Any], **more: Any) -> StepPicture:
    return picture(record(path, settings, steps=[1, 2]), 1, **more)


def texts(scene: Scene) -> list[str]:
    return [label.text for label in scene.labels]


def test_svg_is_the_golden_one(tmp_path: Path) -> None:
    """Set HETERO_UPDATE_GOLDEN to write it anew, and look at it."""
    svg = to_svg(layout(step_of(tmp_path, TWO, bound_s=0.25)))
    if os.environ.get("HETERO_UPDATE_GOLDEN"):
        GOLDEN.write_text(svg, encoding="utf-8", newline="\n")
    assert svg == GOLDEN.read_text(encoding="utf-8")


def test_every_task_is_at_its_time(tmp_path: Path) -> None:
    shown = step_of(tmp_path, TWO)
    scene = layout(shown)
    root = ElementTree.fromstring(to_svg(scene))
    svg = "{http://www.w3.org/2000/svg}"
    boxes = {
        rect.find(f"{svg}title").text.split(",")[0]: rect  # type: ignore[union-attr]
        for rect in root.iter(f"{svg}rect")
        if rect.find(f"{svg}title") is not None
    }
    assert {f"forward {k}" for k in range(3)} <= set(boxes)
    assert {f"forward and backward {k}" for k in range(3)} <= set(boxes)
    assert {"waits for activations 0", "FORWARD 0 for stage 1", "optimizer step"} <= set(boxes)

    def place(name: str) -> tuple[float, float]:
        return float(boxes[name].get("x", "")), float(boxes[name].get("width", ""))

    left, wide = place("forward 0")
    # Stage 0: F0 0-20, F1 20-40; stage 1 begins at 25 ms. B takes twice as long as F.
    assert place("forward 1")[0] == pytest.approx(left + wide, abs=0.01)
    assert place("forward and backward 0")[0] == pytest.approx(left + 1.25 * wide, abs=0.01)
    assert place("backward 0")[1] == pytest.approx(2 * wide, abs=0.01)
    assert place("waits for activations 0") == pytest.approx((left, 1.25 * wide), abs=0.01)


def test_everything_is_on_the_page_and_numbers_are_in_their_boxes(tmp_path: Path) -> None:
    for name, settings in (("two", TWO), ("eight", EIGHT)):
        shown = step_of(tmp_path / name, settings, bound_s=0.2)
        scene = layout(shown)
        for box in scene.boxes:
            assert box.x >= 0 <= box.y
            assert box.x + box.width <= scene.width
            assert box.y + box.height <= scene.height
        for label in scene.labels:
            width = text_width(label.text, label.size, label.bold)
            start = {"start": label.x, "middle": label.x - width / 2, "end": label.x - width}
            assert start[label.anchor] >= 0
            assert start[label.anchor] + width <= scene.width + 1
    numbers = {str(k) for k in range(32)}
    assert numbers <= set(texts(scene))  # of eight processes too


def test_later_stages_of_a_process_are_darker(tmp_path: Path) -> None:
    scene = layout(step_of(tmp_path, EIGHT))
    fills = {box.fill for box in scene.boxes}
    assert set(timeline_picture.FORWARD_SHADES) | set(timeline_picture.BACKWARD_SHADES) <= fills
    assert any("darker" in text for text in texts(scene))
    one = layout(step_of(tmp_path / "one", TWO))
    assert timeline_picture.FORWARD_SHADES[1] not in {box.fill for box in one.boxes}
    assert not any("darker" in text for text in texts(one))


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
    row = Row("a", "stage 0", [Bar(kind, 0.0, 1.0, number=7, shade=shade)])
    scene = layout(StepPicture("t", "s", [row]))
    color = next(label.color for label in scene.labels if label.text == "7")
    values = sorted(
        [brightness(color), brightness(timeline_picture._color(kind, shade))], reverse=True
    )
    assert (values[0] + 0.05) / (values[1] + 0.05) >= 3


def test_blue_and_orange_differ_in_what_the_colour_blind_see() -> None:
    """Red-green blindness leaves the difference of yellow and blue: (R + G) / 2 - B."""

    def yellow(color: str) -> float:
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return (red + green) / 2 - blue

    for forward in timeline_picture.FORWARD_SHADES:
        for backward in timeline_picture.BACKWARD_SHADES:
            assert yellow(backward) - yellow(forward) > 100


@pytest.mark.parametrize(
    ("seconds", "ticks"),
    [
        (1.16, ["0", "200", "400", "600", "800", "1,000"]),
        (0.0012, ["0", "0.2", "0.4"]),
        (90, ["0"]),
    ],
)
def test_axis_has_round_numbers(seconds: float, ticks: list[str]) -> None:
    row = Row("a", "stage 0", [Bar("forward", 0.0, seconds, 0)])
    shown = texts(layout(StepPicture("t", "s", [row])))
    assert set(ticks) <= set(shown)


def test_picture_without_transfers_has_no_strips() -> None:
    scene = layout(StepPicture("t", "s", [Row("a", "stage 0", [Bar("forward", 0, 1, 0)])]))
    assert not {"out", "in"} & set(texts(scene))


@needs_graphviz
@pytest.mark.parametrize(("form", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_draw_through_graphviz(tmp_path: Path, form: str, magic: bytes) -> None:
    path = draw(step_of(tmp_path, TWO), tmp_path / f"a.{form}")
    assert path.read_bytes().startswith(magic)


@needs_graphviz
def test_large_picture_stays_within_a_screens_reach(tmp_path: Path) -> None:
    bars = [Bar("forward", 0.0, 0.001, 0), Bar("forward", 0.999, 1.0, 1)]
    wide = StepPicture("t", "s", [Row("a", "stage 0", bars)])
    path = draw(wide, tmp_path / "a.png")
    width = int.from_bytes(path.read_bytes()[16:20], "big")
    assert 3000 < width <= 4200


def test_without_graphviz_svg_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    shown = step_of(tmp_path, TWO)
    monkeypatch.setenv("PATH", str(tmp_path))
    path = draw(shown, tmp_path / "a.png")
    assert path == tmp_path / "a.svg"
    assert path.read_text(encoding="utf-8") == to_svg(layout(shown))
    assert "Graphviz is not installed, so no PNG was drawn" in logged[0]


def test_wrong_format_and_place_are_refused(tmp_path: Path) -> None:
    shown = step_of(tmp_path, TWO)
    with pytest.raises(UserError, match=r"(?s)no picture format 'jpg'.*svg, png, pdf"):
        draw(shown, tmp_path / "a.jpg")
    (tmp_path / "b.svg").mkdir()
    with pytest.raises(UserError, match="cannot write the picture"):
        draw(shown, tmp_path / "b.svg")
