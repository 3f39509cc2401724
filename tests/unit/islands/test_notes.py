"""What a lighthouse remembers of groups that have finished."""

from __future__ import annotations

import time

import pytest

from hetero_framework.islands import notes
from hetero_framework.islands.notes import Notes, found, looking, noting
from hetero_framework.islands.rendezvous import Finished

DONE = Finished("run 1", "facts", 9, ("a", "b"))


def test_a_run_that_has_finished_is_known_by_its_name_and_what_it_trained() -> None:
    kept = Notes()
    assert found(kept.answer(looking("run 1", "facts", 0.0))) is None
    assert found(kept.answer(noting(DONE))) is None
    assert found(kept.answer(looking("run 1", "facts", 0.0))) == DONE
    assert found(kept.answer(looking("run 2", "facts", 99.0))) is None
    # The same run with more steps than it had.
    assert found(kept.answer(looking("run 1", "more steps", 0.0))) is None


def test_who_is_new_asks_for_those_that_finished_while_it_was_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    kept = Notes()
    kept.answer(noting(DONE))
    now = 110.0
    assert found(kept.answer(looking("", "facts", 11.0))) == DONE
    assert found(kept.answer(looking("", "other", 11.0))) is None
    assert found(kept.answer(looking("", "facts", 9.0))) is None


def test_the_first_note_of_a_run_counts_and_old_ones_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes, "_MAX_NOTES", 2)
    kept = Notes()
    kept.answer(noting(DONE))
    kept.answer(noting(Finished("run 1", "facts", 9, ("b",))))
    assert found(kept.answer(looking("run 1", "facts", 0.0))) == DONE
    for run in ("run 2", "run 3"):
        kept.answer(noting(Finished(run, "facts", 9, ())))
    assert found(kept.answer(looking("run 1", "facts", 0.0))) is None
    assert found(kept.answer(looking("run 3", "facts", 0.0))) is not None


@pytest.mark.parametrize(
    "line",
    [
        b"", b"hetero-islands ", b"hetero-islands 3\n", b"hetero-islands []\n",
        b'hetero-islands {"note": 3}\n', b'hetero-islands {"note": {"run": "x"}}\n',
        b'hetero-islands {"run": "x"}\n', b"hetero-islands " + b"[" * 8000, b"\xff\n",
        b'hetero-islands {"run": "x", "facts": "y", "since_s": "soon"}\n',
        b'hetero-islands {"run": "x", "facts": "y", "since_s": 1' + b"0" * 400 + b"}\n",
        b'hetero-islands {"note": {"run": "x", "facts": "y", "step": Infinity, "islands": []}}\n',
    ],
)  # fmt: skip
def test_what_is_no_question_has_no_answer(line: bytes) -> None:
    assert Notes().answer(line) == b""


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"3\n", b"{}\n", b'{"finished": 3}\n']
)
def test_a_lighthouse_that_keeps_no_notes_knows_nothing(answer: bytes) -> None:
    assert found(answer) is None


def test_the_clock_can_be_asked_for() -> None:
    before = time.time()
    said = notes.clock(Notes().answer(notes.CLOCK))
    assert said is not None
    assert before <= said <= time.time()
    assert notes.clock(b"") is notes.clock(b"3") is notes.clock(b'{"clock": "late"}') is None
