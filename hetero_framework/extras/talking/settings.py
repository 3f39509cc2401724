"""Training settings of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from hetero_framework.config import TrainingConfig
from hetero_framework.config.objectives import needs_if_known
from hetero_framework.config.problems import Problem, shown
from hetero_framework.config.section import FREE, ReadIf, Steps, Tokens

_SAMPLES = ReadIf("sample_prompts")
_DRAWS = ReadIf("sample_prompts and sample_temperature")


class SampleSettings(TrainingConfig):
    """The training section with the settings of samples."""

    sample_prompts: Annotated[str | tuple[str | tuple[dict[str, Any], ...], ...] | None, FREE] = (
        None
    )
    """Prompts that the model continues while it trains: a file of them (.txt, .json, .jsonl,
    .parquet), or a list of texts and of lists of messages. Where the data are conversations, a text
    is what a user says. Records of a file may have pictures, as the data do."""
    sample_steps: Annotated[Steps, FREE, _SAMPLES] = 100
    """Steps from one sampling to the next; the last step is sampled too."""
    sample_max_new_tokens: Annotated[Tokens, FREE, _SAMPLES] = 64
    """The most tokens of a sample."""
    sample_temperature: Annotated[float, FREE, _SAMPLES] = Field(default=0.0, ge=0)
    """0: always the likeliest token. Above 0 tokens are drawn, more freely at higher values."""
    sample_top_p: Annotated[float, FREE, _DRAWS] = Field(default=1.0, gt=0, le=1)
    """Draw from the likeliest tokens that have this probability together."""

    @field_validator("sample_prompts", mode="before")
    @classmethod
    def _holds_prompts(cls, value: Any) -> Any:
        if value in ("", [], ()) or (isinstance(value, (list, tuple)) and "" in value):
            raise ValueError("holds no prompt; give a file, or a list of texts or messages")
        if not isinstance(value, (list, tuple)):
            return value
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def disagreements(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Contradictions to other sections."""
    training = parts.get("training")
    if training is None or needs_if_known(training.objective).task == "causal-lm":
        return
    if SampleSettings.of(training).sample_prompts:
        objective = shown(training.objective)
        text = f"is for models that generate text, and training.objective is {objective}"
        yield Problem("training.sample_prompts", f"{text}; leave it out")
