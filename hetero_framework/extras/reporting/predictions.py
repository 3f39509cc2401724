"""Predictions of an evaluation, made from the logits where they are: on the last stage.

Shapes: B rows, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetero_framework import control
from hetero_framework.errors import CallbackError, ProtocolError
from hetero_framework.log import one_line
from hetero_framework.trainer.python_data import PREPROCESS

# Names of tensors beside a loss.
_ARGMAX, _LOGITS, _MADE, _FAILED = "argmax", "logits", "predictions", "failed"
PLAIN = {_ARGMAX, _LOGITS}
"""Names of predictions that no function of the user has made."""
_MOST_BYTES = 64 << 20  # of a micro-batch; fits into a message of any run


class MadePredictions:
    """The predictions of one micro-batch. They are the likeliest next tokens, or the result of the
    user's `preprocess(logits, labels)` with logits [B, S, V] in float32 and labels [B, S]."""

    def __init__(self) -> None:
        self._preprocess = control.function(PREPROCESS)
        self._seen: list[Tensor] = []

    @property
    def wants_all(self) -> bool:
        """Whether the logits have to exist at once, and not in the loss's chunks."""
        return self._preprocess is not None

    def look(self, logits_BSV: Tensor, labels_BS: Tensor) -> None:
        """Take logits, in the order of the chunks."""
        seen = logits_BSV.detach()
        self._seen.append(seen if self.wants_all else seen.argmax(-1).to(torch.int32))

    @torch.no_grad()
    def named(
        self, labels_BS: Tensor, chunks: Sequence[tuple[slice, slice]] = ()
    ) -> dict[str, Tensor]:
        """The tensors that `predictions` reads, after `look` has taken all logits; `chunks` are the
        logits' places. A failure of the user's function is one of them; `predictions` raises it."""
        if self._preprocess is None:
            tokens_BS = torch.empty_like(labels_BS, dtype=torch.int32)
            places: list[Any] = [*chunks] or [...]
            for place, part in zip(places, self._seen, strict=True):
                tokens_BS[place] = part
            return {_ARGMAX: tokens_BS}
        try:
            made = self._preprocess(self._seen[0].float(), labels_BS)
            return _checked(made, labels_BS.device)
        except Exception as error:  # of any kind; its text names the user's code
            text = control.failure(error)[:1000].encode()
            failed = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            return {_FAILED: failed.to(labels_BS.device)}

    def of_labels(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """As `named`, for a classifier: its logits, or what the user's function makes of them."""
        if self._preprocess is None:
            return {_LOGITS: logits.detach().float()}
        self._seen = [logits.detach()]
        return self.named(labels)


def _checked(made: Any, device: torch.device) -> dict[str, Tensor]:
    """The tensors that were made, by name. Raises TypeError, ValueError if they cannot be sent."""
    parts = [made] if isinstance(made, Tensor) else made
    if not isinstance(parts, (tuple, list)) or not all(isinstance(p, Tensor) for p in parts):
        raise TypeError(f"it gave a {type(made).__name__}, not a tensor or a tuple of tensors")
    if (size := sum(part.nbytes for part in parts)) > _MOST_BYTES:
        raise ValueError(
            f"it gave {size >> 20} MiB for a micro-batch of an evaluation, and at most"
            f" {_MOST_BYTES >> 20} MiB leave a stage; give less, as logits.argmax(-1) is, or lower"
            " training.per_device_eval_batch_size"
        )
    if isinstance(made, Tensor):
        return {_MADE: made.to(device)}
    return {f"{_MADE}.{number}": part.to(device) for number, part in enumerate(parts)}


def predictions(named: Mapping[str, Tensor], *, preprocesses: bool) -> Tensor | tuple[Tensor, ...]:
    """The predictions among the tensors that came with a loss, on the CPU.

    Args:
        preprocesses: Whether this process has the user's function that makes predictions.

    Raises CallbackError if the function failed, or if the last stage's process lacks it, and
    ProtocolError if there are no predictions.
    """
    if _FAILED in named:
        text = bytes(named[_FAILED].cpu().view(torch.uint8).flatten().tolist())
        shown = one_line(text.decode("utf-8", "replace"), 1000)
        raise CallbackError(f"{PREPROCESS} failed on the last stage: {shown}")
    plain = named.get(_ARGMAX, named.get(_LOGITS))
    if plain is not None and not preprocesses:
        return plain.cpu().long() if _ARGMAX in named else plain.cpu()
    if plain is not None:
        raise CallbackError(
            f"there is a {PREPROCESS} here, but the process of the last stage has none",
            hint=f"start that worker with --import FILE too, a Python file with {PREPROCESS}",
        )
    if _MADE in named:
        return named[_MADE].cpu()
    parts = [tensor.cpu() for name, tensor in named.items() if name.startswith(f"{_MADE}.")]
    if not parts:
        raise ProtocolError("the last stage gave no predictions")
    return tuple(parts)
