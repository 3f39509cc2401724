"""Shares of the samples for each island, by numbers or by measured speed. Pure: no clock.

All islands know the same measurements, which came with the last commit, and so compute the same
shares. Shares change rarely, since an island with a new share reads and pads other samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from hetero_framework.errors import ConfigError

STEPS = 20
"""The fewest steps, or rounds, between two changes of the shares."""
GAIN = 0.10
"""The least part of a step's time that new shares must save."""


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


def given_shares(settings: Mapping[str, float | Literal["auto"]]) -> dict[str, float] | None:
    """Shares by the islands' numbers; None if all are "auto". Raises ConfigError if some are."""
    numbers = {name: share for name, share in settings.items() if share != "auto"}
    if numbers and len(numbers) < len(settings):
        automatic = ", ".join(sorted(set(settings) - set(numbers)))
        raise ConfigError(
            f'island.share is a number of {", ".join(sorted(numbers))} and "auto" of {automatic}',
            hint='give every island a number, or every island "auto"',
        )
    return {name: float(share) for name, share in numbers.items()} or None


@dataclass(frozen=True)
class Shares:
    """The shares of the islands that take part, which need not sum to 1, and the number of steps or
    rounds that were done when they were chosen. A value never changes."""

    of: Mapping[str, float] = field(default_factory=dict)
    taken_at: int = 0

    def for_members(self, names: Iterable[str]) -> Shares:
        """The shares of the present members. A new member gets the average share."""
        known = {name: self.of[name] for name in names if name in self.of}
        average = statistics.fmean(known.values()) if known else 1.0
        return Shares({name: known.get(name, average) for name in sorted(names)}, self.taken_at)

    def tuned(
        self, seconds: Mapping[str, float], count: int, done: int, *, least: int = 0
    ) -> Shares:
        """Shares by speed if that saves GAIN of a step and these shares are STEPS old, else `self`.

        `seconds` has the time of each island for a sample (or a step of its own), without waiting.
        An island that has not been measured keeps its share. Shares are compared by how `count`
        things are dealt in whole numbers, at least `least` to each. `done` steps are done."""
        measured = {name: s for name, s in seconds.items() if name in self.of and s > 0}
        if done - self.taken_at < STEPS or len(measured) < 2:
            return self
        # The measured islands divide what they have together.
        together = sum(self.of[name] for name in measured)
        speed = sum(1 / s for s in measured.values())
        wanted = {name: together / s / speed for name, s in measured.items()}
        other = {**self.of, **wanted}

        def step_s(shares: Mapping[str, float]) -> float:
            dealt = apportion(count, shares, least)
            return max(dealt[name] * s for name, s in measured.items())

        if step_s(other) > (1 - GAIN) * step_s(self.of):
            return self
        return Shares(other, done)

    def state_dict(self) -> dict[str, Any]:
        """The shares as JSON data, for checkpoints, the record and islands that join."""
        return {"of": dict(sorted(self.of.items())), "taken_at": self.taken_at}

    @classmethod
    def load_state_dict(cls, state: Mapping[str, Any]) -> Shares:
        of = {name: float(share) for name, share in state["of"].items()}
        if min(of.values(), default=1.0) <= 0:
            raise ValueError(f"shares are above 0: {of}")
        return cls(of, int(state["taken_at"]))
