"""The display fits any terminal and never ends a run."""

from __future__ import annotations

import io
import re
import sys
import threading
from typing import Any

import pytest

from hetero_framework.trainer.progress import Progress, StageRow

ROWS = [
    StageRow("coordinator", 0, 8, "NVIDIA H200"),
    StageRow("worker 1", 8, 24, "AMD Radeon RX 7900 XTX"),
    StageRow("worker 2", 24, 25),
]


def metrics_of(step: int, **changes: Any) -> dict[str, Any]:
    stages = [{"index": i, "busy_s": 0.1 * (i + 1), "peak_memory": 3 << 30} for i in range(3)]
    stages[1] |= {"bytes_in": 1 << 20, "bytes_out": 2 << 20}
    return {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.25,
        "learning_rate": 2e-4,
        "tokens": 100,
        "step_seconds": 0.5,
        "stages": stages,
        **changes,
    }


def run(progress: Progress, first: int = 1, last: int = 6, logging_steps: int = 1) -> None:
    progress.start(last, ROWS, first - 1, logging_steps)
    for step in range(first, last + 1):
        progress.step(metrics_of(step))
    progress.close({"adapter": "runs/a/adapter"})


@pytest.fixture
def terminal(monkeypatch):
    """A stream for the live display, 100 columns wide; stdout itself is left alone after it."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    before, threads = (sys.stdout, sys.stderr), threading.active_count()
    yield io.StringIO()
    assert (sys.stdout, sys.stderr) == before
    assert threading.active_count() == threads


def screen(text: str) -> list[str]:
    """The lines a terminal would show in the end, without colours."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", text):
        if token == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif token == "\r":
            continue
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] += token
    return [line.rstrip() for line in lines]


def test_an_absent_worker_is_shown_for_as_long_as_it_is(terminal):
    progress = Progress(terminal, live=True)
    progress.start(6, ROWS)
    progress.step(metrics_of(1))

    def stages() -> list[str]:
        return [line for line in screen(terminal.getvalue()) if line.startswith("stage")][-3:]

    there = stages()
    for said in ("away 0:02:10", "away 0:02:15"):
        progress.away(1, said)
        assert stages()[1].startswith(f"stage 1  {said}  worker 1, ")
        assert stages()[::2] == there[::2]
    progress.away(1, None)
    assert stages() == there
    progress.away("box", "away 0:00:01")  # of no stage of this plan
    progress.close()


def test_plain_lines_say_each_logged_step(capsys):
    run(Progress(), logging_steps=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "stage 0: coordinator, layers 0-7, NVIDIA H200",
        "stage 1: worker 1, layers 8-23, AMD Radeon RX 7900 XTX",
        "stage 2: worker 2, layer 24",
    ]
    assert lines[3] == (
        "step 1/6  loss 10.0000  200 tokens/s  ETA 0:00:03  grad_norm 1.2500  lr 0.0002  0.5 s/step"
    )
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == ["1/6", "2/6", "4/6", "6/6"]


def test_last_step_is_always_logged(capsys):
    run(Progress(), logging_steps=4)
    out = capsys.readouterr().out
    assert [step in out for step in ("step 4/6", "step 5/6", "step 6/6")] == [True, False, True]


def test_the_summary_shows_results_and_their_places(capsys):
    progress = Progress()
    progress.start(6, ROWS)
    for step in range(1, 7):
        progress.step(metrics_of(step))
    progress.evaluation({"step": 6, "eval_loss": 2.5, "eval_perplexity": 12.182})
    progress.close({"adapter": "runs/a/adapter"})
    out = capsys.readouterr().out
    assert "step 6: evaluation  loss 2.5000  perplexity 12.1820" in out
    assert out.split("\n\n")[1].splitlines() == [
        "steps            1 to 6 of 6",
        "loss             10.0000 -> 1.6667",
        "evaluation loss  2.5000 after step 6",
        "time in steps    0:00:03",
        "speed            200 tokens/s",
        "on the wire      3.00 MiB per step",
        "stage 0          busy 20%  coordinator, layers 0-7, NVIDIA H200",
        "stage 1          busy 40%  worker 1, layers 8-23, AMD Radeon RX 7900 XTX",
        "stage 2          busy 60%  worker 2, layer 24",
        "adapter          runs/a/adapter",
    ]


