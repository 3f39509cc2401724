"""The pages are correct: commands exist, links lead somewhere, generated parts are current."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hetero_framework.cli import build_parser, main
from hetero_framework.commands.check_report import forecast
from hetero_framework.config import Config, load_config
from tests.installed import whole
from tests.samples import module_of, plan_of, save_llama, save_texts, save_tokenizer

pytestmark = whole  # the pages tell of all

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CONFIGS = [ROOT / "hetero_config.json", *sorted(ROOT.glob("examples/*.json"))]
MAKE = "CONTRIBUTING.md"
THREE = ROOT / "docs" / "three_machines.md"
PROGRAMS = ("hetero ", "make ", "python ")
# What takes minutes or other machines is parsed, not run.
RUN = {"check", "diagram", "schema", "doctor"}


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each code block: fenced, or set in by four columns."""
    language: str | None = None
    lines: list[str] = []
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        fence = re.fullmatch(r"\s*```(\w*)", line)
        if fence and language is None:
            language, lines = fence[1], []
        elif fence:
            yield str(language), "\n".join(lines)
            language = None
        elif language is not None:
            lines.append(line)
        elif re.match(r" {4,}\S", line):
            yield "", line.strip()


def commands() -> list[tuple[Path, list[str]]]:
    """Every command line of the pages, without comments and the name of the machine in front."""
    found = []
    for page in PAGES:
        for language, text in blocks(page):
            if language in ("", "sh", "bash"):
                lines = text.replace("\\\n", " ").splitlines()
                lines = [re.sub(r"^\w+\$ +", "", line.strip()) for line in lines]
                lines = [line for line in lines if line.startswith(PROGRAMS)]
                found += [(page, shlex.split(line, comments=True)) for line in lines]
    return found


COMMANDS = commands()
HETERO = [(page, words[1:]) for page, words in COMMANDS if words[0] == "hetero"]


def test_pages_have_commands():
    of = {page: [w for p, w in COMMANDS if p.name == page] for page in ("README.md", MAKE)}
    assert ["make", "demo"] in of[MAKE]
    assert ["make", "test"] in of[MAKE]
    assert {words[1] for words in of["README.md"] if words[0] == "hetero"} == {
        *("train", "invite", "join", "worker")
    }
    assert {words[0] for _, words in HETERO} >= {"init", "check", "train", "merge", "doctor"}


@pytest.mark.parametrize("words", [w for _, w in HETERO], ids=" ".join)
def test_hetero_command_parses(words):
    assert build_parser().parse_args(words).command == words[0]


