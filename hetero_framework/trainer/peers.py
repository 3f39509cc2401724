"""The coordinator's links to its workers: dialling, handshake, relaying, loss and return.

Frames from worker to worker are passed on in the reader thread, undecoded, while the coordinator
computes. Everything else lands in one inbox, which the training thread reads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import hetero_framework
from hetero_framework.config import Config, StageSpec, WorkerConfig
from hetero_framework.core.protocol import PROTOCOL_VERSION, Message, MessageType
from hetero_framework.core.session import Session
from hetero_framework.core.transport import Link, connect
from hetero_framework.errors import (
    HeteroError,
    NetworkError,
    PeerLostError,
    ProtocolError,
    error_from_peer,
)

WorkerId = int | str
_RELAYED = (MessageType.FORWARD, MessageType.BACKWARD)
_HANDSHAKE_S = 60.0
_QUIET_S = 20.0


class LinkLost(Exception):
    """The link to one worker broke; the step in flight has to be repeated."""

    def __init__(self, worker: WorkerId, reason: str) -> None:
        super().__init__(f"worker {worker}: {reason}")
        self.worker = worker
        self.reason = reason


class _Wire:
    """One connection to a worker and how far its conversation has come."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # None for the moment between making the wire and its link.
        self.link: Link | None = None

    def close(self) -> None:
        if self.link is not None:
            self.link.close()


@dataclass(frozen=True)
class Event:
    """What the inbox holds: a message of a worker, or the news that its link is gone."""

    worker: WorkerId
    wire: _Wire
    message: Message | None = None
    lost: str | None = None


