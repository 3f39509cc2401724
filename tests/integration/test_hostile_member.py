"""An accepted worker that does harm. The coordinator is a process of its own; the test is the other
end of its link, over a bare socket. Each time the run ends in time, with a message about the fault
and its exit code, and with no more memory than usual."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from hetero_framework.cluster.worker import Worker, serve
from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.frames import PREFIX, PREFIX_BYTES, marks_in
from hetero_framework.core.messages import Message
from hetero_framework.core.send_queue import CHECKSUM_BYTES
from hetero_framework.errors import HeteroError, PeerLostError, ProtocolError
from hetero_framework.trainer.coordinator import train
from tests.framed import frame, framed
from tests.integration.test_parity import assert_same_runs
from tests.pools import Notes, serving, started, with_own_worker
from tests.samples import plan_of

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left_here")]

MIB = 1 << 20
MOST_GROWN_BYTES = 400 * MIB
ENDS_IN_S = 150.0
LIVENESS_S = 8.0


class Member:
    """Worker 1 of a run whose coordinator is `process`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, listener: socket.socket):
        self.process, self.log = process, log
        self.sock, _ = listener.accept()
        self.sock.settimeout(60)
        self.received = b""
        self.rss: list[int] = []

    def take(self, count: int) -> bytes:
        while len(self.received) < count:
            more = self.sock.recv(1 << 20)
            assert more, "the coordinator hung up"
            self.received += more
        taken, self.received = self.received[:count], self.received[count:]
        return taken

    def until(self, kind: type[m.Body]) -> dict[str, Any]:
        """The fields of the next message of this kind."""
        while True:
            rest, header_bytes = PREFIX.unpack(self.take(PREFIX_BYTES))
            header = msgpack.unpackb(self.take(header_bytes))
            payload = rest - 4 - header_bytes
            self.take(payload + (marks_in(payload) if payload else 0) + CHECKSUM_BYTES)
            if header["t"] == kind.spec.number:
                found: dict[str, Any] = header["m"]
                return found

    def say(self, body: m.Body) -> None:
        self.sock.sendall(framed(Message(body)))

    def say_raw(self, data: bytes) -> None:
        """What nobody may take in; the coordinator may hang up on the way."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(data)

    def greet(self) -> None:
        self.until(m.Hello)
        self.say(m.Welcome("2.13.0", "cpu", "x", 1 << 34, 1 << 33))
        self.until(m.Setup)
        self.watch()

    def watch(self) -> None:
        """Note the memory of the coordinator from now on."""
        process = psutil.Process(self.process.pid)
        self.rss.append(process.memory_info().rss)

        def look() -> None:
            while self.process.poll() is None:
                try:
                    self.rss.append(process.memory_info().rss)
                except psutil.Error:
                    return
                time.sleep(0.02)

        self.watching = threading.Thread(target=look, name="memory")
        self.watching.start()

    def ended(self, timeout_s: float = ENDS_IN_S) -> tuple[int, str]:
        """Exit code and log of the coordinator."""
        code = self.process.wait(timeout_s)
        self.watching.join()
        return code, self.log.read_text(errors="replace")

    @property
    def grown_bytes(self) -> int:
        return max(self.rss) - self.rss[0]


@pytest.fixture
def member(llama, texts, tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(120)
    machine = {"ip": "127.0.0.1", "device": "cpu"}
    config = tmp_path / "c.json"
    raw = {
        "coordinator": {**machine, "port": 1},
        "workers": [{**machine, "id": 1, "port": listener.getsockname()[1]}],
        "shard_plan": plan_of(("local", 3), (1, 6)),
        "model": {"name_or_path": str(llama)},
        "data": {"train": str(texts), "max_length": 64},
        "training": {
            "output_dir": str(tmp_path / "out"),
            "verify_architecture": False,
            "liveness_timeout_s": LIVENESS_S,
            "rejoin_wait_s": 2,
            "load_timeout_s": 30,
        },
    }
    config.write_text(json.dumps(raw))
    log = tmp_path / "log"
    process = started(log, "train", "--role", "coordinator", "--config", str(config))
    made = None
    try:
        made = Member(process, log, listener)
        made.greet()
        listener.close()  # it does not come back
        yield made
    finally:
        process.kill()
        process.wait()
        listener.close()
        if made is not None:
            made.sock.close()
            made.watching.join()


def control_of(data: bytes) -> bytes:
    return frame(b"\x83\xa1t\x32\xa1m\x82\xa4name\xa1x\xa4data" + data + b"\xa1x\x90")


def test_48_mib_of_empty_maps_are_not_made(member):
    count = 16 * MIB - 200
    for _ in range(3):
        member.say_raw(control_of(b"\xdd" + struct.pack(">I", count) + b"\x80" * count))
    code, log = member.ended()
    assert code == 2
    assert "worker 1: a header with more than 1048576 values" in log
    assert member.grown_bytes < MOST_GROWN_BYTES


@pytest.mark.long
def test_headers_just_small_enough_do_not_pile_up(member):
    count = 1_000_000
    bomb = control_of(b"\xdd" + struct.pack(">I", count) + b"\x80" * count)
    for _ in range(40):
        member.say_raw(bomb)
    code, log = member.ended()
    assert code in (2, 4)  # refused, or it has not loaded its stages by then
    assert "worker 1" in log
    assert member.grown_bytes < MOST_GROWN_BYTES


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stages": 7}, "READY: field 'stages' must be list"),
        ({"stages": [{"index": float("nan")}]}, "READY: field 'stages' must be list"),
        ({"stages": [], "more": 1}, "READY: unknown field 'more'"),
        ([1], "READY: the fields must be a map"),
    ],
)
def test_wrong_types_are_named(fields, said, member):
    member.say_raw(frame({"t": m.Ready.spec.number, "m": fields, "x": []}))
    code, log = member.ended()
    assert (code, f"worker 1: {said}" in log) == (2, True), log


@pytest.mark.long
def test_a_message_out_of_order_is_named(member):
    member.say(m.GradientNorms(0, 0, (), (), 0))
    code, log = member.ended()
    assert (code, "GRADIENT_NORMS out of order" in log) == (2, True), log


@pytest.mark.long
def test_a_text_of_megabytes_is_shown_shortened(member):
    member.say(m.Error("ModelError", "A" * 15 * MIB, "B" * 1000))
    code, log = member.ended()
    assert code == 2
    assert "worker 1: AAAA" in log
    assert len(log) < 20_000
    assert member.grown_bytes < MOST_GROWN_BYTES


@pytest.mark.long
def test_a_flood_of_lines_is_cut_off_and_the_run_ends_in_time(member):
    line = framed(Message(m.Log("INFO", "x" * 10))) * 1000
    began = time.monotonic()
    while member.process.poll() is None and time.monotonic() < began + 60:
        try:
            member.sock.sendall(line)
        except OSError:
            break
    code, log = member.ended()
    assert code in (2, 4)
    assert "logs more than 1000 lines" in log or "faster than it is heard" in log
    assert len(log) < 4 * MIB
    assert member.grown_bytes < MOST_GROWN_BYTES


def half(member: Member) -> None:
    member.say_raw(framed(Message(m.Log("INFO", "x" * 100)))[:60])


def slow(member: Member) -> None:
    """A byte each second of a message: signs of life, and never a word."""
    for byte in framed(Message(m.Log("INFO", "x" * 1000)))[:60]:
        if member.process.poll() is not None:
            return
        member.say_raw(bytes([byte]))
        time.sleep(1)


def nothing(member: Member) -> None:
    """It says nothing more, and reads nothing."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("behave", "ends", "said"),
    [
        (half, 75, "worker 1 has been silent for"),
        (nothing, 75, "worker 1 has been silent for"),
        (slow, 4, "worker 1 has not loaded its stages in 30 s"),
    ],
)
def test_a_worker_that_does_not_go_on_is_given_up_in_time(behave, ends, said, member):
    began = time.monotonic()
    behave(member)
    code, log = member.ended()
    assert (code, said in log) == (ends, True), log
    assert time.monotonic() - began < 90
    assert member.grown_bytes < MOST_GROWN_BYTES


