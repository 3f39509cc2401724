"""The global gradient norm and the clipping factor, from what all stages report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_framework.engine.stage_api import GradientReport
from hetero_framework.errors import ProtocolError


class ModelOrder:
    """Puts the stages' per-parameter norms into the order of the whole model, so that their
    floating-point sum does not depend on the cut. `trainable[k]` has (name, rank in the model) of
    stage k's parameters."""

    def __init__(self, trainable: Sequence[Sequence[tuple[str, tuple[int, ...]]]]) -> None:
        self._counts = [len(stage) for stage in trainable]
        ranks = [rank for stage in trainable for _, rank in stage]
        # Stable: equal ranks are parameters of one module and keep their stage's order.
        order = sorted(range(len(ranks)), key=lambda i: ranks[i])
        self._order = torch.tensor(order, dtype=torch.int64)

    def global_norm(self, reports: Sequence[GradientReport]) -> torch.Tensor:
        """The 2-norm of all gradients, as torch.nn.utils.clip_grad_norm_ computes it (float32).
        Raises ProtocolError if a stage reports a wrong number of norms, or not in float32."""
        for stage, (report, count) in enumerate(zip(reports, self._counts, strict=True)):
            if tuple(report.norms.shape) != (count,) or report.norms.dtype != torch.float32:
                raise ProtocolError(
                    f"stage {stage} reports norms of shape {tuple(report.norms.shape)}, "
                    f"{report.norms.dtype}; it has {count} parameters"
                )
        norms = torch.cat([report.norms.cpu() for report in reports])
        norm: torch.Tensor = torch.linalg.vector_norm(norms[self._order])
        return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> float:
    """The factor for every gradient, as torch.nn.utils.clip_grad_norm_ has it: at most 1.
    `max_norm` 0 means no clipping."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0)) if max_norm else 1.0
