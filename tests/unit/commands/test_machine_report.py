"""`hetero doctor` without a configuration: what it says of devices."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.commands import machine_report
from hetero_framework.core.devices import Device, Memory, Support
from hetero_framework.errors import DeviceError


class PlugIn(Device):
    """As a package may bring it: without memory figures, and not for this torch."""

    kind = "invented"

    def check(self) -> None:
        raise DeviceError("this torch has no kernels for it", hint="install another")

    def memory(self) -> Memory:
        raise NotImplementedError("no figures")

    def features(self) -> dict[str, Support]:
        return {"streams": Support(True, ""), "memory figures": Support(False, "no figures")}


def test_every_device_is_described_also_one_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_report, "list_devices", lambda: [PlugIn(0), Device()])
    facts: dict[str, Any] = machine_report.examine()
    plug_in, cpu = facts["devices"]
    assert plug_in["memory_bytes"] is None
    assert cpu["problem"] is None
    assert cpu["features"] == {}
    lines = machine_report.text(facts).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("device invented:0: "))
    assert lines[start].endswith(", memory unknown")
    said = lines[start + 1 : lines.index(next(x for x in lines if x.startswith("device cpu")))]
    assert said[0] == "  cannot be used: this torch has no kernels for it install another"
    assert {line.split(":")[0].strip() for line in said[1:]} == {
        *("float32", "bfloat16", "float16", "float64", "4-bit (nf4)", "streams", "memory figures")
    }
    assert said[-1] == "  memory figures: no (no figures)"
