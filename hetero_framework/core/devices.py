"""Device Abstraction Layer: the CPU and every accelerator of torch behind one class.

The rest of the package never looks at torch's device namespaces itself. Names are "cpu", "cuda:0",
"rocm:0" (on a ROCm build of torch "cuda:0" is accepted, too), "mps", "xpu:0", torch's name of an
out-of-tree accelerator such as "npu:0", or "auto". What torch does not tell of an accelerator is in
a subclass, here or in a package with an entry point in the group `hetero_framework.devices`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import logging
import os
import platform
import queue
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import psutil
import torch

from hetero_framework.core import timeouts
from hetero_framework.core.buffers import MAX_PINNED_BYTES, BufferPool, pinned_size_class
from hetero_framework.errors import DeviceError

_POLL_S = 0.0002
_CLOCK_AGE_S = 5.0
_CLOCK_TRIES = 3
_CLOCK_WIDTH_S = 100e-6

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory."""

    total: int
    free: int


@dataclass(frozen=True)
class Support:
    """Whether something works on a device, and why. `emulated`: it would, but far too slowly."""

    ok: bool
    reason: str
    emulated: bool = False

    def __bool__(self) -> bool:
        return self.ok


class DeviceEvent:
    """A point in a device's work, behind all that the recording thread had queued there. Any thread
    may use it. This class is for the CPU, where every call is done at once."""

    def __init__(self) -> None:
        self.made_s = time.perf_counter()

    def wait(self) -> None:
        """Block this thread, and nothing else, until the point is reached."""

    def done(self) -> bool:
        """Whether the point is reached."""
        return True

    @property
    def at_s(self) -> float:
        """When the point was reached, in seconds of `time.perf_counter`; waits for it."""
        return self.made_s

    def until_s(self, end: DeviceEvent) -> float:
        """Seconds on the device between two points that are reached."""
        return end.at_s - self.at_s


def _nothing() -> None:
    return None


HostTensor = tuple[torch.Tensor, Callable[[], None]]
"""A tensor in CPU memory, and the function that gives that memory back."""


