"""The diagnosis names the fault that was built into a step, and predicts the gain without it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_framework import registry
from hetero_framework.core import codecs
from hetero_framework.extras.codecs.codecs import BFloat16
from hetero_framework.extras.observe import bottleneck
from hetero_framework.extras.observe.bottleneck import diagnose, text
from hetero_framework.extras.observe.step_account import Boundary, Change, Diagnosis, StageTimes
from tests.extras.observe.timeline_samples import record, step_spans


def settings(p: int = 4, m: int = 16, **changes: Any) -> dict[str, Any]:
    """Equal stages of 20 and 40 ms, cheap transfers."""
    base: dict[str, Any] = {
        "devices": list(range(p)), "micro_batches": m, "forward_s": [0.02] * p,
        "backward_s": [0.04] * p, "wire_s": 0.0005, "update_s": 0.01,
    }  # fmt: skip
    return {**base, **changes}


def found(
    path: Path, layers: int = 4, rows: int = 1, offload: int = 0, **changes: Any
) -> Diagnosis:
    """What is found in three steps; `rows` is the batch size of a micro-batch."""
    own: dict[str, Any] = {"layers": layers, "offload": offload}
    own["per_device_train_batch_size"] = rows
    return diagnose(record(path, settings(**changes), steps=[1, 2, 3], **own))


def change(diagnosis: Diagnosis, kind: str) -> Change:
    return next(change for change in diagnosis.changes if change.kind == kind)


def best(diagnosis: Diagnosis, *expected: str) -> Change:
    """The best change, which is of one of these kinds."""
    assert diagnosis.best.kind in expected
    return diagnosis.best


def kinds(diagnosis: Diagnosis) -> set[str]:
    return {change.kind for change in diagnosis.changes}


def test_diagnosed_times_are_the_recorded_ones(tmp_path):
    d = found(tmp_path, forward_s=[0.02, 0.03, 0.01, 0.02], backward_s=[0.04, 0.06, 0.02, 0.04])
    assert d.steps == (2, 3, 4)
    assert d.micro_batches == 16
    assert d.update_s == pytest.approx(0.01)
    assert d.between_s == pytest.approx(0.01)
    assert d.step_s == pytest.approx(d.pipeline_s + d.update_s)
    for stage, forward, backward in zip(
        d.stages, [0.02, 0.03, 0.01, 0.02], [0.04, 0.06, 0.02, 0.04], strict=True
    ):
        assert stage.forward_s == pytest.approx(forward, rel=1e-3)
        assert stage.backward_s == pytest.approx(backward, rel=1e-3)
    relayed = d.boundaries[1]
    assert (relayed.way, relayed.dtype, relayed.forward_bytes) == ("relay", "float32", 1 << 20)
    assert relayed.forward_s == pytest.approx(0.0005, rel=1e-2)
    assert relayed.latency_s == pytest.approx(0.0005, rel=1e-2)  # the second leg
    near = d.boundaries[0]
    assert (near.way, near.latency_s) == ("direct", pytest.approx(0, abs=1e-6))


def test_bound_and_ratio_are_those_of_1f1b(tmp_path):
    d = found(tmp_path, wire_s=0.0)
    assert d.bound_s == pytest.approx((16 + 4 - 1) * 0.06, rel=1e-3)
    assert d.ratio == pytest.approx(1.0, abs=0.01)
    assert d.simulated_s == pytest.approx(d.pipeline_s, rel=0.01)


def test_shares_of_a_process_add_up_to_the_pipeline(tmp_path):
    d = found(tmp_path, devices=[0, 1, 2, 0], wire_s=0.01)
    for process in d.processes:
        parts = (
            process.compute_s + process.activations_s + process.gradients_s
            + process.start_s + process.done_s
        )  # fmt: skip
        assert parts == pytest.approx(d.pipeline_s, rel=1e-6)
        assert 0 <= process.wire_s <= process.activations_s + process.gradients_s + 1e-9
    assert d.processes[0].stages == (0, 3)
    assert d.processes[1].compute_s == pytest.approx(16 * 0.06, rel=1e-3)


def test_balanced_long_step_needs_nothing(tmp_path):
    d = found(tmp_path, m=64, layers=1)
    assert d.best is None
    assert "no single change would help much" in text(d)
    assert max(change.gain for change in d.changes) < 0.05


def test_few_micro_batches_ask_for_more(tmp_path):
    """m + p - 1 turns for m micro-batches: of 4 stages and 4 micro-batches that is 7 for 4, and
    11 for 8."""
    d = found(tmp_path, m=4, layers=1, update_s=0.0)
    more = best(d, "more")
    assert more.text.startswith("8 micro-batches in a step instead of 4")
    # The time between steps, 10 ms, is taken to grow with the samples.
    now, then = 0.42 + 0.01, 0.66 + 0.02
    assert more.gain == pytest.approx(2 * now / then - 1, abs=0.01)
    assert more.step_s == pytest.approx(0.66, rel=0.01)
    assert "of changes that leave the results as they are: none would help much" in text(d)


def test_large_micro_batches_ask_for_smaller_ones(tmp_path):
    """The same samples in 8 instead of 4: 11 turns of half the length instead of 7."""
    smaller = best(found(tmp_path, m=4, layers=1, rows=6, update_s=0.0), "smaller")
    assert smaller.text.startswith("micro-batches of 3 instead of 6")
    assert smaller.step_s == pytest.approx(11 * 0.03, rel=0.02)


def layers_of(change: Change) -> list[int]:
    """Of each stage, by the text of another cut."""
    return [int(n) for n in change.text.split("stage ")[1].split(" instead")[0].split(", ")]


def test_slow_stage_asks_for_another_cut(tmp_path):
    """Stage 1 has twice the layers' work of the others: one of its devices' layers must go."""
    times = {"forward_s": [0.02, 0.04, 0.02, 0.02], "backward_s": [0.04, 0.08, 0.04, 0.04]}
    cut = best(found(tmp_path, m=32, **times), "cut")
    assert "instead of 4, 4, 4, 4" in cut.text
    assert sum(layers_of(cut)) == 16
    assert layers_of(cut)[1] < 4
    # 9 layers' work of 15 ms (stage 1: 30 ms), evenly: (12 * 15 + 4 * 30) / 4 = 72 ms at best.
    assert 0.2 < cut.gain < 0.12 / 0.0725 - 1 + 0.02


def test_a_predicted_cut_keeps_the_work_of_the_head(tmp_path):
    """The last stage is slow by its head: taking a layer from it saves a layer, not a quarter."""
    times = {"forward_s": [0.02, 0.02, 0.02, 0.05], "backward_s": [0.04, 0.04, 0.04, 0.1]}
    d = found(tmp_path, m=32, **times)
    assert layers_of(best(d, "cut"))[3] == 1
    # 150 ms less three layers of 15 ms are 105.
    assert d.best.step_s - d.update_s == pytest.approx(32 * 0.105 + 3 * 0.075, rel=0.05)


def test_slow_relay_asks_for_direct_links(tmp_path):
    d = found(tmp_path, m=16, layers=1, wire_s=0.015)
    direct = found(tmp_path / "direct", m=16, layers=1, wire_s=0.015, relay=False)
    assert [b.way for b in d.boundaries] == ["direct", "relay", "relay"]
    assert [b.way for b in direct.boundaries] == ["direct"] * 3
    assert "direct" not in kinds(direct)
    asked = change(d, "direct")
    assert "worker 1 and worker 2, worker 2 and worker 3" in asked.text
    assert asked.step_s == pytest.approx(direct.step_s, rel=0.03)


def test_a_relay_at_its_limit_is_named_as_the_bottleneck(tmp_path):
    """Five frames a micro-batch leave the coordinator's one network card: 150 ms for 60 of work."""
    slow: dict[str, Any] = {"m": 12, "layers": 1, "wire_s": 0.03, "turns": True}
    d = found(tmp_path, **slow)
    direct = found(tmp_path / "direct", **slow, relay=False)
    assert d.pipeline_s > 12 * 0.15
    assert d.bound_s == pytest.approx(d.pipeline_s, rel=0.1)
    best(d, "direct", "int8")
    assert change(d, "direct").gain > 0.5
    # The sample's schedule is a simple one; the prediction is for the one that a run would choose.
    assert direct.step_s * 0.8 < change(d, "direct").step_s < direct.step_s * 1.05


