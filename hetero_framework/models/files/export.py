"""A run's results: a PEFT adapter directory or a Hugging Face checkpoint, complete or absent.

The tensors from all shards are compared with the whole model's key list before the directory
appears under its name.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from hetero_framework import registry, repository
from hetero_framework._version import __version__
from hetero_framework.core.files import (
    NamingOf,
    discard,
    put_back,
    replace_directory,
    sync_directory,
    sync_file,
)
from hetero_framework.data.tokenizer import settle_pad_token
from hetero_framework.errors import CheckpointError, ModelError, ResourceError, in_words
from hetero_framework.models.adapters.adapter_plan import ADAPTER_WEIGHTS, PEFT_TASKS, AdapterPlan
from hetero_framework.models.cut.family import as_saved, family_of
from hetero_framework.models.cut.language import all_towers, meta_model, model_class, without_towers
from hetero_framework.models.files.weights import INDEX_FILE, SINGLE_FILE, checkpoint_form, few
from hetero_framework.models.library import quiet_library

if TYPE_CHECKING:
    from hetero_framework.models.cut.shard import Shard
    from hetero_framework.models.files.source import ModelSource

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

CARD = "README.md"
EXPORT_LIST = "hetero_export.json"  # in every artefact: the names of its files
MAX_FILE_BYTES = 1 << 30  # of one weight file, which the writer holds in memory

_LAYER = re.compile(r"(.*?\.\d+)\.")

_log = logging.getLogger(__name__)


class WeightsBeside(Protocol):
    """The weights that a model has beside its language model."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights' names in a checkpoint, and the tensors, one at a time."""

    def copy_processor(self, folder: Path) -> None:
        """Copy the files that say how the model's other inputs are prepared."""


def export_layers(shard: Shard, *, untie: bool = False) -> Iterator[Tensors]:
    """Yield the shard's weights layer by layer, on the CPU, with the names of a Hugging Face
    checkpoint. transformers' weight conversions (fused experts), each within a layer, are reverted.
    Weights tied to another weight are left out, unless `untie`."""
    model = shard.model
    left_out = {*(model._keys_to_ignore_on_save or ()), *(model.all_tied_weights_keys or ())}
    if not untie:
        left_out.update(shard.ties)
    state = {key: tensor for key, tensor in model.state_dict().items() if key not in left_out}
    if not shard.range.is_first:
        # Constants outside the layers are in every shard; the first shard gives them.
        parameters = {name for name, _ in model.named_parameters()} - shard.constants
        state = {key: t for key, t in state.items() if key in parameters or _LAYER.match(key)}
    layers: dict[str, Tensors] = {}
    for key, tensor in state.items():
        layer = _LAYER.match(key)
        layers.setdefault(layer.group(1) if layer else "", {})[key] = tensor
    for tensors in layers.values():
        converted = checkpoint_form(model, tensors)
        yield {key: t.detach().to("cpu").contiguous() for key, t in converted.items()}


def expected_checkpoint_tensors(config: PretrainedConfig) -> Shapes:
    """Keys and shapes of the whole model's checkpoint; uses no memory for weights."""
    model = meta_model(config)
    left_out = {*(model._keys_to_ignore_on_save or ()), *(model.all_tied_weights_keys or ())}
    state = {key: t for key, t in model.state_dict().items() if key not in left_out}
    return {key: tuple(t.shape) for key, t in checkpoint_form(model, state).items()}


def align_tokens(
    config: PretrainedConfig,
    generation: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends_as_told: bool = False,
) -> None:
    """Enter the tokenizer's special tokens in both configurations, as Trainer and SFTTrainer do:
    generation also ends at the tokenizer's end token. `ends_as_told`: the end token was chosen by
    `data.eos_token`, and replaces the configuration's end token."""
    from transformers.trainer_utils import align_special_tokens  # slow: it brings PEFT

    settle_pad_token(tokenizer, config.get_text_config().vocab_size)
    if ends_as_told:
        config.get_text_config().eos_token_id = tokenizer.eos_token_id
    model = SimpleNamespace(config=config, generation_config=generation)
    with quiet_library():
        align_special_tokens(model, tokenizer)


