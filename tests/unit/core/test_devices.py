from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hetero_framework.core import devices
from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.devices import Device, list_devices, open_device
from hetero_framework.core.threads import in_background
from hetero_framework.errors import DeviceError
from tests.cases import raising
from tests.waiting import WAIT_S, wait_until

# ------------------------------------------------------- contract: every device that exists here

every_device = pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.name)


@every_device
def test_device_can_be_opened_by_its_name(device):
    again = open_device(device.name)
    assert (again.name, again.kind) == (device.name, device.kind)
    assert again.torch_device == device.torch_device
    assert device.label


@every_device
def test_device_memory_is_plausible(device):
    memory = device.memory()
    assert 0 < memory.free <= memory.total
    device.reset_peak_memory()
    kept = device.copy_in(torch.ones(1 << 18))
    assert device.peak_memory() >= kept.nbytes
    device.empty_cache()


@every_device
def test_supported_dtypes_compute_and_all_have_a_reason(device):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        support = device.supports(dtype)
        assert support.reason
        if support:
            ones = device.copy_in(torch.ones(2, 2, dtype=dtype))
            assert torch.equal(device.to_host(ones @ ones), torch.full((2, 2), 2, dtype=dtype))
    assert device.supports(torch.float32)
    assert not device.supports(torch.int8)


@every_device
def test_tensors_go_to_the_device_and_back(device):
    sent = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    there = device.copy_in(sent)
    assert there.device.type == device.torch_device.type
    device.synchronize()
    assert torch.equal(device.to_host(there), sent)
    view = device.allocate_host(100)
    view[99] = 7
    assert (view.nbytes, view.readonly) == (100, False)


@every_device
def test_several_tensors_go_to_the_host_with_one_wait(device, monkeypatch):
    waits: list[Any] = []
    copies_out = device.copies_out
    monkeypatch.setattr(device, "copies_out", lambda *a: (waits.append(a), copies_out(*a))[1])
    sent = [torch.full((1 << 12,), float(k)) for k in range(8)] + [torch.ones(0), torch.ones(2, 3)]
    doubled = [tensor.mul_(2) for tensor in device.copies_in(sent)]
    hosts = device.all_to_host(doubled)
    assert len(waits) == 1
    if device.is_async:
        more = device.all_to_host([tensor * 2 for tensor in doubled])  # in the same buffers
        assert all(map(torch.equal, more, [host * 2 for host in hosts]))
        assert all(map(torch.equal, hosts, [tensor * 2 for tensor in sent]))
    else:
        assert all(map(torch.equal, hosts, doubled))
    assert device.all_to_host([]) == []


@every_device
def test_copies_beside_computing_are_not_mixed_up(device):
    """One thread computes, one sends, one receives, as in a run: nothing is mixed up."""
    pool = device.buffers()
    rounds, size = 40, 1 << 14
    received: list[torch.Tensor | None] = [None] * rounds
    sent: list[torch.Tensor | None] = [None] * rounds
    work: list[tuple[torch.Tensor, devices.DeviceEvent]] = []
    came, made = threading.Semaphore(0), threading.Semaphore(0)

    def receive() -> None:
        memory = torch.frombuffer(device.allocate_host(size * 4), dtype=torch.float32)
        for k in range(rounds):
            if device.is_async:
                memory.fill_(k)  # on a device of its own the memory is free again after copy_in
                received[k] = device.copy_in(memory)
            else:
                received[k] = device.copy_in(torch.full((size,), float(k)))
            came.release()

    def send() -> None:
        for k in range(rounds):
            made.acquire()
            host, release = device.copy_out(*work[k], pool)
            sent[k] = host.clone()
            release()

    others = [in_background(receive, "receive"), in_background(send, "send")]
    begin = device.record_event()
    for k in range(rounds):
        came.acquire()
        arrived = received[k]
        assert arrived is not None
        received[k] = None  # the only reference goes while the work on it may still be queued
        result = arrived * 2 + 1
        work.append((result, device.record_event(result)))
        del arrived
        made.release()
    for other in others:
        other.result(WAIT_S)
    end = work[-1][1]
    for k, host in enumerate(sent):
        assert host is not None
        assert torch.equal(host, torch.full((size,), 2.0 * k + 1))
    assert begin.done()
    assert end.done()
    assert 0 <= begin.until_s(end) < 60
    assert begin.at_s <= end.at_s <= time.perf_counter() + 1e-3


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_copies_keep_shape_and_type(device, dtype, shape):
    pool = device.buffers()
    tensor = torch.full(shape, 3, dtype=dtype)
    there = device.copy_in(tensor)
    strided = there.mT if there.dim() == 2 else there
    host, release = device.copy_out(strided, device.record_event(strided), pool)
    assert (host.dtype, host.device.type) == (dtype, "cpu")
    assert torch.equal(host, tensor.mT if tensor.dim() == 2 else tensor)
    release()


