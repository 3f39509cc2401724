"""`hetero watch` beside runs: of their files, and through their pages."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_framework.cli import main
from hetero_framework.cluster import roles
from hetero_framework.config import PLAN_FILE
from hetero_framework.errors import ConfigError
from hetero_framework.extras.watch.commands.watch import RunBeside
from hetero_framework.extras.watch.page_server import PageServer
from hetero_framework.trainer import outputs
from tests.extras.watch.pages import Client
from tests.extras.watch.test_page_server import Told
from tests.planting import STRANGER, plant
from tests.samples import machines_here, plan_of
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.usefixtures("nothing_left_here")
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has neither modes nor such a signal")
NO_PAGE = "the run has no page of its own (training.page)"


@pytest.fixture
def run(tmp_path):
    """What a run of this process has written so far."""
    output = tmp_path / "run"
    output.mkdir()
    holder = {"process": os.getpid(), "host": platform.node()}
    (output / ".lock.json").write_text(json.dumps(holder))
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    return output


@pytest.fixture
def page(run):
    """The page of that run."""
    told = Told()
    with PageServer([told]) as server:
        (run / "page.json").write_text(json.dumps({"address": server.address}))
        yield told, server.address


def test_the_address_of_a_runs_page_is_printed(run, page, capsys):
    assert main(["watch", str(run)]) == 0
    assert capsys.readouterr().out == f"the run's page: {page[1]}\n"


@pytest.mark.parametrize("holder", ["ended", "younger", "elsewhere", "absent", "damaged"])
def test_the_page_of_a_run_that_is_gone_is_none(run, page, holder):
    file = run / ".lock.json"
    if holder == "ended":
        with subprocess.Popen([sys.executable, "-c", ""]) as gone:
            pass
        file.write_text(json.dumps({"process": gone.pid, "host": platform.node()}))
    elif holder == "younger":  # another process got the number
        os.utime(file, (0, 0))
    elif holder == "elsewhere":
        file.write_text(json.dumps({"process": os.getpid(), "host": "elsewhere"}))
    elif holder == "absent":
        file.unlink()
    else:
        file.write_text("[")
    beside = RunBeside(str(run))
    assert beside.address is None
    assert beside.act("stop") == NO_PAGE


def test_a_copied_folder_has_no_run_and_a_moved_one_keeps_its_own(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with outputs._locked("training.output_dir", run):
        shutil.copytree(run, tmp_path / "copy")
        run.rename(tmp_path / "moved")
        found = [RunBeside(str(tmp_path / name))._process() for name in ("copy", "moved")]
    assert found == [None, psutil.Process()]


@pytest.mark.long
def test_one_page_over_files_and_pages(run, page, tmp_path):
    told, address = page
    other = tmp_path / "other"
    other.mkdir()
    (other / "events.jsonl").write_text('{"what": "run finished", "step": 3}\n')
    with PageServer([RunBeside(str(place)) for place in (run, other, address)]) as server:
        client = Client(server.address)
        names = json.loads(client.ask("/runs")[2])
        assert names == ["run", "other", address.partition("#")[0]]
        assert client.token not in address
        assert address.partition("#")[2] not in json.dumps(names)
        for number in (0, 2):
            assert next(client.news(number)) == {"state": "running"}
            assert client.act("pause", number) == (200, "")
            assert client.act("resume", number) == (409, "it is too late")
        assert told.done == ["pause", "resume"] * 2
        client.state("ended", 1)
        assert client.act("pause", 1) == (409, NO_PAGE)
        told.line = b"\n"  # so that it is noticed that nobody looks
        wait_until(lambda: told.views == 0)


def test_of_a_run_without_a_page_the_files_are_shown(run):
    with PageServer([RunBeside(str(run))]) as server:
        client = Client(server.address)
        found = client.until(lambda news: news.get("of") == "metrics")
        assert found["line"] == {"step": 1, "loss": 2.0}
        client.state("running")


def test_all_devices_of_this_machine_are_shown_as_they_are_found(run, tmp_path, monkeypatch):
    monkeypatch.setattr(roles, "devices_here", lambda: ["cpu", "cpu"])
    plan = plan_of(("local", 2), ("coordinator@2", 6))
    (run / PLAN_FILE).write_text(json.dumps({"shard_plan": plan}))
    home = {"ip": "127.0.0.1", "port": 1024, "devices": "all"}
    sections = {"model": {"name_or_path": "m"}, "data": {"train": "d"}, "shard_plan": "auto"}
    raw = {"coordinator": home, **sections, "training": {"output_dir": str(run)}}
    (tmp_path / "run.json").write_text(json.dumps(raw))
    with PageServer([RunBeside(str(tmp_path / "run.json"))]) as server:
        found = Client(server.address).until(lambda news: "machines" in news)
    assert [machine["owner"] for machine in found["machines"]] == ["local", "coordinator@2"]


def test_its_page_is_followed_as_soon_as_it_has_one(run):
    told = Told()
    with PageServer([RunBeside(str(run))]) as server, PageServer([told]) as own:
        client = Client(server.address)
        news = client.news()
        assert next(news) == {"steers": False}
        (run / "page.json").write_text(json.dumps({"address": own.address}))
        while next(news) != {"anew": True}:
            pass
        assert next(news) == {"state": "running"}
        told.line = b'{"state": "paused"}\n'
        while next(news) != {"state": "paused"}:
            pass


def test_a_page_that_does_not_answer(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (run / "page.json").write_text(json.dumps({"address": f"http://127.0.0.1:{port}/#x"}))
        threading.Thread(target=lambda: server.accept()[0].close()).start()
        assert (RunBeside(str(run)).act("stop") or "").startswith("the run does not answer: ")


@pytest.fixture
def child(run):
    """Another process, which the lock names; SIGTERM ends it."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        lock_of(run, process=process.pid)
        yield process
        process.kill()


