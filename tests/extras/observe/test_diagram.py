"""The picture shows machines, stages and boundaries correctly, with any names. What `hetero
doctor` finds of programs that draw."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import graphviz
import matplotlib
import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from hetero_framework.config import Config, load_config
from hetero_framework.errors import UserError
from hetero_framework.extras.observe import diagram_figure
from hetero_framework.extras.observe.diagram import (
    STYLES,
    WORDS,
    Diagram,
    DiagramDetails,
    to_dot,
    to_mermaid,
)
from hetero_framework.extras.observe.diagram_figure import draw

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"


def config_of(*plan: tuple[int | str, int, int], **machine: Any) -> Config:
    """A configuration with this plan; `machine` changes the first worker."""
    owners = [owner for owner in dict.fromkeys(p[0] for p in plan) if owner != "local"]
    workers: list[dict[str, Any]] = [
        {"id": owner, "hostname": f"box{owner}", "ip": f"10.0.0.{number}", "port": 9999}
        for number, owner in enumerate(owners, 1)
    ]
    if machine:
        workers[0].update(machine)
    coordinator = {"hostname": "desk", "ip": "10.0.0.100", "device": "cuda:0"}
    entries = [{"id": owner, "start": start, "end": end} for owner, start, end in plan]
    machines = {"version": "1", "coordinator": coordinator, "workers": workers}
    return Config.from_dict({**machines, "shard_plan": entries}, ROOT)


ALONE = config_of(("local", 0, 4))
THREE = config_of(("local", 0, 4), (1, 4, 8), (2, 8, 12))
EIGHT = config_of(("local", 0, 4), *((i, 4 * i, 4 * i + 4) for i in range(1, 8)))
INTERLEAVED = config_of(
    ("local", 0, 4), (1, 4, 8), (2, 8, 12), ("local", 12, 16), (1, 16, 20), (2, 20, 22), (2, 22, 24)
)
LOCAL_TWICE = config_of(("local", 0, 0), ("local", 0, 4), (1, 4, 8), ("local", 8, 8))
LONG = config_of(
    ("local", 0, 4),
    ("gpu-node_with.a.long.id-" + "0" * 40, 4, 8),
    ip="2001:db8:85a3:1111:2222:8a2e:370:7334",
    hostname="a-very-long-hostname." * 8 + "x" * 60,
)
NASTY_NAMES = [
    *('quo"te', "`tick`", "[x](y){z}|<b>&amp;</b>", "end", "a;b#35;c", "-->|x|", "\\n\\l\\\\"),
    *("%% comment %%{init: {}}%%", "机器-µ-ß", "1. item", "subgraph", "   ", "😀"),
]
NASTY = [config_of(("local", 0, 4), (1, 4, 8), hostname=name) for name in NASTY_NAMES]
CONFIGS = {
    "alone": ALONE,
    "three": THREE,
    "eight": EIGHT,
    "interleaved": INTERLEAVED,
    "local twice": LOCAL_TWICE,
    "long names": LONG,
    **{f"nasty {name!r}": config for name, config in zip(NASTY_NAMES, NASTY, strict=True)},
}
DETAILS = DiagramDetails(
    model='org/mo"del',
    num_layers=24,
    parameters={0: 1_090_000_000},
    memory_bytes={0: 3 << 30, 1: 5 << 20},
    devices={"local": "NVIDIA H200", 1: "AMD Radeon"},
)

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")


def test_shipped_config_gives_the_golden_mermaid_text():
    """When the change is meant: HETERO_UPDATE_GOLDEN=1 writes the file anew; look at it."""
    text = to_mermaid(Diagram.of(load_config(ROOT / "hetero_config.json")))
    if os.environ.get("HETERO_UPDATE_GOLDEN"):
        (GOLDEN / "architecture.mmd").write_text(text, encoding="utf-8", newline="\n")
    assert text == (GOLDEN / "architecture.mmd").read_text(encoding="utf-8")


@needs_dot
def test_readme_picture_shows_the_shipped_configuration():
    """To draw it anew: `hetero diagram --output docs/images/architecture.svg`."""
    shown = (ROOT / "docs" / "images" / "architecture.svg").read_bytes()
    expected = to_dot(Diagram.of(load_config(ROOT / "hetero_config.json"))).pipe(format="svg")
    assert svg_texts(shown) == svg_texts(expected)


def hows(config: Config, direct: frozenset[int] | None = None) -> list[str]:
    return list(Diagram.of(config, DiagramDetails(direct=direct)).boundaries)


def with_links(mode: str, **of_entry: str) -> Config:
    """local, 1, 2, 2, local; `of_entry` sets links of entries ("e2")."""
    raw = config_of(("local", 0, 1), (1, 1, 2), (2, 2, 3), (2, 3, 4), ("local", 4, 5)).to_dict()
    for entry, links in of_entry.items():
        raw["shard_plan"][int(entry[1:])]["links"] = links
    return Config.from_dict({**raw, "links": mode}, ROOT)


@pytest.mark.parametrize("mode", ["auto", "relay", "direct"])
def test_before_the_run_a_boundary_shows_the_configured_link(mode):
    assert hows(with_links(mode)) == ["direct", mode, "inside", "direct"]
    assert hows(with_links("direct", e2="relay")) == ["direct", "relay", "inside", "direct"]


def test_after_connecting_a_boundary_shows_the_actual_link():
    assert hows(with_links("auto"), frozenset({1})) == ["direct", "direct", "inside", "direct"]
    assert hows(with_links("auto"), frozenset()) == ["direct", "relay", "inside", "direct"]


def test_the_caption_explains_only_drawn_elements():
    auto, known = Diagram.of(THREE), Diagram.of(THREE, DiagramDetails(direct=frozenset({1})))
    sentence = "direct where they reach each other, else through the coordinator"
    assert sentence in " ".join(auto.caption)
    assert sentence in to_mermaid(auto).replace("<br/>", " ")
    assert sentence not in " ".join(known.caption)
    assert Diagram.of(ALONE).caption == ()
    coded = Diagram.of(Config.from_dict({**THREE.to_dict(), "wire": {"gradients": "int8"}}, ROOT))
    assert "Between processes: gradients as int8." in coded.caption


def texts(diagram: Diagram) -> set[str]:
    """Every line of text that a picture must have."""
    found = {*diagram.title, diagram.counts, *diagram.caption}
    for place in diagram.places:
        found |= {*place.names, *place.lines}
        found |= {line for _, lines in place.stages for line in lines}
    return found


def svg_texts(svg: str | bytes) -> set[str]:
    root = ElementTree.fromstring(svg)
    elements = root.iter("{http://www.w3.org/2000/svg}text")
    return {(element.text or "").replace("\xa0", " ").strip() for element in elements}


def test_details_are_shown():
    assert {
        *('org/mo"del', "24 layers, 7 stages, 3 processes", "NVIDIA H200 (cuda:0)"),
        *("AMD Radeon (auto)", "1.09 B parameters, 3.00 GiB", "5.00 MiB", "10.0.0.1:9999"),
        *("embedding + layers 0-3", "layers 22-23 + head"),
    } <= texts(Diagram.of(INTERLEAVED, DETAILS))


def test_long_names_are_wrapped_and_no_character_is_lost():
    place = Diagram.of(LONG).places[1]
    assert max(map(len, place.names + place.lines)) <= 30
    worker = LONG.workers[0]
    assert "".join(place.names).replace(" ", "") == f"worker{worker.id}"
    joined = "".join(place.lines)
    assert joined.startswith(str(worker.hostname))
    assert f"[{worker.ip}]:{worker.port}" in joined


@needs_dot
@every_config
def test_graphviz_shows_every_text_and_warns_of_nothing(config, recwarn):
    diagram = Diagram.of(config, DETAILS)
    drawn = subprocess.run(
        ["dot", "-Tsvg"], input=to_dot(diagram).source.encode(), capture_output=True, check=True
    )
    assert drawn.stderr == b""
    assert texts(diagram) - {""} <= svg_texts(drawn.stdout)


# Mermaid's grammar as far as it is used here; a quoted text holds nothing that its lexer reads.
_TEXT = r'"(?:[\w .,:/+\-()\[\]]|#\d+;|<br/>)*"'
_LINES = (
    *("flowchart LR", rf"  subgraph m\d+\[{_TEXT}\]", rf"    s\d+\[{_TEXT}\]", "  end"),
    rf"  s\d+ -\.?->(?:\|{_TEXT}\|)? s\d+",
    r"  style m\d+ fill:#[0-9a-f]{6},stroke:#[0-9a-f]{6}",
)


@every_config
@pytest.mark.parametrize("details", [None, DETAILS], ids=["bare", "detailed"])
def test_mermaid_is_within_the_grammar(config, details):
    text = to_mermaid(Diagram.of(config, details))
    lines = text.splitlines()
    assert text.endswith("\n")
    assert lines[0] == "flowchart LR"
    for line in lines:
        assert re.fullmatch("|".join(_LINES), line), line
    assert sum(line.startswith("  subgraph ") for line in lines) == lines.count("  end")
    ids = re.findall(r"^ +(?:subgraph )?(\w+)\[", text, re.MULTILINE)
    assert len(set(ids)) == len(ids)
    for edge in re.findall(r"^  (s\d+) -.*> ?.*(s\d+)$", text, re.MULTILINE):
        assert set(edge) <= set(ids)


def test_mermaid_arrows_say_how_tensors_cross():
    known = DiagramDetails(direct=frozenset({4}))
    arrows = re.findall(
        r"(s\d) (-\.?->)(?:\|\"([^|]*)\"\|)? (s\d)", to_mermaid(Diagram.of(INTERLEAVED, known))
    )
    assert arrows == [
        ("s0", "-->", "direct", "s1"),
        ("s1", "-.->", "through the coordinator", "s2"),
        ("s2", "-->", "direct", "s3"),
        ("s3", "-->", "direct", "s4"),
        ("s4", "-->", "direct", "s5"),
        ("s5", "-->", "", "s6"),
    ]


@pytest.mark.skipif(
    "HETERO_MERMAID_DIR" not in os.environ,
    reason="HETERO_MERMAID_DIR names a folder with node_modules of mermaid and jsdom",
)
def test_mermaid_own_parser_accepts_it(tmp_path):
    files = []
    for number, config in enumerate(CONFIGS.values()):
        for kind, details in (("bare", None), ("detailed", DETAILS)):
            path = tmp_path / f"{number}-{kind}.mmd"
            path.write_text(to_mermaid(Diagram.of(config, details)), encoding="utf-8")
            files.append(str(path))
    check = [str(Path(__file__).with_name("mermaid_check.mjs")), os.environ["HETERO_MERMAID_DIR"]]
    result = subprocess.run(["node", *check, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def replace_pipe(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Whatever this machine has: Graphviz ends like this."""

    def fail(self: graphviz.Digraph, **kwargs: Any) -> bytes:
        raise error

    monkeypatch.setattr(graphviz.Digraph, "pipe", fail)