def write_adapter(
    output: OutputDirectory,
    parts: Iterable[Mapping[str, torch.Tensor]],
    plan: AdapterPlan,
    base_model: str | None,
    revision: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    card: str | None = None,
    classifier: PretrainedConfig | None = None,
) -> None:
    """Write a PEFT adapter directory from the shards' parts, atomically. `card` is the text
    of its README.md; `classifier` is written as config.json, which has the labels. Raises
    CheckpointError, with the keys, for tensors that are missing, unexpected, misshapen or there
    twice."""
    tensors: Tensors = {}
    for part in _checked(parts, plan.tensors, "adapter"):
        tensors.update({key: _own_copy(tensor) for key, tensor in part.items()})
    config = copy.deepcopy(plan.lora_config)
    config.base_model_name_or_path, config.revision = base_model, revision
    config.inference_mode = True
    config.exclude_modules = plan.excluded
    if plan.towers:
        # A tower may have modules of these names, too.
        config.modules_to_save = list(plan.saved_modules) or None
    # The result does not say how it was initialised, unless the base has changed with it. Sets are
    # sorted, since they have no order.
    config.task_type = PEFT_TASKS[plan.task]
    if not plan.rewrites_base:
        config.init_lora_weights = True
    for name, value in vars(config).items():
        if isinstance(value, set):
            setattr(config, name, sorted(value))
    with output.writing() as folder:
        save_file(tensors, str(folder / ADAPTER_WEIGHTS), metadata={"format": "pt"})
        config.save_pretrained(str(folder))
        if classifier is not None:
            classifier.save_pretrained(str(folder))
        if tokenizer is not None:
            with NamingOf(folder / "tokenizer.json"):
                tokenizer.save_pretrained(str(folder))
        if plan.sees and base_model is not None:
            copy_processor(base_model, revision, folder)
        output.put_card(card)


def write_checkpoint(
    output: OutputDirectory,
    parts: Iterable[Mapping[str, torch.Tensor]],
    config: PretrainedConfig,
    generation_config: GenerationConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    beside: WeightsBeside | None = None,
    card: str | None = None,
) -> None:
    """Write a Hugging Face checkpoint directory from the shards' parts, and the weights `beside`
    them, atomically, with at most one file's tensors and one part in memory. Raises
    CheckpointError like `write_adapter`."""
    with output.writing() as folder:
        files = _WeightFiles(folder, max_file_bytes)
        for part in _checked(parts, expected_checkpoint_tensors(config), "checkpoint"):
            for key, tensor in part.items():
                files.add(key, _own_copy(tensor))
        for key, tensor in beside.tensors() if beside is not None else ():
            files.add(key, tensor)
        files.finish()
        family = family_of(config)
        if family is not None and (source := family.processor(config)) is not None:
            copy_processor(*source, folder)
        config = without_towers(as_saved(config))
        # Added by `save_pretrained` of a model.
        config.architectures, config.dtype = [model_class(config).__name__], files.dtype
        config.save_pretrained(str(folder))
        if generation_config is not None:
            # Not `save_pretrained`: once a token was changed, it refuses settings of many published
            # models (a temperature without sampling).
            place = str(folder / repository.GENERATION)
            generation_config.to_json_file(place, keys_to_pop=["compile_config"])
        if tokenizer is not None:
            with NamingOf(folder / "tokenizer.json"):
                tokenizer.save_pretrained(str(folder))
        if beside is not None:
            beside.copy_processor(folder)
        output.put_card(card)


def weights_beside(source: ModelSource) -> WeightsBeside | None:
    """The weights of the finished model beside its language model; None for a model of one part.
    Raises ModelError where some of these weights are missing."""
    if not all_towers(source.config):
        return None
    found: WeightsBeside = registry.find("multimodal", "weights")(source)
    return found


