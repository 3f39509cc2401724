"""The page in a real browser."""

from __future__ import annotations

import json
import os
import platform
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hetero_framework.errors import StoppedEarly
from hetero_framework.extras.watch.commands.watch import RunBeside
from hetero_framework.extras.watch.page_server import PageServer
from tests.extras.vision.seeing import encoded
from tests.extras.watch.browser import PROGRAM, browsing
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
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


def lines(file: Path, *content: dict[str, Any]) -> None:
    with file.open("a") as more:
        more.writelines(json.dumps(line) + "\n" for line in content)


@pytest.fixture
def run(tmp_path):
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


def test_files_are_shown_and_text_stays_text(browser, run):
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


def test_scripts_from_elsewhere_do_not_run(browser, run):
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


def test_another_page_cannot_steer(browser):
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


def test_without_the_token_nothing_is_shown(browser, run):
    with PageServer([RunBeside(str(run))]) as server:
        browser.open(server.address.partition("#")[0])
        browser.await_text("no whole address")
        browser.open(server.address)
        browser.await_text("3 / 4", ".figures")
        browser.ask("Page.reload")
        browser.await_text("3 / 4", ".figures")
        browser.errors.clear()


@pytest.fixture
def pressing(browser):
    def press(action: str) -> None:
        browser.click(f"[data-do={action}]")

    return press


def test_each_button_does_what_it_says(browser, pressing, pool, llama, texts, tmp_path):
    training = {"max_steps": 300, "save_strategy": "no", "page": True, "sample_prompts": [HOSTILE]}
    data = {"train": str(texts), "max_length": 64}
    sections = {"model": {"name_or_path": str(llama)}, "data": data, "training": training}
    raw = pool.config(tmp_path / "run", [2, 4], **sections)

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


def test_many_islands_share_a_page_and_each_is_steered(browser):
    told = [Told() for _ in range(8)]
    for number, run in enumerate(told):
        run.name, run.lines = f"island {number}", [b'{"state": "running", "steers": true}\n']
    with PageServer(told) as server:
        browser.open(server.address)
        for number, run in reversed([*enumerate(told)]):
            browser.await_text("running", f"article:nth-of-type({number + 1}) .pill")
            browser.click(f"article:nth-of-type({number + 1}) [data-do=checkpoint]")
            wait_until(lambda run=run: run.done == ["checkpoint"])
        heads = browser.value("[...document.querySelectorAll('h1')].map(h => h.innerText)")
        assert heads == [run.name for run in told]
        browser.errors.clear()


@pytest.fixture
def long(run, tmp_path):
    """The run has 40 steps and an evaluation every ten; another one has twice the values."""
    other = tmp_path / "an &lt;earlier&gt; run"
    other.mkdir()
    for place, factor in ((run, 1), (other, 2)):
        for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl"):
            (place / name).unlink(missing_ok=True)
        for step in range(1, 41):
            rest = {"learning_rate": 1e-5 * factor, "grad_norm": 0.5, "step_seconds": 1.0}
            loss = {"step": step, "loss": factor * (100 + step) / 100}
            lines(place / "metrics.jsonl", {**loss, **rest})
            if step % 10 == 0:
                told = {"time": "2026-01-02", "what": "evaluation", "step": step}
                lines(place / "events.jsonl", {**told, "eval_loss": factor * step / 10})
    return run


def curves(browser):
    return browser.value("document.querySelectorAll('.chart:not([hidden]) path').length")


def steps_shown(browser, chart=1):
    """The numbers of steps under a chart."""
    place = f".chart:nth-of-type({chart}) text[text-anchor=middle]"
    found = f"[...document.querySelectorAll('{place}')].map(one => Number(one.textContent))"
    return browser.value(found)


def test_a_curve_is_zoomed_by_dragging_and_shows_values(browser, long):
    browser.errors.clear()
    with PageServer([RunBeside(str(long))]) as server:
        browser.look(1280)
        browser.open(server.address)
        wait_until(lambda: curves(browser) == 4)
        headings = browser.value("[...document.querySelectorAll('h3')].map(h => h.innerText)")
        assert headings == ["Loss", "Evaluation loss", "Learning rate", "Gradient norm"]
        assert max(steps_shown(browser)) == 40
        browser.mouse("mouseMoved", ".plot")
        browser.await_text(" at step ", ".top")
        value, step = browser.text(".top span").split(" at step ")
        assert float(value) == (100 + int(step)) / 100
        for chart, text in enumerate(("2 at step 20", "1e-5 at", "0.5 at"), 2):
            browser.await_text(text, f".chart:nth-of-type({chart}) .top")
        for kind, at in (("mousePressed", 0.5), ("mouseMoved", 0.8), ("mouseReleased", 0.8)):
            browser.mouse(kind, ".plot", at)
        wait_until(lambda: all(min(steps_shown(browser, chart)) > 15 for chart in (1, 2, 3, 4)))
        assert max(steps_shown(browser)) < 36
        for kind in ("mousePressed", "mouseReleased") * 2:
            browser.mouse(kind, ".plot", 0.4, 2)
        wait_until(lambda: max(steps_shown(browser)) == 40)
        assert browser.value("document.querySelector('.whole').hidden")
        assert browser.errors == []


