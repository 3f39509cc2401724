"""The device layer on the emulated device, where it can be built (`tests/emulated_device`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest

from benchmarks.gpu import CHECKS
from tests.emulated_device.build import SOURCE, build, why_not
from tests.emulated_device.full import PLACES
from tests.emulated_device.parity import pairs
from tests.samples import save_llama, save_texts

ROOT = Path(__file__).parents[2]
mutations = pytest.importorskip("tests.emulated_device.mutations", reason="without host_memory")
SKIPPED = (
    *("lora_4bit", "copies", "overlap", "compiled", "lora_int8", "optimizer_8bit"),
    "stream_8b",
)
"""Checks of `benchmarks.gpu` that need kernels or times of a real card."""
OF_ANOTHER = (
    *("parity_bf16", "fp16", "stream_frozen", "offload_optimizer"),
    *("memory_returns", "out_of_memory", "estimate"),
)
"""Those in which an accelerator that is not CUDA goes another way: casts, streams, memory."""

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.xdist_group("emulated"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="session")
def library(pytestconfig, tmp_path_factory):
    cache = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    name = "emulated_device"
    return build(tmp_path_factory.mktemp(name) if cache is None else cache.mkdir(name))


def run(library: Path, *arguments: str, **settings: str) -> str:
    """What `python ARGUMENTS` prints in a process with the emulated device, whose delays are drawn
    from HETERO_EMULATED_SEED."""
    paths = [str(SOURCE.with_name("site")), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        "HETERO_EMULATED_SEED": "0",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HETERO_EMULATED_LIBRARY": str(library),
        "HETERO_EMULATED_DELAY_US": "2000",
        **settings,
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.emulated
@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_every_planted_mistake_of_stream_order_is_found(kind, library):
    program = ("-m", "tests.emulated_device.mutations", f"{kind}:0")
    printed = run(library, *program, HETERO_EMULATED=kind)
    wrong: dict[str, list[int]] = defaultdict(list)
    for line in map(json.loads, printed.splitlines()):
        wrong[line["name"]].append(line["wrong"])
    assert wrong.pop("none") == [0] * len(mutations.SEEDS)
    assert list(wrong) == [mutation.name for mutation in mutations.MUTATIONS]
    assert [name for name, found in wrong.items() if not any(found)] == []


@pytest.mark.parametrize(
    "kind", ["cuda", *(pytest.param(k, marks=pytest.mark.emulated) for k in ("npu", "invented"))]
)
def test_the_device_suite_passes(kind, library):
    suite = ("-m", "pytest", "-p", "no:cacheprovider", "tests/unit/core/test_devices.py")
    run(library, *suite, HETERO_EMULATED=kind)


def test_a_model_trains_as_on_the_cpu_to_the_bit(library):
    program = ("-m", "tests.emulated_device.training")
    assert run(library, *program, "cuda:1") == run(library, *program, "cpu")


@pytest.mark.emulated
@pytest.mark.parametrize(("kind", "checks"), [("cuda", CHECKS), ("npu", OF_ANOTHER)])
def test_every_check_of_a_card_passes_or_says_why_not(kind, checks, library):
    program = ("-m", "benchmarks.gpu", "--device", f"{kind}:1", "--tiny", "--minutes", "12")
    only = ("--only", ",".join(checks))
    _, *lines = run(library, *program, *only, HETERO_EMULATED=kind).splitlines()
    results = {line["check"]: line for line in map(json.loads, lines)}
    assert list(results) == list(checks)
    skipped = {check for check, result in results.items() if "skipped" in result}
    assert skipped == ({*SKIPPED} if kind == "cuda" else {"out_of_memory"})
    assert [check for check in results if check not in skipped and not results[check]["ok"]] == []


@pytest.mark.emulated
def test_runs_of_several_processes_give_the_bits_of_the_same_cut_on_the_cpu(library):
    printed = run(library, "-m", "tests.emulated_device.parity")
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [(line["case"], line["plan"]) for line in lines] == pairs()
    assert [line for line in lines if not line["equal"]] == []


TIMES = {"HETERO_EMULATED_COPY_RATE": "200e6", "HETERO_EMULATED_KERNEL_US": "2000"}
"""20 MB are copied in 0.1 s, and 30 matrix products are computed in 0.06 s."""


@pytest.mark.emulated
def test_copies_and_matrix_products_take_the_times_that_are_set(library):
    program = ("-m", "tests.emulated_device.times", "cuda:1")
    took = json.loads(run(library, *program, HETERO_EMULATED_DELAY_US="0", **TIMES))
    assert took.pop("written_later")
    # What is done at once takes the maximum, what is not takes the sum. No time is ever too short.
    ideal = {
        "copy": (0.1, 0.11),
        "products": (0.06, 0.061),
        "layers": (0.16, 0.175),
        "both": (0.1, 0.125),
        "one_after_the_other": (0.16, 0.19),
        "one_way_twice": (0.2, 0.23),
        "both_ways": (0.1, 0.13),
        "from_plain": (0.1, 0.15),
        "to_plain": (0.1, 0.15),
        "queue": (0.0, 0.05),
        "between_events": (0.2, 0.23),
    }
    assert list(took) == list(ideal)
    wrong = {
        name: took[name] for name, (least, most) in ideal.items() if not least <= took[name] < most
    }
    assert wrong == {}


@pytest.mark.emulated
def test_without_set_times_nothing_is_slower(library):
    program = ("-m", "tests.emulated_device.times", "cuda:1")
    took = json.loads(run(library, *program, HETERO_EMULATED_DELAY_US="0"))
    assert took["copy"] < 0.1
    assert took["products"] < 0.06
    assert took["one_after_the_other"] < 0.16


PINNED = """
import torch
held = [torch.empty(2_000_000, dtype=torch.uint8, pin_memory=True) for _ in range(3)]  # 2 MiB each
part = held[0][8:80]
assert part.is_pinned() and part.view(torch.float32).is_pinned()
try:
    torch.empty(2_000_000, dtype=torch.uint8, pin_memory=True)
