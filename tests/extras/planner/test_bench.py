"""`hetero bench` prints what `hetero plan --evaluate` prints; no process is measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cli import main
from hetero_framework.extras.planner import FleetProfile, fleet
from tests.extras.planner.fleets import device, raw_fleet
from tests.samples import plan_of

MEASURED = raw_fleet(
    [
        device("local", embedding_forward_s=0.004, embedding_backward_s=0.005),
        device(1),
        device("box", layer_forward_s=0.003, head_forward_s=0.006, head_backward_s=0.007),
    ],
    speed=1e8,
)
PLAN = plan_of(("local", 1), (1, 4), ("box", 8))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    asked: list[Any] = []

    def measured(config: Any, **given: Any) -> FleetProfile:
        asked.append((config, given))
        return FleetProfile.from_dict(MEASURED)

    monkeypatch.setattr(fleet, "measure_fleet", measured)
    machine = {"ip": "127.0.0.1", "device": "cpu"}
    small = {"model_type": "llama", "num_hidden_layers": 8}
    raw = {
        "coordinator": machine,
        "workers": [{**machine, "id": 1, "port": 7001}, {**machine, "id": "box", "port": 7002}],
        "shard_plan": PLAN,
        "model": {"from_config": small, "tokenizer": "none"},
    }
    file = tmp_path / "c.json"
    file.write_text(json.dumps(raw), encoding="utf-8")
    (tmp_path / "fleet.json").write_text(json.dumps(MEASURED), encoding="utf-8")
    return file


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


def test_bench_prints_the_output_of_plan(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate = ("--evaluate", str(file), "--config", str(file))
    bench = shown(capsys, "bench", "--config", str(file))
    assert bench == shown(capsys, "plan", "--measure", *evaluate)
    saved = str(file.with_name("fleet.json"))
    assert bench == shown(capsys, "plan", "--profile", saved, "--evaluate", str(file))


def test_seconds_of_stages_and_boundaries_follow_from_those_of_layers(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(shown(capsys, "bench", "--config", str(file), "--json"))
    first, middle, last = found["stages"]
    assert first == {"forward_s": pytest.approx(0.005), "backward_s": pytest.approx(0.007)}
    assert middle == {"forward_s": pytest.approx(0.003), "backward_s": pytest.approx(0.006)}
    assert last["forward_s"] + last["backward_s"] == pytest.approx(4 * 0.005 + 0.013)
    for boundary in found["boundaries"]:
        assert boundary["way"] == "direct"
        assert boundary["activation_s"] == pytest.approx(1e5 / 1e8)
        assert boundary["latency_s"] == pytest.approx(1e-5)
    assert len(found["measured_links"]) == 6
    assert found["measured_links"][0] == MEASURED["links"][0]
    table = shown(capsys, "bench", "--config", str(file)).splitlines()
    [row] = [line for line in table if line.startswith("1 ")]
    assert re.split(" {2,}", row)[2:] == [
        *("layers 1-3", "3.00 ms", "6.00 ms"),
        *("direct", "1.00 ms", "1.00 ms", "0.01 ms"),
    ]


def test_settings_of_the_command_line_and_links_of_the_run_count(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("bench", "--config", str(file), "--json", "--set", 'links="relay"')
    found = json.loads(shown(capsys, *words, "--set", "training.max_in_flight=2"))
    assert [boundary["way"] for boundary in found["boundaries"]] == ["direct", "relay"]
    assert found["max_in_flight"] == 2


def test_a_configuration_without_a_plan_is_refused_before_anything_is_measured(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "measure_fleet", lambda *given, **settings: pytest.fail("measured"))
    assert main(["bench", "--config", str(file), "--set", 'shard_plan="auto"']) == 2
    assert "no plan has been made yet" in capsys.readouterr().err