@pytest.mark.parametrize("command", build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
def test_help_shows_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    examples = capsys.readouterr().out.partition("examples:\n")[2].replace("\\\n", " ")
    lines = [shlex.split(line.partition(" > ")[0]) for line in examples.splitlines()]
    assert lines
    for words in lines:
        assert build_parser().parse_args(words[1:]).command == command


@pytest.mark.parametrize("words", [w for _, w in HETERO if w[0] in RUN], ids=" ".join)
def test_cheap_command_runs(words, tmp_path, monkeypatch):
    settings = json.loads((ROOT / "hetero_config.json").read_text(encoding="utf-8"))
    small = {"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 32, "vocab_size": 320}
    settings["model"] = {"from_config": small, "tokenizer": "tokenizer"}
    save_tokenizer(tmp_path / "tokenizer")
    settings["data"]["train"] = str(save_texts(tmp_path / "train.jsonl", 8))
    for file in ("hetero_config.json", "hetero_config.yaml", "cluster.json"):
        (tmp_path / file).write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0


# Of config.json at that place of the hub, what sizes depend on.
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_init_of_the_three_machines_passes_check(tmp_path, monkeypatch):
    (words,) = [w for page, w in HETERO if page == THREE and w[0] == "init" and w[1:]]
    model = tmp_path / words[words.index("--model") + 1]
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(QWEN))
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    config = load_config(tmp_path / "cluster.json")
    assert [spec.owner for spec in config.plan.stages] == ["local", 1, 2]


def test_recipe_of_the_three_machines_is_a_configuration_of_the_same_machines():
    (recipe,) = [text for language, text in blocks(THREE) if language == "json"]
    config = Config.from_dict(json.loads(recipe))
    (words,) = [w for page, w in HETERO if page == THREE and w[0] == "init" and w[1:]]
    named = [f"{m.ip}:{m.port}:{m.device}" for m in (config.coordinator, *config.workers)]
    assert named == [word for word in words if word.startswith("192.")]


def test_readme_has_the_pictures_that_its_program_makes():
    pictures = set(re.findall(r"docs/images/([\w-]+\.svg)", (ROOT / "README.md").read_text()))
    assert pictures == {file.name for file in (ROOT / "docs" / "images").iterdir()}
    programs = (ROOT / "docs" / f"{name}.py" for name in ("pictures", "record"))
    made = "".join(file.read_text(encoding="utf-8") for file in programs)
    assert [name for name in pictures if name.partition(".")[0] not in made] == []


def test_the_recording_plays_without_scripts_and_is_small():
    recording = (ROOT / "docs" / "images" / "demo.svg").read_text(encoding="utf-8")
    assert len(recording.encode()) <= program("record").MOST_BYTES
    root = ElementTree.fromstring(recording)
    elements = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert elements == {"svg", "title", "style", "rect", "text", "tspan", "g"}
    assert "the same, byte for byte" in "".join(root.itertext())


def test_a_recording_shows_each_line_while_it_was_there():
    record = program("record")
    frames = [(0.0, record.lines("one")), (9.0, record.lines("\x1b[1mtwo & 3\x1b[0m\nlast"))]
    paced = record.paced(frames)
    assert [at for at, _ in paced] == [
        *(0.0, record.WAIT_S),
        record.WAIT_S + record.LINE_S + record.LAST_S,
    ]
    drawn = ElementTree.fromstring(record.draw(paced, "a < b"))
    groups = {
        "".join(g.itertext()).strip(): g for g in drawn.iter() if g.get("id", "").startswith("l")
    }
    assert list(groups) == ["one", "two & 3last"]
    assert groups["one"].get("visibility") == "hidden"  # where nothing moves
    assert groups["two & 3last"].get("visibility") is None


@pytest.mark.parametrize(
    "words", [w for _, w in COMMANDS if w[0] == "make"], ids=lambda words: " ".join(words)
)
def test_make_target_exists(words):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in [word for word in words[1:] if "=" not in word and not word.startswith("-")]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_files_that_commands_name_exist():
    for _, words in COMMANDS:
        for word in words:
            if word.endswith(".py") and "/" in word:
                assert (ROOT / word).is_file()
            module = re.match(r"(hetero_framework|benchmarks)(\.\w+)+$", word)
            if module:
                assert importlib.util.find_spec(word) is not None


TRAINING = ("README.md", "python.md")  # of the latter: test_callbacks.py
PYTHON = [
    (page, text)
    for page in PAGES
    for language, text in blocks(page)
    if language == "python" and page.name not in TRAINING
]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[page.name for page, _ in PYTHON])
def test_python_block_runs(page, code):
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_four_lines_of_the_readme_train_an_adapter(tmp_path, monkeypatch):
    (code,) = [text for language, text in blocks(ROOT / "README.md") if language == "python"]
    assert len([line for line in code.splitlines() if line]) == 4
    save_llama(tmp_path / "Qwen" / "Qwen3-0.6B")
    save_texts(tmp_path / "train.jsonl", 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Path("four.py").write_text(code)
    summary = runpy.run_path("four.py")["summary"]
    assert (tmp_path / summary.output_dir / "adapter" / "adapter_config.json").is_file()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 220


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page):
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            linked = page.parent / file if file else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page ends in, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_decisions_are_short():
    page = (ROOT / "docs" / "maintainers" / "decisions.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 700
    for entry in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        title, _, text = entry.partition("\n")
        assert len(text.partition("\n## ")[0].strip().splitlines()) <= 12, title


def test_extending_shows_the_example_that_is_tested():
    example = (ROOT / "examples" / "watch_machines.py").read_text(encoding="utf-8")
    page = ROOT / "docs" / "maintainers" / "extending.md"
    shown = [text for language, text in blocks(page) if language == "python"]
    assert example.partition('"""\n\n')[2].rstrip("\n") in shown


def test_readme_counts_the_architectures_that_the_table_counts():
    table = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    counted = re.search(r"(\d+) of (\d+) pass", table)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{counted[1]} of the {counted[2]} in transformers" in readme


def test_the_page_of_objectives_counts_the_classifiers_that_the_table_counts():
    table = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    counted = re.findall(r"(\d+) of (\d+) architectures are bit-equal with", table)
    page = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
    assert re.findall(r"(\d+) of (\d+) that have", page) == counted
    assert len(counted) == 2
    pictures = re.search(r"With `image-classification` (\d+) of (\d+) pass", table)
    assert f"{pictures[1]} of the {pictures[2]} model types" in page


def test_the_performance_page_shows_figures_of_check():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+)% \| (\d+)% \| (\d+)% \|$", page, re.MULTILINE)
    assert len(rows) == 4
    workers = [{"id": n, "ip": "127.0.0.1", "port": 7000 + n} for n in (1, 2, 3)]
    raw = {"coordinator": {"ip": "127.0.0.1"}, "workers": workers}
    for m, *shown in rows:
        for chunks, idle in zip((1, 2, 4), shown, strict=True):
            owners = enumerate(["local", 1, 2, 3] * chunks, 1)
            plan = plan_of(*((owner, k * 8 // chunks) for k, owner in owners))
            training = {"gradient_accumulation_steps": int(m)}
            config = Config.from_dict({**raw, "shard_plan": plan, "training": training})
            assert f"{forecast(config)['bubble']:.0%}" == f"{idle}%"


def test_configuration_page_is_current():
    assert program("generate").page() == (ROOT / "docs" / "configuration.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("file", CONFIGS, ids=name)
def test_shipped_configuration_loads(file):
    load_config(file).require("model", "data")


def test_shipped_json_parses():
    files = [ROOT / file for file in tracked() if file.endswith(".json")]
    assert len(files) > 3
    for file in files:
        json.loads(file.read_text(encoding="utf-8"))


def test_no_file_names_a_place_of_one_machine():
    home = re.compile(r"(?<![\w.])/(root|work|home/\w+|Users/\w+|tmp/\w+)/")
    found = []
    for file in tracked():
        try:
            text = (ROOT / file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{file}: {match[0]}" for match in home.finditer(text)]
    assert found == []


def tracked() -> list[str]:
    """Files of the repository; of an unpacked archive, all but what tools leave behind."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return [file for file in listed.stdout.splitlines() if (ROOT / file).is_file()]
    parts = [file.relative_to(ROOT).parts for file in ROOT.rglob("*") if file.is_file()]
    left = {"runs", "build", "dist"}
    return ["/".join(own) for own in parts if not any(p in left or p.startswith(".") for p in own)]


def program(name: str) -> Any:
    """A program of docs/ as a module."""
    return module_of(ROOT / "docs" / f"{name}.py")


@pytest.mark.parametrize("name", ["tree", "protocol_tables"])
def test_generated_parts_of_a_page_are_up_to_date(name):
    made = program(name)
    page = made.PAGE.read_text(encoding="utf-8")
    assert page == made.render(page), f"run: python docs/{name}.py"


def test_architecture_page_knows_every_room():
    tree = program("tree")
    folders = {file.parent.name for file in (ROOT / "hetero_framework").glob("*/*.py")}
    assert folders == set(tree.ROOMS)
