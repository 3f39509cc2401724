"""Bytes at the port of a worker that is in a run: refused in time, without effect on the run.

The rows are those that a stranger can send. Of a peer that was accepted, tensors are here; what it
may get wrong else is in tests/unit: core/test_frames.py, engine/test_executor.py, test_stage.py and
test_remote_host.py, and in tests/faults/frame_fuzz.py.
"""

from __future__ import annotations

import errno
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import pytest
import torch

from hetero_framework.config import Config, StageSpec
from hetero_framework.core import messages as m
from hetero_framework.core.devices import Device
from hetero_framework.core.frames import PROTOCOL_VERSION
from hetero_framework.core.messages import Message, decode
from hetero_framework.core.send_queue import CHECKSUM_BYTES
from hetero_framework.core.timeouts import STRANGER_S
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.stage import Stage
from hetero_framework.errors import ProtocolError
from hetero_framework.models.cut.reuse import ReusePool
from hetero_framework.models.cut.side import Bundle
from hetero_framework.trainer.coordinator import train
from tests.framed import frame, framed
from tests.integration.test_parity import LORA, assert_same_runs
from tests.pools import Notes, serving, with_own_worker
from tests.samples import plan_of

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

MOST_GROWN_BYTES = 20 << 20
HELD_STEP = 5
PACE_S = 0.06
"""Between two connections; whom an address sends more often is not let in."""
HELLO = {
    "run_id": "stranger",
    "worker_id": 1,
    "process": "p",
    "epoch": 1,
    "max_frame_bytes": 1 << 20,
    "session": "training",
    "name": "x",
    "protocol": PROTOCOL_VERSION,
    "package": "0",
}
STEP = {"step": 0, "attempt": 0, "stage": 1, "micro_batch": 0}


def hello(**changes: Any) -> bytes:
    return frame({"t": 1, "m": {**HELLO, **changes}, "x": []})


def without(name: str) -> bytes:
    return frame({"t": 1, "m": {k: v for k, v in HELLO.items() if k != name}, "x": []})


WHOLE = hello()
ROWS: dict[str, bytes] = {
    "1 nothing": b"",
    "2 a browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "3 a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "7 another magic number": b"HTR1" + bytes(28),
    "9 an unknown type": frame({"t": 200, "m": {}, "x": []}),
    "9 a type that is no number": frame({"t": True, "m": {}, "x": []}),
    "11 2^63 bytes": struct.pack(">QI", 2**63, 12) + bytes(20),
    "11 a terabyte": struct.pack(">QI", 10**12, 12) + bytes(20),
    "11 a gigabyte": struct.pack(">QI", 1 << 30, 12) + bytes(20),
    **{f"12 cut after {n} bytes": WHOLE[:n] for n in range(1, 32)},
    "12 cut before the checksum": WHOLE[:-CHECKSUM_BYTES],
    "13 not msgpack": frame(b"\xc1" * 40),
    "13 not a map": frame([1, 2, 3]),
    "13 a text that is not UTF-8": frame(b"\x83\xa1t\x01\xa1m\x81\xa1\xff\xc0\xa1x\x90"),
    "14 nested 100,000 deep": frame(b"\x91" * 60_000),
    "14 nested 1,000 deep": frame(b"\x91" * 1000 + b"\x90"),
    "14 nested in a field": frame(
        b"\x83\xa1t\x01\xa1m\x81\xa6run_id" + b"\x91" * 1000 + b"\x90\xa1x\x90"
    ),
    "15 not a number": hello(epoch=float("nan")),
    "15 a large number": hello(epoch=2**64 - 1),
    "15 a negative one": hello(epoch=-1),
    **{f"15 frames of at most {n} bytes": hello(max_frame_bytes=n) for n in (0, 1, 65_535, 2**62)},
    "16 an unknown key": hello(trust_me=True),
    "16 a missing key": without("epoch"),
    "17 an unknown dtype": frame({"t": 12, "m": STEP, "x": [[77, [1]]]}),
    "18 a negative shape": frame({"t": 12, "m": STEP, "x": [[1, [-1]]]}),
    "18 2^40 elements": frame({"t": 12, "m": STEP, "x": [[1, [2**40]]]}),
    "18 nine dimensions": frame({"t": 12, "m": STEP, "x": [[1, [1] * 9]]}, bytes(4)),
    "20 too few bytes": frame({"t": 12, "m": STEP, "x": [[1, [2]]]}, bytes(4)),
    "23 tensors before a greeting": frame({"t": 12, "m": STEP, "x": [[1, [1]]]}, bytes(4)),
    "23 an order before a greeting": framed(Message(m.Abort(0, 0))),
    "23 goodbye before a greeting": framed(Message(m.Bye("x"))),
    "a damaged greeting": WHOLE[:-1] + bytes([WHOLE[-1] ^ 1]),
    "a long header": struct.pack(">QI", 60_000, 59_000) + bytes(59_000),
}
SLOW = "10 a header that never comes"
CLOSED = {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN}
REFUSED = {
    "8 version 2": (hello(protocol=2), "protocol", f"version 2.*speaks {PROTOCOL_VERSION}"),
    "19 a second run": (WHOLE, "busy", "busy with the training of run cut from 127"),
    "24 another worker's": (hello(worker_id="x" * 300), "identity", "this is worker 1"),
}


