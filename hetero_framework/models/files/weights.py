"""Finds a model's configuration and reads single tensors of its safetensors files.

Only files that hold a wanted tensor are opened or downloaded; a tensor's bytes are read when used.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils.hub import cached_file

from hetero_framework import registry, repository, versions
from hetero_framework.core import frames
from hetero_framework.errors import ModelError
from hetero_framework.models.cut.family import family_of
from hetero_framework.models.files.packed import misfit
from hetero_framework.models.library import LIBRARY_ERRORS, OWN_CLASS_HINT

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"(?!\.)[^/\\:\0]+")
_NAMED = "transformers_weights"
_WEIGHTS = re.compile(_FILE_NAME.pattern + r"\.safetensors(\.index\.json)?")
_MOST_PARTS = 4096
_MOST_INDEX_BYTES = 1 << 28
_COUNT = re.compile(r"(?<!max_window_)(layers?|blocks?|depth|experts|num_labels)$")
_SETTINGS = (repository.CONFIG, repository.GENERATION)
_CPU = torch.device("cpu")
_UNNAMED = "no quant_method"
_VALUES = ("weight", "_proj")  # ends of names of tensors that are trained
_SHOWN = 4  # names in an error
_CODE_HINT = (
    "take a model that the installed transformers knows by itself; where it knows this one too,"
    " copy the folder and take that entry out of the file"
)


def read_config(source: str, revision: str | None) -> PretrainedConfig:
    """The configuration of a directory or hub repository. Raises ModelError, also for settings that
    would load code, before a library sees them."""
    for path in repository.settings_files(source, revision, _SETTINGS):
        check_settings(repository.read_json(path, ModelError), str(path))
    try:
        fields, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        model_type = fields.get("model_type")
        if model_type is None:
            raise ModelError(f"model {source!r} has no config.json that names its model_type")
        if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
            raise ModelError(
                f"the installed transformers has no model type {model_type!r} (model {source!r})",
                hint=OWN_CLASS_HINT,
            )
        check_quantizer(quantization_of(fields), source)
        # Code that lies beside a checkpoint is never run, the library's own is.
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        return config
    except ModelError:
        raise
    except LIBRARY_ERRORS as error:
        taken = "" if Path(source).is_dir() else "no directory here, and as a name on the hub: "
        raise ModelError(
            f"{platform.node()} cannot read the configuration of model {source!r}: {taken}{error}",
            hint="set model.name_or_path to a Hugging Face checkpoint directory that this machine"
            " has, or to a hub name that it can reach",
        ) from error


def check_settings(fields: dict[str, Any], where: str) -> None:
    """Raise ModelError for a model's settings at `where` that would load code, or for a count
    beyond any model's: the library would make a list of that length."""
    repository.refuse_code_in(fields, where, ModelError, _CODE_HINT)
    for key, value in repository.settings_in(fields):
        if _COUNT.search(key) and isinstance(value, (int, float)) and value > _MOST_PARTS:
            raise ModelError(
                f"{where} has {key} {frames.brief(value)}; at most {_MOST_PARTS} are supported"
            )


def quantization_of(fields: Mapping[str, Any]) -> Any:
    """The `quantization_config` in a config.json, or in its part for text. Raises ModelError for
    two that differ."""
    text = fields.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    given = [fields.get("quantization_config"), fields.get("compression_config"), inner]
    first, *others = [each for each in given if each] or given[:1]
    if any(other != first for other in others):
        raise ModelError(
            "config.json says twice how the weights are stored, and differently (in"
            " quantization_config, compression_config or text_config)",
            hint="keep the one that the model was saved with",
        )
    return first


def stored_format(settings: Any) -> str | None:
    """The name of the form in which a checkpoint's weights are stored, by its
    `quantization_config`; None for full precision and for bitsandbytes, whose weights are used as
    they are stored."""
    if settings is None:
        return None
    if not isinstance(settings, dict):
        settings = settings.to_dict() if hasattr(settings, "to_dict") else {}
    bits = any(settings.get(f"{own}load_in_{n}bit") for own in ("", "_") for n in (4, 8))
    unsaid = "modelopt" if "quant_algo" in settings else "bitsandbytes" if bits else _UNNAMED
    name = str(settings.get("quant_method") or unsaid).rpartition(".")[2].lower()
    return None if name.startswith("bitsandbytes") else name


