"""Runs and commands where extras are taken away: their folders deleted, or their imports refused;
and the modules that a plain run loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hetero_framework
from tests.samples import save_llama, save_texts

PACKAGE = Path(hetero_framework.__file__).parent
EXTRAS = sorted(file.parent.name for file in PACKAGE.glob("extras/*/__init__.py"))
PLAIN = {"report_to": "none", "visualize": False, "timeline_steps": 0, "replan": "never"}
# Refuses the imports of REFUSED, and notes those of the package, in every process.
HOOK = """
import os, sys

PLACE = os.path.dirname(__file__)
with open(os.path.join(PLACE, "refused")) as file:
    REFUSED = ["hetero_framework", "extras", file.read()]

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("hetero_framework"):
            with open(os.path.join(PLACE, f"{os.getpid()}.notes"), "a") as notes:
                notes.write(name + "\\n")
        if name.split(".")[:3] == REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hook())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, texts, and the package without extras."""
    place = tmp_path_factory.mktemp("place")
    save_llama(place / "model", layers=2)
    save_texts(place / "texts.jsonl", 8)
    (place / "hook").mkdir()
    (place / "hook" / "sitecustomize.py").write_text(HOOK)
    without = shutil.copytree(PACKAGE, place / "bare" / PACKAGE.name)
    for extra in EXTRAS:
        shutil.rmtree(without / "extras" / extra)
    return place


def hetero(
    place: Path, *words: object, refused: str = "", bare: bool = False, code: str = ""
) -> subprocess.CompletedProcess[str]:
    package = place / "bare" if bare else PACKAGE.parent
    paths = os.pathsep.join(map(str, (place / "hook", package)))
    (place / "hook" / "refused").write_text(refused)
    run = ("-c", code) if code else ("-m", "hetero_framework")
    program = [sys.executable, *run, *map(str, words)]
    return subprocess.run(
        program,
        capture_output=True,
        text=True,
        cwd=place,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths},
    )


def configuration(place: Path, training: dict[str, Any] | None = None, **sections: Any) -> Path:
    machine = {"ip": "127.0.0.1", "device": "cpu"}
    raw = {
        "coordinator": {**machine, "port": 29871},
        "workers": [{**machine, "id": 1, "port": 29872}],
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


def test_a_plain_run_loads_modules_of_the_heart_alone(place: Path) -> None:
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


def test_a_run_without_any_extra_leaves_out_what_defaults_ask_for(place: Path) -> None:
    file = configuration(place, {"report_to": "none", "output_dir": "bare_run"})
    checked = hetero(place, "check", "--config", file, bare=True)
    assert "The configuration is valid" in checked.stdout, checked.stderr
    done = hetero(place, "train", "--config", file, bare=True)
    assert done.returncode == 0, done.stderr
    log = (place / "bare_run" / "logs" / "coordinator.log").read_text()
    for setting in ("visualize", "timeline_steps", "replan"):
        assert f"training.{setting} needs the extra" in log
    assert (place / "bare_run" / "adapter" / "adapter_model.safetensors").exists()


WANTS: list[tuple[str, tuple[str, ...] | dict[str, Any], str]] = [
    (
        "codecs",
        {"wire": {"gradients": "bf16"}},
        "wire.gradients: \"bf16\" needs the extra 'codecs'",
    ),
    ("convert", ("convert", "x"), "convert"),
    ("launch", ("launch",), "launch"),
    ("observe", ("timeline", "run"), "timeline"),
    ("observe", {"training": {"visualize": True}}, "training.visualize needs the extra 'observe'"),
    ("pairing", ("invite",), "invite"),
    ("planner", ("plan",), "plan"),
    ("planner", {"training": {"replan": "auto"}}, "training.replan needs the extra 'planner'"),
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
    ("verify", ("verify", "model"), "verify"),
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


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_who_wants_an_absent_extra_is_told_in_one_sentence(place: Path, extra: str) -> None:
    """And nobody else; without a name all folders are deleted."""
    wanted = [(words, named) for of, words, named in WANTS if extra in ("", of)]
    commands = [["--help"], ["schema"]]
    for number, (words, _) in enumerate(wanted):
        if isinstance(words, dict):
            file = configuration(place, **words).rename(place / f"{number}.json")
            words = ("train", "--config", str(file))
        commands.append(list(words))
    done = hetero(place, json.dumps(commands), code=COMMANDS, refused=extra, bare=not extra)
    assert done.returncode == 0, done.stderr
    help_, schema, *told = json.loads(done.stdout)
    assert help_ == schema == [0, ""]
    for (code, said), (words, named) in zip(told, wanted, strict=True):
        assert (code, named in said, "Traceback" in said) == (2, True, False), (words, said)