@pytest.fixture
def no_dot(monkeypatch):
    replace_pipe(monkeypatch, graphviz.ExecutableNotFound(["dot"]))


@pytest.mark.parametrize("format", ["png", "svg", "pdf"])
def test_with_dot_the_diagram_is_written(tmp_path, monkeypatch, format):
    asked: dict[str, Any] = {}

    def pipe(self: graphviz.Digraph, **kwargs: Any) -> bytes:
        asked.update(kwargs)
        return b"picture"

    monkeypatch.setattr(graphviz.Digraph, "pipe", pipe)
    path = draw(THREE, tmp_path / f"a.{format}")
    assert path.read_bytes() == b"picture"
    assert asked["format"] == format


@needs_dot
@pytest.mark.parametrize(("format", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_dot_draws_every_plan(tmp_path, format, magic):
    for number, config in enumerate((ALONE, EIGHT, INTERLEAVED, LONG, *NASTY)):
        path = draw(config, tmp_path / f"{number}.{format}", details=DETAILS)
        assert path.read_bytes().startswith(magic)


@pytest.mark.usefixtures("no_dot")
@pytest.mark.parametrize(
    ("format", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_without_dot_matplotlib_draws_and_says_so_to_developers_alone(
    tmp_path, format, magic, caplog
):
    with caplog.at_level(logging.DEBUG, logger="hetero_framework"):
        path = draw(THREE, tmp_path / f"picture.{format}", format)
    assert path == tmp_path / f"picture.{format}"
    assert path.read_bytes().startswith(magic)
    (said,) = caplog.records
    assert said.levelno == logging.DEBUG
    assert "matplotlib draws" in said.getMessage()


@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")
@pytest.mark.parametrize("font", ["DejaVu Sans", "DejaVu Sans Mono", "DejaVu Serif"])
@every_config
def test_a_matplotlib_diagram_shows_every_text_in_its_box(config, font):
    diagram = Diagram.of(config, DETAILS)
    with matplotlib.rc_context({"font.family": font, "text.parse_math": False}):
        drawn = diagram_figure.figure(diagram)
        drawn.draw_without_rendering()
        (axes,) = drawn.axes
        boxes = [p.get_window_extent() for p in axes.patches if isinstance(p, FancyBboxPatch)]
        shown = [(text.get_text(), text.get_window_extent()) for text in axes.texts]
    about = [line for place in diagram.places for line in (*place.names, *place.lines)]
    about += [line for place in diagram.places for _, lines in place.stages for line in lines]
    inside = list(about)
    for text, extent in shown:
        middle = (extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2
        own = [box for box in boxes if box.contains(*middle)]
        if own:
            smallest = min(own, key=lambda box: box.width * box.height)
            assert smallest.x0 <= extent.x0 <= extent.x1 <= smallest.x1, text
            inside.remove(text)
        assert drawn.bbox.x0 <= extent.x0 <= extent.x1 <= drawn.bbox.x1, text
    assert inside == []
    arrows = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
    assert len(arrows) == len(diagram.boundaries)
    lines = [arrow.get_path().vertices.tolist() for arrow in arrows]
    for arrow, how in zip(arrows, diagram.boundaries, strict=True):
        extent = arrow.get_window_extent()
        assert drawn.bbox.x0 <= extent.x0 <= extent.x1 <= drawn.bbox.x1
        assert drawn.bbox.y0 <= extent.y0 <= extent.y1 <= drawn.bbox.y1
        assert arrow.get_linestyle() == STYLES.get(how, "solid")
    lanes = sorted(
        (points[1][0], *sorted((points[1][1], points[2][1]))) for points in lines if len(points) > 2
    )
    for (x, _, end), (next_x, begin, _) in itertools.pairwise(lanes):
        assert x < next_x or end < begin
    shown_texts = {text for text, _ in shown}
    for how in set(diagram.boundaries) - {"inside"}:
        style = STYLES.get(how, "solid").capitalize()
        assert f"{style} arrows: {' '.join(WORDS[how])}." in shown_texts


def test_no_address_is_shown_twice():
    config = config_of(("local", 0, 4), (1, 4, 8), hostname=None)
    (_, worker) = Diagram.of(config).places
    assert worker.lines == ("10.0.0.1:9999", "device auto")
    named = config_of(("local", 0, 4), (1, 4, 8), hostname="box1", ip="box1")
    assert Diagram.of(named).places[1].lines == ("box1:9999", "device auto")


def test_precision_is_shown_where_it_differs_by_machine():
    raw = THREE.to_dict()
    raw |= {"adapter": {"r": 4}, "model": {"name_or_path": "m", "quantization": "nf4"}}
    raw["workers"][1]["quantization"] = "none"
    lines = [place.lines[-1] for place in Diagram.of(Config.from_dict(raw)).places]
    assert lines == ["weights nf4", "weights nf4", "weights in full precision"]


def test_matplotlib_draws_where_dot_fails(tmp_path, monkeypatch, logged):
    replace_pipe(monkeypatch, subprocess.CalledProcessError(1, "dot"))
    assert draw(THREE, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert logged == []


@pytest.mark.usefixtures("no_dot")
def test_mermaid_needs_no_dot(tmp_path, logged):
    text = draw(THREE, tmp_path / "new folder" / "a.txt", "MMD")
    assert text.read_text(encoding="utf-8") == to_mermaid(Diagram.of(THREE))
    assert logged == []


def test_unknown_format_is_refused(tmp_path):
    for path, format in (("a.jpg", None), ("a", None), ("a.png", "gif")):
        with pytest.raises(UserError, match=r"(?s)no picture format.*png, svg, pdf, mmd"):
            draw(THREE, tmp_path / path, format)
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "a.mmd").mkdir()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path in (tmp_path / "a.mmd", tmp_path / "file" / "b.mmd"):
        with pytest.raises(UserError, match="cannot write the picture"):
            draw(THREE, path)