class Device:
    """One device of this machine. This class is the CPU, and has the defaults of all others."""

    kind = "cpu"

    is_async = False
    """Whether a call returns before the device has done the work."""
    one_thread = False
    """Whether only the computing thread may copy to the device and call `copy_in`."""
    one_memory = True
    """Whether the device uses the machine's memory: moving tensors to the host gains nothing."""
    _native: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    _other_dtypes = "is not a training type"

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
        """The maker's name of the device."""
        return _cpu_label()

    def memory(self) -> Memory:
        """Total and free bytes. On the CPU "free" is what a new process can have without swap."""
        memory = psutil.virtual_memory()
        return Memory(memory.total, memory.available)

    @property
    def host_free(self) -> int | None:
        """Free bytes of host memory; None where the device has no memory of its own."""
        return None if self.one_memory else Device.memory(self).free

    def supports(self, dtype: torch.dtype) -> Support:
        """Whether a model can be trained in this dtype here."""
        if not dtype.is_floating_point:
            return Support(False, f"{dtype} is not a floating point type")
        if dtype in self._native:
            return Support(True, "native")
        if dtype in (torch.bfloat16, torch.float16):
            return self._half()
        return Support(False, f"{dtype} {self._other_dtypes}")

    def _half(self) -> Support:
        """Whether the device has bfloat16, and float16 where `_native` does not list it."""
        return Support(True, "works on every CPU; fast only where the CPU has instructions")

    def check(self) -> None:
        """Raise DeviceError, with the torch to install, if torch has no kernels for the device."""

    def features(self) -> dict[str, Support]:
        """Abilities of the device for transfers and measurements, tried out; empty for a CPU."""
        return {}

    def four_bit(self) -> Support:
        """Whether bitsandbytes can hold 4-bit weights on this device."""
        return _four_bit_on(self.torch_device.type)

    @property
    def no_four_bit(self) -> str | None:
        """Why the device has no 4 bits; None where it has them."""
        support = self.four_bit()
        return None if support else support.reason

    def use(self) -> None:
        """For the computing thread: make this its current device (bitsandbytes, Triton kernels)."""

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""

    def works(self) -> bool:
        """Whether this process can still use the device: not after an illegal access there."""
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in CPU memory, complete on return; itself when it is there already."""
        return tensor.detach().to("cpu")

    def all_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`to_host` of each, with one wait for all of them."""
        event = self.record_event(*tensors)
        hosts = []
        for host, release in self.copies_out(tensors, event, self._host_buffers):
            hosts.append(host if release is _nothing else host.clone())
            release()
        return hosts

    @cached_property
    def _host_buffers(self) -> BufferPool:
        return self.buffers()

    def allocate_host(self, nbytes: int) -> memoryview:
        """CPU memory for transfers with this device: pinned up to 64 MiB where that is faster."""
        return memoryview(bytearray(nbytes))

    def allocate_pinned(self, nbytes: int) -> memoryview:
        """As `allocate_host`, but pinned at any size, for memory that is used in every step."""
        return memoryview(self.host_bytes(nbytes).numpy().data)  # the view keeps the tensor alive

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        """A uint8 tensor of pinned host memory; None where the system gives none."""
        return None

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of host memory, pinned where the system allows it."""
        pinned = self.pinned(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8) if pinned is None else pinned

    def buffers(self) -> BufferPool:
        """A pool of memory from `allocate_host`."""
        return BufferPool()

    def queue_copies(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str, *after: DeviceEvent
    ) -> tuple[DeviceEvent, DeviceEvent]:
        """Queue copies of the second tensor of each pair into the first, on `stream`, behind the
        stream's earlier copies and the events `after`. Returns the events of their beginning and
        end. Waits for nothing, unless host memory among them is not pinned. Neither tensor of a
        pair may be freed, or changed by other work, before the end."""
        began = DeviceEvent()
        for target, source in pairs:
            target.copy_(source)
        return began, DeviceEvent()

    def order_behind(self, event: DeviceEvent) -> None:
        """Make this thread's later work on the device, but not the thread, wait for an event."""

    def record_event(self, *tensors: torch.Tensor) -> DeviceEvent:
        """The point behind all work that this thread has queued on the device. Does not wait.
        `tensors` are those that `copy_out` will be asked for with this event: a device whose copies
        queue up behind its computing begins to copy them here."""
        return DeviceEvent()

    def copy_out(self, tensor: torch.Tensor, event: DeviceEvent, pool: BufferPool) -> HostTensor:
        """`copies_out` of one tensor."""
        return self.copies_out([tensor], event, pool)[0]

    def copies_out(
        self, tensors: Sequence[torch.Tensor], event: DeviceEvent, pool: BufferPool
    ) -> list[HostTensor]:
        """Each tensor in CPU memory, with the function that gives that memory back to `pool`, which
        `buffers` made. Call the function once: the CPU tensor is void then.

        `event` was made after the tensors' last operation was queued, and nothing changes them from
        then on. For threads that send: waits until the tensors are complete and copied, but not for
        work that was queued behind them.
        """
        return [(tensor.detach(), _nothing) for tensor in tensors]

    def copy_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """`copies_in` of one tensor."""
        return self.copies_in([tensor])[0]

    def copies_in(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of CPU tensors on this device, for the computing thread; on the CPU the tensors
        themselves. Complete on return, except with `one_thread`: there its queue orders them."""
        return list(tensors)

    # Not torch.manual_seed: that seeds every device of the machine, also busy ones.
    seed: Callable[[int], object] = staticmethod(torch.default_generator.manual_seed)
    """Seed the CPU generator and this device's own."""

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """torch.autocast to `dtype`; None or float32 means no autocast."""
        if dtype is None or dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.torch_device.type, dtype=dtype)

    def peak_memory(self) -> int:
        """Most bytes used since `reset_peak_memory`. On the CPU: this process's largest resident
        set since it started, which cannot be reset."""
        return _peak_resident_bytes()

    def reset_peak_memory(self) -> None:
        """Begin a new measurement of `peak_memory`, where the device has one."""

    def empty_cache(self) -> None:
        """Give unused memory back to the system."""
        collect_cycles()


