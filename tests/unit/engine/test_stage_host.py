from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hetero_framework.core.devices import Device, open_device
from hetero_framework.core.messages import Commit, Forward, Message
from hetero_framework.core.spans import Recorder
from hetero_framework.engine.boundary_io import ArrivalMeter, Done, inputs_in
from hetero_framework.engine.hosts import BatchInputs, StepResults
from hetero_framework.engine.out_of_memory import StepOutOfMemory
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.stage_api import Arrival, Outcome, StatePart, StepInfo
from hetero_framework.engine.stage_host import StageHost
from hetero_framework.errors import OutOfMemory, ProtocolError
from tests.samples import boundary_message
from tests.unit.device_helpers import OneThreadDevice, QueuedDevice, Reads
from tests.unit.engine.test_executor import FakeStage
from tests.unit.engine.test_pipeline import CONFIG

INFO = StepInfo(step=0, attempt=1, train=True, micro_batches=1, num_items=8)
SCHEDULE = StepSchedule(in_flight_limits=(4, 4))
BATCH = BatchInputs({"labels": torch.ones(1, 2)})


class Sink:
    """Of worker 7, which has the last stage."""

    def __init__(self) -> None:
        self.left: list[str] = []

    def post(self, message: Message, done: Done | None = None) -> None:
        self.left.append(message.name)

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        assert isinstance(outcome.loss, float)
        self.left.append("loss")

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        raise AssertionError("the first stage is elsewhere")

    def failed(self, error: Exception) -> None:
        raise error


def host_on(device: Device) -> StageHost:
    meter = ArrivalMeter(Recorder(0))
    return StageHost([FakeStage(1, last=True)], CONFIG, device, meter, Sink(), id=7)  # type: ignore[arg-type]


@pytest.fixture
def host():
    made = host_on(open_device("cpu"))
    yield made
    made.close()


def arrive(host: StageHost, info: StepInfo) -> list[int]:
    """Micro-batch 0 comes for this attempt; how often its buffer is given back."""
    released: list[int] = []
    message = boundary_message(Forward, info, 1, 0, torch.zeros(1, 2, 3))
    message._buffer_release = lambda: released.append(1)
    host.data(message, Arrival((torch.zeros(1, 2, 3),), message.release))
    return released


def take_step(host: StageHost, info: StepInfo) -> None:
    host.begin(info, SCHEDULE)
    host.feed(1, 0, ["labels"], BATCH)
    arrive(host, info)
    assert host.run_next()


def test_report_comes_once_when_all_micro_batches_are_through(host):
    host.begin(INFO, SCHEDULE)
    assert host.report() is None
    take_step(host, replace(INFO, attempt=2))
    report = host.report()
    assert list(report.gradients) == list(report.figures) == [1]
    assert host.report() is None


def test_norms_wait_for_the_sums_of_a_step_that_is_summed(host):
    [stage] = host.stages
    for attempt in (1, 2):  # a link broke: the gradients are new
        info = replace(INFO, attempt=attempt, summed=True)
        host.begin(info, SCHEDULE)
        assert host.gradients() == []
        host.feed(1, 0, ["labels"], BATCH)
        arrive(host, info)
        assert host.run_next()
        [found] = host.gradients()
        assert (found.stage, found.number, found.part.last) == (1, 0, True)
        assert host.gradients() == []  # once
        assert host.report() is None  # under way
        host.load_state(1, "gradients", 0, StatePart({"w": torch.ones(1)}))
        assert host.report() is None
        host.load_state(1, "gradients", 1, StatePart({}, last=True))
        assert host.report() is not None
        assert stage.calls[-2:] == [("load_state", "gradients"), ("report_gradients",)]  # type: ignore[attr-defined]


def test_sums_that_nothing_waits_for_are_refused(host):
    part = StatePart({}, last=True)
    with pytest.raises(ProtocolError, match="stage 1, which waits for none"):
        host.load_state(1, "gradients", 0, part)
    take_step(host, replace(INFO, summed=True))
    host.gradients()
    host.load_state(1, "gradients", 0, part)
    with pytest.raises(ProtocolError, match="waits for none"):
        host.load_state(1, "gradients", 0, part)


def test_norms_wait_for_the_sums_of_tied_weights(host):
    [stage] = host.stages
    stage.awaits_sums = True  # type: ignore[attr-defined]
    part = StatePart({"w": torch.ones(1)}, last=True)
    for step in (3, 4):
        take_step(host, replace(INFO, step=step))
        assert host.gradients() == []  # nothing here is tied to others' weights
        assert host.report() is None
        host.load_state(1, "tied gradients", 0, part)
        assert host.report() is not None
        with pytest.raises(ProtocolError, match="waits for none"):
            host.load_state(1, "tied gradients", 0, part)


def test_a_stage_that_is_tied_gives_its_gradients_and_takes_new_weights(host):
    [stage] = host.stages
    stage.ties = {"target": "source"}  # type: ignore[attr-defined]
    take_step(host, INFO)
    assert [found.stage for found in host.gradients()] == [1]
    assert host.report() is not None
    host.commit(Commit(INFO.step, INFO.attempt, 1e-3, 1.0), {"source": torch.ones(1)})
    assert stage.calls[-1] == ("set_tied_weights", ["source"])  # type: ignore[attr-defined]


