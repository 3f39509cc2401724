"""The lines that a run logs, and the effect of unknown connections on a worker's log."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.core import messages as m
from hetero_framework.core.messages import Message
from hetero_framework.trainer.coordinator import train
from tests.fault_proxy import FaultProxy, FrameCut
from tests.framed import framed
from tests.pools import Notes, is_listening, with_own_worker
from tests.samples import read_jsonl

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]


def refused(port: int, worker_id: str) -> bytes:
    """What a worker answers to a greeting that is not for it."""
    hello = Message(m.Hello("stranger", worker_id, "p", 1, 1 << 20))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.settimeout(30)
        sock.sendall(framed(hello))
        return sock.recv(1 << 16)


def test_events_record_a_run(pool, configured, texts, tmp_path):
    worker = pool.machines["workers"][0]
    data = {"train": str(texts), "eval": str(texts), "max_length": 64}
    training = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_steps": 4}

    def run(port: int, resume: str | None = None) -> Notes:
        notes = Notes()
        raw = configured([3], data=data, training=training).to_dict()
        raw["workers"][0]["port"] = port
        train(Config.from_dict(raw), progress=notes, resume=resume)
        return notes

    def events(path: Path = tmp_path / "run" / "events.jsonl") -> list[dict[str, Any]]:
        return read_jsonl(path)

    with FaultProxy((worker["ip"], worker["port"])) as proxy:
        proxy.cuts.append(FrameCut("up", m.Forward, "after"))
        notes = run(proxy.port)
    found = [(event["what"], event["step"]) for event in events()]
    assert found == [
        ("worker connected", None),
        ("run started", 0),
        ("worker lost", 1),
        ("worker back", 1),
        ("step repeated", 1),
        ("checkpoint written", 2),
        ("evaluation", 4),
        ("checkpoint written", 4),
        ("run finished", 4),
    ]
    assert {event["process"] for event in events()} == {"coordinator"}
    assert any(line.startswith("warning: lost the link to worker 1 (") for line in notes.lines)
    assert any(line.startswith("worker 1: loaded layers 3-5") for line in notes.lines)
    log = (tmp_path / "run" / "logs" / "coordinator.log").read_text(encoding="utf-8")
    assert re.search(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING lost the link to worker 1", log)

    run(worker["port"], "latest")
    after = [event["what"] for event in events()[len(found) :]]
    assert after == ["worker connected", "run resumed", "run finished"]
    run(worker["port"])
    assert events()[1]["what"] == "run started"
    assert events(tmp_path / "run" / "previous-1" / "events.jsonl")[2]["what"] == "worker lost"


def test_a_strangers_words_are_short_and_harmless_in_a_workers_log(pool):
    log = pool.logs[0]
    before = log.stat().st_size
    for _ in range(30):
        refused(pool.machines["workers"][0]["port"], "\x1b]0;owned\x07\x1b[2J" + "A" * 60_000)
    written = log.read_bytes()[before:]
    assert rb"not \x1b]0;owned\x07\x1b[2JAAA" in written
    assert b"\x1b" not in written
    lines = written.splitlines()
    assert max(map(len, lines)) < 1100
    assert len(lines) <= 30


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe is another error there")
def test_a_worker_goes_on_after_its_log_is_closed(pool, tmp_path):
    """As with `hetero worker 2>&1 | head -1`."""
    config = with_own_worker(Config.from_dict(pool.config(tmp_path, [3])))
    port = config.workers[0].port
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "hetero_framework", "worker", "--config", str(file)]
        + ["--worker-id", "1", "--supervised"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert b"listens" in process.stderr.readline()
        process.stderr.close()
        for _ in range(3):
            assert b"this is worker 1, not box" in refused(port, "box")
        assert is_listening(port)
        assert process.poll() is None
    finally:
        process.stdin.close()
        process.wait(timeout=30)
