"""Faults of a configuration that are reported before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PretrainedConfig

from hetero_framework.commands.preflight import declared_layers, preflight
from hetero_framework.config import Config
from hetero_framework.errors import ArchitectureError, ConfigError, UserError
from hetero_framework.models.cut import tiny
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.library import LIBRARY_ERRORS
from tests.installed import needs

Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')

    def config(**sections: dict[str, Any]) -> Config:
        raw: dict[str, Any] = {
            "coordinator": {"ip": "127.0.0.1"},
            "shard_plan": [{"id": "local", "start": 0, "end": 2}],
            "model": {"name_or_path": "model"},
            "data": {"train": "texts.jsonl"},
        }
        for name, section in sections.items():
            raw[name] = {**raw.get(name, {}), **section} if isinstance(section, dict) else section
        return Config.from_dict(raw, tmp_path)

    return config


def test_a_configuration_without_fault_passes(make):
    preflight(make(), writes=True)


@pytest.mark.parametrize(
    ("section", "changed", "said"),
    [
        ("model", {"name_or_path": "./none"}, "no model directory"),
        ("model", {"tokenizer": "./none"}, "no folder .*none with a tokenizer"),
        ("shard_plan", [{"id": "local", "start": 0, "end": 3}], "but the model has 2"),
        ("data", {"train": "none.jsonl"}, "not found: none.jsonl"),
        ("data", {"eval": "none.jsonl"}, "not found: none.jsonl"),
        ("data", {"chat_template_path": "none.jinja"}, "data.chat_template_path: there is no file"),
        ("training", {"optim": "adamm"}, "'adamm' is not an optimizer"),
        ("training", {"lr_scheduler_type": "cosinus"}, "'cosinus' is not a schedule"),
        ("training", {"output_dir": "texts.jsonl"}, "training.output_dir: .* it is a file"),
        ("training", {"output_dir": "texts.jsonl/a"}, "training.output_dir: .*texts.jsonl is a"),
    ],
)
def test_each_fault_is_reported(make, section, changed, said):
    with pytest.raises(UserError, match=said):
        preflight(make(**{section: changed}), writes=True)


def test_all_faults_are_reported_at_once(make):
    config = make(
        data={"train": "none.jsonl"}, training={"optim": "adamm"}, model={"tokenizer": "./x"}
    )
    with pytest.raises(ConfigError, match="has 3 problems") as raised:
        preflight(config)
    for said in ("none.jsonl", "adamm", "with a tokenizer"):
        assert said in raised.value.message


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_another_user_is_reported(make, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot be written by this user"):
        preflight(make(training={"output_dir": "closed/run"}), writes=True)


NAMES = tiny.architecture_names()
# Their configurations become large models, which take 10 to 35 s to be looked at.
LARGE = ("blt", "VibeVoiceAsrForConditionalGeneration", "Emu3ForConditionalGeneration")
FEW = set(NAMES[::8]).difference(LARGE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in NAMES]
)
def test_the_declared_layers_are_those_of_the_model(name):
    """Of every architecture: a plan that fits is never refused for what config.json says."""
    try:
        config = tiny.tiny_config(name)
        layers = introspect(tiny.causal_lm_config(config)).num_layers
    except (ArchitectureError, ConfigError, *LIBRARY_ERRORS):
        pytest.skip("it cannot be cut")
    assert declared_layers(_written(config)) in (None, layers)


def _written(config: PretrainedConfig) -> dict[str, Any]:
    return json.loads(config.to_json_string())


@needs("planner", "verify")
@pytest.mark.parametrize(
    "command", ["train", "check", "verify", "plan --measure", "plan --dry-run"]
)
def test_preflight_runs_without_torch(make, tmp_path, command):
    file = tmp_path / "c.json"
    file.write_text(json.dumps(make(model={"name_or_path": "./none"}).to_dict()))
    program = (
        "import sys\n"
        "from hetero_framework import cli\n"
        "code = cli.main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split(), "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, "no model directory" in done.stderr) == (2, True), done.stderr
