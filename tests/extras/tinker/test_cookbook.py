"""Two recipes of tinker-cookbook, as they are, against the endpoint. They need its package."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.extras.tinker.serving import served
from tests.samples import save_llama
from tests.waiting import WAIT_S

pytest.importorskip("tinker_cookbook")
pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.long, pytest.mark.timeout(600)]

MODEL = "Qwen/Qwen3-8B-Base"  # a name that the cookbook knows, of a tiny model here
GSM8K = "---\nconfigs:\n- config_name: main\n  data_files: main/train.jsonl\n---\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the model, the tokenizer and the data that the recipes name."""
    folder = tmp_path_factory.mktemp("cookbook")
    save_llama(folder / MODEL, layers=2, max_position_embeddings=1024)
    talk = [{"role": "user", "content": "the model"}, {"role": "assistant", "content": "trains"}]
    sums = {"question": "What is 2 + 2?", "answer": "2 + 2 is 4.\n#### 4"}
    for name, row in (("HuggingFaceH4/no_robots", {"messages": talk}), ("openai/gsm8k/main", sums)):
        (folder / name).mkdir(parents=True)
        (folder / name / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 16)
    (folder / "openai/gsm8k/README.md").write_text(GSM8K)
    return folder


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("sl_loop", ["max_length=64"]),
        ("rl_loop", ["group_size=4", "max_tokens=8", "loss_fn=importance_sampling"]),
    ],
)
def test_a_recipe_runs_unchanged(recipe, options, folder, tmp_path):
    with served(tmp_path, folder / MODEL) as server:
        told = {"TINKER_API_KEY": server.key, "TINKER_TELEMETRY": "0"}
        told |= {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        words = [f"base_url={server.url}", f"log_path={tmp_path}/log", f"model_name={MODEL}"]
        words += ["batch_size=4", "max_steps=3", "save_every=2", "lora_rank=4", *options]
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *words]
        about = {"cwd": folder, "env": {**os.environ, **told}, "timeout": 4 * WAIT_S}
        done = subprocess.run(command, capture_output=True, text=True, **about)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "log/metrics.jsonl").read_text().splitlines()
        assert len([line for line in lines if "progress" in line]) == 3
        (saved,) = (tmp_path / "out" / "sampler_weights").glob("final")
        assert (saved / "adapter_model.safetensors").is_file()
