"""A simulated world in which links break and processes die at any moment. A coordinator follows
`Membership`: every event is in its table, and workers that take part have their stages."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_framework.cluster.membership import (
    MAX_RECOVERIES,
    Action,
    Event,
    Membership,
    WorkerState,
)

WORKERS = (1, 2, "box")
ANY = st.sampled_from(WORKERS)


@dataclass
class Worker:
    """What is so, whether the coordinator knows it or not."""

    alive: bool = True
    stages: bool = False
    linked: bool = False
    dialled: bool = False
    told_to_load: bool = False
    leaving: bool = False


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.begin(joined=False)

    def begin(self, joined: bool) -> None:
        """A run begins; `joined`: all its workers have their stages already."""
        self.members = Membership(WORKERS)
        self.world = {worker: Worker() for worker in WORKERS}
        self.over = False
        for worker in WORKERS:
            self.members.on(worker, Event.DIAL)
            self.world[worker].dialled = True
        if joined:
            for worker in WORKERS:
                self.is_answered(worker)
            self.plan_is_sent()
            for worker in WORKERS:
                self.has_loaded(worker)

    @initialize(joined=st.booleans())
    def first_run_begins(self, joined: bool) -> None:
        self.begin(joined)

    def state(self, worker: int | str) -> WorkerState:
        return self.members._states[worker]

    def happens(self, worker: int | str, event: Event) -> None:
        """Tell the coordinator, and do what it then does."""
        here = self.world[worker]
        for action in self.members.on(worker, event):
            if action is Action.DIAL:
                here.dialled = True
            elif action is Action.SET_UP:
                here.told_to_load, here.stages = True, False
            elif action is Action.GIVE_UP:
                often = self.members.losses(worker) > MAX_RECOVERIES
                assert often or not here.alive, (worker, event)
                self.over = True
            elif action is Action.REJOIN:
                here.stages = False
            elif action is Action.HAND_OVER:
                here.told_to_load = False

    def going_on(self) -> bool:
        return not self.over

    @precondition(going_on)
    @rule(worker=ANY)
    def is_answered(self, worker: int | str) -> None:
        here = self.world[worker]
        if here.dialled:
            here.dialled, here.linked = False, here.alive
            back = Event.BACK if here.stages else Event.FRESH
            self.happens(worker, back if here.alive else Event.GONE)

    @precondition(going_on)
    @rule(worker=ANY)
    def link_breaks(self, worker: int | str) -> None:
        here = self.world[worker]
        if here.linked or here.dialled:  # in the handshake, too
            here.linked = here.dialled = here.told_to_load = here.leaving = False
            self.happens(worker, Event.LINK_LOST)

    @precondition(going_on)
    @rule(worker=ANY, comes_back=st.booleans())
    def process_dies(self, worker: int | str, comes_back: bool) -> None:
        here = self.world[worker]
        here.alive, here.stages = here.alive and comes_back, False
        if here.linked:
            self.link_breaks(worker)

    @precondition(going_on)
    @rule()
    def plan_is_sent(self) -> None:
        """As soon as everybody is there."""
        if all(here.linked for here in self.world.values()):
            for worker in self.members.those(WorkerState.JOINING):
                self.happens(worker, Event.PLANNED)

    @precondition(going_on)
    @rule(worker=ANY)
    def has_loaded(self, worker: int | str) -> None:
        here = self.world[worker]
        if here.linked and here.told_to_load and not here.leaving:
            here.stages, here.told_to_load = True, False
            self.happens(worker, Event.LOADED)

    @precondition(going_on)
    @rule(worker=ANY)
    def is_told_to_end(self, worker: int | str) -> None:
        """Whatever the others do. One without stages just ends."""
        here = self.world[worker]
        if here.linked:
            self.happens(worker, Event.LEAVING)
            here.leaving = True

    @precondition(going_on)
    @rule(worker=ANY)
    def is_let_go(self, worker: int | str) -> None:
        """Its state is saved, or there was none; another process takes its place."""
        here = self.world[worker]
        if here.leaving:
            here.linked = here.stages = here.told_to_load = here.leaving = False
            if self.state(worker) is WorkerState.LEAVING:
                self.happens(worker, Event.DIAL)
                here.dialled = True
            else:
                self.happens(worker, Event.LINK_LOST)

    @precondition(going_on)
    @rule()
    def step_is_done(self) -> None:
        if len(self.members.those(WorkerState.READY)) == len(WORKERS):
            self.members.settled()

    @precondition(lambda self: self.over)
    @rule(joined=st.booleans())
    def another_run_begins(self, joined: bool) -> None:
        self.begin(joined)

    @invariant()
    def who_takes_part_has_its_stages(self) -> None:
        if self.over:
            return
        for worker, here in self.world.items():
            state = self.state(worker)
            assert state is not WorkerState.READY or (here.linked and here.stages), (worker, here)
            assert state is not WorkerState.LOST or not here.linked, (worker, here)
            # Nobody is forgotten: there is a link, or somebody is opening one.
            assert here.linked or here.dialled, (worker, state, here)
