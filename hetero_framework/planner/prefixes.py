"""Whether layouts of one stage per device could take a step of T seconds: from the embedding on,
one stage after the other, all that no bound rules out.

Of two ways to lay the same layers over the same devices one is dropped if the other is no worse in
all that decides what may follow: the seconds in front, there and back, the longest forward and
backward there, the fewest forwards that a stage stores, and what the coordinator relays (and the
last device, where links differ). What is left need not be feasible, but what is dropped is not
needed: if nothing reaches the last layer, no layout takes T seconds or less.

- A stage must be ready in time as `step_bound` counts: a micro-batch's way there and back to it,
  its work, and what it waits for a slower stage in front or for memory (`idle_s`).
- The micro-batch's whole path is taken to be the shortest of a range, since a longer one lets
  stages wait longer; the question is asked for each range.
- What is in front must leave so much time that those devices which are left could cover the rest:
  a dynamic programme that pays prices for devices says how much (`relaxation`). It knows the
  slowest pace in front.
- Seconds in front are rounded down, so that more ways are alike. Of those that one way stands for
  it is the latest that says how long stages behind it wait, since who comes later waits less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_framework.planner.choices import work_of_layers
from hetero_framework.planner.covering import Floats, Integers
from hetero_framework.planner.layout import Part
from hetero_framework.planner.partition import Rules

MOST_DEVICES = 32  # a set of them is the bits of a number
_GRAINS = 2_000  # of a step: in front, seconds are whole ones of these
_BUCKETS = 3  # of fronts with about the same pace, that one programme looks at
_MANY = 1_500  # fronts that are worth a programme of their own
_ALIKE = 6  # as many as are kept are looked at, or more
_COMPARED = 3  # neighbours in the order by seconds, of which one may make the other needless
_SWEEPS = 8
_EXACTLY = 1e-9

Columns = TypeVar("Columns", "_Fronts", "_Arrivals")


def idle_s(
    times_s: tuple[Any, Any], paces_s: tuple[Any, Any], round_s: Floats, held: Any, m: int
) -> Floats:
    """As in `step_bound`: how long a stage that stores so many forwards has nothing to do, before
    its first micro-batch is back after `round_s` and behind the last. `times_s` are those of
    forward and backward, `paces_s` what the slowest in front takes for one."""
    before, after = (
        _idle_s(work_s, pace_s, np.maximum(0.0, round_s - other_s), held)
        for work_s, pace_s, other_s in zip(times_s, paces_s, times_s[::-1], strict=True)
    )
    # If nothing is left between them that could be the same time.
    are_all = (before[1] >= m) & (after[1] >= m)
    return np.where(are_all, np.maximum(before[0], after[0]), before[0] + after[0])


def _idle_s(work_s: Any, pace_s: Any, span_s: Floats, held: Any) -> tuple[Floats, Floats]:
    """Seconds without work in `span_s` seconds in which only one kind comes, at most one in
    `pace_s`, and how many of them are done by then."""
    with np.errstate(divide="ignore", invalid="ignore"):
        come = np.where(np.asarray(pace_s) > 0, span_s / pace_s * (1 - _EXACTLY), np.inf)
    count = np.minimum(held, np.floor(come))
    more = np.minimum(held, count + 1)
    whole_s, rest_s = count * (pace_s - work_s), span_s - more * work_s
    found_s = np.maximum(0.0, np.maximum(whole_s, rest_s))
    done = np.where(whole_s > rest_s, count, more)
    return found_s, np.where(found_s > 0, done, 0.0)


class Front(NamedTuple):
    """What is known of all stages in front: seconds of the longest forward and backward, at least,
    and how much more than it says the way there and back may take."""

    forward_s: float
    backward_s: float
    late_s: float


class Question(NamedTuple):
    """A step of `step_s` seconds, `most_s` with what rounding may add, in which a micro-batch is
    under way for `low` to `high`; the coordinator's NIC can relay for `relays_s` of it. `prices`
    are those of the devices, by number, `relay_price` that of a relayed second, and `others` what
    all else that has a price costs. `behind` says how much work those behind a front can
    cover for whole parts of a step that are left, from `least_parts` on, up to `parts` for all of
    it."""

    step_s: float
    most_s: float
    low: float
    high: float
    relays_s: float
    needed: float
    prices: Floats
    relay_price: float
    others: float
    behind: Callable[[Front], Floats]
    least_parts: int
    parts: int

    def parts_left(self, wait_s: Floats) -> Integers:
        """Rounded up, from `least_parts` on."""
        parts = (self.step_s - wait_s) * (self.parts / self.step_s) * (1 + _EXACTLY)
        return np.ceil(parts).astype(np.int64) - self.least_parts


class _Fronts(NamedTuple):
    """Layers up to `end` laid out, an array of each: the devices' bits and the last of them,
    seconds there and back, at least and at most (of those that it stands for), longest forward and
    backward, fewest stored forwards, seconds relayed, and the prices of the devices left."""

    used: Integers
    last: Integers
    end: Integers
    wait_s: Floats
    late_s: Floats
    forward_s: Floats
    backward_s: Floats
    held: Integers
    relayed_s: Floats
    left: Floats


class _Arrivals(NamedTuple):
    """A front (by number) and the boundary behind it into a device, an array of each: seconds
    there and back with the boundary, at least and at most, longest forward and backward, seconds
    relayed, and what the boundary adds to what the device's NICs have to carry."""

    front: Integers
    device: Integers
    wait_s: Floats
    late_s: Floats
    forward_s: Floats
    backward_s: Floats
    relayed_s: Floats
    in_s: Floats
    out_s: Floats


