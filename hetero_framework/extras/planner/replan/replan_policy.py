"""Decides from the times of its steps whether a run should take another plan. Pure: no clock, no
thread.

1. `Judge.note` is called after every step. When each quarter of the last STEPS steps shows that the
   work could be spread much better, it asks a `Question`.
2. `answer` searches for the plan that would gain most. It proposes that plan if the simulator shows
   a gain of GAIN or more, and a plan half of the way to it where the quarters disagree on the gain.
3. After a change of plan the gain is awaited. If it does not come, the plan before is proposed
   again, and this one never again. The pause after each change is twice the one before.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

from hetero_framework.config import StageSpec
from hetero_framework.config.plan import Plan, PlanEntry
from hetero_framework.engine.schedule.simulator import Edge, Profile, simulate
from hetero_framework.engine.schedule.tuning import TunedSchedule, tune
from hetero_framework.errors import PlanError
from hetero_framework.extras.planner.layout import Fleet, Layout, Part
from hetero_framework.extras.planner.planning import plan
from hetero_framework.extras.planner.profile import FleetProfile
from hetero_framework.extras.planner.replan.measured_fleet import LayerWork, Observed

STEPS = 20
"""Steps that are judged together, and the first pause after a change. With twice as many a slower
device is noticed twice as late; with half as many a quarter is the median of two or three."""
GAIN = 0.10
"""The share of a step that a plan must promise to save. Noisy steps easily promise half of it, and
each change costs a transfer of layers."""
_QUARTERS = 4
_LEAST_GAIN = 0.02
"""Share of a step: a plan that saves less, or less than a quarter of its promise, is given back."""
_WARM = 2  # atypical steps after a change
_ALIKE = 0.10
"""Share of a stage's time: profiles that differ by no more are not searched again once refused."""
_UNCERTAIN = 0.25
"""Share of a stage's time: quarters that are further apart do not tell how much work to move, so
half of the way is tried first."""
WorkerId = int | str
Stages = tuple[StageSpec, ...]
MakeFleet = Callable[[Observed], FleetProfile]


@dataclass(frozen=True)
class Proposal:
    """A plan to take, and the share of the step that it is predicted to save; `returns` if it is
    the plan before, since the present one's gain has not come."""

    stages: Stages
    gain: float
    returns: bool = False


@dataclass(frozen=True)
class _Awaited:
    """A gain that was promised: the plan before, its step, and the evidence at that time."""

    stages: Stages
    step_s: float
    gain: float
    observed: Observed


@dataclass(frozen=True)
class Question:
    """The last steps under a plan: the medians of their quarters and of all, and the evidence on
    all devices at that time."""

    stages: Stages
    observed: Observed
    quarters: tuple[Profile, ...]
    median: Profile


