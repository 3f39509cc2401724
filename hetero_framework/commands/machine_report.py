"""The report of `hetero doctor` on a machine: versions, devices, number types, attention, ports."""

from __future__ import annotations

import platform
import shutil
from typing import Any

import psutil
import torch

from hetero_framework import versions
from hetero_framework._version import __version__
from hetero_framework.cluster.roles import available_cores
from hetero_framework.config import COORDINATOR_PORT, WORKER_PORT
from hetero_framework.core import addresses
from hetero_framework.core.devices import Device, Support, list_devices
from hetero_framework.errors import UserError, attempt
from hetero_framework.models.cut.attention import KNOWN, attention_support
from hetero_framework.tables import Part, lines, one_line
from hetero_framework.units import size

_PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "datasets", "bitsandbytes", "safetensors",
    "pydantic",
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def examine() -> dict[str, Any]:
    """Everything about this machine, as JSON types. Sizes are in bytes."""
    return {
        "hetero_framework": __version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: versions.installed(name) for name in _PACKAGES},
        "host_names": addresses.local_hostnames(),
        "addresses": addresses.local_addresses(),
        "cores": available_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "devices": [_device(device) for device in list_devices()],
        "attention": {  # the values of model.attn_implementation, on the first device
            name: _answer(attention_support(name, list_devices()[0].kind)) for name in KNOWN
        },
        "graphviz": shutil.which("dot"),
        "ports": {
            str(port): "free" if addresses.port_is_free("0.0.0.0", port) else "in use"
            for port in (COORDINATOR_PORT, WORKER_PORT)
        },
    }


def text(facts: dict[str, Any]) -> str:
    """The report of `examine` as text."""
    packages = ", ".join(f"{name} {v or '(absent)'}" for name, v in facts["packages"].items())
    return lines(
        f"hetero {facts['hetero_framework']}, Python {facts['python']}, {facts['system']}",
        f"packages: {packages}",
        f"names: {', '.join(facts['host_names'])}",
        f"addresses: {', '.join(facts['addresses'])}",
        f"cores: {facts['cores']}; memory: {size(facts['memory_bytes'])},"
        f" {size(facts['memory_available_bytes'])} available",
        "",
        *(part for device in facts["devices"] for part in _device_lines(device)),
        "",
        "attention:",
        _offers(facts["attention"]),
        "",
        f"graphviz: {facts['graphviz'] or 'dot is not installed: diagrams are drawn plainer'}",
        *(f"port {port}: {state}" for port, state in facts["ports"].items()),
    )


def _device_lines(device: dict[str, Any]) -> tuple[Part, ...]:
    room, problem = "memory unknown", device["problem"]
    if device["memory_bytes"] is not None:
        room = f"{size(device['memory_bytes'])}, {size(device['memory_free_bytes'])} free"
    return (
        f"device {device['name']}: {device['label']}, {room}",
        problem and [f"cannot be used: {one_line(problem)}"],
        _offers({**device["dtypes"], "4-bit (nf4)": device["four_bit"], **device["features"]}),
    )


def _offers(answers: dict[str, Any]) -> list[str]:
    shown = []
    for name, answer in answers.items():
        reason = f" ({answer['reason']})" if answer["reason"] else ""
        shown.append(f"{name}: {'yes' if answer['ok'] else 'no'}{reason}")
    return shown


def _device(device: Device) -> dict[str, Any]:
    found, features = attempt(device.check), device.features()
    memory = device.memory() if features.get("memory figures", True) else None
    return {
        "name": device.name,
        "kind": device.kind,
        "label": device.label,
        "problem": str(found) if isinstance(found, UserError) else None,
        "memory_bytes": memory and memory.total,
        "memory_free_bytes": memory and memory.free,
        "dtypes": {
            str(dtype).removeprefix("torch."): _answer(device.supports(dtype)) for dtype in _DTYPES
        },
        "four_bit": _answer(device.four_bit()),
        "features": {name: _answer(offer) for name, offer in features.items()},
    }


def _answer(support: Support) -> dict[str, Any]:
    return {"ok": bool(support), "reason": support.reason}