def lock_of(run: Path, **fields: Any) -> None:
    holder = {"process": os.getpid(), "host": platform.node(), **fields}
    (run / ".lock.json").write_text(json.dumps(holder))


@posix
def test_stop_is_a_signal_where_there_is_no_page(run, child):
    beside = RunBeside(str(run))
    assert beside.act("pause") == NO_PAGE
    assert child.poll() is None
    assert beside.act("stop") is None
    assert child.wait(WAIT_S) == -signal.SIGTERM


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("a") as file:
        file.truncate(1 << 32)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


PLANTED: dict[str, tuple[str | Callable[[Path], object], str]] = {
    "another's": ("owner", f"belongs to user {STRANGER}"),
    "everybody's": ("mode", "can be changed by everybody"),
    "a group's": ("group", "can be changed by group"),
    "a link": ("link", "is a symbolic link"),
    "a second name": ("name", "has 2 names"),
    "a pipe": (pipe, "is neither a file nor a directory"),
    "huge": (huge, "more than"),
    "a folder": (folder, "s a directory"),
}


def planted_as(name: str, path: Path) -> str:
    """Plant it; the reason that is to be said."""
    how, reason = PLANTED[name]
    how(path) if callable(how) else plant(path, how, path.parent / "elsewhere")
    return reason


@posix
@pytest.mark.parametrize("name", [".lock.json", "page.json"])
@pytest.mark.parametrize("planted", PLANTED)
def test_what_others_may_have_written_is_not_acted_upon(run, child, name, planted):
    (run / "page.json").write_text('{"address": "http://127.0.0.1:9/#x"}')
    reason = planted_as(planted, run / name)
    beside = RunBeside(str(run))
    assert beside.address is None
    assert reason in (beside.act("stop") or "")
    assert child.poll() is None
    with PageServer([beside]) as server:
        assert reason in Client(server.address).until(lambda news: news.get("why"))["why"]


@posix
@pytest.mark.parametrize("planted", ["another's", "everybody's", "a group's"])
def test_a_folder_that_others_may_write_into_is_not_believed(run, child, planted):
    reason = planted_as(planted, run)
    assert reason in (RunBeside(str(run)).act("stop") or "")
    assert child.poll() is None