def test_an_earlier_run_is_drawn_on_the_same_axes(browser, long):
    browser.errors.clear()
    with PageServer([RunBeside(str(long))]) as server:
        browser.open(server.address)
        wait_until(lambda: curves(browser) == 4)
        name = "an &lt;earlier&gt; run"
        browser.await_text(name, ".earlier")
        browser.choose(".earlier", name)
        wait_until(lambda: curves(browser) == 8)
        assert name in browser.text(".legend")
        browser.mouse("mouseMoved", ".plot")
        browser.await_text(name, ".top")
        own, other = browser.text(".top span").split(" · ")
        step = int(own.split()[-1])
        assert own == f"run {(100 + step) / 100:g} at step {step}"
        assert other == f"{name} {(100 + step) / 50:g} at step {step}"
        browser.choose(".earlier", "")
        wait_until(lambda: curves(browser) == 4)
        assert browser.errors == []


def test_samples_stand_side_by_side_by_step(browser, long):
    cells = "[...document.querySelectorAll('tr')].map(r => [...r.children].map(c => c.innerText))"
    for step in (10, 20, 30, 40):
        for prompt in (HOSTILE, "again", "again"):
            told = {"step": step, "prompt": prompt, "text": f"{HOSTILE} {step}"}
            lines(long / "samples.jsonl", told if step > 10 else {**told, "text": ""})
    with PageServer([RunBeside(str(long))]) as server:
        browser.open(server.address)
        browser.await_text("step 40", "table")
        head, *rows = browser.value(cells)
        assert (head[0], head[1], head[3]) == ("prompt", "step 10", "step 40")
        assert [row[0] for row in rows] == [HOSTILE, "again", "again"]
        assert [row[1:] for row in rows] == [["(empty)", f"{HOSTILE} 30", f"{HOSTILE} 40"]] * 3
        browser.choose("table select", "20")
        browser.await_text(f"{HOSTILE} 20", "table")
        lines(long / "samples.jsonl", {"step": 50, "prompt": "new", "text": "said"})
        browser.await_text("said", "table")
        assert browser.value(cells)[1][1:] == ["(empty)", f"{HOSTILE} 20", "–"]


def test_a_sample_has_small_copies_of_its_pictures(browser, run):
    shown = f"data:image/png;base64,{b64encode(encoded(Image.new('RGB', (4, 4), 'red'))).decode()}"
    told = {"step": 2, "prompt": "what is it", "text": "red"}
    lines(run / "samples.jsonl", {**told, "pictures": [shown, "http://127.0.0.1/x.png", 7]})
    with PageServer([RunBeside(str(run))]) as server:
        browser.open(server.address)
        browser.await_text("what is it", "table")
        pictures = "[...document.querySelectorAll('img')].map(i => [i.src, i.naturalWidth])"
        wait_until(lambda: browser.value(pictures) == [[shown, 4]])


PURE = """
import('/curves.js').then(({ added, extent, figure, nearest, Scale, thinned, ticks, within }) => {
  const odd = { 778: 9, 889: null, 1000: -9 }, scale = new Scale([10, 50], 462)
  const many = Array.from({ length: 1e5 }, (_, k) => [k + 1, k + 1 in odd ? odd[k + 1] : k % 7])
  const few = thinned(many, 2000), at = step => few.find(point => point[0] === step)
  let grown = []
  for (let k = 0; k < 9000; k++) grown = added(grown, k, k)
  return {
    count: few.length, few: [778, 889, 1000, 1, 1e5].map(at),
    sorted: few.every(([step], k) => !k || step > few[k - 1][0]),
    grown: [grown.length, grown[0][0], grown.at(-1)[0]],
    back: added([[1, 1], [2, 2], [3, 3]], 2, 5), one: thinned([[1, null]]),
    within: within(many, [5.5, 7]).map(([step]) => step), none: within([], [0, 1]),
    nearest: [nearest([[1, 0], [5, 0]], 3.5), nearest([], 1)],
    zoom: [scale.zoom(454, 54), scale.zoom(60, 63), scale.zoom(-99, 154)],
    ticks: [ticks(0, 1, 4), ticks(3, 3, 4)],
    figures: [0.00001234567, 1234567, 0, null, 2.34567].map(figure),
  }
})"""