def test_slow_link_asks_for_a_codec(tmp_path):
    """One micro-batch in flight: everything on the wire is waited for."""
    d = found(tmp_path, p=2, m=8, layers=1, max_in_flight=1, wire_s=0.5, nbytes=4 << 20)
    assert change(d, "int8").gain > change(d, "bf16").gain > 0.2
    half = found(tmp_path / "half", p=2, m=8, layers=1, wire_s=0.5, dtype="bfloat16")
    assert kinds(half) & {"bf16", "int8"} == {"int8"}


def test_interleaving_is_predicted_for_one_stage_each(tmp_path):
    """Two stages each halve the time to fill the pipeline: m F+B and (p - 1)/2 instead of p - 1."""
    d = found(tmp_path, m=8, wire_s=0.0, update_s=0.0)
    assert change(d, "interleave").step_s == pytest.approx((8 + 1.5) * 0.06, rel=0.06)
    assert "interleave" not in kinds(found(tmp_path / "twice", devices=[0, 1, 0, 1], m=8))


def test_max_in_flight_that_was_set_is_lifted(tmp_path):
    trace = record(tmp_path, settings(max_in_flight=1), steps=[1, 2])
    trace.settings["max_in_flight"] = 1  # type: ignore[index]
    d = diagnose(trace)
    assert d.simulated_s == pytest.approx(d.pipeline_s, rel=0.02)
    assert best(d, "max_in_flight").gain > 1.5


