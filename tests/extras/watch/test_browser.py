"""The page in a real browser."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.errors import StoppedEarly
from hetero_framework.extras.watch.commands.watch import RunBeside
from hetero_framework.extras.watch.page_server import PageServer
from tests.extras.watch.browser import PROGRAM, Browser, browsing
from tests.extras.watch.pages import Client, Halting, steered
from tests.extras.watch.test_page_server import Told
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.xdist_group("pool"),
    pytest.mark.skipif(PROGRAM is None, reason="no chromium"),
]
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


def lines(file: Path, *content: dict[str, Any]) -> None:
    with file.open("a") as more:
        more.writelines(json.dumps(line) + "\n" for line in content)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of this process, with names that are meant badly."""
    output = tmp_path / "run"
    output.mkdir()
    holder = {"process": os.getpid(), "host": platform.node()}
    (output / ".lock.json").write_text(json.dumps(holder))
    when = "2026-01-02T03:04:05.678+00:00"
    begun = {"time": when, "what": "run started", "total_steps": 4, "step": 0}
    lost = {"time": when, "what": "worker lost", "worker": HOSTILE, "reason": HOSTILE, "step": 2}
    lines(output / "events.jsonl", begun, {**begun, "what": "evaluation", "eval_loss": 2.5}, lost)
    stage = {"busy_s": 0.5, "bytes_in": 125000, "bytes_out": 250000, "peak_memory": 1 << 30}
    stages = [{**stage, "owner": "local", "bytes_in": 0, "bytes_out": 0}]
    stages.append({**stage, "owner": HOSTILE, "direct_bytes_out": 0})
    step = {"step_seconds": 1.0, "tokens_per_second": 321.0, "stages": stages}
    lines(output / "metrics.jsonl", {"step": 1, "loss": 3.0, **step}, {"step": 2, "loss": None})
    lines(output / "metrics.jsonl", {"step": 3, "loss": 2.25, **step})
    lines(output / "samples.jsonl", {"step": 2, "prompt": HOSTILE, "text": HOSTILE, "tokens": 1})
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 9')
    return output


def test_files_are_shown_and_text_stays_text(browser: Browser, run: Path) -> None:
    browser.errors.clear()
    with PageServer([RunBeside(str(run))]) as server:
        browser.open(server.address)
        browser.await_text("3 / 4", ".figures")
        text = browser.text()
        assert text.count(HOSTILE) >= 4
        assert "2.25" in text
        assert "9.00" not in text
        assert {"1.00 Mbit/s", "2.00 Mbit/s"} <= {
            *text.replace("→ ", "").replace("← ", "").split("\n")
        }
        assert "1.00 GiB" in text
        assert "away" in browser.text(".machine:nth-of-type(3)")
        assert browser.value("document.title") == "run – hetero"
        assert browser.value("location.href") == server.address.partition("#")[0]
        assert browser.value("document.scripts.length") == 1
        with (run / "metrics.jsonl").open("a") as file:
            file.write('.5}\n}, "line": {"step": 99}\n')
        browser.await_text("4 / 4", ".figures")
        assert "9.50" in browser.text()
        (run / ".lock.json").unlink()
        browser.await_text("ended", ".pill")
    assert browser.errors == []


def test_scripts_from_elsewhere_do_not_run(browser: Browser, run: Path) -> None:
    with PageServer([RunBeside(str(run))]) as server:
        browser.open(server.address)
        browser.await_text("3 / 4", ".figures")
        code = "try { document.body.innerHTML = '<b>x</b>'; 'done' } catch { 'refused' }"
        assert browser.value(code) == "refused"
        code = "owner = document.createElement('script'); document.body.append(owner)"
        browser.value(f"{code}; try {{ owner.text = 'owned = 1' }} catch {{ }}")
        assert browser.value("typeof owned") == "undefined"
        assert browser.value("fetch('http://127.0.0.1:9/').then(() => 1, () => 0)") == 0
        browser.errors.clear()


