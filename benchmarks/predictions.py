"""The planner's predicted step beside the step that the product then takes.

    python -m benchmarks.predictions fleets --count 20
    python -m benchmarks.predictions cpu

`fleets`: random machines with ports of unlike speed, on which stages sleep as long as the profile
says. The plan is the planner's own, or equal shares; `planner.evaluate` predicts its step, and
`Cluster` with its workers takes it. `as_slept` is the same prediction from the times that the
stages really slept, which on a machine that does much else is longer than asked; `nic_shared` is
the share of the step in which a NIC has tensors of several edges or directions to carry: there the
simulator has them take turns, and they do not. `cpu`: a small Llama, computed, cut unevenly; the
prediction is from the times that its stages took in the same steps. Prints one JSON object per
case; `--save` keeps them all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import psutil

from benchmarks import environment
from benchmarks.machines import run_program
from benchmarks.network import DATA_SHARE, Network, open_network
from benchmarks.pipeline import Engine, Product, time_limit
from benchmarks.planner import split
from benchmarks.stages import Llama, Load
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.engine.schedule.tuning import tune
from hetero_framework.errors import HeteroError
from hetero_framework.extras.planner import FleetProfile, Result, evaluate, plan

MBIT = 1e6
GOAL = 0.05
_PORTS = (100 * MBIT, 200 * MBIT, 400 * MBIT)
_SHARED = 0.3
"""A NIC that is shared for longer than this part of the step is marked apart."""
_LATENCY_S = 0.0003  # of a hop without added delay: one process wakes another one
_STEPS = 3


@dataclass(frozen=True)
class PlannedLoad(Load):
    """Stages that sleep, one for each entry of a plan."""

    entries: tuple[dict[str, Any], ...] = ()
    wired: Profile | None = field(default=None, repr=False)

    @property
    def stages(self) -> int:
        return len(self.entries)

    def plan(self) -> list[dict[str, Any]]:
        return [dict(entry) for entry in self.entries]


@dataclass(frozen=True)
class Fleet:
    """One emulated fleet: its profile, its machines' ports, the delay of a round trip, its plan."""

    profile: FleetProfile
    ports_bit_s: tuple[float, ...]
    delay_s: float
    planned: str

    def result(self) -> Result:
        """The plan, and what it is predicted to take."""
        if self.planned == "best":
            return plan(self.profile)
        ones = [1.0] * len(self.profile.devices)
        return evaluate(self.profile, split(self.profile, ones))

    def load(self, found: Result) -> PlannedLoad:
        """The stages of its plan."""
        return PlannedLoad(
            devices=len(self.profile.devices),
            micro_batches=self.profile.micro_batches,
            forward_s=found.pipeline.forward_s,
            backward_s=found.pipeline.backward_s,
            activation_bytes=int(self.profile.activation_bytes),
            entries=tuple(dict(entry) for entry in found.shard_plan),
            wired=found.pipeline,
        )


