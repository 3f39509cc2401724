"""A worker's side of dialling, without a coordinator that serves."""

from __future__ import annotations

from typing import Any

from hetero_framework.cluster.outbound_worker import OutboundWorker
from hetero_framework.config import CoordinatorConfig
from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.dial import Listener
from hetero_framework.core.threads import in_background
from hetero_framework.security.access import LOOPBACK_ONLY
from tests.waiting import WAIT_S


def test_connection_that_cannot_be_begun_is_closed_and_dialled_again(monkeypatch, logged):
    """No error may end the thread: nobody else would look for the coordinator."""
    monkeypatch.setattr(timeouts, "CALL_PAUSE_S", 0.01)
    listener, begun = Listener("127.0.0.1", 0), []

    def begin(stream: Any) -> Any:
        begun.append(stream)
        if len(begun) == 3:
            dialling.close()
        raise ConnectionResetError("reset before it was set up")

    place = CoordinatorConfig(ip="127.0.0.1", port=listener.port)
    dialling = OutboundWorker(place, m.Call(1, "p"), LOOPBACK_ONLY, begin)
    accepted = []
    running = in_background(dialling.run, "dialling")
    try:
        for _ in range(3):
            accepted.append(listener.accept())
        running.result(WAIT_S)
        assert all(stream.read(memoryview(bytearray(1))) == 0 for stream in accepted)
    finally:
        dialling.close()
        listener.close()
        for stream in accepted:
            stream.close()
    assert [line for line in logged if "cannot talk" in line] == [
        f"cannot talk to the coordinator at 127.0.0.1:{listener.port}: reset before it was set up"
    ]