# ---- in a step: a worker in a thread, whose words are changed on their way out

Change = Callable[[Message], list[Message]]


@pytest.fixture
def run_saying(configured, monkeypatch):
    """Train with a worker that holds the middle stage and says what `change` makes of each of its
    words. All weights are trained and none is drawn: threads of one process share torch's random
    numbers, and both would take theirs from them."""
    say = Worker.to_coordinator
    usual = {"verify_architecture": False, "max_steps": 3, "probe_longest_batch": False}

    def run(change: Change, **training: Any) -> None:
        def said(worker: Worker, message: Message, done: Any = None) -> None:
            *before, last = change(message)
            for one in before:
                say(worker, one)
            say(worker, last, done)

        monkeypatch.setattr(Worker, "to_coordinator", said)
        plan = plan_of(("local", 2), (1, 4), ("local", 6))
        config = configured([], "cut", shard_plan=plan, training={**usual, **training})
        config = with_own_worker(config)

        def work(*args: Any, **how: Any) -> None:
            with suppress(HeteroError):
                serve(*args, **how)

        with serving(config, work, keep=True):
            train(config, progress=Notes())

    run.whole = lambda: train(configured([], "whole", training=usual), progress=Notes())  # type: ignore[attr-defined]
    return run


def copied(message: Message, **changes: Any) -> Message:
    return Message(replace(message.body, **changes), message.tensors)  # type: ignore[type-var]


