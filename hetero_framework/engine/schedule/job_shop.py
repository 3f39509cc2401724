"""Shortens the order of a simulated step, as a job shop, along its critical paths.

Devices and NICs are machines; tasks and transfers are the operations that take turns on them. A
policy orders them by a rule, and shorter steps are mostly exceptions from that rule. So a tabu
search (Nowicki and Smutnicki 1996) begins with the policy's order and swaps two operations that
follow each other at once on a machine, on a critical path of the step. Each such pair is judged by
the longest path through it afterwards (Taillard 1994). The best swap is made even if the step gets
longer by it, and cannot be undone for a while. The shortest step on the way is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD, Task
from hetero_framework.engine.schedule.simulator import Nic, Profile, SimulatedSpan

_VISITS = 200_000
"""Operations that are timed in all, at most 0.3 s; fewer orders of larger steps are tried."""
_LEAST_MOVES = 20  # with fewer nothing is gained
_PATIENCE = 150  # moves after the last shorter step
_TENURE = 8  # moves for which a pair does not change back, plus one per number of operations:
_OPERATIONS = 8
_SAME = 1e-9  # of the step: sums in another order


def shortened(
    profile: Profile,
    spans: Sequence[SimulatedSpan],
    in_flight_limits: Sequence[int],
    max_in_flight: int,
    bound_s: float,
) -> Sequence[SimulatedSpan]:
    """A step of this profile like the simulated one, in an order that takes less time if one is
    found; sorted by beginning. No stage stores more than its `in_flight_limits` of forwards, no
    more than `max_in_flight` micro-batches are under way. The search ends at `bound_s`. Where
    tensors are relayed the order stays as it is: a relay sends on what still comes in, and does so
    in other pieces than are simulated, so a run would lose the gain of an exchange.
    """
    bound_s *= 1 + _SAME
    simulated_s = max((span.ended for span in spans), default=0.0)
    is_large = len(spans) * _LEAST_MOVES > _VISITS
    if is_large or simulated_s <= bound_s or any(span.leg for span in spans):
        return spans
    limits = (min(in_flight_limits[0], max_in_flight), *in_flight_limits[1:])
    operations = _operations(profile, spans, limits)
    shop = JobShop(operations)
    order = shop.shortest(_VISITS // len(spans), bound_s)
    if shop.length >= (1 - _SAME) * simulated_s:
        return spans
    return [
        spans[v]._replace(began=shop.begins[v], ended=shop.begins[v] + operations[v].seconds)
        for v in sorted(order, key=shop.begins.__getitem__)
    ]


class Operation(NamedTuple):
    """An operation that takes `seconds` on all its `machines` at once. `after` has the least delay
    from the start of each earlier operation, by number."""

    seconds: float
    machines: tuple[int | Nic, ...]
    after: tuple[tuple[int, float], ...]


class JobShop:
    """Operations in an order that can be carried out: each begins once those before it on its
    machines have ended and those that it comes `after` allow it.

    `begins[v]` are the seconds until operation v begins, `length` those until all have ended.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        """Begin with the operations in this order."""
        self._operations = operations
        count = len(operations)
        # One more, of no length, stands before the first and behind the last on each machine.
        self._seconds = [*(operation.seconds for operation in operations), 0.0]
        self._after = [operation.after for operation in operations]
        self._followers = _followers(operations)
        self._order = list(range(count))
        self._place = list(range(count))
        self._earlier, self._later = _neighbours(operations, self._order)
        self.begins = [0.0] * (count + 1)
        self._rest = [0.0] * (count + 1)  # least seconds from its beginning to the end of the step
        self._time_from(0)
        self._time_back_from(count - 1)

    @property
    def length(self) -> float:
        return float(max(map(operator.add, self.begins, self._seconds)))

    def shortest(self, moves: int, bound_s: float = 0.0) -> list[int]:
        """Try `moves` orders; keep and return the shortest. Ends early at `bound_s` seconds."""
        best_s, best, found_at = self.length, list(self._order), 0
        kept: dict[tuple[int, int], int] = {}  # until which move
        tenure = _TENURE + len(best) // _OPERATIONS
        for now in range(moves):
            if best_s <= bound_s or now - found_at > _PATIENCE:
                break
            for _, _, u, v in sorted(self._candidates(best_s, kept, now)):
                if self._swap(u, v):
                    kept[u, v] = now + tenure
                    break
            else:
                break
            if (length := self.length) < (1 - _SAME) * best_s:
                best_s, best, found_at = length, list(self._order), now
        self._order = best
        self._earlier, self._later = _neighbours(self._operations, best)
        self._time_from(0)
        return best

    def _candidates(
        self, best_s: float, kept: dict[tuple[int, int], int], now: int
    ) -> Iterator[tuple[int, float, int, int]]:
        """Pairs that may change places: first those that are not kept or would be the shortest
        step, then those that are kept for the shortest; with the longest path through them then.

        Inside a row of critical operations of a machine an exchange shortens nothing, so only its
        first two and its last two are pairs."""
        length = self.length
        for v in self._order:
            for machine, u in self._earlier[v].items():
                if not self._are_critical(u, v, length):
                    continue
                first, last = self._earlier[u][machine], self._later[v][machine]
                is_inside = self._are_critical(first, u, length) and self._are_critical(
                    v, last, length
                )
                if is_inside or any(w == u for w, _ in self._after[v]):
                    continue
                path_s = self._path_s(u, v)
                until = kept.get((v, u), now)
                is_free = until <= now or path_s < (1 - _SAME) * best_s
                yield (0 if is_free else until), path_s, u, v

    def _are_critical(self, u: int, v: int, length: float) -> bool:
        """Whether a longest path, of this length, goes from the end of u to the beginning of v."""
        path_s = self.begins[u] + self._seconds[u] + self._rest[v]
        return path_s >= (1 - _SAME) * length and max(u, v) < len(self._order)

    def _path_s(self, u: int, v: int) -> float:
        """The longest path through u or v once v goes before u, which is right before it now."""
        earlier, later = self._earlier, self._later
        shared = [machine for machine, w in earlier[v].items() if w == u]
        before_v = {**earlier[v], **{machine: earlier[u][machine] for machine in shared}}
        behind_u = {**later[u], **{machine: later[v][machine] for machine in shared}}
        before_u = (w for machine, w in earlier[u].items() if machine not in shared)
        behind_v = (w for machine, w in later[v].items() if machine not in shared)
        v_begins = self._begin(v, before_v.values())
        u_begins = max(self._begin(u, before_u), v_begins + self._seconds[v])
        u_rest = self._rest_from(u, behind_u.values())
        v_rest = max(self._rest_from(v, behind_v), self._seconds[v] + u_rest)
        return max(v_begins + v_rest, u_begins + u_rest)

    def _swap(self, u: int, v: int) -> bool:
        """Let v go before u, which is right before it on a machine, and time all anew; False where
        v needs u, if only indirectly."""
        begin, end = self._place[u], self._place[v]
        needed, first, others = {v}, [], []
        for w in reversed(self._order[begin : end + 1]):
            if w not in needed:
                others.append(w)
                continue
            first.append(w)
            needed.update(before for before, _ in self._after[w])
            needed.update(before for before in self._earlier[w].values() if (before, w) != (u, v))
        if u in needed:
            return False
        self._order[begin : end + 1] = [*reversed(first), *reversed(others)]
        for place in range(begin, end + 1):
            self._place[self._order[place]] = place
        self._link(u, v)
        self._time_from(begin)
        self._time_back_from(end)
        return True

    def _link(self, u: int, v: int) -> None:
        """On each machine where u is right before v: v right before u."""
        earlier, later = self._earlier, self._later
        for machine in [machine for machine, w in earlier[v].items() if w == u]:
            before, behind = earlier[u][machine], later[v][machine]
            earlier[v][machine], later[v][machine] = before, u
            earlier[u][machine], later[u][machine] = v, behind
            later[before][machine], earlier[behind][machine] = v, u

    def _time_from(self, place: int) -> None:
        for v in self._order[place:]:
            self.begins[v] = self._begin(v, self._earlier[v].values())

    def _time_back_from(self, place: int) -> None:
        for v in reversed(self._order[: place + 1]):
            self._rest[v] = self._rest_from(v, self._later[v].values())

    def _begin(self, v: int, before: Iterable[int]) -> float:
        """The begin of v with these right before it on its machines."""
        begins, seconds = self.begins, self._seconds
        begin = 0.0
        for w, lag_s in self._after[v]:
            if (moment := begins[w] + lag_s) > begin:
                begin = moment
        for w in before:
            if (moment := begins[w] + seconds[w]) > begin:
                begin = moment
        return begin

    def _rest_from(self, v: int, behind: Iterable[int]) -> float:
        """Least seconds from the beginning of v to the end of the step with these right behind."""
        rest = self._rest
        longest = task_s = self._seconds[v]
        for w, lag_s in self._followers[v]:
            if (left := lag_s + rest[w]) > longest:
                longest = left
        for w in behind:
            if (left := task_s + rest[w]) > longest:
                longest = left
        return longest


