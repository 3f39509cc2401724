"""The link between a device and its machine's memory, by a device that keeps its own time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.extras.planner import host_link
from hetero_framework.extras.planner.host_link import measured_link
from hetero_framework.extras.planner.profile import DeviceProfile


class Clocked(Device):
    """Copies at a rate for each way, which is less for both at once, and computing that takes
    longer meanwhile. `now` is the time of the host, `done` that of each stream."""

    one_memory = False
    rates: ClassVar = {"in": 4e9, "out": 2e9}
    sharing, slowed, work_s = 1.5, 1.2, 0.010

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.done: dict[str, float] = {}

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        return torch.empty(nbytes, dtype=torch.uint8)

    def queue_copies(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str, *after: Any
    ) -> Any:
        took_s = sum(target.nbytes for target, _ in pairs) / self.rates[stream]
        others = [other for other, done in self.done.items() if done > self.now and other != stream]
        for other in others:
            self.done[other] = self.now + (self.done[other] - self.now) * self.sharing
        took_s *= self.sharing if others else 1.0
        self.done[stream] = max(self.now, self.done.get(stream, 0.0)) + took_s

    def compute(self) -> None:
        copying = self.done.get("in", 0.0) > self.now + self.work_s
        begins = max(self.now, self.done.get("computing", 0.0))
        self.done["computing"] = begins + self.work_s * (self.slowed if copying else 1.0)

    def record_event(self, *tensors: torch.Tensor) -> Any:
        event = DeviceEvent()
        event.made_s = max(self.now, self.done.get("computing", 0.0))
        return event

    def synchronize(self) -> None:
        self.now = max(self.now, *self.done.values(), 0.0)


def test_rates_each_way_and_both_and_the_slowdown_of_computing(monkeypatch):
    device = Clocked()
    monkeypatch.setattr(host_link.time, "perf_counter", lambda: device.now)
    found = measured_link(device, device.compute)
    assert found.host_to_device_bytes_per_s == pytest.approx(4e9)
    assert found.device_to_host_bytes_per_s == pytest.approx(2e9)
    assert found.both_ways == pytest.approx(1.5, rel=0.01)
    assert found.copy_slowdown == pytest.approx(1.2)
    assert device.now < 3.0
    assert vars(found).keys() <= DeviceProfile.model_fields.keys()


def test_a_device_without_memory_of_its_own_has_no_link():
    assert measured_link(Device(), lambda: None) is None


def test_memory_that_is_not_pinned_is_measured_as_it_is(monkeypatch):
    device = Clocked()
    monkeypatch.setattr(host_link.time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(device, "rates", {"in": 1e9, "out": 1e9})
    monkeypatch.setattr(device, "pinned", lambda nbytes: None)
    found = measured_link(device, device.compute)
    assert found.host_to_device_bytes_per_s == pytest.approx(1e9)


def test_a_slow_link_is_measured_once_or_not_at_all(monkeypatch):
    for rate, is_measured in ((1e6, True), (1e5, False)):
        device = Clocked()
        for clock in ("perf_counter", "monotonic"):
            monkeypatch.setattr(host_link.time, clock, lambda device=device: device.now)
        monkeypatch.setattr(device, "rates", {"in": rate, "out": rate})
        found = measured_link(device, device.compute)
        assert (found is not None) == is_measured
        assert device.now < 16.0


def test_where_memory_is_short_less_of_it_is_used(monkeypatch):
    device, asked = Clocked(), []

    def pinned(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        if nbytes > room:
            raise torch.OutOfMemoryError("out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_link.time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(device, "pinned", pinned)
    room = 1 << 23
    assert measured_link(device, device.compute) is not None
    assert asked == [1 << 26, 1 << 23, 1 << 23]
    room = 0
    assert measured_link(device, device.compute) is None