class _Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def collect_cycles() -> None:
    """Free objects in reference cycles, as models that libraries have loaded are. Waits until no
    other thread collects: during another collection `gc.collect` returns at once."""
    unreachable = weakref.ref(_Cycle())
    deadline = time.monotonic() + timeouts.EXIT_S
    gc.collect()
    while unreachable() is not None and time.monotonic() < deadline:
        time.sleep(timeouts.EXIT_TICK_S)
        gc.collect()


class HostCopy:
    """CPU copies of tensors, in memory that is kept: each copy is valid until the next one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = BufferPool(device.allocate_pinned, max_bytes=None)
        self._release: Callable[[], None] = _nothing

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in CPU memory, complete on return."""
        self._release()
        tensor = tensor.detach().contiguous()
        event = self._device.record_event(tensor)
        host, self._release = self._device.copy_out(tensor, event, self._pool)
        return host


@dataclass(frozen=True)
class _DeviceClock:
    """Ties the device's clock to the host's: `native` happened at `at_s` of time.perf_counter."""

    native: Any
    at_s: float


class _QueuedEvent(DeviceEvent):
    """An event in a device's queue. `clock` is an earlier event with its host time. Without it
    `at_s` is when a thread saw the event, which is late if none watched. `held` is kept alive."""

    def __init__(
        self, native: Any, clock: _DeviceClock | None = None, held: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self.native = native
        self.clock = clock
        self.held = held
        self._seen_s: float | None = None

    def wait(self) -> None:
        self.native.synchronize()  # without the GIL
        self.done()

    def done(self) -> bool:
        if self._seen_s is None and self.native.query():
            self._seen_s = time.perf_counter()
        return self._seen_s is not None

    @property
    def at_s(self) -> float:
        self.wait()
        assert self._seen_s is not None
        if self.clock is None:
            return self._seen_s
        return self.clock.at_s + float(self.clock.native.elapsed_time(self.native)) / 1e3

    def until_s(self, end: DeviceEvent) -> float:
        assert isinstance(end, _QueuedEvent)
        if self.clock is None or end.clock is None:
            return super().until_s(end)
        return float(self.native.elapsed_time(end.native)) / 1e3


class _Watcher:
    """A thread that waits for events in the order in which they are made. So each event is seen
    when it is reached, and the tensors that it holds live until then."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[_QueuedEvent] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs = False

    def watch(self, event: _QueuedEvent) -> None:
        self._events.put(event)
        with self._lock:
            if not self._runs:
                threading.Thread(target=self._run, name="watch events", daemon=True).start()
                self._runs = True

    def _run(self) -> None:
        while True:
            try:
                # No name for the event: it would keep the last one alive.
                self._events.get().wait()
            except Exception as error:
                # The computing thread meets it as well; this one goes on with the next event.
                _log.debug("a device event cannot be waited for: %s", error)


class AcceleratorDevice(Device):
    """An accelerator of torch, through what torch offers for all of them: streams and events.

    The computing thread works on the default stream. Copies run on two other streams, one per
    direction, as a device has a copy engine for each. torch's streams do not wait for the default
    stream: only events order them. Each thread has its own current stream, so blocks with a stream
    here do not touch the computing thread. No call but `synchronize` waits for the whole device.
    """

    kind = "accelerator"
    is_async = True
    one_memory = False
    _torch_kind: str | None = None
    """torch's name of the device type; None where it is `kind`."""
    _native: tuple[torch.dtype, ...] = (torch.float32, torch.float16)

    def __init__(self, index: int | None = None, kind: str | None = None) -> None:
        self.kind = kind or self.kind
        super().__init__(index)
        self._lock = threading.Lock()
        self._streams: dict[str, Any] = {}
        self._clock: _DeviceClock | None = None
        self._has_times = True
        self._watcher = _Watcher()

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self._torch_kind or self.kind, self.index or 0)

    @property
    def _module(self) -> Any:
        """torch.cuda, torch.xpu, torch.npu, ..."""
        return getattr(torch, self._torch_kind or self.kind)

    @property
    def label(self) -> str:
        if not hasattr(self._module, "get_device_name"):
            return self.kind.upper()
        return str(self._module.get_device_name(self.torch_device))

    def memory(self) -> Memory:
        ask = getattr(self._module, "mem_get_info", None) or torch.accelerator.get_memory_info
        free, total = ask(self.torch_device)
        return Memory(int(total), int(free))

    def _half(self) -> Support:
        is_supported = getattr(self._module, "is_bf16_supported", None)
        if is_supported is None or is_supported():
            return Support(True, "native" if is_supported else "torch does not say")
        return Support(False, f"this {self.kind} device has no bfloat16; use float16")

    def features(self) -> dict[str, Support]:
        return {
            "streams": _offered(partial(self._side_stream, "out")),
            "events with time": _offered(self._read_clock),
            "memory figures": _offered(self.memory),
            "pinned memory": _offered(partial(self._pinned, 1)),
        }

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def seed(self, value: int) -> None:
        super().seed(value)
        with self._current():
            self._module.manual_seed(value)

    def peak_memory(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def empty_cache(self) -> None:
        super().empty_cache()
        torch.accelerator.empty_cache()

    def use(self) -> None:
        torch.accelerator.set_device_index(self.torch_device)

    def allocate_host(self, nbytes: int) -> memoryview:
        if nbytes > MAX_PINNED_BYTES:
            return super().allocate_host(nbytes)
        return self.allocate_pinned(nbytes)

    def buffers(self) -> BufferPool:
        return BufferPool(self.allocate_host, rounding=pinned_size_class)

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        try:
            return self._pinned(nbytes)
        except RuntimeError:
            return None

    def _pinned(self, nbytes: int) -> torch.Tensor:
        # Without the device set, a thread's first pinned buffer could wake device 0 as well.
        with self._current():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def record_event(self, *tensors: torch.Tensor) -> DeviceEvent:
        clock = self._device_clock()
        native = self._event(timing=clock is not None)
        # The stream by name: without it, events are recorded on the thread's current device.
        native.record(self._computing_stream())
        event = _QueuedEvent(native, clock)
        if clock is None:
            self._watcher.watch(event)
        return event

    def copies_out(
        self, tensors: Sequence[torch.Tensor], event: DeviceEvent, pool: BufferPool
    ) -> list[HostTensor]:
        assert isinstance(event, _QueuedEvent)
        copies: list[HostTensor] = []
        stream = self._side_stream("out")
        with self._on(stream):
            stream.wait_event(event.native)
            for tensor in tensors:
                if tensor.numel() == 0:
                    copies.append((torch.empty(tensor.shape, dtype=tensor.dtype), _nothing))
                    continue
                buffer, release = pool.take(tensor.numel() * tensor.element_size())
                host = torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)
                host.copy_(tensor.detach(), non_blocking=True)
                copies.append((host, release))
            copied = self._event()
            copied.record(stream)
        # `tensors` are held until here: record_stream, which delays reuse of memory, is not needed.
        copied.synchronize()
        return copies

    def copies_in(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        computing = self._computing_stream()
        stream = self._side_stream("in")
        with self._on(stream):
            # Allocated here, the memory is the side stream's own: no queued work still uses it.
            there = [tensor.to(self.torch_device, non_blocking=True) for tensor in tensors]
            copied = self._event()
            copied.record(stream)
        for tensor in there:
            # When it is dropped, work that reads it may still be queued on the computing stream.
            tensor.record_stream(computing)
        copied.synchronize()
        return there

    def queue_copies(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str, *after: DeviceEvent
    ) -> tuple[DeviceEvent, DeviceEvent]:
        side, ends = self._side_stream(stream), []
        clock = self._device_clock()
        with self._on(side):
            for event in after:
                assert isinstance(event, _QueuedEvent)
                side.wait_event(event.native)
            for copies in ((), pairs):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                native = self._event(timing=clock is not None)
                native.record(side)
                ends.append(_QueuedEvent(native, clock))
        return ends[0], ends[1]

    def order_behind(self, event: DeviceEvent) -> None:
        assert isinstance(event, _QueuedEvent)
        self._computing_stream().wait_event(event.native)

    # torch's classes for all accelerators; those of torch.cuda or torch.xpu do not mix with them.

    def _event(self, *, timing: bool = False) -> Any:
        return torch.Event(self.torch_device, enable_timing=timing)

    def _new_stream(self) -> Any:
        return torch.Stream(device=self.torch_device)

    def _computing_stream(self) -> Any:
        """The thread's current stream of this device."""
        return torch.accelerator.current_stream(self.torch_device)

    def _within(self, stream: Any) -> AbstractContextManager[Any]:
        """Within the block, `stream` is the thread's current stream."""
        return cast(AbstractContextManager[Any], stream)

    def _current(self) -> AbstractContextManager[Any]:
        """Within the block, the device is the thread's current device."""
        return torch.accelerator.device_index(self.torch_device.index)

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        # The device first: leaving a stream of another device sets the thread's own again, which
        # would wake device 0 in a process that does not use it.
        with self._current(), self._within(stream):
            yield

    def _side_stream(self, name: str) -> Any:
        with self._lock:
            if name not in self._streams:
                self._streams[name] = self._new_stream()
            return self._streams[name]

    def _device_clock(self) -> _DeviceClock | None:
        """The tie between the clocks, renewed when it is old: they drift, and the difference of
        two events is a float32. None where events carry no time."""
        known = self._clock
        is_new = known is not None and time.perf_counter() - known.at_s < _CLOCK_AGE_S
        if is_new or not self._has_times:
            return known
        try:
            self._clock = self._read_clock()
        except RuntimeError:  # XPU: some builds and drivers cannot time events
            self._has_times, self._clock = False, None
        return self._clock

    def _read_clock(self) -> _DeviceClock:
        """Tie the clocks with an event on an idle stream, which happens about when it is recorded.
        Takes the best of a few tries, as other processes on the device can come in between."""
        stream = self._side_stream("clock")
        best, best_width_s = None, float("inf")
        for _ in range(_CLOCK_TRIES):
            native = self._event(timing=True)
            before = time.perf_counter()
            native.record(stream)
            native.synchronize()
            after = time.perf_counter()
            if after - before < best_width_s:
                best, best_width_s = _DeviceClock(native, (before + after) / 2), after - before
            if best_width_s < _CLOCK_WIDTH_S:
                break
        assert best is not None
        best.native.elapsed_time(best.native)  # raises where events carry no time
        return best


class _NamespaceDevice(AcceleratorDevice):
    """A device whose namespace has stream and event classes of its own: CUDA, ROCm and XPU."""

    _event_options: ClassVar[dict[str, bool]] = {}

    def use(self) -> None:
        self._module.set_device(self.torch_device)

    def _event(self, *, timing: bool = False) -> Any:
        return self._module.Event(enable_timing=timing, **self._event_options)

    def _new_stream(self) -> Any:
        return self._module.Stream(device=self.torch_device)

    def _computing_stream(self) -> Any:
        return self._module.current_stream(self.torch_device)

    def _within(self, stream: Any) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self._module.stream(stream))

    def _current(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self._module.device(self.torch_device))


