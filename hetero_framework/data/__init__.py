"""Text and conversations -> micro-batches, with the order and the tokens of Trainer and SFTTrainer.

`load_data(config, load_tokenizer(config)).step_batches(step)` gives the micro-batches of a step. It
is a pure function: a run that resumes at step k asks for step k. Importing the package does not
import torch; the names below are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_framework.data.batches import (
        LazyBatches,
        MicroBatch,
        num_items,
        padded_count,
        token_count,
    )
    from hetero_framework.data.tokenizer import load_tokenizer
    from hetero_framework.data.train_data import TrainData, load_data

__all__ = [
    "LazyBatches",
    "MicroBatch",
    "TrainData",
    "load_data",
    "load_tokenizer",
    "num_items",
    "padded_count",
    "token_count",
]
_HOMES = {"TrainData": "train_data", "load_data": "train_data", "load_tokenizer": "tokenizer"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'batches')}"), name)