def test_a_single_process_has_no_changes_to_predict(tmp_path):
    d = found(tmp_path, p=1, m=4)
    assert d.changes == ()
    assert "only a faster device" in text(d)


def test_hidden_weights_cost_nothing(tmp_path):
    """20 and 40 ms of computing for 15 of copying."""
    d = found(tmp_path, layers=8, offload=6, rows=2, copies={1: (0.015, 0.0)})
    assert [stage.streaming_s for stage in d.stages] == [0, pytest.approx(32 * 0.015), 0, 0]
    assert d.stages[1].hidden == pytest.approx(1.0)
    assert d.stages[1].awaited == 0
    # Half the size would halve the computing alone.
    assert not {"offload", "larger", "smaller"} & kinds(d)
    said = text(d)
    assert "1      6 of 8 layers           480 ms          100%  0% of its tasks" in said
    assert "weights from host memory bound" not in said
    assert "from host memory" not in text(found(tmp_path / "plain"))


def test_weights_that_bound_a_stage_ask_for_fewer_of_them(tmp_path):
    """A forward of stage 1 waits 10 of 30 ms, a backward 10 of 50, for a copy of 12 ms a task: a
    layer fewer, or twice as much computing for each copy, and nothing waits."""
    slow: dict[str, Any] = {
        "forward_s": [0.02, 0.03, 0.02, 0.02], "backward_s": [0.04, 0.05, 0.04, 0.04],
    }  # fmt: skip
    streaming = {**slow, "copies": {1: (0.012, 0.01)}}
    d = found(tmp_path, layers=8, offload=6, rows=1, **streaming)
    stage = d.stages[1]
    assert stage.hidden == pytest.approx(2 / 12)
    assert stage.awaited == pytest.approx(20 / 80)
    offload = best(d, "offload")
    assert offload.text == "shard_plan[1].offload 4 instead of 6, if memory allows"
    # The sample's schedule is a simple one.
    assert 1.0 <= offload.step_s / found(tmp_path / "there").step_s < 1.08
    larger = change(d, "larger").text
    assert larger.startswith("micro-batches of 2 instead of 1 and half as many")
    assert "note: weights from host memory bound stage 1:" in text(d)
    # Five would save no more memory than four, and three none.
    few = found(tmp_path / "few", layers=8, offload=4, **streaming)
    assert "shard_plan[1].offload 0 instead of 4" in text(few)


def test_a_single_process_that_waits_for_weights_is_told(tmp_path):
    """40 of 60 ms: with micro-batches of twice the size a task computes 40 ms, and waits for 20."""
    copies = {0: (0.055, 0.04)}
    d = found(tmp_path, p=1, m=4, layers=8, offload=8, rows=3, copies=copies)
    assert kinds(d) == {"offload", "larger"}
    assert change(d, "larger").gain == pytest.approx((0.26 / (2 * 0.06 + 0.02)) - 1, rel=0.05)
    odd = found(tmp_path / "odd", p=1, m=3, layers=8, offload=8, rows=3, copies=copies)
    assert kinds(odd) == {"offload"}


def test_steps_of_another_size_are_left_out(tmp_path):
    """The last step of an epoch has fewer micro-batches."""
    trace = record(tmp_path, settings(m=8), steps=[1, 2])
    short = record(tmp_path / "short", settings(m=3), steps=[3])
    d = diagnose(replace(trace, events=trace.events + short.events))
    assert d.steps == (2, 3)
    assert d.micro_batches == 8