class CudaDevice(_NamespaceDevice):
    """An NVIDIA GPU, and the common part of every device in torch's cuda namespace."""

    kind = "cuda"
    _torch_kind = "cuda"
    _native = (torch.float32, torch.float64, torch.float16)
    # Waiting threads sleep: a spinning one would take a core from the computing thread.
    _event_options: ClassVar[dict[str, bool]] = {"blocking": True}

    def check(self) -> None:
        built_for = torch.cuda.get_arch_list()
        if built_for and (lacking := self._lacks(built_for)) is not None:
            what, hint = lacking
            raise DeviceError(
                f"{self.name} ({self.label}) has {what}, and torch {torch.__version__} has kernels"
                f" for {', '.join(built_for)} alone",
                hint=hint,
            )

    def _lacks(self, built_for: Sequence[str]) -> tuple[str, str] | None:
        """The kind of GPU and what to install; None if kernels for an entry of `built_for` run."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if any(_runs_on(entry, major, minor) for entry in built_for):
            return None
        hint = "install a newer torch, or one that is built for a newer CUDA"
        if (major, minor) < (7, 5):
            hint = _CUDA_12_6 if major >= 5 else 'no build has any: set "device" to another'
        return f"compute capability {major}.{minor}", hint

    def _half(self) -> Support:
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if major >= 8:
            return Support(True, f"native (compute capability {major}.{minor})")
        text = f"compute capability {major}.{minor}; bfloat16 needs 8.0; use float16"
        return Support(False, text, emulated=True)

    def four_bit(self) -> Support:
        support, needs = super().four_bit(), "bitsandbytes needs compute capability 6.0"
        if support and torch.cuda.get_device_capability(self.torch_device) < (6, 0):
            return Support(False, f"{needs}; use float16 there")
        return support


class RocmDevice(CudaDevice):
    """An AMD GPU: torch's cuda namespace on a ROCm build."""

    kind = "rocm"

    @property
    def _architecture(self) -> str:
        """LLVM's name of the GPU's instruction set, such as "gfx90a"."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        return str(properties.gcnArchName).partition(":")[0]

    def _lacks(self, built_for: Sequence[str]) -> tuple[str, str] | None:
        names = {entry.partition(":")[0] for entry in built_for}
        if (
            self._architecture in names
            or any(name.endswith("-generic") for name in names)
            or "HSA_OVERRIDE_GFX_VERSION" in os.environ
        ):
            return None
        return f"the instruction set {self._architecture}", (
            "install a torch for ROCm that has it; or, where the list has a close relative, set"
            " HSA_OVERRIDE_GFX_VERSION to that one's version, such as 10.3.0 for gfx1030"
        )

    def _half(self) -> Support:
        # torch.cuda.is_bf16_supported says yes to every AMD GPU.
        if self._architecture.startswith(_WITHOUT_BFLOAT16):
            text = f"{self._architecture} computes bfloat16 in float32; use float16"
            return Support(False, text, emulated=True)
        return Support(True, f"native ({self._architecture})")

    def four_bit(self) -> Support:
        return Device.four_bit(self)


_CUDA_12_6 = (
    "install the torch that is built for CUDA 12.6, which has kernels for 5.0 to 8.6: pip install"
    " --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
)
_ENTRY = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_WITHOUT_BFLOAT16 = (
    *("gfx7", "gfx8", "gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"),
    "gfx10",
)
"""AMD's instruction sets before CDNA 1 (gfx908) and RDNA 3 (gfx11)."""


