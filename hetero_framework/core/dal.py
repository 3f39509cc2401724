"""Device Abstraction Layer: one class for CUDA, ROCm, MPS, XPU and CPU.

The rest of the package asks a `Device` what it can do and never looks at torch's device
namespaces itself. Names are "cpu", "cuda:0", "rocm:0", "mps", "xpu:0", or "auto": the first
accelerator that exists, else the CPU. ROCm uses torch's cuda namespace and is named as ROCm; on a
ROCm build of torch the name "cuda:0" is accepted for "rocm:0".
"""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from hetero_framework.errors import DeviceError

KINDS = ("cuda", "rocm", "mps", "xpu", "cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory."""

    total: int
    free: int


@dataclass(frozen=True)
class Support:
    """Whether something works on a device, and why."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class Device:
    """One device of this machine. Subclasses say what differs; this class is the CPU's behaviour
    wherever a device has nothing of its own."""

    kind = "cpu"

    def __init__(self, index: int | None = None) -> None:
        self.index = index
        self.name = self.kind if index is None else f"{self.kind}:{index}"

    def __repr__(self) -> str:
        return f"Device({self.name!r}, {self.label!r})"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def label(self) -> str:
        """What the device is called by its maker."""
        return _cpu_label()

    def memory(self) -> Memory:
        """Total and free bytes. On the CPU "free" is what a new process can have without swap."""
        memory = psutil.virtual_memory()
        return Memory(memory.total, memory.available)

    def supports(self, dtype: torch.dtype) -> Support:
        """Whether a model can be trained in this dtype here."""
        if not dtype.is_floating_point:
            return Support(False, f"{dtype} is not a floating point type")
        return self._supports(dtype)

    def _supports(self, dtype: torch.dtype) -> Support:
        if dtype in (torch.float32, torch.float64):
            return Support(True, "native")
        if dtype in (torch.bfloat16, torch.float16):
            return Support(True, "works on every CPU; fast only where the CPU has instructions")
        return Support(False, f"{dtype} is not a training type")

    def four_bit(self) -> Support:
        """Whether bitsandbytes can hold 4-bit weights on this device."""
        if importlib.util.find_spec("bitsandbytes") is None:
            return Support(False, "bitsandbytes is not installed (pip install bitsandbytes)")
        return self._four_bit()

    def _four_bit(self) -> Support:
        return Support(True, "bitsandbytes on the CPU; slow, for trying out")

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in CPU memory, complete on return; itself when it is there already."""
        return tensor.detach().to("cpu")

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor on this device; itself when this is the CPU.

        The CPU memory may be reused on return.
        """
        return tensor.to(self.torch_device)

    def allocate_host(self, nbytes: int) -> memoryview:
        """CPU memory for transfers with this device, pinned where that makes them faster."""
        return memoryview(bytearray(nbytes))

    def seed(self, value: int) -> None:
        """Seed the CPU generator and this device's own."""
        # Not torch.manual_seed: that seeds every device of the machine, also busy ones.
        torch.default_generator.manual_seed(value)
        self._seed(value)

    def _seed(self, value: int) -> None:
        pass

    def random_state(self) -> dict[str, torch.Tensor]:
        """The generators' state as CPU uint8 tensors, for `set_random_state`."""
        return {"cpu": torch.get_rng_state()}

    def set_random_state(self, state: dict[str, torch.Tensor]) -> None:
        """Continue where `random_state` was taken. A state of another kind of device sets what
        both have: the CPU generator."""
        torch.set_rng_state(state["cpu"])

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """torch.autocast to `dtype`; None or float32 means no autocast."""
        if dtype is None or dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.torch_device.type, dtype=dtype)

    def peak_memory(self) -> int:
        """Largest number of bytes used since `reset_peak_memory`. On the CPU: the largest
        resident set of this process since it started, which cannot be reset."""
        return _peak_resident_bytes()

    def reset_peak_memory(self) -> None:
        """Begin a new measurement of `peak_memory`, where the device has one."""

    def empty_cache(self) -> None:
        """Give cached, unused memory back to the system."""


