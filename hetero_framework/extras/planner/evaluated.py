"""A layout with the schedule that a run of it would use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hetero_framework.engine.schedule.tuning import TunedSchedule, tune
from hetero_framework.extras.planner.layout import Fleet, Layout, has_chunks

_EXACTLY = 1e-9  # for each stage more: of equal layouts that with fewer stages counts
_WORTH_CHUNKS, _WORTH_RELAYS = 1.01, 1.03
"""Times the step of several stages on a device, and one stage for each has to take longer; the
second number where a boundary is relayed."""


@dataclass(frozen=True)
class Evaluated:
    """A layout and its schedule."""

    fleet: Fleet
    layout: Layout
    schedule: TunedSchedule

    @cached_property
    def seconds(self) -> float:
        """The predicted step."""
        return self.schedule.forecast.seconds

    @property
    def preference(self) -> float:
        """The smaller the better: the shortest step, of equal ones that with fewer stages. Several
        stages on a device have to be worth it: each boundary is another one at which a run is
        slower than simulated, most of all a relayed one, which keeps four NICs waiting."""
        seconds = self.seconds * (1 + _EXACTLY * len(self.layout))
        if not has_chunks(self.layout):
            return seconds
        relays = any(edge.relay is not None for edge in self.schedule.profile.edges)
        return seconds * (_WORTH_RELAYS if relays else _WORTH_CHUNKS)


def evaluated(
    fleet: Fleet, layout: Layout, *, max_in_flight: int | None = None
) -> Evaluated | None:
    """The layout as the product would run it; None where it does not fit."""
    limits = fleet.memory_limits(layout)
    if limits is None:
        return None
    profile, m = fleet.pipeline(layout), fleet.micro_batches
    if max_in_flight is None:
        # The plan names it, and the run then tunes the rest.
        max_in_flight = tune(profile, m, in_flight_limits=limits).max_in_flight
    schedule = tune(profile, m, max_in_flight=max_in_flight, in_flight_limits=limits)
    return Evaluated(fleet, layout, schedule)