class Peers:
    """All links of one run. `Pipeline` and the set-up talk to workers through it alone."""

    def __init__(
        self,
        config: Config,
        run_id: str,
        max_frame_bytes: int,
        *,
        note: Callable[[str], None],
        allocate: Callable[[int], memoryview] | None = None,
        exit_text: Callable[[WorkerId], str | None] = lambda worker: None,
    ) -> None:
        """`note` shows a line to the user; `allocate` makes receive buffers (pinned on GPUs);
        `exit_text` says how a local worker process ended, None while it lives.
        """
        used = {entry.id for entry in config.shard_plan}
        self._workers = {w.id: w for w in config.workers if w.id in used}
        self._config = config
        self._run_id = run_id
        self._max_frame_bytes = max_frame_bytes
        self._note = note
        self._allocate = allocate
        self._exit_text = exit_text
        self._wires: dict[WorkerId, _Wire] = {}
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._owners: dict[int, WorkerId] = {}
        self._current: tuple[int, int] = (-1, -1)
        self._stop = threading.Event()

    @property
    def workers(self) -> list[WorkerId]:
        return list(self._workers)

    def route(self, stages: Iterable[StageSpec]) -> None:
        """Tell which worker owns which stage; frames for the others come to the inbox."""
        self._owners = {s.index: s.owner for s in stages if s.owner in self._workers}

    def owner(self, stage: int) -> WorkerId:
        return self._owners[stage]

    def expect(self, step: int, attempt: int) -> None:
        """From now on only boundary frames of this attempt at this step are passed on."""
        self._current = (step, attempt)

    # -- connecting -----------------------------------------------------------------------------

    def connect_all(self) -> dict[WorkerId, dict[str, Any]]:
        """Dial every worker at once; what each said in its WELCOME.

        Raises the first error when all have answered or failed: NetworkError for one that cannot
        be reached in `connect_timeout_s`, ProtocolError for another protocol version.
        """
        welcomes: dict[WorkerId, dict[str, Any]] = {}
        errors: dict[WorkerId, HeteroError] = {}

        def dial(worker: WorkerConfig) -> None:
            try:
                welcomes[worker.id] = self._open(worker, self._config.training.connect_timeout_s)
            except HeteroError as error:
                errors[worker.id] = error

        threads = [
            threading.Thread(target=dial, args=(w,), name=f"dial-{w.id}", daemon=True)
            for w in self._workers.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            # Joined in slices so that Ctrl-C is heard on every system.
            while thread.is_alive():
                thread.join(0.2)
        for worker_id in self._workers:
            if worker_id in errors:
                raise errors[worker_id]
        return welcomes

    def reconnect(self, worker_id: WorkerId, timeout_s: float) -> dict[str, Any]:
        """Dial a lost worker again. Raises PeerLostError when its process or state is gone."""
        try:
            welcome = self._open(self._workers[worker_id], timeout_s)
        except (NetworkError, ProtocolError) as error:
            raise PeerLostError(
                f"worker {worker_id} does not come back: {error.message}",
                hint="start it again, then continue with --resume latest",
            ) from error
        if welcome.get("run_id") != self._run_id:
            raise PeerLostError(
                f"worker {worker_id} came back without its state (its process was restarted)",
                hint="continue with --resume latest",
            )
        return welcome

    def _open(self, worker: WorkerConfig, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        told = False

        def on_retry(attempt: int, elapsed_s: float, reason: str) -> None:
            nonlocal told
            ended = self._exit_text(worker.id)
            if ended is not None:
                raise NetworkError(f"worker {worker.id} did not start: {ended}")
            # A worker of this machine is still importing torch; that is not worth a line.
            if not told and elapsed_s > _QUIET_S:
                told = True
                self._note(
                    f"waiting for worker {worker.id} at {worker.ip}:{worker.port} ({reason}; "
                    f"up to {timeout_s - elapsed_s:.0f} s more)"
                )

        sock = connect(
            worker.ip, worker.port, timeout_s, on_retry, who=f"worker {worker.id}", stop=self._stop
        )
        answers: queue.SimpleQueue[Message | str] = queue.SimpleQueue()
        wire = _Wire(Session("coordinator"))
        wire.link = Link(
            sock,
            name=f"worker {worker.id}",
            on_message=self._receiver(worker.id, wire, answers),
            on_close=lambda reason: self._closed(worker.id, wire, reason, answers),
            max_frame_bytes=self._max_frame_bytes,
            liveness_s=self._config.training.liveness_timeout_s,
            allocate=self._allocate,
        )
        self._wires[worker.id] = wire
        hello = {
            "protocol": PROTOCOL_VERSION,
            "package": hetero_framework.__version__,
            "run_id": self._run_id,
            "worker_id": worker.id,
            "max_frame_bytes": self._max_frame_bytes,
        }
        with suppress(LinkLost):
            self.send(worker.id, Message(MessageType.HELLO, hello))
        try:
            answer = answers.get(timeout=max(_HANDSHAKE_S, deadline - time.monotonic()))
        except queue.Empty:
            wire.close()
            raise NetworkError(
                f"worker {worker.id} at {worker.ip}:{worker.port} accepted the connection "
                "but does not answer",
                hint="is another run using it, or another program on that port?",
            ) from None
        if isinstance(answer, str):
            raise NetworkError(
                f"worker {worker.id} at {worker.ip}:{worker.port} closed the connection: {answer}",
                hint="look at that worker's own screen or log",
            )
        if answer.type is MessageType.REJECT:
            wire.close()
            kind = ProtocolError if answer.meta["code"] == "protocol" else NetworkError
            raise kind(
                f"worker {worker.id} refused: {answer.meta['message']}",
                hint=answer.meta.get("hint"),
            )
        return answer.meta

    # -- traffic --------------------------------------------------------------------------------

    def send(self, worker_id: WorkerId, message: Message) -> None:
        """Queue a message. Raises LinkLost when the link is already gone."""
        wire = self._wires.get(worker_id)
        if wire is None or wire.link is None:
            raise LinkLost(worker_id, "the link is closed")
        wire.session.send(message)
        try:
            wire.link.send(message)
        except PeerLostError as error:
            raise LinkLost(worker_id, error.message) from error

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s`.

        Raises the worker's own error when it reports one, and LinkLost when its link broke.
        """
        try:
            event = (
                self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            )
        except queue.Empty:
            return None
        if event.wire is not self._wires.get(event.worker):
            if event.message is not None:
                event.message.release()
            return self.receive(0)  # of a link that has been replaced
        if event.lost is not None:
            raise LinkLost(event.worker, event.lost)
        assert event.message is not None
        if event.message.type is MessageType.ERROR:
            meta = event.message.meta
            error = error_from_peer(meta["kind"], f"worker {event.worker}: {meta['message']}")
            error.hint = meta.get("hint")
            raise error
        if event.message.type is MessageType.LOG:
            self._note(f"worker {event.worker}: {event.message.meta['text']}")
            return self.receive(0)
        return event

    def traffic(self) -> dict[WorkerId, tuple[int, int, float]]:
        """Per worker: bytes received, bytes sent, seconds spent writing, since its link opened."""
        return {
            worker: (link.stats.bytes_in, link.stats.bytes_out, link.stats.write_s)
            for worker, wire in self._wires.items()
            if (link := wire.link) is not None
        }

    def close(self, goodbye: Message) -> None:
        """Say goodbye to every worker and close the links, what is queued going out first."""
        self._stop.set()
        for wire in self._wires.values():
            if wire.link is not None:
                with suppress(PeerLostError):
                    wire.link.send(goodbye)
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()

    # -- reader threads -------------------------------------------------------------------------

    def _receiver(
        self, worker_id: WorkerId, wire: _Wire, answers: queue.SimpleQueue[Message | str]
    ) -> Callable[[Message], None]:
        greeted = False

        def receive(message: Message) -> None:
            nonlocal greeted
            wire.session.receive(message)
            if message.type in _RELAYED and self._relay(message):
                return
            if greeted:
                self._inbox.put(Event(worker_id, wire, message))
            else:
                greeted = True
                answers.put(message)

        return receive

    def _relay(self, message: Message) -> bool:
        """Pass a boundary frame on to the worker it is for; False if it is for this process."""
        if (message.meta["step"], message.meta["attempt"]) != self._current:
            message.release()
            return True
        owner = self._owners.get(message.meta["stage"])
        if owner is None:
            return False
        wire = self._wires.get(owner)
        try:
            if wire is not None and wire.link is not None:
                wire.link.forward(message)
        except PeerLostError:
            # The receiver is gone, not the sender; its own reader reports the loss.
            message.release()
        return True

    def _closed(
        self,
        worker_id: WorkerId,
        wire: _Wire,
        reason: HeteroError | None,
        answers: queue.SimpleQueue[Message | str],
    ) -> None:
        text = reason.message if reason is not None else "closed here"
        answers.put(text)
        self._inbox.put(Event(worker_id, wire, lost=text))
