"""What `hetero bench` makes of measured times, with numbers made by hand; no process."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_framework.cluster.assembly import MachineFacts
from hetero_framework.commands import bench_report as bench
from hetero_framework.config import Config
from hetero_framework.engine.hosts import DirectLost, LinkLost
from hetero_framework.errors import PeerLostError
from hetero_framework.planner.simulator import Edge, Profile

CONFIG = Config.from_dict(
    {
        "coordinator": {"ip": "127.0.0.1"},
        "workers": [
            {"id": n, "ip": "127.0.0.1", "port": port} for n, port in ((1, 7001), ("box", 7002))
        ],
        "shard_plan": [
            {"id": "local", "start": 0, "end": 0},
            {"id": 1, "start": 0, "end": 2},
            {"id": "box", "start": 2, "end": 6},
        ],
        "training": {"per_device_train_batch_size": 2},
    }
)
FACTS = {
    owner: MachineFacts(f"cuda:{n}", "card", 1, 1) for n, owner in enumerate(["local", 1, "box"])
}
PROFILE = Profile.of(
    [0.02, 0.02, 0.0],
    [0.04, 0.04, 0.06],
    edges=[Edge(0.001, 0.002, 0.0005), Edge(0.003, 0.004, 0.0007, relay=0)],
)
LINKS = [
    {
        "from": "coordinator",
        "to": 1,
        "round_trip_s": 0.0004,
        "up_bytes_per_s": 1.25e8,
        "down_bytes_per_s": 1.25e7,
        "both_ways": 1.0,
    },
    {
        "from": 1,
        "to": "box",
        "round_trip_s": 1.5,
        "up_bytes_per_s": 1.25e8,
        "down_bytes_per_s": 2.5e8,
        "both_ways": 1.96,
    },
]


@pytest.fixture
def found() -> dict[str, Any]:
    made = {
        "links": LINKS,
        "link_bytes": 8_000_000,
        "stages": bench._stages(CONFIG, PROFILE, FACTS),
        "boundaries": bench._boundaries(PROFILE),
        "micro_batch_samples": 2,
        "micro_batches": 4,
        "step_s": 0.4,
        "tokens_per_s": 12345.6,
        "predicted": bench._predicted(CONFIG, PROFILE, 4, None),
    }
    return copy.deepcopy(made)


def test_seconds_are_divided_by_the_layers_of_a_stage(found: dict[str, Any]) -> None:
    first, middle, last = found["stages"]
    assert (middle["forward_s_per_layer"], middle["backward_s_per_layer"]) == (0.01, 0.02)
    assert middle["device"] == "cuda:1"
    assert first["forward_s"] == 0.02
    assert first["both_s_per_layer"] is None  # it has no layers
    assert last["forward_s"] is None  # it does both at once
    assert last["both_s_per_layer"] == pytest.approx(0.06 / 4)
    json.dumps(found)


def test_prediction_for_equal_stages_is_the_known_formula() -> None:
    profile = Profile.of([0.02] * 3, [0.04] * 3)
    for m in (4, 200):  # more than the schedule is tuned for
        predicted = bench._predicted(CONFIG, profile, m, None)
        assert predicted["step_s"] == pytest.approx((m + 2) * 0.06)
        assert predicted["bound_s"] == pytest.approx((m + 2) * 0.06)
        assert predicted["bubble"] == pytest.approx(2 / (m + 2))
    narrow = bench._predicted(CONFIG, profile, 4, (1, 1, 1))
    assert narrow["held"] == [1, 1, 1]
    assert narrow["step_s"] > 0.5


def test_report_is_aligned(found: dict[str, Any]) -> None:
    found["step_s"] = 0.6
    expected = """\
Links, with messages of 8 MB:
link                    round trip        there         back   both at once
coordinator - worker 1     0.40 ms  1.00 Gbit/s   100 Mbit/s  1.0 x as long
worker 1 - worker box       1.50 s  1.00 Gbit/s  2.00 Gbit/s  2.0 x as long

For each micro-batch of 2 samples:
stage  process      device  layers      forward  backward  forward per layer  backward per layer
0      coordinator  cuda:0  no layers   20.0 ms   40.0 ms                  -                   -
1      worker 1     cuda:1  layers 0-1  20.0 ms   40.0 ms            10.0 ms             20.0 ms
2      worker box   cuda:2  layers 2-5  60.0 ms    (both)            15.0 ms              (both)

boundary  way     activation  gradient    delay
0 - 1     direct     1.00 ms   2.00 ms  0.50 ms
1 - 2     relay      3.00 ms   4.00 ms  0.70 ms

