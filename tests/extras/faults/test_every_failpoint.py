"""Every failpoint is a place that a run passes, in the coordinator and in a worker."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.core import failpoints
from hetero_framework.extras.faults.failpoints import ONCE_VARIABLE, POINTS
from hetero_framework.trainer.coordinator import train
from tests.integration.test_faults import with_own_worker
from tests.integration.test_parity import LORA
from tests.pools import Notes

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

PROCESSES = ("coordinator", "worker-1")
# Not reached there: gradients leave no first stage, hidden states no last one.
NEVER = {("coordinator", "backward-half"), ("worker-1", "forward-half")}
NEVER.add(("worker-1", "checkpoint"))
NEVER |= {
    (process, point)
    for process in PROCESSES
    for point in POINTS
    if point.startswith("island-")  # of a run that is an island: tests/faults/test_islands.py
}


@pytest.mark.long
def test_a_run_passes_every_failpoint(pool, llama, texts, tmp_path, monkeypatch):
    marks = tmp_path / "marks"
    marks.mkdir()
    points = [f"{name}:inf" if name == "output" else f"{name}:sleep:0" for name in POINTS]
    wanted = [f"{process}/{point}" for process in PROCESSES for point in points]
    monkeypatch.setenv(failpoints.VARIABLE, ",".join(wanted))
    monkeypatch.setenv(ONCE_VARIABLE, str(marks))
    model = {"name_or_path": str(llama)}
    data = {"train": str(texts), "eval": str(texts), "max_length": 32}
    training: dict[str, Any] = {"max_steps": 4, "eval_steps": 2, "verify_architecture": False}
    training |= {"save_strategy": "steps", "save_steps": 2}
    sections = {"model": model, "data": data, "adapter": LORA, "training": training}
    raw = pool.config(tmp_path / "run", [3], **sections)
    config, notes = with_own_worker(Config.from_dict(raw)), Notes()
    train(config, progress=notes)
    train(config, progress=Notes(), resume=2)
    passed = {path.name.replace("=", ":") for path in marks.iterdir()}
    absent = {text for text in wanted if text.replace("/", ".") not in passed}
    assert absent == {f"{process}/{name}:sleep:0" for process, name in NEVER}
    assert any("fault injection ON" in line for line in notes.lines)
    assert "fault injection ON" in (tmp_path / "run" / "logs" / "worker-1.log").read_text()
