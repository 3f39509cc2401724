"""A stage that holds up the others: said once, with a split of the layers that would be more even.

Nothing is changed without being asked: the plan is the user's.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence

from hetero_framework.config import StageSpec
from hetero_framework.engine.pipeline import StageStatistics
from hetero_framework.log import event

STEPS = 20
WORTH_IT = 1.3
"""So many times as long must the slowest stage take as it would under the better split."""
_log = logging.getLogger(__name__)


class StragglerWatch:
    """Told of each step's times; speaks once, after STEPS steps."""

    def __init__(self, stages: Sequence[StageSpec]) -> None:
        self._stages = stages
        self._busy_s: list[list[float]] = []

    def step(self, found: Mapping[int, StageStatistics]) -> None:
        """A step has been done with these times."""
        several_each = len({stage.owner for stage in self._stages}) < len(self._stages)
        if len(self._stages) < 2 or several_each or len(self._busy_s) >= STEPS:
            return
        self._busy_s.append([found[stage.index].busy_s for stage in self._stages])
        if len(self._busy_s) == STEPS:
            self._judge([statistics.median(times) for times in zip(*self._busy_s, strict=True)])

    def _judge(self, busy_s: list[float]) -> None:
        layers = [stage.end - stage.start for stage in self._stages]
        better, longest_s = more_even(layers, busy_s)
        if max(busy_s) < WORTH_IT * longest_s:
            return
        slowest = self._stages[busy_s.index(max(busy_s))]
        shares = ", ".join(f"{seconds / sum(busy_s):.0%}" for seconds in busy_s)
        slow = event("straggler", "none", process=slowest.process, shares=shares, layers=better)
        text = (
            "%s holds up the others: of the time that the stages compute theirs is %s; with "
            "layers %s instead of %s the slowest would take %.0f %% of its time (hetero timeline "
            "says more)"
        )
        new, old = (", ".join(map(str, numbers)) for numbers in (better, layers))
        part = 100 * longest_s / max(busy_s)
        _log.info(text, slowest.process, shares, new, old, part, extra=slow)


def more_even(layers: Sequence[int], busy_s: Sequence[float]) -> tuple[list[int], float]:
    """Numbers of layers for the same stages, and how long the slowest then takes. One layer after
    the other goes from the slowest stage to where it costs least, as long as that helps.

    What a layer costs is the stage's mean. The first and the last stage also hold embedding and
    head: a layer less there saves no more than a layer of the quickest stage between them, and
    where they hold no layer at all, one would take as long as the slowest one does elsewhere.
    """
    counts, times = list(layers), list(busy_s)
    known_s = [seconds / count for seconds, count in zip(busy_s, layers, strict=True) if count]
    mean_s = [s / n if n else max(known_s) for s, n in zip(busy_s, layers, strict=True)]
    between = mean_s[1:-1] or mean_s
    while True:
        slowest = max(range(len(counts)), key=times.__getitem__)
        others = [k for k in range(len(counts)) if k != slowest]
        target = min(others, key=lambda k: times[k] + mean_s[k])
        longest_s = times[slowest]
        if counts[slowest] <= 1 or times[target] + mean_s[target] >= longest_s:
            return counts, longest_s
        at_an_end = slowest in (0, len(counts) - 1)
        counts[slowest] -= 1
        times[slowest] -= min(mean_s[slowest], *between) if at_an_end else mean_s[slowest]
        counts[target] += 1
        times[target] += mean_s[target]
