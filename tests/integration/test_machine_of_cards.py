"""A machine with several devices: one command, a process for each, and the bits of one process."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import cli
from hetero_framework.config import PLAN_FILE
from tests.certificates import keys_of
from tests.installed import needs
from tests.integration.test_parity import LORA, assert_same_runs
from tests.pools import TRAINING, hetero, started
from tests.samples import free_ports, plan_of

pytestmark = [pytest.mark.usefixtures("nothing_left_here"), needs("faults")]
SETTINGS = {**TRAINING, "verify_architecture": False, "replicate_steps": 2, "max_steps": 9}
WHOLE = plan_of(("local", 6))


@pytest.fixture(scope="module")
def written(llama, texts, tmp_path_factory):
    """written(plan, workers, devices=[...]): the file of a run, whose output_dir is beside it."""

    def write(plan: Any, workers: Any = (), **home: Any) -> Path:
        folder = tmp_path_factory.mktemp("cards")
        raw = {
            "coordinator": {"ip": "127.0.0.1", "port": free_ports(1)[0], **home},
            "workers": [*workers],
            "shard_plan": plan,
            "model": {"name_or_path": str(llama)},
            "data": {"train": str(texts), "max_length": 64},
            "adapter": LORA,
            "training": {**SETTINGS, "output_dir": "run"},
        }
        (file := folder / "hetero_config.json").write_text(json.dumps(raw))
        return file

    return write


@pytest.fixture(scope="module")
def whole(written):
    """The output_dir of the undisturbed run in one process."""
    file = written(WHOLE)
    assert cli.main(["train", "--config", str(file)]) == 0
    return file.with_name("run")


@pytest.fixture
def killed(monkeypatch, tmp_path):
    """killed("worker-box@2"): this process is killed once, in a backward of step 4."""

    def arm(process: str) -> None:
        monkeypatch.setenv("HETERO_FAILPOINT", f"{process}/backward@4")
        monkeypatch.setenv("HETERO_FAILPOINT_ONCE", str(tmp_path))

    return arm


@pytest.mark.parametrize("cards", [2, pytest.param(4, marks=pytest.mark.long)])
def test_one_command_trains_on_all_cards_and_one_may_be_killed(
    cards, written, whole, killed, capsys
):
    owners = ["local", *(f"coordinator@{k}" for k in range(2, cards + 1))]
    plan = plan_of(*((owner, 6 - cards + k) for k, owner in enumerate(owners, 1)))
    file = written(plan, devices=["cpu"] * cards)
    killed(f"worker-{owners[-1]}")
    assert cli.main(["train", "--config", str(file)]) == 0
    assert f"worker {owners[-1]} is back in a new process" in "".join(capsys.readouterr())
    assert_same_runs(file.with_name("run"), whole)


@pytest.mark.long
@pytest.mark.parametrize("keyed", [True, False], ids=["keys", "no keys"])
def test_one_worker_command_serves_all_cards_and_one_may_be_killed(
    keyed, written, whole, killed, tmp_path, capsys
):
    box = {"id": "box", "hostname": "laptop.invalid", "devices": ["cpu", "cpu"]}
    file = written(plan_of(("local", 2), ("box", 4), ("box@2", 6)), [box])
    killed("worker-box@2")
    log = tmp_path / "worker.log"
    words = ["--keys", str(keys_of(tmp_path / "keys", "local", "box").path)] if keyed else []
    worker = started(log, "worker", "--config", str(file), "--worker-id", "box", *words)
    try:
        assert cli.main(["train", "--config", str(file), *words]) == 0
        assert worker.wait(60) == 0, log.read_text()
    finally:
        worker.kill()
        worker.wait()
    assert "worker box@2 is back in a new process" in "".join(capsys.readouterr())
    assert "worker box | " in log.read_text()
    assert (file.with_name("run") / "events.jsonl").read_text().count("direct link opened") == 2
    assert_same_runs(file.with_name("run"), whole)


@pytest.mark.long
@needs("planner")
def test_a_run_goes_on_under_a_new_plan_when_its_machine_has_gained_a_card(
    written, whole, killed, capsys
):
    file = written("auto", device="cpu")
    killed("coordinator")
    first = hetero("train", "--config", str(file))
    assert first.returncode == -signal.SIGKILL, first.stderr
    kept = file.with_name("run") / PLAN_FILE
    assert json.loads(kept.read_text())["shard_plan"][-1]["id"] == "local"
    raw = json.loads(file.read_text())
    raw["coordinator"] |= {"device": "auto", "devices": ["cpu", "cpu"]}
    file.write_text(json.dumps(raw))
    assert cli.main(["train", "--config", str(file)]) == 0
    said = "".join(capsys.readouterr())
    assert f"the plan in {kept} is not used: worker coordinator@2 is new" in said
    assert "the run that was cut short here goes on after step" in said
    assert json.loads(kept.read_text())["planned_for"] == {"local": "cpu", "coordinator@2": "cpu"}
    assert_same_runs(file.with_name("run"), whole)
