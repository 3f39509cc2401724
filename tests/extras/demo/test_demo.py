"""`hetero demo`: the files that it makes, and what it says of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cli import main
from hetero_framework.config import Config
from hetero_framework.extras.demo.commands import demo

ROOT = Path(__file__).resolve().parents[3]


def test_the_shipped_configuration_is_the_demonstrations():
    assert (ROOT / "hetero_config.json").read_bytes() == demo.CONFIG.read_bytes()


def test_the_configurations_differ_in_what_is_trained(tmp_path):
    full, lora = (Config.from_dict(raw, tmp_path) for raw in demo.settings(7, 12))
    assert (full.training.max_steps, lora.training.max_steps) == (7, 12)
    assert full.output_dir == tmp_path / "full"
    assert lora.path(str(lora.model.name_or_path)) == full.output_dir / "model"  # type: ignore[union-attr]
    assert (full.adapter, lora.adapter is None) == (None, False)
    assert lora.plan == full.plan
    assert (lora.training.eval_steps, lora.training.eval_on_start) == (3, True)


def test_data_are_the_same_every_time_and_held_out_sums_are_others():
    assert demo.sources() == demo.sources()
    texts = demo.sums(800)
    assert texts == demo.sums(800)
    assert not set(texts[:64]) & set(texts[64:])
    one, plus, other, equals, result = texts[0].splitlines()[0].split()
    assert (plus, equals, int(one) + int(other)) == ("+", "=", int(result))
    pieces = list(demo.pieces(demo.sources()))
    assert len(pieces) == 4000
    assert max(map(len, pieces)) <= 420


def test_an_earlier_demonstration_is_replaced_only_where_asked(tmp_path, capsys, monkeypatch):
    (tmp_path / "lora").mkdir()
    (tmp_path / "precious").write_text("kept")
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "lora exists already" in capsys.readouterr().err

    def stop(folder: Path, files: list[Path]) -> None:
        assert not (tmp_path / "lora").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "make_model", stop)
    assert main(["demo", "--output", str(tmp_path), "--overwrite"]) == 130
    assert (tmp_path / "precious").read_text() == "kept"


def test_the_end_shows_how_the_held_out_loss_fell(tmp_path):
    lines: list[dict[str, Any]] = [{"step": 0, "eval_loss": 8.0}, {"step": 1, "loss": 9.0}]
    lines += [{"step": 6, "eval_loss": 6.0}, {"step": 12, "eval_loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said, *bars = demo.curve(tmp_path)
    assert said.endswith("the loss fell by 75%")
    assert [bar.count("#") for bar in bars] == [50, 38, 12]
    assert bars[1].startswith("  step  6  6.000  ####")


@pytest.mark.long
def test_the_adapter_learns_and_survives_a_kill(tmp_path, capfd):
    """The whole demonstration, with the steps of its default."""
    assert main(["demo", "--output", str(tmp_path / "demo")]) == 0
    said = capfd.readouterr().out
    assert "the adapters of 3 and 4 are the same, byte for byte" in said
    assert "hetero train --model NAME --data FILE" in said.splitlines()[-1]
    losses = demo.read_curves(tmp_path / "demo" / "lora")["eval_loss"][1]
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
    events = (tmp_path / "demo" / "killed" / "events.jsonl").read_text()
    assert "worker lost" in events or "link" in events
