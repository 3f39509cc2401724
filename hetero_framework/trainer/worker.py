"""A worker: listens, loads the stages that a coordinator gives it, and serves them.

Three kinds of threads: one accepts connections, the link's reader queues what arrives, and the
main thread, alone, touches the stages. When a link breaks the stages stay as they are, and the
same run may come back and go on; another run's HELLO replaces them.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

import hetero_framework
from hetero_framework import control
from hetero_framework.config import Config, StageSpec
from hetero_framework.core.dal import Device, open_device
from hetero_framework.core.protocol import (
    HANDSHAKE_MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Message,
    MessageType,
)
from hetero_framework.core.session import Phase, Session
from hetero_framework.core.transport import Link, Listener
from hetero_framework.errors import (
    HeteroError,
    NetworkError,
    PeerLostError,
    ProtocolError,
    as_hetero_error,
)
from hetero_framework.trainer import messages
from hetero_framework.trainer.runner import Arrival, StageRunner
from hetero_framework.trainer.verbs import StageVerbs, StatePart

WorkerId = int | str
Say = Callable[[str], None]
BuildStages = Callable[[Config, Sequence[StageSpec], Device], Sequence[StageVerbs]]

_HELLO_S = 10.0
_POLL_S = 0.5
# Tasks of an attempt that the coordinator has not ended; after a lost link it ends or commits it.
_WORKING = (Phase.STEP, Phase.EVALUATION)


@dataclass(frozen=True)
class _Event:
    """What the main thread is told: a message, or that a link is gone."""

    link: Link
    message: Message | None = None
    lost: str | None = None


@dataclass
class _Run:
    """One run's stages and how far they have come; outlives its link."""

    run_id: str
    config: Config | None = None
    runner: StageRunner | None = None
    started: bool = False
    last_step: int | None = None
    state: Any = None
    state_of: tuple[int, str, int] | None = None


