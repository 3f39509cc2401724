"""The planner on paper: against exhaustive search, simple rules, published measurements, and large.

    python -m benchmarks.planner exhaustive --instances 300
    python -m benchmarks.planner large
    python -m benchmarks.planner splits --instances 100
    python -m benchmarks.planner vtrain
    python -m benchmarks.planner paper
    python -m benchmarks.planner estimates

`exhaustive`: the planned step beside the best of all plans with one stage per device (every subset,
order, cut, checkpointing and way of the boundaries), by the same simulator; memory is tight in
every second instance. `large`: 80 layers on 16 devices, links of three speeds. `splits`: equal
shares and shares in proportion to memory beside the plan, as shares of the fleet's aggregate speed.
`vtrain`: three numbers for each hidden size and micro-batch (seconds of a layer, of the head, and
of a step besides), fitted on measured two-stage pipelines; the four-stage ones are predicted.
`paper`: 64 and 1,000 devices, what the coordinator's network then carries, and islands.
`estimates`: plans of fleets of known devices beside those that the estimate before the fit would
choose, both judged by the present one; prints a line for each. Seconds are of the processor. Prints
one JSON object; `--save` keeps it under results/.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe, save
from benchmarks.fleets import GIGABIT, estimated_fleet, random_fleet, seconds_before
from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.simulator import simulate
from hetero_framework.errors import PlanError
from hetero_framework.extras.planner import FleetProfile, Result, evaluate, plan
from hetero_framework.extras.planner.known_devices import KnownDevice
from hetero_framework.extras.planner.layout import Fleet, Layout, Part, evaluated
from hetero_framework.extras.planner.planning import ALLOWED

VTRAIN = Path(__file__).parent / "data" / "vtrain_pipeline.json"
_FORWARD = 1 / 3  # of a layer's seconds
_REACHED = 0.95  # of the aggregate speed; fill, drain, whole layers and memory keep some below it
_NO_CHUNKS = ALLOWED - {"chunks"}


def timed_plan(profile: FleetProfile, **options: Any) -> tuple[Result | None, float]:
    """A plan and the processor's seconds that it took; None where nothing fits."""
    began = time.process_time()
    try:
        found = plan(profile, **options)
    except PlanError:
        found = None
    return found, time.process_time() - began


# -- exhaustive search --------------------------------------------------------------------------


def all_layouts(fleet: Fleet, most_s: float) -> Iterator[Layout]:
    """Every layout with one stage per device in which no stage's own work takes `most_s`."""
    m, layers = fleet.micro_batches, fleet.layers

    def work_s(d: int, start: int, end: int) -> float:
        costs = fleet.costs[d]
        both = (costs.forward_s, costs.backward_s)
        return m * sum(sums[end] - sums[start] for sums in both)

    def cuts(parts: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[tuple[int, int, int], ...]]:
        start, used = (parts[-1][2], {d for d, *_ in parts}) if parts else (0, set())
        if parts and start == layers:
            yield parts
        for d in range(len(fleet.costs)) if parts else (0,):
            first = start if d == 0 or start == layers else start + 1
            for end in range(first, layers + 1) if d not in used else ():
                if work_s(d, start, end) >= most_s:
                    break
                if parts and start == layers and parts[-1][1] == parts[-1][2] and len(parts) > 1:
                    break  # a head on its own comes once
                yield from cuts((*parts, (d, start, end)))

    for cut in cuts(()):
        plain = tuple(Part(*where) for where in cut)
        # Computing again, and the relay beside a link that is as quick, only cost time.
        again = [(False, True)[: 1 + fleet.is_short_of_memory(part)] for part in plain]
        ways = [_ways(fleet, a, b) for a, b in pairwise(plain)]
        for recompute, direct in product(product(*again), product((False,), *ways)):
            chosen = zip(plain, recompute, direct, strict=True)
            parts = tuple(p._replace(recompute=on, direct=way) for p, on, way in chosen)
            if all(part.end > part.start or not part.recompute for part in parts):
                yield parts


