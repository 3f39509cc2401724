"""Metrics of a micro-batch beside its loss, from the logits that the loss is computed from.

Shapes: B rows, S tokens, V vocabulary. Numbers are those of TRL's SFTTrainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetero_framework.config import TOKEN_METRICS
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.errors import ArchitectureError, ProtocolError

SUMS = "token_sums"
_LOGITS = 1 << 24  # read at once, in float32: less memory than the loss's backward needs


class TokenSums:
    """Sums over label tokens, in one tensor [3]: the entropy of the model's predictions, the number
    of tokens whose label is the likeliest token, and the number of tokens."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    @torch.no_grad()
    def look(self, logits_BSV: Tensor, labels_BS: Tensor) -> None:
        """Add a part of a micro-batch; each row predicts its labels but the first. Raises
        ArchitectureError where logits are not one row for each label."""
        if logits_BSV.shape[:-1] != labels_BS.shape:
            raise ArchitectureError(
                f"the model makes logits of {list(logits_BSV.shape)} for labels of"
                f" {list(labels_BS.shape)}: there is no prediction for each token to be measured",
                hint="set training.token_metrics to false",
            )
        next_BS = torch.nn.functional.pad(labels_BS[..., 1:], (0, 1), value=IGNORE_INDEX)
        at_once = max(1, _LOGITS // logits_BSV.shape[-1])
        parts = logits_BSV.flatten(0, -2).split(at_once)
        for logits_TV, label_T in zip(parts, next_BS.flatten().split(at_once), strict=True):
            share_TV = logits_TV.float().softmax(-1)
            is_label_T = label_T != IGNORE_INDEX
            # xlogy: a token that the model rules out adds nothing, where 0 * log(0) is NaN.
            entropy_T = -torch.xlogy(share_TV, share_TV).sum(-1)
            found = entropy_T.where(is_label_T, 0), logits_TV.argmax(-1) == label_T, is_label_T
            sums = torch.stack([values_T.sum(dtype=torch.float32) for values_T in found])
            self.total = sums if self.total is None else self.total + sums


def token_metrics(named: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """TOKEN_METRICS as means over micro-batches, from the tensors that the last stage gave for
    each. Raises ProtocolError where the sums are missing."""
    sums = [tensors[SUMS] for tensors in named if SUMS in tensors]
    if len(sums) != len(named) or any(s.shape != (3,) or s.dtype != torch.float32 for s in sums):
        raise ProtocolError("the last stage gave no sums for training.token_metrics")
    if not sums:
        return {}
    found = torch.stack(sums).double().cpu()
    means = found[:, :2] / found[:, 2:].clamp(min=1)
    return dict(zip(TOKEN_METRICS, means.mean(0).tolist(), strict=True))
