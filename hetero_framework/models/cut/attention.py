"""Attentions (model.attn_implementation) that a device can train with, and why not the rest."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from hetero_framework import registry
from hetero_framework.config import Config, process_name
from hetero_framework.core.devices import Support
from hetero_framework.errors import DeviceError

_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}
KNOWN = ("sdpa", "eager", *_PACKAGES, "flex_attention")
_GPUS = ("cuda", "rocm")
_INSTEAD = 'set model.attn_implementation to "sdpa", or to null, the model\'s own choice'


def attention_support(name: str, kind: str) -> Support:
    """Whether a device of this kind ("cpu", "cuda", ...) can train with this attention here."""
    if name in _PACKAGES:
        module, package = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            return Support(False, f"the package {package} is not installed")
        if kind not in _GPUS:
            return Support(False, "it needs a CUDA or ROCm device")
    if name == "flex_attention" and kind not in (*_GPUS, "xpu"):
        return Support(False, f"torch's flex attention has no backward on {kind}")
    return Support(True, "")


def make_known(name: str | None) -> None:
    """Register an attention that an extra brings with transformers."""
    if name is not None and registry.has("attention", name):
        registry.find("attention", name)()


def check_installed(name: str | None) -> None:
    """Raise DeviceError where this machine lacks what the attention needs."""
    if name is not None and not (support := attention_support(name, _GPUS[0])):
        raise DeviceError(
            f"model.attn_implementation is {name!r}, which this machine cannot run:"
            f" {support.reason}",
            hint=_INSTEAD,
        )


def check_attention(config: Config, devices: Mapping[int | str, str] | None = None) -> None:
    """Raise DeviceError that names the processes with layers whose device cannot train with
    model.attn_implementation. `devices` are names such as "cuda:0", for processes whose device is
    known; "auto" is not judged."""
    name = config.model.attn_implementation if config.model is not None else None
    if name is None:
        return
    problems = []
    with_layers = (spec.owner for spec in config.plan.stages if spec.end > spec.start)
    for owner in dict.fromkeys(with_layers):
        machine = config.machine(owner)
        device = (devices or {}).get(owner, machine.device)
        support = attention_support(name, device.partition(":")[0])
        if device != "auto" and not support:
            where = f"{process_name(owner)} ({machine.hostname or machine.ip}, {device})"
            problems.append(f"{where} cannot train with {name!r}: {support.reason}")
    if problems:
        raise DeviceError(f"model.attn_implementation: {'; '.join(problems)}", hint=_INSTEAD)