def _ways(fleet: Fleet, before: Part, part: Part) -> tuple[bool, ...]:
    """Whether a boundary may be crossed directly, through the coordinator, or is better direct."""
    a, b = before.device, part.device
    if not fleet.can_go_direct(a, b):
        return (False,)
    direct, relayed = (fleet.edge(a, b, part.start, way) for way in (True, False))
    return (True,) if direct.forward_s <= relayed.forward_s else (False, True)


def best_of_all(fleet: Fleet, most_s: float) -> tuple[float, int]:
    """The least predicted step below `most_s` of all layouts with one stage per device, and how
    many of them could have been it."""
    m, best, looked_at = fleet.micro_batches, most_s, 0
    candidates = []
    for layout in all_layouts(fleet, most_s):
        limits = fleet.memory_limits(layout)
        if limits is not None:
            bound = step_bound(fleet.pipeline(layout), m, limits)
            if bound < most_s:
                candidates.append((bound, layout, limits))
    for bound, layout, limits in sorted(candidates, key=lambda entry: entry[0]):
        if bound >= best:
            break
        looked_at += 1
        profile, p = fleet.pipeline(layout), len(layout)
        sizes = {min(m, 2 * p), min(m, 3 * p), m}
        quick = min(simulate(profile, m, size, in_flight_limits=limits).seconds for size in sizes)
        if quick < 1.1 * best:  # else no schedule that the product tries is better
            found = evaluated(fleet, layout)
            assert found is not None
            best = min(best, found.seconds)
    return best, looked_at


def instance(seed: int, most_devices: int = 5) -> dict[str, Any]:
    """A random fleet, with little memory where the seed is odd: its plan beside the best of all."""
    draw, tight = random.Random(seed), seed % 2 == 1
    n = draw.randint(2, most_devices)
    most_layers = {2: 24, 3: 24, 4: 14 if tight else 24, 5: 8 if tight else 16}[n]
    layers, m = draw.randint(4, most_layers), draw.choice([4, 8, 16])
    speeds = [1.2e8, 1.2e9]
    profile = random_fleet(draw, n, layers, m, tight=tight, speeds=speeds, direct=0.7, layer_s=0.01)
    row: dict[str, Any] = {"devices": n, "layers": layers, "micro_batches": m, "tight": tight}
    found, taken = timed_plan(profile)
    simple, _ = timed_plan(profile, allow=_NO_CHUNKS)
    if found is None or simple is None:
        return row
    began = time.process_time()
    best, looked_at = best_of_all(Fleet(profile), simple.predicted_step_s)
    return {
        **row,
        "fits": all(use.free_bytes >= 0 for use in (*found.devices, *simple.devices)),
        "ratio": best / found.predicted_step_s,
        "ratio_one_stage": best / simple.predicted_step_s,
        "seconds": taken,
        "looked_at": looked_at,
        "exhaustive_seconds": time.process_time() - began,
    }


