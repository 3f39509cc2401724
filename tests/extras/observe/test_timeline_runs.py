"""A real run writes a timeline that makes sense, over every kind of link."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from hetero_framework import cli
from hetero_framework.core.spans import COMPUTE
from hetero_framework.extras.observe.bottleneck import diagnose
from hetero_framework.extras.observe.timeline import Trace, transfers
from hetero_framework.extras.observe.trace_file import read_timeline
from tests.samples import plan_of
from tests.unit.data_helpers import write_jsonl

INTERLEAVED = plan_of(("local", 1), (1, 2), (2, 3), ("local", 4), (1, 5), (2, 6))


def check(trace: Trace, stages: int) -> None:
    """What must hold in every timeline, whatever the machine was doing."""
    assert len(trace.stages) == stages
    assert trace.dropped == 0
    for step in trace.steps:
        computing = [event for event in trace.of_step(step) if event.kind in COMPUTE]
        tasks = Counter((event.stage, event.micro_batch, event.kind) for event in computing)
        count = 1 + max(micro_batch for _, micro_batch, _ in tasks)
        last = stages - 1
        assert tasks == {
            **{(s, k, d): 1 for s in range(last) for k in range(count) for d in COMPUTE[:2]},
            **{(last, k, COMPUTE[2]): 1 for k in range(count)},
        }
        for process in range(len(trace.processes)):
            own = sorted((e for e in computing if e.process == process), key=lambda e: e.began)
            assert all(after.began >= before.ended - 1e-6 for before, after in pairwise(own))
        ended = {(e.stage, e.micro_batch, e.kind): e.ended for e in computing}
        for event in computing:
            if event.kind == "forward" and event.stage > 0:
                made = ended[event.stage - 1, event.micro_batch, "forward"]
                assert event.began >= made - 1e-6
    assert all(receive.ended >= send.began - 1e-9 for send, receive in transfers(trace.events))


@pytest.mark.parametrize("links", ["relay", "auto"])
def test_run_writes_a_timeline(losses, tmp_path, capsys, links):
    drawn = {"visualize": True, "visualization_format": "mmd"}
    losses([2, 4], links=links, training=drawn)
    # The diagram says what the links turned out to be.
    diagram = (tmp_path / "run" / "architecture.mmd").read_text(encoding="utf-8")
    how = "through the coordinator" if links == "relay" else "direct"
    assert f'|"{how}"| s2' in diagram
    trace = read_timeline(tmp_path / "run")
    assert trace.steps == [1, 2, 3]  # after the first
    check(trace, stages=3)
    frames = Counter((s.step, s.what, s.stage, s.micro_batch) for s, _ in transfers(trace.events))
    legs = 2 if links == "relay" else 1
    assert frames[1, "FORWARD", 1, 0] == 1
    assert frames[1, "FORWARD", 2, 0] == legs
    assert frames[1, "BACKWARD", 1, 0] == legs
    assert all(event.nbytes > 0 and event.dtype for event in trace.events if event.what)
    found = diagnose(trace)
    far = "direct" if legs == 1 else "relay"
    assert [boundary.way for boundary in found.boundaries] == ["direct", far]
    assert found.micro_batches == 4
    assert 0 < found.bound_s <= found.pipeline_s
    capsys.readouterr()
    assert cli.main(["timeline", str(tmp_path / "run")]) == 0
    assert "3 stages" in capsys.readouterr().out
    assert (tmp_path / "run" / "curves.png").exists()


def test_interleaved_run_and_evaluation(losses, tmp_path):
    texts = {"train": str(tmp_path / "t.jsonl"), "eval": str(tmp_path / "t.jsonl")}
    rows = [{"text": "the model trains on many machines " * (1 + i % 3)} for i in range(24)]
    write_jsonl(tmp_path / "t.jsonl", rows)
    training = {"timeline_steps": -1, "num_train_epochs": 2}
    training |= {"eval_steps": 2, "eval_strategy": "steps"}
    losses([], shard_plan=INTERLEAVED, data={**texts, "max_length": 64}, training=training)
    trace = read_timeline(tmp_path / "run")
    assert trace.steps == list(range(6))
    check(trace, stages=6)


def test_no_timeline_when_it_is_off(losses, tmp_path):
    losses([3], training={"timeline_steps": 0, "max_steps": 3})
    assert not (tmp_path / "run" / "timeline.json").exists()
