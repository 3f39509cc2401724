"""Makers' figures of devices, by name: memory, operations and bytes per second.

The table is data with its sources (known_devices.json); `hetero plan --dry-run` estimates from it.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetero_framework.errors import UserError
from hetero_framework.models.sizing.streaming import BUS_RATE
from hetero_framework.units import size

FILE = Path(__file__).with_name("known_devices.json")
_FIGURES = re.compile(
    r"(\d+(?:\.\d+)?) *gi?b *, *(\d+(?:\.\d+)?) *tflops *, *(\d+(?:\.\d+)?) *gb/s", re.IGNORECASE
)
_MEMORY = re.compile(r"\b(\d+) *gi?b\b", re.IGNORECASE)
_HOST = re.compile(r"\+ *(\d+(?:\.\d+)?) *gi?b\b", re.IGNORECASE)
_CORES = re.compile(r"\b(\d+)[ -]?cores?\b", re.IGNORECASE)
_CPU = re.compile(
    r"\b(cpu|processor|xeon|epyc|ryzen|threadripper|core (i[3579]|ultra)|pentium|celeron|graviton"
    r"|ampere altra|neoverse|cortex)\b",
    re.IGNORECASE,
)
_PROCESSOR = re.compile(r", \d+ cores$")
_ASSUMED_CORES, _ASSUMED_GIB = 8, 16  # for a CPU whose text has neither
_WORD = re.compile(r"[a-z]+|\d+")
_VARIANTS = frozenset({"ti", "super", "pro", "max", "ultra", "xt", "xtx", "gre"})
"""Words right behind a name that make it another device, with other figures."""
_MAKERS = ("nvidia", "geforce", "amd", "intel", "apple", "radeon", "r", "tm")
_GIB = 2**30


@dataclass(frozen=True)
class Efficiency:
    """The shares of its figures that a generation of devices reaches in training, and the seconds
    in which the kernels of one tensor of weights are started. `compute` is for wide models."""

    compute: float
    bandwidth: float
    usable_memory: float
    start_s: float


@dataclass(frozen=True)
class KnownDevice:
    """A device by its figures: bytes, operations per second of half and of single precision, bytes
    per second of its memory. `source` is a page, or says where the figures are from. `host_bytes`
    is the machine's memory besides a card's own; `host_is_assumed` if it was not given."""

    name: str
    generation: str
    memory_bytes: float
    half_flops: float
    float_flops: float
    bandwidth: float
    source: str
    host_bytes: float = 0.0
    host_is_assumed: bool = False

    @property
    def kind(self) -> str:
        """ "gpu" for a card with memory of its own, "unified", "apple" or "cpu" for the others."""
        return str(_table()["generations"][self.generation][0])

    @property
    def usable_host_bytes(self) -> float:
        """Memory of the machine that layers can fill: the system and others keep the rest."""
        about = host_memory()
        kept = max(about["kept_gib"] * _GIB, about["kept_share"] * self.host_bytes)
        return max(0.0, self.host_bytes - kept)

    @property
    def host_link(self) -> float:
        """Bytes per second of copies from the machine's memory; 0 if the device shares it."""
        links = _table()["host_links"].items()
        rates = (float(gbs) * 1e9 for gbs, names in links if re.fullmatch(names, self.name))
        return next(rates, BUS_RATE) if self.kind == "gpu" else 0.0

    @property
    def efficiency(self) -> Efficiency:
        kind, compute = _table()["generations"][self.generation]
        return Efficiency(compute, **_table()["kinds"][kind])

    @property
    def usable_bytes(self) -> float:
        """Memory that layers can fill."""
        return self.memory_bytes * self.efficiency.usable_memory

    def seconds(
        self,
        flops: float,
        nbytes: float,
        unpacked: float,
        *,
        half: bool,
        width: float = math.inf,
        tensors: int = 1,
    ) -> float:
        """Seconds of a pass with `tensors` tensors of weights. It is bounded by arithmetic, of
        which a model of small `width` reaches less, or by memory. The start of kernels comes on
        top, since most are too small to hide the next one's, and so does the unpacking of
        `unpacked` numbers of quantised weights."""
        reached, peak = self.efficiency, self.half_flops if half else self.float_flops
        peak *= reached.compute / (1 + float(_table()["half_width"]) / width)
        rate = self.bandwidth * reached.bandwidth
        unpacking_s = unpacked * float(_table()["unpacking_bytes"]) / rate
        return unpacking_s + reached.start_s * tensors + max(flops / peak, nbytes / rate)


def factor() -> float:
    """The factor by which a step may take more or less time than estimated."""
    return float(_table()["factor"])


def host_memory() -> dict[str, float]:
    """Assumptions about the host memory of machines with a card."""
    return dict(_table()["host_memory"])