class Prefixes:
    """The search. `budget` says how many fronts it may still keep: in each question half of what is
    left, so that easier ones can follow one that is too hard."""

    def __init__(self, rules: Rules, budget: int) -> None:
        self.budget = budget
        self._rules, self._fleet = rules, rules.fleet
        fleet, costs = rules.fleet, rules.fleet.costs
        self._m, self._layers = fleet.micro_batches, fleet.layers
        self._work = work_of_layers(fleet)
        self._forward_s = np.array([one.forward_s for one in costs])
        self._backward_s = np.array([[one.backward_s, one.recompute_s] for one in costs])
        self._weights = np.array([one.layer_bytes for one in costs])
        self._kept = np.array([[one.kept_bytes, one.recomputed_bytes] for one in costs])
        self._room = np.array([one.memory_bytes * (1 + _EXACTLY) for one in costs])
        self._largest = np.array([one.largest_bytes for one in costs])
        self._head_bytes = np.array([one.device.head_bytes for one in costs])
        heads = [one.device.head_forward_s + one.device.head_backward_s for one in costs]
        self._head_s = np.array(heads)
        self._stores = np.array([fleet.stores(Part(0, 0, end)) for end in range(fleet.layers + 1)])
        short = [fleet.is_short_of_memory(Part(d, 0, fleet.layers)) for d in range(len(costs))]
        self._again = np.array(short) & rules.checkpointing
        self._goes_back = np.array([fleet.goes_back(k) for k in range(fleet.layers + 1)], np.int64)
        self._edges = self._table()
        self._out_s, self._answer_s = self._edges[:2].min(axis=(1, 2, 4))
        self._links_differ = self._do_links_differ()
        # Of devices that differ in nothing the first ones are taken first.
        self._before = np.zeros(len(costs), np.int64)
        for d, first in rules.kinds.items():
            alike = (other for other in rules.devices if other < d)
            self._before[d] = sum(1 << other for other in alike if rules.kinds[other] == first)

    def _table(self) -> Floats:
        """Of each boundary: seconds of an activation, of a gradient, there and back, latency, and
        relayed ones; by whether a gradient comes back, by way, and by both devices. Infinite where
        there is none."""
        rules, count = self._rules, len(self._fleet.costs)
        found = np.full((5, 2, 2, count, count), np.inf)
        for position in (0, self._layers):
            back = int(self._fleet.goes_back(position))
            pairs = [(a, b) for a in rules.devices for b in rules.devices if b and a != b]
            for a, b in pairs:
                for way, (edge, _) in enumerate(rules.ways(a, b, position)):
                    both_s = edge.forward_s + edge.backward_s
                    relayed_s = 0.0 if edge.relay is None else both_s
                    found[:, back, way, a, b] = (
                        edge.forward_s, edge.backward_s, both_s + 2 * edge.latency_s,
                        edge.latency_s, relayed_s,
                    )  # fmt: skip
        return found

    def _do_links_differ(self) -> bool:
        """Whether it matters from which worker a boundary comes."""
        workers = [d for d in self._rules.devices if d]
        pairs = [(a, b) for a in workers for b in workers if a != b]
        found = np.array([self._edges[..., a, b] for a, b in pairs])
        return len(pairs) > 0 and bool((found != found[0]).any())

    def may(self, question: Question) -> bool:
        """Whether a layout may take so long: that none does is proved."""
        least = self.budget // 2
        fronts = self._first(question)
        for _ in self._rules.devices[1:]:
            if not len(fronts.end):
                return False
            arrivals = self._arrivals(question, fronts)
            if self._can_end(question, fronts, arrivals):
                return True
            longer = self._longer(question, fronts, arrivals)
            if len(longer.end) > _ALIKE * (self.budget - least):
                self.budget = least
                return True
            fronts = self._undominated(longer)
            self.budget -= len(fronts.end)
            if self.budget <= least:
                self.budget = least
                return True
        return False

    def _first(self, question: Question) -> _Fronts:
        """The coordinator's stage: any number of layers, also none."""
        device = self._fleet.costs[0].device
        begin_s = device.embedding_forward_s, device.embedding_backward_s
        ends = np.arange(self._layers + 1)
        found = []
        for again in range(1 + self._again[0]):
            forward_s = begin_s[0] + self._forward_s[0]
            backward_s = begin_s[1] + self._backward_s[0, again]
            held = self._held(np.zeros_like(ends), np.zeros_like(ends), ends, again)
            none = np.zeros(len(ends))
            times_s = forward_s, backward_s
            fits = self._fits(question, none, none, times_s, (none, none), held, held)
            late_s = forward_s + backward_s
            left = np.full(len(ends), question.prices.sum())
            fronts = _Fronts(
                np.ones_like(ends), np.zeros_like(ends), ends, self._rounded(question, late_s),
                late_s, *times_s, held, none, left,
            )  # fmt: skip
            found.append(_chosen(fronts, fits))
        return _joined(found)

    def _arrivals(self, question: Question, fronts: _Fronts) -> _Arrivals:
        """Every device behind every front."""
        devices = np.arange(len(self._room))
        bits = fronts.used[:, None]
        free = (bits >> devices & 1 == 0) & (bits & self._before == self._before)
        found = []
        for way in (0, 1):
            there = self._edges[:, self._goes_back[fronts.end], way, fronts.last]
            front, device = np.nonzero(free & np.isfinite(there[0]))
            there_s, back_s, path_s, latency_s, relayed_s = there[:, front, device]
            wait_s = fronts.wait_s[front] + path_s
            one = _Arrivals(
                front,
                device,
                wait_s,
                fronts.late_s[front] + path_s,
                np.maximum(fronts.forward_s[front], there_s),
                np.maximum(fronts.backward_s[front], back_s),
                fronts.relayed_s[front] + relayed_s,
                (self._m - 1) * there_s - latency_s,
                (self._m - 1) * back_s,
            )
            in_time = (self._m * one.relayed_s <= question.relays_s * (1 + _EXACTLY)) & (
                wait_s < question.high
            )
            found.append(_chosen(one, in_time))
        return _joined(found)

    def _can_end(self, question: Question, fronts: _Fronts, arrivals: _Arrivals) -> bool:
        """Whether one of these devices can have all layers that are left, and the head."""
        d, start = arrivals.device, fronts.end[arrivals.front]
        for again in (0, 1):
            seconds = self._forward_s[d, -1] - self._forward_s[d, start]
            seconds += self._backward_s[d, again, -1] - self._backward_s[d, again, start]
            seconds += self._head_s[d]
            pace_s = np.maximum(seconds, arrivals.forward_s)
            ready = arrivals.wait_s + seconds + (self._m - 1) * pace_s
            fits = (ready <= question.most_s) & (arrivals.wait_s + seconds <= question.high)
            fits &= self._held(d, start, np.full(len(d), self._layers), again, head=True) > 0
            if (fits & (self._again[d] | (again == 0))).any():
                return True
        return False

    def _longer(self, question: Question, fronts: _Fronts, arrivals: _Arrivals) -> _Fronts:
        """All stages behind these boundaries that are ready in time, and let others be."""
        values, bucket = self._values(question, fronts)
        found = [_chosen(fronts, np.zeros(0, np.int64))]
        for again in (0, 1):
            here = np.flatnonzero(self._again[arrivals.device] | (again == 0))
            for length in range(1, self._layers + 1):
                one = _chosen(arrivals, here)
                d, start = one.device, fronts.end[one.front]
                end = np.minimum(start + length, self._layers)
                forward_s = self._forward_s[d, end] - self._forward_s[d, start]
                backward_s = self._backward_s[d, again, end] - self._backward_s[d, again, start]
                ready = one.wait_s + self._m * (forward_s + backward_s) <= question.most_s
                ready &= start + length <= self._layers
                here = here[ready]
                if not len(here):
                    break
                wait_s = self._rounded(question, one.wait_s + forward_s + backward_s)
                left = fronts.left[one.front] - question.prices[d]
                row = question.parts_left(wait_s)
                behind = values[bucket[one.front], np.clip(row, 0, values.shape[1] - 1)]
                covered = self._work[end] + behind + left + question.others
                covered -= question.relay_price * one.relayed_s
                which = np.flatnonzero(ready & (row >= 0) & (covered >= question.needed))
                one, start, end = _chosen(one, which), start[which], end[which]
                forward_s, backward_s = forward_s[which], backward_s[which]
                d, before = one.device, _chosen(fronts, one.front)
                own = self._held(d, start, end, again)
                held = np.minimum(own, before.held)
                times_s, paces_s = (forward_s, backward_s), (one.forward_s, one.backward_s)
                fits = self._fits(question, one.wait_s, one.late_s, times_s, paces_s, held, own)
                in_s = one.in_s + backward_s + self._m * self._answer_s[d]
                out_s = one.out_s + forward_s + self._m * self._out_s[d]
                fits &= one.wait_s + np.maximum(in_s, out_s) <= question.most_s
                longer = _Fronts(
                    before.used | (1 << d),
                    d,
                    end,
                    wait_s[which],
                    one.late_s + forward_s + backward_s,
                    np.maximum(one.forward_s, forward_s),
                    np.maximum(one.backward_s, backward_s),
                    held,
                    one.relayed_s,
                    left[which],
                )
                found.append(_chosen(longer, fits))
        return _joined(found)

    def _values(self, question: Question, fronts: _Fronts) -> tuple[Floats, Integers]:
        """What those behind can cover, for some slowest paces, and which of them holds for which
        front."""
        order, bucket = np.argsort(fronts.forward_s), np.zeros(len(fronts.end), np.int64)
        rows = []
        buckets = np.array_split(order, min(_BUCKETS, 1 + len(order) // _MANY))
        for number, some in enumerate(buckets):
            few = _chosen(fronts, some)
            late_s = (few.late_s - few.wait_s).max()
            front = Front(few.forward_s.min(), few.backward_s.min(), late_s)
            rows.append(question.behind(front))
            bucket[some] = number
        return np.array(rows), bucket

    def _fits(
        self,
        question: Question,
        wait_s: Floats,
        late_s: Floats,
        times_s: tuple[Floats, Floats],
        paces_s: tuple[Floats, Floats],
        held: Integers,
        own: Integers,
    ) -> NDArray[np.bool_]:
        """Whether a stage behind `wait_s` is ready in time, and its memory lets it."""
        m, round_s = self._m, np.maximum(0.0, question.low - late_s)
        wait_s = wait_s + m * (times_s[0] + times_s[1])
        wait_s += idle_s(times_s, paces_s, round_s, np.maximum(1, held), m)
        ways = (m - 1) // np.maximum(1, own)
        needed_s = np.maximum(wait_s, question.low + ways * round_s)
        return (own > 0) & (needed_s <= question.most_s)

    def _held(
        self, d: Integers, start: Integers, end: Integers, again: int, *, head: bool = False
    ) -> Integers:
        """How many forwards of layers [start, end) devices have memory for, 0 for none."""
        room = self._room[d] - (self._weights[d, end] - self._weights[d, start])
        room = room - self._largest[d] * (end > start) * again
        room = room - self._head_bytes[d] * head
        room = room - self._fleet.costs[0].device.embedding_bytes * (d == 0)
        each = (self._kept[d, again, end] - self._kept[d, again, start]) * self._stores[end]
        fits = np.where(each > 0, room / np.where(each > 0, each, 1.0), self._m)
        return np.where(room < 0, 0, np.clip(fits, 0, self._m)).astype(np.int64)

    def _rounded(self, question: Question, seconds: Floats) -> Floats:
        grain = question.step_s / _GRAINS
        return np.floor(seconds / grain) * grain

    def _undominated(self, fronts: _Fronts) -> _Fronts:
        """Without those beside which another one is no worse, as far as neighbours tell."""
        key = fronts.used * (self._layers + 1) + fronts.end
        last = fronts.last if self._links_differ else np.zeros_like(fronts.last)
        order = np.lexsort((fronts.backward_s, fronts.forward_s, fronts.wait_s, last, key))
        fronts, key, last = _chosen(fronts, order), key[order], last[order]
        for _ in range(_SWEEPS):
            keep, late_s = np.ones(len(key), bool), fronts.late_s.copy()
            for distance in range(1, min(_COMPARED + 1, len(key))):
                a, b = (slice(None, -distance), slice(distance, None))
                worse = (key[a] == key[b]) & (last[a] == last[b])
                for least in (fronts.wait_s, fronts.forward_s, fronts.backward_s, fronts.relayed_s):
                    worse &= least[a] <= least[b]
                worse &= fronts.held[a] >= fronts.held[b]
                worse &= keep[a]
                needless = np.zeros(len(key), bool)
                needless[b] = worse
                worse &= ~needless[a]  # what it stands for would be forgotten
                keep[b] &= ~worse
                late_s[a] = np.where(worse, np.maximum(late_s[a], late_s[b]), late_s[a])
            if keep.all():
                break
            fronts = _chosen(fronts._replace(late_s=late_s), keep)
            key, last = key[keep], last[keep]
        return fronts


def _chosen(columns: Columns, which: Integers | NDArray[np.bool_]) -> Columns:
    return type(columns)._make([column[which] for column in columns])


def _joined(parts: Sequence[Columns]) -> Columns:
    return type(parts[0])._make([np.concatenate(same) for same in zip(*parts, strict=True)])
