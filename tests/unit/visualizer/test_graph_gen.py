"""The picture is the star that the configuration describes, whatever the names in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import graphviz
import pytest

from hetero_framework.config import Config, load_config
from hetero_framework.errors import UserError
from hetero_framework.visualizer.graph_gen import DiagramDetails, dot, draw, layout, mermaid
from hetero_framework.visualizer.scene import Arrow, text_width, to_svg, wrap

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
    return Config.from_dict(
        {
            "version": "1",
            "coordinator": {"hostname": "desk", "ip": "10.0.0.100", "device": "cuda:0"},
            "workers": workers,
            "shard_plan": [{"id": owner, "start": s, "end": e} for owner, s, e in plan],
        },
        ROOT,
    )


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
    'quo"te',
    "`tick`",
    "[x](y){z}|<b>&amp;</b>",
    "end",
    "a;b#35;c",
    "%% comment %%{init: {}}%%",
    "-->|x|",
    "new\nline\ttab",
    "\\n\\l\\\\",
    "机器-µ-ß",
    "1. item",
    "subgraph",
    "\x00\x1b[31m",
    "   ",
    "😀",
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
needs_graphviz = pytest.mark.skipif(shutil.which("neato") is None, reason="needs Graphviz")


@pytest.mark.parametrize(
    ("name", "render"), [("architecture.mmd", mermaid), ("architecture.dot", dot)]
)
def test_shipped_config_gives_the_golden_text(name: str, render: Any) -> None:
    """When the change is meant: HETERO_UPDATE_GOLDEN=1 writes the files anew; look at them."""
    text = render(load_config(ROOT / "hetero_config.json"))
    if os.environ.get("HETERO_UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text, encoding="utf-8", newline="\n")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def numbers(arrows: list[Arrow]) -> list[tuple[str, str]]:
    """(number, direction) of each arrow."""
    return [
        (a.number, "down" if a.x1 == a.x2 else "out" if a.x2 > a.x1 else "back") for a in arrows
    ]


def test_arrows_follow_the_star() -> None:
    assert numbers(layout(ALONE, DiagramDetails()).arrows) == []
    assert numbers(layout(THREE, DiagramDetails()).arrows) == [
        ("1", "out"),
        ("2", "back"),  # from worker 1 to worker 2: over both links
        ("2", "out"),
    ]
    assert numbers(layout(LOCAL_TWICE, DiagramDetails()).arrows) == [
        ("1", "down"),
        ("2", "out"),
        ("3", "back"),
    ]
    assert sorted(numbers(layout(INTERLEAVED, DiagramDetails()).arrows)) == [
        ("1", "out"),
        ("2", "back"),
        ("2", "out"),
        ("3", "back"),
        ("4", "out"),
        ("5", "back"),
        ("5", "out"),
        ("6", "down"),
    ]


def test_details_are_shown() -> None:
    texts = [label.text for label in layout(INTERLEAVED, DETAILS).labels]
    for expected in (
        'org/mo"del',
        "24 layers, 7 stages, 3 processes",
        "NVIDIA H200 (cuda:0)",
        "AMD Radeon (auto)",
        "1.1 B parameters, 3.0 GiB",
        "5.0 MiB",
        "embedding + layers 0-3",
        "layers 22-23 + head",
        "TCP 10.0.0.1:9999",
    ):
        assert expected in texts


def test_ipv6_has_brackets() -> None:
    texts = "".join(label.text for label in layout(LONG, DiagramDetails()).labels)
    assert "TCP [2001:db8:85a3:1111:2222:8a2e:370:7334]:9999" in texts


@every_config
@pytest.mark.parametrize("details", [DiagramDetails(), DETAILS], ids=["bare", "detailed"])
def test_everything_is_on_the_page_and_text_is_in_its_box(
    config: Config, details: DiagramDetails
) -> None:
    scene = layout(config, details)
    for box in scene.boxes:
        assert 0 <= box.x < box.x + box.width <= scene.width
        assert 0 <= box.y < box.y + box.height <= scene.height
    for arrow in scene.arrows:
        assert 0 <= min(arrow.x1, arrow.x2) <= max(arrow.x1, arrow.x2) <= scene.width
    for label in scene.labels:
        half = text_width(label.text, label.size, label.bold) / 2
        assert half <= label.x <= scene.width - half
        assert 0 < label.y < scene.height
        for box in scene.boxes:
            if box.x < label.x < box.x + box.width and box.y < label.y < box.y + box.height:
                assert box.x <= label.x - half, label.text
                assert box.y + 8 <= label.y <= box.y + box.height - 8, label.text
    places = [(label.x, label.y) for label in scene.labels]
    assert len(set(places)) == len(places)
    badges = [arrow.badge for arrow in scene.arrows]
    assert len(set(badges)) == len(badges)


def test_wrap_keeps_every_character() -> None:
    for text in ("a" * 100, "x.y-z" * 20, "some words to break", ""):
        lines = wrap(text, 20)
        assert all(len(line) <= 20 for line in lines)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@every_config
def test_svg_is_xml_with_every_text(config: Config) -> None:
    scene = layout(config, DETAILS)
    root = ElementTree.fromstring(to_svg(scene).encode())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [a.number for a in scene.arrows] + [label.text for label in scene.labels]


# Mermaid's grammar as far as it is used here; a quoted text holds nothing that its lexer reads.
_TEXT = r'"(?:[\w .,:/+\-()\[\]]|#\d+;|<br/>)*"'
_LINES = re.compile(
    "|".join(
        [
            "flowchart LR",
            rf"  subgraph m\d+\[{_TEXT}\]",
            rf"    s\d+\[{_TEXT}\]",
            r"    relay\(\[\"relay\"\]\)",
            "  end",
            rf"  m0 ---\|{_TEXT}\| m\d+",
            r"  (?:s\d+|relay) -->\|\"\d+\"\| (?:s\d+|relay)",
            r"  style m\d+ fill:#[0-9a-f]{6},stroke:#[0-9a-f]{6}",
        ]
    )
)


def check_mermaid(text: str) -> None:
    lines = text.splitlines()
    assert text.endswith("\n")
    assert lines[0] == "flowchart LR"
    for line in lines:
        assert _LINES.fullmatch(line), line
    assert sum(line.startswith("  subgraph ") for line in lines) == lines.count("  end")
    ids = re.findall(r"^ +(?:subgraph )?(\w+)(?:\[|\()", text, re.MULTILINE)
    assert len(set(ids)) == len(ids)
    for edge in re.findall(r"^  (\w+) -->\|\"\d+\"\| (\w+)$", text, re.MULTILINE):
        assert set(edge) <= set(ids)


@every_config
def test_mermaid_is_within_the_grammar(config: Config) -> None:
    check_mermaid(mermaid(config))
    check_mermaid(mermaid(config, DETAILS))


def test_mermaid_arrows_go_through_the_relay() -> None:
    text = mermaid(THREE)
    assert re.findall(r"(\w+) -->\|\"(\d)\"\| (\w+)", text) == [
        ("s0", "1", "s1"),
        ("s1", "2", "relay"),
        ("relay", "2", "s2"),
    ]
    assert "relay" not in mermaid(LOCAL_TWICE)


@pytest.mark.skipif(
    "HETERO_MERMAID_DIR" not in os.environ,
    reason="HETERO_MERMAID_DIR names a folder with node_modules of mermaid and jsdom",
)
def test_mermaid_own_parser_accepts_it(tmp_path: Path) -> None:
    files = []
    for number, config in enumerate(CONFIGS.values()):
        for kind, details in (("bare", None), ("detailed", DETAILS)):
            path = tmp_path / f"{number}-{kind}.mmd"
            path.write_text(mermaid(config, details), encoding="utf-8")
            files.append(str(path))
    check = [str(Path(__file__).with_name("mermaid_check.mjs")), os.environ["HETERO_MERMAID_DIR"]]
    result = subprocess.run(["node", *check, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_graphviz
@pytest.mark.parametrize(("format", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_draw_through_graphviz(tmp_path: Path, format: str, magic: bytes) -> None:
    for number, config in enumerate(CONFIGS.values()):
        path = draw(config, tmp_path / f"{number}.{format}", details=DETAILS)
        assert path.read_bytes().startswith(magic)


@needs_graphviz
def test_graphviz_shows_every_text_and_warns_of_nothing() -> None:
    for config in CONFIGS.values():
        result = subprocess.run(
            ["neato", "-Tplain-ext"],
            input=dot(config, DETAILS).encode(),
            capture_output=True,
            check=True,
        )
        assert result.stderr == b""
        nodes = [line for line in result.stdout.decode().splitlines() if line.startswith("node ")]
        scene = layout(config, DETAILS)
        assert len(nodes) == 2 + len(scene.boxes) + 3 * len(scene.arrows) + len(scene.labels)


@needs_graphviz
def test_graphviz_svg_reads_names_as_they_are() -> None:
    for config, name in zip(NASTY, NASTY_NAMES, strict=True):
        drawn = graphviz.Source(dot(config), engine="neato").pipe(format="svg")
        root = ElementTree.fromstring(drawn)
        texts = {e.text.replace("\xa0", " ") for e in root.iter() if e.text}
        expected = [label.text for label in layout(config, DiagramDetails()).labels]
        assert set(expected) <= texts, name


@pytest.mark.parametrize("format", ["png", "pdf"])
def test_without_graphviz_svg_and_mermaid_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    path = draw(THREE, tmp_path / f"picture.{format}", format, notify=said.append)
    assert path == tmp_path / "picture.svg"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["picture.mmd", "picture.svg"]
    assert path.read_text(encoding="utf-8") == to_svg(layout(THREE, DiagramDetails()))
    assert len(said) == 1
    assert "Graphviz is not installed" in said[0]
    assert "picture.svg" in said[0]
    assert "picture.mmd" in said[0]


def test_graphviz_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: graphviz.Source, **kwargs: Any) -> bytes:
        raise subprocess.CalledProcessError(1, "neato")

    monkeypatch.setattr(graphviz.Source, "pipe", fail)
    said: list[str] = []
    assert draw(THREE, tmp_path / "a.png", notify=said.append).suffix == ".svg"
    assert "Graphviz failed" in said[0]


def test_svg_and_mermaid_need_no_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    draw(THREE, tmp_path / "new folder" / "a.svg", notify=said.append)
    draw(THREE, tmp_path / "new folder" / "a.txt", "MMD", notify=said.append)
    assert (tmp_path / "new folder" / "a.txt").read_text(encoding="utf-8") == mermaid(THREE)
    assert said == []


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    for path, format in (("a.jpg", None), ("a", None), ("a.png", "gif")):
        with pytest.raises(UserError, match=r"(?s)no picture format.*png, svg, pdf, mmd"):
            draw(THREE, tmp_path / path, format)
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.svg").mkdir()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path in (tmp_path / "a.svg", tmp_path / "file" / "b.svg"):
        with pytest.raises(UserError, match="Cannot write the picture"):
            draw(THREE, path)
