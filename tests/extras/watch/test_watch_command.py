"""`hetero watch` beside runs: of their files, and through their pages."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cli import main
from hetero_framework.errors import ConfigError
from hetero_framework.extras.watch.commands.watch import RunBeside
from hetero_framework.extras.watch.page_server import PageServer
from tests.extras.watch.pages import Client
from tests.extras.watch.test_page_server import Told
from tests.samples import free_ports, plan_of
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_left_here")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run of this process has written so far."""
    output = tmp_path / "run"
    output.mkdir()
    holder = {"process": os.getpid(), "host": platform.node()}
    (output / ".lock.json").write_text(json.dumps(holder))
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    return output


@pytest.fixture
def page(run: Path) -> Iterator[tuple[Told, str]]:
    """The page of that run."""
    told = Told()
    with PageServer([told]) as server:
        (run / "page.json").write_text(json.dumps({"address": server.address}))
        yield told, server.address


def test_the_address_of_a_runs_page_is_printed(run, page, capsys) -> None:
    assert main(["watch", str(run)]) == 0
    assert capsys.readouterr().out == f"the run's page: {page[1]}\n"


@pytest.mark.parametrize("planted", ["another's", "a link"])
def test_a_planted_address_is_not_believed(run, page, planted, tmp_path) -> None:
    file = run / "page.json"
    if planted == "a link":
        file.rename(tmp_path / "elsewhere.json")
        file.symlink_to(tmp_path / "elsewhere.json")
    else:
        file.chmod(0o666)
    assert RunBeside(str(run)).address is None


@pytest.mark.parametrize("holder", ["ended", "younger", "elsewhere", "absent", "damaged"])
def test_the_page_of_a_run_that_is_gone_is_none(run, page, holder) -> None:
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
    assert beside.act("stop") == "the run has no page of its own (training.page)"


def test_one_page_over_files_and_pages(run, page, tmp_path) -> None:
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
        assert client.act("pause", 1) == (409, "the run has no page of its own (training.page)")
        told.line = b"\n"  # so that it is noticed that nobody looks
        wait_until(lambda: told.views == 0)


def test_of_a_run_without_a_page_the_files_are_shown(run) -> None:
    with PageServer([RunBeside(str(run))]) as server:
        client = Client(server.address)
        found = client.until(lambda news: news.get("of") == "metrics")
        assert found["line"] == {"step": 1, "loss": 2.0}
        client.state("running")


def test_its_page_is_followed_as_soon_as_it_has_one(run) -> None:
    told = Told()
    with PageServer([RunBeside(str(run))]) as server, PageServer([told]) as own:
        client = Client(server.address)
        news = client.news()
        assert next(news) == {"steers": False}
        (run / "page.json").write_text(json.dumps({"address": own.address}))
        list(news)  # ends, and the browser asks again
        assert next(client.news()) == {"state": "running"}


def test_a_page_that_does_not_answer(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (run / "page.json").write_text(json.dumps({"address": f"http://127.0.0.1:{port}/#x"}))
    beside = RunBeside(str(run))
    assert (beside.act("stop") or "").startswith("the run does not answer: ")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_stop_is_a_signal_where_there_is_no_page(run) -> None:
    code = "import signal; signal.sigwait([signal.SIGTERM])"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        holder = {"process": child.pid, "host": platform.node()}
        (run / ".lock.json").write_text(json.dumps(holder))
        beside = RunBeside(str(run))
        assert beside.act("pause") == "the run has no page of its own (training.page)"
        assert child.poll() is None
        assert beside.act("stop") is None
    assert child.returncode in (0, -signal.SIGTERM)


def raw(tmp_path: Path, name: str, **sections: Any) -> str:
    ports = free_ports(2)
    machine = {"hostname": "localhost", "ip": "127.0.0.1"}
    file = tmp_path / f"{name}.json"
    content = {
        "coordinator": {**machine, "port": ports[0]},
        "workers": [{**machine, "id": 1, "port": ports[1]}],
        "shard_plan": plan_of(("local", 2), (1, 4)),
        "training": {"output_dir": str(tmp_path / f"runs-{name}")},
        **sections,
    }
    file.write_text(json.dumps(content))
    return str(file)


def test_islands_are_known_by_their_configurations(tmp_path) -> None:
    files = []
    for name in ("attic", "garage"):
        island = {"name": name, "lighthouse": "127.0.0.1:1"}
        files.append(raw(tmp_path, name, island=island))
    runs = [RunBeside(file) for file in files]
    assert [run.name for run in runs] == ["attic", "garage"]
    with PageServer(runs) as server:
        told = Client(server.address).until(lambda news: "machines" in news, 1)
    assert told["machines"] == [
        {"owner": "local", "layers": ["layers 0-1"]},
        {"owner": 1, "layers": ["layers 2-3"]},
    ]


def test_a_place_without_a_run_is_said(tmp_path) -> None:
    with pytest.raises(ConfigError):
        RunBeside(str(tmp_path / "nothing.json"))
    for place in ("http://evil.example/#x", "http://127.0.0.1:80@evil.example/#x"):
        with pytest.raises(ConfigError):
            RunBeside(place)
