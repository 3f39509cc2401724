"""The examples of examples/tinker: they run, learn, and give the same bits under cuts and kills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peft import PeftConfig

from tests.extras.tinker.serving import Server, served
from tests.samples import module_of
from tests.waiting import WAIT_S

pytest.importorskip("tinker")
pytestmark = pytest.mark.xdist_group("pool")

EXAMPLES = Path(__file__).parents[3] / "examples/tinker"
WHOLE = (("local", 3),)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    module_of(EXAMPLES / "sums.py").make(folder)
    return folder / "model"


def begun(server: Server, name: str, model: Path, *options: Any) -> subprocess.Popen[str]:
    """An example's process."""
    told = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
    told |= {"TINKER_TELEMETRY": "0", "PYTHONWARNINGS": "default"}
    words = [sys.executable, EXAMPLES / name, model, *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(word) for word in words], env=told, **pipes)


def adapter(server: Server, path: str) -> Path:
    """The folder of a tinker:// path."""
    return server.file.parent / "out" / "sampler_weights" / path.rpartition("/")[2]


def ran(server: Server, name: str, model: Path, *options: Any, seconds: float = 2 * WAIT_S) -> Any:
    """What an example prints: the numbers of its steps, and the path of its adapter."""
    with begun(server, name, model, *options) as example:
        try:
            *lines, path = example.communicate(timeout=seconds)[0].splitlines()
        finally:
            example.kill()
    assert example.returncode == 0
    assert PeftConfig.from_pretrained(adapter(server, path)).r == 32
    return [float(re.search(r": [^\d-]*(-?[\d.]+)", line)[1]) for line in lines], path


def test_the_examples_run_one_after_the_other(model, tmp_path):
    """Each finishes its session, so that the next one gets the model at once."""
    with served(tmp_path, model, *WHOLE) as server:
        losses, teacher = ran(server, "sft.py", model, "--steps", 6)
        assert losses[-1] < losses[0]
        distances, _ = ran(server, "distill.py", model, "--steps", 2, "--teacher", teacher)
        assert distances[0] > 0
        rights, _ = ran(server, "grpo.py", model, "--steps", 2)
        assert all(0 <= share < 20 for share in rights)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_grpo_learns_sums_and_distillation_the_teacher(model, tmp_path):
    with served(tmp_path, model, *WHOLE) as server:
        rights, _ = ran(server, "grpo.py", model, seconds=600)
        assert sum(rights[:3]) / 3 < 10
        assert sum(rights[-10:]) / 10 > 60
        _, teacher = ran(server, "sft.py", model, "--steps", 40, seconds=600)
        distances, _ = ran(
            server, "distill.py", model, "--steps", 30, "--teacher", teacher, seconds=600
        )
        assert sum(distances[-3:]) < sum(distances[:3]) / 4


def left_by_grpo(folder: Path, model: Path, cuts: Any, steps: int) -> tuple[bytes, bytes]:
    """Texts and rewards, and the weights. The coordinator is started again when it has died."""
    with served(folder, model, *cuts) as server:
        options = "--steps", steps, "--log", folder / "log"
        with begun(server, "grpo.py", model, *options) as example:
            try:
                for _ in range(int(600 / 0.5)):
                    try:
                        out, _ = example.communicate(timeout=0.5)
                        break
                    except subprocess.TimeoutExpired:
                        if server.process.poll() is not None:
                            server.start()
            finally:
                example.kill()
        assert example.returncode == 0
        weights = adapter(server, out.splitlines()[-1]) / "adapter_model.safetensors"
        return (folder / "log").read_bytes(), weights.read_bytes()


CUTS = {1: WHOLE, 2: (("local", 1), (1, 3)), 3: (("local", 1), (1, 2), (2, 3))}
MOMENTS = ("evaluation", "backward", "optimizer-half")  # sampling, forward_backward, optim_step


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    return left_by_grpo(tmp_path_factory.mktemp("undisturbed"), model, WHOLE, 10)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cut", "point"),
    [(2, ""), (3, "")]
    + [(2, f"{who}/{at}@5") for who in ("coordinator", "worker-1") for at in MOMENTS],
)
def test_grpo_gives_the_same_bits(cut, point, undisturbed, model, tmp_path, monkeypatch):
    """Completions, rewards and weights after 10 steps, whichever process is killed in step 5."""
    if point:
        monkeypatch.setenv("HETERO_FAILPOINT", point)
        (once := tmp_path / "once").mkdir()
        monkeypatch.setenv("HETERO_FAILPOINT_ONCE", str(once))
    assert left_by_grpo(tmp_path, model, CUTS[cut], 10) == undisturbed
    texts = json.loads(undisturbed[0].splitlines()[-1])["texts"]
    assert len(set(texts)) > 1
    assert not point or [*once.iterdir()]
