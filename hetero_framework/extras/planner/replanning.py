"""Chooses a run's next plan: for a shorter step, without workers that are away, or with workers
that are back.

A new plan is made only from the times of the run's steps and from the memory that was free when it
began. `Coordinator._take_plan` carries it out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from hetero_framework.cluster.cluster import Cluster, MachineFacts, free_bytes
from hetero_framework.cluster.membership import WorkerState
from hetero_framework.cluster.roles import machine_of
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.threads import in_background
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.errors import PeerLostError, PlanError, UserError
from hetero_framework.extras import planner
from hetero_framework.extras.planner import FleetProfile
from hetero_framework.extras.planner.layout import Fleet
from hetero_framework.extras.planner.planning import CHUNKS
from hetero_framework.extras.planner.profile import bytes_of_parts, source_of
from hetero_framework.extras.planner.replan.measured_fleet import LayerWork, Observed, PartBytes
from hetero_framework.extras.planner.replan.replan_policy import (
    Judge,
    Proposal,
    Question,
    Stages,
    tuned,
)
from hetero_framework.extras.planner.result import host_rates
from hetero_framework.log import event
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model
from hetero_framework.models.sizing.memory import StageMemory, memory_of_parts
from hetero_framework.trainer import setup
from hetero_framework.trainer.plans import PlanChange, Plans, layers_of
from hetero_framework.trainer.run_checkpoint import plan_entries

NEVER, ASK = "never", "ask"
_LEAST_GAIN = 0.02
_ASSUMED_RATE = 12e9  # bytes a second from host memory, where nothing was measured: PCIe 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenPlan(PlanChange):
    """One that does without the workers `away`; `proposal` is the judge's, for a shorter step."""

    away: tuple[WorkerId, ...]
    proposal: Proposal | None = None


