"""A step that no layout of a fleet can beat.

`least_step` asks for a step of T seconds whether the devices could cover all layers at all, and
halves the interval until it knows. What it counts:

- A device d that takes x layers of c seconds works m c x; it begins after a micro-batch has been
  through everything in front of it and back, e seconds, so x <= (T - e) / (m c), a whole number
  where all layers are alike, and no more than its memory holds.
- Who comes k-th waits for those in front: all layers that the devices from the k-th on cannot cover
  are in front of it, on the fastest devices at best, behind k - 1 boundaries of the best links.
- The devices are matched with the places behind the coordinator as covers most.
- Whoever has a stage on either side receives an activation and a gradient per micro-batch; where no
  two workers have a link, the coordinator's NIC carries all of it.
- With several stages on a device nobody waits for more than one layer of each device in front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from operator import add
from typing import NamedTuple

from hetero_framework.planner.partition import Rules
from hetero_framework.planner.simulator import Edge

_PRECISION = 2e-4
_MATCHED_DEVICES = 24
_EXACTLY = 1e-9


def least_step(rules: Rules, most_s: float) -> float:
    """A lower bound of the step of all layouts that the rules permit; `most_s` is what one is known
    to reach."""
    return min(_Relaxation(rules, chunks).least(most_s) for chunks in {False, rules.chunks})


class _Mode(NamedTuple):
    """A way to run a device's layers: seconds per unit of work, of which backward, bytes of a
    layer, and of what it keeps of one micro-batch, and the bytes there are."""

    unit_s: float
    backward_s: float
    weights: float
    held: float
    free: float


class _Place(NamedTuple):
    """A place behind the coordinator: the least seconds before its first and after its last work,
    and the micro-batches that a stage there has to hold unless it is the last."""

    wait_s: float
    held: int = 1
    is_last: bool = False


class _Relaxation:
    def __init__(self, rules: Rules, chunks: bool) -> None:
        fleet = rules.fleet
        self._m = fleet.micro_batches
        self._chunks = chunks
        self._checkpointing = rules.checkpointing
        self._fleet = fleet
        local = fleet.costs[0]
        # The work of a layer, so that a device takes c seconds for each unit of it or more.
        both = list(map(add, local.forward_s, local.backward_s))
        unit = [after - before for before, after in pairwise(both)]
        unit = unit if min(unit) > 0 else [1.0] * fleet.layers
        scale = fleet.layers / sum(unit)
        self._work = [value * scale for value in unit]
        self._total = sum(self._work)
        self._whole = max(self._work) - min(self._work) < _EXACTLY
        self._ways = {d: self._modes(d) for d in rules.devices}
        self._c = {d: ways[0].unit_s for d, ways in self._ways.items()}
        self._heads_s = {
            d: fleet.costs[d].device.head_forward_s + fleet.costs[d].device.head_backward_s
            for d in rules.devices
        }
        self._embedding_s = local.device.embedding_forward_s + local.device.embedding_backward_s
        self._others = [d for d in rules.devices if d != 0]
        self._fastest = sorted(self._c, key=lambda d: self._c[d])
        self._links(rules)

    # -- what is fixed ----------------------------------------------------------------------------

    def _modes(self, d: int) -> list[_Mode]:
        """How a device may run its layers, as if each cost no more than its cheapest."""
        costs, fleet, found = self._fleet.costs[d], self._fleet, []
        free = costs.memory_bytes * (1 + _EXACTLY)
        free -= costs.device.embedding_bytes if d == 0 else 0.0
        layers = range(fleet.layers)
        weights = min(costs.layer_bytes[k + 1] - costs.layer_bytes[k] for k in layers)
        for recompute in (False, True) if self._checkpointing else (False,):
            backward_s = costs.recompute_s if recompute else costs.backward_s
            kept = costs.recomputed_bytes if recompute else costs.kept_bytes
            found.append(
                _Mode(
                    self._least(costs.forward_s, backward_s),
                    self._least(backward_s),
                    weights,
                    min((kept[k + 1] - kept[k]) * fleet.stores_layer(k) for k in layers),
                    free - (costs.largest_bytes if recompute else 0.0),
                )
            )
        if self._chunks and len(found) > 1:  # each of a device's stages has its own
            plain, again = found
            found = [plain._replace(held=min(plain.held, again.held))]
        return found

    def _least(self, *sums: Sequence[float]) -> float:
        """Seconds per unit of work, of the layer where they are fewest."""
        return min(sum(s[k + 1] - s[k] for s in sums) / work for k, work in enumerate(self._work))

    def _lost(self, pace: float) -> float:
        """Units that are covered less because somebody holds the head."""
        found = []
        for d, head_s in self._heads_s.items():
            units = head_s / self._c[d] if self._c[d] > 0 else 0.0
            # Where memory and not time is short the head may cost nothing.
            most, beside = self._covers(d, math.inf), self._covers(d, pace - head_s)
            found.append(min(math.floor(units) if self._whole else units, most - beside))
        return max(0.0, min(found))

    def _links(self, rules: Rules) -> None:
        """What boundaries take at least: on the way, and of the NICs."""
        fleet, others = self._fleet, self._others
        self._relayed_s = math.inf
        if len(self._c) > _MATCHED_DEVICES:
            self._links_of_many()
            return

        def edges(a: int, b: int) -> list[Edge]:
            return [edge for edge, _ in rules.ways(a, b, fleet.least_boundary(a))]

        def path_s(edge: Edge) -> float:
            return edge.forward_s + edge.backward_s + 2 * edge.latency_s

        first = [edge for d in others for edge in edges(0, d)]
        between = [(a, b, edge) for a in others for b in others if a != b for edge in edges(a, b)]
        home = [edge for d in others for edge in edges(d, 0)] if self._chunks else []
        self._first_s = min(map(path_s, first), default=0.0)
        again = [path_s(edge) for edge in (*first, *home)] if self._chunks else []
        rest = [path_s(edge) for _, _, edge in between]
        self._rest_s = min(rest + again, default=0.0)
        # A device's least seconds to receive an activation, and to receive a gradient.
        self._in_s = {d: min(edge.forward_s for edge in edges(0, d)) for d in others}
        self._back_s = dict.fromkeys(others, math.inf)
        for d in others if self._chunks else ():
            self._back_s[d] = min(edge.backward_s for edge in edges(d, 0))
        for a, b, edge in between:
            self._in_s[b] = min(self._in_s[b], edge.forward_s)
            self._back_s[a] = min(self._back_s[a], edge.backward_s)
        # What the coordinator's NIC sends of a boundary that it relays, and of its own first one.
        if not any(fleet.can_go_direct(a, b) for a in others for b in others if a != b):
            self._relayed_s = min((e.forward_s + e.backward_s for _, _, e in between), default=0.0)
        self._sent_s = min((edge.forward_s for edge in first), default=0.0)

    def _links_of_many(self) -> None:
        """The same as if every boundary had the best of all links in each direction."""
        profile = self._fleet.profile
        fastest = max(link.bytes_per_s for link in profile.links)
        latency_s = min(link.latency_s for link in profile.links)
        there_s, back_s = profile.activation_bytes / fastest, profile.gradient_bytes / fastest
        if not self._fleet.goes_back(1):
            back_s = 0.0
        self._rest_s = there_s + back_s + 2 * latency_s
        self._first_s = self._rest_s if self._fleet.goes_back(0) else there_s + 2 * latency_s
        self._sent_s = there_s
        if all("local" in (link.sender, link.receiver) for link in profile.links):
            self._relayed_s = there_s + back_s

    # -- whether a step could be that short -------------------------------------------------------

    def least(self, most_s: float) -> float:
        """The least of all numbers of devices."""
        if len(self._c) > _MATCHED_DEVICES:
            return self._halved(most_s, self._possible_for_many)[0]
        least, high = most_s, most_s
        for places in range(len(self._c)):
            possible = partial(self._possible, places=places)
            if possible(high):
                low, high = self._halved(high, possible)
                least = min(least, low)
        return least

    def _halved(self, high: float, possible: Callable[[float], bool]) -> tuple[float, float]:
        """Between which steps it begins to be possible."""
        low = 0.0
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            if possible(middle):
                high = middle
            else:
                low = middle
        return low, high

    def _covers(self, d: int, spare_s: float, held: int = 1, behind_s: float = math.inf) -> float:
        """Units that a device can take in `spare_s` per micro-batch with so many of them in flight,
        its backwards in `behind_s`."""
        if spare_s < 0 or behind_s < 0:
            return 0.0
        most = 0.0
        for way in self._ways[d]:
            units = self._total
            if way.unit_s > 0:
                units = min(units, spare_s / way.unit_s)
            if way.backward_s > 0:
                units = min(units, behind_s / way.backward_s)
            if (each := way.weights + held * way.held) > 0:
                units = min(units, self._units(way.free / each))
            most = max(most, units)
        return float(math.floor(most + _EXACTLY)) if self._whole else most

    def _units(self, layers: float) -> float:
        """The most work that so many layers may be."""
        if layers <= 0:
            return 0.0
        return layers if self._whole else layers * max(self._work)

    def _possible(self, step_s: float, places: int) -> bool:
        """Whether the coordinator and so many others could take a step of `step_s`."""
        pace = step_s / self._m
        path_s = self._path(step_s, places)
        if path_s > step_s:
            return False
        if not places:
            own = self._covers(0, pace - self._embedding_s - self._heads_s[0])
            return own >= self._total - _EXACTLY
        middles = [d for d in self._others if self._in_s[d] + self._back_s[d] <= pace]
        ends = [d for d in self._others if self._in_s[d] <= pace and d not in middles]
        if places > len(middles) + bool(ends):
            return False
        relayed_s = (places - 1) * self._relayed_s if places > 1 else 0.0
        if relayed_s < math.inf and not self._chunks and self._sent_s + relayed_s > pace + _EXACTLY:
            return False
        # Every backward of a stage but the first comes after the first has been everywhere.
        first_alone = self._chunks or self._m == 1
        behind_s = math.inf if first_alone else (step_s - path_s) / (self._m - 1)
        held = 1 if self._chunks else self._held(step_s, path_s, path_s)
        own = self._covers(0, pace - self._embedding_s, held, behind_s)
        needed = self._total + self._lost(pace) - own - _EXACTLY

        def most(place: _Place) -> list[float]:
            """What each device covers there; those that can only be last are one column."""
            spare_s = (step_s - place.wait_s) / self._m
            if place.is_last:
                last = max((self._covers(d, spare_s) for d in ends), default=0.0)
                return [*(self._covers(d, spare_s) for d in middles), last]
            found = [self._covers(d, spare_s, place.held, behind_s) for d in middles]
            return [*found, 0.0]

        found = self._places(step_s, path_s, places, own, most)
        rows = [most(place) for place in found]
        return matched(rows) >= needed

    def _least_work(self, units: float, step_s: float) -> float:
        """Seconds that so many units take on the fastest devices that can take them, as many as it
        needs; infinite where all of them cannot."""
        worked = 0.0
        for d in self._fastest:
            taken = min(units, self._covers(d, step_s / self._m))
            worked += taken * self._c[d]
            units -= taken
            if units <= _EXACTLY:
                return worked
        return math.inf

    def _path(self, step_s: float, places: int) -> float:
        """Least seconds of one micro-batch through everything and back."""
        ends_s = self._embedding_s + min(self._heads_s.values())
        links_s = self._first_s + (places - 1) * self._rest_s if places else 0.0
        return ends_s + links_s + self._least_work(self._total, step_s)

    def _places(
        self,
        step_s: float,
        path_s: float,
        places: int,
        own: float,
        most: Callable[[_Place], list[float]],
    ) -> list[_Place]:
        """The places behind the coordinator."""
        links = [self._first_s + place * self._rest_s for place in range(places)]
        found = [_Place(self._embedding_s + link_s) for link_s in links]
        if self._chunks:
            layer_s = min(self._c.values()) * min(self._work)
            waits = [p.wait_s + k * layer_s for k, p in enumerate(found)]
            return [_Place(wait_s, 1, is_last=True) for wait_s in waits]
        for _ in range(3):
            for k in range(places):
                # Whoever is last holds one micro-batch and may cover more.
                behind = max(most(found[k]._replace(is_last=True)))
                behind += sum(sorted(most(found[k]), reverse=True)[: places - k - 1])
                worked = self._least_work(max(0.0, self._total - behind), step_s)
                wait_s = min(step_s, self._embedding_s + links[k] + worked)
                wait_s = max(wait_s, *(place.wait_s for place in found[: k + 1]))
                in_front = own + sum(
                    sorted(most(found[0]._replace(is_last=False)), reverse=True)[:k]
                )
                rest = max(0.0, self._total - in_front)
                round_s = self._least_work(rest, step_s) + self._rest_s
                held = self._held(step_s, path_s, round_s)
                found[k] = _Place(wait_s, held, k == places - 1)
        return found

    def _held(self, step_s: float, path_s: float, round_s: float) -> int:
        """The micro-batches that a stage has to hold where one takes `round_s` to come back: with
        fewer, (m - 1) // held ways there and back would not fit into the step."""
        if round_s <= 0 or round_s == math.inf:
            return 1
        ways = int((step_s - path_s) / round_s + _EXACTLY)
        return (self._m - 1) // (ways + 1) + 1

    def _possible_for_many(self, step_s: float) -> bool:
        """The same where devices are too many to be matched: the fastest first, each with all that
        it can do in time, as if layers could be split and there were memory for all."""
        pace = step_s / self._m
        places = len(self._others)
        if self._relayed_s < math.inf and not self._chunks and self._relayed_s > 0:
            places = min(places, 1 + int(max(0.0, pace - self._sent_s) / self._relayed_s))
        wait_s, covered = self._embedding_s, 0.0
        for place, d in enumerate(self._fastest[: places + 1]):
            spare_s = (step_s - wait_s) / self._m
            if spare_s <= 0:
                break
            if self._c[d] == 0:
                return True
            covered += spare_s / self._c[d]
            work_s = self._c[d] * min(self._work) if self._chunks else spare_s
            wait_s += work_s + (self._rest_s if place else self._first_s)
        return covered >= self._total - _EXACTLY


