"""Tokens per second of packed rows, beside micro-batches of as many examples without padding.

    python -m benchmarks.packing

Three stages that sleep in proportion to their tokens, 8 micro-batches in a step, lengths of
examples as chats have them (log-normal, about 850 tokens). Both ways train on about as many
examples in a step; packed rows are of almost one length, so that no stage waits for a long one.
Steps of both ways are measured in turn, each pair in the same run. Prints one JSON object: the
tokens a second of both, all draws together, and `ratio`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from benchmarks.machines import run_program
from benchmarks.network import Network, open_network
from benchmarks.pipeline import Engine, Product, time_limit
from benchmarks.stages import Load
from hetero_framework.extras.packing.packed_rows import parts_of

STAGES, MICRO_BATCHES, STEPS, DRAWS = 3, 8, 4, 12
MAX_LENGTH = 2048
FORWARD_S = 0.02
"""Of a stage, for max_length tokens; the backward takes twice as long."""
BYTES = 1_000_000
"""Of an activation of max_length tokens."""


def main() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(np.exp(random.normal(6.6, 0.6, 20_000)), 30, MAX_LENGTH).astype(int)
    parts = parts_of(lengths, MAX_LENGTH, "bfd")
    rows = np.bincount(parts[:, 0], weights=parts[:, 3] - parts[:, 2]).astype(int)
    together = round(MAX_LENGTH / lengths.mean())
    tokens = dict.fromkeys(("packed", "padding_free"), 0.0)
    seconds = dict(tokens)
    with open_network("loopback", STAGES) as network:
        for _ in range(DRAWS):
            ways = {
                "packed": random.choice(rows, MICRO_BATCHES),
                "padding_free": random.choice(lengths, (MICRO_BATCHES, together)).sum(1),
            }
            for way, drawn in ways.items():
                tokens[way] += float(drawn.sum())
                seconds[way] += _step_seconds(network, drawn)
    speeds = {way: tokens[way] / seconds[way] for way in tokens}
    shown: dict[str, Any] = {way: round(speed) for way, speed in speeds.items()}
    ratio = round(speeds["packed"] / speeds["padding_free"], 3)
    print(json.dumps({"tokens_per_s": shown, "examples_together": together, "ratio": ratio}))


def _step_seconds(network: Network, tokens: np.ndarray) -> float:
    """The shortest of some steps of micro-batches with these tokens."""
    shares = tuple((tokens / MAX_LENGTH).tolist())
    times = [FORWARD_S], [2 * FORWARD_S]
    load = Load.of(STAGES, MICRO_BATCHES, *times, BYTES, lengths=shares)
    with Product(network, load) as product:
        limit_s = time_limit(load.profile(network, relayed=True), load, STEPS)
        seconds = product.run(Engine("auto"), STEPS, limit_s).seconds
    return min(seconds)


if __name__ == "__main__":
    run_program(main)
