"""Machines whose clocks differ by a year, and one that is set while it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest

from hetero_framework.trainer.coordinator import train
from tests.faults.final_state import assert_same_run
from tests.integration.test_recovery import configuration
from tests.pools import Notes, is_listening, with_end
from tests.samples import save_llama, save_texts

pytestmark = pytest.mark.faults

YEAR_S = 365 * 86_400.0
WORKER = f"""
import runpy, time
now = time.time
time.time = lambda: now() + {YEAR_S}
runpy.run_module("hetero_framework", run_name="__main__")
"""


def test_f28_clocks_a_year_apart_and_one_that_jumps_change_nothing(tmp_path, monkeypatch):
    """Worker 1 is a year ahead; the coordinator's clock goes back by one in the middle."""
    llama, texts = save_llama(tmp_path / "llama"), save_texts(tmp_path / "texts.jsonl", 21)
    calm = configuration(tmp_path / "calm", llama, texts)
    train(calm, progress=Notes())
    config = configuration(tmp_path / "run", llama, texts)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    now = time.time

    class Jump(Notes):
        def step(self, metrics: Mapping[str, Any]) -> None:
            super().step(metrics)
            if metrics["step"] == 4:
                monkeypatch.setattr(time, "time", lambda: now() - YEAR_S)

    words = ["worker", "--config", str(file), "--worker-id", "1", "--keep", "--supervised"]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *words], stdin=subprocess.PIPE, env=os.environ
    )
    try:
        while not is_listening(config.workers[0].port):
            with_end(worker)
        notes = Jump()
        train(config, progress=notes)
    finally:
        worker.kill()
        worker.communicate()
    assert not [line for line in notes.lines if "lost the link" in line]
    assert_same_run(tmp_path / "run", tmp_path / "calm")