def random_fleet(number: int) -> Fleet:
    """Fleet `number`: two to five machines up to four times as fast as each other. Every second one
    has links between workers, every third a delay, every fourth is cut into equal shares."""
    draw = random.Random(number)
    n, m = draw.randint(2, 5), draw.choice([6, 8])
    layers = draw.randint(3 * n, 6 * n)
    direct, delay_s = number % 2 == 1, (0.0, 0.0, 0.008)[number % 3]
    ports = tuple(draw.choice(_PORTS) for _ in range(n))
    nbytes = 2048 * round(draw.choice([1e6, 2.5e6, 5e6]) / 2048)
    mean_s = 0.5 * n / layers  # of a layer, both ways: a stage of its share takes half a second
    devices = []
    for k in range(n):
        forward_s = mean_s / 3 * 4 ** draw.uniform(-0.5, 0.5)
        devices.append(
            {
                "id": k or "local",
                "memory_bytes": 1e12,
                "layer_forward_s": forward_s,
                "layer_backward_s": 2 * forward_s,
                "embedding_forward_s": 0.3 * forward_s,
                "head_forward_s": forward_s,
                "head_backward_s": 2 * forward_s,
            }
        )
    ids = [device["id"] for device in devices]
    links = []
    for a, one in enumerate(ids):
        for b, other in enumerate(ids):
            if a != b and (direct or 0 in (a, b)):
                speed = min(ports[a], ports[b]) / 8 * DATA_SHARE
                latency_s = _LATENCY_S + delay_s / 2
                links.append(
                    {"from": one, "to": other, "bytes_per_s": speed, "latency_s": latency_s}
                )
    profile = FleetProfile.from_dict(
        {
            "version": 1,
            "layers": layers,
            "micro_batches": m,
            "activation_bytes": nbytes,
            "gradient_bytes": nbytes,
            "devices": devices,
            "links": links,
        }
    )
    return Fleet(profile, ports, delay_s, "equal" if number % 4 == 3 else "best")


def shared(profile: Profile, micro_batches: int, step_s: float) -> float:
    """The largest share of the step in which a NIC is busy with the tensors of several edges or
    directions: flows that run at once there, while the simulator has them take turns."""
    busy: dict[Any, list[float]] = {}
    for k, edge in enumerate(profile.edges):
        for kind, seconds in (("forward", edge.forward_s), ("backward", edge.backward_s)):
            for nic in profile.nics(k, kind) if seconds else ():
                busy.setdefault(nic, []).append(micro_batches * seconds)
    return max((sum(own) / step_s for own in busy.values() if len(own) > 1), default=0.0)


def measured(network: Network, load: PlannedLoad, steps: int) -> tuple[list[float], Profile]:
    """Seconds of each step, and the profile by what the stages really slept."""
    with Product(network, load) as product:
        limit_s = time_limit(load.wired or Profile.of([], []), load, steps)
        samples = product.run(Engine("auto"), steps, limit_s)
    tasks = steps * load.micro_batches
    assert load.wired is not None
    taken = Profile(
        tuple(s / tasks for s in samples.forward_s),
        tuple(s / tasks for s in samples.backward_s),
        load.wired.devices,
        load.wired.edges,
    )
    return samples.seconds, taken


def fleet_case(number: int, steps: int = _STEPS) -> dict[str, Any]:
    """One fleet: its plan, its predicted and its measured step."""
    fleet = random_fleet(number)
    found = fleet.result()
    load = fleet.load(found)
    m, stolen = fleet.profile.micro_batches, environment.Stolen()
    with open_network(
        "1gbit", load.devices, delay_s=fleet.delay_s, ports_bit_s=fleet.ports_bit_s
    ) as network:
        seconds, taken = measured(network, load, steps)
    step_s = statistics.median(seconds)
    slept = tune(taken, m, max_in_flight=found.max_in_flight).forecast.seconds
    return {
        "fleet": number,
        "devices": load.devices,
        "stages": load.stages,
        "micro_batches": m,
        "ports_mbit_s": [round(port / MBIT) for port in fleet.ports_bit_s],
        "delay_ms": fleet.delay_s * 1e3,
        "tensor_bytes": load.activation_bytes,
        "planned": fleet.planned,
        "plan": load.plan(),
        "max_in_flight": found.max_in_flight,
        "predicted_s": round(found.predicted_step_s, 4),
        "measured_s": round(step_s, 4),
        "measured_min_max_s": [round(min(seconds), 4), round(max(seconds), 4)],
        "error": round(found.predicted_step_s / step_s - 1, 4),
        "predicted_as_slept_s": round(slept, 4),
        "error_as_slept": round(slept / step_s - 1, 4),
        "nic_shared": round(shared(found.pipeline, m, found.predicted_step_s), 3),
        "load_average": round(psutil.getloadavg()[0], 2),
        "stolen_share": stolen.share(),
    }


