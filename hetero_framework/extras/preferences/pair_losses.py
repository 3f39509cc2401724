"""Losses of pairs, by their names in training.loss_type.

They equal the losses of TRL's DPOTrainer and CPOTrainer (1.16), which name their papers. A loss is
a function of `Pairs` and of the settings that its other parameters name. The module does not import
torch, since configurations are checked by its table.

Shapes: P pairs, B = 2 P rows, chosen rows first.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Pairs:
    """The log-ratio of each answer to the reference (for "cpo" its log-probability), and the
    log-probabilities and lengths of all rows."""

    chosen_P: Tensor
    rejected_P: Tensor
    logps_B: Tensor
    lengths_B: Tensor

    @cached_property
    def delta_P(self) -> Tensor:
        return self.chosen_P - self.rejected_P


@dataclass(frozen=True)
class PairLoss:
    """A loss of pairs. `function` returns each pair's loss, or the mean. With `averages` its ratios
    are means over tokens, not sums. `check` raises ValueError for settings that do not fit."""

    function: Callable[..., Any]
    averages: bool
    check: Callable[[Any], None]

    @cached_property
    def reads(self) -> list[str]:
        """The settings that the loss depends on."""
        return list(inspect.signature(self.function).parameters)[1:]

    def __call__(
        self, training: Any, ratios_B: Tensor, logps_B: Tensor, lengths_B: Tensor
    ) -> Tensor:
        """The loss with a run's settings; `ratios_B` has the ratios of `Pairs`."""
        if self.averages:
            ratios_B = ratios_B / lengths_B.clamp(min=1)
        chosen_P, rejected_P = ratios_B.chunk(2)
        settings = {name: getattr(training, name) for name in self.reads}
        loss: Tensor = self.function(Pairs(chosen_P, rejected_P, logps_B, lengths_B), **settings)
        return loss


PAIR_LOSSES: dict[str, dict[str, PairLoss]] = {"dpo": {}, "cpo": {}}
"""The losses by objective and name, the default first."""
PAIR_LOSSES["image-dpo"] = PAIR_LOSSES["dpo"]


def register_pair_loss(
    name: str,
    *objectives: str,
    averages: bool = False,
    check: Callable[[Any], None] = lambda training: None,
) -> Callable[[_F], _F]:
    """Decorator that makes a function the loss `name` of these objectives, by default of "dpo".
    For a file of --import, on every machine."""

    def register(function: _F) -> _F:
        for objective in objectives or ("dpo",):
            PAIR_LOSSES[objective][name] = PairLoss(function, averages, check)
        return function

    return register


def log_sigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


def chosen_loss(logps_B: Tensor, lengths_B: Tensor) -> Tensor:
    """The mean loss of the chosen rows' tokens."""
    return -logps_B.chunk(2)[0].sum() / lengths_B.chunk(2)[0].sum().clamp(min=1)


@register_pair_loss("sigmoid")
def _sigmoid(pairs: Pairs, beta: float) -> Tensor:
    return -log_sigmoid(beta * pairs.delta_P)


@register_pair_loss("sigmoid", "cpo")
def _smoothed_sigmoid(pairs: Pairs, beta: float, label_smoothing: float) -> Tensor:
    return _smoothed(beta * pairs.delta_P, label_smoothing)


@register_pair_loss("hinge", "dpo", "cpo")
def _hinge(pairs: Pairs, beta: float) -> Tensor:
    return (1 - beta * pairs.delta_P).relu()


@register_pair_loss("ipo", "dpo", "cpo", averages=True)
def _ipo(pairs: Pairs, beta: float) -> Tensor:
    return (pairs.delta_P - 1 / (2 * beta)) ** 2


@register_pair_loss("simpo", "cpo", averages=True)
def _simpo(pairs: Pairs, beta: float, label_smoothing: float, simpo_gamma: float) -> Tensor:
    return _smoothed(beta * pairs.delta_P - simpo_gamma, label_smoothing)


def _smoothed(scaled_P: Tensor, label_smoothing: float) -> Tensor:
    clean_P, flipped_P = log_sigmoid(scaled_P), log_sigmoid(-scaled_P)
    return -clean_P * (1 - label_smoothing) - flipped_P * label_smoothing


def _is_smoothed(training: Any) -> None:
    if not training.label_smoothing:
        raise ValueError("loss_type exo_pair needs a label_smoothing above 0, such as 1e-3")


@register_pair_loss("exo_pair", check=_is_smoothed)
def _exo_pair(pairs: Pairs, beta: float, label_smoothing: float) -> Tensor:
    p_P, q_P = (beta * pairs.delta_P).sigmoid(), (-beta * pairs.delta_P).sigmoid()
    return p_P * (log_sigmoid(beta * pairs.delta_P) - math.log1p(-label_smoothing)) + q_P * (
        log_sigmoid(-beta * pairs.delta_P) - math.log(label_smoothing)
    )


@register_pair_loss("nca_pair")
def _nca_pair(pairs: Pairs, beta: float) -> Tensor:
    both_P = log_sigmoid(-beta * pairs.chosen_P) + log_sigmoid(-beta * pairs.rejected_P)
    return -log_sigmoid(beta * pairs.chosen_P) - 0.5 * both_P


@register_pair_loss("robust")
def _robust(pairs: Pairs, beta: float, label_smoothing: float) -> Tensor:
    clean_P, flipped_P = log_sigmoid(beta * pairs.delta_P), log_sigmoid(-beta * pairs.delta_P)
    both_P = -(1 - label_smoothing) * clean_P + label_smoothing * flipped_P
    return both_P / (1 - 2 * label_smoothing)


@register_pair_loss("bco_pair")
def _bco_pair(pairs: Pairs, beta: float) -> Tensor:
    return -log_sigmoid(beta * pairs.chosen_P) - log_sigmoid(-beta * pairs.rejected_P)


@register_pair_loss("sppo_hard")
def _sppo_hard(pairs: Pairs, beta: float) -> Tensor:
    return (pairs.chosen_P - 0.5 / beta) ** 2 + (pairs.rejected_P + 0.5 / beta) ** 2


@register_pair_loss("apo_zero")
def _apo_zero(pairs: Pairs, beta: float) -> Tensor:
    return 1 - (beta * pairs.chosen_P).sigmoid() + (beta * pairs.rejected_P).sigmoid()


@register_pair_loss("apo_down")
def _apo_down(pairs: Pairs, beta: float) -> Tensor:
    return (beta * pairs.chosen_P).sigmoid() + 1 - (beta * pairs.delta_P).sigmoid()


@register_pair_loss("discopop")
def _discopop(pairs: Pairs, beta: float, discopop_tau: float) -> Tensor:
    share_P = (beta * pairs.delta_P / discopop_tau).sigmoid()
    fitted_P = -log_sigmoid(beta * pairs.delta_P) * (1 - share_P)
    return fitted_P + (-beta * pairs.delta_P).exp() * share_P


@register_pair_loss("sft")
def _sft(pairs: Pairs) -> Tensor:
    return chosen_loss(pairs.logps_B, pairs.lengths_B)


@register_pair_loss("sigmoid_norm", averages=True)
def _sigmoid_norm(pairs: Pairs, beta: float) -> Tensor:
    return -log_sigmoid(beta * pairs.delta_P)
