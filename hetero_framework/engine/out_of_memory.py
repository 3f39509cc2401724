"""What is said when a device's memory runs out in a step: how much was needed, and of how much."""

from __future__ import annotations

import re

from hetero_framework.core.devices import Device
from hetero_framework.errors import OutOfMemory
from hetero_framework.units import size

_UNITS = {"bytes": 1, "B": 1} | {
    f"{prefix}{end}": 1024**power for power, prefix in enumerate("KMGT", 1) for end in ("B", "iB")
}
# "Tried to allocate 2.00 GiB." of CUDA, ROCm, XPU and MPS; "you tried to allocate 4096 bytes" of
# the CPU.
_TRIED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) (bytes|[KMGT]?i?B)\b", re.IGNORECASE)


def explained(where: str, error: BaseException, device: Device) -> OutOfMemory:
    """The error for the user: `where` it happened, what was needed there, as far as it is known."""
    text = " ".join(str(error).split()) or type(error).__name__
    said = text if len(text) <= 200 else f"{text[:200]} ..."
    return OutOfMemory(
        f"{where}: memory ran out{_numbers(text, device)}: {said}",
        hint="give this machine fewer layers, or lower per_device_train_batch_size or"
        " data.max_length; `hetero check` shows what each stage needs",
    )


def tried_bytes(text: str) -> int | None:
    """Bytes of the allocation that failed, if the error says them."""
    found = _TRIED.search(text)
    return int(float(found[1]) * _UNITS.get(found[2], 1)) if found else None


def _numbers(text: str, device: Device) -> str:
    """ " on ...: it needs at least a of b", from what the device says now."""
    place = f" on {device.name}"
    try:
        memory = device.memory()
    except RuntimeError:  # the driver is out of memory, too
        return place
    tried = tried_bytes(text)
    if tried is None:
        return f"{place}, {size(memory.free)} of {size(memory.total)} are free"
    if tried > memory.free:
        needed = memory.total - memory.free + tried
        return f"{place}, it needs at least {size(needed)} of {size(memory.total)}"
    # Enough is free: in pieces, or not for this process (a limit of the system).
    free = f"{size(memory.free)} of {size(memory.total)} are free"
    return (
        f"{place}, {size(tried)} more were needed at once, {free}, but not in one piece or not here"
    )