except torch.AcceleratorError as error:
    print(error)
del held, part
torch.empty(2_000_000, dtype=torch.uint8, pin_memory=True)  # one that was given back
torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
"""


def test_pinned_memory_ends_at_its_limit(library):
    said = run(library, "-c", PINNED, HETERO_EMULATED_PINNED_MIB="7")
    assert said.startswith("CUDA error: out of memory\n")
    assert run(library, "-c", PINNED) == ""


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("rate", "offload", "most_s"),
    [
        ("100e6", 16, lambda seen: 1.05 * seen["resident_s"]),
        ("100e6", 8, lambda seen: 1.05 * seen["resident_s"]),
        ("6e6", 16, lambda seen: 1.08 * seen["bound_s"]),
        ("4e6", 8, lambda seen: 1.08 * seen["bound_s"]),
    ],
)
def test_layers_that_visit_cost_what_computing_does_not_hide(rate, offload, most_s, library):
    """By the device's own clock, which the machine's load does not slow down."""
    times = {"HETERO_EMULATED_COPY_RATE": rate, "HETERO_EMULATED_KERNEL_US": "2000"}
    program = ("-m", "tests.emulated_device.streaming", "cuda:1", str(offload), "3")
    seen = json.loads(run(library, *program, HETERO_EMULATED_DELAY_US="0", **times))
    assert seen["equal"]
    assert seen["misses"] == 0
    assert seen["streamed_s"] <= most_s(seen)
    assert seen["streamed_bytes"] < seen["resident_bytes"]


@pytest.mark.emulated
@pytest.mark.parametrize(("rate", "most"), [("100e6", 1.08), ("15e6", 1.35)])
def test_trained_layers_that_visit_cost_little(rate, most, library):
    """With copies that computing hides, but for those of the step, and with copies that take about
    as long as computing."""
    times = {"HETERO_EMULATED_COPY_RATE": rate, "HETERO_EMULATED_KERNEL_US": "8000"}
    program = ("-m", "tests.emulated_device.streaming", "cuda:1", "16", "4", "trained")
    seen = json.loads(run(library, *program, HETERO_EMULATED_DELAY_US="0", **times))
    assert seen["equal"]
    assert seen["misses"] == 0
    assert seen["streamed_s"] <= most * seen["resident_s"]
    assert rate != "15e6" or seen["copied_s"] > 0.9 * seen["resident_s"]
    assert seen["streamed_bytes"] < 0.4 * seen["resident_bytes"]


@pytest.mark.emulated
@pytest.mark.parametrize("rate", ["200e6", "40e6"])
def test_states_and_stored_inputs_visit_beside_computing(rate, library):
    """The copies of the inputs take 1 and 5 ms, the products of a layer 9 ms."""
    times = {"HETERO_EMULATED_COPY_RATE": rate, "HETERO_EMULATED_KERNEL_US": "3000"}
    program = ("-m", "tests.emulated_device.visits", "cuda:1")
    seen = json.loads(run(library, *program, HETERO_EMULATED_DELAY_US="0", **times))
    assert seen["step_s"] <= 1.08 * seen["copies_s"]  # both ways at once
    assert seen["stored_s"] <= 1.05 * seen["resident_s"]
    assert seen["stored_bytes"] <= 0.35 * seen["resident_bytes"]


@pytest.fixture(scope="module")
def first_run(library, tmp_path_factory):
    """first_run(cards, kills=...): the losses of `hetero train --model` on that many cards."""
    place = tmp_path_factory.mktemp("first")
    save_llama(place / "model", layers=6)
    save_texts(place / "texts.jsonl", 16)

    def losses(cards: int, *, kills: bool = False) -> list[float]:
        output, once = place / f"{cards}{kills}", place / f"once{cards}"
        settings = ("training.max_steps=5", "data.max_length=32", "training.report_to=none")
        words = [word for setting in settings for word in ("--set", setting)]
        words += ["--model", str(place / "model"), "--data", str(place / "texts.jsonl")]
        more = {"HETERO_EMULATED_DEVICES": str(cards), "HETERO_EMULATED_DELAY_US": "0"}
        if kills:  # each process that the plan gives layers
            points = (f"worker-coordinator@{k}/backward@3" for k in range(2, cards + 1))
            once.mkdir()
            more |= {"HETERO_FAILPOINT": ",".join(points), "HETERO_FAILPOINT_ONCE": str(once)}
        program = ("-m", "hetero_framework", "train", "--output-dir", str(output), *words)
        run(library, *program, **more)
        assert not kills or list(once.iterdir()) != []
        lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [line["loss"] for line in map(json.loads, lines) if "loss" in line]

    return losses


@pytest.mark.emulated
@pytest.mark.parametrize(("cards", "kills"), [(2, False), (2, True), (4, True)])
def test_one_command_trains_on_all_cards_and_each_may_be_killed(cards, kills, first_run):
    assert first_run(cards, kills=kills) == first_run(1)


KILLED = "a_worker_that_is_killed_in_a_backward_comes_back_and_the_result_is_the_same"
KILLED_IN_FULL = "a_worker_whose_trained_layers_visit_is_killed_at_every_moment_of_a_step"
RESUMED_IN_FULL = "full_training_goes_on_with_other_layers_in_host_memory"
INTEGRATION = (
    f"integration/test_recovery.py::test_{KILLED}",
    "integration/test_recovery.py::test_a_coordinator_that_is_killed_goes_on_with_the_same_command",
    "extras/islands/test_islands.py::test_two_islands_of_any_plans_are_one_training",
    "extras/planner/test_plan_processes.py"
    "::test_measured_plan_is_written_and_trains_to_the_same_bits",
    "integration/test_resume.py::test_resume_under_other_plans_equals_the_uninterrupted_run",
    "integration/test_snapshot.py",
    "extras/host_memory/test_runs.py",
    f"extras/host_memory/test_full_runs.py::test_{KILLED_IN_FULL}",
    f"extras/host_memory/test_full_runs.py::test_{RESUMED_IN_FULL}",
    "extras/vision/test_streamed_towers.py",
)
"""Tests of several processes that compare runs on the device with one another."""


def test_the_tests_of_several_processes_are_there():
    for name in INTEGRATION:
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), name


@pytest.mark.emulated
@pytest.mark.parametrize("name", INTEGRATION)
def test_what_is_lost_resumed_measured_or_summed_is_right(name, library):
    suite = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "not faults")
    run(library, *suite, f"tests/{name}", HETERO_TEST_DEVICE="cuda:1")


@pytest.mark.emulated
def test_a_full_device_ends_the_run_with_advice_at_every_place(library, tmp_path):
    """Only the results can still be gathered then."""
    place = str(tmp_path / "place")
    program = ("-m", "tests.emulated_device.full")
    printed = run(library, *program, HETERO_EMULATED_FULL=place)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [(line["device"], line["place"]) for line in lines] == list(product((0, 1), PLACES))
    gathered = [line.pop("code") for line in lines if line["place"] == "gather *"]
    assert gathered == [0, 0]
    for line in (line for line in lines if "code" in line):
        assert line["code"] == 6, line
        assert f"memory ran out on cuda:{line['device']}, it needs at least" in line["said"], line
        assert "fewer layers" in line["said"], line
    first = {(line["device"], line["place"]): line.get("first", "") for line in lines}
    assert all("loading layers" in line["said"] for line in lines if line["place"] == "load *")
    assert "stage 0, forward of micro-batch 0" in first[0, "forward 2"]
    assert "stage 0, backward of micro-batch 0" in first[0, "backward 2"]
    # The last stage does both as one.
    assert "stage 1, forward of micro-batch 0" in first[1, "forward 2"]
    assert "stage 1, forward of micro-batch 0" in first[1, "backward 2"]
    assert "gradients" in first[0, "norms 2"]
    assert "gradients" in first[1, "norms 2"]


WAITS: dict[str, str] = {}
"""Synchronisations that a micro-batch may make: a part of the place, and why it is needed. None."""


@pytest.mark.emulated
def test_no_micro_batch_makes_the_host_wait_for_the_device(library, tmp_path):
    """Each would leave the device idle until the host has queued the next operations."""
    trace = tmp_path / "syncs"
    run(library, "-m", "tests.emulated_device.syncs", HETERO_EMULATED_SYNCS=str(trace))
    files = list(tmp_path.glob("syncs.*"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(files) == 2  # a stage each
    assert all("report_gradients" in file.read_text(encoding="utf-8") for file in files)
    waits = [line for line in lines if "engine/executor.py" in line and " run_next < " in line]
    assert [line for line in waits if not any(place in line for place in WAITS)] == []


@pytest.mark.emulated
def test_no_transfer_beside_computing_is_wrong(library):
    program = (
        "from benchmarks.gpu_checks import mixed_up;"
        "from hetero_framework.core.devices import open_device;"
        "print(mixed_up(open_device('cuda:1'), 200, 4096, 256))"
    )
    assert run(library, "-c", program) == "0\n"
