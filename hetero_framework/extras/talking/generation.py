"""Continuing prompts by the stages of a cluster: samples of a run, and `hetero chat`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core.messages import Decoding
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.errors import HeteroError, PeerLostError, StoppedEarly
from hetero_framework.extras.talking.continuation import admit_decoding
from hetero_framework.extras.talking.prompts import Prompt, PromptReader, check_prompts, is_chat
from hetero_framework.extras.talking.settings import SampleSettings
from hetero_framework.extras.talking.text_generation import TextGeneration
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.trainer.setup import Sample
from hetero_framework.units import plural

_log = logging.getLogger(__name__)
PROMPTS = "training.sample_prompts"
TakeToken = Callable[[int, int], None]


@dataclass(frozen=True)
class Choice:
    """The most tokens that follow a prompt, and how each is chosen: the likeliest token
    (`temperature` 0), or a draw from the likeliest tokens, which have the probability `top_p`."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @classmethod
    def of_samples(cls, training: SampleSettings) -> Choice:
        most, seed = training.sample_max_new_tokens, training.seed
        return cls(most, training.sample_temperature, training.sample_top_p, seed)


class Generator:
    """Continues prompts."""

    def __init__(
        self,
        config: Config,
        model_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        generation: GenerationConfig | None,
        most_tokens: int | None = None,
    ) -> None:
        """A text has at most `most_tokens`. Raises ArchitectureError if the model cannot."""
        self._config, self._model_config, self._tokenizer = config, model_config, tokenizer
        limits = [most_tokens, max_positions(model_config)]
        self.max_positions = min((limit for limit in limits if limit is not None), default=None)
        self.own_choice = Choice()
        if generation is not None and generation.do_sample:
            temperature = generation.temperature
            self.own_choice = Choice(
                temperature=1.0 if temperature is None else temperature,
                top_p=generation.top_p or 1.0,
            )
        told = generation.eos_token_id if generation is not None else None
        told = model_config.get_text_config().eos_token_id if told is None else told
        ends = told if isinstance(told, list) else [told]
        self._stop = {end for end in [*ends, tokenizer.eos_token_id] if end is not None}
        self.how = admit_decoding(model_config, _ranges(config))

    def run(
        self,
        cluster: Cluster,
        prompts: Sequence[Prompt],
        choice: Choice,
        *,
        step: int = 0,
        take_token: TakeToken = lambda prompt, token: None,
        restore: Callable[[], None] | None = None,
    ) -> list[Sample]:
        """The sample of each prompt, between two steps. `take_token` is called once for each token,
        with the number of its prompt. `restore` restores the state of stages that are loaded again
        after a worker was lost; without it such a loss is raised."""
        told = [0] * len(prompts)
        num_stages = len(self._config.shard_plan)

        def generate() -> TextGeneration:
            seen = [0] * len(prompts)

            def take(prompt: int, token: int) -> None:
                seen[prompt] += 1
                if seen[prompt] > told[prompt]:  # not when it is done again after a loss
                    told[prompt] = seen[prompt]
                    take_token(prompt, token)

            texts = TextGeneration(
                [prompt.ids for prompt in prompts],
                max_new_tokens=choice.max_new_tokens,
                max_positions=self.max_positions,
                stop=self._stop,
                vocabulary=int(self._model_config.get_text_config().vocab_size),
                at_once=2 * num_stages,
                cached=self.how.cached,
                take_token=take,
            )
            decoding = Decoding(choice.temperature, choice.top_p, choice.seed, self.how.cached)
            cluster.loaded.begin(
                StepInfo(step, 0, False, texts.micro_batches, 1, decoding=decoding)
            )
            cluster.pipeline.decode(texts)
            return texts

        found = self._outliving(cluster, lambda: cluster.retrying(generate), restore).texts
        cluster.retrying(cluster.pipeline.abort)  # frees the stages' caches
        return [
            Sample(
                prompt.text, str(self._tokenizer.decode(ids, skip_special_tokens=True)), len(ids)
            )
            for prompt, ids in zip(prompts, found, strict=True)
        ]

    @staticmethod
    def _outliving(
        cluster: Cluster,
        generate: Callable[[], TextGeneration],
        restore: Callable[[], None] | None,
    ) -> TextGeneration:
        if restore is None:
            return generate()
        is_first = True

        def attempt() -> TextGeneration:
            nonlocal is_first
            if not is_first:
                restore()
            is_first = False
            return generate()

        return cluster.recovery.outlive(attempt)


class Sampler:
    """Samples of a run's sample_prompts. Raises DataError and ArchitectureError before the run."""

    def __init__(
        self,
        config: Config,
        model_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        generation: GenerationConfig | None,
    ) -> None:
        self._about = model_config, tokenizer, generation
        training = SampleSettings.of(config.training)
        assert training.sample_prompts is not None
        self._choice = Choice.of_samples(training)
        reader = PromptReader(tokenizer, config.data, chat=is_chat(config, tokenizer))
        self._prompts = reader.read(training.sample_prompts, config.base_dir, PROMPTS)
        generator = self._generator(config)
        check_prompts(self._prompts, generator.max_positions, PROMPTS)
        every = f"every {training.sample_steps:g} steps"
        self.line = f"{plural(len(self._prompts), 'prompt')} continued {every}"
        if not generator.how.cached:
            self.line += f"; each token computes the whole text again: {generator.how.reason}"
        self._is_over = False

    @property
    def longest(self) -> int:
        """The number of tokens of the longest text."""
        return max(len(prompt.ids) for prompt in self._prompts) + self._choice.max_new_tokens

    def _generator(self, config: Config) -> Generator:
        return Generator(config, *self._about)

    def run(self, cluster: Cluster, config: Config, step: int) -> list[Sample]:
        """Samples after `step`, under the plan of `config`. A failure is logged and ends sampling,
        so that samples never cost the run."""
        if self._is_over:
            return []
        try:
            return self._generator(config).run(cluster, self._prompts, self._choice, step=step)
        except (PeerLostError, StoppedEarly):  # the run itself meets these
            raise
        except HeteroError as error:
            self._is_over = True
            cluster.retrying(cluster.pipeline.abort)
            _log.warning("no samples any more, and the run goes on: %s", error.message)
            return []


def max_positions(model_config: PretrainedConfig) -> int | None:
    """The length of the longest text that the model was made for, in tokens, if it states it."""
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _ranges(config: Config) -> tuple[ShardRange, ...]:
    return tuple(map(ShardRange.of, config.plan.stages))
