"""Adds up the losses of the tokens of each source, on the last stage.

Shapes: B rows of a micro-batch, S tokens, V vocabulary, T tokens of one part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from hetero_framework.config import MOST_SOURCES
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.models.cut.chunked_loss import Span

SOURCES = "sources"
SUMS = "source_sums"
TOTAL = (2, MOST_SOURCES)
"""The shape of SUMS: losses and numbers of tokens by source."""
_LOGITS = 1 << 24  # in float32 at once


class SourceLosses:
    """Keeps the loss of each token of a micro-batch, and adds them up by source."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._fits = True

    @torch.no_grad()
    def look(self, logits_BSV: Tensor, labels_BS: Tensor) -> None:
        """Take a part of a micro-batch. A row predicts all its labels except the first."""
        if logits_BSV.shape[:-1] != labels_BS.shape:
            self._fits = False  # each token has several labels
            return
        next_BS = pad(labels_BS[..., 1:], (0, 1), value=IGNORE_INDEX)
        at_once = max(1, _LOGITS // logits_BSV.shape[-1])
        parts = logits_BSV.flatten(0, -2).split(at_once)
        losses = [
            cross_entropy(logits_TV.float(), label_T, reduction="none")
            for logits_TV, label_T in zip(parts, next_BS.flatten().split(at_once), strict=True)
        ]
        self._found.append(torch.cat(losses).view(next_BS.shape))

    def named(
        self, sources_BS: Tensor, labels_BS: Tensor, chunks: Sequence[Span] = ()
    ) -> dict[str, Tensor]:
        """SUMS, where there is a loss for each token; `chunks` are the places of the parts."""
        if not self._fits:
            return {}
        losses_BS = torch.zeros(labels_BS.shape, device=labels_BS.device)
        whole = slice(None), slice(None)
        for place, part in zip(chunks or [whole], self._found, strict=True):
            losses_BS[place] += part  # the last token of a chunk has its loss in the next one
        counted_BS = pad(labels_BS[..., 1:], (0, 1), value=IGNORE_INDEX) != IGNORE_INDEX
        source_BS = pad(sources_BS[..., 1:], (0, 1)).long()
        told = torch.stack([losses_BS.flatten(), counted_BS.float().flatten()])
        sums = told.new_zeros(TOTAL).index_add_(1, source_BS.flatten(), told)
        return {SUMS: sums}
