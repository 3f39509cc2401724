"""A step that no layout of a fleet can beat.

`least_step` asks for a step of T seconds whether any layout could take that, and halves the
interval until it knows. A dynamic programme over the seconds that are left decides (`covering`): a
stage whose input is there after e seconds, there and back, has S = T - e, and must satisfy what
`step_bound` asks of its device, its NICs and its memory. Behind it S is less by its work and its
boundary.

What makes that a relaxation, so that a "no" holds for all layouts:

- A device may be used more often than there are such devices, at a price for each use; what the
  coordinator relays has a price too. Whatever the prices, no layout covers more than the programme
  does; those of what is used too much are raised (subgradients, Held and Karp 1971).
- A stage costs what so many layers cost where they are cheapest, a boundary what the best one into
  its device does (`choices`).
- Seconds are counted in whole parts of T, rounded in favour of the layout.

What a stage has to hold in flight depends on how long a micro-batch is under way in all, so the
question is asked for ranges of that path. Where a device has several stages, those behind the first
only add to its work, and who comes behind that waits for one of its layers at least; but its NICs
carry a boundary into each of them, and one out of each but the last of all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from hetero_framework.planner.choices import (
    choices_of,
    groups_of,
    held,
    share_of,
    shares_of,
    work_of_layers,
)
from hetero_framework.planner.covering import Floats, Integers, Programme, Stages
from hetero_framework.planner.layout import Part
from hetero_framework.planner.rules import Rules

_PRECISION = 3e-3
_PARTS = 1_000  # of a step
_NARROW = 0.02  # of a step: a range of paths that is not divided further
_WIDE_ROUNDS, _ROUNDS = 6, 20  # of prices, for each question
_SEVERAL_ROUNDS = 10
_AIM = 0.3  # layers less than needed, that prices aim at
_EXACTLY = 1e-9
# What has a price besides devices: the last stage where a device has several, and what the
# coordinator relays, its seconds and how often.
_LAST, _RELAYED_S, _RELAYED = -3, -2, -1


def least_step(rules: Rules, most_s: float) -> float:
    """A lower bound of the step of all layouts that the rules permit; `most_s` is what one is known
    to reach."""
    least = min(most_s, _alone_s(rules))
    if len(rules.devices) > 1 and least > 0:
        for relaxation in (_OneEach, _Several) if rules.chunks else (_OneEach,):
            least = relaxation(rules, least).least()
    return least


def _alone_s(rules: Rules) -> float:
    """The step of the coordinator alone; infinite where it cannot hold everything."""
    fleet, found = rules.fleet, math.inf
    for recompute in (False, True) if rules.checkpointing else (False,):
        layout = (Part(0, 0, fleet.layers, recompute),)
        if fleet.memory_limits(layout) is not None:
            found = min(found, fleet.micro_batches * fleet.pipeline(layout).path_s)
    return found


class _Relaxation(ABC):
    """The question whether a step may be shorter than `most_s`, for the coordinator and others."""

    _narrow, _rounds = _NARROW, _ROUNDS

    def __init__(self, rules: Rules, most_s: float, *, chunks: bool) -> None:
        self._rules, self._fleet, self._most_s = rules, rules.fleet, most_s
        self._m = rules.fleet.micro_batches
        self._work = work_of_layers(rules.fleet)
        self._groups = groups_of(rules, chunks)
        self._most_stages = min(len(rules.devices), rules.fleet.layers + 2)
        local = rules.fleet.costs[0].device
        self._embedding = (local.embedding_forward_s, local.embedding_backward_s)
        # One for each group, and those below.
        self._prices = np.zeros(len(self._groups) + 3)
        relayed = [way.relayed_s for group in self._groups for way in group.between]
        self._least_relayed_s = min((s for s in relayed if s > 0), default=0.0)
        self._found = (0.0, 1.0)

    def least(self) -> float:
        """The longest step that is known to be too short."""
        if not self._possible((1 - _EXACTLY) * self._most_s):
            return self._most_s
        low, high = 0.0, self._most_s
        while high - low > _PRECISION * high:
            # Most bounds are near the known step.
            middle = max((low + high) / 2, 0.9 * high)
            if self._possible(middle):
                high = middle
            else:
                low = middle
        return low

    def _possible(self, step_s: float) -> bool:
        """Whether a step of so many seconds is, for any path; ranges are in parts of a step, and
        first comes that where it was possible last."""
        ranges = [(0.0, 1.0), self._found]
        while ranges:
            low, high = ranges.pop()
            narrow = high - low <= self._narrow
            if not self._covers(step_s, low * step_s, high * step_s, narrow):
                continue
            if narrow:
                self._found = (low, high)
                return True
            middle = (low + high) / 2
            ranges += [(middle, high), (low, middle)]
        return False

    def _covers(self, step_s: float, low: float, high: float, narrow: bool) -> bool:
        """Whether layouts in which a micro-batch is under way from `low` to `high` seconds could
        cover all layers in a step of so many seconds, as far as some rounds of prices tell."""
        # Where less is left the path would be longer.
        least = int((1 - high / step_s) * _PARTS * (1 - _EXACTLY))
        starts = {left: w for left, w in self._starts(step_s, low).items() if left >= least}
        if not starts:
            return False
        left_s = np.arange(least, _PARTS + 1, dtype=np.float64) * (step_s / _PARTS)
        rows = np.array(list(starts), np.int64) - least
        programme = Programme(
            self._stages(left_s, step_s, low, high, first=False),
            np.array(list(starts.values())),
            rows,
            self._stages(left_s[rows], step_s, low, high, first=True),
            self._most_stages,
        )
        there_are = np.array([*(group.size for group in self._groups), 1, *self._relays(step_s)])
        needed = self._needed(step_s) * (1 - _EXACTLY)
        for _ in range(self._rounds if narrow else _WIDE_ROUNDS):
            covered, used = programme.best(self._prices)
            bound = covered + float(self._prices @ there_are)
            if bound < needed:
                return False
            excess = used - there_are
            excess[(excess < 0) & (self._prices <= 0)] = 0.0
            norm = float(excess @ excess)
            if norm == 0:
                return True
            step = (bound - needed + _AIM) / norm
            self._prices = np.maximum(0.0, self._prices + step * excess)
        return True

    def _relays(self, step_s: float) -> tuple[float, float]:
        """The share of a step that the coordinator's NIC can relay beside what it sends itself, and
        the boundaries for which that is enough."""
        first_s = min(group.first.forward_s for group in self._groups)
        spare_s = max(0.0, step_s - self._m * first_s)
        if not self._least_relayed_s:
            return 1.0, 1.0
        most = spare_s / (self._m * self._least_relayed_s)
        return spare_s / step_s, math.floor(most + _EXACTLY)

    def _needed(self, step_s: float) -> float:
        """The work of all layers."""
        return float(self._work[-1])

    @abstractmethod
    def _starts(self, step_s: float, low: float) -> dict[int, float]:
        """The parts of a step that the coordinator may leave to others, and its most work then."""

    @abstractmethod
    def _stages(
        self, left_s: Floats, step_s: float, low: float, high: float, *, first: bool
    ) -> Stages:
        """What may come where `left_s` seconds are left behind the stage before, which is the
        coordinator's if it comes `first`."""

    def _uses(self, group: Integers, relayed_s: Floats, step_s: float) -> Floats:
        uses = np.zeros((len(self._prices), len(group)))
        uses[group, np.arange(len(group))] = 1.0
        uses[_RELAYED_S] = self._m / step_s * relayed_s
        uses[_RELAYED] = relayed_s > 0
        return uses

    def _parts(self, seconds: Floats, step_s: float) -> Integers:
        """Whole parts of a step, rounded down."""
        return np.floor(seconds * (_PARTS / step_s) * (1 - _EXACTLY)).astype(np.int64)