def twice(message: Message) -> list[Message]:
    return [message, message] if isinstance(message.body, m.Forward) else [message]


def for_another(message: Message) -> list[Message]:
    return [copied(message, stage=1) if isinstance(message.body, m.Forward) else message]


def a_loss(message: Message) -> list[Message]:
    body = message.body
    if not isinstance(body, m.Forward):
        return [message]
    return [Message(m.Loss(body.step, body.attempt, body.micro_batch, 0.0)), message]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (twice, "worker 1: FORWARD of micro-batch [0-9]+ for stage 2 came a second time"),
        (for_another, "worker 1: FORWARD of stage 0 came from one that does not hold it"),
        (a_loss, "worker 1: LOSS of stage 2 came from one that does not hold it"),
    ],
)
def test_a_forbidden_message_of_a_worker_ends_the_run_with_its_name(change, said, run_saying):
    with pytest.raises(ProtocolError, match=said) as caught:
        run_saying(change)
    assert caught.value.exit_code == 2


def of_other_attempts(message: Message) -> list[Message]:
    """Beside each word the same of the attempt before and of one to come, and other numbers."""
    body = message.body
    if not isinstance(body, (m.Forward, m.Backward)):
        return [message]
    attempts = [a for a in (body.attempt - 1, body.attempt + 1, 10**6) if a >= 0]
    return [*(copied(message, attempt=a) for a in attempts), copied(message, step=99), message]


def test_messages_of_other_attempts_and_steps_change_nothing(run_saying, tmp_path):
    run_saying.whole()
    run_saying(of_other_attempts)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


@pytest.fixture
def deaf(monkeypatch):
    """Have the worker's reader stop at a boundary of step 3, this often. Its heartbeats go on, and
    nothing that it is told is heard, not even that it shall end."""
    over, heard, met = threading.Event(), Worker._received, itertools.count()
    monkeypatch.setattr(timeouts, "ALIVE_S", 1.0)
    monkeypatch.setattr("hetero_framework.cluster.worker.end_process", lambda reason: None)

    def be(times: int) -> None:
        def received(worker: Worker, connection: Any, message: Message) -> None:
            body = message.body
            if isinstance(body, m.BoundaryTensor) and body.step == 2 and next(met) < times:
                over.wait(ENDS_IN_S)
            heard(worker, connection, message)

        monkeypatch.setattr(Worker, "_received", received)

    yield be
    over.set()


@pytest.mark.long
def test_a_worker_that_stops_reading_in_a_step_is_reconnected(deaf, run_saying, tmp_path):
    run_saying.whole()
    deaf(1)
    run_saying(lambda message: [message], step_timeout_s=3.0)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.long
def test_a_worker_that_stops_reading_each_time_ends_the_run(deaf, run_saying):
    deaf(100)
    with pytest.raises(PeerLostError, match="nothing has moved for 3 s in step 3") as caught:
        run_saying(lambda message: [message], step_timeout_s=3.0)
    assert caught.value.exit_code == 4