def known_device(
    text: str, *, memory_bytes: float | None = None, host_bytes: float | None = None
) -> KnownDevice:
    """The device that a person or a driver calls so: "RTX 3090", "NVIDIA GeForce RTX 3090", "Apple
    M2 Max 64GB", "8-core CPU 32GB", "cpu", or its figures: "24GB, 71 TFLOPS, 936 GB/s". To a card
    the memory of its machine may be added: "RTX 3090 +64GB". If several devices fit, the one with
    the longest name counts. `memory_bytes` is the device's memory, `host_bytes` the memory of a
    card's machine, if known. A CPU without figures is taken to have 16 GB, a card's machine 32 GB.
    Raises UserError for a device that is not in the table, or whose memory is not known."""
    text = text.replace("MAX+", "MAX").replace("Max+", "Max")  # AMD's; no memory follows the plus
    said = _HOST.search(text)
    named = _HOST.sub("", text, count=1).strip()
    if "+" in named:
        raise UserError(
            f"{text!r} has a plus that is not followed by the memory of one machine",
            hint=f'say it in GB, once, as in "{text.partition("+")[0].strip()} +64GB"',
        )
    device = _device(named, memory_bytes)
    if device.kind != "gpu":
        if said is not None:
            raise UserError(
                f"{text!r}: a CPU, a Mac and other devices that share their machine's memory have"
                " no memory beside it",
                hint="say the memory of all, as in Apple M2 Max 64GB",
            )
        return device
    there = float(said[1]) * _GIB if said is not None else host_bytes
    assumed = host_memory()["assumed_gib"] * _GIB if there is None else 0.0
    return replace(device, host_bytes=there or assumed, host_is_assumed=there is None)


def _device(text: str, memory_bytes: float | None) -> KnownDevice:
    if figures := _FIGURES.fullmatch(text.strip()):
        gib, tflops, gbs = map(float, figures.groups())
        return KnownDevice(
            text.strip(), "unknown", gib * _GIB, tflops * 1e12, tflops * 1e12, gbs * 1e9, "as given"
        )
    fitting = [row for row in _table()["devices"] if _is_called(row[0], text)]
    if _PROCESSOR.search(text):  # its name may have that of a GPU on the same chip
        fitting = [row for row in fitting if row[1] == "cpu"]
    device = _of(max(fitting, key=lambda row: len(row[0]))) if fitting else _cpu(text)
    if device is None:
        raise UserError(f"{text!r} is not a known device", hint=_hint(text))
    memory = _MEMORY.search(text)
    if memory_bytes is not None:
        return replace(device, memory_bytes=memory_bytes)
    if memory is not None:
        is_named = device.name.startswith(text.strip())  # its end says what was assumed
        name = device.name if is_named else text.strip()
        return replace(device, memory_bytes=float(memory[1]) * _GIB, name=name)
    if device.kind == "cpu" and not device.memory_bytes and not _CORES.search(text):
        name = f"{device.name}, {_ASSUMED_GIB} GB assumed"
        return replace(device, memory_bytes=_ASSUMED_GIB * _GIB, name=name)
    if not device.memory_bytes:
        raise UserError(
            f"how much memory {text!r} has depends on the machine",
            hint=f'add it, as in "{text.strip()} 32GB"',
        )
    return device


def describe(device: KnownDevice, *, half: bool) -> str:
    """The figures that count, for a person."""
    tflops, what = (device.half_flops, "16-bit") if half else (device.float_flops, "float32")
    return (
        f"{size(device.memory_bytes)}, {tflops / 1e12:.3g} TFLOPS ({what}),"
        f" {device.bandwidth / 1e9:.4g} GB/s"
    )


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


def _is_called(name: str, text: str) -> bool:
    """Whether `text` can mean a device of the table: it has the words of the name in a row, the
    memory of the name, if any, and no word behind them that makes it another device. "laptop" must
    be in both: a laptop's device is slower than its namesake."""
    named, given = _MEMORY.search(name), _MEMORY.search(text)
    if named is not None and (given is None or given[1] != named[1]):
        return False
    words, there = _words(name), _words(text)
    if "laptop" in there and "laptop" not in words:
        return False
    length = len(words)
    return any(
        there[i : i + length] == words and not _VARIANTS & {*there[i + length : i + length + 1]}
        for i in range(len(there))
    )


def _words(name: str) -> list[str]:
    """The words of a name: "rtx" and "3090" for "RTX3090". Makers' names are left out."""
    without_memory = _MEMORY.sub(" ", name.lower())
    return [word for word in _WORD.findall(without_memory) if word not in _MAKERS]


def _of(row: list[Any]) -> KnownDevice:
    name, generation, gib, half, single, gbs, source = row
    page = _table()["sources"][source]
    return KnownDevice(
        name, generation, (gib or 0) * _GIB, half * 1e12, single * 1e12, gbs * 1e9, page
    )


def _cpu(text: str) -> KnownDevice | None:
    """A CPU by its number of cores, given or assumed; None if `text` names no CPU."""
    count, name = _CORES.search(text), text.strip()
    if count is None:
        if _CPU.search(text) is None:
            return None
        name += f", {_ASSUMED_CORES} cores assumed"
    cores, each = int(count[1]) if count else _ASSUMED_CORES, _table()["unknown_cpu"]
    half, single = (cores * each[f"{x}_tflops_per_core"] * 1e12 for x in ("half", "float"))
    return KnownDevice(name, "cpu", 0, half, single, each["bandwidth_gbs"] * 1e9, "an assumed core")


def _hint(text: str) -> str:
    names = {row[0].lower(): row[0] for row in _table()["devices"]}
    near = difflib.get_close_matches(" ".join(text.lower().split()), names, n=3, cutoff=0.6)
    near_text = f"did you mean {' or '.join(names[name] for name in near)}? Else " if near else ""
    return (
        f'{near_text}give its figures, as in "24GB, 71 TFLOPS, 936 GB/s" (memory, 16-bit'
        ' arithmetic, memory\'s speed), or a CPU as "8-core CPU 32GB"'
    )
