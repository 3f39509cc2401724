"""torchft's lighthouse behind the contract of `rendezvous.py`, with its own server."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework.core.dial import Listener
from hetero_framework.core.identity import ISLANDS
from hetero_framework.core.threads import in_background
from hetero_framework.errors import (
    ConfigError,
    IdentityError,
    NetworkError,
    PeerAwayError,
    UserError,
)
from hetero_framework.islands import lighthouse, presence
from hetero_framework.islands.lighthouse import Lighthouse, TorchftRendezvous, rendezvous_at
from hetero_framework.islands.rendezvous import Member, View
from hetero_framework.islands.tunnel import Entrance
from hetero_framework.security.access import LOOPBACK_ONLY, Keyed
from tests.certificates import keys_of
from tests.integration.conftest import leaving_nothing
from tests.optional import need_torchft

WAIT_S = 30.0


class Islands:
    """Islands of one lighthouse, each with its own `lively`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._opened: list[TorchftRendezvous] = []

    def start(self, name: str, process: str = "1", **more: Any) -> TorchftRendezvous:
        member = Member(name, process, f"{name}.invalid:1")
        more = {"lively": lambda: True, "settle_s": 0.0, **more}
        self._opened.append(TorchftRendezvous(self.url, member, **more))
        return self._opened[-1]

    def close(self) -> None:
        for opened in self._opened:
            opened.close()


@pytest.fixture
def islands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Islands]:
    need_torchft()
    monkeypatch.setattr(lighthouse, "HEARTBEAT_S", 0.05)
    with Lighthouse() as server, closing(Islands(server.port)) as opened:
        yield opened


def asks(island: TorchftRendezvous, timeout_s: float = WAIT_S) -> Future[View]:
    return in_background(lambda: island.members(timeout_s), "island")


def names(view: View) -> list[str]:
    return [member.name for member in view.members]


def meet(*islands: TorchftRendezvous) -> View:
    """The view of these, when each has asked until it has it: who asks before the others are known
    is given one without them."""
    wanted = View.of([island._member for island in islands])

    def ask(island: TorchftRendezvous) -> None:
        while island.members(WAIT_S) != wanted:
            pass

    asked = [in_background(partial(ask, island), "island") for island in islands]
    for found in asked:
        found.result(WAIT_S)
    return wanted


def go_on(island: TorchftRendezvous, until: list[str] | None = None) -> None:
    """Ask again and again, as a run does, until an error or these are left."""
    while names(island.members(WAIT_S)) != until:
        pass


def test_all_that_ask_are_given_one_view_by_name(islands: Islands) -> None:
    view = meet(islands.start("b"), islands.start("a", "77"), islands.start("c"))
    assert view.members == (
        Member("a", "77", "a.invalid:1"),
        Member("b", "1", "b.invalid:1"),
        Member("c", "1", "c.invalid:1"),
    )


def test_nobody_is_given_a_view_before_all_living_have_asked(islands: Islands) -> None:
    a, b = islands.start("a"), islands.start("b")
    meet(a, b)
    asked = asks(a)
    with pytest.raises(TimeoutError):
        asked.result(0.5)
    assert names(b.members(WAIT_S)) == names(asked.result(WAIT_S)) == ["a", "b"]


def test_island_that_is_not_lively_is_not_waited_for_and_comes_back(islands: Islands) -> None:
    training = threading.Event()
    a, b = islands.start("a"), islands.start("b", lively=lambda: not training.is_set())
    meet(a, b)
    training.set()
    assert names(a.members(WAIT_S)) == ["a"]
    training.clear()
    assert names(meet(a, b)) == ["a", "b"]


def test_island_that_asks_is_living_whatever_else_is_said(islands: Islands) -> None:
    a, b = islands.start("a"), islands.start("b", lively=lambda: False)
    meet(a, b)
    asked = asks(b)
    with pytest.raises(TimeoutError):
        asked.result(1.5)  # longer than the lighthouse bears silence
    assert names(a.members(WAIT_S)) == ["a", "b"]


def test_others_that_do_not_come_are_said_in_time(islands: Islands) -> None:
    a, b = islands.start("a"), islands.start("b")
    meet(a, b)
    started = time.monotonic()
    with pytest.raises(PeerAwayError, match="another living island did not come") as found:
        a.members(0.3)
    assert time.monotonic() - started < 5
    assert found.value.exit_code == 75
    assert names(meet(a, b)) == ["a", "b"]  # and it can ask again


