"""Continuing prompts by the stages of a cluster: samples of a run, and `hetero chat`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core.messages import Decoding
from hetero_framework.engine.stage_api import StepInfo, Tensors
from hetero_framework.errors import (
    ArchitectureError,
    DataError,
    HeteroError,
    PeerLostError,
    StoppedEarly,
)
from hetero_framework.extras.talking.decoding import ShardCache
from hetero_framework.extras.talking.prompts import Prompt, PromptReader, check_prompts
from hetero_framework.extras.talking.sampling import SampleRequest, SampleResult
from hetero_framework.extras.talking.settings import SampleSettings
from hetero_framework.extras.talking.text_generation import MOST_ROWS, TextGeneration
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.cut.side import Bundle
from hetero_framework.models.cut.tiny import shrink
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.models.verify.equivalence import (
    TOLERANCE,
    build_both,
    deterministic,
    largest_difference,
    remembered,
)
from hetero_framework.trainer.metrics import StepLines
from hetero_framework.trainer.observers import Due, Observer, RunStart, Watched
from hetero_framework.trainer.setup import Sample
from hetero_framework.trainer.train_state import TrainState
from hetero_framework.units import plural

_log = logging.getLogger(__name__)
PROMPTS = "training.sample_prompts"
_PROMPT_TOKENS = 11  # longer than the sliding windows of tiny models (8)
_NEW_TOKENS = 7
_ROWS = 4
TakeToken = Callable[[int, int, int], None]
"""Called with the numbers of prompt and sample, and the next token."""


@dataclass(frozen=True)
class Continuing:
    """Whether a model decodes with a cache in each stage. `reason` says why not, `impossible` that
    it cannot decode without a cache either."""

    cached: bool
    reason: str = ""
    impossible: bool = False


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
        """A text has at most `most_tokens`. Raises ArchitectureError if the model cannot decode."""
        self._config, self._model_config, self._tokenizer = config, model_config, tokenizer
        limits = [most_tokens]
        positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:  # as long as the model was made for
            limits.append(positions)
        self.max_positions = min((limit for limit in limits if limit is not None), default=None)
        self.own_choice = SampleRequest((), temperature=0.0)
        if generation is not None and generation.do_sample:
            temperature = generation.temperature
            self.own_choice = SampleRequest(
                (),
                temperature=1.0 if temperature is None else temperature,
                top_p=generation.top_p or 1.0,
                top_k=generation.top_k or 0,
            )
        told = generation.eos_token_id if generation is not None else None
        told = model_config.get_text_config().eos_token_id if told is None else told
        ends = told if isinstance(told, list) else [told]
        self._stop = {end for end in [*ends, tokenizer.eos_token_id] if end is not None}
        ranges = tuple(map(ShardRange.of, config.plan.stages))
        self.how = admit_decoding(model_config, ranges)

    def run(
        self,
        cluster: Cluster,
        prompts: Sequence[Prompt],
        choice: SampleRequest,
        *,
        step: int = 0,
        take_token: TakeToken = lambda prompt, sample, token: None,
        restore: Callable[[], None] | None = None,
    ) -> list[Sample]:
        """The samples of each prompt, drawn as for `choice`; see `sample`. A string that ended a
        text is not in it."""
        requests = [replace(choice, prompt=prompt.ids) for prompt in prompts]
        how: dict[str, Any] = {"step": step, "take_token": take_token, "restore": restore}
        found = self.sample(cluster, requests, [prompt.seen for prompt in prompts], **how)
        return [
            Sample(
                *(prompt.text, self._shown(sample.tokens, choice.stop), len(sample.tokens)),
                pictures=prompt.pictures,
            )
            for prompt, result in zip(prompts, found, strict=True)
            for sample in result.samples
        ]

    def sample(
        self,
        cluster: Cluster,
        requests: Sequence[SampleRequest],
        seen: Sequence[Tensors] = (),
        *,
        step: int = 0,
        take_token: TakeToken = lambda request, sample, token: None,
        restore: Callable[[], None] | None = None,
    ) -> list[SampleResult]:
        """The result of each request, between two steps. `take_token` is called once for each
        token. `seen`: see TextGeneration. `restore` restores the state of stages that are loaded
        again after a worker was lost; without it such a loss is raised. Raises DataError for a
        request that cannot be served."""
        vocabulary = int(self._model_config.get_text_config().vocab_size)
        for request in requests:
            request.check(vocabulary, self.max_positions)
        if any(seen) and not self.how.cached:
            raise DataError(f"the model is shown no picture: it has no cache ({self.how.reason})")
        texts = TextGeneration(
            requests,
            max_positions=self.max_positions,
            ends=self._stop,
            vocabulary=vocabulary,
            at_once=2 * len(self._config.shard_plan),
            cached=self.how.cached,
            rows=self._rows,
            decode=lambda ids: str(self._tokenizer.decode([*ids])),
            take_token=take_token,
            seen=seen,
        )
        attempts = count()

        def attempt() -> None:
            if next(attempts) and restore is not None:
                restore()
            cluster.retrying(lambda: self._decode(cluster, texts, step))

        attempt() if restore is None else cluster.recovery.outlive(attempt)
        cluster.retrying(cluster.pipeline.abort)  # frees the stages' caches
        return texts.results

    def _decode(self, cluster: Cluster, texts: TextGeneration, step: int) -> None:
        texts.restart()
        decoding = Decoding(self.how.cached)
        cluster.begin(StepInfo(step, 0, False, texts.micro_batches, 1, decoding=decoding))
        cluster.pipeline.decode(texts)

    def _rows(self, request: SampleRequest) -> int:
        """How many texts of a request may cross a boundary at once: no more tokens than the longest
        text has. Without a cache, or with side tensors, earlier tokens cross it, too."""
        if self.max_positions is None:
            return MOST_ROWS
        structure = introspect(self._model_config)
        is_whole = not self.how.cached or any(map(structure.sides_at, range(structure.num_layers)))
        longest = min(len(request.prompt) + request.max_tokens, self.max_positions)
        return self.max_positions // (longest if is_whole else 1) // _ROWS * _ROWS or 1

    def _shown(self, ids: Sequence[int], stop: Sequence[int | str]) -> str:
        """The text of tokens, up to the first string that ends it."""
        text = str(self._tokenizer.decode([*ids], skip_special_tokens=True))
        ends = [text.index(s) for s in stop if isinstance(s, str) and s in text]
        return text[: min(ends, default=len(text))]


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
        self._choice = SampleRequest(
            (),
            max_tokens=training.sample_max_new_tokens,
            temperature=training.sample_temperature,
            top_p=training.sample_top_p,
            seed=training.seed,
        )
        reader = PromptReader.of(config, tokenizer)
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
        return max(len(prompt.ids) for prompt in self._prompts) + self._choice.max_tokens

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
            _log.warning("no samples any more, and the run goes on: %s", error.message)
            cluster.retrying(cluster.pipeline.abort)  # may raise that a worker was lost
            return []


class SamplesFile(Observer):
    """Writes samples.jsonl: the texts that a model continues while it trains."""

    def __init__(self, run: Watched) -> None:
        self._lines = StepLines(run.placed.prepared.config.output_dir / "samples.jsonl")

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        if any(line["step"] == state.step for line in self._lines.resume(state.step)):
            due.done.add("sample")

    def went_back(self, state: TrainState) -> None:
        self._lines.resume(state.step)

    def sampled(self, state: TrainState, samples: Sequence[Sample]) -> None:
        for sample in samples:
            line = {name: value for name, value in asdict(sample).items() if value != ()}
            self._lines.write({"step": state.step, **line})


def admit_decoding(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> Continuing:
    """How a model that is cut this way continues a text, remembered. Raises ArchitectureError where
    it cannot."""

    def tried() -> dict[str, Any]:
        found = try_decoding(config, ranges)
        if found.impossible:
            raise ArchitectureError(
                f"a {config.model_type} model cannot continue a text here: {found.reason}",
                hint="leave training.sample_prompts out",
            )
        return {"cached": found.cached, "reason": found.reason}

    return Continuing(**remembered("decoding", config, ranges, tried, Path(__file__).parent))


def try_decoding(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> Continuing:
    """Continue a text by a tiny copy: in one piece without a cache, and by shards with caches, or
    else without. The shards must give the same logits."""
    reasons = []
    try:
        tiny = deterministic(shrink(config))
        with quiet_library(), torch.no_grad():
            whole, shards = build_both(tiny, ranges, None)
            for model in (whole, *shards):
                model.train(False)
            if shards[0].ids_per_token > 1:
                return Continuing(False, "its tokens have several ids each", impossible=True)
            draw = torch.Generator().manual_seed(0)
            vocabulary = int(tiny.get_text_config().vocab_size)
            ids = torch.randint(3, vocabulary, (1, _PROMPT_TOKENS + _NEW_TOKENS), generator=draw)
            ends = range(_PROMPT_TOKENS, ids.shape[1])
            texts = (ids[:, :end] for end in ends)
            rows = [whole(input_ids=text, use_cache=False).logits[0, -1] for text in texts]
            expected = {"logits": torch.stack(rows)}
            for cached in (True, False):
                try:
                    found = {"logits": torch.stack(_cut(shards, ids, cached))}
                    difference, _ = largest_difference(found, expected)
                except LIBRARY_ERRORS as error:
                    reasons.append(briefly(error))
                    continue
                if difference <= TOLERANCE:
                    return Continuing(cached, "; ".join(reasons))
                reasons.append(f"the logits of a cut differ by {difference:.2g} (relative)")
    except ArchitectureError as error:
        reasons = [error.message]
    except LIBRARY_ERRORS as error:
        reasons = [f"its tiny copy does not run ({briefly(error)})"]
    return Continuing(False, reasons[-1], impossible=True)


def _cut(shards: Sequence[Shard], ids_1S: Tensor, cached: bool) -> list[Tensor]:
    """The logits of each next token, by a chain of shards. Behind the prompt there are several rows
    of the same tokens; those of the last are returned."""
    caches = [ShardCache(s.config, s.range) if cached else None for s in shards]
    logits, first = list[Tensor](), 0
    for end in range(_PROMPT_TOKENS, ids_1S.shape[1]):
        ids = ids_1S[:, first:end].expand(_ROWS if logits else 1, -1)
        inputs = {"input_ids": ids, "positions": torch.arange(first, end).expand(ids.shape)}
        if len(logits) == 1:
            for cache in caches:
                cache.select(torch.zeros(_ROWS, dtype=torch.int64)) if cache is not None else None
        received: Bundle = ()
        for shard, cache in zip(shards[:-1], caches, strict=False):
            received = shard.forward(inputs, received, cache)
        logits.append(shards[-1].next_logits(inputs, received, caches[-1])[-1])
        first = end if cached else 0
    return logits
