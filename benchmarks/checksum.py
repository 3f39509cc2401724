"""What the checksum behind every frame costs: whole steps with it and without, in turn.

    python -m benchmarks.checksum

Two clusters of the product stand on the loopback. In one of them nothing is hashed: the checksum of
every frame is eight zeros. They take rounds of steps in turn, and the ratio is the median of what
neighbouring rounds give. Prints one JSON object per case.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from benchmarks.machines import run_program
from benchmarks.network import Network, open_network
from benchmarks.pipeline import Engine, Product, time_limit
from benchmarks.stages import Llama, Load

CASES = {
    "llama, 2 stages, 0.26 MB": Load.computing(2, 8, Llama(4, 256, 256)),
    "llama, 3 stages, 2.1 MB": Load.computing(3, 4, Llama(3, 512, 1024)),
    "sleeping, 4 stages, 8.4 MB": Load.of(4, 8, [0.02], [0.04], 8_400_000),
}


def compare(load: Load, network: Network, others: Network, rounds: int, steps: int) -> list[float]:
    """For each round: seconds of a step with checksums, as a share of those without."""
    ratios = []
    with Product(network, load) as with_it, Product(others, load, checked=False) as without:
        limit_s = 2 * time_limit(load.profile(network, relayed=True), load, steps)
        for number in range(rounds):
            seconds = {}
            # Whoever is second may gain from what the first has left in caches.
            for product in (with_it, without) if number % 2 else (without, with_it):
                taken = product.run(Engine(), steps, limit_s).seconds
                seconds[product] = statistics.median(taken)
            ratios.append(seconds[with_it] / seconds[without])
    return ratios


def figures(name: str, ratios: list[float]) -> dict[str, Any]:
    return {
        "case": name,
        "ratio": round(statistics.median(ratios), 4),
        "rounds": [round(ratio, 4) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of each cluster in a round")
    options = parser.parse_args()
    for name, load in CASES.items():
        with (
            open_network("loopback", load.devices) as network,
            open_network("loopback", load.devices) as others,
        ):
            ratios = compare(load, network, others, options.rounds, options.steps)
        print(json.dumps(figures(name, ratios)), flush=True)


if __name__ == "__main__":
    run_program(main)
