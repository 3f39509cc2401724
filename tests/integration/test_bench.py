"""`hetero bench` over real processes: all kinds of links, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import cli
from hetero_framework.cluster import link_probe
from hetero_framework.commands import bench_report as bench
from hetero_framework.config import Config
from hetero_framework.engine.hosts import LinkLost
from hetero_framework.errors import PeerLostError
from tests.integration.conftest import Pool

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def raw(pool: Pool, llama: Path, texts: Path, tmp_path: Path) -> dict[str, Any]:
    """Coordinator, 1 and 2 with a link of their own, and 2 again, relayed to from 1."""
    plan = [
        {"id": "local", "start": 0, "end": 1},
        {"id": 1, "start": 1, "end": 3},
        {"id": 2, "start": 3, "end": 4, "links": "direct"},
        {"id": 1, "start": 4, "end": 5},
        {"id": 2, "start": 5, "end": 6, "links": "relay"},
    ]
    model = {"name_or_path": str(llama)}
    data = {"train": str(texts), "max_length": 64}
    return pool.config(tmp_path / "run", [], shard_plan=plan, model=model, data=data)


def test_measures_every_link_and_stage_and_leaves_no_trace(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    (output / "metrics.jsonl").write_text("an earlier run's\n")
    file = tmp_path / "c.json"
    file.write_text(json.dumps(raw))
    words = ["bench", "--config", str(file), "--steps", "3", "--mb", "1", "--json", "--debug"]
    assert cli.main(words) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    ends = [(link["from"], link["to"]) for link in found["links"]]
    assert ends == [("coordinator", 1), ("coordinator", 2), (1, 2)]
    assert found["link_bytes"] == 1_000_000
    for link in found["links"]:
        assert 0 < link["round_trip_s"] < 5
        assert link["up_bytes_per_s"] > 1e5
        assert link["down_bytes_per_s"] > 1e5
    assert [stage["layers"] for stage in found["stages"]][1] == "layers 1-2"
    assert all(stage["both_s_per_layer"] > 0 for stage in found["stages"])
    assert [b["way"] for b in found["boundaries"]] == ["direct", "direct", "direct", "relay"]
    assert found["micro_batches"] == 4
    assert found["tokens_per_s"] > 0
    assert found["predicted"]["bound_s"] <= found["predicted"]["step_s"] * 1.000001
    assert len(found["predicted"]["held"]) == 5
    assert captured.err.count("step ") == 3
    assert {path.name for path in tmp_path.iterdir()} == {"run", "c.json"}
    assert [path.name for path in output.iterdir()] == ["metrics.jsonl"]
    assert (output / "metrics.jsonl").read_text() == "an earlier run's\n"


def test_lost_worker_and_interruption_end_it(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.from_dict(raw)

    def lost(*given: object) -> None:
        raise LinkLost(2, "closed")

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(link_probe, "measure", lost)
    with pytest.raises(PeerLostError, match="lost worker 2: closed"):
        bench.bench(config)
    monkeypatch.setattr(link_probe, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.bench(config)