def test_another_page_cannot_steer(browser: Browser) -> None:
    """It may send requests, but neither with the token nor read what comes."""
    told, other = Told(), Told()
    with PageServer([told]) as server, PageServer([other]) as elsewhere:
        browser.open(elsewhere.address)
        browser.await_text("running", ".pill")
        place = server.address.partition("#")[0]
        for code in (
            f"fetch('{place}do/0/stop', {{method: 'POST', mode: 'no-cors'}})",
            f"fetch('{place}do/0/stop', {{method: 'POST', headers: "
            f"{{Authorization: 'Bearer {server.token}'}}}})",
        ):
            assert browser.value(f"{code}.then(() => 1, () => 0)") == 0
        assert told.done == []
        name = server.address.partition("#")[0].replace("127.0.0.1", "localhost")
        browser.open(f"{name}#{server.token}")  # which is the loopback too
        browser.await_text("running", ".pill")
        browser.errors.clear()


def test_without_the_token_nothing_is_shown(browser: Browser, run: Path) -> None:
    with PageServer([RunBeside(str(run))]) as server:
        browser.open(server.address.partition("#")[0])
        browser.await_text("no whole address")
        browser.open(server.address)
        browser.await_text("3 / 4", ".figures")
        browser.ask("Page.reload")
        browser.await_text("3 / 4", ".figures")
        browser.errors.clear()


@pytest.fixture
def pressing(browser: Browser) -> Callable[[str], None]:
    def press(action: str) -> None:
        browser.click(f"[data-do={action}]")

    return press


def test_each_button_does_what_it_says(browser, pressing, pool, llama, texts, tmp_path) -> None:
    training = {"max_steps": 300, "save_strategy": "no", "page": True, "sample_prompts": [HOSTILE]}
    raw = pool.config(
        tmp_path / "run",
        [2, 4],
        model={"name_or_path": str(llama)},
        data={"train": str(texts), "max_length": 64},
        training=training,
    )

    def saved() -> set[str]:
        return {place.name for place in (tmp_path / "run" / "checkpoints").glob("step_*")}

    def steer(page: Client, run: Halting) -> None:
        browser.open(page.address)
        browser.await_text("running", ".pill")
        pressing("pause")
        browser.await_text("pausing", ".pill")
        run.goes_on.set()
        browser.await_text("paused", ".pill")
        browser.await_text("3 / 300", ".figures")
        pressing("checkpoint")
        browser.await_text("The checkpoint of step 3 is written.", ".note")
        assert saved() == {"step_3"}
        assert "3 / 300" in browser.text(".figures")
        pressing("resume")
        wait_until(lambda: "paused" not in browser.text(".pill"))
        browser.value("window.confirm = () => false")
        pressing("stop")
        pressing("checkpoint")
        wait_until(lambda: len(saved()) == 2)
        browser.value("window.confirm = () => true")
        pressing("stop")
        browser.await_text("stop", ".pill")

    browser.errors.clear()
    with pytest.raises(StoppedEarly, match="stopped by the page after step"):
        steered(raw, steer)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"step_{last['step']}" in saved()
    browser.await_text("stopped", ".pill")
    assert browser.value("[...document.querySelectorAll('button')].every(b => b.disabled)")
    assert browser.value("document.title") == "run – hetero"


def test_several_islands_share_a_page(browser: Browser, tmp_path: Path) -> None:
    told = [Told(), Told()]
    told[0].name, told[1].name = "attic", "garage"
    with PageServer(told) as server:
        browser.open(server.address)
        browser.await_text("running", "article:nth-of-type(2) .pill")
        told[1].lines = []
        assert browser.value("[...document.querySelectorAll('h1')].map(h => h.innerText)") == [
            "attic",
            "garage",
        ]
        browser.errors.clear()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_and_can_be_read(browser, run, width: int, dark: bool) -> None:
    with PageServer([RunBeside(str(run))]) as server:
        browser.look(width, dark=dark)
        browser.open(server.address)
        browser.await_text("3 / 4", ".figures")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        ink = browser.value("getComputedStyle(document.body).color")
        paper = browser.value("getComputedStyle(document.body).backgroundColor")
        shades = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
        assert (shades[0] > shades[1]) is dark
        assert abs(shades[0] - shades[1]) > 400
