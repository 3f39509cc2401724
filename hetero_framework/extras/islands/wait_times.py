"""Time spent waiting for slower islands, or for the network, before a decision. Pure: no clock."""

from __future__ import annotations

from collections.abc import Mapping


def for_others(idle_since: Mapping[str, float]) -> dict[str, float]:
    """The seconds that each island waited until the last one had nothing left to do either; by one
    clock, each has been idle since `idle_since`. What it waited after that was for the network. The
    clock is the leader's: of the others the time that a vote takes counts as work."""
    last = max(idle_since.values())
    return {name: last - since for name, since in idle_since.items()}
