"""A run that its page steers has the bits of one that nobody watches."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import StoppedEarly
from hetero_framework.extras.watch import page_server
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress
from tests.extras.watch.pages import Client, Halting, address_of, steered
from tests.faults.final_state import assert_same_run
from tests.integration.test_parity import assert_same, weights
from tests.terminal import terminal
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left", "verdicts")]
TRAINING = {"max_steps": 12, "save_strategy": "no", "page": True}
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}


@pytest.fixture
def config(pool, llama, texts, tmp_path):
    def made(name: str, cuts: tuple[int, ...] = (2, 4), **training: Any) -> dict[str, Any]:
        sections = {"data": {"train": str(texts), "max_length": 64}, "adapter": LORA}
        sections |= {"model": {"name_or_path": str(llama)}, "training": {**TRAINING, **training}}
        return pool.config(tmp_path / name, [*cuts], **sections)

    return made


@pytest.fixture
def plain(config, tmp_path):
    train(Config.from_dict(config("plain", page=False)))
    return tmp_path / "plain"


def checkpoints(output: Path) -> list[str]:
    return sorted(place.name for place in (output / "checkpoints").glob("step_*"))


def last_step(output: Path) -> int:
    return int(json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])["step"])


def test_pause_checkpoint_and_resume_change_no_bit(config, plain, tmp_path):
    output = tmp_path / "steered"

    def steer(page: Client, run: Halting) -> None:
        assert page.act("pause") == (200, "")
        page.state("pausing")
        run.goes_on.set()
        page.state("paused")
        assert last_step(output) == 3
        assert checkpoints(output) == []
        assert page.act("checkpoint") == (200, "")
        page.until(lambda news: news.get("note") == "The checkpoint of step 3 is written.")
        page.state("paused")
        assert page.act("checkpoint") == (200, "")
        page.until(lambda news: news.get("noted") == 2)
        assert checkpoints(output) == ["step_3"]
        assert last_step(output) == 3
        assert page.act("resume") == (200, "")

    steered(config("steered"), steer)
    assert_same_run(output, plain)
    assert not (output / "page.json").exists()


def test_a_checkpoint_while_it_runs(config, plain, tmp_path):
    def steer(page: Client, run: Halting) -> None:
        assert page.act("checkpoint") == (200, "")

    steered(config("steered"), steer)
    assert checkpoints(tmp_path / "steered") == ["step_3"]
    assert_same(weights(tmp_path / "steered"), weights(plain))


@pytest.mark.parametrize("pauses", [False, True])
def test_stop_saves_and_the_run_goes_on_with_the_same_bits(
    config, plain, tmp_path, pauses, monkeypatch
):
    monkeypatch.setattr(page_server, "_LAST_S", WAIT_S)

    def steer(page: Client, run: Halting) -> None:
        if pauses:
            page.act("pause")
            run.goes_on.set()
            page.state("paused")
        assert page.act("stop") == (200, "")
        assert page.act("resume") == (409, "the run stops already")
        run.goes_on.set()
        told.extend(page.news())

    told: list[dict[str, Any]] = []
    with pytest.raises(StoppedEarly, match="stopped by the page after step 3"):
        steered(config("steered"), steer)
    assert "stopped" in [news.get("state") for news in told]
    assert told[-1]["line"]["what"] == "run stopped"
    assert not (tmp_path / "steered" / "page.json").exists()
    assert checkpoints(tmp_path / "steered") == ["step_3"]
    train(Config.from_dict(config("steered", page=False)))
    assert_same_run(tmp_path / "steered", plain)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_a_signal_ends_a_run_that_is_paused(config, tmp_path):
    def steer(page: Client, run: Halting) -> None:
        page.act("pause")
        run.goes_on.set()
        page.state("paused")
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedEarly, match="stopped by SIGTERM after step 3"):
        steered(config("steered"), steer)
    assert checkpoints(tmp_path / "steered") == ["step_3"]


def test_nothing_is_saved_before_the_first_step_is_done(config, tmp_path):
    def steer(page: Client, run: Halting) -> None:
        assert page.act("checkpoint") == (409, "there is nothing to save before the first step")

    steered(config("steered", max_steps=2), steer, halt=1)
    assert checkpoints(tmp_path / "steered") == []


def test_the_page_tells_what_the_run_is(config, tmp_path):
    found: dict[str, Any] = {}
    points: list[int] = []
    what: list[str] = []

    def steer(page: Client, run: Halting) -> None:
        news = page.news()
        run.goes_on.set()
        for one in news:
            if one.get("of") == "metrics":
                points.append(one["line"]["step"])
            elif one.get("of") == "events":
                what.append(one["line"]["what"])
            elif "of" not in one:
                found.update(one)

    steered(config("told", timeline_steps=-1), steer)
    assert points == [*range(1, 13)]
    assert what[-1] == "run finished"
    assert {"worker connected", "run started"} <= {*what}
    assert (found["total"], found["unit"], found["steers"]) == (12, "tokens", True)
    machines = found["machines"]
    assert [machine["owner"] for machine in machines] == ["local", 1, 2]
    layers = [machine["layers"] for machine in machines]
    assert layers == [["layers 0-1"], ["layers 2-3"], ["layers 4-5"]]
    assert all(machine["device"] and machine["memory"] > 0 for machine in machines)
    flow = found["flow"]
    assert flow["step"] >= 10
    kinds = {(owner, kind) for owner, kind, *_ in flow["spans"]}
    assert {("local", "forward"), (1, "backward"), (2, "forward_backward")} <= kinds
    sent = {(owner, peer) for owner, kind, *_, peer, _ in flow["spans"] if kind == "send"}
    assert {("local", 1), (1, 2), (2, 1), (1, "local")} <= sent


def test_one_step_of_eight_is_recorded_for_the_page_alone(config, tmp_path):
    found: list[int] = []

    def steer(page: Client, run: Halting) -> None:
        run.goes_on.set()
        found.extend(one["flow"]["step"] for one in page.news() if one.get("flow"))

    steered(config("told", max_steps=20, timeline_steps=2), steer, halt=1)
    assert found[-1] == 17
    spans = json.loads((tmp_path / "told" / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["step"] for e in spans if "step" in e.get("args", {})} == {2, 3}


class Asking(Progress):
    """Asks the run's page after each step, if there is one."""

    def __init__(self, stream: Any, output: Path) -> None:
        super().__init__(stream)
        self.output, self.answers = output, list[int]()

    def step(self, metrics: Any) -> None:
        super().step(metrics)
        if (self.output / "page.json").exists():
            self.answers.append(Client(address_of(self.output)).ask("/runs")[0])