def test_curves_are_thinned_and_zoomed_exactly(browser):
    with PageServer([]) as server:
        browser.open(server.address)
        browser.await_text("no whole address")
        found = browser.value(PURE)
    assert 1000 < found["count"] <= 2000
    assert found["sorted"]
    assert found["few"][:3] == [[778, 9], [889, None], [1000, -9]]
    assert [point[0] for point in found["few"][3:]] == [1, 100000]
    assert (found["grown"][0] <= 4000, found["grown"][1:]) == (True, [0, 8999])
    assert found["back"] == [[1, 1], [2, 5]]
    assert (found["within"], found["none"]) == ([5, 6, 7, 8], [])
    assert found["nearest"] == [[5, 0], None]
    assert found["zoom"] == [[10, 50], None, [10, 20]]
    assert found["one"] == [[1, None]]
    assert found["ticks"] == [[0, 0.5, 1], [3]]
    assert found["figures"] == ["1.235e-5", "1,235,000", "0", "not finite", "2.346"]


LOST = {"what": "worker lost", "worker": HOSTILE}
STATES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a worker is away": ([LOST], "waiting"),
    "it hangs": ([{**LOST, "what": "worker hangs"}], "waiting"),
    "it is back": ([LOST, {**LOST, "what": "worker back"}], "running"),
    "another is back": ([LOST, {**LOST, "what": "worker back", "worker": 7}], "waiting"),
    "it is done without": ([LOST, {"what": "plan changed"}], "running"),
    "it began again": ([LOST, {"what": "run resumed"}], "running"),
    "an island is lost": ([{"what": "island lost", "island": "attic"}], "waiting"),
    "islands are awaited": ([{"what": "waiting for islands"}], "waiting"),
    "islands are there": ([{"what": "waiting for islands"}, {"what": "islands"}], "running"),
}


@pytest.mark.parametrize("happened", STATES)
def test_a_run_that_waits_is_not_said_to_run(browser, run, happened):
    (run / "events.jsonl").unlink()
    events, state = STATES[happened]
    lines(run / "events.jsonl", *({"time": "2026-01-02", "step": 4, **one} for one in events))
    with PageServer([RunBeside(str(run))]) as server:
        browser.open(server.address)
        browser.await_text(state, ".pill")
        assert ("Waiting for" in browser.text(".note")) is (state == "waiting")
        lines(run / "metrics.jsonl", {"step": 98, "loss": 1.0}, {"step": 99, "loss": 1.0})
        browser.await_text("99", ".figures")
        browser.await_text("running", ".pill")


def test_lines_and_long_words_of_a_reason_are_shown_as_they_are(browser, run):
    reason = "it ended:\n    C:\\new\\n a/b/c " + "long" * 60
    lines(run / "events.jsonl", {**LOST, "time": "2026-01-02", "reason": reason, "step": 4})
    with PageServer([RunBeside(str(run))]) as server:
        browser.look(390)
        browser.open(server.address)
        browser.await_text("away", ".machine .away")
        row = "document.querySelector('.machine:last-of-type > div:last-of-type')"
        assert browser.value(f"{row}.innerText") == f"why\n{reason}"
        assert browser.value(f"{row}.firstChild.getBoundingClientRect().width") > 18  # "why"
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        browser.errors.clear()


def test_a_note_ends_and_comes_a_second_time(browser):
    told = Told()
    told.lines = [b'{"state": "running", "steers": true, "note": "old", "noted": 3}\n']
    fast = "const real = setTimeout; window.setTimeout = (does, ms) => real(does, ms / 20)"
    script = browser.ask("Page.addScriptToEvaluateOnNewDocument", source=fast)
    with PageServer([told]) as server:
        browser.open(server.address)
        browser.await_text("running", ".pill")
        assert browser.text(".note") == ""
        for number in (4, 5):
            told.line = b'{"note": "done", "noted": %d}\n' % number
            browser.await_text("done", ".note")
            wait_until(lambda: browser.text(".note") == "")
        browser.click("[data-do=pause]")
        wait_until(lambda: told.done == ["pause"])
        browser.ask("Page.removeScriptToEvaluateOnNewDocument", **script)
        browser.errors.clear()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_and_can_be_read(browser, run, width, dark):
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
