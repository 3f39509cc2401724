"""A step that no layout of a fleet can beat.

`least_step` asks for a step of T seconds whether any layout could take that, and halves the
interval until it knows. A dynamic programme over the seconds that are left decides (`covering`): a
stage whose round trips in front take e seconds has S = T - e from when its first input is there to
when its last gradient must leave, and must satisfy what `step_bound` asks of its device, its NICs
and its memory. Behind it S is less by its work for one micro-batch and its boundary's round trip.

What makes that a relaxation, so that a "no" holds for all layouts:

- A device may be used more often than there are such devices, and the coordinator may relay more
  than its NIC carries; both have prices instead (Lagrange multipliers, below).
- A stage costs what so many layers cost where they are cheapest, a boundary what the best one into
  its device does (`choices`, `groups`).
- Seconds are counted in whole ticks, thousandths of T, rounded in favour of the layout.

Prices: let a layout cover work w(x) and use u_i(x) of thing i, of which there are s_i. A real
layout has u_i <= s_i, so at any prices p_i >= 0

    w(x) <= w(x) + sum p_i (s_i - u_i(x)) <= max over x of (w(x) - sum p_i u_i(x)) + sum p_i s_i.

The maximum is the programme's answer. Where the right side is less than the work of all layers no
layout takes T. Prices at which it is small are found by subgradients: those of what the best x uses
too much are raised, of the rest lowered (Held and Karp 1971; the length of the step is Polyak's).

What a stage has to hold in flight depends on how long a micro-batch is under way in all (the path),
so the question is asked for ranges of the path, which are halved as long as the answer is "maybe".
Where a device has several stages, those behind the first only add to its work, and who comes behind
that waits for one of its layers at least; but its NICs carry a boundary into each of them, and one
out of each but the last of all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from hetero_framework.planner.choices import (
    capacity_of,
    device_choices,
    in_flight_limit,
    stage_choices,
    work_of_layers,
)
from hetero_framework.planner.covering import Floats, Integers, Programme, Stages
from hetero_framework.planner.groups import groups_of
from hetero_framework.planner.layout import Part
from hetero_framework.planner.rules import Rules

_PRECISION = 3e-3
"""Of the bound: half of it is one more question."""
_TICKS = 1_000
"""Of a step. 500 lose 2 % of the bound, 2,000 win 0.4 %, for twice the rows."""
_NARROW = 0.02
"""Of a step: a range of paths that is not halved further. Half of it is up to twice the questions,
and the in-flight limits count for more."""
_WIDE_ROUNDS, _ROUNDS, _SEVERAL_ROUNDS = 6, 20, 10
"""Of prices for each question: of a wide range, of a narrow one, and with several stages on a
device. A "maybe" takes all of them; fewer find fewer "no", so the bound is lower."""
_AIM = 0.3
"""Units of work below the needed ones that prices aim at, so that the last steps are not too short
to get there."""
_EXACTLY = 1e-9  # sums in another order differ by less
# What has a price besides the workers of each group: the last stage, where a device has several,
# and what the coordinator relays, as a share of the step and as a number of boundaries.
_LAST, _RELAYED_SHARE, _RELAYED = -3, -2, -1


def least_step(rules: Rules, most_s: float) -> float:
    """Seconds that no layout that the rules permit can beat, by any schedule; `most_s`, what one is
    known to take, is the most that is answered."""
    least = min(most_s, _alone_s(rules))
    if len(rules.devices) > 1 and least > 0:
        for relaxation in (_OneStageEach, _SeveralStages) if rules.chunks else (_OneStageEach,):
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

    _narrow, _rounds = _NARROW, _ROUNDS  # of each kind of relaxation

    def __init__(self, rules: Rules, most_s: float, *, chunks: bool) -> None:
        self._rules, self._fleet, self._most_s = rules, rules.fleet, most_s
        self._m = rules.fleet.micro_batches
        self._work = work_of_layers(rules.fleet)
        self._groups = groups_of(rules, chunks=chunks)
        self._most_stages = min(len(rules.devices), rules.fleet.layers + 2)
        local = rules.fleet.costs[0].device
        self._embedding = (local.embedding_forward_s, local.embedding_backward_s)
        # Those of the last question are a good start for the next.
        self._prices = np.zeros(len(self._groups) + 3)
        relayed = [into.relayed_s for group in self._groups for into in group.from_workers]
        self._least_relayed_s = min((s for s in relayed if s > 0), default=0.0)
        self._last_range = (0.0, 1.0)

    def least(self) -> float:
        """Seconds of the longest step that is known to be too short."""
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
        """Whether a step of so many seconds may be, for any path. Ranges are shares of a step; that
        comes first in which the last step was possible, since one "maybe" is enough."""
        ranges = [(0.0, 1.0), self._last_range]
        while ranges:
            low, high = ranges.pop()
            narrow = high - low <= self._narrow
            if not self._may_cover(step_s, low * step_s, high * step_s, narrow):
                continue
            if narrow:
                self._last_range = (low, high)
                return True
            middle = (low + high) / 2
            ranges += [(middle, high), (low, middle)]
        return False

    def _may_cover(self, step_s: float, low: float, high: float, narrow: bool) -> bool:
        """Whether layouts in which a micro-batch is under way from `low` to `high` seconds could
        cover all layers in a step of so many seconds, as far as some rounds of prices tell."""
        # Where less is left the path would be longer.
        least = int((1 - high / step_s) * _TICKS * (1 - _EXACTLY))
        starts = {left: w for left, w in self._starts(step_s, low).items() if left >= least}
        if not starts:
            return False
        left_s = np.arange(least, _TICKS + 1, dtype=np.float64) * (step_s / _TICKS)
        rows = np.array(list(starts), np.int64) - least
        programme = Programme(
            self._stages(left_s, step_s, low, high, after_coordinator=False),
            np.array(list(starts.values())),
            rows,
            self._stages(left_s[rows], step_s, low, high, after_coordinator=True),
            self._most_stages,
        )
        return self._prices_leave(programme, step_s, self._rounds if narrow else _WIDE_ROUNDS)

    def _prices_leave(self, programme: Programme, step_s: float, rounds: int) -> bool:
        """Whether at none of the prices of so many rounds the work that can be covered is less than
        that of all layers."""
        supply = np.array([*(group.size for group in self._groups), 1, *self._relays(step_s)])
        needed = self._needed(step_s) * (1 - _EXACTLY)
        for _ in range(rounds):
            covered, used = programme.best(self._prices)
            bound = covered + float(self._prices @ supply)
            if bound < needed:
                return False
            excess = used - supply
            excess[(excess < 0) & (self._prices <= 0)] = 0.0
            norm = float(excess @ excess)
            if norm == 0:
                return True
            length = (bound - needed + _AIM) / norm
            self._prices = np.maximum(0.0, self._prices + length * excess)
        return True

    def _relays(self, step_s: float) -> tuple[float, float]:
        """The share of a step in which the coordinator's NIC can relay, beside the activations that
        it sends itself, and the number of boundaries for which that is enough."""
        first_s = min(group.from_coordinator.forward_s for group in self._groups)
        spare_s = max(0.0, step_s - self._m * first_s)
        if not self._least_relayed_s:
            return 1.0, 1.0
        most = spare_s / (self._m * self._least_relayed_s)
        return spare_s / step_s, math.floor(most + _EXACTLY)

    def _needed(self, step_s: float) -> float:
        """The work to be covered: that of all layers."""
        return float(self._work[-1])

    @abstractmethod
    def _starts(self, step_s: float, low: float) -> dict[int, float]:
        """The coordinator's first stage: the most work in it for each number of ticks that it may
        leave to those behind."""

    @abstractmethod
    def _stages(
        self, left_s: Floats, step_s: float, low: float, high: float, *, after_coordinator: bool
    ) -> Stages:
        """What may come where `left_s` (R) seconds are left behind the stage before, which is the
        coordinator's first or a worker's, in a layout whose path is from `low` to `high` seconds.
        """

    def _uses(self, group: Integers, relayed_s: Floats, step_s: float) -> Floats:
        """What choices use of all that has a price."""
        uses = np.zeros((len(self._prices), len(group)))
        uses[group, np.arange(len(group))] = 1.0
        uses[_RELAYED_SHARE] = self._m / step_s * relayed_s
        uses[_RELAYED] = relayed_s > 0
        return uses

    def _ticks(self, seconds: Floats, step_s: float) -> Integers:
        """Whole ticks of a step, rounded down."""
        return np.floor(seconds * (_TICKS / step_s) * (1 - _EXACTLY)).astype(np.int64)


class _OneStageEach(_Relaxation):
    """One stage per device."""

    def __init__(self, rules: Rules, most_s: float, *, chunks: bool = False) -> None:
        super().__init__(rules, most_s, chunks=chunks)
        self._choices = {
            first: stage_choices(rules, self._groups, most_s, after_coordinator=first)
            for first in (True, False)
        }

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
                limit = self._limit(Part(0, 0, end, recompute))
                # The round of the first stage is the whole path, `low` at least.
                if not limit or low * (1 + (m - 1) // limit) > most_s:
                    continue
                idle_s = float(_idle_s(forward_s, backward_s, np.array(low), limit, m))
                if m * (forward_s + backward_s) + idle_s <= most_s:
                    left = _TICKS - int(self._ticks(np.array(forward_s + backward_s), step_s))
                    found[left] = max(found.get(left, 0.0), float(self._work[end]))
        return found

    def _limit(self, part: Part) -> int:
        """The forwards that the coordinator has memory for, 0 where not one fits."""
        costs = self._fleet.costs[0]
        free_bytes = costs.memory_bytes * (1 + _EXACTLY) - costs.device.embedding_bytes
        free_bytes -= costs.layer_bytes[part.end]
        free_bytes -= costs.largest_bytes if part.recompute and part.end else 0.0
        return in_flight_limit(free_bytes, self._fleet.activation_bytes(part), self._m)

    def _stages(
        self, left_s: Floats, step_s: float, low: float, high: float, *, after_coordinator: bool
    ) -> Stages:
        one, m = self._choices[after_coordinator], self._m
        here_s = left_s[:, None] - one.round_trip_s + _EXACTLY * step_s  # S, of shape (R, C)
        # A path of `low` or more, of which step - here is in front, leaves this round at least;
        # what is left may be a tick too much for each stage before.
        rounded_s = step_s / _TICKS * self._most_stages
        round_s = np.maximum(0.0, here_s - rounded_s - (step_s - low))
        idle_s = _idle_s(one.forward_s, one.backward_s, round_s, one.limit, m)
        may = (one.limit > 0) & (one.work > 0) & (here_s >= one.nic_s)
        may &= here_s >= m * one.seconds + idle_s
        rounds = (m - 1) // np.maximum(1, one.limit)
        may &= low + rounds * round_s <= step_s * (1 + _EXACTLY)
        # As the last stage it ends the path, which is step - here + last_s, `high` at most.
        beside_s = np.maximum(one.last_nic_s, step_s - high)
        ends = one.may_be_last & (here_s >= np.maximum(m * one.last_s, one.last_s + beside_s))
        return Stages(
            np.where(may, one.work, -np.inf),
            np.where(ends, one.work, -np.inf),
            self._ticks(one.round_trip_s + one.seconds, step_s),
            self._uses(one.group, one.relayed_s, step_s),
        )


def _idle_s(
    forward_s: Floats | float,
    backward_s: Floats | float,
    round_s: Floats,
    limit: Integers | int,
    m: int,
) -> Floats:
    """How long a stage has nothing to do, as in `bounds._idle_s` with inputs that come at once: its
    first backward begins `round_s` less that backward after its first forward, and until then it
    does `limit` forwards at most; at the end of the step likewise."""
    before = np.maximum(0.0, round_s - backward_s - limit * forward_s)
    after = np.maximum(0.0, round_s - forward_s - limit * backward_s)
    return np.where(limit < m, before + after, np.maximum(before, after))


class _SeveralStages(_OneStageEach):
    """Several stages on some devices, whose NICs carry more for it; one of these devices may have
    the last stage of all. Ranges of the path say nothing here."""

    _narrow, _rounds = 1.0, _SEVERAL_ROUNDS

    def __init__(self, rules: Rules, most_s: float) -> None:
        super().__init__(rules, most_s, chunks=True)
        # Who has one stage and comes last need not have the head.
        self._choices = {
            first: one._replace(last_s=one.seconds, may_be_last=one.may_be_last | (one.limit > 0))
            for first, one in self._choices.items()
        }
        self._device_choices = {
            first: device_choices(rules, self._groups, after_coordinator=first)
            for first in (True, False)
        }
        self._work_is_whole = bool(np.ptp(np.diff(self._work)) < _EXACTLY)
        self._capacity = {d: capacity_of(rules, d) for d in rules.devices}
        devices = {d: rules.fleet.costs[d].device for d in rules.devices}
        self._head_s = {d: one.head_forward_s + one.head_backward_s for d, one in devices.items()}

    def _starts(self, step_s: float, low: float) -> dict[int, float]:
        before_s = sum(self._embedding)
        own = self._capacity[0]
        spare_s = np.array(step_s - self._m * before_s)
        work = float(self._most_work(spare_s, own.unit_s, own.most_work))
        left = _TICKS - int(self._ticks(np.array(before_s), step_s))
        if work + self._work_of_workers(step_s - before_s) < self._needed(step_s) * (1 - _EXACTLY):
            return {}
        several = {left: work} if left >= 0 else {}
        return {**super()._starts(step_s, low), **several}

    def _work_of_workers(self, left_s: float) -> float:
        """The most work of all workers, each as if only its best boundary were in front."""
        one, found = self._device_choices[True], 0.0
        for k, group in enumerate(self._groups):
            every = (group.from_coordinator, *group.from_workers)
            here_s = max(0.0, left_s - min(into.round_trip_s for into in every))
            own = int(np.flatnonzero(one.group == k)[0])
            most = self._most_work(np.array(here_s), one.unit_s[own], one.most_work[own])
            found += group.size * float(most)
        return found

    def _stages(
        self, left_s: Floats, step_s: float, low: float, high: float, *, after_coordinator: bool
    ) -> Stages:
        single = super()._stages(left_s, step_s, low, high, after_coordinator=after_coordinator)
        one = self._device_choices[after_coordinator]
        here_s = left_s[:, None] - one.round_trip_s + _EXACTLY * step_s
        work = np.where(here_s > 0, self._most_work(here_s, one.unit_s, one.most_work), -np.inf)
        work = np.where(here_s >= one.nic_s, work, -np.inf)
        uses = self._uses(one.group, one.relayed_s, step_s)
        uses[_LAST] = one.has_last
        ticks = self._ticks(one.round_trip_s + one.layer_s, step_s)
        return Stages(
            np.hstack([single.middle, work]),
            np.hstack([single.last, work]),
            np.hstack([single.ticks, ticks]),
            np.hstack([single.uses, uses]),
        )

    def _most_work(
        self, spare_s: Floats, unit_s: Floats | float, most_work: Floats | float
    ) -> Floats:
        """The work that a device does in so many seconds of a step, at most what it has memory for;
        where all layers have the same work that of whole ones."""
        with np.errstate(divide="ignore", invalid="ignore"):
            in_time = np.where(unit_s > 0, spare_s / (self._m * np.asarray(unit_s)), math.inf)
        work = np.minimum(np.minimum(in_time, most_work), self._work[-1])
        work = np.maximum(0.0, work)
        return np.floor(work + _EXACTLY) if self._work_is_whole else work

    def _needed(self, step_s: float) -> float:
        """The work of all layers and, since the stages here have no head, what a device cannot do
        because it has the head: the least of all."""
        lost = []
        for d, head_s in self._head_s.items():
            unit_s, _, most_work = self._capacity[d]
            units = head_s / unit_s if unit_s > 0 else 0.0
            beside = float(self._most_work(np.array(step_s - self._m * head_s), unit_s, most_work))
            # Where memory and not time is short the head may cost nothing.
            spare = float(self._most_work(np.array(math.inf), unit_s, most_work)) - beside
            lost.append(min(math.floor(units) if self._work_is_whole else units, max(0.0, spare)))
        return float(self._work[-1]) + min(lost)
