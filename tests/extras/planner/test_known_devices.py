from __future__ import annotations

import json

import pytest

from hetero_framework.errors import UserError
from hetero_framework.extras.planner.known_devices import FILE, describe, known_device

GIB = 2**30
TABLE = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 3090", "RTX 3090"),
        ("rtx3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA GeForce RTX 2060 SUPER", "RTX 2060 SUPER"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla T4", "T4"),
        ("AMD Ryzen 9 7950X 16-Core Processor 64GB", "Ryzen 9 7950X"),
        ("Intel(R) Core(TM) i9-13900K 64GB", "Core i9-13900K"),
        ("Apple GPU (Apple M1 Max) 64GB", "Apple M1 Max"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA DGX Spark", "DGX Spark"),
        ("AMD Radeon 8060S Graphics 96GB", "Radeon 8060S"),
        ("AMD RYZEN AI MAX+ 395 128GB", "Ryzen AI Max+ 395"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "RTX 5090 Laptop"),
        ("NVIDIA RTX PRO 4500 Blackwell", "RTX PRO 4500"),
        ("Apple M5 Max 128GB", "Apple M5 Max"),
        ("Apple M4 Pro 48GB", "Apple M4 Pro"),
        ("Intel(R) Arc(TM) B580 Graphics", "Arc B580"),
        ("AMD Instinct MI355X", "MI355X"),
    ],
)
def test_devices_are_found_by_names_of_people_and_drivers(text, name):
    (row,) = [row for row in TABLE["devices"] if row[0] == name]
    found = known_device(text)
    assert (found.half_flops, found.bandwidth) == (row[3] * 1e12, row[5] * 1e9)


def test_every_device_of_the_table_is_found_with_its_source():
    for name, _, gib, _, single, _, source in TABLE["devices"]:
        found = known_device(name, memory_bytes=None if gib else 8 * GIB)
        assert found.float_flops == single * 1e12, name
        assert found.source == TABLE["sources"][source]
        assert 0 < found.usable_bytes < found.memory_bytes


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("RTX 3090", 24),
        ("RTX 4060 Ti 16GB", 16),
        ("Apple M2 Max 64GB", 64),
        ("RTX 2080 Ti 22GiB", 22),
    ],
)
def test_memory_is_the_makers_figure_unless_given(text, gib):
    assert known_device(text).memory_bytes == gib * GIB
    assert known_device(text, memory_bytes=3 * GIB).memory_bytes == 3 * GIB


def test_figures_and_cores_stand_for_a_device():
    own = known_device("24GB, 71 TFLOPS, 936 GB/s")
    assert (own.memory_bytes, own.half_flops, own.bandwidth) == (24 * GIB, 71e12, 936e9)
    assert describe(own, half=True) == "24.0 GiB, 71 TFLOPS (16-bit), 936 GB/s"
    few, many = known_device("4-core CPU 16GB"), known_device("8 cores 16GB")
    assert many.float_flops == 2 * few.float_flops > 0


@pytest.mark.parametrize("text", ["cpu", "Intel(R) Xeon(R) Gold 6230R", "AMD EPYC 7B13"])
def test_a_processor_that_is_only_named_counts_as_a_usual_one(text):
    found, usual = known_device(text), known_device("8-core CPU 16GB")
    assert (found.kind, found.memory_bytes) == ("cpu", 16 * GIB)
    assert (found.half_flops, found.bandwidth) == (usual.half_flops, usual.bandwidth)
    assert found.name == f"{text}, 8 cores assumed, 16 GB assumed"
    assert known_device(f"{text} 64GB").memory_bytes == 64 * GIB
    assert known_device("Ryzen 9 5950X").memory_bytes == 16 * GIB  # its cores are in the table


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("RTX 3091", "is not a known device", "did you mean RTX 3090"),
        ("Apple M4 Ultra 256GB", "is not a known device", "give its figures"),
        ("RTX 5080 SUPER", "is not a known device", "did you mean"),
        ("RTX 3090 Laptop", "is not a known device", "give its figures"),
        ("abacus", "is not a known device", "give its figures"),
        ("Apple M2 Max", "how much memory", '"Apple M2 Max 32GB"'),
        ("8-core CPU", "how much memory", "32GB"),
    ],
)
def test_an_unknown_device_is_refused_with_advice(text, said, hint):
    with pytest.raises(UserError, match=said) as raised:
        known_device(text)
    assert hint in str(raised.value.hint)


