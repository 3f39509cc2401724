"""Contradictions between a checkpoint's weights and its config.json, checked once before a run.

If a checkpoint holds both ends of tied weights, transformers compares them and unties those that
differ. It warns of tensors that the model has no place for. A shard sees only its own tensors, so
the process that starts a run checks the whole model: all names, and the values of tied weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hetero_framework import registry
from hetero_framework.config import ModelConfig
from hetero_framework.errors import ModelError
from hetero_framework.models.cut.family import family_asked
from hetero_framework.models.cut.introspect import introspect, tied_names
from hetero_framework.models.cut.language import lies_in, meta_model, towers
from hetero_framework.models.cut.partition import Skeleton
from hetero_framework.models.cut.shard import config_dtype, load_model_config, new_names, stated
from hetero_framework.models.cut.tiny import task_of
from hetero_framework.models.files.weights import (
    Checkpoint,
    quantization_of,
    refuse_wrapped,
    renaming,
    stored_format,
)
from hetero_framework.repository import resolve_model_path
from hetero_framework.units import seconds, size

_CHUNK_BYTES = 1 << 26
# Tensors that the library ignores where the model makes them itself.
_MADE = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
_OF_8_BITS = ("SCB", "weight_format")
_SHOWN = 4
_A_SECOND = 100e6  # FP8 numbers a second on one core (benchmarks/stored_forms.py)


def as_held(model: ModelConfig, base_dir: Path) -> tuple[ModelConfig, list[str]]:
    """The `model` section, and warnings. If the checkpoint holds both ends of tied weights, an
    unset `tie_word_embeddings` is set to whether they are equal. Raises ModelError, also for names
    that a wrapper made."""
    if model.name_or_path is None or family_asked(model) is not None:
        return model, []
    config = load_model_config(model, base_dir)
    whole = meta_model(config)
    checkpoint = Checkpoint(resolve_model_path(model.name_or_path, base_dir), model.revision)
    rename = renaming(whole, dict.fromkeys(whole.state_dict(), True))
    keys = {rename(key): key for key in checkpoint.parts}
    refuse_wrapped(checkpoint, whole.state_dict())
    gone = [name for name in keys if not lies_in(name, towers(config))]
    lines = list(_left_out(checkpoint, whole, config, gone))
    twice = {t: s for t, s in tied_names(whole).items() if t in keys and s in keys}
    if model.tie_word_embeddings is not None or not twice:
        return model, lines
    dtype = config_dtype(config) if model.dtype == "auto" else getattr(torch, model.dtype)
    unlike = [t for t, s in twice.items() if not _are_equal(checkpoint, keys[t], keys[s], dtype)]
    held = model.changed(tie_word_embeddings=not unlike)
    if unlike:
        target, source = unlike[0], twice[unlike[0]]
        apart = tied_names(meta_model(load_model_config(held, base_dir)))
        if target in apart or not (tied_names(whole).keys() - apart.keys()) <= keys.keys():
            raise ModelError(
                f"the model {checkpoint.source!r} ties {target} to {source}, but its weights have"
                " other numbers there",
                hint="save it with one of both, or set model.tie_word_embeddings to true to train"
                f" {source} in both places",
            )
        lines.append(
            f"config.json of the model {checkpoint.source!r} ties {target} to {source}, but its"
            " weights have other numbers there: they are two weights, as transformers has it, and"
            " the result's config.json says so"
        )
    return held, lines


def new_weights(model: ModelConfig, base_dir: Path) -> list[str]:
    """The weights of a classifier's head that the checkpoint lacks, so that they begin at random.
    Raises ModelError."""
    if model.name_or_path is None or model.task == "causal-lm":
        return []
    config = load_model_config(model, base_dir)
    if (family := family_asked(model)) is not None:
        return family.new_weights(config)
    checkpoint = Checkpoint(resolve_model_path(model.name_or_path, base_dir), model.revision)
    return new_names(Skeleton(config, introspect(config)), meta_model(config), checkpoint)


def stored_lines(model: ModelConfig, base_dir: Path) -> list[str]:
    """A line on weights that a checkpoint stores in a form of few bits: the bytes of their files,
    if known without a download, the bytes of the full weights, and the time to make these. Raises
    ModelError where tensors that are on this machine do not belong to each other."""
    if model.name_or_path is None or family_asked(model) is not None:
        return []
    form = stored_format(quantization_of(stated(model, base_dir)[0].to_dict()))
    if form is None:
        return []
    source, files = resolve_model_path(str(model.name_or_path), base_dir), None
    try:
        checkpoint = Checkpoint(source, model.revision, local=True)
        checkpoint.check_stored()
        files = checkpoint.file_bytes()
    except ModelError:
        if Path(source).is_dir():
            raise
    config = load_model_config(model, base_dir)
    dtype = config_dtype(config) if model.dtype == "auto" else getattr(torch, model.dtype)
    numbers = sum(weight.numel() for weight in meta_model(config).parameters())
    held = "their files" if files is None else f"{size(files)} of files"
    full, name = size(numbers * dtype.itemsize), str(dtype).removeprefix("torch.")
    tested = registry.facts("stored_formats", form).get("tested", "nothing that is known here")
    return [
        f"weights stored as {form} are made full as each stage loads its own: {held} become {full}"
        f" of {name} (or what model.quantization makes of it), in {seconds(numbers / _A_SECOND)} in"
        f" one process (assumed: {_A_SECOND / 1e6:.0f} million numbers a second); the form is"
        f" tested against {tested}"
    ]


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


def few(names: list[str]) -> str:
    """The first names, with "..." where there are more."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _are_equal(checkpoint: Checkpoint, one: str, other: str, dtype: torch.dtype) -> bool:
    """Whether two tensors have the same numbers in `dtype`; reads until they differ."""
    with checkpoint.slices({one, other}.__contains__) as slices:
        a, b = slices[one], slices[other]
        shape = a.get_shape()
        if shape != b.get_shape():
            return False
        rows = max(1, _CHUNK_BYTES // max(1, 4 * torch.Size(shape[1:]).numel()))
        return all(
            torch.equal(a[first : first + rows].to(dtype), b[first : first + rows].to(dtype))
            for first in range(0, shape[0], rows)
        )
