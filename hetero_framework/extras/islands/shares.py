"""Whole numbers in proportion to shares. Pure, and alike everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction


def apportion(count: int, shares: Mapping[str, float], least: int = 0) -> dict[str, int]:
    """Deal `count` things in proportion to `shares` (each > 0), by largest remainder. Of equal
    remainders the first name's counts as larger. No part is less than `least`.

    Fractions, not floating point: every island must come to the same numbers.
    """
    if count < least * len(shares) or not shares or min(shares.values()) <= 0:
        raise ValueError(f"{count} cannot be dealt to {dict(shares)}, at least {least} to each")
    dealt: dict[str, int] = {}
    while True:  # a share below the least becomes the least, and the others divide what is left
        left = count - least * len(dealt)
        exact = {name: Fraction(shares[name]) for name in sorted(shares) if name not in dealt}
        total = sum(exact.values())
        exact = {name: left * share / total for name, share in exact.items()}
        short = [name for name in exact if exact[name] < least]
        if not short:
            break
        dealt.update(dict.fromkeys(short, least))
    whole = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (whole[name] - exact[name], name))
    for name in by_remainder[: left - sum(whole.values())]:
        whole[name] += 1
    dealt.update(whole)
    return {name: dealt[name] for name in sorted(dealt)}


def round_steps(
    sync_steps: int, shares: Mapping[str, float], fragments: int = 1, delay_steps: int = 0
) -> dict[str, int]:
    """How many steps each island takes alone in a round, so that all end it at about one time:
    `sync_steps` on average, and enough for one synchronisation after the other."""
    return apportion(sync_steps * len(shares), shares, fragments * (delay_steps + 1))