@pytest.mark.parametrize("page", [None, False])
def test_a_run_on_a_terminal_has_a_page_unless_told_otherwise(config, tmp_path, page, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    raw = config("run", max_steps=2, page=page)
    with terminal() as (stream, said):
        asking = Asking(stream, tmp_path / "run")
        train(Config.from_dict(raw), progress=asking)
    told = re.findall(r"the run's page: http://127\.0\.0\.1:\d+/#[\w-]{32}\s", said.decode())
    has_page = page is None
    assert (asking.answers, len(told)) == ([200, 200] * has_page, has_page)
    assert not any("/#" in file.read_text() for file in (tmp_path / "run").rglob("*.log"))


def test_a_run_without_a_terminal_has_no_page_by_itself(config, tmp_path):
    asking = Asking(io.StringIO(), tmp_path / "run")
    train(Config.from_dict(config("run", max_steps=1, page=None)), progress=asking)
    assert asking.answers == []


def test_a_run_that_gets_no_port_goes_on_without_a_page(config, tmp_path, monkeypatch):
    monkeypatch.setattr(page_server, "LOOPBACK", "203.0.113.1")  # the address of no machine
    assert train(Config.from_dict(config("run", max_steps=2))).steps == 2
    log = (tmp_path / "run" / "logs" / "coordinator.log").read_text()
    assert "WARNING the run goes on without a page: " in log
    assert not (tmp_path / "run" / "page.json").exists()


def test_nobody_else_can_read_the_address(config, tmp_path):
    def steer(page: Client, run: Halting) -> None:
        file = tmp_path / "told" / "page.json"
        assert address_of(file.parent) == page.address
        if os.name != "nt":
            assert stat.S_IMODE(file.stat().st_mode) == 0o600

    steered(config("told", max_steps=3), steer)
    for file in (tmp_path / "told").rglob("*.log"):
        assert "127.0.0.1:" not in file.read_text() or "#" not in file.read_text()