def serve(
    config: Config,
    worker_id: WorkerId,
    *,
    build: BuildStages,
    keep: bool = False,
    say: Say | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Serve one run as worker `worker_id` (with `keep`, one after the other) and return.

    `build` makes the stages: `loading.load_stages` loads real ones.

    Raises NetworkError when the port is taken, DeviceError when the device is not there, and the
    run's own error when it fails here; the coordinator has been told the same.
    """
    Worker(config, worker_id, keep=keep, build=build, say=say or _print).serve(should_stop)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Worker:
    """The process behind one entry of `workers`."""

    def __init__(
        self,
        config: Config,
        worker_id: WorkerId,
        *,
        keep: bool,
        build: BuildStages,
        say: Say,
    ) -> None:
        self._entry = config.worker(worker_id)
        self._base_dir = config.base_dir
        self._liveness_s = config.training.liveness_timeout_s
        self._keep = keep
        self._build = build
        self._say = say
        self._device = open_device(self._entry.device)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._link: Link | None = None
        self._session = Session("worker")
        self._run: _Run | None = None
        self._done = False
        self._handlers: dict[MessageType, Callable[[Message], None]] = {
            MessageType.SETUP: self._on_setup,
            MessageType.START: self._on_start,
            MessageType.STEP: self._on_step,
            MessageType.INPUTS: self._on_inputs,
            MessageType.FORWARD: self._on_forward,
            MessageType.BACKWARD: self._on_backward,
            MessageType.COLLECT: self._on_collect,
            MessageType.COMMIT: self._on_commit,
            MessageType.ABORT: self._on_abort,
            MessageType.STATE_REQUEST: self._on_state_request,
            MessageType.LOAD_STATE: self._on_load_state,
            MessageType.BYE: self._on_bye,
            MessageType.ERROR: self._on_error,
            MessageType.REJECT: self._on_error,
            MessageType.CONTROL: self._on_control,
        }

    # -- the loop -------------------------------------------------------------------------------

    def serve(self, should_stop: Callable[[], bool]) -> None:
        entry = self._entry
        listener = Listener(entry.ip, entry.port)
        acceptor = threading.Thread(
            target=self._accept, args=(listener,), name="accept", daemon=True
        )
        acceptor.start()
        self._say(
            f"worker {entry.id} listens on {entry.ip}:{entry.port} "
            f"({self._device.name}, {self._device.label})"
        )
        try:
            while not self._done and not should_stop():
                try:
                    self._turn()
                except Exception as error:
                    # Whatever it is, the coordinator hears of it before this process may end.
                    known = as_hetero_error(error) or HeteroError(
                        f"{type(error).__name__}: {error}"
                    )
                    self._report(known)
                    if not self._keep:
                        raise
                    self._say(f"the run failed here: {known}")
                    self._leave()
        except KeyboardInterrupt:
            # Without this the coordinator would wait for a link that cannot come back.
            self._report(PeerLostError("it was stopped on its own machine (Ctrl-C)"))
            raise
        finally:
            listener.close()
            if self._link is not None:
                self._link.close()
            acceptor.join()

    def _turn(self) -> None:
        """Handle what has arrived; then one task; wait only when there is neither."""
        while (event := self._next_event(0)) is not None:
            self._handle(event)
        runner = self._run.runner if self._run is not None else None
        if runner is not None and self._link is not None and self._session.phase in _WORKING:
            try:
                if runner.run_next():
                    return
            except LinkGone:
                return
        event = self._next_event(_POLL_S)
        if event is not None:
            self._handle(event)

    def _next_event(self, timeout_s: float) -> _Event | None:
        try:
            return self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
        except queue.Empty:
            return None

    def _handle(self, event: _Event) -> None:
        if event.message is not None and event.message.type is MessageType.HELLO:
            with suppress(LinkGone):
                self._on_hello(event.link, event.message)
        elif event.link is not self._link:
            # Of a link that has been replaced, or of a stranger who does not begin with HELLO.
            if event.message is not None:
                event.message.release()
                event.link.close(drain_s=0)
        elif event.lost is not None:
            self._link = None
            if self._run is not None:
                self._say(f"lost the coordinator ({event.lost}); waiting for it to come back")
        elif event.message is not None:
            self._session.receive(event.message)
            with suppress(LinkGone):
                self._handlers[event.message.type](event.message)

    # -- connections ----------------------------------------------------------------------------

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                sock = listener.accept()
            except NetworkError:
                return  # the listener was closed
            try:
                self._greet(sock)
            except OSError:
                sock.close()  # it was gone before it could be greeted

    def _greet(self, sock: Any) -> None:
        """Start a link for a connection. Nothing but its HELLO, in time, makes it matter."""
        made = threading.Event()
        links: list[Link] = []

        def tell(message: Message | None, lost: str | None = None) -> None:
            made.wait()  # the link's threads may be faster than its constructor
            self._events.put(_Event(links[0], message, lost))

        links.append(
            Link(
                sock,
                name=f"coordinator {':'.join(map(str, sock.getpeername()[:2]))}",
                on_message=tell,
                on_close=lambda reason: tell(None, str(reason) if reason else "closed"),
                max_frame_bytes=HANDSHAKE_MAX_FRAME_BYTES,
                liveness_s=self._liveness_s,
                handshake_s=_HELLO_S,
                allocate=self._device.allocate_host,
            )
        )
        made.set()

    def _on_hello(self, link: Link, message: Message) -> None:
        session = Session("worker")
        meta = message.meta
        try:
            session.receive(message)
        except ProtocolError as error:
            self._refuse(link, "protocol", error.message, error.hint)
            return
        if str(meta["worker_id"]) != str(self._entry.id):
            self._refuse(
                link,
                "identity",
                f"this is worker {self._entry.id}, not {meta['worker_id']}",
                "two workers have exchanged their addresses in the configuration",
            )
            return
        same_run = self._run is not None and self._run.run_id == meta["run_id"]
        if self._link is not None and not same_run:
            self._refuse(link, "busy", "it is working for another run", "wait, or stop that run")
            return
        if self._link is not None:
            self._link.close(drain_s=0)
        if not same_run:
            self._run = _Run(meta["run_id"])
            self._device.empty_cache()
        run = self._run
        assert run is not None
        self._link, self._session = link, session
        link.max_frame_bytes = meta["max_frame_bytes"]
        memory = self._device.memory()
        self._say(f"serving the run of {link.name}")
        self._send(
            Message(
                MessageType.WELCOME,
                {
                    "protocol": PROTOCOL_VERSION,
                    "package": hetero_framework.__version__,
                    "worker_id": self._entry.id,
                    "torch": torch.__version__,
                    "transformers": metadata.version("transformers"),
                    "device": self._device.name,
                    "device_label": self._device.label,
                    "memory_total": memory.total,
                    "memory_free": memory.free,
                    "run_id": run.run_id if run.started else None,
                    "last_step": run.last_step,
                },
            )
        )

    def _refuse(self, link: Link, code: str, message: str, hint: str | None) -> None:
        self._say(f"refused {link.name}: {message}")
        with suppress(HeteroError):
            link.send(Message(MessageType.REJECT, {"code": code, "message": message, "hint": hint}))
        # Not here: closing waits for the peer, and a run may be going on.
        threading.Thread(target=link.close, name="refuse", daemon=True).start()

    # -- a run ----------------------------------------------------------------------------------

    def _on_setup(self, message: Message) -> None:
        meta = message.meta
        run = self._current
        run.runner, run.started = None, False
        config = Config.from_dict(meta["config"], self._base_dir)
        own = {entry["index"] for entry in meta["stages"]}
        specs = [spec for spec in config.stages() if spec.index in own]
        layers = ", ".join(spec.layers for spec in specs)
        self._tell(f"loading {layers}")
        began = time.monotonic()
        stages = self._build(config, specs, self._device)
        seconds = time.monotonic() - began
        self._tell(f"loaded {layers} onto {self._device.name} in {seconds:.0f} s")
        run.config = config
        run.runner = StageRunner(stages, outbox=self)
        run.last_step = None
        self._send(
            Message(
                MessageType.READY,
                {
                    "stages": [
                        {
                            "index": stage.index,
                            "trainable": [[name, list(rank)] for name, rank in stage.trainable()],
                        }
                        for stage in stages
                    ],
                    "info": {"device": self._device.name},
                },
            )
        )

    def _on_start(self, message: Message) -> None:
        for entry in message.meta["stages"]:
            self._runner.stage(entry["index"]).input_requires_grad = entry["input_requires_grad"]
        self._current.started = True
        self._say("ready")

    def _on_step(self, message: Message) -> None:
        self._device.reset_peak_memory()
        self._runner.begin(messages.step_info(message))

    def _on_inputs(self, message: Message) -> None:
        if self._is_current(message):
            inputs = {
                name: self._device.from_host(tensor).clone()
                for name, tensor in messages.inputs_of(message).items()
            }
            self._runner.put_inputs(message.meta["stage"], message.meta["micro_batch"], inputs)
        message.release()

    def _on_forward(self, message: Message) -> None:
        if self._is_current(message):
            meta = message.meta
            self._runner.put_hidden(
                meta["stage"],
                meta["micro_batch"],
                messages.arrival(message, self._device.from_host),
            )
        else:
            message.release()

    def _on_backward(self, message: Message) -> None:
        if self._is_current(message):
            meta = message.meta
            self._runner.put_gradient(
                meta["stage"],
                meta["micro_batch"],
                messages.arrival(message, self._device.from_host),
            )
        else:
            message.release()

    def _on_collect(self, message: Message) -> None:
        reports = {stage.index: stage.collect() for stage in self._runner.stages}
        assert self._runner.info is not None
        self._send(messages.gradients_message(self._runner.info, reports))

    def _on_commit(self, message: Message) -> None:
        meta, run = message.meta, self._current
        if run.last_step != meta["step"]:
            self._commit(message)
        message.release()
        statistics = {
            "stages": {str(i): values for i, values in self._runner.statistics().items()},
            "peak_memory_bytes": self._device.peak_memory(),
        }
        self._send(
            Message(
                MessageType.COMMITTED,
                {"step": meta["step"], "attempt": meta["attempt"], "stats": statistics},
            )
        )

    def _commit(self, message: Message) -> None:
        meta = message.meta
        if not self._is_current(message):
            raise ProtocolError(
                f"COMMIT of step {meta['step']}, attempt {meta['attempt']}, whose gradients are "
                "not here"
            )
        for stage in self._runner.stages:
            stage.commit(meta["learning_rate"], meta["grad_scale"])
            if stage.is_last and message.tensors:
                weight = messages.tensor_of(message)
                assert weight is not None
                stage.set_tied_weight(weight)
        self._current.last_step = meta["step"]

    def _on_abort(self, message: Message) -> None:
        self._runner.abort()
        self._send(Message(MessageType.ABORTED, dict(message.meta)))

    def _on_state_request(self, message: Message) -> None:
        meta, run = message.meta, self._current
        stage, kind, number = meta["stage"], meta["kind"], meta["part"]
        if number == 0:
            run.state = self._runner.stage(stage).state(kind)
        elif run.state_of != (stage, kind, number - 1):
            raise ProtocolError(f"state part {number} of stage {stage} was asked for out of order")
        run.state_of = (stage, kind, number)
        self._send(messages.state_message(stage, kind, number, next(run.state)))

    def _on_load_state(self, message: Message) -> None:
        meta = message.meta
        stage = self._runner.stage(meta["stage"])
        part: StatePart = messages.state_part(message)
        stage.load_state(meta["kind"], part)
        message.release()
        reply = {"stage": meta["stage"], "part": meta["part"]}
        self._send(Message(MessageType.STATE_LOADED, reply))

    def _on_control(self, message: Message) -> None:
        reply = control.answer(message)
        message.release()
        if reply is not None:
            self._send(reply)

    def _on_bye(self, message: Message) -> None:
        self._say(f"the coordinator says goodbye: {message.meta['reason']}")
        self._leave()

    def _on_error(self, message: Message) -> None:
        self._say(f"the coordinator stopped: {message.meta['message']}")
        self._leave()

    def _leave(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._run = None
        self._done = not self._keep

    # -- what stages hand on (Outbox) -----------------------------------------------------------

    def hidden(self, stage: int, micro_batch: int, hidden_BSD: torch.Tensor) -> None:
        if self._runner.owns(stage):
            self._runner.put_hidden(stage, micro_batch, Arrival(hidden_BSD))
            return
        host = self._device.to_host(hidden_BSD)
        self._send(messages.hidden_message(self._info, stage, micro_batch, host))

    def gradient(self, stage: int, micro_batch: int, gradient_BSD: torch.Tensor | None) -> None:
        if self._runner.owns(stage):
            self._runner.put_gradient(stage, micro_batch, Arrival(gradient_BSD))
            return
        host = self._device.to_host(gradient_BSD) if gradient_BSD is not None else None
        self._send(messages.gradient_message(self._info, stage, micro_batch, host))

    def loss(self, micro_batch: int, loss: float) -> None:
        info = self._info
        self._send(
            Message(
                MessageType.LOSS,
                {
                    "step": info.step,
                    "attempt": info.attempt,
                    "micro_batch": micro_batch,
                    "loss": loss,
                },
            )
        )

    def finished(self, micro_batch: int) -> None:
        """Stage 0 is the coordinator's; here a micro-batch ends with its loss or its gradient."""

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _current(self) -> _Run:
        if self._run is None:
            raise ProtocolError("there is no run yet; HELLO comes first")
        return self._run

    @property
    def _runner(self) -> StageRunner:
        runner = self._current.runner
        if runner is None:
            raise ProtocolError("no stages are loaded yet; SETUP comes first")
        return runner

    @property
    def _info(self) -> Any:
        info = self._runner.info
        assert info is not None
        return info

    def _is_current(self, message: Message) -> bool:
        info = self._runner.info
        meta = message.meta
        return info is not None and (meta["step"], meta["attempt"]) == (info.step, info.attempt)

    def _send(self, message: Message) -> None:
        if self._link is None:
            raise LinkGone
        self._session.send(message)
        try:
            self._link.send(message)
        except HeteroError as error:
            if not self._link.closed:
                raise  # a frame that is too large
            raise LinkGone from error

    def _tell(self, text: str) -> None:
        """A line here and on the coordinator's screen."""
        self._say(text)
        self._send(Message(MessageType.LOG, {"level": "INFO", "text": text}))

    def _report(self, error: HeteroError) -> None:
        """Tell the coordinator why this worker ends."""
        if self._link is None:
            return
        report = Message(
            MessageType.ERROR,
            {
                "kind": type(error).__name__,
                "message": error.message,
                "hint": error.hint,
                "exit_code": error.exit_code,
            },
        )
        with suppress(HeteroError):
            self._link.send(report)


class LinkGone(Exception):
    """The link broke while something was to be sent; its reader reports the same."""
