"""A step's outcome: it changes the weights, or is skipped for a reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

from hetero_framework.errors import ProtocolError
from hetero_framework.log import one_line

SkipKind = Literal["non-finite", "overflow", "rule"]
_KINDS = get_args(SkipKind)
_MOST_WORDS = 1000  # bytes of a reason


@dataclass(frozen=True)
class StepOutcome:
    """Whether a step changes the weights. `skip` is None, or the kind of reason to skip the step:
    a non-finite loss or gradient, an overflow that the loss scale alone caused, or a rule
    (`skipped_step.RULES`). `reason` says it in words."""

    skip: SkipKind | None = None
    reason: str = ""

    @property
    def commits(self) -> bool:
        """Whether the step changes the weights."""
        return self.skip is None

    @classmethod
    def gravest(cls, outcomes: Iterable[StepOutcome]) -> StepOutcome:
        """The outcome of a step of several replicas: the first skip of the gravest kind."""
        skips = [outcome for outcome in outcomes if not outcome.commits]
        return min(skips, key=lambda outcome: _KINDS.index(outcome.skip), default=cls())

    def as_info(self) -> list[Any]:
        """JSON data for `of`, in another replica."""
        return list(astuple(self))

    @classmethod
    def of(cls, info: Any, sender: str) -> StepOutcome:
        """The outcome that `sender` sent. Raises ProtocolError."""
        match info:
            case [None, ""]:
                return cls()
            case ["non-finite" | "overflow" | "rule" as skip, str(reason)]:
                return cls(skip, one_line(reason, _MOST_WORDS))
        raise ProtocolError(f"{sender} sends no outcome of a step: {info!r:.200}")
