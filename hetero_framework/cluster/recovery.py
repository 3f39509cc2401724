"""Recovery: what a run does after a loss, in the order in which it is done.

1. **Detect.** `WorkerLinks.receive` and `Pipeline` raise a `StepTrouble` in the training thread: a
   link broke, a worker will end, memory ran out, or nothing moves. `retrying` catches it around
   every action.
2. **Mend.** `_mend` does what the table of `Membership` says. As a rule it dials the worker until
   it is back. If the worker still has its stages, nothing was lost: all abort the attempt, and the
   action is repeated.
3. **Fence.** Otherwise the worker has a new process (StagesLost), or will have one
   (WorkerLeaving). Before a worker leaves, it hands its state over. Then `forget_step` voids the
   attempt under way, unconfirmed commits and all answers of the old process.
4. **Restore.** `_rejoin` has the new process load its stages, and `RunLoop.rewind` has all stages
   go back to the newest state that is kept. If a worker stays away (PeerLostError),
   `RunLoop.without` has the others take another plan, or ends the run.
5. **Resume.** `run` calls `RunLoop.steps` again.

Each of these may be interrupted by the next loss, and then begins again.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from hetero_framework import control
from hetero_framework.cluster import link_probe
from hetero_framework.cluster.loaded_stages import planned
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.cluster.membership import MAX_RECOVERIES, Action, Event, WorkerState
from hetero_framework.cluster.worker_links import WorkerLinks
from hetero_framework.config import Config
from hetero_framework.core import addresses, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.dial import DROPS_LARGE, MTU_ADVICE
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Message
from hetero_framework.engine.hosts import (
    DirectLost,
    LinkLost,
    StagesLost,
    Stalled,
    StepTrouble,
    WorkerLeaving,
)
from hetero_framework.engine.out_of_memory import Attempt, StepOutOfMemory
from hetero_framework.engine.pipeline import Pipeline
from hetero_framework.errors import PeerLostError
from hetero_framework.log import event
from hetero_framework.units import clock

_log = logging.getLogger(__name__)
_SUSPICIOUS_LOSSES = 2
"""Losses of one link within a step after which its network is suspected, see `dial.connect`."""
_MOST_STALLS = 3
"""Maximum stalls of one action."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RunLoop(Protocol[T_co]):
    """The training loop, as far as recovery uses it. Each method may raise what `retrying` does."""

    def steps(self) -> T_co:
        """Do all steps that are left."""

    def hand_over(self) -> None:
        """Keep the state that the stages have now."""

    def rewind(self, trouble: StagesLost | WorkerLeaving) -> None:
        """Have all stages go back to the newest state that is kept."""

    def without(self, lost: PeerLostError) -> Callable[[], None]:
        """Return an action that takes a plan without the absent workers. Raises `lost` if there is
        no such plan."""


