"""Text and conversations -> micro-batches, with the order and the tokens of Trainer and SFTTrainer.

Example:

    from hetero_framework.config import load_config
    from hetero_framework.data import load_data, load_tokenizer

    config = load_config("hetero_config.json")
    data = load_data(config, load_tokenizer(config))
    print("\\n".join(data.report))
    for step in range(data.total_steps):
        for batch in data.step_batches(step):
            print(step, data.epoch_of(step), batch["input_ids"].shape)

`step_batches(step)` is a pure function: a run that resumes at step k asks for step k.
"""

from __future__ import annotations

from hetero_framework.data.batches import LazyBatches, MicroBatch, num_items, token_count
from hetero_framework.data.load import TrainData, load_data
from hetero_framework.data.tokenizer import load_tokenizer

__all__ = [
    "LazyBatches",
    "MicroBatch",
    "TrainData",
    "load_data",
    "load_tokenizer",
    "num_items",
    "token_count",
]