A step of 4 micro-batches took 600 ms: 12,346 tokens/s, without the optimizer's part.
Estimates from these means: 372 ms for a step, 372 ms under the best schedule.
Predicted: devices idle 36% of the time, with 4 micro-batches under way.
It took 1.6 times what they predict: processes share cores or a link,
a machine has other work, or samples differ much in length."""
    assert bench.text(found) == expected


def test_report_of_one_process_has_no_links_and_no_idle_devices() -> None:
    config = Config.from_dict(
        {"coordinator": {"ip": "127.0.0.1"}, "shard_plan": [{"id": "local", "start": 0, "end": 2}]}
    )
    profile = Profile.of([0.02], [0.04])
    shown = bench.text(
        {
            "links": [],
            "link_bytes": 8,
            "stages": bench._stages(config, profile, FACTS),
            "boundaries": bench._boundaries(profile),
            "micro_batch_samples": 1,
            "micro_batches": 1,
            "step_s": 0.06,
            "tokens_per_s": 100.0,
            "predicted": bench._predicted(config, profile, 1, None),
        }
    )
    assert shown.startswith("For each micro-batch of 1 sample:\n")
    assert "A step of 1 micro-batch took 60.0 ms: 100 tokens/s" in shown
    assert "idle" not in shown
    assert "Links" not in shown
    assert "times what" not in shown


def test_stages_of_one_process_have_no_boundary_between_them() -> None:
    profile = Profile.of([1, 1, 1], [1, 1, 1], devices=[0, 0, 1])
    assert [b["after"] for b in bench._boundaries(profile)] == [1]


class FakeCluster:
    """Steps that take what they are told; keeps what was asked of it."""

    def __init__(self, seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.pipeline = self.assembly = self
        self._seconds = iter(seconds)
        self._now = 0.0
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self._now)

    def begin(self, step: int, micro_batches: int, *, train: bool, num_items: int) -> None:
        self.calls.append((step, micro_batches, train, num_items))

    def run(self, batches: list[Any]) -> None:
        self._now += next(self._seconds)

    def report_gradients(self) -> tuple[list[Any], dict[int, Any]]:
        return [], {}

    def observe(self, micro_batches: int, statistics: dict[int, Any]) -> None:
        self.calls.append("observe")

    def abort(self) -> None:
        self.calls.append("abort")


class FakeData:
    """Epochs of four steps, the last one short; rows of step k have k + 1 tokens and padding."""

    steps_per_epoch = 4

    def __init__(self, total_steps: int = 8) -> None:
        self.total_steps = total_steps

    def step_batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        assert step < self.total_steps
        mask = torch.zeros(2, 5, dtype=torch.long)
        mask[:, : step + 1] = 1
        ids = torch.zeros(2, 5, dtype=torch.long)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        return [batch] * (1 if step == 3 else 2)


def parts_of(data: FakeData) -> Any:
    return SimpleNamespace(data=data)


def test_steps_are_forgotten_and_the_first_does_not_count(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    cluster = FakeCluster([9.0, 1.0, 2.0, 3.0], monkeypatch)
    taken = bench._steps(cluster, parts_of(FakeData()), 4)
    assert [step.seconds for step in taken] == [1.0, 2.0, 3.0]
    # Padding does not count, and of the epoch's four steps not the short one.
    assert [step.tokens for step in taken] == [8, 12, 4]
    assert {step.micro_batches for step in taken} == {2}
    assert cluster.calls[:3] == [(0, 2, True, 4), "observe", "abort"]
    assert cluster.calls.count("abort") == 4
    assert logged[1:3] == ["step 2 of 4: 1.00 s", "step 3 of 4: 2.00 s"]


def test_run_of_one_step_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster([1.0] * 3, monkeypatch)
    taken = bench._steps(cluster, parts_of(FakeData(total_steps=1)), 3)
    assert [step.tokens for step in taken] == [4, 4]


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (LinkLost("box", "closed"), "lost worker box: ended with exit code 1"),
        (DirectLost(1, "box", "closed"), "lost the link between workers 1 and box: closed"),
    ],
)
def test_lost_link_ends_the_measurement_with_its_reason(lost: Exception, message: str) -> None:
    cluster: Any = SimpleNamespace(why=lambda lost: "ended with exit code 1")
    with pytest.raises(PeerLostError) as caught, bench.losses_told(cluster):
        raise lost
    assert caught.value.message == message
    assert caught.value.exit_code == 4
