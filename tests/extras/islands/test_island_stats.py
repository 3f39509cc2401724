from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_framework.errors import UserError
from hetero_framework.extras.islands.island_stats import read_between, text


def write(folder: Path, *islands: dict[str, object] | None) -> None:
    lines = [
        {"step": k + 1, "step_seconds": 2.0} | ({"island": island} if island is not None else {})
        for k, island in enumerate(islands)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(content, encoding="utf-8")


def test_traffic_and_waits_of_islands_are_summed(tmp_path: Path) -> None:
    moved = {"members": ["a", "b"], "bytes_in": 1 << 10, "bytes_out": 1 << 20}
    waits = {"synchronised": 0, "waited_s": 0.5, "for_others_s": 0.2}
    write(tmp_path, moved, moved | waits, {**moved, "data_step": 7})
    found = read_between(tmp_path)
    assert found is not None
    assert (found["steps"], found["synchronised"]) == (3, 1)
    assert (found["step_s"], found["waited_s"]) == (6.0, 0.5)
    first, second = text(found)
    assert first == "islands a, b: 3 steps here sent 3.00 MiB to the others, and got 3.00 KiB"
    assert second.startswith("1 outer synchronisation: 500 ms of 6.00 s were not")
    assert second.endswith("; 200 ms more were waited for slower islands")


def test_waits_for_sums_of_gradients_are_reported(tmp_path: Path) -> None:
    step = {"members": ["a", "b"], "bytes_in": 1, "bytes_out": 1, "waited_s": 0.5}
    write(tmp_path, step, step)
    found = read_between(tmp_path)
    assert found is not None
    assert [*text(found)][1].startswith("sums of gradients: 1.00 s of 4.00 s were not hidden")


def test_a_run_without_islands_has_no_island_statistics(tmp_path: Path) -> None:
    assert read_between(tmp_path) is None
    write(tmp_path, None, None)
    assert read_between(tmp_path) is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"members": ["a"]})
    with pytest.raises(UserError, match="cannot read"):
        read_between(tmp_path)