def test_the_first_step_of_a_run_is_left_out(tmp_path):
    """With timeline_steps -1 it is in the file; it pays for what later steps have ready."""
    trace = record(tmp_path, settings(m=4), steps=[0, 1, 2], timeline_steps=-1)
    assert diagnose(trace).steps == (2, 3)
    alone = record(tmp_path / "one", settings(m=4), steps=[0], timeline_steps=-1)
    assert diagnose(alone).steps == (1,)


def test_an_uneven_stage_is_reported(tmp_path):
    trace = record(tmp_path, settings(m=8), steps=[1])
    events = list(trace.events)
    last = max(i for i, e in enumerate(events) if e.kind == "backward" and e.stage == 0)
    events[last] = replace(events[last], ended=events[last].ended + 0.2)
    said = text(diagnose(replace(trace, events=tuple(events))))
    assert "tasks of stage 0 are uneven, the slowest 6.0 times the median" in said


def test_time_that_the_stages_do_not_explain_is_reported(tmp_path):
    trace = record(tmp_path, settings(m=8), steps=[1])
    assert "note:" not in text(diagnose(trace))
    held_up = tuple(
        replace(e, began=e.began + 0.5, ended=e.ended + 0.5) if e.began > 0.3 else e
        for e in trace.events
    )
    said = text(diagnose(replace(trace, events=held_up)))
    assert "trust the predictions less" in said


def test_text_is_aligned_and_json_is_json(tmp_path):
    d = found(tmp_path, devices=[0, 1, 2, 0])
    lines = text(d).splitlines()
    assert max(len(line) for line in lines) < 160
    head = next(i for i, line in enumerate(lines) if line.startswith("process"))
    ends = {len(line) for line in lines[head : head + 4]}
    assert len(ends) == 1
    raw = json.loads(json.dumps(d.to_dict(), allow_nan=False))
    assert raw["ratio"] == pytest.approx(d.ratio)
    assert [s["forward_s"] for s in raw["stages"]] == [s.forward_s for s in d.stages]
    assert math.isfinite(raw["bound_s"])


def test_a_forward_only_stage_is_no_trouble(tmp_path):
    """Nothing backward below the lowest trainable parameter: no gradient, no task, no frame."""
    spans = step_spans(**settings(p=2, m=2))
    assert {span["what"] for span in spans[1] if span["kind"] == "send"} == {"BACKWARD"}
    trace = record(tmp_path, settings(p=2, m=8), steps=[1, 2])
    kept = tuple(e for e in trace.events if e.kind != "backward" and e.what != "BACKWARD")
    d = diagnose(replace(trace, events=kept))
    assert d.stages[0].backward_s == 0.0
    assert d.boundaries[0].backward_bytes == 0
    assert text(d)


PAIR = tuple(StageTimes(k, k, 2 * k, 2 * k + 2, 1.0, 2.0, 1.0) for k in range(2))
BOUNDARY = Boundary(0, "direct", 1.0, 2.0, 0.0, 4 * 64 * 64, 4 * 64 * 64, "float32", "")


def pair(**changes: Any) -> Diagnosis:
    boundaries = (replace(BOUNDARY, **changes),)
    means = dict.fromkeys(("step_s", "pipeline_s", "simulated_s", "bound_s"), 1.0)
    parts: Any = {"stages": PAIR, "processes": (), "boundaries": boundaries, "steps": (1,)}
    nothing: Any = {"max_in_flight": None, "between_s": None, "update_s": 0.0, "dropped": 0}
    return Diagnosis(micro_batches=4, **means, **parts, **nothing)


def test_a_codec_scales_transfers_by_its_bytes():
    found = {idea.kind: idea.then.boundaries[0] for idea in bottleneck._codecs(pair())}
    assert list(found) == ["bf16", "int8"]
    for name, boundary in found.items():
        share = codecs.CODECS[name].nbytes((64, 64), torch.float32) / (4 * 64 * 64)
        assert boundary.forward_s == pytest.approx(share)
        assert boundary.backward_s == pytest.approx(2 * share)
        assert boundary.latency_s > 0


def test_an_added_codec_becomes_a_simulated_change(monkeypatch):
    class Half(BFloat16):
        name = "half"

    monkeypatch.setitem(registry._registered, ("codecs", "half"), (Half(), {}))
    assert [idea.kind for idea in bottleneck._codecs(pair())] == ["bf16", "int8", "half"]


@pytest.mark.parametrize(
    "changes", [{"codec": "bf16"}, {"way": "same process"}, {"dtype": "load"}, {"dtype": ""}]
)
def test_no_codec_where_none_can_help(changes):
    assert bottleneck._codecs(pair(**changes)) == []
