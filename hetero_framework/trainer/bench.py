"""What a user's own machines do: links, seconds per layer, and the step that follows from them.

Everything is measured with the configured model, data and plan, over the processes and links that
training would use. Steps are computed and then forgotten: no weight changes and nothing is written.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

from hetero_framework.config import Config, StageSpec
from hetero_framework.trainer import preparation, probe
from hetero_framework.trainer.cluster import Cluster
from hetero_framework.trainer.optimizer import check_optimizer
from hetero_framework.trainer.pipeline import StageStatistics
from hetero_framework.trainer.schedule import Profile, step_bound, tune

Note = Callable[[str], None]


def bench(config: Config, *, steps: int = 4, nbytes: int = 8 << 20, note: Note) -> dict[str, Any]:
    """Measure the machines of `config`; JSON types, times in seconds and sizes in bytes.

    `steps` training steps are computed (at least two; the first does not count), messages of
    `nbytes` measure the links. Raises what `train` raises before its first step.
    """
    config.require("model", "data")
    check_optimizer(config.training)
    with tempfile.TemporaryDirectory(prefix="hetero-bench-") as folder:
        # The workers' logs go there; output_dir stays as it is.
        parts = preparation.prepare(preparation.with_training(config, output_dir=folder), note)
        with Cluster(parts.config, max_frame_bytes=parts.max_frame_bytes, note=note) as cluster:
            facts = cluster.connect()
            parts = preparation.fit_devices(parts, facts, note)
            cluster.load(parts.config, parts.most_held)
            links = _links(cluster, config, min(nbytes, parts.max_frame_bytes - 4096), note)
            seconds, statistics_of, batches = _steps(cluster, parts, max(2, steps), note)
            profile = cluster.profile()
            direct = sorted(cluster.direct)
    micro_batches = len(batches)
    tokens = sum(int((batch["labels"] != -100).numel()) for batch in batches)
    return {
        "micro_batches": micro_batches,
        "tokens_per_step": tokens,
        "links": links,
        "stages": _stages(config, statistics_of, micro_batches, facts),
        "direct_boundaries": direct,
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "predicted": _predicted(config, profile, micro_batches, parts.most_held),
    }


def _links(cluster: Cluster, config: Config, nbytes: int, note: Note) -> list[dict[str, Any]]:
    found = []
    for worker in cluster.workers:
        note(f"measuring the link to worker {worker}")
        speed = probe.measure(partial(cluster.pipeline.ask, worker), nbytes)
        found.append({"from": "coordinator", "to": worker, **asdict(speed)})
    for one, other in _direct_pairs(cluster, config.stages()):
        note(f"measuring the link between workers {one} and {other}")
        question = probe.peer_question(1 << 31, other, nbytes)
        answer = cluster.pipeline.ask(one, question)
        found.append({"from": one, "to": other, **asdict(probe.peer_speed(answer))})
        answer.release()
    return found


def _direct_pairs(
    cluster: Cluster, specs: tuple[StageSpec, ...]
) -> list[tuple[int | str, int | str]]:
    direct = cluster.direct
    pairs = [(a.owner, b.owner) for a, b in pairwise(specs) if a.index in direct]
    return list({frozenset(pair): pair for pair in pairs}.values())


def _steps(
    cluster: Cluster, parts: preparation.Prepared, steps: int, note: Note
) -> tuple[float, dict[int, StageStatistics], list[Any]]:
    """Median seconds of a step without its commit, and the stages' times of the last one."""
    taken = []
    for number in range(steps):
        batches = parts.data.step_batches(number % parts.data.total_steps)
        num_items = parts.data.num_items(batches)
        began = time.perf_counter()
        cluster.begin(number, len(batches), train=True, num_items=max(1, num_items))
        cluster.pipeline.run(batches)
        _, found = cluster.pipeline.collect()
        taken.append(time.perf_counter() - began)
        cluster.observe(len(batches), found)
        cluster.pipeline.abort()
        note(f"step {number + 1} of {steps}: {taken[-1]:.3g} s")
    return statistics.median(taken[1:]), found, batches


def _stages(
    config: Config, found: dict[int, StageStatistics], micro_batches: int, facts: preparation.Facts
) -> list[dict[str, Any]]:
    lines = []
    for spec in config.stages():
        times, layers = found[spec.index], max(1, spec.end - spec.start)
        lines.append(
            {
                "index": spec.index,
                "process": "coordinator" if spec.owner == "local" else f"worker {spec.owner}",
                "device": facts[spec.owner].device,
                "layers": spec.layers,
                "forward_s_per_layer": times.forward_s / micro_batches / layers,
                "backward_s_per_layer": times.backward_s / micro_batches / layers,
                "forward_s": times.forward_s / micro_batches,
                "backward_s": times.backward_s / micro_batches,
                "is_last": spec.is_last,
            }
        )
    return lines


def _predicted(
    config: Config, profile: Profile, micro_batches: int, most_held: tuple[int, ...] | None
) -> dict[str, Any]:
    window = config.training.max_in_flight
    choice = tune(profile, micro_batches, window=window, limits=most_held)
    busy = sum(choice.forecast.busy) / len(choice.forecast.busy)
    return {
        "step_s": choice.forecast.seconds,
        "bound_s": step_bound(profile, micro_batches),
        "bubble": 1.0 - busy,
        "window": choice.window,
        "held": list(choice.limits),
    }


def text(found: dict[str, Any]) -> str:
    """The report for a person."""
    lines = []
    if found["links"]:
        rows: list[tuple[str, ...]] = [("link", "round trip", "there", "back")]
        for link in found["links"]:
            one = link["from"] if link["from"] == "coordinator" else f"worker {link['from']}"
            rows.append(
                (
                    f"{one} - worker {link['to']}",
                    f"{link['round_trip_s'] * 1e3:.2f} ms",
                    _rate(link["up_bytes_per_s"]),
                    _rate(link["down_bytes_per_s"]),
                )
            )
        lines += [*_table(rows), ""]
    rows = [("stage", "process", "device", "layers", "forward/layer", "backward/layer")]
    for stage in found["stages"]:
        forward, backward = stage["forward_s_per_layer"], stage["backward_s_per_layer"]
        rows.append(
            (
                str(stage["index"]),
                stage["process"],
                stage["device"],
                stage["layers"],
                "with backward" if stage["is_last"] else f"{forward * 1e3:.3g} ms",
                f"{backward * 1e3:.3g} ms",
            )
        )
    lines += [*_table(rows), ""]
    predicted = found["predicted"]
    lines += [
        f"A step of {found['micro_batches']} micro-batches took {found['step_s']:.3g} s, "
        f"{found['tokens_per_s']:,.0f} tokens/s.",
        f"These times predict {predicted['step_s']:.3g} s; no schedule can be faster than "
        f"{predicted['bound_s']:.3g} s.",
        f"Devices would be idle {predicted['bubble']:.0%} of the time, with "
        f"{predicted['window']} micro-batches under way.",
    ]
    return "\n".join(lines)


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
