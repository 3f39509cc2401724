"""The device layer on the emulated device, where it can be built (`tests/emulated_device`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.emulated_device.build import SOURCE, build, why_not
from tests.emulated_device.mutations import MUTATIONS, SEEDS

ROOT = Path(__file__).parents[2]
CHECKS = (
    *("codecs", "parity_fp32", "parity_bf16", "fp16", "padding_free", "loss_chunks", "tied"),
    *("recompute", "several_stages", "cpu_coordinator", "wire_codecs", "resume"),
    *("memory_returns",),
)
"""Of `benchmarks.gpu`, those that need no kernel of a real card and measure no time."""

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.xdist_group("emulated"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return build(pytestconfig.cache.mkdir("emulated_device"))


def run(library: Path, *arguments: str, seed: int = 0, **settings: str) -> str:
    """What `python ARGUMENTS` prints in a process with the emulated device."""
    paths = [str(SOURCE.with_name("site")), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HETERO_EMULATED_LIBRARY": str(library),
        "HETERO_EMULATED_DELAY_US": "2000",
        "HETERO_EMULATED_SEED": str(seed),
        **settings,
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.parametrize("kind", ["cuda", pytest.param("npu", marks=pytest.mark.emulated)])
def test_every_planted_mistake_of_stream_order_is_found(kind: str, library: Path) -> None:
    program = ("-m", "tests.emulated_device.mutations", f"{kind}:0")
    printed = run(library, *program, HETERO_EMULATED=kind)
    wrong: dict[str, list[int]] = defaultdict(list)
    for line in map(json.loads, printed.splitlines()):
        wrong[line["name"]].append(line["wrong"])
    assert wrong.pop("none") == [0] * len(SEEDS)
    assert list(wrong) == [mutation.name for mutation in MUTATIONS]
    assert [name for name, found in wrong.items() if not any(found)] == []


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("cuda", 0),
        ("invented", 0),
        *(pytest.param("cuda", seed, marks=pytest.mark.emulated) for seed in SEEDS[1:]),
        *(pytest.param("npu", seed, marks=pytest.mark.emulated) for seed in SEEDS),
    ],
)
def test_the_device_suite_passes(kind: str, seed: int, library: Path) -> None:
    suite = ("-m", "pytest", "-p", "no:cacheprovider", "tests/unit/core/test_devices.py")
    run(library, *suite, seed=seed, HETERO_EMULATED=kind)


def test_a_model_trains_as_on_the_cpu_to_the_bit(library: Path) -> None:
    program = ("-m", "tests.emulated_device.training")
    assert run(library, *program, "cuda:1") == run(library, *program, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize(("kind", "seed"), [*(("cuda", seed) for seed in SEEDS), ("npu", 0)])
@pytest.mark.parametrize("check", CHECKS)
def test_a_check_of_a_card_passes(check: str, kind: str, seed: int, library: Path) -> None:
    arguments = ["--device", f"{kind}:1", "--tiny", "--minutes", "10", "--only", check]
    program = ("-m", "benchmarks.gpu", *arguments)
    lines = run(library, *program, seed=seed, HETERO_EMULATED=kind).splitlines()
    assert json.loads(lines[-1])["ok"]


@pytest.mark.emulated
@pytest.mark.parametrize("seed", SEEDS)
def test_no_transfer_beside_computing_is_wrong(seed: int, library: Path) -> None:
    program = (
        "from benchmarks.gpu_checks import mixed_up;"
        "from hetero_framework.core.devices import open_device;"
        "print(mixed_up(open_device('cuda:1'), 200, 4096, 256))"
    )
    assert run(library, "-c", program, seed=seed) == "0\n"
