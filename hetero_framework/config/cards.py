"""Machines with several devices: an entry with `devices` stands for one entry for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ALL = "all"
"""In place of the devices' names: all accelerators of the machine, which it alone knows."""
OF_COORDINATOR = "coordinator@"
"""How the ids of further devices on the coordinator's machine begin."""


def with_cards(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with each machine's list of devices written out. The first device is that
    of the entry; the second of worker 1 is worker "1@2". Ports count up from that of the entry. An
    entry whose devices are not a list of texts stays as it is, and the schema refuses it."""
    home: Any = raw.get("coordinator")
    workers: Any = raw.get("workers", [])
    named = [home, *workers] if isinstance(home, dict) and isinstance(workers, list) else []
    if not any(isinstance(entry, dict) and entry.get("devices") for entry in named):
        return raw
    entries, more = [], list[dict[str, Any]]()
    first, others = _split(home)
    for number, device in others:
        own = {"ip": home.get("ip"), "hostname": home.get("hostname")}
        more.append({"id": f"{OF_COORDINATOR}{number}", **own, "device": device})
    for entry in workers:
        one, rest = _split(entry)
        entries.append(one)
        for number, device in rest:
            port = entry.get("port")
            moved = {} if type(port) is not int else {"port": port + number - 1}
            more.append({**one, "id": f"{entry.get('id')}@{number}", "device": device, **moved})
    return {**raw, "coordinator": first, "workers": entries + more}


def _split(entry: Any) -> tuple[Any, list[tuple[int, str]]]:
    """The entry with its first device alone, and the numbers and names of the others."""
    devices: Any = entry.get("devices") if isinstance(entry, dict) else None
    if not _is_list(devices) or entry.get("device", "auto") != "auto":
        return entry, []
    left = {name: value for name, value in entry.items() if name != "devices"}
    return {**left, "device": devices[0]}, list(enumerate(devices[1:], 2))


def _is_list(devices: Any) -> bool:
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
    return is_list and bool(devices) and all(isinstance(name, str) for name in devices)
