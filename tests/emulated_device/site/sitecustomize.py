"""Loads the emulated device into a Python process, before torch and into torch's namespaces.

Python imports this module at its start where this folder is on PYTHONPATH. Nothing is loaded until
the process imports torch, and nothing ever where HETERO_EMULATED_LIBRARY is not set.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

LIBRARY = os.environ.get("HETERO_EMULATED_LIBRARY")
NAME = os.environ.get("HETERO_EMULATED", "cuda")
FULL = os.environ.get("HETERO_EMULATED_FULL")
CAPABILITY = (9, 0)


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the library before torch, and fills in torch's namespace behind it."""

    _searches = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name != "torch" or self._searches:
            return None
        self._searches = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._searches = False
        assert spec is not None
        assert spec.loader is not None
        libraries = os.path.join(os.path.dirname(str(spec.origin)), "lib")
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            sys.meta_path.remove(self)
            ctypes.CDLL(os.path.join(libraries, "libtorch_python.so"), ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(LIBRARY), ctypes.RTLD_GLOBAL)
            run(module)
            _fill_in()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _fill_in() -> None:
    loader = importlib.machinery.ExtensionFileLoader("emulated_device", str(LIBRARY))
    spec = importlib.util.spec_from_file_location("emulated_device", LIBRARY, loader=loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    sys.modules["emulated_device"] = native
    import torch

    if NAME != "cuda":
        torch.utils.rename_privateuse1_backend(NAME)  # until then the accelerator has no name
    namespace = _namespace(torch, native)
    if NAME == "cuda":
        _be_cuda(torch, native, namespace)
    else:
        module = types.ModuleType(f"torch.{NAME}")
        for name, value in namespace.items():
            setattr(module, name, value)
        torch._register_device_module(NAME, module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # The device has no fused attention: nor shall the CPU, whose results its own are compared with.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.empty = _with_pinned(torch, native)
    torch.Tensor.pin_memory = lambda self, device=None: torch.empty(
        tuple(self.shape), dtype=self.dtype, pin_memory=True
    ).copy_(self)
    _listen(native)
    if FULL is not None:
        _fill_up(native, FULL)
    atexit.register(native.drain)
    from tests.greedy_buffers import install

    install()


def _namespace(torch: Any, native: Any) -> dict[str, Any]:
    """The functions and classes of an accelerator's namespace, named as in torch.cuda."""
    kind = torch._C._get_accelerator().type
    type_number = torch.Stream(device=kind).device_type

    def index(device: Any = None) -> int:
        if device is None:
            return int(native.current_device())
        if isinstance(device, str):
            device = torch.device(device)
        given = device if isinstance(device, int) else device.index
        return int(native.current_device()) if given is None or given < 0 else given

    def existing(device: Any = None) -> int:
        if (wanted := index(device)) >= native.count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        return wanted

    class Stream(torch.Stream):  # type: ignore[misc]
        def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Any:
            if ids:
                return super().__new__(cls, **ids)
            return super().__new__(cls, device=torch.device(kind, index(device)))

    def stream_of(device: int, stream_id: int) -> Stream:
        return Stream(stream_id=stream_id, device_index=device, device_type=type_number)

    class Event:
        """Makes torch.Event itself: elapsed_time refuses a class that is derived from it."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: bool) -> Any:
            place = torch.device(kind, native.current_device())
            return torch.Event(device=place, enable_timing=enable_timing)

    class device:
        def __init__(self, device: Any) -> None:
            self.idx = existing(device)

        def __enter__(self) -> None:
            self.before = native.exchange_device(self.idx)

        def __exit__(self, *_: object) -> None:
            native.exchange_device(self.before)

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        if chosen is None:
            yield
            return
        place = index(chosen.device)
        with device(place):
            before = native.exchange_stream(place, chosen.stream_id)
            try:
                yield
            finally:
                native.exchange_stream(place, before)

    def current_stream(device: Any = None) -> Stream:
        return stream_of(index(device), native.current_stream(index(device)))

    def memory(name: str, device: Any = None) -> int:
        return int(native.memory(existing(device))[name])

    def memory_stats(device: Any = None) -> dict[str, int]:
        figures = native.memory(existing(device))
        return {
            "allocated_bytes.all.current": figures["allocated"],
            "allocated_bytes.all.peak": figures["peak_allocated"],
            "reserved_bytes.all.current": figures["reserved"],
            "reserved_bytes.all.peak": figures["peak_reserved"],
        }

    generators = tuple(native.generator(place) for place in range(native.count()))
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": native.count,
        "current_device": native.current_device,
        "set_device": lambda device: native.exchange_device(existing(device)) and None,
        "_exchange_device": native.exchange_device,
        "_maybe_exchange_device": native.exchange_device,
        "device": device,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: stream_of(index(device), 0),
        "synchronize": lambda device=None: native.synchronize(existing(device)),
        "get_device_name": lambda device=None: f"Emulated {NAME.upper()}",
        "mem_get_info": lambda device=None: (memory("free", device), memory("total", device)),
        "memory_allocated": lambda device=None: memory("allocated", device),
        "max_memory_allocated": lambda device=None: memory("peak_allocated", device),
        "memory_reserved": lambda device=None: memory("reserved", device),
        "max_memory_reserved": lambda device=None: memory("peak_reserved", device),
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(existing(device)),
        "set_per_process_memory_fraction": lambda fraction, device=None: native.limit(
            existing(device), int(fraction * memory("total", device))
        ),
        "empty_cache": native.empty_cache,
        "default_generators": generators,
        "manual_seed": lambda seed: generators[native.current_device()].manual_seed(int(seed)),
        "manual_seed_all": lambda seed: [one.manual_seed(int(seed)) for one in generators] and None,
        "initial_seed": lambda: generators[native.current_device()].initial_seed(),
        "get_rng_state": lambda device=None: generators[index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[index(device)].set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
    }


def _be_cuda(torch: Any, native: Any, namespace: dict[str, Any]) -> None:
    cuda = torch.cuda
    properties = types.SimpleNamespace(
        name="Emulated CUDA",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=native.memory(0)["total"],
        multi_processor_count=2,
        warp_size=32,
        gcnArchName="",
    )
    namespace |= {
        "_device_count_nvml": native.count,
        "_is_compiled": lambda: True,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"],
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": lambda: None,
        "can_device_access_peer": lambda a, b: False,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "get_sync_debug_mode": lambda: _MODES.index(_mode),
    }
    for name, value in namespace.items():
        for module in (cuda, cuda.memory, cuda.random, cuda.streams):
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    torch._C._cuda_getCurrentRawStream = native.current_stream
    torch._C._cuda_getDevice = native.current_device
    torch._C._cuda_getDeviceCount = native.count
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch.backends.cuda.is_built = lambda: True


def _with_pinned(torch: Any, native: Any) -> Any:
    unpinned = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
        if not pin_memory:
            return unpinned(*size, **options)
        shape = unpinned(*size, device="meta", dtype=options.get("dtype"))
        memory = native.pinned(shape.numel() * shape.element_size())
        return memory.view(shape.dtype).view(shape.shape)

    return empty


def _fill_up(native: Any, file: str) -> None:
    """A device has no memory left from the failpoint on that the file names: "DEVICE POINT STEP",
    where "*" is any step. The next run has all of it again."""
    from hetero_framework.core import failpoints
    from hetero_framework.log import current_step

    hit = failpoints.hit

    def reach(name: str, tensor: Any = None) -> None:
        if name == "join":
            for device in range(native.count()):
                native.limit(device, native.memory(device)["total"])
        with open(file, encoding="utf-8") as wanted:
            place = wanted.read()
        here = f"{native.current_device()} {name}"
        if place in (f"{here} *", f"{here} {current_step()}"):
            native.limit(native.current_device(), 0)
        hit(name, tensor)

    failpoints.hit = reach


# -- synchronisations ------------------------------------------------------------------------------

_MODES = ("default", "warn", "error")
_mode = "default"


def _set_sync_debug_mode(mode: int | str) -> None:
    global _mode
    _mode = _MODES[mode] if isinstance(mode, int) else mode


def _place() -> str:
    """The thread, and the calls outside torch and this file, the last one first."""
    frames = [
        f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_stack()
        if "/torch/" not in frame.filename and frame.filename != __file__
    ]
    return f"{threading.current_thread().name}: " + " < ".join(reversed(frames))


def _listen(native: Any) -> None:
    trace = os.environ.get("HETERO_EMULATED_SYNCS")

    def listener(what: str) -> None:
        if _mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        if _mode == "warn":
            warnings.warn(f"called a synchronizing CUDA operation: {what}", stacklevel=2)
        if trace is not None:
            with open(f"{trace}.{os.getpid()}", "a", encoding="utf-8") as file:
                file.write(f"{what}\t{_place()}\n")

    native.listen_to_syncs(listener)


if LIBRARY:
    sys.meta_path.insert(0, _Finder())
