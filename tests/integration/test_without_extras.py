"""Runs, commands and the heart's tests where the folders of extras are deleted, all or one; and the
modules that a plain run loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import hetero_framework
from tests.cases import seldom
from tests.samples import free_ports, save_llama, save_texts
from tests.terminal import terminal

PACKAGE = Path(hetero_framework.__file__).parent
EXTRAS = sorted(file.parent.name for file in PACKAGE.glob("extras/*/__init__.py"))
PLAIN = {"report_to": "none", "visualize": False, "timeline_steps": 0}
# Notes the imports of the package, in every process.
HOOK = """
import os, sys

PLACE = os.path.dirname(__file__)

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("hetero_framework"):
            with open(os.path.join(PLACE, f"{os.getpid()}.notes"), "a") as notes:
                notes.write(name + "\\n")

sys.meta_path.insert(0, Hook())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, texts, and files of foreign formats."""
    place = tmp_path_factory.mktemp("place")
    save_llama(place / "model", layers=2)
    save_texts(place / "texts.jsonl", 8)
    (place / "hook").mkdir()
    (place / "hook" / "sitecustomize.py").write_text(HOOK)
    (place / "pieces").mkdir()
    for name in ("pieces/tokenizer.model", "corpus.idx", "corpus.bin"):
        (place / name).touch()
    return place


def without(place: Path, extra: str) -> Path:
    """The folder of a copy of the package without this extra; without all if it is ""."""
    folder = place / f"without-{extra}"
    if not folder.exists():
        package = shutil.copytree(PACKAGE, folder / PACKAGE.name)
        for name in [extra] if extra else EXTRAS:
            shutil.rmtree(package / "extras" / name)
    return folder


def hetero(
    place: Path,
    *words: object,
    package: Path = PACKAGE.parent,
    code: str = "",
    on_terminal: bool = False,
) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (place / "hook", package)))
    run = ("-c", code) if code else ("-m", "hetero_framework")
    shown = terminal() if on_terminal else nullcontext((subprocess.PIPE, b""))
    with shown as (stream, _):
        return subprocess.run(
            [sys.executable, *run, *map(str, words)],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            cwd=place,
            timeout=300,
            env={**os.environ, "PYTHONPATH": paths, "TERM": "xterm"},
        )


def configuration(place: Path, training: dict[str, Any] | None = None, **sections: Any) -> Path:
    home, worker = ({"ip": "127.0.0.1", "device": "cpu", "port": port} for port in free_ports(2))
    raw = {
        "coordinator": home,
        "workers": [{**worker, "id": 1}],
        "shard_plan": [{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 2}],
        "model": {"name_or_path": "model"},
        "adapter": {"target_modules": "all-linear"},
        "data": {"train": "texts.jsonl", "max_length": 32},
        "training": {"output_dir": "run", "max_steps": 2, **(training or {})},
        **sections,
    }
    file = place / "hetero_config.json"
    file.write_text(json.dumps({name: part for name, part in raw.items() if part is not None}))
    return file


def test_a_plain_run_loads_modules_of_the_heart_alone(place):
    file = configuration(place, {**PLAIN, "output_dir": "plain"})
    done = hetero(place, "train", "--config", file)
    assert done.returncode == 0, done.stderr
    processes = [set(notes.read_text().split()) for notes in (place / "hook").glob("*.notes")]
    roles = {"hetero_framework.trainer.coordinator": 0, "hetero_framework.cluster.worker": 0}
    for loaded in processes:
        for role in roles.keys() & loaded:
            roles[role] = len(loaded)
        assert [name for name in loaded if name.startswith("hetero_framework.extras")] == []
    assert all(roles.values())
    print(roles)


def test_a_run_without_any_extra_leaves_out_what_defaults_ask_for(place):
    file = configuration(place, {"report_to": "none", "output_dir": "bare_run"})
    checked, trained = ([word, "--config", str(file)] for word in ("check", "train"))
    code = f"from hetero_framework.cli import main; exit(main({checked}) or main({trained}))"
    bare, has_terminals = without(place, ""), os.name != "nt"
    done = hetero(place, code=code, package=bare, on_terminal=has_terminals)
    assert done.returncode == 0, done.stderr
    log = (place / "bare_run" / "logs" / "coordinator.log").read_text()
    for setting in ("visualize", "timeline_steps"):
        assert f"training.{setting} needs the extra" in log
    assert (place / "bare_run" / "adapter" / "adapter_model.safetensors").exists()


WANTS: list[tuple[str, tuple[str, ...] | dict[str, Any], str]] = [
    (
        "codecs",
        {"wire": {"gradients": "bf16"}},
        "wire.gradients: \"bf16\" needs the extra 'codecs'",
    ),
    ("convert", ("convert", "x"), "convert"),
    ("exporting", ("merge",), "merge"),
    ("exporting", ("export",), "export"),
    ("yaml_files", ("check", "--config", "c.yaml"), "c.yaml needs an extra that"),
    (
        "host_memory",
        {"training": {"offload_optimizer": True}},
        "training.offload_optimizer needs the extra 'host_memory'",
    ),
    (
        "host_memory",
        {"training": PLAIN, "shard_plan": [{"id": "local", "start": 0, "end": 2, "offload": 2}]},
        "shard_plan[0]: host memory for tensors needs an extra",
    ),
    ("launch", ("launch",), "launch"),
    ("observe", ("timeline", "run"), "timeline"),
    ("observe", {"training": {"visualize": True}}, "training.visualize needs the extra 'observe'"),
    ("watch", ("watch",), "watch"),
    ("watch", {"training": {"page": True}}, "training.page needs the extra 'watch'"),
    ("pairing", ("invite",), "invite"),
    (
        "padding_free",
        {"data": {"train": "texts.jsonl", "padding_free": True}},
        "data.padding_free needs the extra 'padding_free'",
    ),
    ("planner", ("plan",), "plan"),
    ("reporting", {"training": {"push_to_hub": True}}, "push_to_hub: it needs the extra 'repo"),
    ("reporting", {"training": {"run_name": "a"}}, "training.run_name: unknown key, unless"),
    ("reporting", {"training": {"report_to": "wandb"}}, "needs the extra 'reporting'"),
    ("reporting", {"training": {"early_stopping_patience": 1}}, "early_stopping_patience needs"),
    ("talking", ("chat", "run"), "chat"),
    (
        "talking",
        {"training": {"sample_prompts": ["Hi"]}},
        "training.sample_prompts: it needs the extra 'talking'",
    ),
    (
        "multimodal",
        {"model": {"from_config": {"model_type": "gemma3"}, "tokenizer": "model"}},
        "a gemma3 model, which has several parts, needs an extra",
    ),
    ("verify", ("verify", "model"), "verify"),
    (
        "foreign_formats",
        ("export", "--gguf", "model", "--llama-cpp", "x", "--output", "o"),
        "--gguf needs an extra",
    ),
    ("foreign_formats", {"data": {"train": "corpus"}}, "need the extra foreign_formats"),
    (
        "foreign_formats",
        {"model": {"name_or_path": "model", "tokenizer": "pieces"}},
        "tokenizer.model needs an extra",
    ),
    ("islands", {"island": {"name": "a", "lighthouse": "127.0.0.1:1"}}, "island"),
    ("preferences", {"training": {"objective": "dpo"}}, "dpo"),
    ("classification", {"training": {"objective": "classification"}}, "classification"),
    (
        "classification",
        {"model": {"name_or_path": "model", "label_names": ["a"]}},
        "model.label_names: it needs the extra 'classification', which this installation lacks",
    ),
    (
        "pictures",
        {"training": {"objective": "image-classification"}, "adapter": None},
        "image-classification",
    ),
    ("vision", {"training": {"objective": "image-text-to-text"}}, "image-text-to-text"),
    ("vision", {"training": {"objective": "image-dpo"}}, "image-dpo"),
    ("preferences", {"training": {"objective": "image-dpo"}}, "image-dpo"),
    ("vision", {"training": {"objective": "image-kto"}}, "image-kto"),
    ("chains", {"training": {"objective": "sequential"}, "adapter": None}, "sequential"),
    ("chains", {"model": {"chain": "net"}, "adapter": None}, "model.chain: it needs the extra 'c"),
]


# Runs commands and prints the exit code of each with what it says to stderr.
COMMANDS = """
import contextlib, io, json, sys
from hetero_framework import cli

told = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = cli.main(words)
        except SystemExit as ended:
            code = ended.code
    told.append((code, said.getvalue()))
print(json.dumps(told))
"""


# Those that start runs or load models do so where all are absent, too.
@pytest.mark.parametrize(
    "extra",
    seldom(
        ["", *dict.fromkeys(extra for extra, *_ in WANTS)],
        "host_memory",
        "multimodal",
        "foreign_formats",
    ),
)
def test_who_wants_an_absent_extra_is_told_in_one_sentence(place, extra):
    """And nobody else; the folder is deleted, without a name all are."""
    there = [
        want for want in WANTS if extra or "--gguf" not in want[1]
    ]  # of another extra's command
    wanted = [(words, named) for of, words, named in there if extra in ("", of)]
    (place / "c.yaml").write_text("workers: []\n")
    commands = [["--help"], ["schema"]]
    for number, (words, _) in enumerate(wanted):
        if isinstance(words, dict):
            file = configuration(place, **words).rename(place / f"{number}.json")
            # A model is looked at after workers have started.
            words = ("check" if "model" in words else "train", "--config", str(file))
        commands.append(list(words))
    done = hetero(place, json.dumps(commands), code=COMMANDS, package=without(place, extra))
    assert done.returncode == 0, done.stderr
    help_, schema, *told = json.loads(done.stdout)
    assert help_ == schema == [0, ""]
    for (code, said), (words, named) in zip(told, wanted, strict=True):
        assert (code, named in said, "Traceback" in said) == (2, True, False), (words, said)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_check_and_the_hearts_tests_pass_without(extra, place, tmp_path):
    """All tests without any extra; without a single one all are collected, and those of the
    configuration and the registry run."""
    shutil.copytree(without(place, extra), tmp_path, dirs_exist_ok=True)
    checked = hetero(place, "check", "--config", configuration(place, PLAIN), package=tmp_path)
    assert "The configuration is valid" in checked.stdout, checked.stderr
    defaults = configuration(place, {"output_dir": f"defaults_{extra}"})
    done = hetero(place, "train", "--config", defaults, package=tmp_path)
    assert done.returncode == 0, done.stderr  # whatever extras the defaults name
    for name in ("benchmarks", "docs", "examples", "tests"):
        shutil.copytree(PACKAGE.parent / name, tmp_path / name)
    for file in PACKAGE.parent.iterdir():
        if file.is_file():
            shutil.copy2(file, tmp_path)
    for name in [extra] if extra else EXTRAS:
        shutil.rmtree(tmp_path / "tests" / "extras" / name)
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    some = ["tests/unit/test_registry.py", "tests/unit/config"]
    runs = [["tests/unit", "--collect-only"], some] if extra else [["tests/unit"]]
    for words in runs:
        done = subprocess.run(
            [*program, *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
