"""Islands that take steps alone and average their changes: LocalSGD and DiLoCo.

In a round each island takes a number of steps alone; a faster island takes more. Each fragment of
the model is synchronised once in a round: its change goes to all other islands. When all islands
have the same average, and come to the same weights by it, they apply it. Steps count once a
synchronisation after them has been committed. `outer.py` has the arithmetic, which is the same on
every machine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hetero_framework.core import failpoints, timeouts
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.data.batches import token_count
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.hosts import ReplicasChanged
from hetero_framework.engine.stage import WEIGHTS
from hetero_framework.engine.stage_api import StatePart
from hetero_framework.engine.state_snapshot import digest
from hetero_framework.errors import NumericError, ProtocolError
from hetero_framework.extras.islands.compression import Compression, Packed, packed_bytes, unpack
from hetero_framework.extras.islands.group import STATE
from hetero_framework.extras.islands.ledger import Ledger, Steps, count_steps, steps_between
from hetero_framework.extras.islands.links import SAME_VERSION, IslandSession, check_finite
from hetero_framework.extras.islands.outer import (
    OuterFragment,
    Synchronisation,
    cut,
    schedule,
    weighted_mean,
)
from hetero_framework.extras.islands.shares import round_steps
from hetero_framework.extras.islands.summed_steps import SummedSteps, seconds_of_all
from hetero_framework.trainer.replica_group import CountItems, StepPart
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState

_log = logging.getLogger(__name__)
_OUTER = "outer/"


@dataclass(frozen=True)
class Round:
    """One round as all members know it, and how far this island is in it. `dealt` has each island's
    steps, `base` counts the steps committed before the round, and `last` says that the run ends
    with it. `synced` counts the synchronisations done, `done` the steps that this island has taken,
    and `committed` the committed ones of these steps."""

    base: int
    dealt: Mapping[str, Steps]
    last: bool
    synced: int = 0
    done: int = 0
    committed: int = 0

    @property
    def size(self) -> int:
        """The number of steps of all islands."""
        return sum(map(count_steps, self.dealt.values()))

    def state_dict(self) -> dict[str, Any]:
        dealt = {name: [list(part) for part in steps] for name, steps in self.dealt.items()}
        return {**vars(self), "dealt": dealt}

    @classmethod
    def load_state_dict(cls, state: Mapping[str, Any]) -> Round:
        dealt = {name: _steps(parts) for name, parts in state["dealt"].items()}
        counts = (int(state[name]) for name in ("synced", "done", "committed"))
        return cls(int(state["base"]), dealt, bool(state["last"]), *counts)


def _steps(parts: Any) -> Steps:
    return tuple((int(start), int(end)) for start, end in parts)


@dataclass
class _Sending:
    """A fragment's change on its way: what this island sends, and the average once it is here."""

    at: Synchronisation
    change: dict[str, Tensor]
    tokens: int
    mean: Future[dict[str, Tensor]] | None = None
    session: IslandSession | None = None