class Replanning(Plans):
    """The plans of one run."""

    def __init__(
        self, prepared: setup.Prepared, facts: Mapping[WorkerId, MachineFacts], *, survivors: bool
    ) -> None:
        """`survivors`: the run goes on without workers that stay away."""
        super().__init__(prepared, facts)
        given = prepared.resolved.given
        self._survivors = survivors
        self.lacking: set[WorkerId] = {*given.plan.owners} - {*prepared.config.plan.owners}
        """Workers that the plan in force was made without; `Membership` knows which are here."""
        self._policy: str = given.training.replan
        self._home = plan_entries(given)  # the plan when everybody is here
        self._judge = Judge(_model_work(prepared), prepared.config.plan.stages, self._fleet)
        self._search: tuple[Question, Future[Proposal | None]] | None = None
        self._return: Proposal | None = None
        self._told: list[Stages] = []

    # -- for a shorter step ---------------------------------------------------------------------

    def after_step(self, seen: Profile, step_s: float) -> None:
        if len(self.facts) == 1:
            return
        advice = self._judge.note(seen, step_s)
        if self._policy == NEVER:
            return
        if isinstance(advice, Proposal):
            self._return = advice
        elif advice is not None and self._search is None:
            _ = self._part_bytes  # here: making models is for one thread at a time
            answer = partial(self._judge.answer, advice)
            self._search = advice, in_background(answer, "search for a plan")

    def wanted(self, steps_left: int) -> ChosenPlan | None:
        """The plan to take now, since it shortens the rest of the run; under "ask" it is only
        reported."""
        question, proposal = self._answer()
        if proposal is None:
            return None
        saved_s = max(proposal.gain, _LEAST_GAIN) * self._judge.step_s * steps_left
        if question is not None and self._policy == ASK:
            self._judge.refuse(question)
            if proposal.stages not in self._told:
                self._told.append(proposal.stages)
                _say(question, proposal)
            return None
        try:
            if saved_s > self.move_s:
                return self._proposed(proposal)
            text = "%s would save %.0f s of the rest; loading takes %.0f s"
            _log.debug(text, layers_of(proposal.stages), saved_s, self.move_s)
        except UserError as error:
            _log.debug("a plan is not taken: %s", error.message)
        if question is not None:
            self._judge.refuse(question)
        return None

    def _answer(self) -> tuple[Question | None, Proposal | None]:
        """The judge's present decision."""
        proposal, self._return = self._return, None
        if proposal is not None:
            return None, proposal
        if self._search is None or not self._search[1].done():
            return None, None
        (question, future), self._search = self._search, None
        if (error := future.exception()) is not None:  # our bug; a run does not end over advice
            self._policy = NEVER
            text = "no better plan is looked for any more: %s: %s"
            _log.warning(text, type(error).__name__, error)
            _log.debug("the search for a plan failed", exc_info=error)
            return None, None
        proposal = future.result()
        if question.stages != self._prepared.config.plan.stages:
            return None, None  # another plan was taken meanwhile
        if proposal is None:
            self._judge.refuse(question)
        return question, proposal

    def _proposed(self, proposal: Proposal) -> ChosenPlan:
        if proposal.returns:
            reason = "the other plan's gain has not come"
        else:
            reason = f"a step should take {proposal.gain:.0%} less"
        cut = [{"id": s.owner, "start": s.start, "end": s.end} for s in proposal.stages]
        change = self._change(self._with_settings(cut), reason, tuple(self.lacking))
        return replace(change, proposal=proposal)

    # -- for workers that come and go -----------------------------------------------------------

    def changes(self, cluster: Cluster, steps_left: int) -> Iterator[PlanChange]:
        for worker, fact in cluster.returned().items():
            if fact is not None:
                self.facts[worker] = fact
        spare = cluster.members.those(WorkerState.SPARE)
        if back := [worker for worker in spare if worker in self.lacking]:
            try:
                yield self.with_back(back, cluster.members.away)
            except UserError as error:
                self.lacking.difference_update(back)
                _log.warning("worker %s is back and stays without layers: %s", back, error.message)
        if (change := self.wanted(steps_left)) is not None:
            yield change

    def after_loss(self, lost: PeerLostError, away: Collection[WorkerId]) -> PlanChange:
        if not self._survivors:
            raise lost
        try:
            return self.without(away)
        except UserError as error:
            hint = f"the others cannot go on without it: {error.message}"
            hint = ". ".join(filter(None, [hint, lost.hint]))
            raise type(lost)(lost.message, hint=hint) from error

    def without(self, away: Collection[WorkerId]) -> ChosenPlan:
        """The best plan of the present workers. Raises PlanError if they cannot hold it all."""
        names = ", ".join(map(str, away))
        entries = self._searched(away)
        return self._change(entries, f"worker {names} stays away", tuple(away))

    def with_back(self, back: Collection[WorkerId], away: Collection[WorkerId]) -> ChosenPlan:
        """The plan for when workers have come `back` and others are still `away`. Raises
        PlanError."""
        entries = self._searched(away) if away else self._home
        names = ", ".join(map(str, back))
        return self._change(entries, f"worker {names} is back", tuple(away))

    def taken(self, change: PlanChange) -> None:
        assert isinstance(change, ChosenPlan)
        self._prepared, self.lacking = change.prepared, set(change.away)
        if not self.lacking:
            self._home = plan_entries(change.prepared.config)
        self._judge.taken(change.prepared.config.plan.stages, change.proposal)

    # -- inside ---------------------------------------------------------------------------------

    @cached_property
    def _streaming(self) -> set[WorkerId]:
        """Processes that may stream layers: those that do by the user's plan."""
        return {entry.id for entry in self._prepared.resolved.given.shard_plan if entry.offload}

    @cached_property
    def _sources(self) -> dict[WorkerId, dict[str, Any]]:
        """Where each process streams layers from, by the user's plan, and the rate: measured for
        that plan, or assumed."""
        given = self._prepared.resolved.given
        known = host_rates(given)
        return {
            entry.id: source_of(entry.offload_from, known.get(str(entry.id), _ASSUMED_RATE))
            for entry in given.shard_plan
        }

    @cached_property
    def _part_bytes(self) -> dict[WorkerId, PartBytes]:
        """The bytes of the parts on each process. Made when needed: it takes seconds for large
        models."""
        given, prepared = self._prepared.resolved.given, self._prepared
        memory = given.per_quantization(self.facts, lambda owner: _memory(prepared, owner))
        return {
            owner: bytes_of_parts(memory[owner], one_memory=fact.host_free is None)
            for owner, fact in self.facts.items()
        }

    def _change(
        self, entries: setup.Entries, reason: str, away: tuple[WorkerId, ...]
    ) -> ChosenPlan:
        prepared = setup.replanned(self._prepared, entries, self.facts, reason)
        return ChosenPlan(prepared, reason, self._step_s(prepared.config.plan.stages, away), away)

    def _step_s(self, stages: Stages, away: Collection[WorkerId]) -> float | None:
        """The expected time of a plan's step, from the measured steps."""
        if self._judge.observed.is_empty:
            return None
        schedule = tuned(Fleet(self._fleet(self._judge.observed, away)), stages)
        return schedule.forecast.seconds if schedule is not None else None

    def _fleet(self, observed: Observed, away: Collection[WorkerId] | None = None) -> FleetProfile:
        config = self._prepared.config
        absent = self.lacking if away is None else away
        free = free_bytes(config, {k: fact for k, fact in self.facts.items() if k not in absent})
        return observed.fleet(
            free,
            {owner: self._holdable(owner, free[owner]) for owner in free},
            config.training.gradient_accumulation_steps,
            relayed=config.links == "relay",
        )

    def _holdable(self, owner: WorkerId, free: float) -> PartBytes:
        """The needs of the parts on a process. Parts that others hold in another precision need
        more than is free, since they keep it."""
        config, parts = self._prepared.config, self._part_bytes[owner]
        streams, free_there = owner in self._streaming, self.facts[owner].host_free
        if free_there and (streams or config.training.offload_optimizer):
            name = machine_of(config, config.machine(owner))
            parts = {**parts, "host_bytes": free_there, "machine": name}
            if streams:
                parts |= self._sources[owner]
        kind = config.quantization(owner)
        others = {s.index for s in config.plan.stages if config.quantization(s.owner) != kind}
        if not others:
            return parts
        layers = [*parts["layer_bytes"]]
        for stage in (s for s in config.plan.stages if s.index in others):
            layers[stage.start : stage.end] = [2 * free] * (stage.end - stage.start)
        head = 2 * free if len(config.shard_plan) - 1 in others else parts["head_bytes"]
        return {**parts, "layer_bytes": layers, "head_bytes": head}

    def _searched(self, away: Collection[WorkerId]) -> list[dict[str, Any]]:
        """The planner's answer for the processes that are here."""
        owners = [entry.id for entry in self._prepared.resolved.given.shard_plan]
        chunks = {CHUNKS} if len(set(owners)) < len(owners) else set()
        fleet = self._fleet(self._judge.observed, away)
        try:
            result = planner.plan(fleet, allow=chunks)
        except PlanError as error:
            if not isinstance(kinds := self._prepared.config.kinds, dict):
                raise
            kept = f"layers keep their precision ({json.dumps(kinds)}), which differs by machine"
            raise PlanError(f"{error.message}; {kept}", hint=error.hint) from error
        return self._with_settings(result.shard_plan)

    def _with_settings(self, entries: setup.Entries) -> list[dict[str, Any]]:
        """The layers of `entries` with the user's settings of each process; direct links are a
        setting of the run, and a process that streams layers streams as few as it has to."""
        given = {entry.id: entry for entry in self._prepared.resolved.given.shard_plan}
        kept = ("gradient_checkpointing", "offload_optimizer")
        files = {entry.id for entry in given.values() if entry.offload_from == "file"}
        return [
            {
                **{name: entry[name] for name in ("id", "start", "end")},
                **{name: getattr(given.get(entry["id"]), name, None) for name in kept},
                "offload": "auto" if entry["id"] in self._streaming else 0,
                "offload_from": "file" if entry["id"] in files else "memory",
            }
            for entry in entries
        ]


