"""An objective of answers: a pair's chosen answer becomes likelier than its rejected answer.

Only sums over the tokens of each row are kept. They are made in loss chunks that are computed
twice, so that the last stage needs only the memory of next-token training.

Shapes: P pairs, B = 2 P rows, chosen rows first; S tokens, V vocabulary; C sums of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import PretrainedConfig

from hetero_framework.config import TrainingConfig
from hetero_framework.config.objectives import rows_of
from hetero_framework.data.batches import MicroBatch
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.errors import ArchitectureError, ProtocolError
from hetero_framework.extras.preferences.settings import PreferenceSettings
from hetero_framework.models.cut.chunked_loss import Span, chunk_tokens, spans, sum_of_chunks
from hetero_framework.models.cut.objective import ChunkedObjective
from hetero_framework.models.cut.shard import Inputs, Shard
from hetero_framework.models.cut.side import Bundle

MEANS, LOGPS = "pair_means", "logps"
METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)
"""Metrics of all pairs; an objective may have further metrics."""
LOGITS = ("logits/chosen", "logits/rejected")


class PairObjective(ChunkedObjective):
    """Learns from batches with two rows for each pair. Labels are the answers' tokens."""

    def __init__(
        self, training: TrainingConfig, id_layers: frozenset[int] = frozenset(), *further: str
    ) -> None:
        """`further` names the metrics that follow METRICS."""
        super().__init__(training.loss_chunk_tokens, id_layers)
        own = PreferenceSettings.of(training)
        self._training, self._beta = own, own.beta
        self._each = rows_of(training.data_kind)
        # The other rows of a "mismatched" micro-batch would be in the routers' reports, too.
        self.adds_routing = not own.has_mismatches
        self.metric_names = (*METRICS, *further, *LOGITS)
        self._measures = False

    @property
    def shown(self) -> tuple[str, ...]:
        """The metrics to show first: the share of pairs in the right order, margins, rewards."""
        first = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
        return tuple(name for name in first if name in self.metric_names)

    def item_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts micro-batches: the loss of each is the mean of its examples, as in TRL."""
        return len

    def prediction_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts examples, such as pairs."""
        return lambda batches: sum(len(batch["labels"]) // self._each for batch in batches)

    def targets(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The tensors [B, S] that say which log-probabilities of a row are added up."""
        return (inputs["labels"],)

    def seen(self, inputs: Inputs) -> Tensor:
        """The tokens [B, S] whose logits are in the metrics: the tokens that predict labels."""
        return pad(inputs["labels"][:, 1:].ne(IGNORE_INDEX), (0, 1))

    @abstractmethod
    def sums(self, logits_BSV: Tensor, *targets_BS: Tensor) -> list[Tensor]:
        """C sums over each row, each [B], from the logits and the targets of the next tokens."""

    @abstractmethod
    def mean_loss(self, inputs: Inputs, sums_BC: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the examples, and the detached tensors that come with it: `means`."""

    def loss(
        self,
        shard: Shard,
        inputs: Inputs,
        received: Bundle,
        num_items: Tensor,
        *,
        running: Callable[[], AbstractContextManager[None]],
        backward: Callable[[Tensor], None] | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        targets, seen_BS, trains = self.targets(inputs), self.seen(inputs), backward is not None
        chunks = spans(targets[0].shape, chunk_tokens(self._loss_chunk_tokens, shard.config))
        if not chunks:
            with running():
                logits_BSV, routing = shard.logits_and_routing(inputs, received)
                sums_BC = self._sums(logits_BSV, targets, seen_BS)
            loss, named = self._value(inputs, sums_BC, num_items, trains=trains, routing=routing)
            if backward is not None:
                backward(loss)
            return loss.detach(), named
        with running():
            (top_BSD,) = shard.forward(inputs, received)

        def sums(number: int, span: Span, hidden_BSD: Tensor, *, looks: bool = False) -> Tensor:
            cut = tuple(target[span] for target in targets)
            logits_BSV = shard.chunk_logits({"labels": cut[0]}, hidden_BSD, number)
            look_BS = seen_BS[span].clone() if looks else None
            if look_BS is not None and span[1].stop < seen_BS.shape[1]:
                look_BS[:, -1] = False  # the next chunk begins with it
            return self._sums(logits_BSV, cut, look_BS)

        rows: dict[int, Tensor] = {}
        for number, span in enumerate(chunks):
            with running(), torch.no_grad():
                found = sums(number, span, top_BSD[span].contiguous(), looks=True)
            first = span[0].start
            rows[first] = rows[first] + found if first in rows else found
        sums_BC = torch.cat(list(rows.values())).requires_grad_(trains)
        loss, named = self._value(inputs, sums_BC, num_items, trains=trains)
        if backward is not None:
            # First the loss's gradient for each sum, then each loss chunk again with gradients.
            backward(loss)
            worth_BC = sums_BC.grad

            def part(number: int, span: Span, hidden_BSD: Tensor) -> Tensor:
                assert worth_BC is not None
                with running():
                    found = sums(number, span, hidden_BSD)
                    return (found * worth_BC[span[0], : found.shape[1]]).sum()

            sum_of_chunks(shard, top_BSD, chunks, part, torch.Tensor.backward)
        return loss.detach(), named

    def _value(
        self,
        inputs: Inputs,
        sums_BC: Tensor,
        num_items: Tensor,
        *,
        trains: bool,
        routing: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, from the sums of its rows and the routers' losses, and the
        named tensors that come with it."""
        columns = 3 if self._measures else 1
        loss, named = self.mean_loss(inputs, sums_BC[:, :-columns])
        if routing is not None:
            loss = loss + routing
        if MEANS in named:
            looks = self.looks(inputs, sums_BC[:, -columns:].detach(), self.seen(inputs).sum(1))
            named[MEANS] = torch.cat([named[MEANS], torch.stack(looks)])
        return (loss if trains else loss * (len(sums_BC) // self._each)) / num_items, named

    def looks(self, inputs: Inputs, sums_BC: Tensor, counts_B: Tensor) -> list[Tensor]:
        """LOGITS and TOKEN_METRICS, from each row's sums over `seen` tokens and their counts."""
        found_B, counts = sums_BC[:, 0].chunk(2), counts_B.chunk(2)
        means = [
            share_P.sum() / count_P.sum() for share_P, count_P in zip(found_B, counts, strict=True)
        ]
        if self._measures:
            means += [sums_BC[:, 1].sum() / counts_B.sum()]
            means += [sums_BC[:, 2].chunk(2)[0].sum() / counts[0].sum()]
        return means

    def means(self, logps_B: Tensor, rewards_B: Tensor, *further: Tensor) -> dict[str, Tensor]:
        """The means that `metrics` reads: METRICS as means over pairs, then `further`."""
        chosen_P, rejected_P = (self._beta * rewards_B).chunk(2)
        likely = [half_P.mean() for half_P in logps_B.chunk(2)]
        better = (chosen_P > rejected_P).float().mean()
        margin = (chosen_P - rejected_P).mean()
        found = [chosen_P.mean(), rejected_P.mean(), better, margin, *likely, *further]
        return {MEANS: torch.stack(found).detach()}

    def metrics(self, named: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        if not named:
            return {}
        return dict(zip(self.metric_names, self.table(named).mean(0).tolist(), strict=True))

    def table(self, named: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The means of each micro-batch, [micro-batches, metric_names]."""
        return means_table(named, len(self.metric_names))

    def _sums(
        self, logits_BSV: Tensor, targets: tuple[Tensor, ...], seen_BS: Tensor | None
    ) -> Tensor:
        """`sums`, followed by the sums over the seen tokens."""
        if logits_BSV.shape[:-1] != targets[0].shape:
            raise ArchitectureError(
                f"the model makes logits of {list(logits_BSV.shape)} for labels of"
                f" {list(targets[0].shape)}: its answers have no probabilities",
                hint='set training.objective to "sft"',
            )
        # Targets are moved instead of logits, whose slice would cost their backward a copy.
        moved = [pad(target[:, 1:], (0, 1), value=IGNORE_INDEX) for target in targets]
        logits_BSV = logits_BSV.float()
        found = self.sums(logits_BSV, *moved)
        if seen_BS is not None:
            with torch.no_grad():
                looks_BS = [logits_BSV.mean(-1)]
                if self._measures:
                    share_BSV = logits_BSV.softmax(-1)
                    looks_BS.append(-torch.xlogy(share_BSV, share_BSV).sum(-1))
                    looks_BS.append(logits_BSV.argmax(-1).eq(moved[0]).float())
                found += [look_BS.where(seen_BS, 0.0).sum(1) for look_BS in looks_BS]
        return torch.stack(found, 1)


def means_table(named: Sequence[Mapping[str, Tensor]], count: int) -> Tensor:
    """The `count` means of each micro-batch, [micro-batches, count]. Raises ProtocolError."""
    found = [tensors[MEANS] for tensors in named if MEANS in tensors]
    if len(found) != len(named) or any(means.shape != (count,) for means in found):
        raise ProtocolError("the last stage gave no means of answers")
    return torch.stack([tensor.double().cpu() for tensor in found])


def log_probabilities(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The log-probability of each label, [B, S]; 0 where there is no label."""
    losses = cross_entropy(
        *(logits_BSV.flatten(0, 1), labels_BS.flatten()),
        reduction="none",
        ignore_index=IGNORE_INDEX,
    )
    return -losses.view(labels_BS.shape)


def lengths_of(labels_BS: Tensor) -> Tensor:
    """The number of labels in each row that are predicted."""
    return labels_BS[:, 1:].ne(IGNORE_INDEX).sum(1)