def exhaustive(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The plans of random instances beside the best of all: with interleaving (`ratio`, above 1
    where that is faster) and without, as the search of all is (`ratio_one_stage`)."""
    judged = [row for row in rows if "ratio" in row]
    found: dict[str, Any] = {
        "instances": len(rows),
        "nothing_fits": len(rows) - len(judged),
        "all_fit": all(row["fits"] for row in judged),
        "seconds_median": statistics.median(row["seconds"] for row in judged),
        "seconds_most": max(row["seconds"] for row in judged),
    }
    for name in ("ratio", "ratio_one_stage"):
        ratios = [row[name] for row in judged]
        found[name] = {
            "least": min(ratios),
            "median": statistics.median(ratios),
            "below_0.999": sum(ratio < 0.999 for ratio in ratios),
        }
    return {**found, "rows": list(rows)}


# -- large ----------------------------------------------------------------------------------------


def large(
    instances: int, *, layers: int = 80, devices: int = 16, micro_batches: Sequence[int] = (32, 64)
) -> dict[str, Any]:
    """Time and step on many devices, for links of 0.1, 1 and 10 Gbit/s, with memory to spare and
    without, interleaved and not."""
    rows = []
    for number in range(instances):
        for speed in (GIGABIT / 10, GIGABIT, 10 * GIGABIT):
            draw = random.Random(number)
            profile = random_fleet(
                draw, devices, layers, micro_batches[number % len(micro_batches)],
                tight=number % 4 == 3, speeds=[speed],
            )  # fmt: skip
            for chunks in (False, True):
                allow = ALLOWED if chunks else _NO_CHUNKS
                found, taken = timed_plan(profile, allow=allow)
                if found is None:
                    continue
                rows.append(
                    {
                        "bytes_per_s": speed,
                        "micro_batches": profile.micro_batches,
                        "tight": number % 4 == 3,
                        "chunks": chunks,
                        "step_s": found.predicted_step_s,
                        "stages": len(found.shard_plan),
                        "seconds": taken,
                    }
                )
    return {
        "seconds_median": statistics.median(row["seconds"] for row in rows),
        "seconds_most": max(row["seconds"] for row in rows),
        "rows": rows,
    }


# -- simple rules ---------------------------------------------------------------------------------


def split(profile: FleetProfile, weights: Sequence[float]) -> list[dict[str, Any]]:
    """A plan of all devices in their order, with layers in proportion to `weights`."""
    total, entries, start, upto = sum(weights), [], 0, 0.0
    for k, device in enumerate(profile.devices):
        upto += weights[k]
        end = round(profile.layers * upto / total)
        if end > start or k in (0, len(profile.devices) - 1):
            entries.append({"id": device.id, "start": start, "end": max(start, end)})
        start = max(start, end)
    return entries


def _split_layout(fleet: Fleet, weights: Sequence[float], recompute: bool) -> Layout:
    """Where all stages compute again or none does, each boundary direct if it can be."""
    parts: list[Part] = []
    for entry in split(fleet.profile, weights):
        d, start, end = fleet.ids.index(entry["id"]), entry["start"], entry["end"]
        direct = bool(parts) and fleet.can_go_direct(parts[-1].device, d)
        parts.append(Part(d, start, end, recompute and end > start, direct))
    return tuple(parts)


def splits(instances: int, seed: int = 0) -> dict[str, Any]:
    """The step of simple rules and of the plan, as shares of the fleet's aggregate speed: the sum
    of what the devices would do alone, if they had the memory."""
    shares: dict[str, list[float]] = defaultdict(list)
    for number in range(instances):
        draw = random.Random(seed + number)
        n = draw.randint(2, 4)
        profile = random_fleet(
            draw, n, 32, 32, tight=number % 2 == 1, unlike=8.0, speeds=[10 * GIGABIT], layer_s=0.02
        )
        found, _ = timed_plan(profile)
        if found is None:
            continue
        fleet = Fleet(profile)
        alone = []
        for d in range(n):
            whole = fleet.pipeline((Part(d, 0, fleet.layers),))
            alone.append(fleet.micro_batches * (whole.forward_s[0] + whole.backward_s[0]))
        aggregate_s = 1 / sum(1 / seconds for seconds in alone)
        shares["plan"].append(aggregate_s / found.predicted_step_s)
        rules = {
            "equal": [1.0] * n,
            "memory": [device.memory_bytes for device in profile.devices],
        }
        for name, weights in rules.items():
            steps = [
                one.seconds
                for recompute in (False, True)
                if (one := evaluated(fleet, _split_layout(fleet, weights, recompute))) is not None
            ]
            shares[name].append(aggregate_s / min(steps) if steps else 0.0)
    return {
        "instances": len(shares["plan"]),
        **{
            name: {
                "fleets": len(found),
                "mean": statistics.fmean(found),
                "least": min(found),
                "reach_0.95": sum(value >= _REACHED for value in found),
                "does_not_fit": sum(value == 0 for value in found),
            }
            for name, found in shares.items()
        },
    }


# -- published measurements -----------------------------------------------------------------------


def vtrain() -> dict[str, Any]:
    """Errors of the predicted four-stage iterations."""
    table = json.loads(VTRAIN.read_text(encoding="utf-8"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    errors = []
    for hidden, size in sorted({(row["hidden"], row["micro_batch"]) for row in rows}):
        own = [r for r in rows if (r["hidden"], r["micro_batch"]) == (hidden, size)]
        layer_ms, head_ms, besides_ms = fitted([row for row in own if row["stages"] == 2])
        for row in own:
            if row["stages"] == 4:
                predicted = besides_ms + 1e3 * pipeline_s(row, layer_ms / 1e3, head_ms / 1e3)
                errors.append(predicted / row["iteration_ms"] - 1)
    return {
        "source": table["source"],
        "predicted": len(errors),
        "mean_error": statistics.fmean(map(abs, errors)),
        "worst_error": max(map(abs, errors)),
    }


def fitted(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Milliseconds of a layer, of the head, and of a step besides, from two equal stages, of which
    that with the head is the slower one: m (L/2 layer + head) + L/2 layer + besides."""
    equations, ones = [], []
    for row in rows:
        m, half, measured = row["micro_batches"], row["layers"] / 2, row["iteration_ms"]
        equations.append([(m + 1) * half / measured, m / measured, 1 / measured])
        ones.append(1.0)
    solution, *_ = np.linalg.lstsq(np.array(equations), np.array(ones), rcond=None)
    return [float(value) for value in solution]


def pipeline_s(row: dict[str, Any], layer_s: float, head_s: float) -> float:
    """The step of equal stages, by the planner's own evaluation."""
    p = row["stages"]
    device = {
        "memory_bytes": 1e12,
        "layer_forward_s": _FORWARD * layer_s,
        "layer_backward_s": (1 - _FORWARD) * layer_s,
        "head_forward_s": _FORWARD * head_s,
        "head_backward_s": (1 - _FORWARD) * head_s,
    }
    ids = ["local", *range(1, p)]
    links = [{"from": a, "to": b, "bytes_per_s": 1e12} for a in ids for b in ids if a != b]
    profile = FleetProfile.from_dict(
        {
            "version": 1,
            "layers": row["layers"],
            "micro_batches": row["micro_batches"],
            "devices": [{"id": d, **device} for d in ids],
            "links": links,
        }
    )
    return evaluate(profile, split(profile, [1.0] * p)).predicted_step_s


# -- on paper -------------------------------------------------------------------------------------

_LAYERS, _MICRO_BATCHES = 128, 128
_ISLAND = 16
_SAMPLED_ISLANDS = 4
_STEPS_BETWEEN = 100
_WEIGHTS = 0.25  # of a layer's bytes, the rest is gradients and the optimizer's


def paper(sizes: Sequence[int] = (64, 1000)) -> dict[str, Any]:
    """Fleets of devices of four kinds: with links of their own (at 1,000 for 2 % of the pairs), as
    a star, and as islands."""
    rows: list[dict[str, Any]] = []
    for devices in sizes:
        for direct in (1.0 if devices < 100 else 0.02, 0.0):
            profile = random_fleet(
                random.Random(devices), devices, _LAYERS, _MICRO_BATCHES, kinds=4, direct=direct,
                speeds=[10 * GIGABIT],
            )  # fmt: skip
            found, taken = timed_plan(profile, allow=_NO_CHUNKS)
            assert found is not None
            relayed = sum(entry.get("links") == "relay" for entry in found.shard_plan)
            tensors = profile.activation_bytes + profile.gradient_bytes
            carried_s = _MICRO_BATCHES * relayed * tensors / (10 * GIGABIT)
            rows.append(
                {
                    "devices": devices,
                    "star": direct == 0.0,
                    "used": len(found.devices),
                    "step_s": found.predicted_step_s,
                    "seconds": taken,
                    "micro_batches_per_s": _MICRO_BATCHES / found.predicted_step_s,
                    "coordinator_network_share": carried_s / found.predicted_step_s,
                }
            )
            if direct == 0.0:
                rows.append(islands(profile))
    return {"rows": rows}


def islands(profile: FleetProfile) -> dict[str, Any]:
    """A star cut into islands of 16 devices, each a star around its first one, which all train the
    model and every 100 steps send their weights to the coordinator and take the mean back. A few
    islands are planned; the others are taken to be as fast as their mean."""
    count = len(profile.devices) // _ISLAND
    rates, steps, taken = [], [], 0.0
    for number in range(_SAMPLED_ISLANDS):
        found, seconds = timed_plan(island(profile, number), allow=_NO_CHUNKS)
        assert found is not None
        taken += seconds
        steps.append(found.predicted_step_s)
        rates.append(_MICRO_BATCHES / found.predicted_step_s)
    weights = profile.layers * _WEIGHTS * profile.devices[0].layer_bytes[0]
    # The coordinator's NIC carries all islands' weights, in and out at the same time.
    sync_s = (count - 1) * weights / (10 * GIGABIT)
    round_s = _STEPS_BETWEEN * statistics.fmean(steps)
    return {
        "devices": len(profile.devices),
        "islands": count,
        "step_s": statistics.fmean(steps),
        "sync_s": sync_s,
        "micro_batches_per_s": count * statistics.fmean(rates) * round_s / (round_s + sync_s),
        "seconds_each": taken / _SAMPLED_ISLANDS,
    }


def island(profile: FleetProfile, number: int) -> FleetProfile:
    """So many devices of a star, around the first of them."""
    devices = [
        device.model_copy(update={"id": k or "local"})
        for k, device in enumerate(profile.devices[number * _ISLAND : (number + 1) * _ISLAND])
    ]
    return profile.model_copy(
        update={
            "devices": tuple(devices),
            "links": tuple(link for link in profile.links if {link.sender, link.receiver} <= _STAR),
        }
    )


_STAR = {"local", *range(1, _ISLAND)}


# -- estimates ------------------------------------------------------------------------------------


def estimates(instances: int, seed: int = 0) -> dict[str, Any]:
    """Steps of the present estimate's plans over those of the estimate before, by the present
    estimate: above 1 the plan got worse. A fleet that nothing fits is drawn anew."""
    rows: list[dict[str, Any]] = []
    while len(rows) < instances:
        draw = random.Random(seed)
        now, before = estimated_fleet(draw, [KnownDevice.seconds, seconds_before])
        (found, taken), (old, _) = timed_plan(now), timed_plan(before)
        if found is not None and old is not None:
            judged = evaluate(now, old.shard_plan)
            ratio = found.predicted_step_s / judged.predicted_step_s
            rows.append({"seed": seed, "ratio": ratio, "step_s": found.predicted_step_s})
            print(
                f"seed {seed}: {_shape(found)}, before {_shape(old)}: {ratio:.4f}, {taken:.1f} s",
                flush=True,
            )
        seed += 1
    ratios = [row["ratio"] for row in rows]
    worse = sum(ratio > 1 + 1e-9 for ratio in ratios)  # equal plans differ by rounding
    return {"worst": max(ratios), "mean": statistics.fmean(ratios), "worse": worse, "rows": rows}


def _shape(found: Result) -> str:
    """A plan in a word: layers of each stage and its process, r where it recomputes."""
    stages = [
        f"{entry['end'] - entry['start']}@{entry['id']}" + "r" * ("gradient_checkpointing" in entry)
        for entry in found.shard_plan
    ]
    return "+".join(stages)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    programs = ("exhaustive", "large", "splits", "vtrain", "paper", "estimates")
    parser.add_argument("what", choices=programs)
    parser.add_argument(
        "--instances", type=int, help="default: 300; large 4, splits 50, estimates 40"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(argv)
    count = options.instances or {"large": 4, "splits": 50, "estimates": 40}.get(options.what, 300)
    chosen: dict[str, Callable[[], dict[str, Any]]] = {
        "exhaustive": lambda: exhaustive(
            [instance(options.seed + number) for number in range(count)]
        ),
        "large": lambda: large(count),
        "splits": lambda: splits(count, options.seed),
        "vtrain": vtrain,
        "paper": paper,
        "estimates": lambda: estimates(count, options.seed),
    }
    result = {**describe(), "what": options.what, **chosen[options.what]()}
    if options.save:
        save(f"planner-{options.what}", result)
    result.pop("rows", None) if options.what in ("exhaustive", "estimates") else None
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
