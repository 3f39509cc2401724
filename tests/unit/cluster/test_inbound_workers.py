"""The coordinator's port for workers that dial: parked and refused connections."""

from __future__ import annotations

import re
import socket
from concurrent.futures import Future
from dataclasses import replace

import pytest

from hetero_framework.cluster.worker_links import WorkerLinks
from hetero_framework.core import addresses
from hetero_framework.core import messages as m
from hetero_framework.core.messages import Body, Message
from hetero_framework.core.threads import in_background
from hetero_framework.errors import NetworkError
from tests.framed import framed
from tests.samples import free_ports
from tests.unit.cluster.conftest import Caller, star
from tests.waiting import WAIT_S

WELCOME = m.Welcome("2.13.0", "cpu", "CPU", 8, 7)


@pytest.fixture
def links(stack):
    """Of workers 1 and 2, which dial, and of which the plan has 1."""
    away = {"hostname": "laptop", "device": "cpu"}
    config = star(
        [{**away, "id": 1}, {**away, "id": 2}],
        ["local", 1],
        coordinator={"ip": "127.0.0.1", "port": free_ports(1)[0]},
        training={"connect_timeout_s": WAIT_S},
    )
    made = WorkerLinks(config, "run", 1 << 20)
    made.listen()
    stack.callback(made.close, Message(m.Bye("the test is over")), 1.0)
    return made


@pytest.fixture
def call(stack, links):
    def dial(said: Body) -> Caller:
        made = Caller(links._config.coordinator.port, stack)
        made.send(said)
        return made

    return dial


def served(links: WorkerLinks, caller: Caller) -> m.Welcome:
    """Have the run take its worker 1, which answers."""
    found: Future[dict] = in_background(links.connect_all, "connect")
    hello = caller.expect(m.Hello)
    assert (hello.run_id, hello.worker_id) == ("run", 1)
    caller.send(WELCOME)
    return found.result(WAIT_S)[1]


def test_worker_that_has_called_is_greeted_when_the_run_wants_it(links, call):
    caller = call(m.Call(1, "p"))
    assert served(links, caller) == WELCOME


def test_only_the_process_that_has_the_link_may_call_again(links, call):
    first = call(m.Call(1, "p"))
    served(links, first)
    second = call(m.Call(1, "another"))
    refused = second.expect(m.Reject)
    assert refused.code == "busy"
    # Each time in the same words, which are logged once.
    assert re.fullmatch(r"worker 1 is connected from 127\.0\.0\.1:\d+", refused.message)
    again = call(m.Call(1, "p"))
    first.ends()  # it has lost this one, whatever this machine thinks
    found = in_background(lambda: links.reconnect(1), "reconnect")
    again.expect(m.Hello)
    again.send(replace(WELCOME, run_id="run"))
    assert found.result(WAIT_S) is True


def test_an_unexpected_worker_is_refused_with_the_expected_ids(call):
    refused = call(m.Call(7, "p")).expect(m.Reject)
    assert refused.message == "no worker 7 is expected to dial (these are: 1, 2)"


def test_worker_of_another_version_is_told_so(call):
    assert call(m.Call(1, "p", protocol=2)).expect(m.Reject).code == "protocol"


@pytest.mark.parametrize(
    "said",
    [
        m.Hello("run", 1, "p", 1, 1 << 20),
        m.PeerHello("run", 1, 2, 1 << 20),
        m.Ready((m.LoadedStage(1, (), {}),)),
        WELCOME,
    ],
    ids=lambda said: said.spec.name,
)
def test_a_connection_that_begins_with_another_message_is_closed(said, call):
    assert call(said).ends() is not None


def test_second_call_on_one_connection_is_out_of_order(links, call):
    caller = call(m.Call(1, "p"))
    caller.send(m.Call(1, "p"))
    assert "CALL out of order" in caller.expect(m.Error).message


def test_run_says_where_a_worker_should_have_called(links):
    where = f"127.0.0.1:{links._config.coordinator.port}"
    with pytest.raises(NetworkError, match=f"worker 1 has not dialled {where} in 0"):
        links._open(links._workers[1], 0.05)


def test_a_loopback_name_of_the_coordinator_cannot_be_dialled(links, monkeypatch):
    monkeypatch.setattr(addresses, "is_loopback_by_name", lambda host: True)
    with pytest.raises(NetworkError, match="is a loopback address on this machine; workers"):
        links.listen()


def test_the_port_is_closed_after_the_run(links):
    links.close(Message(m.Bye("over")), 1.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", links._config.coordinator.port), WAIT_S)


def test_an_incomplete_call_does_not_block_the_port(links, call):
    port = links._config.coordinator.port
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as slow:
        slow.sendall(framed(Message(m.Call(1, "p")))[:10])
        assert served(links, call(m.Call(1, "q"))) == WELCOME
