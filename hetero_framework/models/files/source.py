"""A model as its files say it: its configuration, its weights, and what they contradict.

If a checkpoint holds both ends of tied weights, transformers compares them and unties those that
differ. It warns of tensors that the model has no place for. A shard sees only its own tensors, so
the process that starts a run checks the whole model: all names, and the values of tied weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from hetero_framework import registry, repository
from hetero_framework.core import frames
from hetero_framework.errors import ModelError
from hetero_framework.models.cut.attention import check_installed, make_known
from hetero_framework.models.cut.family import family_asked, head_for
from hetero_framework.models.cut.introspect import introspect, tied_names
from hetero_framework.models.cut.language import (
    lies_in,
    meta_model,
    model_class,
    towers,
    train_towers,
)
from hetero_framework.models.cut.partition import Skeleton, skeleton_of
from hetero_framework.models.cut.tiny import config_for, task_of
from hetero_framework.models.files.weights import (
    Checkpoint,
    as_loaded,
    check_quantizer,
    check_settings,
    config_dtype,
    few,
    quantization_of,
    read_config,
    refuse_wrapped,
    renaming,
    stored_format,
)
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.units import seconds, size

if TYPE_CHECKING:
    from hetero_framework.config import Config, ModelConfig

_CHUNK_BYTES = 1 << 26
# Tensors that the library ignores where the model makes them itself.
_MADE = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
_OF_8_BITS = ("SCB", "weight_format")
_A_SECOND = 100e6  # FP8 numbers a second on one core (benchmarks/stored_forms.py)


class ModelSource:
    """The model that a `model` section names. What its files say is read when it is first asked
    for, and kept. All properties and methods raise ModelError where the files are at fault."""

    def __init__(self, model: ModelConfig, base_dir: Path) -> None:
        self.model, self.base_dir = model, base_dir

    @classmethod
    def of(cls, config: Config) -> ModelSource:
        """The model of a configuration that has a `model` section."""
        assert config.model is not None
        return cls(config.model, config.base_dir)

    @property
    def has_checkpoint(self) -> bool:
        """Whether the weights are read from a checkpoint of a class for text."""
        return self.model.name_or_path is not None and family_asked(self.model) is None

    @cached_property
    def place(self) -> str:
        """The model's directory or hub name; "model.from_config" for random weights."""
        if self.model.name_or_path is None:
            return "model.from_config"
        return repository.resolve_model_path(self.model.name_or_path, self.base_dir)

    @cached_property
    def stated(self) -> PretrainedConfig:
        """The configuration as it is written."""
        if self.model.from_config is None:
            return read_config(self.place, self.model.revision)
        fields = dict(self.model.from_config)
        check_settings(fields, self.place)
        try:
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        except LIBRARY_ERRORS as error:
            raise ModelError(
                f"model.from_config is not a configuration of an installed architecture: {error}"
            ) from error

    @cached_property
    def config(self) -> PretrainedConfig:
        """The transformers configuration of the model: the one gate for all models. Raises
        ModelError also for settings that would load code, and DeviceError where the attention is
        not installed."""
        model = self.model
        if (family := family_asked(model)) is not None:
            return family.read(model, self.base_dir)
        config = copy.deepcopy(self.stated)
        if model.attn_implementation is not None:
            make_known(model.attn_implementation)  # quantising looks at a model before one is built
            config._attn_implementation = model.attn_implementation
        config = config_for(config, model.task)
        if (head := head_for(model.task)) is not None:
            head.enter(model, config)
        _check_built(config, self.place)
        as_loaded(config)
        if model.tie_word_embeddings is not None:
            for part in (config, config.get_text_config()):
                part.tie_word_embeddings = model.tie_word_embeddings
        if model.router_aux_loss_coef is not None:
            _set_router_loss(config, model.router_aux_loss_coef)
        if model.trained_towers and config.sub_configs:
            train_towers(config, model.trained_towers)
        return config

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights once they are loaded."""
        name = self.model.dtype
        return config_dtype(self.config) if name == "auto" else getattr(torch, name)

    @property
    def form(self) -> str | None:
        """The form of few bits in which the weights are stored (`stored_format`)."""
        return stored_format(quantization_of(self.stated.to_dict()))

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights' files."""
        return Checkpoint(self.place, self.model.revision)

    @cached_property
    def generation(self) -> GenerationConfig | None:
        """The generation configuration, as transformers reads it with the weights; None for a class
        that generates no text."""
        if not model_class(self.config).can_generate():
            return None
        if self.model.name_or_path is None:
            return GenerationConfig.from_model_config(self.config)
        options: Any = {"revision": self.model.revision or "main"}
        try:
            with quiet_library():
                try:
                    return GenerationConfig.from_pretrained(self.place, **options)
                except OSError:  # there is none
                    options |= {"config_file_name": repository.CONFIG, "_from_model_config": True}
                    return GenerationConfig.from_pretrained(self.place, **options)
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(
                f"{repository.GENERATION} of the model {self.place!r} cannot be used:"
                f" {briefly(error)}",
                hint="correct it there, or take it away",
            ) from error

    def keys(self, whole: PreTrainedModel) -> dict[str, str]:
        """{the library's name of a weight in the `whole` model: its key in the checkpoint}."""
        rename = renaming(whole, dict.fromkeys(whole.state_dict(), True))
        return {rename(key): key for key in self.checkpoint.parts}

    def held(self) -> tuple[ModelSource, list[str]]:
        """The model as its checkpoint holds it, and warnings. Where the checkpoint holds both ends
        of tied weights, an unset `tie_word_embeddings` is set to whether they are equal. Raises
        ModelError also for names that a wrapper made."""
        if not self.has_checkpoint:
            return self, []
        whole = meta_model(self.config)
        keys = self.keys(whole)
        refuse_wrapped(self.checkpoint, whole.state_dict())
        gone = [name for name in keys if not lies_in(name, towers(self.config))]
        lines = list(_left_out(self.checkpoint, whole, self.config, gone))
        twice = {t: s for t, s in tied_names(whole).items() if t in keys and s in keys}
        if self.model.tie_word_embeddings is not None or not twice:
            return self, lines
        unlike = [t for t, s in twice.items() if not self._are_equal(keys[t], keys[s])]
        held = ModelSource(self.model.changed(tie_word_embeddings=not unlike), self.base_dir)
        held.stated, held.checkpoint = self.stated, self.checkpoint
        if unlike:
            target, source = unlike[0], twice[unlike[0]]
            apart = tied_names(meta_model(held.config))
            if target in apart or not (tied_names(whole).keys() - apart.keys()) <= keys.keys():
                raise ModelError(
                    f"the model {self.place!r} ties {target} to {source}, but its weights have"
                    " other numbers there",
                    hint="save it with one of both, or set model.tie_word_embeddings to true to"
                    f" train {source} in both places",
                )
            lines.append(
                f"config.json of the model {self.place!r} ties {target} to {source}, but its"
                " weights have other numbers there: they are two weights, as transformers has it,"
                " and the result's config.json says so"
            )
        return held, lines

    def _are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same numbers once loaded; reads until they differ."""
        with self.checkpoint.slices({one, other}.__contains__) as slices:
            a, b, dtype = slices[one], slices[other], self.dtype
            shape = a.get_shape()
            if shape != b.get_shape():
                return False
            rows = max(1, _CHUNK_BYTES // max(1, 4 * torch.Size(shape[1:]).numel()))
            return all(
                torch.equal(a[first : first + rows].to(dtype), b[first : first + rows].to(dtype))
                for first in range(0, shape[0], rows)
            )

    @cached_property
    def new_weights(self) -> list[str]:
        """The weights of a classifier's head that the checkpoint lacks, so that they begin at
        random."""
        if self.model.name_or_path is None or self.model.task == "causal-lm":
            return []
        if (family := family_asked(self.model)) is not None:
            return family.new_weights(self.config)
        whole = skeleton_of(self.config)
        return new_names(whole, meta_model(self.config), self.checkpoint)

    def stored_lines(self) -> list[str]:
        """A line on weights that a checkpoint stores in a form of few bits: the bytes of the full
        weights, and the time to make them. Raises ModelError also where tensors that are on this
        machine do not belong to each other."""
        if not self.has_checkpoint or (form := self.form) is None:
            return []
        try:
            Checkpoint(self.place, self.model.revision, local=True).check_stored()
        except ModelError:
            if Path(self.place).is_dir():
                raise
        numbers = sum(weight.numel() for weight in meta_model(self.config).parameters())
        full, name = size(numbers * self.dtype.itemsize), str(self.dtype).removeprefix("torch.")
        tested = registry.facts("stored_formats", form).get("tested", "nothing that is known here")
        return [
            f"weights stored as {form} are made full as each stage loads its own: {full} of {name}"
            f" (or what model.quantization makes of it), in {seconds(numbers / _A_SECOND)} in one"
            f" process (assumed: {_A_SECOND / 1e6:.0f} million numbers a second); the form is"
            f" tested against {tested}"
        ]


def _check_built(config: PretrainedConfig, place: str) -> None:
    """Raise ModelError for problems that show only in a configuration as the library reads it."""
    text: Any = config.get_text_config()
    if not isinstance(text, PretrainedConfig):
        raise ModelError(
            f"{place}: a {config.model_type} model has no part for text, but its settings hold"
            f" {frames.brief(text)} for one",
            hint="take that entry out (text_config, decoder, generator, ...)",
        )
    for part in (config, text):
        check_quantizer(getattr(part, "quantization_config", None), place)
        attention = part._attn_implementation
        if "/" in str(attention):
            raise ModelError(
                f"{place}: its attention {attention!r} would be a repository of native code, which"
                " is never run here",
                hint='set model.attn_implementation to "sdpa", or install the package that has it',
            )
        if isinstance(attention, str):  # transformers might take a kernel of the hub in its place
            check_installed(attention)


def _set_router_loss(config: PretrainedConfig, weight: float) -> None:
    """Set the weight of the routers' loss. Raises ModelError where the architecture has none."""
    text: Any = config.get_text_config()
    if not (hasattr(text, "output_router_logits") and hasattr(text, "router_aux_loss_coef")):
        raise ModelError(
            f"model.router_aux_loss_coef is {weight:g}, but a {config.model_type} model has no"
            " router_aux_loss_coef",
            hint="take it out",
        )
    text.output_router_logits, text.router_aux_loss_coef = weight > 0, weight


