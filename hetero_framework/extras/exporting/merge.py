"""Fold an adapter into its base model, one block at a time."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hetero_framework import repository
from hetero_framework.config import ModelConfig
from hetero_framework.core.devices import open_device
from hetero_framework.data.tokenizer import read_tokenizer
from hetero_framework.errors import ConfigError, DataError, ModelError
from hetero_framework.log import at_work
from hetero_framework.models.adapters.adapter_plan import AdapterPlan
from hetero_framework.models.adapters.lora import plan_saved_adapter, reaches_towers
from hetero_framework.models.adapters.trainable import attach_adapter
from hetero_framework.models.cut.family import head_for
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import load_shard
from hetero_framework.models.cut.tiny import task_of
from hetero_framework.models.files.card import base_facts, model_card
from hetero_framework.models.files.export import (
    OutputDirectory,
    Tensors,
    align_tokens,
    export_layers,
    weights_beside,
    write_checkpoint,
)
from hetero_framework.models.files.quantization import stored_quantization
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.files.weights import read_config

_log = logging.getLogger(__name__)

_LISTS = {"## Made from": ("the base model", "an adapter, folded into its weights")}
DType = Literal["auto", "float32", "bfloat16", "float16"]


@at_work("merging")
def merge_adapter(
    adapter_dir: Path,
    model: str,
    output: OutputDirectory,
    dtype: DType = "auto",
    revision: str | None = None,
) -> None:
    """Fold the adapter into `model`, a directory or hub name, and write the result to `output`.

    `dtype` is the type of the result ("auto": the checkpoint's). Memory holds about one block and
    one weight file. An adapter on one end of tied embeddings unties them: the ends then differ.
    Raises ModelError for a quantised base, ConfigError for an adapter that does not fit,
    CheckpointError when `output` holds something else, DataError for a tokenizer that brings code.
    """
    settings = ModelConfig(name_or_path=model, revision=revision, dtype=dtype)
    adapter_dir = adapter_dir.expanduser()
    output.check(ModelSource(settings, Path.cwd()).place, adapter_dir)
    if (adapter_dir / repository.CONFIG).exists():
        beside = read_config(str(adapter_dir), None)
        if (head := head_for(task_of(beside))) is not None:
            settings = head.found(settings, beside)
    if reaches_towers(ModelSource(settings, Path.cwd()).config, adapter_dir):
        settings = settings.with_towers()
    source, warned = ModelSource(settings, Path.cwd()).held()
    for line in warned:
        _log.warning("%s", line)
    for line in source.stored_lines():
        _log.info("%s", line)
    if stored := stored_quantization(source.config):
        raise ModelError(
            f"{model} is quantised ({stored}); merging into it would round the adapter away",
            hint="give the full-precision model that the quantised one was made from",
        )
    plan = plan_saved_adapter(source.config, adapter_dir)
    _refuse_unmergeable(plan)
    untie = _adapts_a_tied_end(source.config, plan)
    out_config = copy.deepcopy(source.config)
    for part in (out_config, out_config.get_text_config()) if untie else ():
        part.tie_word_embeddings = False
    generation, others = source.generation, weights_beside(source)
    if (tokenizer := _tokenizer(str(adapter_dir))) is not None:  # the adapter was trained with it
        align_tokens(out_config, generation, tokenizer)
    else:
        tokenizer = _tokenizer(source.place, revision)
    card = model_card(base_facts(source), out_config, adapter=False, lists=_LISTS)
    parts = _merged_layers(source, plan, untie)
    write_checkpoint(output, parts, out_config, generation, tokenizer, beside=others, card=card)


def _refuse_unmergeable(plan: AdapterPlan) -> None:
    if plan.unmergeable:
        raise ConfigError(
            f"the adapter has biases of its own (lora_bias), and {plan.unmergeable} of its layers"
            " have no bias to fold them into",
            hint="use it beside its model, with PEFT or `hetero chat`",
        )


def _adapts_a_tied_end(config: PretrainedConfig, plan: AdapterPlan) -> bool:
    pairs = (meta_model(config).all_tied_weights_keys or {}).items()
    ends = {name.rpartition(".")[0] for pair in pairs for name in pair}
    return bool(ends & {*plan.modules, *plan.saved_modules})


def _merged_layers(source: ModelSource, plan: AdapterPlan, untie: bool) -> Iterator[Tensors]:
    device, count = open_device("cpu"), introspect(source.config).num_layers
    for span in ranges_between(range(count + 1)):
        shard = load_shard(source.model, source.base_dir, span, device, seed=0)
        for target in shard.ties if untie else ():
            # It may share memory with its source in this shard; a merge may change only one.
            weight = shard.model.get_parameter(target)
            weight.data = weight.data.clone()
        attach_adapter(shard, plan, seed=0)
        assert shard.adapter is not None
        with warnings.catch_warnings():
            # Whether the ends stay tied is decided above, for the whole model.
            warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")
            warnings.filterwarnings("ignore", message="Input and output embeddings are no longer")
            shard.adapter.tuner.merge_and_unload()
        shard.adapter = None
        yield from export_layers(shard, untie=untie)


def _tokenizer(source: str, revision: str | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a directory or repository; None where there is none."""
    files = repository.settings_files(source, revision, [repository.TOKENIZER])
    if repository.TOKENIZER not in (path.name for path in files):
        return None
    try:
        return read_tokenizer(source, revision)
    except DataError as error:
        hint = "take tokenizer_config.json out of it to write the model without one"
        raise DataError(error.message, hint=hint) from error
