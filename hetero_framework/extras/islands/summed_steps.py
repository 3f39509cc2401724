"""Islands that share the samples of every step and sum its gradients."""

from __future__ import annotations

import logging
import math
import secrets
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import effects
from hetero_framework.core import failpoints, timeouts
from hetero_framework.data.batches import token_count
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.hosts import ReplicasChanged, StopWanted
from hetero_framework.engine.stage_api import GradientPart, StatePart, Tensors
from hetero_framework.errors import CheckpointError, GroupFinished, PeerAwayError, ProtocolError
from hetero_framework.extras.islands.group import STATE, Group, Position, SessionStart
from hetero_framework.extras.islands.ledger import order_facts, split_step
from hetero_framework.extras.islands.links import (
    SAME_VERSION,
    Check,
    IslandSession,
    MemberLost,
    Received,
    check_finite,
)
from hetero_framework.extras.islands.settings import island_of
from hetero_framework.extras.islands.shares import Shares, given_shares
from hetero_framework.log import event
from hetero_framework.trainer.replica_group import CountItems, ReplicaGroup, StepPart
from hetero_framework.trainer.run_checkpoint import RunCheckpoints
from hetero_framework.trainer.setup import Prepared
from hetero_framework.trainer.signals import StopRequest
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState
from hetero_framework.units import plural

_log = logging.getLogger(__name__)
_LEAST_PATIENCE_S = 30.0
_PATIENCE = 10.0
"""An island stalls after the time of this many usual steps without any progress."""
_KNOWN_STEPS = 3
"""Number of steps after which the usual step is known; before that step_timeout_s counts."""


