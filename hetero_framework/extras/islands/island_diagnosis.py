"""Obstacles between this coordinator and the other islands, for `hetero doctor --config`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hetero_framework.commands.diagnosis import CLOCK_S, MachineView
from hetero_framework.config import Config
from hetero_framework.core import addresses
from hetero_framework.errors import UserError
from hetero_framework.extras.islands.lighthouse_client import clock_at
from hetero_framework.extras.islands.settings import island_of
from hetero_framework.security.access import KeyOptions, island_access
from hetero_framework.units import seconds


def findings(view: MachineView) -> Iterator[tuple[str, str]]:
    """The problems of this machine's islands, for the coordinator."""
    if view.is_coordinator:
        yield from problems(view.config, view.options, CLOCK_S)


def problems(
    config: Config, options: KeyOptions | None, clock_s: float
) -> Iterator[tuple[str, str]]:
    """Each problem of this machine's islands with its remedy; none where there are no islands.

    Args:
        clock_s: how far a clock may be off, in seconds.
    """
    if config.setting("island") is None:
        return
    island = island_of(config)
    where, ip = island.lighthouse, config.coordinator.ip
    if addresses.is_loopback(ip) and not addresses.is_loopback(island.lighthouse_address[0]):
        yield (
            f"other islands are to reach this one at {ip}, which is this machine for each of them",
            "give coordinator.ip as its address in the network or VPN of all islands",
        )
    began = time.time()
    try:
        there = clock_at(island.lighthouse_address, island_access(config, options))
    except UserError as error:
        yield error.message, error.hint or f"start `hetero lighthouse` at {where}"
        return
    off_s = there - (began + time.time()) / 2
    if abs(off_s) > clock_s:
        way = "ahead of" if off_s > 0 else "behind"
        yield (
            f"the clock of the lighthouse's machine is {seconds(abs(off_s))} {way} this one's",
            "set both by the network (timedatectl set-ntp true); certificates and logs need it",
        )
