from __future__ import annotations

import contextlib
import importlib.util
import platform
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_framework.core import dal
from hetero_framework.core.dal import Device, list_devices, open_device
from hetero_framework.errors import DeviceError

# ------------------------------------------------------- contract: every device that exists here

every_device = pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.name)


@every_device
def test_device_can_be_opened_by_its_name(device: Device) -> None:
    again = open_device(device.name)
    assert (again.name, again.kind, again.torch_device) == (
        device.name,
        device.kind,
        device.torch_device,
    )
    assert device.kind in dal.KINDS
    assert device.label


@every_device
def test_device_memory_is_plausible(device: Device) -> None:
    memory = device.memory()
    assert 0 < memory.free <= memory.total
    device.reset_peak_memory()
    kept = device.from_host(torch.ones(1 << 18))
    assert device.peak_memory() >= kept.nbytes
    device.empty_cache()


@every_device
def test_supported_dtypes_compute_and_all_have_a_reason(device: Device) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        support = device.supports(dtype)
        assert support.reason
        if support:
            ones = device.from_host(torch.ones(2, 2, dtype=dtype))
            assert torch.equal(device.to_host(ones @ ones), torch.full((2, 2), 2, dtype=dtype))
    assert device.supports(torch.float32)
    assert not device.supports(torch.int8)


@every_device
def test_tensors_go_to_the_device_and_back(device: Device) -> None:
    sent = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    there = device.from_host(sent)
    assert there.device.type == device.torch_device.type
    device.synchronize()
    assert torch.equal(device.to_host(there), sent)
    view = device.allocate_host(100)
    view[99] = 7
    assert (view.nbytes, view.readonly) == (100, False)


@every_device
def test_seed_and_state_repeat_the_numbers(device: Device) -> None:
    def draw() -> list[torch.Tensor]:
        return [torch.rand(3), device.to_host(torch.rand(3, device=device.torch_device))]

    device.seed(11)
    first = draw()
    state = device.random_state()
    second = draw()
    device.seed(11)
    assert all(map(torch.equal, draw(), first))
    device.set_random_state(state)
    assert all(map(torch.equal, draw(), second))
    assert all(value.dtype == torch.uint8 for value in state.values())


@every_device
def test_autocast_changes_the_matmul_dtype(device: Device) -> None:
    ones = device.from_host(torch.ones(2, 2))
    with device.autocast(torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
    for off in (None, torch.float32):
        with device.autocast(off):
            assert (ones @ ones).dtype == torch.float32


@every_device
def test_four_bit_has_a_reason(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.four_bit().reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not device.four_bit()
    assert "pip install bitsandbytes" in device.four_bit().reason


def test_cpu_seed_leaves_the_same_state_as_torch() -> None:
    open_device("cpu").seed(5)
    mine = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(mine, torch.get_rng_state())


# ------------------------------------------------- which devices exist: torch's answers replaced


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """machine(cuda=2, hip="6.4", xpu=1, mps=True) makes torch say so."""

    def build(cuda: int = 0, hip: str | None = None, xpu: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", "13.0" if cuda and not hip else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
        monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu > 0)
        monkeypatch.setattr(torch.xpu, "device_count", lambda: xpu)
        monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"Arc {device.index}")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return build


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({}, ["cpu"]),
        ({"cuda": 2}, ["cuda:0", "cuda:1", "cpu"]),
        ({"cuda": 1, "hip": "6.4"}, ["rocm:0", "cpu"]),
        ({"mps": True}, ["mps", "cpu"]),
        ({"xpu": 1}, ["xpu:0", "cpu"]),
        ({"cuda": 1, "xpu": 1}, ["cuda:0", "xpu:0", "cpu"]),
    ],
)
def test_devices_are_listed_by_kind_cpu_last(
    machine: Callable[..., None], parts: dict[str, Any], names: list[str]
) -> None:
    machine(**parts)
    assert [device.name for device in list_devices()] == names
    assert open_device("auto").name == names[0]


