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


_EACH = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def begun(server: Server, model: Path, *examples: tuple[Any, ...]) -> subprocess.Popen[str]:
    """A process that runs examples one after the other: their names and options."""
    told = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
    told |= {"TINKER_TELEMETRY": "0", "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{Path.cwd()}"}
    words = [[str(EXAMPLES / name), str(model), *map(str, more)] for name, *more in examples]
    command = [sys.executable, "-c", _EACH, json.dumps(words)]
    return subprocess.Popen(command, env=told, stdout=subprocess.PIPE, text=True)


def adapter(server: Server, path: str) -> Path:
    """The folder of a tinker:// path."""
    return server.file.parent / "out" / "sampler_weights" / path.rpartition("/")[2]


def ran(server: Server, model: Path, *examples: tuple[Any, ...], seconds: float) -> Any:
    """What each example says of its steps, in numbers."""
    with begun(server, model, *examples) as process:
        try:
            out, _ = process.communicate(timeout=seconds)
        finally:
            process.kill()
    assert process.returncode == 0
    *parts, rest = re.split(r"^(tinker://.*)$", out, flags=re.MULTILINE)
    assert not rest.strip()
    for path in parts[1::2]:
        assert PeftConfig.from_pretrained(adapter(server, path)).r == 32
    said = (re.findall(r"^step \d+: [^\d-]*(-?[\d.]+)", part, re.MULTILINE) for part in parts[::2])
    return [[float(number) for number in numbers] for numbers in said]


SFT = "tinker://any/sampler_weights/sft"


@pytest.mark.timeout(600)
def test_the_examples_run_one_after_the_other(model, tmp_path):
    """Each finishes its session, so that the next one gets the model at once."""
    with served(tmp_path, model, *WHOLE) as server:
        distill = "distill.py", "--steps", 1, "--teacher", SFT
        examples = ("sft.py", "--steps", 3), distill, ("grpo.py", "--steps", 1)
        losses, distances, rights = ran(server, model, *examples, seconds=8 * WAIT_S)
    assert losses[-1] < losses[0]
    assert len(distances) == len(rights) == 1
    assert distances[0] > 0
    assert all(0 <= share < 20 for share in rights)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_grpo_learns_sums_and_distillation_the_teacher(model, tmp_path):
    with served(tmp_path, model, *WHOLE) as server:
        distill = "distill.py", "--steps", 60, "--teacher", SFT
        examples = ("grpo.py",), ("sft.py", "--steps", 60), distill
        rights, _, distances = ran(server, model, *examples, seconds=840)
    assert sum(rights[:3]) / 3 < 10
    assert sum(rights[-10:]) / 10 > 60
    assert sum(distances[-3:]) < sum(distances[:3]) / 2


def left_by_grpo(folder: Path, model: Path, cuts: Any, steps: int) -> tuple[bytes, bytes]:
    """Texts and rewards, and the weights. The coordinator is started again when it has died."""
    with served(folder, model, *cuts) as server:
        options = "--steps", steps, "--log", folder / "log"
        with begun(server, model, ("grpo.py", *options)) as example:
            try:
                for _ in range(int(600 / 0.5)):
                    try:
                        out, _ = example.communicate(timeout=0.5)
                        break
                    except subprocess.TimeoutExpired:
                        if server.process.poll() is not None:
                            server.kill()  # reads and closes what it said
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
