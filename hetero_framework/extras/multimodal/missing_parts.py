"""Stand-ins for parts of a multimodal model whose package this machine does not have.

transformers builds the parts of a composite model by the types of their configurations, and accepts
other classes for them. Where a part needs a missing package (timm for Gemma 3n's vision tower), a
class without weights is registered for it. Text alone does not call this class.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from hetero_framework.models.library import briefly


class Placed(nn.Module):
    """A module without weights that has a device and a number type, for which models ask."""

    def place(self, dtype: torch.dtype) -> None:
        """Give the module its type; to be called by its constructor."""
        self.register_buffer("_place", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.get_buffer("_place").device

    @property
    def dtype(self) -> torch.dtype:
        return self.get_buffer("_place").dtype


class AbsentPart(Placed, PreTrainedModel):
    """Stands for a part without its package. A call raises ImportError with `why`, its error."""

    why = ""
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.place(torch.get_default_dtype())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(self.why)


def stand_in(config: PretrainedConfig) -> bool:
    """Register an `AbsentPart`, in this process, for each part of a composite configuration whose
    own class needs a package that is absent. Returns whether there was such a part."""
    registered = False
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is None or type(part) not in AutoModel._model_mapping:
            continue
        try:
            with torch.device("meta"):
                AutoModel.from_config(copy.deepcopy(part))
        except ImportError as error:
            fields = {"config_class": type(part), "why": briefly(error), "__module__": __name__}
            absent: Any = type("AbsentPart", (AbsentPart,), fields)
            AutoModel.register(type(part), absent, exist_ok=True)
            registered = True
    return registered