def test_rocm_is_named_rocm_and_answers_to_cuda(machine: Callable[..., None]) -> None:
    machine(cuda=2, hip="6.4")
    for name in ("rocm:1", "cuda:1"):
        device = open_device(name)
        assert (device.name, device.kind) == ("rocm:1", "rocm")
        assert device.torch_device == torch.device("cuda", 1)
        assert device.label == "GPU 1"
    assert "ROCm 6.4" in device.four_bit().reason
    assert open_device("rocm").name == "rocm:0"


def test_kind_alone_is_its_first_device(machine: Callable[..., None]) -> None:
    machine(cuda=2, xpu=1)
    assert open_device("cuda").torch_device == torch.device("cuda", 0)
    assert open_device("xpu").torch_device == torch.device("xpu", 0)
    assert open_device("cpu").torch_device == torch.device("cpu")


def test_absent_device_lists_what_exists(machine: Callable[..., None]) -> None:
    machine(cuda=1)
    with pytest.raises(DeviceError, match=r"no device 'cuda:3'\n.*cuda:0 \(GPU 0\), cpu"):
        open_device("cuda:3")
    with pytest.raises(DeviceError, match=r"no device 'rocm:0'.*built without ROCm"):
        open_device("rocm:0")
    machine()
    with pytest.raises(DeviceError, match="built without CUDA"):
        open_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "", "CPU"])
def test_bad_device_name_says_what_to_use(name: str) -> None:
    with pytest.raises(DeviceError, match=r"is not a device name\n.*auto or one of: .*cpu"):
        open_device(name)


@pytest.mark.parametrize(
    ("capability", "bfloat16", "four_bit"),
    [((5, 2), False, False), ((7, 5), False, True), ((8, 0), True, True), ((12, 0), True, True)],
)
def test_cuda_support_follows_the_compute_capability(
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    bfloat16: bool,
    four_bit: bool,
) -> None:
    machine(cuda=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 8))
    device = open_device("cuda:0")
    assert bool(device.supports(torch.bfloat16)) == bfloat16
    assert bool(device.four_bit()) == four_bit
    assert f"{capability[0]}.{capability[1]}" in device.supports(torch.bfloat16).reason
    assert (device.memory().total, device.memory().free) == (8, 3)


def test_cuda_seed_is_this_devices_only(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(cuda=2)
    seeded: list[tuple[torch.device, int]] = []
    current: list[torch.device] = []

    @contextlib.contextmanager
    def select(device: torch.device) -> Any:
        current.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", select)
    monkeypatch.setattr(
        torch.cuda, "manual_seed", lambda value: seeded.append((current[-1], value))
    )
    open_device("cuda:1").seed(4)
    assert seeded == [(torch.device("cuda", 1), 4)]


def test_state_of_another_kind_sets_the_cpu_generator(machine: Callable[..., None]) -> None:
    machine(cuda=1)
    device = open_device("cuda:0")
    torch.manual_seed(1)
    state = {"cpu": torch.get_rng_state(), "xpu": torch.zeros(4, dtype=torch.uint8)}
    expected = torch.rand(2)
    device.set_random_state(state)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(("version", "ok"), [("13.6", False), ("14.1", True), ("26.0", True)])
def test_mps_bfloat16_needs_macos_14(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, version: str, ok: bool
) -> None:
    machine(mps=True)
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 400)
    device = open_device("mps")
    assert bool(device.supports(torch.bfloat16)) == ok
    assert version in device.supports(torch.bfloat16).reason
    assert not device.supports(torch.float64)
    assert not device.four_bit()
    assert (device.memory().total, device.memory().free) == (1000, 600)


def test_xpu_without_free_memory_report_uses_what_torch_holds(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(xpu=1)

    def unsupported(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("The device does not provide it")

    properties = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.xpu, "mem_get_info", unsupported)
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda device: 30)
    assert open_device("xpu:0").memory() == dal.Memory(100, 70)
