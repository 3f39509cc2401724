"""What the checksum behind every frame costs: whole steps with it and without, in turn.

    python -m benchmarks.checksum

Two clusters of the product stand on the loopback. In one of them nothing is hashed: the checksum of
every frame is eight zeros. They take rounds of steps in turn. Prints one JSON object per case:
`ratio` of the medians of all steps, `least_ratio` of the quickest ones, which what else the machine
does disturbs less.
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
    "llama, 3 stages, 1 MB": Load.computing(3, 4, Llama(3, 512, 512)),
    "sleeping, 4 stages, 8.4 MB": Load.of(4, 8, [0.02], [0.04], 8_400_000),
}


def compare(
    load: Load, network: Network, others: Network, rounds: int, steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of all steps with checksums, and of those without."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with Product(network, load) as with_it, Product(others, load, checked=False) as without:
        limit_s = 2 * time_limit(load.profile(network, relayed=True), load, steps)
        jobs = list(zip((with_it, without), seconds, strict=True))
        for _ in range(rounds):
            for product, into in jobs:
                into += product.run(Engine(), steps, limit_s).seconds
            jobs.reverse()  # whoever is second may gain from what the first has left in caches
    return seconds


def figures(name: str, seconds: list[float], without: list[float]) -> dict[str, Any]:
    median, least = statistics.median, min
    return {
        "case": name,
        "step_s": round(median(seconds), 4),
        "ratio": round(median(seconds) / median(without), 4),
        "least_ratio": round(least(seconds) / least(without), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="of each cluster in a round")
    options = parser.parse_args()
    for name, load in CASES.items():
        with (
            open_network("loopback", load.devices) as network,
            open_network("loopback", load.devices) as others,
        ):
            seconds = compare(load, network, others, options.rounds, options.steps)
        print(json.dumps(figures(name, *seconds)), flush=True)


if __name__ == "__main__":
    run_program(main)
