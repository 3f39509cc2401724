"""What copying the trained state to the coordinator costs: steps with it and without, in turn.

    python -m benchmarks.replication
    python -m benchmarks.replication --network loopback

One run of the product, on a network of 1 Gbit/s: rounds of steps after which the state is copied
as often as training does it by itself (`DurableSteps`), then rounds of steps without. A round with
copies lasts until the last of them is there. Prints one JSON object per case: K (`every_steps`),
the seconds of a copy when nothing else happens, and `ratio`, the time of all steps with copies over
that of those without.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.machines import run_program
from benchmarks.network import RATES_BIT_S, Network, open_network
from benchmarks.pipeline import Engine, Product, access, run_step
from benchmarks.stages import Load
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.config import Config
from hetero_framework.core.frames import DEFAULT_MAX_FRAME_BYTES
from hetero_framework.trainer.durable import DurableSteps
from hetero_framework.trainer.train_state import TrainState

CASES = {
    f"3 stages, 1 MB, state {size} MB each": replace(
        Load.of(3, 8, [0.02], [0.04], 1_000_000), state_bytes=size * 1_000_000
    )
    for size in (4, 16)
}
ROUNDS = 2
COPIES = 4
"""So many copies are begun in a round."""
WARM_UP_STEPS = 6
LIMIT_S = 600.0


@dataclass
class Taken:
    """Seconds of steps with copies and without, as many of each."""

    every_steps: int
    copy_s: float
    steps: int = 0
    with_s: float = 0.0
    without_s: float = 0.0


def lead(connection: Connection, load: Load, *_: Any) -> None:
    """The coordinator's process."""
    raw, _steps, _leak = connection.recv()
    with tempfile.TemporaryDirectory() as folder:
        config = Config.from_dict(raw).with_changes(training={"output_dir": folder})
        with Cluster(
            config,
            max_frame_bytes=DEFAULT_MAX_FRAME_BYTES,
            build=load.build,
            access=access(config, "local", None),
        ) as cluster:
            cluster.start()
            cluster.assemble(config)
            connection.send(measure(cluster, config, load))


def measure(cluster: Cluster, config: Config, load: Load) -> Taken:
    """Rounds in turn, in one run."""
    durable = DurableSteps(config, cluster, lambda state, values: {})
    batches, state = load.batches(), TrainState()

    def step(copies: bool) -> None:
        nonlocal state
        began = time.perf_counter()
        run_step(cluster, state.step, batches)
        state = replace(state, step=state.step + 1)
        if copies:
            seconds = time.perf_counter() - began
            cluster.retrying(lambda: durable.after_step(state, seconds))

    for _ in range(WARM_UP_STEPS):
        step(copies=True)
    settle(cluster)
    taken = Taken(durable.interval(), durable.copy_s or 0.0)
    for number in range(2 * ROUNDS):
        copies = number % 2 == 0
        steps = COPIES * taken.every_steps
        began = time.perf_counter()
        for _ in range(steps):
            step(copies)
        settle(cluster)
        seconds = time.perf_counter() - began
        if copies:
            taken.with_s += seconds
            taken.steps += steps
        else:
            taken.without_s += seconds
    durable.remove()
    assert durable.newest is not None
    return taken


def settle(cluster: Cluster) -> None:
    """Until nothing is under way any more."""
    cluster.pipeline.drain_commits()
    cluster.retrying(cluster.pipeline.finish_snapshot)


def figures(name: str, network: Network, load: Load) -> dict[str, Any]:
    with Product(network, load, lead=lead) as product:
        taken = product.run(Engine("direct"), 0, LIMIT_S)
    assert isinstance(taken, Taken)
    return {
        "case": name,
        "every_steps": taken.every_steps,
        "copy_s": round(taken.copy_s, 3),
        "steps": taken.steps,
        "step_s": round(taken.without_s / taken.steps, 4),
        "ratio": round(taken.with_s / taken.without_s, 4),
        "network": network.how,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--network", choices=RATES_BIT_S, default="1gbit")
    options = parser.parse_args()
    for name, load in CASES.items():
        with open_network(options.network, load.devices) as network:
            print(json.dumps(figures(name, network, load)), flush=True)


if __name__ == "__main__":
    run_program(main)