class Judge:
    """Judges the steps of a run, each of which is noted. `work` is that of the model's layers,
    `stages` the plan in force, and `fleet` makes a profile of the observations."""

    def __init__(self, work: LayerWork, stages: Sequence[StageSpec], fleet: MakeFleet) -> None:
        self.observed = Observed(work)
        self._work = work
        self._fleet = fleet
        self._stages = tuple(stages)
        self._changes = 0
        self._banned: list[Stages] = []
        self._awaited: _Awaited | None = None
        self._refused: Profile | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._seen: list[Profile] = []
        self._quarters: deque[Profile] = deque(maxlen=_QUARTERS)
        self._step_s: deque[float] = deque(maxlen=STEPS)

    @property
    def step_s(self) -> float:
        """The median of the last steps; 0 before the first."""
        return statistics.median(self._step_s) if self._step_s else 0.0

    def note(self, seen: Profile, step_s: float) -> Question | Proposal | None:
        """Note a step of `step_s` seconds, with these times of stages and edges. Return a question
        to search for (`answer`), or the plan before where this one's gain has not come."""
        self._steps += 1
        if self._steps <= _WARM:
            return None
        self._seen.append(seen)
        self._step_s.append(step_s)
        if len(self._seen) < STEPS // _QUARTERS:
            if not self._changes and not self._quarters:
                self.observed.note(self._stages, seen)  # better than nothing
            return None
        self._quarters.append(median(self._seen))
        self._seen = []
        if len(self._quarters) < _QUARTERS:
            self.observed.note(self._stages, self._quarters[-1])
            return None
        return self._judged(median(list(self._quarters)))

    @property
    def pause(self) -> int:
        """Steps after a change in which no other one is asked for."""
        return STEPS * 2 ** (self._changes - 1) if self._changes else 0

    def refuse(self, question: Question) -> None:
        """Note that no answer is taken: times like these are not judged again."""
        if question.stages == self._stages:
            self._refused = question.median

    def taken(self, stages: Sequence[StageSpec], proposal: Proposal | None = None) -> None:
        """Note that another plan is in force: the proposed one, or one taken for other reasons."""
        self._awaited = None
        if proposal is not None and proposal.returns:
            self._banned.append(self._stages)
        elif proposal is not None:
            known = deepcopy(self.observed)
            self._awaited = _Awaited(self._stages, self.step_s, proposal.gain, known)
        self._changes += proposal is not None
        self._stages, self._refused = tuple(stages), None
        self._begin()

    def answer(self, question: Question) -> Proposal | None:
        """The plan to take, if any. A search, which takes seconds for many layers: it may run in
        another thread while steps go on."""
        present, fleet = question.stages, Fleet(self._fleet(self._after(question, question.median)))
        try:
            result = plan(fleet.profile, allow=_allowed(present))
        except PlanError:
            return None
        best = _stages([(e["id"], e["start"], e["end"]) for e in result.shard_plan])
        wanted = _half_way(present, best) if _disagree(question.quarters) else best
        for stages in dict.fromkeys((wanted, best)):
            if stages in (present, *self._banned):
                continue
            gain = self._gain(question, fleet, stages)
            if gain >= GAIN + _noise(question.quarters):
                return Proposal(stages, gain)
        return None

    # -- inside ---------------------------------------------------------------------------------

    def _judged(self, together: Profile) -> Question | Proposal | None:
        """The decision from the last steps, of which these are the medians."""
        self.observed.note(self._stages, together)
        if (awaited := self._awaited) is not None:
            self._awaited = None
            return self._checked(awaited)
        if self._steps < self.pause or (self._refused and _are_alike(self._refused, together)):
            return None
        if not all(self._may_gain(quarter) for quarter in self._quarters):
            return None
        known = deepcopy(self.observed)
        return Question(self._stages, known, tuple(self._quarters), together)

    def _checked(self, awaited: _Awaited) -> Proposal | None:
        """None where the gain of the plan in force has come, else the plan before. It is measured
        against the present step of the plan before: the step that it took, times the growth of its
        simulated step since then. A device with no more work than before that is slower now would
        be so under both plans; where one has got more work, its old pace counts."""
        now = deepcopy(self.observed)
        more_work = [
            d
            for d in {stage.owner for stage in self._stages}
            if self._work_on(d, self._stages) > self._work_on(d, awaited.stages)
        ]
        now.keep_pace(awaited.observed, more_work)
        then_s, now_s = (
            tuned(Fleet(self._fleet(observed)), awaited.stages)
            for observed in (awaited.observed, now)
        )
        if then_s is None or now_s is None:
            return None
        expected_s = awaited.step_s * now_s.forecast.seconds / then_s.forecast.seconds
        gain = 1 - self.step_s / expected_s
        if gain < max(_LEAST_GAIN, awaited.gain / 4):
            return Proposal(awaited.stages, -gain, returns=True)
        return None

    def _work_on(self, owner: WorkerId, stages: Stages) -> float:
        """The work that a plan gives to a process."""
        return sum(self._work.of(stage) for stage in stages if stage.owner == owner)

    def _may_gain(self, seen: Profile) -> bool:
        """Whether spreading all work perfectly over these devices, links left out, would gain
        enough: a cheap look before a search. Per micro-batch the pipeline takes what its slowest
        device or boundary does; perfectly spread it would take work / sum of speeds."""
        busy: dict[int, float] = {}
        work: dict[int, float] = {}
        for k, stage in enumerate(self._stages):
            d = seen.devices[k]
            busy[d] = busy.get(d, 0.0) + seen.forward_s[k] + seen.backward_s[k]
            work[d] = work.get(d, 0.0) + self._work.of(stage)
        speed = sum(work[d] / busy[d] for d in busy if busy[d] > 0)
        wires = [max(edge.forward_s, edge.backward_s) for edge in seen.edges]
        slowest_s = max(*busy.values(), *wires, 0.0)
        return speed > 0 and sum(work.values()) / speed <= (1 - GAIN) * slowest_s

    @staticmethod
    def _after(question: Question, seen: Profile) -> Observed:
        """The evidence with these times as the last ones."""
        observed = deepcopy(question.observed)
        observed.note(question.stages, seen)
        return observed

    def _gain(self, question: Question, fleet: Fleet, stages: Stages) -> float:
        """The gain of a plan over the present one, in the median; 0 where a quarter of the steps
        promises less than GAIN."""
        present = tuned(fleet, question.stages)
        other = tuned(fleet, stages)
        if present is None or other is None:
            return 0.0
        for quarter in question.quarters:
            measured = Fleet(self._fleet(self._after(question, quarter)))
            now_s = _simulated(measured, question.stages, present)
            if 1 - _simulated(measured, stages, other) / now_s < GAIN:
                return 0.0
        return 1 - other.forecast.seconds / present.forecast.seconds