def test_resumed_run_counts_on(capsys):
    run(Progress(), first=5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "resumed after step 4"
    assert "steps          5 to 6 of 6" in lines


def test_run_that_was_complete_has_a_summary(capsys):
    run(Progress(), first=7)
    assert "none of 6 run here" in capsys.readouterr().out


def test_close_without_summary_prints_nothing_and_twice_is_fine(capsys):
    progress = Progress()
    progress.start(3)
    progress.close()
    progress.close()
    assert capsys.readouterr().out == ""


def test_missing_and_non_finite_values_are_no_problem(capsys):
    progress = Progress()
    progress.start(3, ROWS[:1])
    progress.step({"step": 1})
    progress.step({"step": 2, "loss": None, "grad_norm": float("nan"), "skipped": "rule"})
    progress.step({"step": 3, "loss": 1.0, "stages": [{}, {}]})
    progress.close({})
    assert "loss not finite  skipped (rule)  ETA 0:00:00  grad_norm nan" in capsys.readouterr().out


def test_live_display_shows_the_last_state(terminal):
    run(Progress(terminal, live=True))
    lines = screen(terminal.getvalue())
    assert lines[0].split("  ")[:4] == ["step 6/6", "loss 1.6667", "200 tokens/s", "ETA 0:00:00"]
    assert set(lines[1]) == {"━"}
    assert lines[3].startswith("stage 1  busy  40%  3.00 GiB  worker 1, layers 8-23, AMD Radeon")
    assert "adapter        runs/a/adapter" in lines


def test_messages_stand_above_the_live_display(terminal):
    progress = Progress(terminal, live=True)
    progress.start(2, ROWS)
    progress.step(metrics_of(1))
    progress.message("worker 1: [bold]hello[/bold]")
    progress.evaluation({"step": 1, "eval_loss": 2.5, "eval_perplexity": 12.182})
    progress.step(metrics_of(2))
    progress.close()
    lines = screen(terminal.getvalue())
    assert lines[:3] == [
        "worker 1: [bold]hello[/bold]",
        "step 1: evaluation  loss 2.5000  perplexity 12.1820",
        lines[2],
    ]
    assert lines[2].startswith("step 2/2")
    assert lines[4] == "evaluation loss 2.5000 after step 1"


@pytest.mark.parametrize("columns", [10, 40, 55, 80, 200])
def test_live_display_fits_the_terminal(terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(terminal, live=True)
    progress.start(6, [*ROWS, StageRow("worker " + "x" * 60, 25, 30, "d" * 90)])
    for step in range(1, 7):
        progress.step(metrics_of(step))
    progress.close()
    lines = screen(terminal.getvalue())
    assert max(len(line) for line in lines) <= columns
    if columns >= 40:
        stages = [line for line in lines[2:] if line]
        assert [line[:7] for line in stages] == [f"stage {k}" for k in range(4)]
        assert all("%" in line for line in stages)


def test_live_display_without_colour(terminal, monkeypatch):
    run(Progress(terminal, live=True))
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.getvalue())
    monkeypatch.setenv("NO_COLOR", "1")
    plain = io.StringIO()
    run(Progress(plain, live=True))
    assert not re.search(r"\x1b\[[0-9;]*[34][0-9]m", plain.getvalue())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("term", "is_live"), [("xterm", True), ("dumb", False)])
def test_live_display_only_on_a_terminal(terminal, monkeypatch, term, is_live):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich would take any stream for a terminal
    run(Progress(terminal))
    assert "\x1b" not in terminal.getvalue()
    stream = Terminal()
    run(Progress(stream))
    assert ("\x1b" in stream.getvalue()) is is_live