def test_cpu_hands_the_tensor_itself_over():
    device = open_device("cpu")
    tensor = torch.arange(4.0, requires_grad=True)
    host, release = device.copy_out(tensor, device.record_event(), BufferPool())
    assert host.data_ptr() == tensor.data_ptr()
    assert not host.requires_grad
    release()
    assert device.copy_in(host) is host
    first, second = device.record_event(), device.record_event()
    first.wait()
    assert first.done()
    took_s = second.at_s - first.at_s
    assert first.until_s(second) == took_s >= 0
    assert not device.is_async


@every_device
def test_seed_repeats_the_numbers(device):
    def draw() -> list[torch.Tensor]:
        return [torch.rand(3), device.to_host(torch.rand(3, device=device.torch_device))]

    device.seed(11)
    first = draw()
    draw()
    device.seed(11)
    assert all(map(torch.equal, draw(), first))


@every_device
def test_autocast_changes_the_matmul_dtype(device):
    ones = device.copy_in(torch.ones(2, 2))
    with device.autocast(torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
    for off in (None, torch.float32):
        with device.autocast(off):
            assert (ones @ ones).dtype == torch.float32


@every_device
def test_four_bit_has_a_reason(device, monkeypatch):
    assert device.four_bit().reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not device.four_bit()
    assert "pip install bitsandbytes" in device.four_bit().reason


def test_cpu_seed_leaves_the_same_state_as_torch():
    open_device("cpu").seed(5)
    mine = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(mine, torch.get_rng_state())


# ------------------------------------------------- which devices exist: torch's answers replaced

Machine = Callable[..., None]
BITSANDBYTES = importlib.util.find_spec("bitsandbytes")


@pytest.fixture
def machine(monkeypatch):
    """machine(cuda=2, hip="6.4"), machine(xpu=1), machine(mps=1) make torch say so."""

    def build(hip: str | None = None, **count: int) -> None:
        kind, number = next(iter(count.items()), (None, 0))
        cuda = count.get("cuda", 0)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", "13.0" if cuda and not hip else None)
        there = None if kind is None else SimpleNamespace(type=kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: there)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
        monkeypatch.setattr(importlib.util, "find_spec", {"bitsandbytes": BITSANDBYTES}.get)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
        monkeypatch.setattr(torch.cuda, "get_arch_list", list)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
        monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"Arc {device.index}")

    return build


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({}, ["cpu"]),
        ({"cuda": 2}, ["cuda:0", "cuda:1", "cpu"]),
        ({"cuda": 1, "hip": "6.4"}, ["rocm:0", "cpu"]),
        ({"mps": 1}, ["mps", "cpu"]),
        ({"xpu": 1}, ["xpu:0", "cpu"]),
        ({"invented": 2}, ["invented:0", "invented:1", "cpu"]),
    ],
)
def test_devices_are_listed_by_kind_cpu_last(machine, parts, names):
    machine(**parts)
    assert [device.name for device in list_devices()] == names
    assert open_device("auto").name == names[0]


