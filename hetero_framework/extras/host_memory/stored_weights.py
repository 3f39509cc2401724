"""The weights in a checkpoint's files, for layers that are read from there at each visit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model
from hetero_framework.models.files.weights import Checkpoint, renaming
from hetero_framework.repository import resolve_model_path

_HINT = 'take "offload_from": "file" out of shard_plan'


class Stored:
    """The tensors of a configuration's checkpoint, as memory-mapped files. The process holds none
    of them; the system caches as many as it has room for."""

    def __init__(self, config: Config, model: PretrainedConfig) -> None:
        """Raises ConfigError for a model without files."""
        asked = config.model
        if asked is None or asked.name_or_path is None:
            raise ConfigError("a model without a checkpoint has no files to read", hint=_HINT)
        source = resolve_model_path(str(asked.name_or_path), config.base_dir)
        self._checkpoint = Checkpoint(source, asked.revision)
        whole = meta_model(model)
        rename = renaming(whole, dict.fromkeys(whole.state_dict(), True))
        self._keys = {rename(key): key for key in self._checkpoint.files}
        self._blocks = introspect(model).blocks

    def parts_of(
        self, block: nn.Module, index: int, places: Sequence[tuple[Any, str, Tensor, int]]
    ) -> list[tuple[int, Tensor]]:
        """The offset and the bytes of each frozen tensor of `block`, the model's `index`th. Raises
        ConfigError for a tensor that the files lack, or have with other values or another type."""
        names = {id(parameter): name for name, parameter in block.named_parameters()}
        parts = []
        for holder, attribute, tensor, offset in places:
            name = f"{self._blocks}.{index}.{names.get(id(holder), attribute)}"
            stored, used = self._tensor(name), tensor.cpu()
            if stored is None or stored.dtype != used.dtype or not torch.equal(stored, used):
                raise ConfigError(
                    f"{name} is not used as the files of {self._checkpoint.source!r} have it, so"
                    " that it cannot be read from them at each visit",
                    hint=f"{_HINT}, or model.dtype and quantization, which change it",
                )
            parts.append((offset, stored.view(torch.uint8).view(-1)))
        return parts

    def _tensor(self, name: str) -> Tensor | None:
        if (key := self._keys.get(name)) is None:
            return None
        path = self._checkpoint.checked(self._checkpoint.files[key])
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor
