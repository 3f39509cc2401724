"""Time spent waiting for slower islands, or for the network, before a decision. Pure: no clock."""

from __future__ import annotations

from collections.abc import Mapping


def for_others(idle_since: Mapping[str, float]) -> dict[str, float]:
    """The seconds that each island waited for the last island to be idle, too. By the leader's
    clock, each has been idle since `idle_since`. Waiting after that was for the network. The time
    that another island's vote takes on its way counts as its work."""
    last = max(idle_since.values())
    return {name: last - since for name, since in idle_since.items()}