def test_time_is_bounded_by_arithmetic_or_memory_and_kernels_start_besides():
    device = known_device("RTX 3090")
    reached = device.efficiency
    started = reached.start_s
    computing = device.seconds(1e12, 1.0, 0.0, half=True)
    assert computing - started == pytest.approx(1 / (71 * reached.compute))
    moving = device.seconds(1.0, 936e9, 0.0, half=True)
    assert moving - started == pytest.approx(1 / reached.bandwidth)
    assert device.seconds(1e12, 1.0, 0.0, half=False) > computing
    # Unpacking comes before the product: neither hides behind the other.
    packed = device.seconds(1e12, 1.0, 1e9, half=True) - computing
    assert packed == pytest.approx(16e9 / (936e9 * reached.bandwidth))
    starting = device.seconds(1e12, 1.0, 0.0, half=True, tensors=21) - computing
    assert starting == pytest.approx(20 * started)


def test_narrow_models_reach_less_of_the_arithmetic():
    device = known_device("A100 80GB")
    started = device.efficiency.start_s
    narrow, wide = (device.seconds(1e13, 1.0, 0.0, half=True, width=w) for w in (1024, 4096))
    ratio = (narrow - started) / (wide - started)
    assert ratio == pytest.approx((1 + 300 / 1024) / (1 + 300 / 4096))


def test_generations_reach_unlike_shares_of_their_figures():
    names = ["RTX 4090", "A100", "H100", "MI300X"]
    shares = [known_device(name).efficiency.compute for name in names]
    assert shares == sorted(shares, reverse=True)
    assert len({*shares}) == len(names)


@pytest.mark.parametrize(
    "name", ["DGX Spark", "GB10", "Ryzen AI Max+ 395 128GB", "Strix Halo 64GB"]
)
def test_devices_with_unified_memory_have_none_beside_it(name):
    device = known_device(name)
    assert (device.kind, device.host_bytes, device.host_link) == ("unified", 0, 0)
    with pytest.raises(UserError, match="have no memory beside it"):
        known_device(f"{name} +64GB")


def test_a_processor_is_not_the_gpu_on_its_chip():
    label = "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S, 16 cores"
    assert known_device(label, memory_bytes=64 * GIB).kind == "cpu"
    found = known_device("Ryzen 9 5950X, 16 cores", memory_bytes=64 * GIB)
    assert found.name == "Ryzen 9 5950X"


def test_the_memory_of_a_cards_machine_may_be_said():
    said = known_device("RTX 4090 +64GB")
    assert (said.memory_bytes, said.host_bytes) == (24 * GIB, 64 * GIB)
    assert said.usable_host_bytes == pytest.approx(51.2 * GIB)  # a fifth stays for the system
    assumed = known_device("RTX 4090")
    assert (assumed.host_bytes, assumed.host_is_assumed) == (32 * GIB, True)
    assert assumed.usable_host_bytes == 24 * GIB
    here = known_device("RTX 4060 Ti 16GB", host_bytes=16 * GIB)
    assert (here.memory_bytes, here.usable_host_bytes, here.host_is_assumed) == (
        *(16 * GIB, 8 * GIB),
        False,
    )
    assert known_device("24GB, 71 TFLOPS, 936 GB/s + 128 GiB").host_bytes == 128 * GIB
    mac = known_device("Apple M2 Max 64GB")
    assert (mac.host_bytes, mac.usable_host_bytes, mac.host_link) == (0, 0, 0)
    with pytest.raises(UserError, match="have no memory beside it"):
        known_device("Apple M2 Max 64GB +64GB")


@pytest.mark.parametrize(
    "text", ["+64", "64 GB+", "+-3GB", "+64GB +32GB", "+64TB", "+1,5GB", "+GB", "+", "++8GB"]
)
def test_memory_of_a_cards_machine_that_cannot_be_read_is_refused(text):
    with pytest.raises(UserError, match="a plus that is not followed by the memory") as caught:
        known_device(f"RTX 4090 {text}")
    assert '+64GB"' in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *(("GTX 1080 Ti", 12), ("V100 32GB", 12), ("RTX 4060 Ti 16GB", 12)),
        *(("RTX 4070 Laptop", 12), ("RTX 3090", 25), ("RTX 4090", 25), ("RTX A6000", 25)),
        *(("RTX 5060 Ti 16GB", 25), ("RTX 5090", 50), ("H100", 50), ("H100 NVL", 50)),
        *(("RTX PRO 4500", 50), ("RTX 5000 Ada", 25), ("RTX 5090 Laptop", 12)),
        *(("RTX 6000 Ada", 25), ("MI100", 25), ("MI300X", 50), ("A100 80GB", 25)),
    ],
)
def test_the_way_from_the_machines_memory_is_of_the_cards_generation(name, rate):
    assert known_device(name).host_link == rate * 1e9