def copy_processor(source: str, revision: str | None, folder: Path) -> None:
    """Copy a multimodal model's files that say how pictures and sound are prepared; without a chat
    template, which would take the place of the tokenizer's."""
    for path in set(repository.settings_files(source, revision, repository.PROCESSORS)):
        fields = repository.read_json(path, ModelError)
        if fields.pop("chat_template", None) is None:
            shutil.copyfile(path, folder / path.name)
        else:
            text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
            (folder / path.name).write_text(text, encoding="utf-8")


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    # Parts may lie in receive buffers that are used again for the next part.
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _checked(
    parts: Iterable[Mapping[str, torch.Tensor]], expected: Shapes, what: str
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the parts, and compare them with the tensors of the whole model."""

    def refuse(problem: str, keys: Set[str]) -> None:
        if keys:
            raise CheckpointError(
                f"the {what} is not written: {len(keys)} {problem}: {few(sorted(keys))}",
                hint="every stage of the plan must contribute its layers exactly once",
            )

    seen: set[str] = set()
    for part in parts:
        refuse("tensors that the model does not have", part.keys() - expected.keys())
        refuse("tensors that two stages sent", part.keys() & seen)
        wrong = {key for key, tensor in part.items() if tuple(tensor.shape) != expected[key]}
        refuse("tensors of a wrong shape", wrong)
        seen.update(part)
        yield part
    refuse("missing tensors", expected.keys() - seen)


class _WeightFiles:
    """Writes weight files of bounded size, and renames them when their number is known."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._pending: Tensors = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []
        self.dtype: torch.dtype | None = None
        self._total_bytes = 0
        self._total_parameters = 0

    def add(self, key: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_file_bytes:
            self._flush()
        if self.dtype is None and tensor.is_floating_point():
            self.dtype = tensor.dtype
        self._pending[key] = tensor
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self._total_parameters += tensor.numel()

    def finish(self) -> None:
        self._flush()
        count = len(self._files)
        if count == 1:
            self._temporary(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map = {}
        for number, keys in enumerate(self._files):
            name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._temporary(number).rename(self._folder / name)
            weight_map.update(dict.fromkeys(keys, name))
        sizes = {"total_parameters": self._total_parameters, "total_size": self._total_bytes}
        index = {"metadata": sizes, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self._folder / INDEX_FILE).write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        path = self._temporary(len(self._files))
        save_file(self._pending, str(path), metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}.safetensors"


class OutputDirectory:
    """The directory of an artefact: decides which files are replaced, and changes all at once.

    A directory that is not empty is written only with `overwrite`: the files on the list of its
    artefact (`EXPORT_LIST`) are replaced, all others stay. Without a list, files there are replaced
    only if they are exactly those to write.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path.absolute()
        self._overwrite = overwrite
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        self._old = self.path.with_name(f".{self.path.name}.old")

    def check(self, *sources: str | Path) -> None:
        """Raise CheckpointError where nothing may be written: the path is a file, holds something,
        or is one of the artefact's `sources` (directories or hub names)."""
        for source in map(Path, sources):
            if self.path.exists() and source.exists() and self.path.samefile(source):
                raise CheckpointError(
                    f"{self.path} is needed to make the result; it will not be replaced",
                    hint="choose another directory",
                )
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file", hint="choose another directory")
        if not self._overwrite and self._present():
            raise CheckpointError(
                f"{self.path} is not empty; nothing in it will be replaced",
                hint="choose another directory; --overwrite replaces an earlier result in it and"
                " leaves other files alone",
            )

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """A folder that becomes the directory when the block ends, and vanishes if the block
        raises. Raises CheckpointError as `check`, and for files of another origin that are in the
        way; ResourceError for faults of the disk."""
        try:
            self.check()
            if put_back(self.path, self._old):
                _log.warning("put %s back: its replacement was interrupted", self.path)
            for left_over in (self._partial, self._old):
                discard(left_over)
            self._partial.mkdir(parents=True)
            yield self._partial
            self._finish()
        except (OSError, SafetensorError) as error:
            raise ResourceError(
                f"cannot write {self.path}: {in_words(error)}",
                hint=f"{self._partial} is complete; rename it" if self._is_complete() else None,
            ) from error
        finally:
            if not self._is_complete():
                discard(self._partial)

    def put_card(self, text: str | None) -> None:
        """Write the artefact's README.md, unless one of another origin is in the directory."""
        if text is not None and CARD not in set(self._present()) - self._listed():
            (self._partial / CARD).write_text(text, encoding="utf-8", newline="\n")

    def _is_complete(self) -> bool:
        """Whether everything but the last rename is done."""
        with suppress(OSError):  # a disk that does not say
            return (self._partial / EXPORT_LIST).exists()
        return False

    def _finish(self) -> None:
        files = sorted(path.name for path in self._partial.iterdir())
        for path in self._partial.rglob("*"):
            if path.is_file():
                sync_file(path)
        for name in self._foreign(files):
            _link(self.path / name, self._partial / name)
        text = json.dumps({"hetero_framework": __version__, "files": files}, indent=1) + "\n"
        listed = self._partial / f"{EXPORT_LIST}.tmp"
        listed.write_text(text, encoding="utf-8")
        sync_file(listed)
        listed.rename(self._partial / EXPORT_LIST)
        for folder in (*filter(Path.is_dir, self._partial.rglob("*")), self._partial):
            sync_directory(folder)
        replace_directory(self._partial, self.path, self._old)

    def _present(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []

    def _listed(self) -> set[str]:
        """The files of the artefact in the directory; none without a list."""
        try:
            listed = json.loads((self.path / EXPORT_LIST).read_text("utf-8"))["files"]
            return {EXPORT_LIST, *map(str, listed)}
        except FileNotFoundError:  # of a version that wrote no list
            return set()
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.path / EXPORT_LIST} cannot be read") from error

    def _foreign(self, files: list[str]) -> list[str]:
        """The entries of the directory that remain when `files` are written into it."""
        present = self._present()
        ours = self._listed() or (set(files) if present == files else set())
        foreign = [name for name in present if name not in ours]
        if taken := sorted({*files, EXPORT_LIST}.intersection(foreign)):
            what = f"{', '.join(taken)} of another origin"
            raise CheckpointError(
                f"{self.path} holds {what}, which will not be replaced",
                hint="choose another directory, or remove these files",
            )
        return foreign


def _link(source: Path, target: Path) -> None:
    """Put `source` at `target` as well: by links if the file system can make them, else a copy."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other, follow_symlinks=False)
        except (OSError, NotImplementedError):
            shutil.copy2(one, other, follow_symlinks=False)

    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    else:
        link(str(source), str(target))