def matched(rows: Sequence[Sequence[float]]) -> float:
    """The largest sum of one entry of each row, no two of one column (fewer where columns are
    fewer): the Hungarian method, O(rows^2 columns)."""
    n, width = len(rows), max(len(rows), len(rows[0]))
    cost = [[-value for value in row] + [0.0] * (width - len(row)) for row in rows]
    row_price, column_price = [0.0] * (n + 1), [0.0] * (width + 1)
    owner = [0] * (width + 1)  # the row that has a column; rows and columns from 1
    for row in range(1, n + 1):
        owner[0] = row
        column = 0
        least, came_from = [math.inf] * (width + 1), [0] * (width + 1)
        done = [False] * (width + 1)
        while owner[column]:
            done[column] = True
            here, delta, following = owner[column], math.inf, 0
            for k in range(1, width + 1):
                if done[k]:
                    continue
                reduced = cost[here - 1][k - 1] - row_price[here] - column_price[k]
                if reduced < least[k]:
                    least[k], came_from[k] = reduced, column
                if least[k] < delta:
                    delta, following = least[k], k
            for k in range(width + 1):
                if done[k]:
                    row_price[owner[k]] += delta
                    column_price[k] -= delta
                else:
                    least[k] -= delta
            column = following
        while column:
            owner[column] = owner[came_from[column]]
            column = came_from[column]
    return -sum(cost[owner[k] - 1][k - 1] for k in range(1, width + 1) if owner[k])