def test_restarted_island_takes_the_place_of_the_one_that_died(islands: Islands) -> None:
    before, b = islands.start("a", "1"), islands.start("b")
    first = meet(before, b)
    pending = asks(before)  # it dies while it asks, so that the lighthouse has its question
    with pytest.raises(TimeoutError):
        pending.result(0.2)
    before.close()
    after = islands.start("a", "2")
    assert meet(after, b).key != first.key
    assert isinstance(pending.exception(WAIT_S), NetworkError)


def test_two_living_islands_of_one_name_are_told_and_the_others_go_on(islands: Islands) -> None:
    a, b = islands.start("a", "1"), islands.start("b")
    meet(a, b)
    other = islands.start("a", "2")
    namesakes = [in_background(partial(go_on, island), "island") for island in (a, other)]
    others_view = in_background(partial(go_on, b, until=["b"]), "island")
    for asked in namesakes:
        error = asked.exception(WAIT_S)
        assert isinstance(error, ConfigError)
        assert "two living islands are called a" in error.message
        assert "island.name" in str(error.hint)
    others_view.result(WAIT_S)


def test_member_that_is_no_island_is_noticed(islands: Islands) -> None:
    asked = [in_background(partial(go_on, islands.start(name)), "x") for name in ("a", "replica 0")]
    for error in (found.exception(WAIT_S) for found in asked):
        assert isinstance(error, NetworkError)
        assert "a member that is no island: 'replica 0:1'" in error.message


def test_closed_island_asks_no_more(islands: Islands) -> None:
    a, b = islands.start("a"), islands.start("b")
    meet(a, b)
    a.close()
    with pytest.raises(NetworkError, match="island a has left"):
        a.members(WAIT_S)
    assert names(b.members(WAIT_S)) == ["b"]


SERVER = """
import sys
from torchft.coordination import LighthouseServer
port = int(sys.argv[1])
server = LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1, join_timeout_ms=10**6)
print("port", server.address().rpartition(":")[2], flush=True)
sys.stdin.read()
"""


class ServerProcess:
    """A lighthouse that can be killed."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith("port "))
        self.port = int(line.split()[1])

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.long
def test_after_a_lighthouse_was_killed_and_started_again_all_meet_again() -> None:
    need_torchft()
    server = ServerProcess()
    with closing(Islands(server.port)) as islands:
        try:
            # All that live are in the first view already: each waits until the others are known.
            a, b = islands.start("a", settle_s=1.0), islands.start("b", settle_s=1.0)
            first = meet(a, b)
            asked = asks(a)
            with pytest.raises(TimeoutError):
                asked.result(0.2)
            server.kill()
            server = ServerProcess(server.port)
            assert b.members(WAIT_S).key == asked.result(WAIT_S).key == first.key
        finally:
            server.kill()


def test_islands_meet_through_their_tunnels_and_nothing_is_left(tmp_path: Path) -> None:
    need_torchft()

    def keyed(process: str) -> Keyed:
        return Keyed(keys_of(tmp_path / process, process, kind=ISLANDS), process, None)

    with Lighthouse() as server, ExitStack() as stack:
        entrance = Entrance(Listener("127.0.0.1", 0), keyed("local"), server.port, server.beat)
        stack.callback(entrance.close)
        before = threading.active_count()
        opened: list[TorchftRendezvous] = []
        for name in ("a", "b"):
            member = Member(name, "1", f"{name}.invalid:1")
            address = ("127.0.0.1", entrance.port)
            made = rendezvous_at(address, keyed(name), member, lambda: True)
            assert isinstance(made, TorchftRendezvous)
            stack.callback(made.close)
            opened.append(made)
        meet(*opened)
        asked = asks(opened[0])
        with pytest.raises(TimeoutError):
            asked.result(0.2)
        for made in opened:
            made.close()  # also the question that is under way
        assert isinstance(asked.exception(WAIT_S), NetworkError)
        deadline = time.monotonic() + WAIT_S
        while threading.active_count() > before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_island_is_waited_for_while_its_link_lives_and_not_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it does not beat by itself any more."""
    need_torchft()
    monkeypatch.setattr(lighthouse, "FORGET_S", 0.6)
    monkeypatch.setattr(presence, "SILENT_S", 2 * WAIT_S)
    quiet = threading.Event()
    with Lighthouse() as server, ExitStack() as stack:
        listener = Listener("127.0.0.1", 0)
        entrance = Entrance(listener, LOOPBACK_ONLY, server.port, server.beat)
        stack.callback(entrance.close)
        address = ("127.0.0.1", entrance.port)
        opened = []
        for name, lively in (("a", lambda: True), ("b", lambda: not quiet.is_set())):
            member = Member(name, "1", f"{name}.invalid:1")
            made = rendezvous_at(address, LOOPBACK_ONLY, member, lively)
            assert isinstance(made, TorchftRendezvous)
            stack.callback(made.close)
            opened.append(made)
        a, b = opened
        meet(a, b)
        quiet.set()
        asked = asks(a)
        with pytest.raises(TimeoutError):
            asked.result(1.8)
        b._end()  # its tunnel
        assert names(asked.result(WAIT_S)) == ["a"]