def _say(question: Question, proposal: Proposal) -> None:
    """The one line of training.replan "ask"."""
    seen = question.median
    busy_s = [f + b for f, b in zip(seen.forward_s, seen.backward_s, strict=True)]
    shares = ", ".join(f"{seconds / sum(busy_s):.0%}" for seconds in busy_s)
    slowest = question.stages[busy_s.index(max(busy_s))].process
    better = layers_of(proposal.stages)
    text = (
        "%s holds up the others: of the time that the stages compute theirs is %s; with %s a step "
        'would take %.0f %% less (training.replan "auto" takes such plans; hetero timeline says '
        "more)"
    )
    fields = event("better plan", "none", process=slowest, shares=shares, plan=better)
    _log.info(text, slowest, shares, better, 100 * proposal.gain, extra=fields)


def _model_work(prepared: setup.Prepared) -> LayerWork:
    """The work in weights, as matrix products cost it for a token."""
    model = meta_model(prepared.model_config)
    blocks = model.get_submodule(introspect(prepared.model_config).blocks)
    layers = [sum(p.numel() for p in block.parameters()) for block in blocks.children()]
    head = model.get_output_embeddings()
    head_work = sum(p.numel() for p in head.parameters()) if head is not None else 0
    return LayerWork(tuple(map(float, layers)), float(head_work))


def _memory(prepared: setup.Prepared, owner: WorkerId) -> list[StageMemory]:
    layers = introspect(prepared.model_config).num_layers
    config, tokens = prepared.config.held_by(owner), prepared.data.row_tokens
    if config.training.gradient_checkpointing:  # "auto": wherever it is needed
        config = config.with_changes(training={"gradient_checkpointing": True})
    plan = prepared.adapter_plan
    return memory_of_parts(config, prepared.model_config, layers, plan, tokens)