def _runs_on(entry: str, major: int, minor: int) -> bool:
    """Whether kernels built for an entry of torch.cuda.get_arch_list run on a compute capability.
    Binaries (sm) run within their major version, PTX (compute) on all that is newer; a suffix
    binds them to one capability (a) or to its family (f)."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        return True  # nothing is known of it
    form, suffix = match[1], match[4]
    built, there = (int(match[2]), int(match[3])), (major, minor)
    if suffix == "a":
        return there == built
    return there >= built and (major == built[0] or (form == "compute" and not suffix))


class _PolledEvent(_QueuedEvent):
    """An event that is polled, not waited for: torch.mps waits with the GIL held, and to tell an
    event's time it waits for the whole queue. `held` are the copies of `sources` in CPU memory."""

    sources: Sequence[torch.Tensor] = ()

    def wait(self) -> None:
        while not self.done():
            time.sleep(_POLL_S)


class MpsDevice(Device):
    """The GPU of an Apple machine. It has one queue, for copies as well, so copies are queued
    early. Two threads that queue work at once can end the process (pytorch #197805), so only the
    computing thread queues work; others ask whether an event is reached."""

    kind = "mps"
    is_async = True
    one_thread = True
    _native = (torch.float32, torch.float16)
    _other_dtypes = "does not exist on MPS"

    def __init__(self, index: int | None = None) -> None:
        super().__init__(index)
        self._watcher = _Watcher()

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

    def _half(self) -> Support:
        version = platform.mac_ver()[0]
        if int(version.split(".")[0] or 0) >= 14:
            return Support(True, f"macOS {version}")
        return Support(False, f"macOS {version}; bfloat16 on MPS needs macOS 14; use float16")

    def features(self) -> dict[str, Support]:
        return {
            "streams": Support(False, "one queue, for copies as well"),
            "events with time": Support(False, "a thread sees when they are reached"),
            "memory figures": _offered(self.memory),
            "pinned memory": Support(False, "it shares the machine's memory"),
        }

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def record_event(self, *tensors: torch.Tensor) -> DeviceEvent:
        event = self._queue_event([t.detach().to("cpu", non_blocking=True) for t in tensors])
        event.sources = tensors
        return event

    def copies_out(
        self, tensors: Sequence[torch.Tensor], event: DeviceEvent, pool: BufferPool
    ) -> list[HostTensor]:
        assert isinstance(event, _PolledEvent)
        event.wait()
        copies = {id(s): copy for s, copy in zip(event.sources, event.held, strict=True)}
        return [(copies[id(tensor)], _nothing) for tensor in tensors]

    def copies_in(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # The queue reads its sources later, and this thread must not wait for that: so, copies.
        copies = [tensor.clone() for tensor in tensors]
        there = [tensor.to(self.torch_device, non_blocking=True) for tensor in copies]
        self._queue_event(copies)
        return there

    def _queue_event(self, held: Sequence[torch.Tensor]) -> _PolledEvent:
        """An event behind all that is queued; until then `held` is still in use."""
        native = torch.mps.Event()
        native.record()  # and commits the queue, so that it will be reached
        event = _PolledEvent(native, held=held)
        self._watcher.watch(event)
        return event

    def seed(self, value: int) -> None:
        Device.seed(value)
        torch.mps.manual_seed(value)

    def peak_memory(self) -> int:
        # Metal keeps no peak; what the driver holds now includes its cache and rarely shrinks.
        return int(torch.mps.driver_allocated_memory())

    def empty_cache(self) -> None:
        super().empty_cache()
        torch.mps.empty_cache()


class XpuDevice(_NamespaceDevice):
    """An Intel GPU."""

    kind = "xpu"
    _other_dtypes = "is not a training type on XPU"

    def memory(self) -> Memory:
        try:
            return super().memory()
        except RuntimeError:  # integrated GPUs do not report free memory
            total = int(torch.xpu.get_device_properties(self.torch_device).total_memory)
            return Memory(total, total - torch.xpu.memory_reserved(self.torch_device))

    def _half(self) -> Support:
        if torch.xpu.is_bf16_supported(including_emulation=False):
            return Support(True, "native")
        return Support(False, "this GPU has no bfloat16; use float16", emulated=True)


OUT_OF_TREE = {
    "npu": "torch_npu",
    "musa": "torch_musa",
    "mlu": "torch_mlu",
    "hpu": "habana_frameworks.torch",
}
"""Accelerators that torch has only once another module is imported."""


def without_four_bit(kind: str) -> str | None:
    """Why a kind of device on another machine has no 4 bits, judged by the bitsandbytes here. None
    where it has them, or where only that machine can tell."""
    known = ("cpu", "cuda", "rocm", "mps", "xpu", *OUT_OF_TREE)
    if kind not in known or importlib.util.find_spec("bitsandbytes") is None:
        return None
    support = _four_bit_on("cuda" if kind == "rocm" else kind)
    return None if support else support.reason


def _four_bit_on(kind: str) -> Support:
    """Whether the installed bitsandbytes has a backend for torch's device type `kind`, its own or
    one of another package. Does not import it, which takes seconds."""
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None:
        return Support(False, "bitsandbytes is not installed (pip install bitsandbytes)")
    folders = [Path(folder, "backends", kind) for folder in spec.submodule_search_locations or ()]
    others = importlib.metadata.entry_points(group="bitsandbytes.backends")
    if not any(folder.is_dir() for folder in folders) and kind not in {o.name for o in others}:
        return Support(
            False, f"the installed bitsandbytes has no backend for {kind}; use bfloat16 there"
        )
    slow = "; slow, for trying out" if kind == "cpu" else ""
    return Support(True, f"bitsandbytes has a backend for {kind}{slow}")


def _offered(call: Callable[[], object]) -> Support:
    try:
        call()
    except Exception as error:  # whatever a vendor's driver raises
        return Support(False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return Support(True, "")


def list_devices() -> list[Device]:
    """Every device of this machine, the CPU last. torch has one kind of accelerator at a time."""
    devices: list[Device] = []
    for plugin in importlib.metadata.entry_points(group=PLUGINS):
        devices += _tried(f"the plug-in {plugin.value}", partial(_devices_from, plugin)) or ()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        for module in OUT_OF_TREE.values():
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                _tried(module, partial(importlib.import_module, module))
                accelerator = torch.accelerator.current_accelerator(check_available=True)
                break
    if accelerator is not None and accelerator.type not in {device.kind for device in devices}:
        devices += _devices_of(accelerator.type)
    return [*devices, Device()]


PLUGINS = "hetero_framework.devices"
"""Entry points in this group are functions that return the devices of this machine."""


def _devices_from(plugin: importlib.metadata.EntryPoint) -> list[Device]:
    return cast(list[Device], plugin.load()())


def _tried(name: str, call: Callable[[], _T]) -> _T | None:
    """The result of a vendor's package. Where it fails with any error, as without its driver, warns
    and returns None: the machine's other devices still work."""
    try:
        return call()
    except Exception as error:
        _log.warning("%s cannot be used: %s: %s", name, type(error).__name__, error)
        return None


def _devices_of(kind: str) -> list[Device]:
    count = torch.accelerator.device_count()
    if kind == "mps":
        return [MpsDevice()]
    if kind == "cuda":
        cls = RocmDevice if torch.version.hip else CudaDevice
        return [cls(index) for index in range(count)]
    if kind == "xpu":
        return [XpuDevice(index) for index in range(count)]
    return [AcceleratorDevice(index, kind) for index in range(count)]


def open_device(name: str) -> Device:
    """The device called `name`. "auto" is the first accelerator, else the CPU; a kind alone
    ("cuda") is its first device. Raises DeviceError where there is none, listing what exists, and
    where torch has no kernels for it."""
    device = _found(name, list_devices())
    device.check()
    return device


def _found(name: str, devices: Sequence[Device]) -> Device:
    if name == "auto":
        return devices[0]
    kind, _, index = name.partition(":")
    if kind == "cuda" and torch.version.hip:
        kind = "rocm"
    for device in devices:
        if device.kind == kind and str(device.index or 0) == (index.lstrip("0") or "0"):
            return device
    raise DeviceError(
        f"this machine has no device {name!r}{_why_absent(kind)}",
        hint="use auto or one of: "
        + ", ".join(f"{device.name} ({device.label})" for device in devices),
    )


def _why_absent(kind: str) -> str:
    version = torch.__version__
    if kind == "cuda" and torch.version.cuda is None:
        return f" (torch {version} is built without CUDA)"
    if kind == "rocm" and torch.version.hip is None:
        return f" (torch {version} is built without ROCm)"
    if (
        kind in OUT_OF_TREE
        and importlib.util.find_spec(OUT_OF_TREE[kind].partition(".")[0]) is None
    ):
        return f" ({OUT_OF_TREE[kind].partition('.')[0]} is not installed)"
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
