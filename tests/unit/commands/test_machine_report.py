"""`hetero doctor` without a configuration: what it says of devices."""

from __future__ import annotations

import json
from typing import Any

from hetero_framework import cli
from hetero_framework.commands import machine_report
from hetero_framework.core.devices import Device, Memory, Support
from hetero_framework.errors import DeviceError
from hetero_framework.security import certificates
from hetero_framework.security.keys import KeyDirectory


class PlugIn(Device):
    """As a package may bring it: without memory figures, and not for this torch."""

    kind = "invented"

    def check(self) -> None:
        raise DeviceError("this torch has no kernels for it", hint="install another")

    def memory(self) -> Memory:
        raise NotImplementedError("no figures")

    def features(self) -> dict[str, Support]:
        return {"streams": Support(True, ""), "memory figures": Support(False, "no figures")}


def test_every_device_is_described_also_one_that_cannot_be_used(monkeypatch):
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


def test_no_token_and_no_key_is_printed(tmp_path, monkeypatch, capsys):
    """Reports of bugs hold what the doctor prints, with a configuration and without."""
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"planted-{name}")
    machine = {"ip": "127.0.0.1", "device": "cpu"}
    plan = [{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 2}]
    config = {"coordinator": machine, "workers": [{**machine, "id": 1}], "shard_plan": plan}
    (tmp_path / "c.json").write_text(json.dumps(config))
    keys = KeyDirectory(tmp_path / "hetero_keys")
    certificates.ensure_authority(keys)
    certificates.issue_missing(keys, ["1"])
    for words in ([], ["--config", str(tmp_path / "c.json")]):
        cli.main(["doctor", *words])
        said = "".join(capsys.readouterr())
        assert "planted" not in said
        assert "PRIVATE" not in said