class CudaDevice(Device):
    """An NVIDIA GPU, and the common part of every device in torch's cuda namespace."""

    kind = "cuda"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index or 0)

    @property
    def label(self) -> str:
        return str(torch.cuda.get_device_name(self.torch_device))

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return Memory(int(total), int(free))

    def _supports(self, dtype: torch.dtype) -> Support:
        if dtype in (torch.float32, torch.float64, torch.float16):
            return Support(True, "native")
        if dtype == torch.bfloat16:
            major, minor = torch.cuda.get_device_capability(self.torch_device)
            if major >= 8:
                return Support(True, f"native (compute capability {major}.{minor})")
            return Support(
                False, f"compute capability {major}.{minor}; bfloat16 needs 8.0; use float16"
            )
        return Support(False, f"{dtype} is not a training type")

    def _four_bit(self) -> Support:
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if major >= 6:
            return Support(True, f"bitsandbytes on CUDA (compute capability {major}.{minor})")
        return Support(False, f"compute capability {major}.{minor}; bitsandbytes needs 6.0")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def allocate_host(self, nbytes: int) -> memoryview:
        # Pinned, so that copies run at the bus's speed. The view keeps the tensor alive.
        return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data)

    def _seed(self, value: int) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.manual_seed(value)

    def random_state(self) -> dict[str, torch.Tensor]:
        state = torch.cuda.get_rng_state(self.torch_device)
        return {**super().random_state(), self.kind: state}

    def set_random_state(self, state: dict[str, torch.Tensor]) -> None:
        super().set_random_state(state)
        if self.kind in state:
            torch.cuda.set_rng_state(state[self.kind], self.torch_device)

    def peak_memory(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


class RocmDevice(CudaDevice):
    """An AMD GPU: torch's cuda namespace on a ROCm build."""

    kind = "rocm"

    def _supports(self, dtype: torch.dtype) -> Support:
        if dtype in (torch.float32, torch.float64, torch.float16):
            return Support(True, "native")
        if dtype == torch.bfloat16:
            if torch.cuda.is_bf16_supported():
                return Support(True, f"ROCm {torch.version.hip}")
            return Support(False, "this GPU has no bfloat16; use float16")
        return Support(False, f"{dtype} is not a training type")

    def _four_bit(self) -> Support:
        return Support(True, f"bitsandbytes on ROCm {torch.version.hip}")


class MpsDevice(Device):
    """The GPU of an Apple machine."""

    kind = "mps"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("mps")

    @property
    def label(self) -> str:
        return f"Apple GPU ({_cpu_label()})"

    def memory(self) -> Memory:
        """The GPU shares the machine's memory; Metal recommends a limit below all of it."""
        total = int(torch.mps.recommended_max_memory())
        in_use = int(torch.mps.driver_allocated_memory())
        return Memory(total, max(0, min(total - in_use, psutil.virtual_memory().available)))

    def _supports(self, dtype: torch.dtype) -> Support:
        if dtype in (torch.float32, torch.float16):
            return Support(True, "native")
        if dtype == torch.bfloat16:
            version = platform.mac_ver()[0]
            if int(version.split(".")[0] or 0) >= 14:
                return Support(True, f"macOS {version}")
            return Support(False, f"macOS {version}; bfloat16 on MPS needs macOS 14; use float16")
        return Support(False, f"{dtype} does not exist on MPS")

    def _four_bit(self) -> Support:
        return Support(False, "bitsandbytes has no 4-bit kernels for MPS; use bfloat16 there")

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def _seed(self, value: int) -> None:
        torch.mps.manual_seed(value)

    def random_state(self) -> dict[str, torch.Tensor]:
        return {**super().random_state(), self.kind: torch.mps.get_rng_state()}

    def set_random_state(self, state: dict[str, torch.Tensor]) -> None:
        super().set_random_state(state)
        if self.kind in state:
            torch.mps.set_rng_state(state[self.kind])

    def peak_memory(self) -> int:
        # Metal keeps no peak; what the driver holds now includes its cache and rarely shrinks.
        return int(torch.mps.driver_allocated_memory())

    def empty_cache(self) -> None:
        torch.mps.empty_cache()


class XpuDevice(Device):
    """An Intel GPU."""

    kind = "xpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("xpu", self.index or 0)

    @property
    def label(self) -> str:
        return str(torch.xpu.get_device_name(self.torch_device))

    def memory(self) -> Memory:
        total = int(torch.xpu.get_device_properties(self.torch_device).total_memory)
        try:
            free, total = torch.xpu.mem_get_info(self.torch_device)
        except RuntimeError:  # integrated GPUs do not report free memory
            free = total - torch.xpu.memory_reserved(self.torch_device)
        return Memory(int(total), int(free))

    def _supports(self, dtype: torch.dtype) -> Support:
        if dtype in (torch.float32, torch.float16):
            return Support(True, "native")
        if dtype == torch.bfloat16:
            if torch.xpu.is_bf16_supported():
                return Support(True, "native")
            return Support(False, "this GPU has no bfloat16; use float16")
        return Support(False, f"{dtype} is not a training type on XPU")

    def _four_bit(self) -> Support:
        return Support(True, "bitsandbytes on XPU")

    def synchronize(self) -> None:
        torch.xpu.synchronize(self.torch_device)

    def _seed(self, value: int) -> None:
        with torch.xpu.device(self.torch_device):
            torch.xpu.manual_seed(value)

    def random_state(self) -> dict[str, torch.Tensor]:
        state = torch.xpu.get_rng_state(self.torch_device)
        return {**super().random_state(), self.kind: state}

    def set_random_state(self, state: dict[str, torch.Tensor]) -> None:
        super().set_random_state(state)
        if self.kind in state:
            torch.xpu.set_rng_state(state[self.kind], self.torch_device)

    def peak_memory(self) -> int:
        return int(torch.xpu.max_memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> None:
        torch.xpu.reset_peak_memory_stats(self.torch_device)

    def empty_cache(self) -> None:
        torch.xpu.empty_cache()


_CLASSES: dict[str, type[Device]] = {
    cls.kind: cls for cls in (CudaDevice, RocmDevice, MpsDevice, XpuDevice, Device)
}


def list_devices() -> list[Device]:
    """Every device of this machine, the CPU last."""
    devices: list[Device] = []
    if torch.cuda.is_available():
        kind: type[CudaDevice] = RocmDevice if torch.version.hip else CudaDevice
        devices += [kind(index) for index in range(torch.cuda.device_count())]
    if torch.xpu.is_available():
        devices += [XpuDevice(index) for index in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        devices.append(MpsDevice())
    devices.append(Device())
    return devices


def open_device(name: str) -> Device:
    """The device called `name`; DeviceError, listing what exists, when there is none.

    "auto" is the first accelerator, else the CPU; a kind alone ("cuda") is its first device.
    """
    devices = list_devices()
    if name == "auto":
        return devices[0]
    match = re.fullmatch(r"(cuda|rocm|mps|xpu|cpu)(?::(\d+))?", name)
    if match is None:
        raise DeviceError(
            f"{name!r} is not a device name",
            hint=f"use auto or one of: {_existing(devices)}",
        )
    kind, index = match[1], int(match[2] or 0)
    if kind == "cuda" and torch.version.hip:
        kind = "rocm"
    for device in devices:
        if device.kind == kind and (device.index or 0) == index:
            return device
    raise DeviceError(
        f"this machine has no device {name!r}{_why_absent(kind)}",
        hint=f"it has: {_existing(devices)}",
    )


def _existing(devices: list[Device]) -> str:
    return ", ".join(f"{device.name} ({device.label})" for device in devices)


def _why_absent(kind: str) -> str:
    version = torch.__version__
    if kind == "cuda" and torch.version.cuda is None:
        return f" (torch {version} is built without CUDA)"
    if kind == "rocm" and torch.version.hip is None:
        return f" (torch {version} is built without ROCm)"
    return ""


def _cpu_label() -> str:
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _peak_resident_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