class Breaking(io.StringIO):
    """A stream whose other end goes away after some writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.left = writes

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError
        return super().write(text)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("writes", [0, 1, 3, 5])
def test_closed_pipe_does_not_end_a_run(terminal, live, writes):
    run(Progress(Breaking(writes), live=live))


@pytest.mark.parametrize("live", [True, False, None])
def test_closed_stream_does_not_end_a_run(terminal, live):
    terminal.close()
    run(Progress(terminal, live=live))


@pytest.mark.parametrize("live", [True, False])
def test_stream_that_knows_ascii_only(terminal, live):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    progress = Progress(stream, live=live)
    progress.start(1, [StageRow("wörker", 0, 1, "GPU µ")])
    progress.message("größer")
    progress.step(metrics_of(1))
    progress.close({"ende": "ö"})
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "gr??er" in text
    assert "step 1/1" in text
    assert "ende" in text


@pytest.mark.parametrize("live", [True, False])
def test_control_characters_of_a_peer_do_not_reach_the_terminal(terminal, live):
    progress = Progress(terminal, live=live)
    progress.start(1, [StageRow("w\x1b[2J", 0, 1, "\x07")])
    progress.message("a\x1b]0;title\x07b\x9bc")
    progress.close({"a": "\x1b[2J"})
    assert r"a\x1b]0;title\x07b\x9bc" in terminal.getvalue()
    assert not re.search("\x1b\\[2J|\x07|\x9b|\x1b\\]", terminal.getvalue())


def test_messages_from_other_threads_come_whole(terminal):
    progress = Progress(terminal, live=True)
    progress.start(50, ROWS)

    def talk(name: str) -> None:
        for number in range(20):
            progress.message(f"{name} says {number}")

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for step in range(1, 51):
        progress.step(metrics_of(step))
    for thread in threads:
        thread.join()
    progress.close()
    said = [line for line in screen(terminal.getvalue()) if " says " in line]
    assert sorted(said) == sorted(f"{name} says {i}" for name in "abc" for i in range(20))


def test_steps_that_skip_numbers_are_logged_when_they_pass_a_logged_one():
    """As islands' do, each of which takes a part of the run's steps."""
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start(12, [], 0, 4)
    island = {"members": ["attic", "garage"], "bytes_in": 1 << 20, "bytes_out": 1 << 20}
    for step in (3, 5, 7, 9, 12):
        progress.step(
            {"step": step, "loss": 1.0, "step_seconds": 2.0, "tokens": 8, "island": island}
        )
    progress.close({})
    text = stream.getvalue()
    shown = [line.split()[1] for line in text.splitlines() if line.startswith("step ")]
    assert shown == ["3/12", "5/12", "9/12", "12/12"]
    assert "islands attic, garage" in text
    assert "ETA 0:00:06" in text  # after 5 of 12 steps, 2.5 in 2 s
    assert re.search(r"between islands +2.00 MiB per step", text)


def test_speed_of_pictures_is_in_examples():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start(2, ROWS, unit="examples")
    for step in (1, 2):
        progress.step(metrics_of(step))
    progress.close({})
    assert stream.getvalue().count("200 examples/s") == 3
    assert "tokens/s" not in stream.getvalue()


@pytest.mark.parametrize("live", [False, True])
def test_measures_of_the_objective_are_shown(live):
    stream = io.StringIO()
    progress = Progress(stream, live=live)
    progress.start(1, measures=("rewards/accuracies", "rewards/margins", "mean_token_accuracy"))
    progress.step({"step": 1, "loss": 0.5, "rewards/accuracies": 0.75, "rewards/margins": -0.125})
    progress.close()
    assert "rewards/accuracies 0.7500  rewards/margins -0.1250" in " ".join(
        stream.getvalue().split(" ")
    )