class Recovery:
    """Keeps the workers of one run together. `members` knows which of them are present."""

    def __init__(
        self,
        config: Config,
        links: WorkerLinks,
        local: LocalWorkers,
        load: Callable[[], None],
        absence_s: float | None,
    ) -> None:
        """
        Args:
            load: Has all workers without stages load them.
            absence_s: Seconds after which an absent worker is given up; None: as configured.
        """
        self.config = config
        """The configuration whose plan is in force."""
        self.pipeline: Pipeline | None = None
        """The pipeline of that plan; None until all its stages are loaded."""
        self.members = links.members
        self.note_death: Callable[[StagesLost], None] = lambda lost: None
        """Called when a worker's process has died; raises PeerLostError after too many deaths."""
        self.requests = itertools.count(1)
        """Numbers for CONTROL requests."""
        self._links = links
        self._local = local
        self._load = load
        self._absence_s = absence_s

    # -- the whole run --------------------------------------------------------------------------

    def run(self, loop: RunLoop[T]) -> T:
        """Run the steps of `loop` to their end; after a loss, restore its workers and its state
        first. Raises PeerLostError when a worker is gone for good."""
        restore: Callable[[], None] | None = None
        while True:
            try:
                if restore is not None:
                    restore()
                    restore = None  # it holds a traceback, which holds tensors
                return loop.steps()
            except (StagesLost, WorkerLeaving) as trouble:
                restore = partial(self._go_back, loop, trouble)
            except PeerLostError as lost:
                if not planned(self.config, self.members.those(WorkerState.LEFT)):
                    raise
                restore = loop.without(lost)
                for worker in self.members.away:
                    self._links.await_in_background(worker)
                _log.warning("%s; the run goes on without", lost.message)

    def _go_back(self, loop: RunLoop[Any], trouble: StagesLost | WorkerLeaving) -> None:
        while isinstance(trouble, WorkerLeaving):  # it still answers, so no step is lost
            try:
                loop.hand_over()
                break
            except (StagesLost, WorkerLeaving) as another:
                trouble = another
        last = trouble
        self.outlive(lambda: loop.rewind(last), trouble)

    def outlive(
        self,
        action: Callable[[], T],
        trouble: StagesLost | WorkerLeaving | None = None,
        *,
        loads: bool = False,
    ) -> T:
        """Run `action`, and repeat it whenever a worker's process is replaced meanwhile. `trouble`
        is a replacement before the first run. The worker loads its stages before `action` runs,
        unless the action `loads` all stages by itself."""
        while True:
            try:
                if isinstance(trouble, StagesLost):
                    self.note_death(trouble)
                if trouble is not None:
                    self._part_with_leavers()
                if trouble is not None and not loads:
                    self._rejoin()
                return action()
            except (StagesLost, WorkerLeaving) as lost:
                trouble = lost

    def _part_with_leavers(self) -> None:
        """Let leaving workers go, whose state is saved, and wait until they are back. Raises
        PeerAwayError, PeerLostError, StopWanted."""
        leavers = self.members.those(WorkerState.LEAVING)
        for worker in leavers:
            self._links.let_go(worker, Message(m.Bye("what was here is saved")))
            self.members.on(worker, Event.DIAL)
            longest_s = self.config.training.longest_outage_s
            up_to = f" up to {clock(longest_s)}" if longest_s < math.inf else ""
            text = "worker %s left (%s); the run waits%s for it. Ctrl-C stops with all that is done"
            _log.warning(text, worker, self.members.absence(worker).reason, up_to)
        for worker in leavers:
            self._await_return(worker, str(self.members.absence(worker).reason))

    def forget_step(self) -> None:
        """Have all workers that are here forget the step under way: the run goes back, or takes
        another plan. Raises PeerLostError for a further worker that does not come back."""
        if (pipeline := self.pipeline) is None:
            return  # another plan is being taken
        pipeline.forget_commits()
        while True:
            with suppress(StagesLost):  # its process is fenced as well, by `members`
                self.retrying(pipeline.abort)
                return

    def _rejoin(self) -> None:
        """Have the workers that lost their stages load them, in as many processes as it takes,
        while the others keep theirs. Raises PeerLostError for a worker that does not come back."""
        self.forget_step()
        if self.pipeline is not None:
            self._load()
            self.members.settled()

    # -- one action -----------------------------------------------------------------------------

    def retrying(self, action: Callable[[], T]) -> T:
        """Run `action`; after trouble mend the cause, abort the attempt, and run the action again.
        Trouble during the mending is mended next. The action must be repeatable: weights and
        optimizer must not have stepped.

        Raises StagesLost when a worker is back in a new process, WorkerLeaving when a worker will
        end and is to hand over its state, PeerLostError when a worker is gone, and OutOfMemory when
        memory runs out in a second attempt.
        """

        def mend(trouble: StepTrouble) -> None:
            self._mend(trouble)
            _log.info("", extra=event("step repeated"))
            assert self.pipeline is not None
            self.pipeline.abort()

        result = self._repeated(action, mend)
        self.members.settled()
        return result

    def while_loading(self, action: Callable[[], T]) -> T:
        """Run `action`, which has workers load stages, until it ends without trouble. Raises
        WorkerLeaving for a worker that is to hand over its stages, and PeerLostError."""

        def mend(trouble: StepTrouble) -> None:
            with suppress(StagesLost):  # that worker loads its stages as well
                self._mend(trouble)

        return self._repeated(action, mend)

    @staticmethod
    def _repeated(action: Callable[[], T], mend: Callable[[StepTrouble], None]) -> T:
        trouble: StepTrouble | None = None
        stalls = 0
        short: set[Attempt | None] = set()  # attempts in which memory ran out, in any process
        while True:
            try:
                if trouble is not None:
                    mended, trouble = trouble, None
                    mend(mended)
                    del mended  # its traceback holds the tensors of the attempt
                return action()
            except StepTrouble as caught:
                stalls += isinstance(caught, Stalled)
                if isinstance(caught, StepOutOfMemory):
                    short.add(caught.attempt)
                if (isinstance(caught, WorkerLeaving) and caught.is_noted) or len(short) > 1:
                    raise
                if stalls > _MOST_STALLS:
                    raise PeerLostError(f"{caught}; that was attempt {stalls}") from None
                trouble = caught

    def _mend(self, trouble: StepTrouble) -> None:
        """Mend the cause of `trouble` before the attempt that it ended is repeated. Raises what
        `retrying` does, and further trouble."""
        match trouble:
            case LinkLost():
                self.recover(trouble)
            case WorkerLeaving():
                left = event("worker left", worker=trouble.worker, reason=trouble.message)
                _log.info("", extra=left)
                self.on(trouble.worker, Event.LEAVING, trouble.reason)
                if self.members.those(WorkerState.LEAVING):
                    trouble.hint, trouble.is_noted = self._advice(trouble.worker), True
                    raise trouble
            case DirectLost():
                self._relay_for(trouble)
            case Stalled():
                self._end_hanging(str(trouble))
            case StepOutOfMemory():
                text = "%s; the step is given up everywhere and done again, once"
                lack = event("memory ran out", "step repeated", worker=trouble.worker)
                _log.warning(text, trouble.message, extra=lack)

    def _relay_for(self, lost: DirectLost) -> None:
        """Have the coordinator relay for this pair of workers until their link is back."""
        self._links.direct.drop(lost.pair)
        one, other = sorted(map(str, lost.pair))
        _log.warning(
            f"lost the link between workers {one} and {other} ({lost.reason}); their "
            "tensors go through the coordinator until it is back",
            extra=event("direct link lost", "relay", workers=f"{one}, {other}"),
        )

    def _end_hanging(self, stalled: str) -> None:
        """End the workers whose main thread does not answer; whatever started them starts them
        again. Raises PeerLostError if all workers answer."""
        assert self.pipeline is not None
        workers = planned(self.config, self._links.workers)
        asked = {w: control.request(next(self.requests), link_probe.ALIVE, None) for w in workers}
        try:
            answering = self.pipeline.answering(asked, timeouts.ALIVE_S)
        except DirectLost as lost:  # perhaps the reason why nothing moves: the step is repeated
            self._relay_for(lost)
            return
        except LinkLost:  # the abort that follows finds it again
            return
        hanging = [worker for worker in workers if worker not in answering]
        if not hanging:
            raise PeerLostError(
                f"{stalled}; every worker answers",
                hint="it may be far slower than planned: training.step_timeout_s sets this limit",
            )
        for worker in hanging:
            gone = event("worker hangs", "ended", worker=worker, reason=stalled)
            text = "%s; worker %s answers nothing and is ended"
            _log.warning(text, stalled, worker, extra=gone)
            if not self._local.kill(worker):
                # A worker that does not even read this is met again when its link is made anew.
                self._links.let_go(worker, Message(m.Quit(stalled)))

    # -- one worker -----------------------------------------------------------------------------

    def recover(self, lost: LinkLost) -> None:
        """Have a worker whose link broke take part again. Raises StagesLost and PeerLostError."""
        self.on(lost.worker, Event.LINK_LOST, lost.reason)

    def on(self, worker: WorkerId, happened: Event, why: str = "") -> None:
        """Note an event and do what the table says, also for links that break meanwhile."""
        while True:
            try:
                for action in self.members.on(worker, happened):
                    self._do(action, worker, happened, why)
                return
            except LinkLost as lost:
                worker, happened, why = lost.worker, Event.LINK_LOST, lost.reason

    def _do(self, action: Action, worker: WorkerId, happened: Event, why: str) -> None:
        """The one place that acts on an event."""
        match action:
            case Action.DIAL:
                self._dial(worker, why)
            case Action.SET_UP:
                stages = (s.index for s in self.config.plan.stages if s.owner == worker)
                setup = m.Setup(self.config.to_dict(), tuple(stages))
                self._links.send(worker, Message(setup))
            case Action.REPEAT_COMMIT:
                if self.pipeline is not None:
                    self.pipeline.repeat_commit(worker)
            case Action.REJOIN:
                self._links.direct.forget(worker)
                raise StagesLost(worker, why)
            case Action.HAND_OVER:
                if self.pipeline is not None:
                    self.pipeline.abort()
            case Action.AWAIT:
                _log.info("worker %s, which has no layers, is away (%s)", worker, why)
                self._links.let_go(worker, Message(m.Bye("it has no layers")))
                self._links.await_in_background(worker)
            case Action.GIVE_UP:
                self._give_up(worker, happened, why)

    def _dial(self, worker: WorkerId, why: str) -> None:
        ended = self._local.exit_text(worker)
        lost = event("worker lost", "connecting again", worker=worker, reason=ended or why)
        _log.warning("lost the link to worker %s (%s); connecting again", worker, why, extra=lost)
        self._suspect_large_packets(worker)
        self._await_return(worker, ended or why)

    def _await_return(self, worker: WorkerId, why: str) -> None:
        """Dial a worker until it is back, and do what follows."""
        try:
            has_stages = self._links.reconnect(worker, self._absence_s)
        except PeerLostError as gone:
            self.members.on(worker, Event.GONE)
            raise type(gone)(gone.message, hint=self._advice(worker)) from gone
        text = "is back" if has_stages else "is back in a new process"
        _log.info("worker %s %s", worker, text, extra=event("worker back", worker=worker))
        self.on(worker, Event.BACK if has_stages else Event.FRESH, why)

    def _suspect_large_packets(self, worker: WorkerId) -> None:
        """Use small packets if a link breaks repeatedly: a network that drops large packets breaks
        a link whenever much is sent, and lets it be opened again."""
        used, entry = self._links.small_packets, self.config.worker(worker)
        losses = self.members.losses(worker)
        if losses < _SUSPICIOUS_LOSSES or worker in used or entry.dials:
            return
        if not addresses.is_local_address(entry.ip):
            used.add(worker)
            text = "worker %s is reached with small packets from now on: its link broke %d times"
            text += " before a step was done, as where %s. hetero doctor --config tells; if so, %s"
            _log.warning(text, worker, losses, DROPS_LARGE, MTU_ADVICE)

    def _give_up(self, worker: WorkerId, happened: Event, why: str) -> None:
        """Report that a worker is gone. `run` goes on without it, or ends."""
        losses = self.members.losses(worker)
        if happened is Event.LINK_LOST and losses > MAX_RECOVERIES:
            raise PeerLostError(
                f"the link to worker {worker} broke {losses} times in one step: {why}",
                hint="check the network: hetero doctor --config looks at it from this machine",
            )
        raise PeerLostError(why, hint=self._advice(worker))

    def _advice(self, worker: WorkerId) -> str | None:
        """The hint about a worker that is gone; local workers are started without the user."""
        is_local = self._local.starts(worker)
        return None if is_local else f"start worker {worker} again on its machine"