def new_names(whole: Skeleton, model: PreTrainedModel, checkpoint: Checkpoint) -> list[str]:
    """The weights of `model`, a whole classifier or a shard of it, that are behind the layers and
    that the checkpoint lacks."""
    if task_of(model.config) == "causal-lm":
        return []
    rename = renaming(model, dict.fromkeys(whole.names, True))
    there, here = {rename(key) for key in checkpoint.parts}, dict(model.named_parameters())
    structure = whole.structure
    behind = [n for n, owner in structure.owner.items() if owner >= structure.num_layers]
    return [name for name in behind if name in here and name not in there]


def _left_out(checkpoint: Checkpoint, whole: Any, config: Any, names: list[str]) -> Iterator[str]:
    """A warning of tensors without a place in the model, except those that the library allows."""
    known, buffers = {*whole.state_dict()}, [name for name, _ in whole.named_buffers()]
    modules = {name for name, _ in whole.named_modules() if name}
    silent = {*(whole._keys_to_ignore_on_load_unexpected or ())}
    if task_of(config) != "causal-lm":  # the heads of other classes
        silent.add(rf"^(?!{re.escape(whole.base_model_prefix)}\.)")
    silent |= {how for end, how in _MADE.items() if any(n.endswith(end) for n in buffers)}

    def has_place(name: str) -> bool:
        # Quantisation keeps its statistics beside a weight, under longer names.
        parent, child = name.rpartition(".")[::2]
        beside = parent in known or (parent in modules and child in _OF_8_BITS)
        return name in known or beside or parent.rpartition(".")[0] in known

    extra = [name for name in names if not has_place(name)]
    extra = sorted(name for name in extra if not any(re.search(how, name) for how in silent))
    if not extra:
        return
    shown = few(extra)
    blocks, count = introspect(config).blocks, introspect(config).num_layers
    matches = (re.match(rf"{re.escape(blocks)}\.(\d+)\.", name) for name in extra)
    layers = {int(match[1]) for match in matches if match}
    why = f" (it asks for {count} layers, they are of {max(layers) + 1})" if layers else ""
    yield (
        f"the model {checkpoint.source!r} holds {len(extra)} tensors that its config.json has no"
        f" place for{why}; they are left out, and not in the result: {shown}"
    )