def test_where_islands_have_been_for_long_nobody_waits_before_it_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_torchft()
    with Lighthouse() as server, ExitStack() as stack:
        listener = Listener("127.0.0.1", 0)
        entrance = Entrance(listener, LOOPBACK_ONLY, server.port, server.beat)
        stack.callback(entrance.close)
        monkeypatch.setattr(entrance._presence, "since_s", lambda: 20 * WAIT_S)
        for name in ("a", "b"):
            address, member = ("127.0.0.1", entrance.port), Member(name, "1", f"{name}.invalid:1")
            made = rendezvous_at(address, LOOPBACK_ONLY, member, lambda: False)
            assert isinstance(made, TorchftRendezvous)
            stack.callback(made.close)
            made._settle_s = 10 * WAIT_S
            assert not made.in_reach
            assert names(made.members(WAIT_S)) == [name]
            assert made.in_reach


def unreachable(port: int, **more: Any) -> TorchftRendezvous:
    need_torchft()
    return Islands(port).start("a", reach_s=1.0, **more)


def test_lighthouse_that_is_not_there_is_said() -> None:
    with closing(Listener("127.0.0.1", 0)) as listener:
        port = listener.port
    with closing(unreachable(port)) as island:
        with pytest.raises(NetworkError, match=rf"no lighthouse answers at .*:{port}: .*") as found:
            island.members(WAIT_S)
        assert "hetero lighthouse" in str(found.value.hint)


def test_server_that_is_no_lighthouse_is_said() -> None:
    with closing(Listener("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(NetworkError):  # the listener was closed
                while True:
                    with closing(listener.accept()) as stream:
                        stream.write(deque([memoryview(b"HTTP/1.1 400 Bad Request\r\n\r\n")]))

        answering = in_background(answer, "answer")
        island = unreachable(listener.port)
        with closing(island), pytest.raises(NetworkError, match="no lighthouse answers at"):
            island.members(WAIT_S)
    answering.result(WAIT_S)


def test_reason_that_is_known_is_given_instead() -> None:
    trouble = IdentityError("wrong keys")
    island = unreachable(1, trouble=lambda: trouble)
    with closing(island), pytest.raises(IdentityError, match="wrong keys"):
        island.members(WAIT_S)


def test_bug_in_what_says_whether_an_island_lives_is_raised_and_hangs_nobody() -> None:
    def broken() -> bool:
        raise ZeroDivisionError

    with closing(unreachable(1, lively=broken)) as island:
        with pytest.raises(ZeroDivisionError):
            island._beating.result(WAIT_S)
        with pytest.raises(ZeroDivisionError):
            island.members(WAIT_S)


@pytest.mark.parametrize(
    ("system", "machine", "hint"),
    [
        ("linux", "x86_64", r'pip install "hetero-framework\[islands\]"'),
        ("linux", "aarch64", "Linux x86-64 alone"),
        ("darwin", "arm64", "Linux x86-64 alone"),
        ("win32", "AMD64", "Linux x86-64 alone"),
    ],
)
def test_missing_torchft_is_said_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, hint: str
) -> None:
    imported: Callable[..., Any] = builtins.__import__

    def without_torchft(name: str, *more: Any) -> Any:
        if name == "torchft":
            raise ModuleNotFoundError("No module named 'torchft'")
        return imported(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_torchft)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(lighthouse.platform, "machine", lambda: machine)
    with pytest.raises(UserError, match="islands need torchft") as found:
        Lighthouse()
    assert re.search(hint, str(found.value.hint))


def test_a_lighthouse_that_has_ended_keeps_no_connection() -> None:
    need_torchft()
    with leaving_nothing(), Lighthouse() as server:
        server.beat("a:1")
    server.beat("a:1")  # whoever has not noticed yet


def test_torchft_that_is_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(coordination=SimpleNamespace(LighthouseClient=object))
    monkeypatch.setitem(sys.modules, "torchft", old)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="too old"):
        Lighthouse()