def check_quantizer(settings: Any, source: str) -> str | None:
    """The `stored_format`. Raises ModelError for a form that cannot be read here."""
    if (name := stored_format(settings)) is None:
        if isinstance(settings, dict):
            try:
                BitsAndBytesConfig.from_dict(settings)
            except (ValueError, TypeError, AttributeError) as error:
                raise ModelError(
                    f"the quantization_config of the model {source!r} is none of bitsandbytes:"
                    f" {error}",
                    hint="copy or download config.json again",
                ) from error
            except ImportError:
                pass  # it is not here, which matters where the weights are read
        return None
    if not registry.has("stored_formats", name):
        known = ", ".join(["bitsandbytes", *registry.names("stored_formats")])
        raise ModelError(
            f"the model {source!r} is quantised with {name!r}, which cannot be read here; known"
            f" are {known}",
            hint='take one of these, or the full-precision model with "model.quantization": "nf4"',
        )
    needed = registry.facts("stored_formats", name).get("needs")
    if needed and not versions.has(needed):
        raise ModelError(
            f"the weights of the model {source!r} are stored by {name}, and {platform.node()} does"
            f" not have {needed}",
            hint=f"pip install '{needed}'",
        )
    return name


def as_loaded(config: PretrainedConfig) -> None:
    """Take the stored form of weights out of a configuration: loaded weights are full."""
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if stored_format(getattr(part, name, None)) is not None:
                delattr(part, name)


def config_dtype(config: PretrainedConfig) -> torch.dtype:
    dtype = config.dtype or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


class StoredFormat(Protocol):
    """How the weights of a checkpoint are made of the tensors in its files."""

    def weights(self, files: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """{name of a weight in full precision: {role: stored tensor}}, for the tensors in `files`.
        Raises ModelError."""

    def weight(
        self, name: str, slices: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> Any:
        """An unread slice of a weight in full precision, made of unread `slices` of its stored
        tensors, by role. Raises ModelError."""


_CONVERT = (
    "only safetensors are read. Convert .bin files once with"
    " AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
)


class Checkpoint:
    """The safetensors files of a model, by tensor name, and its weights (`parts`), each with the
    tensors it is made of. With `local` nothing is downloaded. `used` has the names of tensors that
    `slices` has opened. Raises ModelError for a file that is absent or damaged."""

    def __init__(self, source: str, revision: str | None = None, *, local: bool = False) -> None:
        self.source = source
        self.revision = revision
        self.used: set[str] = set()
        self._local = local
        path = self.path(repository.CONFIG)
        fields = {} if path is None else repository.read_json(path, ModelError)
        first, name = self._first(fields.get(_NAMED))
        if name.endswith(".json"):
            index = repository.read_json(first, ModelError, _MOST_INDEX_BYTES)
            self.files = _weight_map(first, index.get("weight_map"))
        else:
            with _open(first) as file:
                self.files = dict.fromkeys(file.keys(), name)
        self._form: StoredFormat | None = None
        self._settings = settings = quantization_of(fields)
        if (form := check_quantizer(settings, source)) is not None:
            self._form = registry.find("stored_formats", form)(settings, source)
        self.is_stored_otherwise = self._form is not None
        self.parts: Mapping[str, Mapping[str, str]] = (
            {name: {"": name} for name in self.files}
            if self._form is None
            else self._form.weights(self.files)
        )

    def _first(self, named: Any) -> tuple[Path, str]:
        """The file that from_pretrained begins with, and its name: the file that config.json names
        (`named`), else the single file, else the index of several."""
        if self.path(repository.ADAPTER) is not None:
            raise ModelError(
                f"{self.source!r} holds an adapter beside the model, and from_pretrained would add"
                " it to the weights",
                hint=f"take {repository.ADAPTER} away, or merge the adapter with `hetero merge`",
            )
        if named is not None and not (isinstance(named, str) and _WEIGHTS.fullmatch(named)):
            raise ModelError(
                f"{repository.CONFIG} of the model {self.source!r} has {_NAMED}"
                f" {frames.brief(named)}, which is neither a safetensors file beside it nor the"
                " index of several"
            )
        names = (SINGLE_FILE, INDEX_FILE) if named is None else (named,)
        for name in names:
            if (path := self.path(name)) is not None:
                return path, name
        raise ModelError(
            f"{platform.node()} finds no {' and no '.join(names)} in model {self.source!r}",
            hint=_CONVERT,
        )

    def path(self, filename: str) -> Path | None:
        """The local path of a file of the model, downloaded if need be; None if there is none."""
        try:
            file = cached_file(
                self.source,
                filename,
                revision=self.revision,
                local_files_only=self._local,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=not self._local,
            )
        except OSError as error:
            raise ModelError(
                f"{platform.node()} cannot get {filename} of model {self.source!r}: {error}"
            ) from error
        return None if file is None else Path(file)

    def checked(self, filename: str) -> Path:
        """The path of a weight file. Raises ModelError where its header cannot be read."""
        path = self._there(filename)
        with _open(path):
            return path

    def _there(self, filename: str) -> Path:
        path = self.path(filename)
        if path is None:
            raise ModelError(
                f"model {self.source!r} lacks its file {filename}",
                hint="copy or download the model again",
            )
        return path

    @contextmanager
    def slices(
        self,
        wanted: Callable[[str], bool],
        dtype: torch.dtype = torch.float32,
        device: torch.device = _CPU,
    ) -> Iterator[dict[str, Any]]:
        """Unread slices of the wanted weights. Only files that hold a wanted weight are fetched and
        opened. Weights that are made of several tensors are computed in `dtype`, on `device`."""
        parts = {name: parts for name, parts in self.parts.items() if wanted(name)}
        names = {stored for tensors in parts.values() for stored in tensors.values()}
        self.used.update(names)
        with ExitStack() as stack:
            opened = {}
            for filename in sorted({self.files[name] for name in names}):
                opened[filename] = stack.enter_context(_open(self._there(filename)))
            with _damage(self.source):
                tensors = {name: opened[self.files[name]].get_slice(name) for name in names}
            slices = {}
            for name, stored in parts.items():
                if self._form is not None:
                    by_role = {role: tensors[part] for role, part in stored.items()}
                    slices[name] = self._form.weight(name, by_role, dtype, device)
                else:
                    slices[name] = tensors[name]
                    if self._settings is None:
                        self._refuse_scaled(name, slices[name].get_dtype())
            if self._form is None and self._settings and (wrong := misfit(slices, self._settings)):
                file = self.files.get(wrong[0], "the files")
                raise ModelError(
                    f"{wrong[0]} in {file} of the model {self.source!r}, stored by bitsandbytes:"
                    f" {wrong[1]}",
                    hint="copy or download the file and config.json again",
                )
            yield slices

    def _refuse_scaled(self, name: str, dtype: str) -> None:
        """Raise ModelError for a tensor of scaled numbers where config.json names no scale."""
        scales = [scale for end in ("_scale", "_scale_inv") if (scale := name + end) in self.files]
        has = f"has the scale {scales[0]}" if scales else f"holds whole numbers ({dtype})"
        is_whole = dtype[0] in "IUB" and dtype != "BF16" and name.endswith(_VALUES)
        if is_whole or (scales and dtype.startswith("F8")):
            raise ModelError(
                f"{name} in {self.files[name]} of the model {self.source!r} {has}, and config.json"
                " has no quantization_config that says so",
                hint='add it there: of a file of ModelOpt, {"quant_method": "modelopt"} and'
                " the quant_algo that hf_quant_config.json has",
            )

    def check_stored(self) -> None:
        """Raise ModelError where tensors of a stored weight do not belong to each other. Checks the
        files that are on this machine, and reads only the scales."""
        paths = {file: self.path(file) for file in {*self.files.values()}}
        here = {name for name, file in self.files.items() if paths[file] is not None}
        with self.slices(lambda name: here.issuperset(self.parts[name].values())):
            pass  # it is the making of a slice that checks its tensors


_WRAPPERS = {
    "_orig_mod": ("torch.compile", "the _orig_mod of the compiled module"),
    "_fsdp_wrapped_module": ("FSDP", "a full state dict"),
    "_checkpoint_wrapped_module": ("torch's activation checkpointing", "the module inside"),
    "base_model.model": ("PEFT", "what merge_and_unload() returns"),
    "module": ("DataParallel or DeepSpeed", "its module"),
}
"""Parts of names that wrappers of a model add: the wrapper, and the object to save instead."""


def whole_model(
    cls: Any, config: PretrainedConfig, checkpoint: Checkpoint, dtype: torch.dtype, **settings: Any
) -> Any:
    """A model of a class of the library, with all weights of a checkpoint in full precision.
    `settings` are those of from_pretrained."""
    with checkpoint.slices(lambda name: True, dtype) as slices:
        return cls.from_pretrained(None, config=config, state_dict=slices, dtype=dtype, **settings)


def refuse_wrapped(checkpoint: Checkpoint, known: Container[str]) -> None:
    """Raise ModelError for tensors with a `known` name to which a wrapper has added something."""
    for part, (wrapper, inner) in _WRAPPERS.items():
        for name in sorted(checkpoint.parts):
            bare = name.replace(f"{part}.", "")
            if bare != name and name not in known and bare in known:
                raise ModelError(
                    f"the names of tensors of the model {checkpoint.source!r} are those of a model"
                    f" that {wrapper} has wrapped: {name} for {bare}",
                    hint=f"save {inner} with save_pretrained, or take {part + '.'!r} out of the"
                    " names",
                )


def few(names: Sequence[str]) -> str:
    """The first names, with "..." where there are more."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def renaming(model: PreTrainedModel, known: dict[str, bool]) -> Callable[[str], str]:
    """A function that gives the library's name for a checkpoint's key in this model. The key stays
    if it is among the `known` names and the library's name is not."""
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]

    def rename(key: str) -> str:
        name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        return key if name not in known and key in known else name

    return rename


def checkpoint_form(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model as a checkpoint of its class names and cuts them."""
    # The model records how names differed in the checkpoint it was loaded from (a missing prefix,
    # say); names that are written here must be the class's own on every stage.
    if (family := family_of(model.config)) is not None:
        return family.users_names(model, state)
    recorded = getattr(model, "_weight_conversions", None)
    model._weight_conversions = None
    try:
        reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
        return reverted
    finally:
        model._weight_conversions = recorded


def _weight_map(index: Path, files: Any) -> dict[str, str]:
    """The file of each tensor, as the `weight_map` of an index says it."""
    if not isinstance(files, dict):
        raise _damaged(index, "it has no weight_map")
    for name in files.values():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise _damaged(index, f"its weight_map names {name!r}, which is not a file beside it")
        if not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name}, but only safetensors are read", hint=_CONVERT)
    return files


def _open(path: Path) -> Any:
    """A safetensors file, mapped into memory."""
    with _damage(path):
        if sys.platform == "win32":
            # There a mapped file cannot be deleted or replaced, and its size is charged at once.
            with suppress(TypeError):  # safetensors without a choice of backend
                return safe_open(str(path), framework="pt", backend="pread")
        return safe_open(str(path), framework="pt")


@contextmanager
def _damage(path: Path | str) -> Iterator[None]:
    """Turn errors of reading a file into ModelError, which names the file and the cause."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        if isinstance(path, Path):
            repository.refuse_mistaken(path, ModelError)
            if (why := repository.pickled(path)) is not None:
                raise ModelError(
                    f"{path} is not a safetensors file: {why}, which can run code when it is read",
                    hint="take the model from whom you trust; " + _CONVERT,
                ) from error
        raise _damaged(path, str(error)) from error


def _damaged(path: Path | str, why: str) -> ModelError:
    return ModelError(
        f"{path} cannot be read: {why}",
        hint="the file is incomplete or was changed; copy or download it again",
    )
