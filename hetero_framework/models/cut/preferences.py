"""Direct preference optimization: the chosen answer of a pair becomes likelier than the rejected.

Losses and metrics are those of TRL's DPOTrainer (1.16), which names their papers. Of the answers'
tokens only sums of log-probabilities are kept, made in loss chunks that are computed twice: the
last stage needs the memory of next-token training.

Shapes: P pairs, B = 2 P rows, first the chosen ones; S tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, pad
from transformers import PretrainedConfig

from hetero_framework.config import StageSpec, TrainingConfig
from hetero_framework.data.batches import MicroBatch
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.data.pairs import REFERENCE
from hetero_framework.errors import ArchitectureError, ProtocolError
from hetero_framework.models.cut.chunked_loss import Span, chunk_tokens, spans, sum_of_chunks
from hetero_framework.models.cut.objective import CausalLM
from hetero_framework.models.cut.shard import Inputs, Shard
from hetero_framework.models.cut.side import Bundle

LOGPS, MEANS = "logps", "pair_means"
METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)


class Preferences(CausalLM):
    """A batch has the two rows of each pair, whose labels are the answers' tokens, and of the
    reference the log-probability of each answer; without these the loss is none, and LOGPS come
    with it."""

    counts_tokens = False

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(training.loss_chunk_tokens, id_layers)
        weights = training.loss_weights or (1.0,) * len(training.losses)
        self._losses = list(zip(training.losses, weights, strict=True))
        if training.rpo_alpha:
            self._losses.append(("sft", training.rpo_alpha))
        self._beta, self._smoothing = training.beta, training.label_smoothing
        self._ld_alpha, self._weighs = training.ld_alpha, training.use_weighting
        self._tau = training.discopop_tau
        self.metric_names = METRICS

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        needed = super().stage_inputs(spec, names)
        return [name for name in needed if spec.is_last or name not in REFERENCE]

    def probe_inputs(self, inputs: Inputs) -> Inputs:
        zeros = inputs["labels"].new_zeros(len(inputs["labels"]) // 2, dtype=torch.float32)
        return {**inputs, **dict.fromkeys(REFERENCE, zeros)}

    def item_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Micro-batches, each the mean of its pairs, as TRL divides them."""
        return len

    def prediction_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Pairs."""
        return lambda batches: sum(len(batch["labels"]) // 2 for batch in batches)

    def loss(  # type: ignore[override]  # makes no predictions
        self,
        shard: Shard,
        inputs: Inputs,
        received: Bundle,
        num_items: Tensor,
        *,
        running: Callable[[], AbstractContextManager[None]],
        backward: Callable[[Tensor], None] | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        labels_BS, trains = inputs["labels"], backward is not None
        weights_BS = self._weights(labels_BS)
        chunks = spans(labels_BS.shape, chunk_tokens(self._loss_chunk_tokens, shard.config))
        if not chunks:
            with running():
                sums_B3 = self._sum(shard.logits(inputs, received), labels_BS, weights_BS)
            loss, named = self._value(inputs, sums_B3, num_items, trains=trains)
            if backward is not None:
                backward(loss)
            return loss.detach(), named
        with running():
            (top_BSD,) = shard.forward(inputs, received)

        def sums(number: int, span: Span, hidden_BSD: Tensor) -> Tensor:
            cut = {"labels": labels_BS[span]}
            logits_BSV = shard.chunk_logits(cut, hidden_BSD, number)
            return self._sum(logits_BSV, labels_BS[span], weights_BS[span])

        sums_B3 = top_BSD.new_zeros(len(labels_BS), 3, dtype=torch.float32)
        for number, span in enumerate(chunks):
            with running(), torch.no_grad():
                sums_B3[span[0]] += sums(number, span, top_BSD[span].contiguous())
        sums_B3.requires_grad_(trains)
        loss, named = self._value(inputs, sums_B3, num_items, trains=trains)
        if backward is not None:
            # What each sum is worth to the loss; then each loss chunk once more, with gradients.
            backward(loss)
            worth_B3 = sums_B3.grad

            def part(number: int, span: Span, hidden_BSD: Tensor) -> Tensor:
                assert worth_B3 is not None
                with running():
                    return (sums(number, span, hidden_BSD) * worth_B3[span[0]]).sum()

            sum_of_chunks(shard, top_BSD, chunks, part, torch.Tensor.backward)
        return loss.detach(), named

    def _value(
        self, inputs: Inputs, sums_B3: Tensor, num_items: Tensor, *, trains: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch from the sums of its rows, and what comes with it."""
        if REFERENCE[0] not in inputs:
            return sums_B3.new_zeros(()), {LOGPS: sums_B3[:, 0].detach()}
        logps_B, plain_B, aligned_B = sums_B3.unbind(1)
        lengths_B = inputs["labels"][:, 1:].ne(IGNORE_INDEX).sum(1)
        ratios_B = logps_B - torch.cat([inputs[name] for name in REFERENCE])
        loss = logps_B.new_zeros(())
        for name, weight in self._losses:
            if name == "sft":
                chosen_P, _ = plain_B.chunk(2)
                loss_P = -chosen_P.sum() / lengths_B.chunk(2)[0].sum().clamp(min=1)
            else:
                loss_P = self._loss_of(name, ratios_B, lengths_B)
            if self._weighs:
                one_P, other_P = (aligned_B / lengths_B.clamp(min=1)).exp().detach().chunk(2)
                loss_P = loss_P * one_P * other_P
            loss = loss + weight * loss_P.mean()
        loss = (loss if trains else loss * (len(logps_B) // 2)) / num_items
        return loss, {MEANS: self._means(logps_B.detach(), ratios_B.detach())}

    def _loss_of(self, name: str, ratios_B: Tensor, lengths_B: Tensor) -> Tensor:
        """The loss of each pair, from how much likelier its answers are than for the reference."""
        beta, epsilon = self._beta, self._smoothing
        chosen_P, rejected_P = ratios_B.chunk(2)
        delta_P = chosen_P - rejected_P
        if name in ("ipo", "sigmoid_norm"):
            one_P, other_P = (ratios_B / lengths_B.clamp(min=1)).chunk(2)
            if name == "ipo":
                return (one_P - other_P - 1 / (2 * beta)) ** 2
            return -logsigmoid(beta * (one_P - other_P))
        if name == "sigmoid":
            return -logsigmoid(beta * delta_P)
        if name == "hinge":
            return torch.relu(1 - beta * delta_P)
        if name == "exo_pair":
            p_P, q_P = torch.sigmoid(beta * delta_P), torch.sigmoid(-beta * delta_P)
            return p_P * (logsigmoid(beta * delta_P) - math.log1p(-epsilon)) + q_P * (
                logsigmoid(-beta * delta_P) - math.log(epsilon)
            )
        if name == "nca_pair":
            both = logsigmoid(-beta * chosen_P) + logsigmoid(-beta * rejected_P)
            return -logsigmoid(beta * chosen_P) - 0.5 * both
        if name == "robust":
            clean, flipped = logsigmoid(beta * delta_P), logsigmoid(-beta * delta_P)
            return (-(1 - epsilon) * clean + epsilon * flipped) / (1 - 2 * epsilon)
        if name == "bco_pair":
            return -logsigmoid(beta * chosen_P) - logsigmoid(-beta * rejected_P)
        if name == "sppo_hard":
            return (chosen_P - 0.5 / beta) ** 2 + (rejected_P + 0.5 / beta) ** 2
        if name == "apo_zero":
            return 1 - torch.sigmoid(beta * chosen_P) + torch.sigmoid(beta * rejected_P)
        if name == "apo_down":
            return torch.sigmoid(beta * chosen_P) + 1 - torch.sigmoid(beta * delta_P)
        assert name == "discopop"
        share_P = torch.sigmoid(beta * delta_P / self._tau)
        return -logsigmoid(beta * delta_P) * (1 - share_P) + torch.exp(-beta * delta_P) * share_P

    def _means(self, logps_B: Tensor, ratios_B: Tensor) -> Tensor:
        """METRICS, each the mean over pairs."""
        chosen_P, rejected_P = (self._beta * ratios_B).chunk(2)
        likely = [half_P.mean() for half_P in logps_B.chunk(2)]
        better = (chosen_P > rejected_P).float().mean()
        margin = (chosen_P - rejected_P).mean()
        return torch.stack([chosen_P.mean(), rejected_P.mean(), better, margin, *likely])

    def metrics(self, named: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        found = [tensors[MEANS] for tensors in named if MEANS in tensors]
        if len(found) != len(named) or any(means.shape != (len(METRICS),) for means in found):
            raise ProtocolError("the last stage gave no means of pairs")
        if not found:
            return {}
        means = torch.stack([tensor.double().cpu() for tensor in found]).mean(0)
        return dict(zip(METRICS, means.tolist(), strict=True))

    def _sum(self, logits_BSV: Tensor, labels_BS: Tensor, weights_BS: Tensor) -> Tensor:
        if logits_BSV.shape[:-1] != labels_BS.shape:
            raise ArchitectureError(
                f"the model makes logits of {list(logits_BSV.shape)} for labels of"
                f" {list(labels_BS.shape)}: its answers have no probabilities",
                hint='set training.objective to "sft"',
            )
        # Labels are moved, since a part of the logits would cost their backward a copy.
        logits_BSV, next_BS = logits_BSV.float(), _moved(labels_BS, IGNORE_INDEX)
        logps_BS = -cross_entropy(
            logits_BSV.flatten(0, 1), next_BS.flatten(), reduction="none", ignore_index=IGNORE_INDEX
        ).view(next_BS.shape)
        aligned_B = logps_BS.new_zeros(len(logps_BS))
        if self._weighs:
            with torch.no_grad():
                squares_BS = (2 * logits_BSV).logsumexp(-1) - 2 * logits_BSV.logsumexp(-1)
                aligned_B = ((logps_BS - squares_BS) * next_BS.ne(IGNORE_INDEX)).sum(1)
        plain_B = logps_BS.sum(1)
        weighted_B = plain_B
        if self._ld_alpha is not None:
            weighted_B = (logps_BS * _moved(weights_BS, 0)).sum(1)
        return torch.stack([weighted_B, plain_B, aligned_B], 1)

    def _weights(self, labels_BS: Tensor) -> Tensor:
        """Of each label: 1, or ld_alpha beyond the length of the pair's shorter answer."""
        if self._ld_alpha is None:
            return labels_BS
        is_label_BS = labels_BS.ne(IGNORE_INDEX)
        is_label_BS[:, 0] = False  # not predicted
        length_B = is_label_BS.sum(1)
        shared_P = torch.minimum(*length_B.chunk(2))
        is_shared_BS = is_label_BS.cumsum(1) <= torch.cat([shared_P, shared_P])[:, None]
        return torch.where(is_shared_BS, 1.0, self._ld_alpha)


def _moved(values_BS: Tensor, last: int) -> Tensor:
    """Of each token what belongs to the next one; `last` where there is none."""
    return pad(values_BS[:, 1:], (0, 1), value=last)
