from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cli import main
from hetero_framework.config import load_config
from hetero_framework.errors import ConfigError, UserError
from hetero_framework.extras.planner import result
from hetero_framework.extras.planner.plan_report import held_text, write_plan
from tests.extras.planner.fleets import GB, device, raw_fleet
from tests.samples import plan_of

Planned = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def fleet(tmp_path, monkeypatch):
    """The working directory, which has fleet.json."""
    monkeypatch.chdir(tmp_path)
    small = device(1, memory_bytes=5 * GB)
    raw = raw_fleet([device("local"), small, device("box")], speed=1e8)
    Path("fleet.json").write_text(json.dumps(raw), encoding="utf-8")


@pytest.fixture
def planned(capsys):
    """What `hetero plan` says of fleet.json."""

    def found(*words: str) -> dict[str, Any]:
        assert main(["plan", "--profile", "fleet.json", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return found


def test_plan_prints_json_that_evaluate_reads(planned):
    found = planned()
    Path("plan.json").write_text(json.dumps(found), encoding="utf-8")
    again = planned("--evaluate", "plan.json")
    for name in ("shard_plan", "predicted_step_s", "max_in_flight", "devices"):
        assert again[name] == found[name]


def test_evaluate_reads_a_configuration(planned):
    training = {"gradient_checkpointing": True, "max_in_flight": 3}
    raw = {"shard_plan": plan_of(("local", 4), ("box", 8)), "training": training}
    Path("hetero_config.json").write_text(json.dumps(raw), encoding="utf-8")
    found = planned("--evaluate", "hetero_config.json")
    assert found["max_in_flight"] == 3
    assert all(entry["gradient_checkpointing"] for entry in found["shard_plan"])


def test_plan_prints_a_table(capsys):
    assert main(["plan", "--profile", "fleet.json"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("process")
    assert "coordinator" in said
    assert "A step is predicted to take" in said
    assert "micro-batches under way" in said


def test_options_of_plan_are_read(planned):
    found = planned(
        *("--pin", "1=6:8", "--exclude", "box", "--margin", "1=2.5GiB", "--margin", "local=1GB"),
        *("--allow", "codec,micro-batch"),
    )
    cut = [(e["id"], e["start"], e["end"]) for e in found["shard_plan"]]
    assert cut == [("local", 0, 6), (1, 6, 8)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pin", "1"], "--pin 1 is not of the form ID=START:END"),
        (["--pin", "1=4-8"], "--pin 1=4-8 is not of the form"),
        (["--pin", "1=4:" + "9" * 5000], "for example: --pin 1=4:12"),
        (["--pin", "1=2:4", "--pin", "1=3:5"], "--pin is given twice for worker 1; keep one"),
        (["--margin", "1=1GiB", "--margin", "1=2GiB"], "--margin is given twice for worker 1"),
        (["--margin", "1=2"], "--margin 1=2 is not of the form ID=SIZE"),
        (["--margin", "1=2XB"], "is not of the form ID=SIZE"),
        (["--exclude", "7"], '"7" is not a device; there are: "local", 1, "box"'),
        (["--allow", "luck"], '"luck" is none of'),
        (["--evaluate", "none.json"], "plan none.json does not exist"),
        (["--evaluate", "none.json", "--exclude", "1"], "--evaluate takes the plan as it is"),
    ],
)
def test_wrong_options_end_with_2(words, said, capsys):
    assert main(["plan", "--profile", "fleet.json", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "shard_plan: must be a list"),
        ({"shard_plan": [], "max_in_flight": 0}, "max_in_flight: must be a whole number of at"),
        ({"shard_plan": [{"id": "local", "start": 0, "end": 4}]}, "the model has 8"),
    ],
)
def test_a_wrong_plan_file_ends_with_2(content, said, capsys):
    Path("plan.json").write_text(json.dumps(content), encoding="utf-8")
    assert main(["plan", "--profile", "fleet.json", "--evaluate", "plan.json"]) == 2
    assert said in capsys.readouterr().err


HERE = {"ip": "127.0.0.1"}
SETTINGS = {
    "training": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
    "coordinator": HERE,
    "workers": [{"id": 1, **HERE, "port": 9001}, {"id": "box", **HERE, "port": 9002}],
    **{"shard_plan": plan_of(("local", 8)), "links": "relay"},
}
FOUND = {
    "shard_plan": [
        {"id": "local", "start": 0, "end": 3},
        {"id": "box", "start": 3, "end": 8, "gradient_checkpointing": True},
    ],
    "changes": {},
}


def written(tmp_path: Path, **found: Any) -> dict[str, Any]:
    file = tmp_path / "hetero_config.json"
    file.write_text(json.dumps(SETTINGS), encoding="utf-8")
    write_plan({**FOUND, **found}, file)
    raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return raw


def test_written_plan_leaves_the_rest_as_it_was(tmp_path):
    raw = written(tmp_path)
    assert raw["shard_plan"] == FOUND["shard_plan"]
    assert list(raw) == list(SETTINGS)
    assert {**raw, "shard_plan": SETTINGS["shard_plan"]} == SETTINGS


def test_other_settings_that_a_plan_needs_are_written_too(tmp_path):
    int8 = {"activations": "int8", "gradients": "int8"}
    raw = written(tmp_path, changes={"wire": int8, "micro_batches": 8})
    assert raw["wire"] == int8
    assert raw["training"] == {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 1}
    with pytest.raises(UserError, match="the 8 samples of a step are no 16 equal micro-batches"):
        written(tmp_path, changes={"micro_batches": 16})


def test_plan_that_the_configuration_does_not_fit_changes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="is not a worker"):
        written(tmp_path, shard_plan=[*FOUND["shard_plan"], {"id": 7, "start": 8, "end": 9}])
    assert json.loads((tmp_path / "hetero_config.json").read_text()) == SETTINGS


def test_a_written_plan_keeps_what_was_predicted_for_the_run(planned):
    file = Path("hetero_config.json")
    settings = {**SETTINGS, "model": {"name_or_path": "model"}}
    file.write_text(json.dumps(settings), encoding="utf-8")
    assert result.planned(load_config(file)) is None
    found = planned("--write", "--config", str(file))
    assert result.planned(load_config(file)).step_s == found["predicted_step_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "needs one of --measure, --dry-run and --profile"),
        ("--measure --profile f.json", "needs one of --measure, --dry-run and --profile"),
        ("--profile f.json --save-profile g.json", "keeps what --measure or --dry-run finds"),
        (f"--dry-run --save-profile {os.devnull}", "is not a file that can be written"),
        ("--measure --save-profile .", ". is not a file"),
        ("--profile f.json --evaluate p.json --write", "without --evaluate"),
        ("--profile f.json --write --config c.yaml", "the comments of YAML would be"),
        ("--profile f.json --anew", "--anew goes with --measure"),
    ],
)
def test_options_that_exclude_each_other_end_with_2(words, said, capsys):
    assert main(["plan", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ([(0, 8), (19, 32)], "layers 0-7, 19-31"),
        ([(0, 0), (2, 5)], "embedding, layers 2-4"),
        ([(0, 2), (5, 6), (8, 8)], "layers 0-1, layer 5, head"),
    ],
)
def test_layers_of_a_process_as_text(ranges, text):
    assert held_text(ranges) == text


@pytest.mark.skipif(os.name == "nt", reason="symbolic links are for administrators there")
def test_plan_is_written_into_the_file_that_a_link_names(planned, tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text(json.dumps(SETTINGS), encoding="utf-8")
    link.symlink_to(real)
    found = planned("--config", str(link), "--write")
    assert link.is_symlink()
    written = json.loads(real.read_text(encoding="utf-8"))["shard_plan"]
    assert [entry["id"] for entry in written] == [entry["id"] for entry in found["shard_plan"]]
