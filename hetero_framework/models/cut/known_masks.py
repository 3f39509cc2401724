"""Attention masks that this process knows, so that transformers need not ask the device.

For torch's attention transformers leaves the mask out where no token is padding. It reads the mask
on the device to see that, up to twice in a forward, and each time waits for all that is queued.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

_known = threading.local()


def register_known_masks() -> None:
    """Have transformers make the masks of torch's attention by `_mask`."""
    AttentionMaskInterface.register("sdpa", _mask)


@contextmanager
def knowing(mask_BS: torch.Tensor | None) -> Iterator[None]:
    """Within the block, `_mask` in this thread reads this mask's CPU tensor, if it has one."""
    _known.mask_BS = getattr(mask_BS, "_hetero_host", None)
    try:
        yield
    finally:
        _known.mask_BS = None


def all_seen(like_BS: torch.Tensor) -> torch.Tensor:
    """A mask of ones on the device of `like_BS`, with a CPU tensor for `knowing`."""
    mask_BS = torch.ones_like(like_BS)
    mask_BS._hetero_host = torch.ones(like_BS.shape)  # type: ignore[attr-defined]
    return mask_BS


def _mask(*args: Any, **settings: Any) -> torch.Tensor | None:
    """The mask of `sdpa_mask`, made without reading the device where `knowing` has a mask."""
    known_BS, there_BS = getattr(_known, "mask_BS", None), settings.get("attention_mask")
    if known_BS is not None and there_BS is not None and there_BS.shape == known_BS.shape:
        if known_BS.all():
            settings["attention_mask"] = None
        else:
            settings["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **settings)
