"""`hetero train` with a worker of its machine, and a hub on the loopback that takes the adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load

from tests.hub_server import TOKEN, HubServer
from tests.pools import TRAINING
from tests.samples import machines_here

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left_here")]
WATCH = (
    'import os\nprint("TOKEN IS HERE" if "HF_TOKEN" in os.environ else "NO TOKEN", flush=True)\n'
)


@pytest.fixture
def configuration(tmp_path, llama, texts):
    pushes = {"push_to_hub": True, "hub_strategy": "checkpoint", "hub_private_repo": True}
    saves = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    config = {
        **machines_here(("local", 3), ("box", 6)),
        "model": {"name_or_path": str(llama)},
        "adapter": {"r": 4},
        "data": {"train": str(texts), "max_length": 64},
        "training": {**TRAINING, **pushes, **saves, "output_dir": str(tmp_path / "lora")},
    }
    file = tmp_path / "hetero_config.json"
    file.write_text(json.dumps(config))
    (tmp_path / "watch.py").write_text(WATCH)
    return file


def train(file: Path, **environment: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    command = [sys.executable, "-m", "hetero_framework", "train", "--config", str(file)]
    command += ["--import", str(file.with_name("watch.py"))]
    told = {"capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, env={**os.environ, **environment}, **told)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("fail", [None, 500])
def test_a_run_ends_with_its_result_whatever_the_hub_does(configuration, fail):
    output = configuration.with_name("lora")
    with HubServer() as hub:
        hub.fail = fail
        code, said = train(configuration, **hub.environment())
    assert code == 0, said
    result = {file.name: file.read_bytes() for file in (output / "adapter").iterdir()}
    assert len(load(result["adapter_model.safetensors"])) > 0
    worker = (output / "logs" / "worker-box.log").read_text()
    assert "NO TOKEN" in worker
    assert "TOKEN IS HERE" in said
    files = [file for file in output.rglob("*") if file.is_file()]
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()]
    assert TOKEN not in said
    assert [path.name for path in (output / "checkpoints").glob("step_*")] == ["step_3"]
    if fail is not None:
        assert "the adapter is not on the hub: HfHubHTTPError: Server error '500" in said
        assert f"hf upload lora {output / 'adapter'} --private" in said
        return
    arrived = hub.repositories["me/lora"]
    assert {path: data for path, data in arrived.items() if "/" not in path} == result
    assert json.loads(arrived["last-checkpoint/manifest.json"])["step"] == 3


def test_a_machine_without_a_token_is_told_before_the_run(configuration):
    empty = {"HF_TOKEN": "", "HF_HOME": str(configuration.parent), "HF_HUB_OFFLINE": "0"}
    code, said = train(configuration, **empty)
    assert (code, configuration.with_name("lora").exists()) == (2, False)
    assert "training.push_to_hub is set, and there is no token of the hub" in said
