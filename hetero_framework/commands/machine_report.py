"""The report of `hetero doctor` on a machine: versions, devices, number types, attention, ports."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from typing import Any

import psutil
import torch

from hetero_framework._version import __version__
from hetero_framework.cluster.roles import available_cores
from hetero_framework.config import COORDINATOR_PORT, WORKER_PORT
from hetero_framework.core import addresses
from hetero_framework.core.devices import Device, Support, list_devices
from hetero_framework.errors import DeviceError
from hetero_framework.models.cut.attention import KNOWN, attention_support
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
        "packages": {name: _version(name) for name in _PACKAGES},
        "host_names": addresses.local_hostnames(),
        "addresses": addresses.local_addresses(),
        "cores": available_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "devices": [_device(device) for device in list_devices()],
        "attention": {name: _answer(kernel) for name, kernel in _attention().items()},
        "graphviz": shutil.which("dot"),
        "ports": {
            str(port): "free" if addresses.port_is_free("0.0.0.0", port) else "in use"
            for port in (COORDINATOR_PORT, WORKER_PORT)
        },
    }


def text(facts: dict[str, Any]) -> str:
    """The report of `examine` as text."""
    lines = [
        f"hetero {facts['hetero_framework']}, Python {facts['python']}, {facts['system']}",
        "packages: " + ", ".join(f"{n} {v or '(absent)'}" for n, v in facts["packages"].items()),
        f"names: {', '.join(facts['host_names'])}",
        f"addresses: {', '.join(facts['addresses'])}",
        f"cores: {facts['cores']}; memory: {size(facts['memory_bytes'])},"
        f" {size(facts['memory_available_bytes'])} available",
        "",
    ]
    for device in facts["devices"]:
        room = "memory unknown"
        if device["memory_bytes"] is not None:
            room = f"{size(device['memory_bytes'])}, {size(device['memory_free_bytes'])} free"
        lines.append(f"device {device['name']}: {device['label']}, {room}")
        if device["problem"] is not None:
            lines.append(f"  cannot be used: {' '.join(device['problem'].split())}")
        offers = {**device["dtypes"], "4-bit (nf4)": device["four_bit"], **device["features"]}
        lines += [f"  {name}: {_words(answer)}" for name, answer in offers.items()]
    lines += ["", "attention:"]
    lines += [f"  {name}: {_words(answer)}" for name, answer in facts["attention"].items()]
    dot = facts["graphviz"] or "dot is not installed: diagrams are drawn plainer"
    lines += ["", f"graphviz: {dot}"]
    lines += [f"port {port}: {state}" for port, state in facts["ports"].items()]
    return "\n".join(lines)


def _device(device: Device) -> dict[str, Any]:
    problem, features = None, device.features()
    try:
        device.check()
    except DeviceError as error:
        problem = str(error)
    memory = device.memory() if features.get("memory figures", True) else None
    return {
        "name": device.name,
        "kind": device.kind,
        "label": device.label,
        "problem": problem,
        "memory_bytes": memory and memory.total,
        "memory_free_bytes": memory and memory.free,
        "dtypes": {
            str(dtype).removeprefix("torch."): _answer(device.supports(dtype)) for dtype in _DTYPES
        },
        "four_bit": _answer(device.four_bit()),
        "features": {name: _answer(offer) for name, offer in features.items()},
    }


def _attention() -> dict[str, Support]:
    """The values of model.attn_implementation that work on the first device, with the reason."""
    kind = list_devices()[0].kind
    return {name: attention_support(name, kind) for name in KNOWN}


def _answer(support: Support) -> dict[str, Any]:
    return {"ok": bool(support), "reason": support.reason}


def _words(answer: dict[str, Any]) -> str:
    word = "yes" if answer["ok"] else "no"
    return f"{word} ({answer['reason']})" if answer["reason"] else word


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