@posix
@pytest.mark.parametrize(
    "fields",
    [
        {"process": number}
        for number in (0, 1, -1, True, None, "{pid}", 1.5, [1], 2**31, 2**63, 10**400)
    ]
    + [{"host": host} for host in ("elsewhere", "", None, ["{host}"])]
    + [{"started": at} for at in (0, 1e9, "x", True, None, 10**400)],
)
def test_a_lock_that_names_no_such_process_stops_none(run, child, fields, monkeypatch):
    sent: list[int] = []
    monkeypatch.setattr(psutil.Process, "send_signal", lambda self, number: sent.append(self.pid))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid) if number else None)
    lock_of(run, **{"process": child.pid, **fields})
    text = (run / ".lock.json").read_text()
    (run / ".lock.json").write_text(text.replace("{pid}", str(child.pid)))
    assert RunBeside(str(run)).act("stop") == NO_PAGE
    assert sent == []


@posix
@pytest.mark.parametrize("text", ["", "null", "[" * 100_000, "\x00", '{"process": NaN}', "{}"])
def test_a_lock_that_is_damaged_stops_none(run, child, text):
    (run / ".lock.json").write_text(text)
    assert RunBeside(str(run)).act("stop") == NO_PAGE
    assert child.poll() is None


@posix
def test_a_number_that_another_process_got_is_not_believed(run, child):
    began = psutil.Process(child.pid).create_time()
    lock_of(run, process=child.pid, started=began - 60)
    assert RunBeside(str(run)).act("stop") == NO_PAGE
    lock_of(run, process=child.pid, started=began)
    os.utime(run / ".lock.json", (began - 60, began - 60))
    assert RunBeside(str(run)).act("stop") == NO_PAGE
    lock_of(run, process=child.pid, started=began)
    assert RunBeside(str(run)).act("stop") is None
    assert child.wait(WAIT_S) == -signal.SIGTERM


@posix
@pytest.mark.parametrize("at", [None, "a free port", "another's", "no port", "a text"])
def test_the_page_of_an_earlier_process_is_none(run, child, page, at):
    """The run was killed, and goes on without a page; its address may be anybody's now."""
    address = {
        "a free port": "http://127.0.0.1:9/#x",
        "another's": page[1],
        "no port": "http://127.0.0.1:99999/#x",
        "a text": "\x1b[2J",
    }.get(at)
    (run / "page.json").write_text(json.dumps({"address": address}))
    beside = RunBeside(str(run))
    assert beside.address is None
    with PageServer([beside]) as server:
        client = Client(server.address)
        assert client.until(lambda news: news.get("of") == "metrics")["line"]["step"] == 1
        client.state("running")
    assert beside.act("pause") == NO_PAGE
    assert beside.act("stop") is None
    assert child.wait(WAIT_S) == -signal.SIGTERM
    assert page[0].done == []


@posix
@pytest.mark.parametrize("planted", ["a link", "a pipe", "a folder"])
def test_files_that_are_none_are_not_shown(run, planted):
    (run / "metrics.jsonl").rename(run / "events.jsonl")
    (run / "metrics.jsonl").touch()
    planted_as(planted, run / "metrics.jsonl")
    with PageServer([RunBeside(str(run))]) as server:
        assert Client(server.address).until(lambda news: "of" in news)["of"] == "events"


def raw(tmp_path: Path, name: str, **sections: Any) -> str:
    file = tmp_path / f"{name}.json"
    training = {"output_dir": str(tmp_path / f"runs-{name}")}
    content = {**machines_here(("local", 2), (1, 4)), "training": training, **sections}
    file.write_text(json.dumps(content))
    return str(file)


def test_islands_are_known_by_their_configurations(tmp_path):
    names = ["attic", "garage"]
    islands = {name: {"name": name, "lighthouse": "127.0.0.1:1"} for name in names}
    runs = [RunBeside(raw(tmp_path, name, island=islands[name])) for name in names]
    assert [run.name for run in runs] == names
    with PageServer(runs) as server:
        told = Client(server.address).until(lambda news: "machines" in news, 1)
    assert told["machines"] == [
        {"owner": "local", "layers": ["layers 0-1"]},
        {"owner": 1, "layers": ["layers 2-3"]},
    ]


def test_a_place_without_a_run_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no run and no configuration"):
        RunBeside(str(tmp_path / "nothing.json"))
    for place in ("http://evil.example/#x", "http://127.0.0.1:80@evil.example/#x"):
        with pytest.raises(ConfigError):
            RunBeside(place)