def test_rocm_is_named_rocm_and_answers_to_cuda(machine):
    machine(cuda=2, hip="6.4")
    for name in ("rocm:1", "cuda:1"):
        device = open_device(name)
        assert (device.name, device.kind) == ("rocm:1", "rocm")
        assert device.torch_device == torch.device("cuda", 1)
        assert device.label == "GPU 1"
    assert device.four_bit()
    assert open_device("rocm").name == "rocm:0"


def test_a_kind_without_a_number_means_its_first_device(machine):
    for kind in ("cuda", "xpu"):
        machine(**{kind: 2})
        assert open_device(kind).torch_device == torch.device(kind, 0)
    assert open_device("cpu").torch_device == torch.device("cpu")


@pytest.mark.parametrize(
    ("parts", "name", "said"),
    [
        ({"cuda": 1}, "cuda:3", r"no device 'cuda:3'\n.*cuda:0 \(GPU 0\), cpu"),
        ({"cuda": 1}, "rocm:0", r"no device 'rocm:0'.*built without ROCm"),
        ({}, "cuda", "built without CUDA"),
        ({}, "npu:0", "torch_npu is not installed"),
    ],
)
def test_the_error_for_an_absent_device_lists_the_present_ones(machine, parts, name, said):
    machine(**parts)
    with pytest.raises(DeviceError, match=said):
        open_device(name)


def test_an_accelerator_outside_torch_is_imported_where_it_is_installed(machine, monkeypatch):
    machine()
    monkeypatch.setattr(importlib.util, "find_spec", {"torch_musa": "installed"}.get)
    monkeypatch.setattr(importlib, "import_module", lambda name: machine(musa=1))
    assert [device.name for device in list_devices()] == ["musa:0", "cpu"]


def test_devices_of_a_plug_in_come_first_and_replace_the_general_ones(machine, monkeypatch):
    class Special(devices.AcceleratorDevice):
        kind = "invented"

    machine(invented=1)
    plugin = SimpleNamespace(value="a:b", load=lambda: lambda: [Special(0)])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [plugin])
    assert [device.name for device in list_devices()] == ["invented:0", "cpu"]
    assert isinstance(open_device("invented"), Special)


def test_a_vendors_package_that_fails_leaves_the_other_devices(machine, monkeypatch, caplog):
    fail = raising(OSError("libascendcl.so: cannot open shared object file"))
    machine()
    plugin = SimpleNamespace(value="vendor:devices", load=fail)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [plugin])
    monkeypatch.setattr(importlib.util, "find_spec", {"torch_npu": "installed"}.get)
    monkeypatch.setattr(importlib, "import_module", fail)
    assert [device.name for device in list_devices()] == ["cpu"]
    for name in ("the plug-in vendor:devices", "torch_npu"):
        assert f"{name} cannot be used: OSError: libascendcl.so" in caplog.text


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "", "CPU"])
def test_the_error_for_a_bad_device_name_lists_valid_ones(name):
    with pytest.raises(DeviceError, match=r"has no device .*\n.*auto or one of: .*cpu"):
        open_device(name)