def _followers(operations: Sequence[Operation]) -> list[list[tuple[int, float]]]:
    """The successors of each operation, with the least delay from its start."""
    followers: list[list[tuple[int, float]]] = [[] for _ in operations]
    for v, operation in enumerate(operations):
        for w, lag_s in operation.after:
            followers[w].append((v, lag_s))
    return followers


Neighbours = list[dict[int | Nic, int]]


def _neighbours(
    operations: Sequence[Operation], order: Sequence[int]
) -> tuple[Neighbours, Neighbours]:
    """The neighbours of each operation on each of its machines."""
    apart = len(operations)
    earlier: Neighbours = [dict.fromkeys(operation.machines, apart) for operation in operations]
    later: Neighbours = [dict.fromkeys(operation.machines, apart) for operation in operations]
    earlier.append({})
    later.append({})  # of what stands before and behind all; never asked for
    latest: dict[int | Nic, int] = {}
    for v in order:
        for machine in operations[v].machines:
            before = latest.get(machine, apart)
            earlier[v][machine], later[before][machine] = before, v
            latest[machine] = v
    return earlier, later


def _operations(
    profile: Profile, spans: Sequence[SimulatedSpan], limits: Sequence[int]
) -> list[Operation]:
    """The operations of a simulated step without relays, in its order. A stage's forwards stay in
    ascending order, and so do its backwards, and a boundary's tensors of a direction."""
    last = profile.num_stages - 1
    numbers: dict[tuple[Task, bool], int] = {}
    operations: list[Operation] = []

    def end_of(task: Task, is_transfer: bool = False) -> tuple[int, float]:
        v = numbers[task, is_transfer]
        return v, operations[v].seconds

    for task, _, _, is_transfer, _ in spans:
        kind, stage, k = task
        boundary = stage - 1 if kind == FORWARD else stage
        after = []
        machines: tuple[int | Nic, ...]
        if is_transfer:
            edge = profile.edges[boundary]
            seconds = edge.forward_s if kind == FORWARD else edge.backward_s
            machines = profile.nics(boundary, kind) if seconds else ()
            after.append(end_of(_sender(task, last)))
        else:
            seconds = profile.forward_s[stage] if kind == FORWARD else profile.backward_s[stage]
            seconds += profile.backward_s[stage] if stage == last else 0.0
            machines = (profile.devices[stage],)
            if (task, True) in numbers:
                v, on_the_wire_s = end_of(task, True)
                after.append((v, on_the_wire_s + profile.edges[boundary].latency_s))
            elif kind == BACKWARD or stage:
                after.append(end_of(_sender(task, last)))
            if kind == FORWARD and stage < last and k >= limits[stage]:
                after.append(end_of(Task(BACKWARD, stage, k - limits[stage])))
        if k and machines:
            after.append(end_of(Task(kind, stage, k - 1), is_transfer))
        numbers[task, is_transfer] = len(operations)
        operations.append(Operation(seconds, machines, tuple(after)))
    return operations


def _sender(task: Task, last: int) -> Task:
    """The tasks whose results a task takes."""
    kind, stage, k = task
    if kind == FORWARD:
        return Task(FORWARD, stage - 1, k)
    return Task(FORWARD if stage + 1 == last else BACKWARD, stage + 1, k)