def test_data_is_moved_to_a_device_of_one_thread_when_its_attempt_takes_it():
    device = OneThreadDevice(at_once=True)
    host = host_on(device)
    early = arrive(host, INFO)
    assert device.copied_in_by == []
    host.begin(INFO, SCHEDULE)
    assert len(device.copied_in_by) == len(early) == 1
    host.feed(1, 0, ["labels"], BATCH)
    assert host.run_next()
    host.close()


def test_data_of_a_later_attempt_waits_and_old_data_is_dropped(host):
    early = arrive(host, replace(INFO, attempt=5))
    host.begin(INFO, SCHEDULE)
    assert arrive(host, replace(INFO, attempt=0)) == [1]
    assert early == []
    host.begin(replace(INFO, attempt=5), SCHEDULE)
    host.feed(1, 0, ["labels"], BATCH)
    assert host.run_next()
    assert early == [1]


def test_commit_is_done_once_and_only_where_the_gradients_are(host):
    take_step(host, INFO)
    with pytest.raises(ProtocolError, match="whose gradients are not here"):
        host.commit(Commit(0, 9, 1e-3, 1.0))
    with pytest.raises(ProtocolError, match="COMMIT has 3 settings of Adam instead of 4"):
        host.commit(Commit(0, 1, 1e-3, 1.0, adam=(0.9, 0.95, 1e-8)))
    for _ in range(2):  # the second time over a new link
        host.commit(Commit(0, 1, 1e-3, 1.0))
    [stage] = host.stages
    assert [call[0] for call in stage.calls].count("commit") == 1  # type: ignore[attr-defined]
    assert host.last_step == 0


def test_lack_of_memory_names_the_attempt_until_the_step_is_decided(host, monkeypatch):
    def full(*args: object) -> None:
        raise MemoryError

    [stage] = host.stages
    with monkeypatch.context() as patch:
        patch.setattr(stage, "begin", full)
        with pytest.raises(StepOutOfMemory, match="begin of a step") as early:
            host.begin(INFO, SCHEDULE)
    assert early.value.attempt == (0, 1)
    take_step(host, replace(INFO, attempt=2))
    with monkeypatch.context() as patch:
        patch.setattr(stage, "report_gradients", full)
        with pytest.raises(StepOutOfMemory, match="norms of the gradients") as caught:
            host.report()
    assert caught.value.attempt == (0, 2)
    take_step(host, replace(INFO, attempt=3))
    assert host.report() is not None
    monkeypatch.setattr(stage, "commit", full)
    with pytest.raises(OutOfMemory, match="stage 1, step of the optimizer") as final:
        host.commit(Commit(0, 3, 1e-3, 1.0))
    assert not isinstance(final.value, StepOutOfMemory)


def test_step_that_begins_again_gives_unused_memory_back_first(host, monkeypatch):
    freed: list[int] = []
    monkeypatch.setattr(host._device, "empty_cache", lambda: freed.append(1))
    for step, train in ((0, True), (1, False), (1, True), (2, True)):
        host.begin(replace(INFO, step=step, train=train), SCHEDULE)
    assert freed == []
    host.begin(replace(INFO, step=2, attempt=2), SCHEDULE)
    assert freed == [1]


def test_snapshot_is_of_the_last_step_or_of_one_that_it_keeps(host):
    take_step(host, INFO)
    host.commit(Commit(0, 1, 1e-3, 1.0))
    host.snapshot(0)
    following = replace(INFO, step=1, attempt=2)
    take_step(host, following)
    host.commit(Commit(1, 2, 1e-3, 1.0))
    host.snapshot(0)  # asked again: it is kept
    assert host.state(1, "checkpoint", 0, 0).last
    assert host.state(1, "checkpoint", 0, 1).last
    with pytest.raises(ProtocolError, match="the state after step 0 is gone: step 1 is committed"):
        host.snapshot(0)


def test_export_is_read_in_order(host):
    assert isinstance(host.state(1, "export", 0, None), StatePart)
    with pytest.raises(ProtocolError, match="out of order"):
        host.state(1, "export", 3, None)


def test_inputs_of_a_micro_batch_are_copied_to_the_device_at_once():
    device = QueuedDevice(at_once=True)
    batch = {"input_ids": torch.ones(1, 2), "labels": torch.zeros(1, 2), "mask": torch.ones(1, 2)}
    found = inputs_in(device, batch)
    assert len(device.copied_in_by) == 1
    assert all(torch.equal(found[name], tensor) for name, tensor in batch.items())


def test_losses_of_a_step_are_read_in_one_go():
    results = StepResults()
    for k, loss in enumerate([torch.tensor(0.1), 0.25, torch.tensor(float("nan")), 0.5]):
        results.outcome(replace(INFO, micro_batches=4), k, Outcome(loss))
    with Reads() as reads:
        losses = results.losses()
    assert (losses[0], losses[1], losses[3]) == (float(torch.tensor(0.1)), 0.25, 0.5)
    assert math.isnan(losses[2])
    assert reads.count <= 1