class SummedSteps(ReplicaGroup):
    """This island's part in a run that sums gradients in every step: `sync_steps` 1."""

    def __init__(
        self, prepared: Prepared, cluster: Cluster, checkpoints: RunCheckpoints, stop: StopRequest
    ) -> None:
        self._island = island_of(prepared.config)
        self._prepared = prepared
        self._cluster = cluster
        self._checkpoints = checkpoints
        self._stop = stop
        self._group: Group | None = None
        self._session: IslandSession | None = None
        self._position = Position()
        self._shares = Shares()
        self._number = STATE
        self._sums: SummedGradients | None = None
        self._under_way: int | None = None  # the step that has begun in the present session
        self._samples: Mapping[str, int] = {}
        self._sample_ids: Mapping[str, list[int]] = {}
        self._tokens = 0
        self._waited_s = 0.0
        self._seconds: dict[str, float] = {}
        self._step_s: deque[float] = deque(maxlen=20)
        self._began_at = 0.0
        self._moved_at: float | None = None  # None: it has not met the others yet
        self._bytes = (0, 0)

    def open(self, group: Group) -> None:
        """Take `group` as this island's place among the others."""
        self._group = group

    # -- a step ---------------------------------------------------------------------------------

    @property
    def saves(self) -> bool:  # type: ignore[override]
        """Whether this island writes the group's checkpoints: only one island does."""
        return self._session is None or self._session.me == self._session.leader

    def ready(self, state: TrainState) -> TrainState:
        if self._session is not None and (self._repeats(state) or self._stays(state)):
            return state
        return self._joined(state)

    def _stays(self, state: TrainState) -> bool:
        with self._keeping(state):
            return self._open.stay()

    @contextmanager
    def _keeping(self, state: TrainState) -> Iterator[None]:
        """Keep the state of the stages if the run is to end while this island waits for others."""
        try:
            yield
        except (StopWanted, PeerAwayError):
            if state.step > 0:
                self._checkpoints.keep(state)
            raise

    def _stand(self, state: TrainState) -> Position:
        """This island's position with `state`."""
        return replace(
            self._position,
            step=self._count(state),
            lineage=str(state.group.get("lineage", "")),
            run=str(state.group.get("run", "")),
            is_done=self._is_done(state),
            facts=self._facts(),
            says={"share": self._island.share},
        )

    def _is_done(self, state: TrainState) -> bool:
        """Whether no step with the others is left."""
        return state.step >= self._prepared.data.total_steps

    def _count(self, state: TrainState) -> int:
        """The number of the group's commits that `state` records."""
        return state.step

    def _done(self, state: TrainState) -> int:
        """`_count` after a step, before `state` records that step."""
        return state.step

    def _joined(self, state: TrainState) -> TrainState:
        """Join the islands that are there now, at their position."""
        self._session = None
        self._position = self._stand(state)
        while True:
            with self._keeping(state):
                joined = self._open.join(self._position)
            self._note_progress()
            try:
                state = self._settled(joined, state)
            except MemberLost as lost:
                _log.info("%s; looking who is there", lost, extra=lost.told)
                continue
            self._session, self._number, self._under_way = joined.session, STATE, None
            self._bytes = (0, 0)
            self._note_progress()
            return state

    def _repeats(self, state: TrainState) -> bool:
        """Whether a step is done again among the same members, since a worker here was lost. The
        members keep the tensors of that step which they have received."""
        return self._under_way == state.step and not self._present.is_over

    def part(self, state: TrainState, data: TrainData, count_items: CountItems) -> StepPart:
        session = self._present
        parts = split_step(data.order, state.step, self._shares.of)
        whole = data.step_batches(state.step)
        self._sample_ids = {
            name: [int(k) for batch in rows for k in batch] for name, rows in parts.items()
        }
        self._samples = {name: len(ids) for name, ids in self._sample_ids.items()}
        self._tokens = sum(map(token_count, whole))
        # Micro-batches of islands differ in size: where each is a mean, it counts as its rows do.
        is_mean = count_items is len
        items = sum(len(batch["labels"]) for batch in whole) if is_mean else count_items(whole)
        before = sum(n for name, n in self._samples.items() if name < session.me)
        rows = data.order.training.per_device_train_batch_size
        if not self._repeats(state):
            self._number += 1
            self._sums, self._under_way = SummedGradients(session, self._number), state.step
            self._began_at = time.monotonic()
        assert self._sums is not None
        return StepPart(
            state.step,
            [data.micro_batch(indices) for indices in parts[session.me]],
            parts[session.me],
            items,
            self._sums,
            first_micro_batch=-(-before // rows),
        )

    def losses(self, local: list[float]) -> list[float]:
        assert self._sums is not None
        return self._sums.losses(local, self._heed_in_step)

    def elsewhere(self) -> tuple[str, ...]:
        bad: list[str] = []
        with suppress(ReplicasChanged, ProtocolError):  # the step is decided; the next one fails
            bad = self._sums.nonfinite() if self._sums is not None else []
        return () if self._island.name in bad else tuple(bad)

    def decide(self, outcome: StepOutcome, norm: Tensor) -> tuple[StepOutcome, Tensor]:
        """The leader counts the votes: all have the sums, or nobody changes a weight."""
        session, sums = self._present, self._sums
        assert sums is not None
        seconds = sums.seconds_per(self._samples[session.me])
        vote = {"outcome": outcome.as_info(), "seconds": seconds}
        tensors = {"norm": norm.detach().to("cpu", torch.float32).clone()}
        received = self._voted(self._number, vote, _outcome, _gravest, tensors)
        with session.judging(session.leader):
            outcome, self._seconds, norm = _decision(received, session)
        self._waited_s = sums.since_end_s
        return outcome, norm

    def _voted(
        self,
        number: int,
        vote: dict[str, Any],
        judge: Callable[[Mapping[str, Any], str], object],
        decide: Callable[[Mapping[str, Mapping[str, Any]]], dict[str, Any]],
        tensors: Tensors | None = None,
    ) -> Received:
        """The leader's decision on an exchange, with the leader's `tensors`. `decide` makes
        it from the votes of all; `judge` raises ProtocolError for a wrong vote. Votes and decision
        have the `seconds` that each island takes for a sample or a step."""
        session = self._present
        if session.me != session.leader:
            failpoints.hit("island-vote")
            session.send(number, "vote", info=vote, to=[session.leader])
            return session.receive(number, "decision", session.leader, self._heed_in_step)
        votes = {session.me: vote}
        for name in session.others:
            votes[name] = session.receive(number, "vote", name, self._heed_in_step).info
            with session.judging(name):
                judge(votes[name], name)
                seconds_in(votes[name], "seconds", name)
        seconds = {name: info["seconds"] for name, info in votes.items()}
        decision = Received(dict(tensors or {}), {**decide(votes), "seconds": seconds})
        failpoints.hit("island-decision")
        for name in session.others:
            session.try_send(name, number, decision.info, decision.tensors)
            failpoints.hit("island-told")
        return decision

    def after_step(self, before: TrainState, state: TrainState) -> TrainState:
        session = self._present
        session.forget(self._number)
        self._under_way = None
        self._step_s.append(time.monotonic() - self._began_at)
        self._note_progress()
        self._position = self._position.after_commit(self._done(state), session.view)
        if self._island.share == "auto":
            order = self._prepared.data.order
            self._retune(self._shares.tuned(self._seconds, order.samples_per_step, state.step))
        return replace(state, group=self._remembered())

    def metrics(self) -> Mapping[str, Any]:
        moved, self._bytes = self._bytes, self._present.bytes_moved()
        return {
            "island": {
                "name": self._island.name,
                "members": list(self._present.members),
                "samples": dict(self._samples),
                "sample_ids": dict(self._sample_ids),
                "tokens": self._tokens,
                "waited_s": round(self._waited_s, 4),
                "bytes_in": self._bytes[0] - moved[0],
                "bytes_out": self._bytes[1] - moved[1],
            }
        }

    def went_back(self, state: TrainState) -> None:
        """The others go on without this island, which takes over their state when it is ready."""
        if self._count(state) == self._position.step:
            return
        self._session = None
        self._position = Position()
        self._open.leave("it went back to an earlier step")

    def finished(self, state: TrainState) -> TrainState:
        """Return once all members have the state that the run ends with: a member may have missed
        the last decision, or have come just now."""
        while True:
            try:
                if self._session is None or not self._stays(state):
                    state = self._joined(state)
                session = self._present
                session.part_together(self._exchange, self._heed_in_step)
            except ReplicasChanged as changed:
                _log.info("%s; looking who is there", changed, extra=changed.told)
                self._session = None
            except GroupFinished:  # this island has finished as well
                return state
            else:
                self._open.finish(session, self._stand(state), state.step)
                return state

    @property
    def _exchange(self) -> int:
        """The number of the exchange that is due."""
        return self._number + 1

    def close(self, reason: str) -> None:
        if self._group is not None:
            group, self._group, self._session = self._group, None, None
            group.close(reason)

    # -- among the others -----------------------------------------------------------------------

    def _settled(self, joined: SessionStart, state: TrainState) -> TrainState:
        """Bring all members to the position of their source."""
        session = joined.session
        if session.me == joined.source:
            state = self._as_source(joined, state)
        elif session.me in joined.behind:
            state = self._take_over(session, joined.source)
        group = state.group
        self._position = replace(self._stand(state), trains=True)
        settings = {}
        facts = joined.positions[joined.source].facts
        agreeing = {name: p for name, p in joined.positions.items() if p.facts == facts}
        for name, position in agreeing.items():  # the others are about to end
            with session.judging(name):
                settings[name] = _share(position, name)
        numbers = given_shares(settings)
        kept = _shares_in(group)
        if not self._shares.of and session.me not in joined.behind:
            self._compare_members(kept.of, session.members, state.step)
        self._shares = (Shares(numbers) if numbers else kept).for_members(session.members)
        return replace(state, group={**group, **self._remembered()})

    def _compare_members(self, were: Collection[str], are: Collection[str], step: int) -> None:
        """Warn where a checkpoint was made by other islands than those that go on with it."""
        if were and set(were) != set(are):
            text = "checkpoint %d was made by %s (%s), %s on with it: %s"
            go = plural(len(are), "island") + (" goes" if len(are) == 1 else " go")
            names = ", ".join(sorted(were)), ", ".join(sorted(are))
            _log.warning(text, step, plural(len(were), "island"), names[0], go, names[1])

    def _as_source(self, joined: SessionStart, state: TrainState) -> TrainState:
        session, to = joined.session, joined.behind
        if not state.group.get("lineage"):
            begun = {"lineage": secrets.token_hex(16), "run": secrets.token_hex(16)}
            state = replace(state, group={**state.group, **begun})
        if not to:
            return state
        began = time.monotonic()

        def send(part: StatePart) -> None:
            failpoints.hit("island-state")
            tensors = {name: t.detach().cpu().clone() for name, t in part.tensors.items()}
            session.send(STATE, "state", tensors, part.values, last=False, to=to)
            self._note_progress()

        self._gather(send)
        session.send(STATE, "state", info={"position": state.state_dict()}, to=to)
        seconds, names = time.monotonic() - began, ", ".join(to)
        given = event("state given", islands=names, step=state.step, seconds=round(seconds, 3))
        _log.info("gave the state after step %d to %s", state.step, names, extra=given)
        return state

    def _gather(self, take: Callable[[StatePart], None]) -> None:
        """Give `take` all tensors that another island needs to come to this position."""
        self._checkpoints.gather(take)

    def _take_over(self, session: IslandSession, source: str) -> TrainState:
        began = time.monotonic()
        received = session.receive(STATE, "state", source, self._heed_while_healing)
        values = dict(received.info)
        try:
            state = TrainState.load_state_dict(values.pop("position"))
            _, _ = state.group["lineage"], _shares_in(state.group)
            state = self._adopted(state, session)
        except (AttributeError, CheckpointError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"island {source} sends no state: {error!r}") from error
        check_finite(received.tensors, source)
        try:
            self._checkpoints.take_over(self._loaded(received.tensors), values, state)
        except CheckpointError as error:
            text = f"island {source} sends a state that does not fit here: {error.message}"
            raise ProtocolError(text, hint=SAME_VERSION) from error
        seconds = time.monotonic() - began
        taken = event("state taken", island=source, step=state.step, seconds=round(seconds, 3))
        _log.info("took over the state of %s after step %d", source, state.step, extra=taken)
        return state

    def _adopted(self, state: TrainState, session: IslandSession) -> TrainState:
        """Another island's state, as this island goes on with it."""
        return state

    def _loaded(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The stages' part of another island's state."""
        return tensors

    def _facts(self) -> dict[str, Any]:
        """The settings that must be the same on all islands."""
        prepared, data = self._prepared, self._prepared.data
        given, plan = prepared.resolved.given, prepared.adapter_plan
        settings = effects.agreed(prepared.config) | {
            name: value
            for name, value in effects.agreed(given).items()
            if name.startswith(("model.", "adapter."))  # of other sections the decided ones
        }
        return {
            **order_facts(data.order, data.fingerprint),
            "adapter": "none" if given.adapter is None else "an adapter",
            **settings,
            "weights of the model": self._cluster.fingerprint,
            "adapter to start from": plan.origin if plan is not None else None,
            "kind of island.share": "auto" if self._island.share == "auto" else "a number",
        }

    def _remembered(self) -> dict[str, Any]:
        at = self._position
        return {"lineage": at.lineage, "run": at.run, "shares": self._shares.state_dict()}

    def _retune(self, shares: Shares) -> None:
        if shares != self._shares:
            total = sum(shares.of.values())
            line = ", ".join(f"{name} {s / total:.0%}" for name, s in shares.of.items())
            _log.info("shares by speed: %s", line, extra=event("shares", shares=line))
            self._shares = shares

    @property
    def _open(self) -> Group:
        assert self._group is not None
        return self._group

    @property
    def _present(self) -> IslandSession:
        if self._session is None:
            raise ReplicasChanged("this island is not among the others")
        return self._session

    # -- waiting --------------------------------------------------------------------------------

    def lively(self) -> bool:
        """Whether the others should wait for this island. Called from another thread; an island
        that stalls leaves, so that nobody hangs."""
        group = self._group
        if group is not None and group.waits:
            return True
        if group is None or self._moved_at is None:
            return False
        patience = self._prepared.config.training.step_timeout_s
        if len(self._step_s) >= _KNOWN_STEPS:
            patience = max(_LEAST_PATIENCE_S, _PATIENCE * statistics.median(self._step_s))
        still_s = min(time.monotonic() - self._moved_at, self._cluster.idle_s)
        if still_s <= patience:
            return True
        if group.session is not None:
            group.session.close("it stalls")
        return False

    def heed_stop(self) -> None:
        """Raise StopWanted after a request to stop, while this island waits between steps."""
        if self._stop.requested is not None:
            raise StopWanted("another island")

    def _heed_while_healing(self) -> None:
        self._note_progress()
        self.heed_stop()

    def _heed_in_step(self) -> None:
        """Raise ReplicasChanged once a request to stop is older than STEP_END_S."""
        self._moved_at = time.monotonic()
        if self._stop.waited_s > timeouts.STEP_END_S:
            raise ReplicasChanged("this run is to stop")

    def _note_progress(self) -> None:
        self._moved_at = time.monotonic()


class SummedGradients:
    """The gradients of one step, summed over all islands: the same bits on each, under any plan. A
    `GradientSum` of exchange `number` of a session.

    Every island sends its gradients to every other island, and adds all gradients in the order of
    the islands' names, in float32 or wider. The order of arrival does not matter. When a step is
    begun again, nothing is sent twice. Raises MemberLost, also for a member whose gradients have
    another shape or type than most.
    """

    def __init__(self, session: IslandSession, number: int) -> None:
        self._session = session
        self._number = number
        self._local: Tensors = {}
        self._losses: dict[str, list[float]] = {}
        self._began = time.monotonic()
        self._ended_at: float | None = None  # when the local gradients were complete

    def give(self, gradients: GradientPart) -> None:
        new = {
            name: gradient.clone()
            for name, gradient in gradients.part.tensors.items()
            if name not in self._local
        }
        self._local.update(new)
        failpoints.hit("island-gradients")
        if new:
            self._session.send(self._number, "gradients", new, last=False)

    def end(self) -> None:
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self._session.send(self._number, "gradients")

    @property
    def since_end_s(self) -> float:
        """Seconds since `end`, spent on transfers or on waiting for slower islands."""
        return 0.0 if self._ended_at is None else time.monotonic() - self._ended_at

    def seconds_per(self, samples: int) -> float:
        """Seconds per sample without waiting for others; 0 where there were no samples."""
        if self._ended_at is None or not samples:
            return 0.0
        return (self._ended_at - self._began) / samples

    def sums(self, names: Sequence[str]) -> Tensors | None:
        parts: list[tuple[str, Tensors, bool]] = []
        for member in self._session.members:
            if member == self._session.me:
                parts.append((member, self._local, True))
            else:
                received = self._session.received(self._number, "gradients", member)
                parts.append((member, received.tensors, received.is_whole))
        sums: Tensors = {}
        for name in names:
            if not all(whole or name in tensors for _, tensors, whole in parts):
                return None
            shares = [(member, tensors[name]) for member, tensors, _ in parts if name in tensors]
            if shares:
                sums[name] = self._sum(name, shares)
        return sums

    def losses(self, local: Sequence[float], check: Check) -> list[float]:
        """The losses of all islands' micro-batches."""
        values = torch.tensor(list(local), dtype=torch.float64)
        self._session.send(self._number, "losses", {"losses": values})
        self._losses = {self._session.me: list(local)}
        for name in self._session.others:
            received = self._session.receive(self._number, "losses", name, check).tensors
            with self._session.judging(name):
                if received.keys() != {"losses"} or received["losses"].dtype != torch.float64:
                    raise ProtocolError(f"island {name} sends no losses")
            self._losses[name] = received["losses"].flatten().tolist()
        return [loss for losses in self._losses.values() for loss in losses]

    def nonfinite(self) -> list[str]:
        """The members whose losses or gradients are not all finite."""
        return [name for name in self._session.members if not self._is_finite(name)]

    def _is_finite(self, name: str) -> bool:
        tensors = self._local
        if name != self._session.me:
            tensors = self._session.received(self._number, "gradients", name).tensors
        numbers = [torch.tensor(self._losses.get(name, [])), *tensors.values()]
        return all(bool(tensor.isfinite().all()) for tensor in numbers)

    def _sum(self, name: str, shares: Sequence[tuple[str, Tensor]]) -> Tensor:
        """The sum in the order of the members. The most frequent shape and type are right, in a tie
        the first, on every island alike. Raises ProtocolError where this island's are wrong."""
        kinds = {member: (tensor.shape, tensor.dtype) for member, tensor in shares}
        [(right, _)] = Counter(kinds.values()).most_common(1)
        for member in [member for member, kind in kinds.items() if kind != right]:
            wrong = f"island {member} sends a gradient of {name} of another shape or type"
            if member == self._session.me:
                raise ProtocolError(f"{wrong} than the others", hint=SAME_VERSION)
            with self._session.judging(member):
                raise ProtocolError(wrong)
        (_, first), *rest = shares
        total = first if not rest else first.to(torch.promote_types(first.dtype, torch.float32))
        for _, share in rest:
            total = total + share.to(total.dtype)
        return total.to(first.dtype)


def _shares_in(group: Mapping[str, Any]) -> Shares:
    return Shares.load_state_dict(group["shares"]) if group.get("shares") else Shares()


def _outcome(info: Mapping[str, Any], name: str) -> StepOutcome:
    return StepOutcome.of(info.get("outcome"), f"island {name}")


def _gravest(votes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    outcomes = [_outcome(vote, name) for name, vote in votes.items()]
    return {"outcome": StepOutcome.gravest(outcomes).as_info()}


def _decision(
    received: Received, session: IslandSession
) -> tuple[StepOutcome, dict[str, float], Tensor]:
    """The leader's decision, the seconds of all, and the leader's norm. Raises ProtocolError."""
    outcome, norm = _outcome(received.info, session.leader), received.tensors.get("norm")
    if norm is None or norm.dim() or (outcome.commits and not norm.isfinite()):
        raise ProtocolError(f"island {session.leader} sends no decision")
    return outcome, seconds_of_all(received.info, session), norm


def seconds_of_all(info: Mapping[str, Any], session: IslandSession) -> dict[str, float]:
    """The seconds of each member, by the leader. Raises ProtocolError."""
    of_each = info.get("seconds")
    if not isinstance(of_each, dict) or of_each.keys() != set(session.members):
        raise ProtocolError(f"island {session.leader} sends no decision")
    return {name: seconds_in(of_each, name, name) for name in of_each}


def seconds_in(info: Mapping[str, Any], key: str, name: str) -> float:
    """The seconds of island `name`. Raises ProtocolError."""
    seconds = info.get(key)
    if not isinstance(seconds, float) or not 0 <= seconds < math.inf:
        raise ProtocolError(f"island {name} has been measured at {seconds!r}")
    return seconds


def _share(position: Position, name: str) -> float | Literal["auto"]:
    """The share in the configuration of island `name`. Raises ProtocolError."""
    share = position.says.get("share")
    if share == "auto" or (isinstance(share, (int, float)) and 0 < share < math.inf):
        return share  # type: ignore[return-value]
    raise ProtocolError(f"island {name} says {share!r} for its share")