def median(profiles: Sequence[Profile]) -> Profile:
    """The profile with the median times of profiles that are alike otherwise."""

    def of(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(statistics.median(column) for column in zip(*rows, strict=True))

    def edge(same: Sequence[Edge]) -> Edge:
        times = [(e.forward_s, e.backward_s, e.latency_s) for e in same]
        forward_s, backward_s, latency_s = of(times)
        return Edge(forward_s, backward_s, latency_s, same[-1].relay)

    edges = tuple(map(edge, zip(*(p.edges for p in profiles), strict=True)))
    forward_s, backward_s = (
        of([p.forward_s for p in profiles]),
        of([p.backward_s for p in profiles]),
    )
    return Profile(forward_s, backward_s, profiles[-1].devices, edges)


def _busy(seen: Profile) -> list[float]:
    """Seconds of each stage per micro-batch."""
    return [f + b for f, b in zip(seen.forward_s, seen.backward_s, strict=True)]


def _are_alike(one: Profile, other: Profile) -> bool:
    """Whether no stage's time differs by much."""
    pairs = zip(_busy(one), _busy(other), strict=True)
    return all(abs(a - b) <= _ALIKE * max(a, b) for a, b in pairs)


def _spreads(quarters: Sequence[Profile]) -> list[float]:
    """For each stage, how far the quarters are apart, as a share of its time."""
    spreads = []
    for times in zip(*map(_busy, quarters), strict=True):
        middle = statistics.median(times)
        spreads.append((max(times) - min(times)) / middle if middle > 0 else 0.0)
    return spreads


def _noise(quarters: Sequence[Profile]) -> float:
    """The further gain over GAIN that a plan must promise, since a search finds the plan that noise
    favours: half the mean spread of the stages' times."""
    return statistics.fmean(_spreads(quarters)) / 2


def _disagree(quarters: Sequence[Profile]) -> bool:
    """Whether some stage's time is uncertain."""
    return max(_spreads(quarters)) > _UNCERTAIN


def _allowed(stages: Stages) -> set[str]:
    """The choices of a search: several stages on a process only where the plan has them."""
    return {"chunks"} if len({stage.owner for stage in stages}) < len(stages) else set()


def _stages(cut: Sequence[tuple[WorkerId, int, int]]) -> Stages:
    """A plan's stages, of process, first layer and end."""
    return Plan(tuple(PlanEntry(id=o, start=a, end=b) for o, a, b in cut)).stages


def _half_way(present: Stages, best: Stages) -> Stages:
    """Each boundary moved half of its way, at least by a layer; `best` where others hold stages."""
    if [stage.owner for stage in present] != [stage.owner for stage in best]:
        return best
    ends = [now.end + _half(then.end - now.end) for now, then in zip(present, best, strict=True)]
    starts = [0, *ends[:-1]]
    return _stages([(s.owner, a, b) for s, a, b in zip(present, starts, ends, strict=True)])


def _half(way: int) -> int:
    """Half of it, rounded away from 0."""
    return (way + 1) // 2 if way > 0 else -((1 - way) // 2)


def _layout(fleet: Fleet, stages: Stages) -> Layout:
    """A plan as the planner sees it, direct where it can be, with as few streamed layers as fit."""
    index = {owner: d for d, owner in enumerate(fleet.ids)}
    devices = [index[stage.owner] for stage in stages]
    direct = [False, *(fleet.can_go_direct(a, b) for a, b in pairwise(devices))]
    parts = (
        Part(d, stage.start, stage.end, False, is_direct)
        for d, stage, is_direct in zip(devices, stages, direct, strict=True)
    )
    return fleet.streamed(tuple(parts))[0]


def tuned(fleet: Fleet, stages: Stages) -> TunedSchedule | None:
    """The schedule of a plan on these devices as a run tunes it; None where it does not fit."""
    layout = _layout(fleet, stages)
    limits = fleet.memory_limits(layout)
    if limits is None:
        return None
    return tune(fleet.pipeline(layout), fleet.micro_batches, in_flight_limits=limits)


def _simulated(fleet: Fleet, stages: Stages, schedule: TunedSchedule) -> float:
    """Seconds of a step of a plan on these devices by a schedule that was tuned for other times."""
    return simulate(
        fleet.pipeline(_layout(fleet, stages)),
        fleet.micro_batches,
        schedule.max_in_flight,
        policy=schedule.policy,
        in_flight_limits=schedule.in_flight_limits,
    ).seconds
