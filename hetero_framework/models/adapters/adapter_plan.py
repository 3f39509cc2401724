"""One adapter's plan over the whole model, shared by shards, files and memory estimates."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_framework.config.objectives import Task
from hetero_framework.config.schema import REWRITING_INITS
from hetero_framework.models.cut.language import pattern
from hetero_framework.repository import ADAPTER

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel
    from torch import nn

# PEFT's names: its weight file, and the prefix of the model's own parameter names.
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
PEFT_TASKS: dict[Task, str] = {
    "causal-lm": "CAUSAL_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
}


@dataclass(frozen=True)
class AdapterPlan:
    """One adapter over the whole model, the same on every machine.

    `modules`, `parameters` and `saved_modules` are full names of the wrapped modules, of
    `target_parameters` and of `modules_to_save`. `trainable` maps parameter names to shapes, in the
    whole model's order. `tensors` maps the adapter file's keys to shapes. Of these keys,
    `embedding_tensors` are frozen base embeddings, which PEFT writes and need not read. `weights`
    is the file to start from. `autocast_adapter_dtype` is the setting of that name. `towers` are
    the model's towers (`language.py`) that get no adapter; `sees` says whether it has any towers.
    `unmergeable` counts the updates that have a bias over layers without one. `remarks` tell the
    user of entries without effect. `task` is the model's task.
    """

    lora_config: LoraConfig
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    saved_modules: tuple[str, ...]
    trainable: dict[str, tuple[int, ...]]
    tensors: dict[str, tuple[int, ...]]
    embedding_tensors: frozenset[str]
    weights: Path | None = None
    autocast_adapter_dtype: bool | None = None
    towers: tuple[str, ...] = ()
    sees: bool = False
    unmergeable: int = 0
    remarks: tuple[str, ...] = ()
    task: Task = "causal-lm"

    @property
    def key(self) -> tuple[object, ...]:
        """All parts of the plan that sizes depend on."""
        settings = str(self.lora_config.to_dict()), self.autocast_adapter_dtype
        return (*settings, self.modules, self.saved_modules)

    @cached_property
    def origin(self) -> str | None:
        """sha256, in hex, of the files that the adapter starts from; None for a new adapter."""
        if self.weights is None:
            return None
        digest = hashlib.sha256()
        for file in (self.weights, self.weights.with_name(ADAPTER)):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    @property
    def excluded(self) -> Any:
        """`exclude_modules` that keep PEFT from adapting the towers of the whole model, too."""
        modules = self.lora_config.exclude_modules
        if not self.towers:
            return modules
        if isinstance(modules, str):
            if all(re.fullmatch(modules, tower) for tower in self.towers):
                return modules
            modules = [modules]
        else:
            modules = [rf"(.*\.)?{re.escape(name)}" for name in sorted(modules or ())]
        return "|".join(f"({one})" for one in (*modules, pattern(self.towers)))

    @property
    def rewrites_base(self) -> bool:
        """Whether the adapter's initial values are taken out of the base's weights, in memory."""
        return self.lora_config.init_lora_weights in REWRITING_INITS

    def number_bytes(self, base: int, *, quantized: bool) -> int:
        """Bytes per number of an adapter's weight. `base` is the bytes per number of the base's
        weights that are not quantised."""
        if self.autocast_adapter_dtype or (self.autocast_adapter_dtype is None and not quantized):
            return 4
        return 2 if quantized else base

    def trains(self, weights: Iterable[str]) -> bool:
        """Whether the adapter trains something in the modules that have these base weights."""
        parents = {name.rpartition(".")[0] for name in self.parameters}
        wrapped = {*self.modules, *self.saved_modules, *parents}
        trained = {_owner(name, wrapped) for name in self.trainable}
        return any(weight.startswith(f"{name}.") for name in trained for weight in weights)


def _owner(name: str, wrapped: set[str]) -> str:
    """The module of the base that a trained parameter belongs to."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(1, len(parts)))
    return next((p for p in prefixes if p in wrapped), name.rpartition(".")[0])


@dataclass(frozen=True)
class AttachedAdapter:
    """State of a shard with an adapter: the plan, and PEFT's handle on the wrapped modules."""

    plan: AdapterPlan
    tuner: LoraModel

    def switch(self, model: nn.Module, *, on: bool) -> None:
        """Have the wrapped modules compute with the adapter, or as their base does. PEFT's own
        switch would also change which parameters are trained."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper

        for module in model.modules():
            if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)):
                module._disable_adapters = not on

    def take_off(self, model: nn.Module) -> None:
        """Put the base's modules back where the adapter has wrapped them. Trained parameters of the
        base's modules (biases) stay as they are, and require gradients."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper

        for name, child in list(model.named_children()):
            bare = child
            while isinstance(bare, (BaseTunerLayer, ModulesToSaveWrapper)):
                wrapped = "base_layer" if isinstance(bare, BaseTunerLayer) else "original_module"
                bare = bare.get_submodule(wrapped)
            if bare is not child:
                setattr(model, name, bare)
            self.take_off(bare)
