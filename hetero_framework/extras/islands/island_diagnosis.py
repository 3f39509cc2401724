"""Obstacles between this coordinator and the other islands, for `hetero doctor --config`."""

from __future__ import annotations

import time

from hetero_framework.commands.diagnosis import Findings, MachineView, wrong_clock
from hetero_framework.core import addresses
from hetero_framework.errors import NetworkError, UserError
from hetero_framework.extras.islands.lighthouse_client import clock_at
from hetero_framework.extras.islands.settings import island_of
from hetero_framework.security.access import island_access


def findings(view: MachineView) -> Findings:
    """An error for each obstacle, if this machine is an island's coordinator."""
    if not view.is_coordinator or view.config.setting("island") is None:
        return
    island, ip = island_of(view.config), view.config.coordinator.ip
    if addresses.is_loopback(ip) and not addresses.is_loopback(island.lighthouse_address[0]):
        yield NetworkError(
            f"other islands are to reach this one at {ip}, which is this machine for each of them",
            hint="give coordinator.ip as its address in the network or VPN of all islands",
        )
    began = time.time()
    try:
        there = clock_at(island.lighthouse_address, island_access(view.config, view.options))
    except UserError as error:
        start = f"start `hetero lighthouse` at {island.lighthouse}"
        yield NetworkError(error.message, hint=error.hint or start)
        return
    off_s = there - (began + time.time()) / 2
    yield from wrong_clock("the lighthouse's machine", off_s)