# -- stages that compute --------------------------------------------------------------------------

_CUTS = ((1, 3), (3, 1), (2, 2), (1, 2, 1))
"""Layers of each stage."""


def cpu_case(cut: Sequence[int], steps: int, micro_batches: int = 6) -> dict[str, Any]:
    """A small Llama with so many layers on each of a few processes."""
    llama = Llama(sum(cut), hidden_size=256, tokens=256)
    bounds = [0, *accumulate(cut)]
    entries = tuple(
        {"id": k or "local", "start": start, "end": end}
        for k, (start, end) in enumerate(pairwise(bounds))
    )
    load = PlannedLoad(
        devices=len(cut),
        micro_batches=micro_batches,
        forward_s=(0.0,) * len(cut),
        backward_s=(0.0,) * len(cut),
        activation_bytes=llama.activation_bytes,
        llama=llama,
        entries=entries,
        wired=Profile.of([0.0] * len(cut), [0.0] * len(cut)),
    )
    stolen = environment.Stolen()
    with open_network("loopback", load.devices) as network:
        seconds, taken = measured(network, load, steps)
    step_s, predicted_s = statistics.median(seconds), tune(taken, micro_batches).forecast.seconds
    return {
        "layers": list(cut),
        "micro_batches": micro_batches,
        "stage_s": [
            round(f + b, 4) for f, b in zip(taken.forward_s, taken.backward_s, strict=True)
        ],
        "predicted_s": round(predicted_s, 4),
        "measured_s": round(step_s, 4),
        "measured_min_max_s": [round(min(seconds), 4), round(max(seconds), 4)],
        "error": round(predicted_s / step_s - 1, 4),
        "load_average": round(psutil.getloadavg()[0], 2),
        "stolen_share": stolen.share(),
    }


def cpu(steps: int) -> dict[str, Any]:
    rows = []
    for cut in _CUTS:
        rows.append(cpu_case(cut, steps))
        show(rows[-1])
    return {"rows": rows, "errors": errors([row["error"] for row in rows])}


def errors(found: Sequence[float]) -> dict[str, Any]:
    """Of some cases: how far predictions are off."""
    if not found:
        return {"cases": 0}
    sizes = [abs(error) for error in found]
    return {
        "cases": len(sizes),
        "within_5_percent": sum(size <= GOAL for size in sizes),
        "median": round(statistics.median(sizes), 4),
        "most": round(max(sizes), 4),
    }


def show(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def fleets(numbers: Sequence[int], steps: int, at_once: int) -> dict[str, Any]:
    """Some at once: stages that sleep leave each other the processor."""

    def one(number: int) -> dict[str, Any]:
        try:
            row = fleet_case(number, steps)
        except HeteroError as error:
            row = {"fleet": number, "failed": error.message}
        show(row)
        return row

    with ThreadPoolExecutor(at_once) as pool:
        rows = list(pool.map(one, numbers))
    done = [row for row in rows if "failed" not in row]
    alone = [row for row in done if row["nic_shared"] <= _SHARED]
    return {
        "rows": rows,
        "nics_alone": errors([row["error_as_slept"] for row in alone]),
        "nics_shared": errors([r["error_as_slept"] for r in done if r not in alone]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("fleets", "cpu"))
    parser.add_argument("--count", type=int, default=20, help="fleets")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the fleets")
    parser.add_argument("--steps", type=int, default=_STEPS, help="measured in each case")
    parser.add_argument("--at-once", type=int, default=4, help="fleets that run beside each other")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    numbers = options.only if options.only is not None else range(options.count)
    if options.what == "cpu":
        result = cpu(options.steps)
    else:
        result = fleets(numbers, options.steps, options.at_once)
    if options.save:
        saved = {"benchmark": "predictions", **result, "environment": environment.describe()}
        print(f"saved {environment.save(f'predictions-{options.what}', saved)}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
