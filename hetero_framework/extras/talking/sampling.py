"""Requests for samples and their results. Pure data: no torch, no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero_framework.errors import DataError

MOST_SAMPLES = 4096
"""Of one prompt, in one request."""


@dataclass(frozen=True)
class SampleRequest:
    """One prompt, and how its samples are drawn.

    The result depends on the request alone: on the CPU in float32 it has the same bits however the
    model is cut, and whichever other requests run beside it.

    Args:
        prompt: Token ids, at least one.
        num_samples: Texts that continue the prompt; sample k of any number draws the same numbers.
        max_tokens: The most new tokens of a text.
        temperature: 0 takes the likeliest token.
        top_k: Draw from this many of the likeliest tokens; 0 or -1: from all.
        top_p: Draw from the likeliest tokens that have this probability together.
        seed: Of the draws, with the prompt, the number of the sample and the position.
        stop: Token ids and strings that end a text, beside the model's own end tokens.
        prompt_logprobs: Whether the log-probabilities of the prompt's tokens are wanted.
    """

    prompt: tuple[int, ...]
    num_samples: int = 1
    max_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int | str, ...] = ()
    prompt_logprobs: bool = False

    def check(self, vocabulary: int, max_positions: int | None) -> None:
        """Raise DataError for a request that the model cannot serve."""
        most = max_positions or len(self.prompt) + 1
        bounds = {
            "prompt": (len(self.prompt), 1, most - 1),
            "token of the prompt": (max(self.prompt, default=0), 0, vocabulary - 1),
            "token of the prompt, the least": (min(self.prompt, default=0), 0, vocabulary - 1),
            "num_samples": (self.num_samples, 1, MOST_SAMPLES),
            "max_tokens": (self.max_tokens, 1, 1 << 20),
            "temperature": (self.temperature, 0, 1e9),
            "top_k": (self.top_k, -1, 1 << 31),
            "top_p": (self.top_p, 1e-9, 1),
        }
        for name, (value, least, limit) in bounds.items():
            if not least <= value <= limit:
                unit = " tokens" if name == "prompt" else ""
                raise DataError(f"{name}: {value:g}{unit} is not from {least:g} to {limit:g}")
        if "" in self.stop:
            raise DataError("stop: an empty text would end each sample at once")


@dataclass(frozen=True)
class SampledText:
    """One sample. `tokens` include what stopped it. `logprobs` are the model's own natural
    log-probabilities of these tokens: at temperature 1, of the whole vocabulary."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class SampleResult:
    """The samples of one request, in order. `prompt_logprobs` has an entry for each token of the
    prompt; that of the first is None, as nothing comes before it."""

    samples: tuple[SampledText, ...]
    prompt_logprobs: tuple[float | None, ...] | None = None
