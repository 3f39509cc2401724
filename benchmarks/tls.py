"""What TLS costs: whole steps with keys and without, in turn.

    python -m benchmarks.tls
    python -m benchmarks.tls --network loopback

Two clusters of the product, on networks of the same rate (1 Gbit/s). In one of them every process
has a key; in the other nothing is encrypted. They take rounds of steps in turn. Prints one JSON
object per case: `ratio` of the medians of all steps, `least_ratio` of the quickest ones, which what
else the machine does disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.checksum import figures
from benchmarks.machines import run_program
from benchmarks.network import RATES_BIT_S, Network, open_network
from benchmarks.pipeline import Engine, Product, time_limit
from benchmarks.stages import Llama, Load
from hetero_framework.core.tls import OFF
from hetero_framework.security.certificates import ensure_authority, issue_missing
from hetero_framework.security.keys import KeyDirectory

CASES = {
    "sleeping, 3 stages, 4.2 MB": Load.of(3, 8, [0.04], [0.08], 4_200_000),
    "llama, 3 stages, 1 MB": Load.computing(3, 4, Llama(3, 512, 512)),
    "sleeping, 3 stages, 0.1 MB": Load.of(3, 8, [0.01], [0.02], 100_000),
}


def compare(
    load: Load, networks: tuple[Network, Network], keys: Path, rounds: int, steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of all steps with keys, and of those without."""
    seconds: tuple[list[float], list[float]] = ([], [])
    one, other = networks
    with Product(one, load, keys=str(keys)) as keyed, Product(other, load) as plain:
        limit_s = 4 * time_limit(load.profile(one, relayed=False), load, steps)
        jobs = list(zip((keyed, plain), seconds, strict=True))
        for _ in range(rounds):
            for product, into in jobs:
                into += product.run(Engine("direct"), steps, limit_s).seconds
            jobs.reverse()  # whoever is second may gain from what the first has left in caches
    return seconds


def make_keys(folder: Path, workers: int) -> Path:
    """Keys of a coordinator and workers 1 and following."""
    keys = KeyDirectory(folder / "keys")
    ensure_authority(keys)
    issue_missing(keys, range(1, workers + 1))
    return keys.path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--network", choices=RATES_BIT_S, default="1gbit")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="of each cluster in a round")
    options = parser.parse_args()
    os.environ[OFF] = "off"
    for name, load in CASES.items():
        with (
            open_network(options.network, load.devices) as one,
            open_network(options.network, load.devices) as other,
            tempfile.TemporaryDirectory() as folder,
        ):
            keys = make_keys(Path(folder), load.devices)
            seconds = compare(load, (one, other), keys, options.rounds, options.steps)
        print(json.dumps({**figures(name, *seconds), "network": one.how}), flush=True)


if __name__ == "__main__":
    run_program(main)
