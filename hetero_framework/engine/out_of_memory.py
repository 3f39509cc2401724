"""Errors for a lack of memory: the attempt that it ended, the bytes needed and available."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hetero_framework import control
from hetero_framework.core.devices import Device
from hetero_framework.core.fields import WorkerId
from hetero_framework.engine.hosts import StepTrouble
from hetero_framework.errors import (
    HeteroError,
    OutOfMemory,
    UserError,
    as_hetero_error,
    is_out_of_memory,
)
from hetero_framework.units import size

_UNITS = {"bytes": 1, "B": 1} | {
    f"{prefix}{end}": 1024**power for power, prefix in enumerate("KMGT", 1) for end in ("B", "iB")
}
# "Tried to allocate 2.00 GiB." of CUDA, ROCm, XPU and MPS; "you tried to allocate 4096 bytes" of
# the CPU.
_TRIED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) (bytes|[KMGT]?i?B)\b", re.IGNORECASE)

_HINT = (
    "give this machine fewer layers, or lower per_device_train_batch_size or data.max_length; "
    "`hetero check` shows what each stage needs"
)
HOST_HINT = (
    "keep less in this machine's host memory: fewer layers there (offload in shard_plan), a smaller"
    " training.max_in_flight, or no training.offload_optimizer or activation_offloading; or give"
    " layers to another machine"
)
Attempt = tuple[int, int]  # step, number of the attempt


class StepOutOfMemory(OutOfMemory, StepTrouble):
    """Memory ran out in an attempt at a step, in the process of `worker`. No weight has changed, so
    the step may be done again."""

    attempt: Attempt | None = None
    worker: WorkerId = "local"

    @classmethod
    def of(
        cls, attempt: Attempt | None, message: str, hint: str | None, worker: WorkerId = "local"
    ) -> StepOutOfMemory:
        made = cls(message, hint=hint)
        made.attempt, made.worker = attempt, worker
        return made

    def copied(self) -> StepOutOfMemory:
        """A copy without the traceback, which holds the tensors of the attempt."""
        return self.of(self.attempt, self.message, self.hint, self.worker)


@contextmanager
def explaining(where: str, device: Device, attempt: Attempt | None = None) -> Iterator[None]:
    """Within the block a lack of memory is raised as the error of `explained`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise explained(where, error, device, attempt) from error


def explained(
    where: str, error: BaseException, device: Device, attempt: Attempt | None = None
) -> OutOfMemory:
    """The error for the user: `where` it happened, and the bytes needed there if they are known.
    With `attempt` it is a StepOutOfMemory."""
    text = " ".join(str(error).split()) or type(error).__name__
    shortened = text if len(text) <= 200 else f"{text[:200]} ..."
    # If pinned memory is refused, plain memory is tried, so the error is the CPU allocator's.
    of_host = isinstance(error, MemoryError) or "CPUAllocator" in text or "bad_alloc" in text
    of_host &= not device.one_memory
    numbers = _numbers(text, Device() if of_host else device)
    message = f"{where}: {'host ' * of_host}memory ran out{numbers}: {shortened}"
    hint = HOST_HINT if of_host else _HINT
    if attempt is None:
        return OutOfMemory(message, hint=hint)
    return StepOutOfMemory.of(attempt, message, hint)


def failed(where: str, cause: Exception, device: Device, attempt: Attempt) -> HeteroError:
    """The error for the user when a stage's work raised `cause`, with the place: StepOutOfMemory, a
    known error, UserError for a mistake in an imported file, or HeteroError for a bug."""
    if is_out_of_memory(cause):
        return explained(where, cause, device, attempt)
    line = control.users_line(cause)
    of_user = line and isinstance(cause, OSError)  # a file of the user's own
    if not of_user and (known := as_hetero_error(cause)) is not None:
        return type(known)(f"{where}: {known.message}", hint=known.hint)
    kind = UserError if line else HeteroError
    return kind(f"{where}: {control.failure(cause)}")


def _numbers(text: str, device: Device) -> str:
    """The text " on ..., it needs at least a of b", as the device reports now."""
    place = f" on {device.name}"
    try:
        memory = device.memory()
    except RuntimeError:  # the driver is out of memory, too
        return place
    free = f"{size(memory.free)} of {size(memory.total)} are free"
    if (match := _TRIED.search(text)) is None:
        return f"{place}, {free}"
    tried = int(float(match[1]) * _UNITS.get(match[2], 1))
    if tried > memory.free:
        needed = memory.total - memory.free + tried
        return f"{place}, it needs at least {size(needed)} of {size(memory.total)}"
    # Enough is free, but in pieces, or not for this process (a limit of the system).
    return (
        f"{place}, {size(tried)} more were needed at once, {free}, but not in one piece or not here"
    )
