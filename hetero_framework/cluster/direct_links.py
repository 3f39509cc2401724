"""Links between workers, as the coordinator knows them: one table with an entry for each pair.

A lost link is dialled again between steps, each time by the other worker of the pair. A link that
is back is used from the next step on, since news of the old link's loss may come after news of the
new link.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from hetero_framework.config import Config, StageSpec, WorkerConfig
from hetero_framework.core import addresses, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.identity import key_owner
from hetero_framework.core.messages import Message
from hetero_framework.engine.hosts import DirectLost
from hetero_framework.errors import ProtocolError
from hetero_framework.log import event

_log = logging.getLogger(__name__)
Pair = frozenset[WorkerId]


@dataclass
class _DirectLink:
    """One pair's link. After each loss the pause before the next dial grows: a loss costs a
    step."""

    is_open: bool = False
    is_back: bool = False  # open again: serves from the next step on
    order: tuple[WorkerId, WorkerId] | None = None  # (dialler, other) of the last dial after a loss
    redial_at: float = math.inf
    pause_s: float = 0.0


class DirectLinks:
    """The table of links. `send` and `receive` are `WorkerLinks`' own, which reports to `note`."""

    def __init__(
        self,
        workers: Mapping[WorkerId, WorkerConfig],
        send: Callable[[WorkerId, Message], None],
        receive: Callable[[float], object],
    ) -> None:
        self._workers = workers
        self._send = send
        self._receive = receive
        self.own_ports: dict[WorkerId, int | None] = {}
        """On the loopback, of workers that dial and share their machine with others."""
        self._links: dict[Pair, _DirectLink] = {}
        self._answers: dict[tuple[WorkerId, WorkerId], str | None] = {}  # to the last orders

    @property
    def open(self) -> set[Pair]:
        """The pairs whose links serve the present step."""
        return {pair for pair, link in self._links.items() if link.is_open}

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker's links: its process is a new one, so links to the old one are gone, even
        if their other ends have not noticed yet."""
        self._links = {pair: link for pair, link in self._links.items() if worker not in pair}

    def drop(self, pair: Pair) -> None:
        """Stop using the link of this pair; `dial_again` has it opened again."""
        one, other = sorted(pair, key=str)
        link = self._links.setdefault(pair, _DirectLink())
        if link.order is None:
            link.order = other, one
        link.is_open = link.is_back = False
        link.redial_at = time.monotonic() + link.pause_s
        link.pause_s = min(timeouts.REDIAL_S, 2 * link.pause_s + 1)

    def connect(
        self, pairs: Iterable[tuple[WorkerId, WorkerId]], timeout_s: float
    ) -> dict[Pair, str]:
        """Have each pair of workers open a link: the first worker dials, and if that fails, the
        second. Return the reasons if both fail. Raises LinkLost."""
        # One link per pair, also if it is listed twice: of two that cross, each end closes its own.
        wanted = list({frozenset(pair): pair for pair in pairs}.values())
        for pair in map(frozenset, wanted):  # so that `note` opens it at once
            self._links[pair] = _DirectLink(is_open=pair in self.open)
        problems: dict[Pair, list[str]] = {}
        for ordered in (wanted, [(b, a) for a, b in wanted]):
            left = [pair for pair in ordered if frozenset(pair) not in self.open]
            self._answers.clear()
            self._order(left, timeout_s)
            deadline = time.monotonic() + timeout_s + timeouts.HANDSHAKE_S
            while set(left) - self._answers.keys() and time.monotonic() < deadline:
                try:
                    self._receive(timeouts.ANSWER_TICK_S)
                except DirectLost as lost:
                    self.drop(lost.pair)  # one of those that were opened before
            for dialler, other in left:
                problem = self._answers.get((dialler, other), "it does not say why")
                if problem is not None:
                    text = f"worker {dialler} cannot reach worker {other}: {problem}"
                    problems.setdefault(frozenset((dialler, other)), []).append(text)
        return {pair: "; ".join(texts) for pair, texts in problems.items() if pair not in self.open}

    def dial_again(self, timeout_s: float) -> None:
        """Between steps: use links that are back, and have lost links dialled again, without
        waiting for the answers. Raises LinkLost."""
        now = time.monotonic()
        for link in self._links.values():
            link.is_open, link.is_back = link.is_open or link.is_back, False
            if now >= link.redial_at:
                assert link.order is not None
                link.redial_at = now + timeout_s + link.pause_s
                link.order = link.order[::-1]
                self._order([link.order], timeout_s)

    def _order(self, pairs: Iterable[tuple[WorkerId, WorkerId]], timeout_s: float) -> None:
        by_dialler: dict[WorkerId, list[m.PeerAddress]] = {}
        for dialler, other in pairs:
            to = self._workers[other]
            ip, port = to.ip, to.port
            if port is None and key_owner(dialler) == key_owner(other):
                ip, port = addresses.LOOPBACK, self.own_ports.get(other)
            if port is None:
                self._answers[dialler, other] = "it has no port"
                continue
            by_dialler.setdefault(dialler, []).append(m.PeerAddress(other, ip, port))
        for dialler, peers in by_dialler.items():
            self._send(dialler, Message(m.Connect(tuple(peers), timeout_s)))

    def note(self, dialler: WorkerId, connected: m.Connected) -> None:
        """Note which other workers a worker has reached."""
        for entry in connected.peers:
            if entry.id not in self._workers or entry.id == dialler:
                raise ProtocolError(f"worker {dialler} has reached {entry.id!r}, no worker")
            self._answers[dialler, entry.id] = entry.problem
            if entry.problem is not None:
                continue
            link = self._links.setdefault(frozenset((dialler, entry.id)), _DirectLink())
            if link.order is None:
                link.is_open = True
            else:
                link.is_back, link.redial_at = True, math.inf
                back = event("direct link back", workers=f"{dialler}, {entry.id}")
                text = "the link between workers %s and %s is back"
                _log.info(text, dialler, entry.id, extra=back)


class Boundaries:
    """The boundaries between a plan's stages, and which of them a direct link may serve."""

    def __init__(self, config: Config) -> None:
        self.all = list(pairwise(config.plan.stages))
        self._config = config

    def mode(self, after: StageSpec) -> str:
        """The setting of the boundary in front of a stage: "auto", "direct" or "relay"."""
        return self._config.shard_plan[after.index].links or self._config.links

    @property
    def between_workers(self) -> list[tuple[StageSpec, StageSpec]]:
        """Boundaries that a direct link may serve."""
        return [
            (before, after)
            for before, after in self.all
            if "local" not in (before.owner, after.owner)
            and before.owner != after.owner
            and self.mode(after) != "relay"
        ]

    def direct(self, links: Collection[frozenset[WorkerId]]) -> frozenset[int]:
        """The boundaries that one of these links serves, by the number of the stage before."""
        return frozenset(
            before.index
            for before, after in self.between_workers
            if frozenset((before.owner, after.owner)) in links
        )
