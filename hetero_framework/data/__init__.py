"""Text and conversations -> micro-batches, with the order and the tokens of Trainer and SFTTrainer.

`load_data(config, load_tokenizer(config)).step_batches(step)` gives the micro-batches of a step. It
is a pure function: a run that resumes at step k asks for step k.
"""

# ruff: noqa: F401  (what is imported here is what the package offers)

from __future__ import annotations

from hetero_framework.data.batches import LazyBatches, MicroBatch, num_items, token_count
from hetero_framework.data.load import TrainData, load_data
from hetero_framework.data.tokenizer import load_tokenizer