def answer(port: int, data: bytes, half_close: bool = True) -> bytes:
    """What a stranger gets for these bytes, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=STRANGER_S + 30) as sock:
        got = b""
        try:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            while more := sock.recv(1 << 16):
                got += more
        except OSError as error:
            # It was closed while there were bytes in it; a shutdown may be what finds that out.
            if error.errno not in CLOSED:
                raise
        return got


class Stranger(threading.Thread):
    """Sends all rows, and the slow one, while a run goes on."""

    def __init__(self, port: int, worker: psutil.Process) -> None:
        super().__init__(name="stranger")
        self.port, self.worker = port, worker
        self.grown_bytes = 0
        self.answers: dict[str, bytes] = {}
        self.going, self.refused = threading.Event(), threading.Event()

    def run(self) -> None:
        assert self.going.wait(240)
        before = self.worker.memory_info().rss
        for name, data in ROWS.items():
            time.sleep(PACE_S)
            self.answers[name] = answer(self.port, data)
        for name, (data, _, _) in REFUSED.items():
            time.sleep(PACE_S)
            self.answers[name] = answer(self.port, data, half_close=False)
        self.refused.set()
        self.answers[SLOW] = answer(self.port, struct.pack(">QI", 65_000, 64_000), half_close=False)
        self.grown_bytes = self.worker.memory_info().rss - before


class Begins(Notes):
    """Lets a stranger go after the first step, and does not end before it has sent the rows."""

    def __init__(self, stranger: Stranger) -> None:
        super().__init__()
        self.stranger = stranger

    def step(self, metrics: Any) -> None:
        super().step(metrics)
        self.stranger.going.set()
        if metrics["step"] == HELD_STEP:
            self.stranger.refused.wait(240)  # a run that is over would refuse nobody


def test_hostile_bytes_are_refused_and_a_run_beside_them_keeps_its_result(
    pool, configured, tmp_path
):
    sections: dict[str, Any] = {
        "adapter": LORA,
        "training": {"verify_architecture": False, "num_train_epochs": 6},
    }
    train(configured([], "whole", **sections), progress=Notes())
    stranger = Stranger(pool.machines["workers"][0]["port"], psutil.Process(pool.processes[0].pid))
    stranger.start()
    train(configured([3], "cut", **sections), progress=Begins(stranger))
    stranger.join()
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")
    assert stranger.grown_bytes < MOST_GROWN_BYTES
    assert set(stranger.answers) == {*ROWS, *REFUSED, SLOW}
    for name in ROWS:
        assert stranger.answers[name] == b"", name  # a stranger learns nothing
    # While it is waited for there are signs of life, and nothing else.
    beat = framed(Message(m.Heartbeat()))
    assert stranger.answers[SLOW] == beat * (len(stranger.answers[SLOW]) // len(beat))
    for name, (_, code, text) in REFUSED.items():
        reject = decode(stranger.answers[name][:-CHECKSUM_BYTES]).expect(m.Reject)
        assert reject.code == code, name
        assert re.search(text, reject.message), name


Change = Callable[[torch.Tensor], torch.Tensor]
WANTED = r", expected 2 x \d+ x 32"


@pytest.fixture
def run_with(configured):
    """Train with a worker, in a thread, that holds the middle stage and sends, in its third
    micro-batch, what `change` makes of its hidden state."""

    def run(change: Change) -> Notes:
        plan = plan_of(("local", 2), (1, 4), ("local", 6))
        training = {"verify_architecture": False, "max_steps": 2, "probe_longest_batch": False}
        config = with_own_worker(configured([], shard_plan=plan, adapter=LORA, training=training))

        def build(
            sent: Config, specs: Sequence[StageSpec], device: Device, pool: ReusePool
        ) -> list[Stage]:
            [stage] = load_stages(sent, specs, device)
            forward = stage.forward

            def changed(micro_batch: int, *args: Any) -> Bundle:
                (hidden_BSD,) = forward(micro_batch, *args)
                return (change(hidden_BSD) if micro_batch == 2 else hidden_BSD,)

            stage.forward = changed  # type: ignore[method-assign]
            return [stage]

        notes = Notes()
        with serving(config, build=build, keep=True):
            train(config, progress=notes)
        return notes

    return run


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda hidden: hidden[:1], r": the hidden state is 1 x \d+ x 32 of .*" + WANTED),
        (lambda hidden: hidden[:0], r": the hidden state is 0 x \d+ x 32 of .*" + WANTED),
        (lambda hidden: hidden.repeat(1, 4096, 1), r" has \d+ bytes; at most \d+ cross"),
    ],
    ids=["row 19", "row 21", "larger than any boundary"],
)
def test_a_tensor_of_another_shape_ends_the_run_naming_both(change, said, run_with):
    with pytest.raises(ProtocolError, match=f"FORWARD of micro-batch 2 for stage 2{said}"):
        run_with(change)


def test_row_22_non_finite_values_of_a_peer_skip_the_step_with_the_stage(run_with, tmp_path):
    notes = run_with(lambda hidden: hidden * float("nan"))
    skipped = [line for line in notes.lines if "step skipped" in line]
    assert [line for line in skipped if "stage 2" in line] == skipped
    assert len(skipped) == 2
