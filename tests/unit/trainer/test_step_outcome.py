"""The outcome of a step, and that of several replicas."""

from __future__ import annotations

import pytest

from hetero_framework.errors import ProtocolError
from hetero_framework.trainer.step_outcome import StepOutcome

RULE, OTHER = StepOutcome("rule", "small"), StepOutcome("rule", "odd")
OVERFLOW, BROKEN = StepOutcome("overflow"), StepOutcome("non-finite")


@pytest.mark.parametrize(
    ("outcomes", "of_all"),
    [
        ([StepOutcome(), StepOutcome()], StepOutcome()),
        ([StepOutcome(), OTHER, RULE], OTHER),
        ([RULE, OVERFLOW], OVERFLOW),
        ([OVERFLOW, StepOutcome(), BROKEN, RULE], BROKEN),
    ],
)
def test_the_gravest_outcome_is_that_of_all(outcomes, of_all):
    assert StepOutcome.gravest(outcomes) == of_all
    assert of_all.commits == (of_all.skip is None)


@pytest.mark.parametrize("outcome", [StepOutcome(), RULE, OVERFLOW, BROKEN])
def test_an_outcome_travels(outcome):
    assert StepOutcome.of(outcome.as_info(), "island a") == outcome


def test_a_reason_from_elsewhere_is_one_line_of_limited_length():
    assert StepOutcome.of(["rule", "a\nb\x1b[2J"], "island a").reason.isprintable()
    assert len(StepOutcome.of(["rule", "x" * 10**6], "island a").reason) <= 1000


@pytest.mark.parametrize("info", [None, True, [], [None], [None, "x"], ["no", ""], ["rule", 3]])
def test_what_is_no_outcome_names_its_sender(info):
    with pytest.raises(ProtocolError, match=r"^island a sends no outcome"):
        StepOutcome.of(info, "island a")