class OuterRounds(SummedSteps):
    """This island's part in a run where islands take steps alone: `sync_steps` above 1."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._fragments: list[tuple[str, ...]] = []
        self._outer: list[OuterFragment] = []
        self._before: list[OuterFragment] = []  # one synchronisation earlier
        self._compression = Compression(self._island.compression)
        self._ledger = Ledger()
        self._round: Round | None = None
        self._dealt: Steps = ()
        self._plan: tuple[Synchronisation, ...] = ()
        self._syncs = self._syncs_before = 0  # in all, and when the session began
        self._items, self._sums_gradients = 0, False
        self._sending: _Sending | None = None
        self._label_tokens = [0] * self._island.fragments
        self._busy_s, self._counted = 0.0, 0
        self._step_began = time.monotonic()
        self._figures: dict[str, Any] = {}
        self._checkpoints.beside = self._beside

    # -- a step ---------------------------------------------------------------------------------

    @property
    def saves(self) -> bool:  # type: ignore[override]
        """Whether to save: only between rounds, when all islands have the same weights."""
        return super().saves and self.agrees

    @property
    def agrees(self) -> bool:  # type: ignore[override]
        """Whether a round is over."""
        return self._round is None or self._round.done == 0

    def _is_done(self, state: TrainState) -> bool:
        return super()._is_done(state) and not state.group.get("round")

    def _count(self, state: TrainState) -> int:
        return int(state.group.get("syncs", 0))

    def _done(self, state: TrainState) -> int:
        return self._syncs

    def ready(self, state: TrainState) -> TrainState:
        if self._is_warming(state):
            state = super().ready(state)
            if self._is_warming(state):
                return state
        if self._session is None:
            state = self._joined(state)
        if not self._outer:
            self._begin_with(state)
        total = self._prepared.data.total_steps
        while state.step < total:
            if self._round is None:
                state = self._deal(state)
            if (state := self._synchronised(state)).step >= total:
                break
            if self._round is not None and self._round.done < count_steps(self._dealt):
                break  # there is a step to take
        return state

    def _is_warming(self, state: TrainState) -> bool:
        """Whether the next step sums its gradients over the islands."""
        return state.step < self._island.warmup_steps

    def part(self, state: TrainState, data: TrainData, count_items: CountItems) -> StepPart:
        self._sums_gradients = self._is_warming(state)
        if self._sums_gradients:
            return super().part(state, data, count_items)
        assert self._round is not None
        number = _nth(self._dealt, self._round.done)
        batches = data.step_batches(number)
        items = count_items(batches)
        self._items, self._tokens = items, sum(map(token_count, batches))
        self._step_began = time.monotonic()
        return StepPart(number, batches, data.order.step_indices(number), items)

    def losses(self, local: list[float]) -> list[float]:
        return super().losses(local) if self._sums_gradients else local

    def elsewhere(self) -> tuple[str, ...]:
        return super().elsewhere() if self._sums_gradients else ()

    def decide(self, outcome: StepOutcome, norm: Tensor) -> tuple[StepOutcome, Tensor]:
        return super().decide(outcome, norm) if self._sums_gradients else (outcome, norm)

    def after_step(self, before: TrainState, state: TrainState) -> TrainState:
        if self._sums_gradients:
            self._syncs += 1
            self._ledger = self._ledger.commit([(before.step, state.step)])
            return super().after_step(before, state)
        round_, h = self._round, count_steps(self._dealt)
        assert round_ is not None
        self._round = round_ = replace(round_, done=round_.done + 1)
        self._label_tokens = [n + self._items for n in self._label_tokens]
        self._busy_s += time.monotonic() - self._step_began
        self._counted += 1
        self._step_s.append(time.monotonic() - self._step_began)
        self._note_progress()
        # The step by which the schedule ends with the run, however many islands there are.
        step = round_.base + round_.done * round_.size // h
        skipped = before.step - before.committed_steps
        if state.committed_steps == before.committed_steps:
            skipped += step - before.step
        state = replace(state, step=step, committed_steps=step - skipped)
        state = replace(state, group=self._remembered())
        self._figures["data_step"] = _nth(self._dealt, round_.done - 1)
        return self._synchronised(state)

    def metrics(self) -> Mapping[str, Any]:
        if self._sums_gradients:
            return super().metrics()
        island = super().metrics()["island"]
        for key in ("samples", "sample_ids", "waited_s"):
            del island[key]
        figures, self._figures = self._figures, {}
        return {"island": {**island, **figures, "committed": self._ledger.count}}

    def went_back(self, state: TrainState) -> None:
        """Go back here. The others notice only if `state` is before the last synchronisation."""
        self._sending = None
        if self._count(state) != self._syncs:
            self._outer, self._before = self._before, []
        self._recall(state)
        super().went_back(state)

    # -- rounds ---------------------------------------------------------------------------------

    def _deal(self, state: TrainState) -> TrainState:
        """Begin a new round: all members deal the same steps."""
        session, island = self._present, self._island
        counts = round_steps(
            island.sync_steps, self._shares.of, island.fragments, island.delay_steps
        )
        base, total = self._ledger.count, self._prepared.data.total_steps
        dealt = self._ledger.deal(counts, total)
        last = base + sum(map(count_steps, dealt.values())) == total
        self._enter(Round(base, dealt, last), session.me)
        return replace(state, group=self._remembered())

    def _enter(self, round_: Round | None, me: str) -> None:
        self._round = round_
        self._dealt, self._plan = (), ()
        if round_ is None:
            return
        self._dealt = round_.dealt.get(me, ())
        steps, count = count_steps(self._dealt), self._island.fragments
        delay = 0 if round_.last else self._island.delay_steps
        fits = steps >= count * (delay + 1)
        self._plan = schedule(steps, count, delay if fits else 0)
        if round_.last:  # the run ends with agreed weights in every fragment
            self._plan += tuple(Synchronisation(k, steps, steps) for k in range(count - 1))

    def _synchronised(self, state: TrainState) -> TrainState:
        """Do all synchronisations that are due after the steps done."""
        while (round_ := self._round) is not None:
            sync = self._plan[round_.synced]
            if self._sending is None and round_.done >= sync.sent_after:
                self._send(sync)
            if round_.done < sync.applied_after or self._sending is None:
                break
            state = self._apply(self._sending, state)
        return state

    def _send(self, sync: Synchronisation) -> None:
        names = self._fragments[sync.fragment]
        local = self._cluster.retrying(lambda: self._cluster.pipeline.weights(names))
        change = self._outer[sync.fragment].change(local)
        for name, tensor in change.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NumericError(
                    f"{name} is not finite on island {self._island.name}; nothing of it is sent",
                    hint="lower training.learning_rate, or go back to a checkpoint: --resume STEP",
                )
        self._sending = _Sending(sync, change, self._label_tokens[sync.fragment])
        if sync.applied_after > sync.sent_after and self._session is not None:
            self._begin(self._sending)

    def _begin(self, sending: _Sending) -> None:
        """Begin the exchange of a change in the background, while steps go on."""
        session, number = self._present, self._exchange
        failpoints.hit("island-changes")
        sending.session = session
        sending.mean = in_background(
            lambda: self._mean(session, number, sending), "outer synchronisation"
        )

    def _mean(self, session: IslandSession, number: int, sending: _Sending) -> dict[str, Tensor]:
        """The mean change over all islands. Raises MemberLost and ProtocolError."""
        kind = self._island.compression
        packed = self._compression.pack(sending.change)
        self._figures["packed_bytes"] = packed_bytes(packed)
        tensors = {f"{k}/{name}": t for name, ts in packed.items() for k, t in enumerate(ts)}
        session.send(number, "changes", tensors, {"tokens": sending.tokens})
        parts: list[tuple[int, Mapping[str, Tensor]]] = []
        for name in session.members:
            if name == session.me:
                weight, theirs = sending.tokens, packed
            else:
                # The thread that waits for the result heeds signals.
                received = session.receive(number, "changes", name, lambda: None)
                with session.judging(name):
                    weight, theirs = _weight(received.info, name), _unnumbered(received.tensors)
            with session.judging(name):
                changes = unpack(theirs, sending.change, kind)
                if name != session.me:
                    check_finite(changes, name)
                parts.append((weight, changes))
        if not any(weight for weight, _ in parts):
            parts = [(1, part) for _, part in parts]
        return weighted_mean(parts)

    @property
    def _exchange(self) -> int:
        """The number of the exchange that is due."""
        return STATE + 1 + self._syncs - self._syncs_before

    def _apply(self, sending: _Sending, state: TrainState) -> TrainState:
        """Apply the change that all agree on; where a member left, begin again with the others."""
        began = time.monotonic()
        try:
            if not self._stays(state):
                raise ReplicasChanged("the members change")
            if sending.mean is None or sending.session is not self._session:
                self._begin(sending)
            assert sending.mean is not None
            while not wait_for([sending.mean], timeouts.ANSWER_TICK_S):
                self._heed_in_step()
                self._present.check()
            mean = sending.mean.result()
            after = self._outer[sending.at.fragment].copy()
            after.step(mean)
            steps = self._agreed(after)
        except ReplicasChanged as changed:
            _log.info("%s; looking who is there", changed, extra=changed.told)
            return self._joined(state)
        self._waited_s = time.monotonic() - began
        return self._commit(sending, after, steps, state)

    def _agreed(self, after: OuterFragment) -> dict[str, Steps]:
        """The steps of each island that are committed now, once all report the same weights.
        Raises MemberLost."""
        session, round_ = self._present, self._round
        assert round_ is not None
        done = steps_between(self._dealt, round_.committed, round_.done)
        vote = {
            "hash": digest([StatePart(dict(after.weights), last=True)]),
            "steps": [list(part) for part in done],
            "seconds": self._busy_s / self._counted if self._counted else 0.0,
        }

        def decided(votes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
            _refuse_other_weights(session, {name: v.get("hash") for name, v in votes.items()})
            steps = {name: v["steps"] for name, v in votes.items()}
            return {"hash": vote["hash"], "steps": steps}

        judge = partial(_dealt_steps, round_)
        decision = self._voted(self._exchange, vote, judge, decided).info
        with session.judging(session.leader):
            if decision.get("hash") != vote["hash"]:
                raise ProtocolError(f"island {session.leader} has other weights: {decision!r:.200}")
            self._seconds = seconds_of_all(decision, session)
            steps = _decided(decision, round_, self._ledger, session)
        self._figures["hash"] = vote["hash"]
        return steps

    def _commit(
        self, sending: _Sending, after: OuterFragment, steps: Mapping[str, Steps], state: TrainState
    ) -> TrainState:
        session, round_, fragment = self._present, self._round, sending.at.fragment
        assert round_ is not None
        counted: list[tuple[int, int]] = self._figures.setdefault("counted", [])
        for parts in steps.values():
            self._ledger = self._ledger.commit(parts)
            counted += parts
        order, ids = self._prepared.data.order, self._figures.setdefault("sample_ids", {})
        for number in (k for parts in steps.values() for part in parts for k in range(*part)):
            ids[number] = [int(k) for batch in order.step_indices(number) for k in batch]
        self._before = list(self._outer)
        self._outer[fragment] = after
        self._compression.committed()
        self._label_tokens[fragment] -= sending.tokens
        session.forget(self._exchange)
        self._syncs += 1
        self._sending = None
        self._position = self._position.after_commit(self._syncs, session.view)
        round_ = replace(round_, synced=round_.synced + 1, committed=round_.done)
        ends = round_.synced == len(self._plan)
        # At the end the ledger counts: the steps of an island that left are dealt again.
        step = self._ledger.count if ends else state.step
        if ends:
            self._tune()
        failpoints.hit("island-apply")
        self._give_back(after, agreed=round_.last)
        self._round = None if ends else round_
        skipped = state.step - state.committed_steps
        state = replace(state, step=step, committed_steps=step - skipped)
        state = replace(state, group=self._remembered())
        self._checkpoints.begin(state)
        self._figures |= {"synchronised": fragment, "waited_s": round(self._waited_s, 4)}
        _log.debug("fragment %d is synchronised", fragment)
        return state

    def _tune(self) -> None:
        self._busy_s, self._counted = 0.0, 0
        if self._island.share == "auto":
            island, members = self._island, len(self._present.members)
            least = island.fragments * (island.delay_steps + 1)
            done = self._syncs // island.fragments
            shares = self._shares.tuned(
                self._seconds, island.sync_steps * members, done, least=least
            )
            self._retune(shares)

    def _give_back(self, after: OuterFragment, agreed: bool) -> None:
        """Make the stages go on with the average alone if `agreed`, else with the average mixed
        with their weights. Raises StagesLost."""
        names = tuple(after.weights)

        def give() -> None:
            pipeline = self._cluster.pipeline
            pipeline.load_weights(after.mixed(pipeline.weights(names), agreed=agreed))

        self._cluster.retrying(give)

    # -- among the others -----------------------------------------------------------------------

    def _joined(self, state: TrainState) -> TrainState:
        if (sending := self._sending) is not None:  # to be sent again
            self._sending = _Sending(sending.at, sending.change, sending.tokens)
        if not self._outer and not self._is_warming(state):
            self._begin_with(state)
        state = super()._joined(state)
        self._syncs_before = self._syncs
        return state

    def _begin_with(self, state: TrainState) -> None:
        """Begin with the outer state of the run's starting checkpoint, or with the weights."""
        names = self._cluster.loaded.trained_names
        weights = self._cluster.retrying(lambda: self._cluster.pipeline.weights(names))
        sizes = {name: weights[name].nbytes for name in names}
        self._fragments = list(cut(sizes, self._island.fragments))
        self._outer = [
            OuterFragment({name: weights[name] for name in fragment}, self._island)
            for fragment in self._fragments
        ]
        if restored := self._checkpoints.restored:
            self._load_outer(restored)
            self._checkpoints.restored = {}
        self._recall(state)

    def _recall(self, state: TrainState) -> None:
        """Restore round, ledger and counts from `state.group`."""
        group = state.group
        self._syncs = self._count(state)
        self._ledger = Ledger.load_state_dict(group["ledger"]) if "ledger" in group else Ledger()
        if "ledger" not in group and state.step:
            self._ledger = Ledger().commit([(0, state.step)])  # it was trained without islands
        kept = group.get("round")
        self._enter(Round.load_state_dict(kept) if kept else None, self._island.name)
        self._label_tokens = [int(n) for n in group.get("label_tokens", self._label_tokens)]

    def _remembered(self) -> dict[str, Any]:
        remembered = {
            **super()._remembered(),
            "syncs": self._syncs,
            "ledger": self._ledger.state_dict(),
            "label_tokens": list(self._label_tokens),
        }
        if self._round is not None:
            remembered["round"] = self._round.state_dict()
        return remembered

    def _beside(self) -> dict[str, Tensor]:
        if not self._outer:  # the run has gone on after a checkpoint, and has no session yet
            return self._checkpoints.restored
        return {
            f"{_OUTER}{k}/{name}": tensor
            for k, outer in enumerate(self._outer)
            for name, tensor in outer.state_dict().items()
        }

    def _load_outer(self, tensors: Mapping[str, Tensor]) -> None:
        for k, outer in enumerate(self._outer):
            prefix = f"{_OUTER}{k}/"
            state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            outer.load_state_dict(state)

    def _gather(self, take: Callable[[StatePart], None]) -> None:
        """Gather the agreed weights in place of this island's."""

        if not self._outer:  # still warming up
            super()._gather(take)
            return

        def without_weights(part: StatePart) -> None:
            tensors = {n: t for n, t in part.tensors.items() if not n.startswith(f"{WEIGHTS}/")}
            take(replace(part, tensors=tensors))

        super()._gather(without_weights)
        take(StatePart(self._beside()))

    def _adopted(self, state: TrainState, session: IslandSession) -> TrainState:
        """An island that takes over another's state has no steps before the next round."""
        group = {**state.group, "label_tokens": [0] * self._island.fragments}
        Ledger.load_state_dict(group.get("ledger", {"committed": ()}))
        if kept := group.get("round"):
            round_ = Round.load_state_dict(kept)
            idle = {name: steps for name, steps in round_.dealt.items() if name != session.me}
            group["round"] = replace(round_, dealt=idle, done=0, committed=0).state_dict()
        return replace(state, group=group)

    def _take_over(self, session: IslandSession, source: str) -> TrainState:
        state = super()._take_over(session, source)
        self._sending = None
        self._compression = Compression(self._island.compression)
        self._recall(state)
        return state

    def _loaded(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The stages' part of these tensors, with the agreed weights."""
        outer = {n: t for n, t in tensors.items() if n.startswith(_OUTER)}
        if not outer:
            return tensors
        if not self._outer:  # this island was warming up when the others began rounds
            self._begin_with(TrainState())
        self._load_outer(outer)
        restored = {n: t for n, t in tensors.items() if n not in outer}
        for fragment in self._outer:
            restored |= {f"{WEIGHTS}/{name}": t for name, t in fragment.weights.items()}
        return restored


def _nth(steps: Steps, number: int) -> int:
    return steps_between(steps, number, number + 1)[0][0]


def _refuse_other_weights(session: IslandSession, hashes: Mapping[str, Any]) -> None:
    """For the leader: refuse members with other weights than most members have; in a tie the
    leader's are right. Raises MemberLost for them, or ProtocolError if the leader's are wrong."""
    counts, mine = Counter(map(str, hashes.values())), str(hashes[session.me])
    right = max(counts, key=lambda value: (counts[value], value == mine))
    wrong = ProtocolError("it has come to other weights than the others", hint=SAME_VERSION)
    if mine != right:
        raise wrong
    for name in [name for name, value in hashes.items() if str(value) != right]:
        session.refuse(name, wrong)
    session.check()


def _dealt_steps(round_: Round, vote: Mapping[str, Any], name: str) -> Steps:
    """The steps that island `name` has done, of those that it was dealt. Raises ProtocolError."""
    try:
        steps, dealt = _steps(vote.get("steps")), round_.dealt.get(name, ())
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"island {name} names no steps: {error!r}") from error
    if not all(any(a <= first < end <= b for a, b in dealt) for first, end in steps):
        raise ProtocolError(f"island {name} has done steps that it was not dealt: {steps!r:.200}")
    return steps


def _decided(
    decision: Mapping[str, Any], round_: Round, ledger: Ledger, session: IslandSession
) -> dict[str, Steps]:
    """The committed steps of each island, by the leader's decision. Raises ProtocolError."""
    try:
        found = decision["steps"].items()
        steps = {str(n): _dealt_steps(round_, {"steps": parts}, n) for n, parts in found}
        for parts in steps.values():
            ledger = ledger.commit(parts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"island {session.leader} sends no decision: {error!r}") from error
    return steps


def _weight(info: Mapping[str, Any], name: str) -> int:
    tokens = info.get("tokens")
    if type(tokens) is not int or tokens < 0:
        raise ProtocolError(f"island {name} does not say how many tokens it has trained")
    return tokens


def _unnumbered(tensors: Mapping[str, Tensor]) -> Packed:
    """The tensors that `_mean` sent, by parameter."""
    packed: Packed = {}
    for key in sorted(tensors):
        packed.setdefault(key.partition("/")[2], []).append(tensors[key])
    return packed
