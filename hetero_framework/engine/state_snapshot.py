"""A stage's state as of one step, readable while later steps run.

Only a commit changes the state. So a part is copied when it is read, between two tasks, and parts
that have not been read are copied just before the next commit. A state that is read within one step
costs memory for one part, and nothing at the commit (docs/maintainers/decisions.md has the times).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash

from hetero_framework.core.devices import Device
from hetero_framework.core.tensors import to_wire
from hetero_framework.engine.stage_api import StatePart, Tensors
from hetero_framework.errors import ProtocolError

STATE_PART_BYTES = 64 << 20
Entry = tuple[str, torch.Tensor, dict[str, Any]]  # name, tensor, values that are no tensors


class StateSnapshot:
    """A stage's state in parts, read in ascending order. The part last read may be read again."""

    def __init__(self, entries: Iterable[Entry], device: Device, *, lasting: bool = False) -> None:
        """`entries` hold the live tensors; `keep` must be called before they change. A `lasting`
        snapshot keeps the parts that were read, for `parts`."""
        self._device = device
        self._lasting = lasting
        self._live = dict(enumerate(in_parts(entries)))
        self._kept: dict[int, StatePart] = {}

    def part(self, number: int) -> StatePart:
        """A part in memory of its own. Raises ProtocolError for a part that is gone."""
        for done in [k for k in self._live if k < number and not self._lasting]:
            del self._live[done]
            self._kept.pop(done, None)
        if number not in self._live:
            raise ProtocolError(f"state part {number} was asked for out of order")
        part = self._kept.get(number) or self._copied(self._live[number])
        if self._lasting:
            self._kept[number] = part
        return part

    def parts(self) -> Iterator[StatePart]:
        """All parts of a lasting snapshot, in order."""
        yield from (self.part(number) for number in self._live)

    def keep(self) -> None:
        """Copy the unread parts: the live tensors are about to change."""
        for number, live in self._live.items():
            if number not in self._kept:
                self._kept[number] = self._copied(live)

    def _copied(self, part: StatePart) -> StatePart:
        hosts = self._device.all_to_host(list(part.tensors.values()))
        tensors = {
            name: host.clone() if host.data_ptr() == tensor.data_ptr() else host
            for (name, tensor), host in zip(part.tensors.items(), hosts, strict=True)
        }
        return StatePart(tensors, part.values, part.last)


def digest(parts: Iterable[StatePart]) -> str:
    """XXH3 (128 bits) of names, bytes and values in their order: equal if two processes hold the
    same state. It guards against mistakes, not against malice."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        for name, tensor in part.tensors.items():
            wire = to_wire(tensor)
            hasher.update(f"{name} {wire.dtype} {list(wire.shape)}\n".encode())
            hasher.update(wire.data)
        hasher.update(json.dumps(part.values, sort_keys=True).encode())
    return hasher.hexdigest()


def in_parts(entries: Iterable[Entry]) -> Iterator[StatePart]:
    """Group entries into parts of about `STATE_PART_BYTES`; the last part is marked."""
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    size = 0
    for name, tensor, more in entries:
        if tensors and size + tensor.nbytes > STATE_PART_BYTES:
            yield StatePart(tensors, values)
            tensors, values, size = {}, {}, 0
        tensors[name] = tensor
        values.update(more)
        size += tensor.nbytes
    yield StatePart(tensors, values, last=True)
