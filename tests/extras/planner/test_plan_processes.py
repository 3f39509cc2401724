"""`hetero plan --measure` on real processes, and a run of the plan that it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from hetero_framework import cli
from hetero_framework.config import Config, load_config
from hetero_framework.errors import UserError
from hetero_framework.extras.planner import fleet, load_profile, plan_report, remote_measurement
from hetero_framework.extras.planner.plan_report import Wishes
from hetero_framework.trainer.coordinator import train
from tests.pools import read_metrics
from tests.samples import DEVICE, free_ports, plan_of

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

MACHINE = {"ip": "127.0.0.1", "device": DEVICE}


@pytest.fixture
def raw(pool, tmp_path, llama, texts, verdicts):
    data = {"train": str(texts), "max_length": 64}
    return pool.config(tmp_path / "run", [1, 2], model={"name_or_path": str(llama)}, data=data)


@pytest.mark.long
def test_measured_plan_is_written_and_trains_to_the_same_bits(raw, tmp_path, losses, capsys):
    file, kept = tmp_path / "c.json", tmp_path / "fleet.json"
    file.write_text(json.dumps(raw))
    words = ["plan", "--measure", "--config", str(file), "--save-profile", str(kept)]
    assert cli.main([*words, "--write", "--pin", "1=2:4", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err.count("(measured in") == 3
    assert "coordinator to worker 1: " in printed.err
    profile = load_profile(kept)
    assert [device.id for device in profile.devices] == ["local", 1, 2]
    assert profile.layers == 6
    # The head's time is a difference, which is 0 where another process had the processor.
    assert all(d.layer_forward_s[0] > 0 and d.head_backward_s >= 0 for d in profile.devices)
    ends = {(link.sender, link.receiver) for link in profile.links}
    everyone = ("local", 1, 2)
    assert ends == {(a, b) for a in everyone for b in everyone if a != b}
    config = load_config(file)
    written = [(entry.id, entry.start, entry.end) for entry in config.shard_plan]
    assert written == [(e["id"], e["start"], e["end"]) for e in found["shard_plan"]]
    assert (1, 2, 4) in written
    assert list(json.loads(file.read_text())) == list(raw)
    train(config, debug=True)
    assert read_metrics(tmp_path / "run") == losses([], "whole")


@pytest.mark.long
def test_bench_predicts_the_configured_plan_and_leaves_no_trace(raw, tmp_path, capsys):
    """Coordinator, 1 and 2 with a link of their own, and 2 again, relayed to from 1."""
    raw["shard_plan"] = plan_of(("local", 1), (1, 3), (2, 4), (1, 5), (2, 6))
    for number, links in ((2, "direct"), (4, "relay")):
        raw["shard_plan"][number]["links"] = links
    output, file = tmp_path / "run", tmp_path / "c.json"
    output.mkdir()
    (output / "metrics.jsonl").write_text("an earlier run's\n")
    file.write_text(json.dumps(raw))
    words = ["plan", "--measure", "--evaluate", str(file), "--config", str(file), "--json"]
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "both at once" in printed.err
    assert "a layer takes" in printed.err
    assert [(e["id"], e["start"], e["end"]) for e in found["shard_plan"]] == [
        (entry["id"], entry["start"], entry["end"]) for entry in raw["shard_plan"]
    ]
    assert [edge["way"] for edge in found["boundaries"]] == ["direct", "direct", "direct", "relay"]
    assert all(stage["forward_s"] > 0 for stage in found["stages"])
    assert 0 < found["lower_bound_s"] <= found["predicted_step_s"] * 1.000001
    assert all(link["bytes_per_s"] > 1e5 for link in found["measured_links"])
    assert {path.name for path in tmp_path.iterdir()} == {"run", "c.json"}
    assert (output / "metrics.jsonl").read_text() == "an earlier run's\n"
    assert [path.name for path in output.iterdir()] == ["metrics.jsonl"]


def test_run_that_plans_by_itself_trains_to_the_same_bits_and_keeps_its_plan(
    raw, tmp_path, losses, capsys
):
    file, kept = tmp_path / "c.json", tmp_path / "run" / "plan.json"
    file.write_text(json.dumps({**raw, "shard_plan": "auto"}))
    assert cli.main(["diagram", "--config", str(file), "--output", "-"]) == 2
    assert "`hetero train` measures the machines" in capsys.readouterr().err
    assert cli.main(["train", "--config", str(file)]) == 0
    assert read_metrics(tmp_path / "run") == losses([], "whole")
    plan = json.loads(kept.read_text())
    assert plan["shard_plan"][-1]["end"] == 6
    assert plan["predicted_step_s"] > 0
    first, *_ = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["planned_s"] == plan["predicted_step_s"]
    assert first["predicted_s"] > 0
    assert cli.main(["diagram", "--config", str(file), "--output", "-"]) == 0
    assert "flowchart" in capsys.readouterr().out


@pytest.mark.long
def test_worker_that_the_plan_leaves_out_ends_in_order_and_the_run_goes_on(
    raw, tmp_path, monkeypatch
):
    """Its machine runs `hetero train`, too, and need not know beforehand."""
    [port] = free_ports(1)
    raw["workers"] = [raw["workers"][0], {**raw["workers"][1], "port": port}]
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**raw, "shard_plan": "auto"}))
    monkeypatch.setattr(plan_report, "Wishes", lambda: Wishes(excluded=("2",)))
    command = [sys.executable, "-m", "hetero_framework", "train", "--config", str(file)]
    log = tmp_path / "worker.log"
    with log.open("wb") as output:
        worker = subprocess.Popen([*command, "--worker-id", "2"], stderr=output)
    try:
        while "listens on" not in log.read_text(encoding="utf-8"):
            assert worker.poll() is None, log.read_text(encoding="utf-8")
            time.sleep(0.05)  # a log announces nothing
        assert cli.main(["train", "--config", str(file), "--role", "coordinator"]) == 0
        worker.wait(timeout=60)
    finally:
        worker.kill()
        worker.wait()
    said = log.read_text(encoding="utf-8")
    assert worker.returncode == 0, said
    assert "this machine is not needed: the plan has no layers for it" in said
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert 2 not in {entry["id"] for entry in plan["shard_plan"]}


@pytest.mark.long
def test_worker_that_goes_away_while_it_is_measured_is_named(raw, tmp_path, monkeypatch):
    """A worker that the coordinator has started: it is killed when it has been asked."""
    ports = [worker["port"] for worker in raw["workers"]]
    raw["workers"] = [{**MACHINE, "id": 1}, {**MACHINE, "id": 2, "port": ports[1]}]
    asked = remote_measurement.question

    def kill(number: int, config: Config, model: Any, worker: int | str, **options: Any) -> Any:
        if worker == 1:
            [child] = [p for p in children() if "--run-id" in p[1] and "--worker-id 1" in p[1]]
            os.kill(child[0], signal.SIGKILL)
        return asked(number, config, model, worker, **options)

    monkeypatch.setattr(remote_measurement, "question", kill)
    with pytest.raises(UserError, match=r"it was being measured: lost worker 1: .*SIGKILL"):
        fleet.measure_fleet(Config.from_dict(raw))


def children() -> list[tuple[int, str]]:
    own = psutil.Process().children(recursive=True)
    return [(child.pid, " ".join(child.cmdline())) for child in own]
