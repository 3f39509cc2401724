"""Nothing that comes with a model runs code: hostile repositories, and a run in which no process
unpickles anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cli import main
from tests.pools import hetero
from tests.samples import free_ports, plan_of, save_llama, save_texts

ROOT = Path(__file__).resolve().parents[2]
# A module that leaves a trace when it is imported, and whose every name is a class.
CODE = """
open({canary!r}, "w").close()
def __getattr__(name): return type(name, (), {{}})
"""


def edit(file: Path, **fields: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **fields}))


def renamed(folder: Path, name: str, head: bytes) -> None:
    """Weights under a harmless name that are something else."""
    file = folder / "model.safetensors"
    file.write_bytes(head + file.read_bytes()[len(head) :])
    if name != file.name:
        file.rename(folder / name)
        edit(folder / "model.safetensors.index.json", weight_map={"lm_head.weight": name})


def zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "model.safetensors", "w") as file:
        file.writestr("archive/data.pkl", b"cos\nsystem\n(S'true'\ntR.")


CLASSES = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")
REPOSITORIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "auto_map": (
        lambda folder: edit(folder / "config.json", auto_map=CLASSES),
        r"config.json names code of its own \(auto_map\)",
    ),
    "attention": (
        lambda folder: edit(folder / "config.json", _attn_implementation_internal="evil/kernel"),
        "config.json names the attention's code",
    ),
    "pipelines": (
        lambda folder: edit(folder / "config.json", custom_pipelines={"x": {"impl": "evil.Evil"}}),
        r"config.json names code of its own \(custom_pipelines\)",
    ),
    "quantizer": (
        lambda folder: edit(folder / "config.json", quantization_config={"quant_method": "evil"}),
        "quantised with 'evil', which cannot be read here",
    ),
    "tokenizer": (
        lambda folder: edit(folder / "tokenizer_config.json", auto_map=CLASSES),
        "tokenizer_config.json names code of its own",
    ),
    "processor": (
        lambda folder: edit(folder / "processor_config.json", auto_map=CLASSES),
        "processor_config.json names code of its own",
    ),
    "generation": (
        lambda folder: edit(folder / "generation_config.json", custom_generate="evil/decoding"),
        "generation_config.json names code of its own",
    ),
    "pickle": (
        lambda folder: renamed(folder, "model.safetensors", b"\x80\x04"),
        "model.safetensors is not a safetensors file: it is pickled data",
    ),
    "zip": (zipped, "model.safetensors is not a safetensors file: it is a zip archive"),
    "bin": (
        lambda folder: renamed(folder, "pytorch_model.bin", b"PK\x03\x04"),
        "index.json names pytorch_model.bin, but only safetensors are read",
    ),
}


def configuration(folder: Path, model: Path, *, worker: bool = False) -> Path:
    machine = {"ip": "127.0.0.1", "device": "cpu"}
    ports = free_ports(2)
    training = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "visualize": False,
        "output_dir": "run",
    }
    config = {
        "coordinator": {**machine, "port": ports[0]},
        "workers": [{**machine, "id": 1, "port": ports[1]}] if worker else [],
        "shard_plan": plan_of(("local", 1), (1, 2)) if worker else plan_of(("local", 2)),
        "model": {"name_or_path": str(model)},
        "adapter": {"r": 2},
        "data": {"train": str(save_texts(folder / "texts.jsonl", 8)), "max_length": 32},
        "training": training,
    }
    file = folder / "hetero_config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize("case", REPOSITORIES)
def test_a_hostile_repository_is_refused_and_nothing_of_it_runs(case, tmp_path, capfd, monkeypatch):
    spoil, said = REPOSITORIES[case]
    model = save_llama(tmp_path / "model", layers=2)
    canary = tmp_path / "canary"
    (model / "evil.py").write_text(CODE.format(canary=str(canary)))
    spoil(model)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    capfd.readouterr()
    assert main(["train", "--config", str(configuration(tmp_path, model))]) == 2
    shown = capfd.readouterr().err
    message = shown.rpartition("hetero: error: ")[2]
    assert re.search(said, message), shown
    assert str(model) in message
    assert "Traceback" not in shown
    assert not canary.exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# Every Python process below this one loads it at its start. Libraries that are loaded unpickle
# nothing either, so the hook need not wait for ours.
HOOK = """
import os, sys
def hook(event, args):
    if event == "pickle.find_class":
        with open({trace!r}, "a") as file:
            file.write(f"{{sys.argv}}: {{args}}\\n")
        raise RuntimeError(f"something is unpickled: {{args}}")
sys.addaudithook(hook)
open({seen!r} + str(os.getpid()), "w").close()
"""


@pytest.mark.long
def test_no_process_of_a_run_unpickles_anything(tmp_path):
    """Training over two processes, a checkpoint, a resume from it and an export."""
    config = configuration(tmp_path, save_llama(tmp_path / "model", layers=2), worker=True)
    trace, seen = tmp_path / "trace", tmp_path / "seen"
    seen.mkdir()
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(HOOK.format(trace=str(trace), seen=f"{seen}/"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    for command in (
        ["train", "--config", str(config), "--set", "training.save_steps=1"],
        ["train", "--config", str(config), "--set", "training.max_steps=3", "--resume", "latest"],
        ["export", "--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "out")],
    ):
        done = hetero(*command, env=env)
        assert done.returncode == 0, done.stderr
    assert not trace.exists(), trace.read_text()
    assert len(list(seen.iterdir())) >= 5  # two processes in each run, and the export


def test_the_hook_notices_unpickling(tmp_path):
    trace = tmp_path / "trace"
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(trace=str(trace), seen=f"{tmp_path}/"))
    code = "import copyreg, _pickle; _pickle.loads(b'ccollections\\nOrderedDict\\n.')"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "OrderedDict" in trace.read_text()