class _OneEach(_Relaxation):
    """One stage per device."""

    def __init__(self, rules: Rules, most_s: float, *, chunks: bool = False) -> None:
        super().__init__(rules, most_s, chunks=chunks)
        self._first, self._between = (
            choices_of(rules, self._groups, most_s, first=first) for first in (True, False)
        )

    def _starts(self, step_s: float, low: float) -> dict[int, float]:
        fleet, m = self._fleet, self._m
        costs, most_s = fleet.costs[0], step_s * (1 + _EXACTLY)
        found: dict[int, float] = {}
        for recompute in (False, True) if self._rules.checkpointing else (False,):
            sums = costs.recompute_s if recompute else costs.backward_s
            for end in range(fleet.layers + 1):
                forward_s = self._embedding[0] + costs.forward_s[end]
                backward_s = self._embedding[1] + sums[end]
                if m * (forward_s + backward_s) > most_s:
                    break
                count = self._held(Part(0, 0, end, recompute))
                if not count or low * (1 + (m - 1) // count) > most_s:
                    continue
                idle_s = float(_idle_s(forward_s, backward_s, np.array(low), count, m))
                if m * (forward_s + backward_s) + idle_s <= most_s:
                    left = _PARTS - int(self._parts(np.array(forward_s + backward_s), step_s))
                    found[left] = max(found.get(left, 0.0), float(self._work[end]))
        return found

    def _held(self, part: Part) -> int:
        """The forwards that the coordinator has memory for, 0 where not one fits."""
        costs = self._fleet.costs[0]
        room = costs.memory_bytes * (1 + _EXACTLY) - costs.device.embedding_bytes
        room -= costs.layer_bytes[part.end]
        room -= costs.largest_bytes if part.recompute and part.end else 0.0
        return held(room, self._fleet.activation_bytes(part), self._m)

    def _stages(
        self, left_s: Floats, step_s: float, low: float, high: float, *, first: bool
    ) -> Stages:
        one, m = self._first if first else self._between, self._m
        here_s = left_s[:, None] - one.path_s + _EXACTLY * step_s
        # What is left may be a part too much for each stage before.
        rounded_s = step_s / _PARTS * self._most_stages
        round_s = np.maximum(0.0, here_s - rounded_s - (step_s - low))
        idle_s = _idle_s(one.forward_s, one.backward_s, round_s, one.held, m)
        may = (one.held > 0) & (one.work > 0) & (here_s >= one.wire_s)
        may &= here_s >= m * one.seconds + idle_s
        ways = (m - 1) // np.maximum(1, one.held)
        may &= low + ways * round_s <= step_s * (1 + _EXACTLY)
        behind_s = np.maximum(one.last_wire_s, step_s - high)
        ends = one.fits_last & (here_s >= np.maximum(m * one.last_s, one.last_s + behind_s))
        return Stages(
            np.where(may, one.work, -np.inf),
            np.where(ends, one.work, -np.inf),
            self._parts(one.path_s + one.seconds, step_s),
            self._uses(one.group, one.relayed_s, step_s),
        )


def _idle_s(
    forward_s: Floats | float,
    backward_s: Floats | float,
    round_s: Floats,
    held: Integers | int,
    m: int,
) -> Floats:
    """As in `step_bound`: how long a stage that holds so many forwards has nothing to do."""
    before = np.maximum(0.0, round_s - backward_s - held * forward_s)
    after = np.maximum(0.0, round_s - forward_s - held * backward_s)
    return np.where(held < m, before + after, np.maximum(before, after))


class _Several(_OneEach):
    """Several stages on some devices, whose NICs carry more for it; one of these devices may have
    the last stage of all. Ranges of the path say nothing here."""

    _narrow, _rounds = 1.0, _SEVERAL_ROUNDS

    def __init__(self, rules: Rules, most_s: float) -> None:
        super().__init__(rules, most_s, chunks=True)
        # Who has one stage and comes last need not have the head.
        self._first, self._between = (
            one._replace(last_s=one.seconds, fits_last=one.fits_last | (one.held > 0))
            for one in (self._first, self._between)
        )
        self._shares = {
            first: shares_of(rules, self._groups, first=first) for first in (True, False)
        }
        self._whole = bool(np.ptp(np.diff(self._work)) < _EXACTLY)
        self._own = {d: share_of(rules, d) for d in rules.devices}
        devices = {d: rules.fleet.costs[d].device for d in rules.devices}
        self._head_s = {d: one.head_forward_s + one.head_backward_s for d, one in devices.items()}

    def _starts(self, step_s: float, low: float) -> dict[int, float]:
        before_s = sum(self._embedding)
        unit_s, _, most = self._own[0]
        work = float(self._most(np.array(step_s - self._m * before_s), unit_s, most))
        left = _PARTS - int(self._parts(np.array(before_s), step_s))
        if work + self._together(step_s - before_s) < self._needed(step_s) * (1 - _EXACTLY):
            return {}
        several = {left: work} if left >= 0 else {}
        return {**super()._starts(step_s, low), **several}

    def _together(self, left_s: float) -> float:
        """The most work of all workers, each as if only its best boundary were in front."""
        one, found = self._shares[True], 0.0
        for k, group in enumerate(self._groups):
            here_s = max(0.0, left_s - min(way.path_s for way in (group.first, *group.between)))
            own = int(np.flatnonzero(one.group == k)[0])
            most = self._most(np.array(here_s), one.unit_s[own], one.most[own])
            found += group.size * float(most)
        return found

    def _stages(
        self, left_s: Floats, step_s: float, low: float, high: float, *, first: bool
    ) -> Stages:
        single = super()._stages(left_s, step_s, low, high, first=first)
        one = self._shares[first]
        here_s = left_s[:, None] - one.path_s + _EXACTLY * step_s
        work = np.where(here_s > 0, self._most(here_s, one.unit_s, one.most), -np.inf)
        work = np.where(here_s >= one.wire_s, work, -np.inf)
        uses = self._uses(one.group, one.relayed_s, step_s)
        uses[_LAST] = one.has_last
        parts = self._parts(one.path_s + one.layer_s, step_s)
        return Stages(
            np.hstack([single.middle, work]),
            np.hstack([single.last, work]),
            np.hstack([single.parts, parts]),
            np.hstack([single.uses, uses]),
        )

    def _most(self, spare_s: Floats, unit_s: Floats | float, most: Floats | float) -> Floats:
        """The work that a device does in so many seconds of a step."""
        with np.errstate(divide="ignore", invalid="ignore"):
            in_time = np.where(unit_s > 0, spare_s / (self._m * np.asarray(unit_s)), math.inf)
        work = np.minimum(np.minimum(in_time, most), self._work[-1])
        work = np.maximum(0.0, work)
        return np.floor(work + _EXACTLY) if self._whole else work

    def _needed(self, step_s: float) -> float:
        """The work of all layers, and what somebody cannot do who has the head."""
        lost = []
        for d, head_s in self._head_s.items():
            unit_s, _, most = self._own[d]
            units = head_s / unit_s if unit_s > 0 else 0.0
            beside = float(self._most(np.array(step_s - self._m * head_s), unit_s, most))
            # Where memory and not time is short the head may cost nothing.
            spare = float(self._most(np.array(math.inf), unit_s, most)) - beside
            lost.append(min(math.floor(units) if self._whole else units, max(0.0, spare)))
        return float(self._work[-1]) + min(lost)