@pytest.mark.parametrize(
    ("capability", "bfloat16", "four_bit"),
    [((5, 2), False, False), ((7, 5), False, True), ((8, 0), True, True), ((12, 0), True, True)],
)
def test_cuda_support_follows_the_compute_capability(
    machine, monkeypatch, capability, bfloat16, four_bit
):
    machine(cuda=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 8))
    device = open_device("cuda:0")
    assert bool(device.supports(torch.bfloat16)) == bfloat16
    assert bool(device.four_bit()) == four_bit
    assert f"{capability[0]}.{capability[1]}" in device.supports(torch.bfloat16).reason
    assert device.supports(torch.bfloat16).emulated == (not bfloat16)
    assert (device.memory().total, device.memory().free) == (8, 3)


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (CUDA_13, (7, 5), True),
        (CUDA_13, (8, 9), True),
        (CUDA_13, (6, 0), False),
        (CUDA_13, (7, 0), False),
        (CUDA_13, (11, 0), False),
        (CUDA_13, (13, 1), True),
        (["sm_75", "compute_75"], (12, 0), True),
        (["sm_86", "compute_86"], (8, 0), False),
        (["sm_90a", "compute_90a"], (9, 0), True),
        (["sm_120a", "compute_120a"], (12, 1), False),
        (["sm_100f", "compute_100f"], (10, 3), True),
        (["sm_100f", "compute_100f"], (12, 0), False),
        (["of a later CUDA"], (9, 0), True),
        ([], (3, 5), True),
    ],
)
def test_a_card_without_kernels_in_this_torch_is_refused_when_it_is_opened(
    machine, monkeypatch, built_for, capability, runs
):
    machine(cuda=1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if runs:
        assert open_device("auto").name == "cuda:0"
        return
    with pytest.raises(DeviceError) as caught:
        open_device("auto")
    named = f"{capability[0]}.{capability[1]}"
    assert f"cuda:0 (GPU 0) has compute capability {named}" in caught.value.message
    assert ", ".join(built_for) in caught.value.message
    assert ("whl/cu126" in str(caught.value.hint)) == (capability < (7, 5))
    assert open_device("cpu").name == "cpu"


@pytest.mark.parametrize(
    ("built_for", "override", "runs"),
    [
        (["gfx906", "gfx1030"], None, True),
        (["gfx906", "gfx1100"], None, False),
        (["gfx906", "gfx1100"], "11.0.0", True),
        (["gfx906", "gfx10-3-generic"], None, True),
        ([], None, True),
    ],
)
def test_an_amd_gpu_without_kernels_in_this_torch_is_refused(
    machine, monkeypatch, built_for, override, runs
):
    machine(cuda=1, hip="6.4")
    gpu = SimpleNamespace(gcnArchName="gfx1030:sramecc-:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)
    if override is not None:
        monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", override)
    if runs:
        assert open_device("rocm").name == "rocm:0"
        return
    with pytest.raises(DeviceError, match=r"set gfx1030, and torch .* for gfx906, gfx1100 alone"):
        open_device("rocm")


@pytest.mark.parametrize(
    ("name", "native"),
    [
        *((name, False) for name in ("gfx900", "gfx906:sramecc+:xnack-", "gfx90c", "gfx1030")),
        *((name, True) for name in ("gfx908", "gfx90a:sramecc+:xnack-", "gfx942", "gfx950")),
        *((name, True) for name in ("gfx1100", "gfx1151", "gfx1201", "gfx1250")),
    ],
)
def test_rocm_support_follows_the_instruction_set(machine, monkeypatch, name, native):
    machine(cuda=1, hip="6.4")
    gpu = SimpleNamespace(gcnArchName=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    support = open_device("rocm").supports(torch.bfloat16)
    assert (bool(support), support.emulated) == (native, not native)
    assert name.partition(":")[0] in support.reason


def test_the_installed_bitsandbytes_tells_which_kinds_have_4_bits(machine, monkeypatch, tmp_path):
    machine(invented=1)
    lacking = {kind for kind in devices.OUT_OF_TREE if devices.without_four_bit(kind)}
    assert lacking == {"npu", "musa", "mlu"}
    for kind in ("cpu", "cuda", "rocm", "mps", "xpu", "auto", "invented"):
        assert devices.without_four_bit(kind) is None
    assert not devices._four_bit_on("invented")
    other = SimpleNamespace(name="invented")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [other])
    assert devices._four_bit_on("invented")
    (tmp_path / "backends" / "cuda").mkdir(parents=True)
    old = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", {"bitsandbytes": old}.get)
    assert devices.without_four_bit("rocm") is None
    assert "no backend for mps" in str(devices.without_four_bit("mps"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert devices.without_four_bit("mps") is None  # whether that machine has it is not known


def test_cuda_seed_is_this_devices_only(machine, monkeypatch):
    machine(cuda=2)
    seeded: list[tuple[torch.device, int]] = []
    current: list[torch.device] = []

    @contextlib.contextmanager
    def select(device: torch.device) -> Any:
        current.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", select)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeded.append((current[-1], seed)))
    open_device("cuda:1").seed(4)
    assert seeded == [(torch.device("cuda", 1), 4)]


@pytest.mark.parametrize(("version", "ok"), [("13.6", False), ("14.1", True), ("26.0", True)])
def test_mps_bfloat16_needs_macos_14(machine, monkeypatch, version, ok):
    machine(mps=1)
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 400)
    device = open_device("mps")
    assert bool(device.supports(torch.bfloat16)) == ok
    assert version in device.supports(torch.bfloat16).reason
    assert not device.supports(torch.float64)
    assert device.four_bit()
    assert (device.memory().total, device.memory().free) == (1000, 600)
    assert {name for name, offer in device.features().items() if offer} == {"memory figures"}


def test_an_xpu_without_a_memory_report_uses_torchs_figures(machine, monkeypatch):
    machine(xpu=1)
    unsupported = raising(RuntimeError("The device does not provide it"))
    properties = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.xpu, "mem_get_info", unsupported)
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda device: 30)
    assert open_device("xpu:0").memory() == devices.Memory(100, 70)


# --------------------------------- streams: torch's namespaces replaced by queues that wait to run


class FakeStream:
    """Work in order, run only as far as somebody waits for."""

    def __init__(self, machine: FakeStreams, name: str) -> None:
        self.machine, self.name = machine, name
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    def add(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def run(self, length: int) -> None:
        with self.machine.lock:
            while self.done < length:
                self.done += 1
                self.queue[self.done - 1]()

    def wait_event(self, event: FakeEvent) -> None:
        place = event.place
        assert place is not None, "an event that was not recorded is waited for"
        self.add(lambda: place[0].run(place[1]))


class FakeEvent:
    def __init__(
        self, machine: FakeStreams, enable_timing: bool = False, blocking: bool = False
    ) -> None:
        self.machine, self.timed, self.blocking = machine, enable_timing, blocking
        self.place: tuple[FakeStream, int] | None = None
        self.at_s: float | None = None

    def record(self, stream: FakeStream) -> None:
        if self.timed and not self.machine.has_times:
            raise RuntimeError("this driver has no times")
        stream.add(self._happen)
        self.place = (stream, len(stream.queue))
        if stream.name == "clock":
            stream.run(len(stream.queue))  # nothing before it: it happens now

    def _happen(self) -> None:
        self.at_s = time.perf_counter() + 1000.0

    def synchronize(self) -> None:
        assert self.place is not None
        self.place[0].run(self.place[1])

    def query(self) -> bool:
        return self.at_s is not None

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timed
        assert end.timed
        assert self.at_s is not None
        assert end.at_s is not None
        return (end.at_s - self.at_s) * 1e3


class CopiesQueue(TorchFunctionMode):
    """Inside a `stream` block, copies are work of that stream."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            assert kwargs == {"non_blocking": True}
            there = torch.full_like(args[0], -1)
            self.stream.add(lambda: torch.Tensor.copy_(there, args[0]))
            return there
        if func is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}
            self.stream.add(lambda: torch.Tensor.copy_(*args))
            return args[0]
        return func(*args, **(kwargs or {}))


class FakeStreams:
    """In the place of torch.cuda or torch.xpu."""

    def __init__(self, has_times: bool = True) -> None:
        self.has_times = has_times
        self.lock = threading.RLock()
        self.default = FakeStream(self, "default")
        self.made: list[FakeStream] = []
        self.recorded: list[tuple[torch.Tensor, FakeStream]] = []
        self.devices: list[torch.device] = []

    def Stream(self, device: torch.device) -> FakeStream:
        self.made.append(FakeStream(self, f"side {len(self.made)}"))
        return self.made[-1]

    def Event(self, **options: bool) -> FakeEvent:
        return FakeEvent(self, **options)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.default

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.pop()

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        assert self.devices, "the thread's device is not set"
        with CopiesQueue(stream):
            yield

    def synchronize(self, *_: Any) -> None:
        raise AssertionError("the whole device was waited for")


Streams = tuple[Device, FakeStreams]


@pytest.fixture(
    params=[devices.CudaDevice, devices.RocmDevice, devices.XpuDevice], ids=["cuda", "rocm", "xpu"]
)
def streams(request, machine, monkeypatch):
    fake, kind = FakeStreams(), request.param
    monkeypatch.setattr(kind, "torch_device", torch.device("cpu"))
    monkeypatch.setattr(torch, "xpu" if kind is devices.XpuDevice else "cuda", fake)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *both: fake.recorded.append(both))
    device = kind(0)
    device._side_stream("clock").name = "clock"  # has nothing else to do: its events are at once
    return device, fake


def test_copy_out_waits_for_the_mark_and_nothing_behind_it(streams):
    device, fake = streams
    tensor = torch.zeros(5, dtype=torch.bfloat16)
    later = torch.zeros(1)
    fake.default.add(lambda: tensor.fill_(7))
    event = device.record_event(tensor)
    fake.default.add(lambda: later.fill_(1))
    assert not event.done()
    given_back: list[int] = []
    pool: Any = SimpleNamespace(
        take=lambda size: (memoryview(bytearray(size)), lambda: given_back.append(size))
    )
    host, release = device.copy_out(tensor, event, pool)
    assert torch.equal(host, torch.full((5,), 7, dtype=torch.bfloat16))
    assert later.item() == 0, "work behind the event was waited for"
    assert event.done()
    assert given_back == []
    release()
    assert given_back == [10]


def test_copy_in_is_complete_and_its_memory_stays_until_the_computing_is_done(streams):
    device, fake = streams
    earlier = torch.zeros(1)
    fake.default.add(lambda: earlier.fill_(1))
    memory = torch.arange(4.0)
    there = device.copy_in(memory)
    memory.fill_(0)
    assert torch.equal(there, torch.arange(4.0))
    assert earlier.item() == 0, "the computing stream was waited for"
    ((tensor, stream),) = fake.recorded
    assert tensor is there
    assert stream is fake.default


def test_several_tensors_are_waited_for_once(streams, monkeypatch):
    device, _ = streams
    waits: list[FakeEvent] = []
    wait = FakeEvent.synchronize
    monkeypatch.setattr(FakeEvent, "synchronize", lambda e: (waits.append(e), wait(e)))
    sent = [torch.ones(3), torch.empty(0), torch.arange(4)]
    there = device.copies_in(sent)
    assert len(waits) == 1
    event = device.record_event(*there)
    waits.clear()
    copies = device.copies_out(there, event, BufferPool())
    assert len(waits) == 1
    assert all(torch.equal(host, one) for (host, _), one in zip(copies, sent, strict=True))


def test_each_direction_has_one_stream_of_its_own(streams):
    device, fake = streams
    tensor = torch.ones(3)

    def move() -> None:
        for _ in range(5):
            device.copy_out(tensor, device.record_event(), BufferPool())
            device.copy_in(tensor)

    move()
    for moving in [in_background(move, "move") for _ in range(4)]:
        moving.result(WAIT_S)
    assert len(fake.made) == 3  # out, in, clock
    assert fake.default not in fake.made


def test_marks_tell_the_hosts_time_of_the_device(streams):
    device, fake = streams
    before = time.perf_counter()
    first = device.record_event()
    first.wait()
    fake.default.add(lambda: time.sleep(0.005))  # work whose time is measured
    second = device.record_event()
    second.wait()
    after = time.perf_counter()
    assert before <= first.at_s + 1e-3
    assert second.at_s <= after + 1e-3
    assert first.until_s(second) >= 0.005
    took_s = second.at_s - first.at_s
    assert took_s == pytest.approx(first.until_s(second), abs=1e-6)


def test_clock_is_read_again_when_it_is_old(streams, monkeypatch):
    device, _ = streams
    old, same = device.record_event(), device.record_event()
    assert old.clock is same.clock  # type: ignore[attr-defined]
    monkeypatch.setattr(devices, "_CLOCK_AGE_S", 0.0)
    assert device.record_event().clock is not old.clock  # type: ignore[attr-defined]
    assert old.at_s <= time.perf_counter() + 1e-3


def test_marks_without_times_count_when_they_were_seen(streams):
    device, fake = streams
    fake.has_times = False
    before = time.perf_counter()
    first, second = device.record_event(), device.record_event()
    first.wait()
    second.wait()
    assert before <= first.at_s <= second.at_s
    assert first.until_s(second) == second.at_s - first.at_s


def test_marks_without_times_are_watched(streams):
    """Nobody waits for the event here, and still it is known when it was reached."""
    device, fake = streams
    fake.has_times = False
    event = device.record_event()
    wait_until_seen(event)
    between = time.perf_counter()
    assert event.at_s <= between


def test_an_accelerator_says_what_it_offers(streams, monkeypatch):
    device, fake = streams
    fake.mem_get_info = lambda device: (3, 8)  # type: ignore[attr-defined]
    monkeypatch.setattr(device, "_pinned", torch.empty)
    offers = device.features()
    assert list(offers) == ["streams", "events with time", "memory figures", "pinned memory"]
    assert all(offers.values())
    fake.has_times = False
    refused = device.features()["events with time"]
    assert not refused
    assert refused.reason == "RuntimeError: this driver has no times"


def wait_until_seen(event: Any) -> None:
    # To wait for the event here would be the watcher's work.
    wait_until(lambda: event._seen_s is not None, "nobody looks at the event")


def test_waiting_for_cuda_sleeps(streams):
    device, _ = streams
    event: FakeEvent = device.record_event().native  # type: ignore[attr-defined]
    assert event.blocking == (device.kind in ("cuda", "rocm"))


def test_host_memory_is_pinned_and_plain_where_there_is_no_more(streams, monkeypatch):
    device, fake = streams
    asked: list[tuple[int, torch.device]] = []
    empty = torch.empty

    def pinned(nbytes: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        if pin_memory:
            asked.append((nbytes, fake.devices[-1]))
        if pin_memory and len(asked) > 1:
            raise RuntimeError("out of memory")
        return empty(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    for nbytes in (64, 128):
        view = device.allocate_host(nbytes)
        view[nbytes - 1] = 1
        assert (view.nbytes, view.readonly) == (nbytes, False)
    assert asked == [(64, device.torch_device), (128, device.torch_device)]


def test_large_host_memory_is_not_pinned_unless_it_is_kept(streams, monkeypatch):
    device, _ = streams
    pinned: list[int] = []
    empty = torch.empty

    def allocate(nbytes: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(nbytes)
        return empty(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    limit = 64 * 2**20
    assert device.allocate_host(limit).nbytes == limit
    assert device.allocate_host(limit + 1).nbytes == limit + 1
    assert pinned == [limit]
    assert device.allocate_pinned(limit + 1).nbytes == limit + 1
    assert pinned == [limit, limit + 1]


def pinned_sizes(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the buffers that it pins from now on."""
    sizes: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        sizes.append(nbytes)
        return memoryview(bytearray(nbytes))

    monkeypatch.setattr(device, "allocate_pinned", allocate)
    return sizes


def test_pinned_buffers_are_shared_as_far_as_torch_rounds_them_up(streams, monkeypatch):
    device, _ = streams
    pinned = pinned_sizes(device, monkeypatch)
    pool = device.buffers()
    for nbytes in (4 * 2**20 + 1, 5 * 2**20, 8 * 2**20):
        _, release = pool.take(nbytes)
        release()
    assert pinned == [8 * 2**20]


def test_the_computing_thread_makes_its_device_the_current_one(streams):
    device, fake = streams
    fake.set_device = fake.devices.append  # type: ignore[attr-defined]
    device.use()
    assert fake.devices == [device.torch_device]


def test_a_device_with_a_broken_context_does_not_work(streams, monkeypatch):
    device, _ = streams
    broken = raising(RuntimeError("CUDA error: device-side assert triggered"))
    monkeypatch.setattr(device, "synchronize", lambda: None)
    assert device.works()
    monkeypatch.setattr(device, "synchronize", broken)
    assert not device.works()


def test_a_copy_that_is_made_every_step_keeps_its_memory(streams, monkeypatch):
    device, _ = streams
    allocated = pinned_sizes(device, monkeypatch)
    copy = devices.HostCopy(device)
    for step in range(3):
        assert torch.equal(copy.of(torch.full((5,), step)), torch.full((5,), step))
    assert len(allocated) == 1


def test_cpu_tensors_are_not_copied():
    tensor = torch.ones(5)
    assert devices.HostCopy(Device()).of(tensor).data_ptr() == tensor.data_ptr()


def test_empty_cache_collects_garbage_after_the_collection_of_another_thread():
    """A finalizer runs in it, and `gc.collect` returns at once meanwhile."""
    begun, go_on = threading.Event(), threading.Event()

    class Cycle:
        def __init__(self, last: Callable[[], object] = lambda: None) -> None:
            self.itself, self._last = self, last

        def __del__(self) -> None:
            self._last()

    gc.disable()
    try:
        Cycle(lambda: (begun.set(), go_on.wait(WAIT_S)))
        other = threading.Thread(target=gc.collect)
        other.start()
        assert begun.wait(WAIT_S)
        freed = weakref.ref(Cycle())
        assert freed() is not None
        ends = threading.Timer(0.2, go_on.set)
        ends.start()
        Device().empty_cache()
        assert freed() is None
        for thread in (other, ends):
            thread.join(WAIT_S)
    finally:
        gc.enable()


class FakeMps:
    """torch.mps with a queue that moves when the test says so."""

    def __init__(self) -> None:
        self.reached = 0
        self.recorded = 0

    def Event(self) -> Any:
        fake = self

        class Event:
            place = 0

            def record(self) -> None:
                fake.recorded += 1
                self.place = fake.recorded

            def query(self) -> bool:
                return 0 < self.place <= fake.reached

            def synchronize(self) -> None:
                raise AssertionError("waits with the GIL held")

        return Event()


Mps = tuple[Device, FakeMps]


@pytest.fixture
def mps(monkeypatch):
    fake = FakeMps()
    monkeypatch.setattr(torch.mps, "Event", fake.Event)
    monkeypatch.setattr(devices.MpsDevice, "torch_device", torch.device("cpu"))
    return devices.MpsDevice(), fake


def test_mps_copies_begin_at_the_mark_and_are_asked_for(mps):
    device, fake = mps
    tensor = torch.ones(3)
    event = device.record_event(tensor)
    assert not event.done()
    sending = in_background(lambda: device.copy_out(tensor, event, BufferPool())[0], "send")
    with pytest.raises(TimeoutError):
        sending.result(0.02)
    fake.reached = 1
    result = sending.result(WAIT_S)
    assert torch.equal(result, tensor)
    assert result is event.held[0]  # type: ignore[attr-defined]
    assert event.at_s <= time.perf_counter()
    assert event.until_s(event) == 0


def test_mps_holds_memory_that_the_queue_still_uses(mps):
    device, fake = mps
    memory = torch.arange(3.0)
    there = device.copy_in(memory)  # returns before the queue has come to it
    memory.fill_(0)
    assert torch.equal(there, torch.arange(3.0))  # here "there" is the copy that was queued
    freed = threading.Event()
    weakref.finalize(there, freed.set)
    del there
    gc.collect()
    assert not freed.wait(0.02)
    fake.reached = 1
    assert freed.wait(WAIT_S)


def test_mps_sees_marks_when_they_are_reached(mps):
    device, fake = mps
    first, second = device.record_event(), device.record_event()
    fake.reached = 1
    wait_until_seen(first)
    between = time.perf_counter()
    fake.reached = 2
    assert first.at_s <= between <= second.at_s
    assert first.until_s(second) > 0
