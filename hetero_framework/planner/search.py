"""The best layout of a fleet.

1. `Partition` finds layouts whose slowest stage is as fast as can be, for every number of stages;
   where many pairs of workers have no link, also along chains of those that have.
2. They are improved one move at a time by `step_bound` with their memory's in-flight limits, and
   interleaved.
3. The simulator decides between the best few dozen. From the best of these it goes on to faster
   neighbours: with layers moved, devices exchanged, and on few devices stages split or joined. Of
   interleaved layouts the critical path of the simulated step says which layer to move.
4. Where few enough layouts could be better still, `Enumeration` has them all simulated: then the
   plan is proved. Else `least_step` says how much better any could be.

All limits are counts of work, never of time: the same profile gives the same plan everywhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import NamedTuple

from hetero_framework.planner import moves
from hetero_framework.planner.chains import chains
from hetero_framework.planner.critical_path import critical_path
from hetero_framework.planner.enumeration import Enumeration, TooMany
from hetero_framework.planner.layout import Fleet, Layout
from hetero_framework.planner.partition import Partition, Rules, step_range
from hetero_framework.planner.policies import portfolio
from hetero_framework.planner.readiness import Policy
from hetero_framework.planner.relaxation import least_step
from hetero_framework.planner.simulator import (
    Profile,
    SimulatedSpan,
    occupations,
    simulate,
    step_bound,
)
from hetero_framework.planner.tuning import TunedSchedule, tune

# Candidates.
_DEPTHS = (1.0, 0.4)  # shares of the micro-batches in flight that stages are to have memory for
_LONGER = (1.0, 1.02, 1.06, 1.15, 1.4)  # times the shortest step, for which there are seeds
_DOUBLINGS = 12  # of a step that is too short
_PRECISION = 0.01  # of the shortest step
_SEEDS = 6
_BEAM = 2_000  # partial layouts that are kept, for all pairs of devices together
_LEAST_BEAM = 12
_CLIMB = 40  # moves by bounds
_ORDERS = 400  # of devices, in all
_STAGES = 30_000  # that are scored in each part of the search
_SHARPNESS = 20  # of the mean that stands for a step
_MANY = 8  # stages; of more, fewer chunks are tried
_CHUNKS = (2, 3, 4, 5, 6, 8)
_CHUNKS_OF_MANY = (2, 3)
_FRONT = (0.3, 0.5, 0.7)  # of the devices come again behind all
_SHARES = (0.25, 0.4)  # of their layers are in front
_MOST_DEVICES = 96
_MOST_CHAINED = 64  # of a chain
_SHORTER = 8  # lengths of a chain that are tried

# Simulation. A task is a forward or a backward of one micro-batch.
_SIMULATED = 24  # candidates with one stage per device
_QUICK_TASKS = 1_500  # of one quick simulation
_MOST_TASKS = 150_000  # of all quick simulations
_DESCENTS = 4  # from interleaved layouts of different numbers of stages
_WRAPPED = 3  # from those in which the first devices come again
_PROMISING = 1.2  # times the best step: those that take longer are no such start
_AGAIN = 2  # descents from the best of what the others have not come by
_NEIGHBOURS = 10  # that bounds promise most of
_TRIED = 8  # that take most from the critical path
_NO_FASTER = 1.005  # times as long: no schedule will make it faster
_FEW = 6  # devices
_FINALISTS = 2  # that are tuned, and three times as many where steps are short:
_FINAL_TASKS = 3_000

# Proof.
_NODES = (20_000, 40_000)  # of the enumeration, for many devices and for few
_PROOF_STAGES = 120_000  # that are scored for few devices
_PROOF_TASKS = 200_000
_TUNED = 60  # times as many tasks are simulated to tune a layout as it has
_HOPELESS = 1.03  # of the best step: where simple windows take longer no schedule will do
_EXACTLY = 1e-9
_WORTH_CHUNKS = 1.01  # times the step that one stage for each device would have to take


@dataclass(frozen=True)
class Evaluated:
    """A layout and the schedule by which the product would run it."""

    fleet: Fleet
    layout: Layout
    schedule: TunedSchedule

    @cached_property
    def seconds(self) -> float:
        """The predicted step."""
        return self.schedule.forecast.seconds

    @property
    def bound_s(self) -> float:
        """What no schedule of this layout can beat."""
        schedule = self.schedule
        limits = self.fleet.memory_limits(self.layout)
        return step_bound(schedule.profile, schedule.micro_batches, limits)


def evaluated(
    fleet: Fleet, layout: Layout, *, max_in_flight: int | None = None
) -> Evaluated | None:
    """The layout as the product would run it; None where it does not fit."""
    limits = fleet.memory_limits(layout)
    if limits is None:
        return None
    profile, m = fleet.pipeline(layout), fleet.micro_batches
    if max_in_flight is None:
        # The plan names the window, and the run then tunes what is left.
        max_in_flight = tune(profile, m, in_flight_limits=limits).max_in_flight
    schedule = tune(profile, m, max_in_flight=max_in_flight, in_flight_limits=limits)
    return Evaluated(fleet, layout, schedule)


@dataclass(frozen=True)
class Found:
    """The best layout, and a lower bound of the step of all."""

    best: Evaluated
    lower_bound_s: float
    proved: bool


class Search:
    """One search. `rules` say what a layout may be."""

    def __init__(self, rules: Rules) -> None:
        self._all = self._rules = rules
        self._fleet = rules.fleet
        self._m = rules.fleet.micro_batches
        self._scores: dict[Layout, float] = {}
        self._bounds: dict[Layout, float] = {}
        self._quick: dict[Layout, float] = {}
        self._by: dict[Layout, int] = {}  # which of the schedules took that
        self._tasks = self._orders = 0
        self._passed: set[Layout] = set()  # by descents
        self._recorded: tuple[Layout, list[SimulatedSpan]] = ((), [])  # the last that was
        self._stages_left = _STAGES
        chained = self._along_chains()
        self._rules = _without_the_weakest(rules, chained)
        here = set(self._rules.devices)
        self._chained = [layout for layout in chained if here.issuperset(p.device for p in layout)]

    def run(self) -> Found | None:
        """None where nothing fits."""
        simple = self._climbed([*self._seeds(), *self._chained])
        if not simple:
            return None
        self._stages_left = _STAGES
        candidates = [*simple, *self._interleaved(simple)]
        for layout in candidates:
            quickest = None if _has_chunks(layout) else next(iter(self._fastest(1)), None)
            self._simulate(layout, quickest)
        self._stages_left = _STAGES
        ends = self._descents(few=len(simple[0]) <= _MANY)
        largest = max(2 * len(layout) * self._m for layout in self._quick)
        finalists = max(_FINALISTS, min(3 * _FINALISTS, _FINAL_TASKS // largest))
        plain = self._fastest(1, lambda layout: not _has_chunks(layout))
        others = ends if finalists > _FINALISTS else ()
        last = dict.fromkeys([*self._fastest(finalists), *plain, *others])
        best = min(map(self._evaluated, last), key=_preference)
        best, proved = self._proved(best)
        if proved and not self._rules.chunks:
            return Found(best, best.seconds, True)
        bound = least_step(self._all, best.seconds)
        if proved and bound >= (1 - _EXACTLY) * best.seconds:
            return Found(best, best.seconds, True)
        return Found(best, bound, False)

    # -- candidates -------------------------------------------------------------------------------

    def _seeds(self) -> list[Layout]:
        """Layouts of the shortest steps that the programme reaches, and of some longer ones."""
        low, high = step_range(self._fleet, self._rules.devices)
        for depth in _DEPTHS:
            partition = self._partition(depth)
            if depth < 1 and not partition.is_short_of_memory:
                break
            # What fits with more micro-batches in flight fits with fewer.
            high = least = self._least(partition, low, high)
            for factor in _LONGER:
                self._note(partition.layouts(least * factor))
        return heapq.nsmallest(_SEEDS, self._scores, key=self._score)

    def _along_chains(self) -> list[Layout]:
        """The best layouts whose workers are the first ones of a chain."""
        partition, found = self._partition(), dict[Layout, None]()
        for chain in chains(self._rules):
            most = min(len(chain), _MOST_CHAINED, self._fleet.layers)
            for length in sorted({max(1, int(most / 1.3**k)) for k in range(_SHORTER)}):
                layout = moves.shortest(partition, [0, *chain[:length]])
                if layout is not None:
                    found[layout] = None
        return heapq.nsmallest(_SEEDS // 2, found, key=self._score)

    def _least(self, partition: Partition, low: float, high: float) -> float:
        """The shortest step that the programme reaches."""
        for _ in range(_DOUBLINGS):
            if self._note(partition.layouts(high)):
                break
            low, high = high, 2 * high
        while high - low > _PRECISION * high:
            # Most fleets are used well: look nearer to the lower end.
            middle = 0.7 * low + 0.3 * high
            if self._note(partition.layouts(middle)):
                high = middle
            else:
                low = middle
        return high

    def _partition(self, depth: float = 1.0) -> Partition:
        beam = max(_LEAST_BEAM, _BEAM // len(self._rules.devices) ** 2)
        return Partition(self._rules, depth=depth, beam=beam)

    def _note(self, layouts: Iterable[Layout]) -> bool:
        """Score layouts; whether any of them fits."""
        return min(map(self._score, layouts), default=math.inf) < math.inf

    def _score(self, layout: Layout) -> float:
        """What the step is thought to take: more than its bound, the more devices and NICs are near
        it, since they cannot all be busy at the right moment. Infinite where it does not fit or is
        not permitted."""
        if layout not in self._scores:
            if self._stages_left <= 0:
                return math.inf
            self._stages_left -= len(layout)
            self._scores[layout], self._bounds[layout] = self._estimates(layout)
        return self._scores[layout]

    def _bound(self, layout: Layout) -> float:
        """What no schedule of the layout can beat."""
        self._score(layout)
        return self._bounds.get(layout, math.inf)

    def _estimates(self, layout: Layout) -> tuple[float, float]:
        limits = self._fleet.memory_limits(layout)
        if limits is None or not self._rules.permits(layout):
            return math.inf, math.inf
        busy = occupations(self._fleet.pipeline(layout), self._m, limits)
        bound = max(busy)
        if bound == 0:
            return 0.0, 0.0
        near = sum((seconds / bound) ** _SHARPNESS for seconds in busy)
        return round(bound * near ** (1 / _SHARPNESS), 12), bound

    def _climbed(self, seeds: list[Layout]) -> list[Layout]:
        """The layouts on the way from the seeds upwards, the best of all first."""
        for seed in seeds:
            self._climb(seed)
        fit = [layout for layout, score in self._scores.items() if score < math.inf]
        return heapq.nsmallest(_SIMULATED, fit, key=self._score)

    def _climb(self, layout: Layout) -> Layout:
        partition = self._partition()
        for _ in range(_CLIMB):
            near = [*self._shifted(layout), *moves.toggled(self._rules, layout)]
            better = min(near, key=self._score, default=layout)
            if self._score(better) >= self._score(layout):
                others = self._reordered(partition, layout)
                better = min(others, key=self._score, default=layout)
            if self._score(better) >= self._score(layout):
                break
            layout = better
        return layout

    def _reordered(self, partition: Partition, layout: Layout) -> Iterator[Layout]:
        """As long as there is work left for it."""
        step_s = self._bound(layout)
        for other in moves.reordered(self._rules, partition, layout, step_s):
            self._orders += 1
            if self._orders > _ORDERS:
                return
            yield other

    def _shifted(self, layout: Layout) -> Iterator[Layout]:
        """One layer moved, away from the devices with most work where there are many stages."""
        if len(layout) <= _MANY:
            return moves.shifted(layout)
        profile = self._fleet.pipeline(layout)
        work = [f + b for f, b in zip(profile.forward_s, profile.backward_s, strict=True)]
        loads = dict.fromkeys(profile.devices, 0.0)
        for d, seconds in zip(profile.devices, work, strict=True):
            loads[d] += seconds
        heavy = set(heapq.nlargest(2, loads, key=loads.__getitem__))
        light = set(heapq.nsmallest(_MANY, loads, key=loads.__getitem__))
        sources, targets = (
            [k for k, d in enumerate(profile.devices) if d in chosen] for chosen in (heavy, light)
        )
        return moves.shifted(layout, sources, targets)

    def _interleaved(self, layouts: list[Layout]) -> list[Layout]:
        """The best of each way to give devices several stages."""
        if not self._rules.chunks or self._rules.pins:
            return []
        found: dict[Layout, None] = {}
        few = len(layouts[0]) <= _MANY
        for chunks in (None, *(_CHUNKS if few else _CHUNKS_OF_MANY)):
            changed = [
                moves.closed(self._rules, layout)
                if chunks is None
                else moves.interleaved(self._rules, layout, chunks)
                for layout in layouts[: 1 + few]
            ]
            whole = [layout for layout in changed if layout is not None]
            # The bound knows little of what few stored forwards cost: even may be worse.
            even = [self._evened(layout) for layout in whole]
            for some in (even, whole) if chunks is None else (even,):
                fit = {layout for layout in some if self._score(layout) < math.inf}
                found.update(dict.fromkeys(heapq.nsmallest(2, fit, key=self._score)))
        return list(found)

    def _wrapped(self, layouts: Iterable[Layout]) -> list[Layout]:
        """The fastest ways in which the first devices of one of the layouts come twice."""
        if not self._rules.chunks or self._rules.pins:
            return []
        found = {}
        for layout, front, share in product(layouts, _FRONT, _SHARES):
            wrapped = moves.wrapped(self._rules, layout, round(front * len(layout)), share)
            if _has_chunks(wrapped):
                found[wrapped] = self._simulate(wrapped, alone=True)
        most_s = _PROMISING * min(self._quick.values())
        fit = [layout for layout, seconds in found.items() if seconds < most_s]
        return heapq.nsmallest(_WRAPPED, fit, key=found.__getitem__)

    def _evened(self, layout: Layout) -> Layout:
        """Layers moved, and stages made to compute again or not, as long as the bound falls."""
        for _ in range(_CLIMB // 4):
            near = [*self._shifted(layout), *moves.toggled(self._rules, layout)]
            better = min(near, key=self._score, default=layout)
            if self._score(better) >= self._score(layout):
                break
            layout = better
        return layout

    def near(self, layout: Layout) -> float:
        """About what a step takes once layers have been moved between these stages; for comparing
        profiles, not for plans."""
        layout = self._evened(layout)
        return self._simulate(layout)

    # -- simulation -------------------------------------------------------------------------------

    def _simulate(
        self, layout: Layout, like: Layout | None = None, *, alone: bool = False
    ) -> float:
        """Seconds of a step by the better of a few schedules; long steps by a part of theirs. Where
        the schedule that is the best one of a layout `like` it (or the first of all) is no faster,
        others are not tried, and with `alone` none is.
        """
        if layout in self._quick:
            return self._quick[layout]
        limits = self._fleet.memory_limits(layout)
        least = math.inf if alone else min(self._quick.values(), default=math.inf)
        if limits is None or self._bound(layout) >= least or self._tasks > _MOST_TASKS:
            return math.inf
        profile, m = self._fleet.pipeline(layout), self._judged(layout)
        rest_s = 0.0
        if m < self._m:
            rest_s = step_bound(profile, self._m, limits) - step_bound(profile, m, limits)
        schedules = list(enumerate(_schedules(profile, m, limits)))
        if like is not None:
            schedules.sort(key=lambda entry: entry[0] != self._by[like])
        found = []
        for number, schedule in schedules:
            spans: list[SimulatedSpan] | None = [] if alone else None
            taken = self._run(profile, m, schedule, spans)
            if spans is not None:
                self._recorded = (layout, spans)
            found.append((taken + rest_s, number))
            if alone or (like is not None and taken + rest_s > _NO_FASTER * self._quick[like]):
                break
        self._quick[layout], self._by[layout] = min(found)
        return self._quick[layout]

    def _judged(self, layout: Layout) -> int:
        """By how many micro-batches a layout is judged."""
        p = len(layout)
        return min(self._m, max(2 * p, _QUICK_TASKS // (2 * p)))

    def _run(
        self,
        profile: Profile,
        m: int,
        schedule: _Schedule,
        spans: list[SimulatedSpan] | None = None,
    ) -> float:
        """Seconds of m micro-batches."""
        size, policy, limits = schedule
        self._tasks += 2 * profile.num_stages * m
        done = simulate(profile, m, size, policy=policy, in_flight_limits=limits, spans=spans)
        return done.seconds

    def _relieved(self, layout: Layout) -> Iterator[Layout]:
        """Neighbours with one layer moved, those first that take most from the critical path of the
        simulated step. With one stage per device bounds say as much."""
        if not _has_chunks(layout):
            return
        fleet, limits = self._fleet, self._fleet.memory_limits(layout)
        assert limits is not None  # it was simulated
        profile, m = fleet.pipeline(layout), self._judged(layout)
        recorded, spans = self._recorded
        if recorded != layout:
            spans = []
            self._run(profile, m, _schedules(profile, m, limits)[self._by[layout]], spans)
        costs = []  # seconds of the path that a layer of each stage takes
        for part, on_path in zip(layout, critical_path(profile, spans), strict=True):
            forward_s, backward_s = fleet.mean_layer_s(part.device, recompute=part.recompute)
            costs.append(on_path.forwards * forward_s + on_path.backwards * backward_s)
        every = range(len(layout))
        pairs = [(costs[b] - costs[a], a, b) for a in every for b in every if costs[b] < costs[a]]
        for _, a, b in sorted(pairs):
            if layout[a].end > layout[a].start:
                yield moves.relieved(self._rules, layout, a, b)

    def _fastest(
        self, count: int, where: Callable[[Layout], bool] = lambda layout: True
    ) -> list[Layout]:
        return heapq.nsmallest(count, filter(where, self._quick), key=self._quick.__getitem__)

    def _starts(self, count: int) -> list[Layout]:
        """The fastest interleaved layouts, each of another number of stages."""
        found: dict[int, Layout] = {}
        for layout in self._fastest(len(self._quick), _has_chunks):
            found.setdefault(len(layout), layout)
        return list(found.values())[:count]

    def _descents(self, *, few: bool) -> list[Layout]:
        """Where descents end. They begin at the best layout with one stage per device, at
        interleaved ones, and then at the best of all that none has come by."""
        one_each = self._fastest(1, lambda layout: not _has_chunks(layout))
        ends = [self._descend(start, _MOST_TASKS // 2, guided=False) for start in one_each]
        several = [*(self._starts(_DESCENTS) if few else ()), *self._wrapped(ends)]
        spare = _MOST_TASKS - self._tasks
        for k, start in enumerate(several, start=1):
            most = _MOST_TASKS - spare * (len(several) + 1 - k) // (len(several) + 1)
            ends.append(self._descend(start, most))
        for _ in range(_AGAIN if several else 0):
            left = (x for x in self._fastest(len(self._quick)) if x not in self._passed)
            ends += [self._descend(start, _MOST_TASKS) for start in islice(left, 1)]
        return ends

    def _descend(self, layout: Layout, most_tasks: int, *, guided: bool = True) -> Layout:
        """To a faster neighbour, as long as there is one: with `guided` one of those that relieve
        the critical path, else the fastest of the near, else the fastest of further ones."""
        partition = self._partition()

        def near() -> Iterator[Layout]:
            yield from self._shifted(layout)
            yield from moves.toggled(self._rules, layout)
            yield from self._reordered(partition, layout)

        def further() -> Iterator[Layout]:
            if self._rules.chunks and not self._rules.pins and len(self._rules.devices) <= _FEW:
                yield from moves.shifted(layout, count=2)
                yield from moves.shifted(layout, count=3)
                yield from moves.split(self._rules, layout)
                yield from moves.joined(self._rules, layout)

        better: Layout | None = layout
        while better is not None:
            layout = better
            self._passed.add(layout)
            better = (
                (guided and self._first_faster(self._relieved(layout), layout, most_tasks))
                or self._fastest_of(set(near()), layout, most_tasks)
                or self._fastest_of(set(further()), layout, most_tasks)
            )
        return layout

    def _first_faster(
        self, near: Iterable[Layout], layout: Layout, most_tasks: int
    ) -> Layout | None:
        """The first neighbour that is faster by the layout's own schedule, of those not simulated
        before; None after a few that are not."""
        now = self._quick[layout]
        new = (x for x in near if x not in self._quick and self._bound(x) < now)
        for other in islice(new, _TRIED):
            if self._tasks > most_tasks:
                break
            if self._simulate(other, layout, alone=len(layout) > _MANY) < now:
                return other
        return None

    def _fastest_of(self, near: set[Layout], layout: Layout, most_tasks: int) -> Layout | None:
        """The fastest of some neighbours, those simulated that promise most; None if none is faster
        than the layout."""
        now = self._quick[layout]
        promising = [x for x in near if x not in self._quick and self._bound(x) < now]
        for other in heapq.nsmallest(_NEIGHBOURS, promising, key=self._score):
            if self._tasks > most_tasks:
                break
            self._simulate(other, layout)
        known = [x for x in near if x in self._quick]
        better = min(known, key=self._quick.__getitem__, default=layout)
        return better if self._quick[better] < now else None

    # -- proof ------------------------------------------------------------------------------------

    def _evaluated(self, layout: Layout) -> Evaluated:
        found = evaluated(self._fleet, layout)
        assert found is not None  # only what fits is simulated
        return found

    def _proved(self, best: Evaluated) -> tuple[Evaluated, bool]:
        """The best of all layouts with one stage per device, where few enough could be better; else
        of those that were looked at."""
        open_layouts, is_all = self._open(best)
        tasks = 0
        for layout in sorted(open_layouts, key=self._bound):
            if self._bound(layout) >= (1 - _EXACTLY) * best.seconds:
                break
            windows = {len(layout), min(2 * len(layout), self._m), self._m}
            tasks += 2 * len(windows) * len(layout) * self._m
            if self._least_of(layout, windows) < _HOPELESS * best.seconds:
                tasks += _TUNED * len(layout) * self._m
                best = min(best, self._evaluated(layout), key=_preference)
            if tasks > _PROOF_TASKS:
                return best, False
        return best, is_all

    def _open(self, best: Evaluated) -> tuple[list[Layout], bool]:
        """Layouts with one stage per device that could be better, and whether these are all; of
        many devices all or none, since a few say nothing."""
        most_s = (1 - _EXACTLY) * best.seconds
        found: list[Layout] = []
        few = len(self._rules.devices) <= _FEW
        self._stages_left = _PROOF_STAGES if few else _STAGES
        try:
            for layout in Enumeration(self._rules, most_s, nodes=_NODES[few]).layouts():
                if self._stages_left <= 0:
                    raise TooMany
                if self._bound(layout) < most_s:
                    found.append(layout)
        except TooMany:
            return (found if few else []), False
        return found, True

    def _least_of(self, layout: Layout, windows: Iterable[int]) -> float:
        """Seconds of a step by the best of these windows, backward first."""
        limits, profile = self._fleet.memory_limits(layout), self._fleet.pipeline(layout)
        return min(
            simulate(profile, self._m, size, in_flight_limits=limits).seconds for size in windows
        )


def _preference(one: Evaluated) -> float:
    """The shortest step first, of equal ones that with fewer stages. Several stages on a device
    have to be worth it: each boundary is another one at which a run is slower than simulated."""
    seconds = one.seconds * (1 + _EXACTLY * len(one.layout))
    return _WORTH_CHUNKS * seconds if _has_chunks(one.layout) else seconds


def _has_chunks(layout: Layout) -> bool:
    return len({part.device for part in layout}) < len(layout)


class _Schedule(NamedTuple):
    """A way to run a step."""

    max_in_flight: int
    policy: Policy
    in_flight_limits: tuple[int, ...]


def _schedules(profile: Profile, micro_batches: int, limits: tuple[int, ...]) -> list[_Schedule]:
    """A few windows and policies, of which one is near the best; no stage stores more forwards than
    `limits` say. First comes what is best most often."""
    p = profile.num_stages
    bound = step_bound(profile, micro_batches)
    path = math.ceil(profile.path_s * micro_batches / bound) if bound > 0 else p
    policies = portfolio(profile, micro_batches)
    if profile.num_devices < p:
        least = max(p, path)
        widest = min(micro_batches, 2 * least + p)
        narrower = min(micro_batches, least * 5 // 4 + 1)
        return [
            _Schedule(size, policy, held)
            for size in dict.fromkeys((widest, narrower))
            for policy in policies[1:]
            for held in [limits if size == widest else _tapered(size, limits)]
        ]
    few, many = (min(micro_batches, times * max(p, path)) for times in (1, 3))
    ahead = _tapered(many, limits) if min(limits[:-1], default=many) < micro_batches else limits
    found = [_Schedule(many, policies[0], limits), _Schedule(many, policies[1], ahead)]
    return [*found, _Schedule(few, policies[0], limits)] if p <= _MANY else found


def _tapered(size: int, limits: tuple[int, ...]) -> tuple[int, ...]:
    """Fewer forwards towards the end of the pipeline, where they come back sooner."""
    p = len(limits)
    return tuple(min(-(-size * (p - k) // p), limit) for k, limit in enumerate(limits))


def _without_the_weakest(rules: Rules, layouts: Iterable[Layout]) -> Rules:
    """At most so many devices as a search can look at: those of some layouts, the best first, and
    the quickest by layer and link."""
    if len(rules.devices) <= _MOST_DEVICES:
        return rules
    fleet = rules.fleet

    def weakness(d: int) -> tuple[bool, float]:
        wire_s = fleet.edge(0, d, fleet.layers, False).forward_s if d else 0.0
        return (d != 0 and d not in rules.pins, max(fleet.layer_s(d), wire_s))

    strongest = sorted(rules.devices, key=weakness)
    in_layouts = (part.device for layout in layouts for part in layout)
    chosen = dict.fromkeys([*strongest[: 1 + len(rules.pins)], *in_layouts, *strongest])
    return replace(rules, devices=tuple(sorted(list(chosen)[:_MOST_DEVICES])))
