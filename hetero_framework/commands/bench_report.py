"""`hetero bench`: measures links and seconds per layer, and the step that follows from them.

Model, data, plan, processes and links are those of training. Steps are computed and then forgotten:
no weight changes and nothing is written.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from hetero_framework.cluster import link_probe
from hetero_framework.cluster.assembly import Cluster
from hetero_framework.config import Config
from hetero_framework.config.optimizers import check_optimizer
from hetero_framework.data import token_count
from hetero_framework.engine.hosts import DirectLost, LinkLost
from hetero_framework.errors import PeerLostError
from hetero_framework.models.introspect import introspect
from hetero_framework.planner.bounds import step_bound
from hetero_framework.planner.simulator import Profile
from hetero_framework.planner.tuning import tune
from hetero_framework.security.access import Access
from hetero_framework.trainer import setup
from hetero_framework.trainer.signals import StopRequest
from hetero_framework.units import bit_rate, plural, seconds, share
from hetero_framework.visualizer.tables import table

_log = logging.getLogger(__name__)

_FRAME_HEADER_BYTES = 4096
_UNEXPLAINED = 1.15
_REQUEST = 1 << 31
_WAYS = ("forward", "backward")


def bench(
    config: Config, *, steps: int = 4, nbytes: int = 8 << 20, access: Access | None = None
) -> dict[str, Any]:
    """Measure the machines of `config`; JSON types, times in seconds and sizes in bytes.

    `steps` training steps are computed (at least two; the first does not count). Messages of
    `nbytes` measure the links, smaller ones where the run's frames are smaller. Raises what `train`
    raises before its first step, PeerLostError when a link breaks meanwhile, and KeyboardInterrupt
    for Ctrl-C and SIGTERM; no worker that was started here is left behind.
    """
    config.require("model", "data")
    check_optimizer(config.training)
    # The workers' logs go into the folder; output_dir stays as it is.
    with StopRequest(), tempfile.TemporaryDirectory(prefix="hetero-bench-") as folder:
        parts = setup.prepare(config.with_changes(training={"output_dir": folder}))
        most = parts.max_frame_bytes
        ids = introspect(parts.model_config).id_readers
        with Cluster(parts.config, max_frame_bytes=most, access=access, id_layers=ids) as cluster:
            facts = cluster.start()
            parts = setup.fit_devices(parts, facts)
            cluster.assemble(parts.config, parts.memory_limits)
            most = parts.max_frame_bytes - _FRAME_HEADER_BYTES
            nbytes = min(nbytes, most, link_probe.MOST_BYTES)
            with losses_told(cluster):
                links = _links(cluster, config, nbytes)
                taken = _steps(cluster, parts, max(2, steps))
            profile = cluster.assembly.profile()
    micro_batches = taken[-1].micro_batches
    return {
        "links": links,
        "link_bytes": nbytes,
        "stages": _stages(config, profile, facts),
        "boundaries": _boundaries(profile),
        "micro_batch_samples": config.training.per_device_train_batch_size,
        "micro_batches": micro_batches,
        "step_s": statistics.median(step.seconds for step in taken),
        "tokens_per_s": sum(s.tokens for s in taken) / sum(s.seconds for s in taken),
        "predicted": _predicted(config, profile, micro_batches, parts.memory_limits),
    }


@contextmanager
def losses_told(cluster: Cluster) -> Iterator[None]:
    """A link that breaks ends a measurement: mending it would be measured too."""
    try:
        yield
    except LinkLost as lost:
        raise PeerLostError(
            f"lost worker {lost.worker}: {cluster.why(lost)}",
            hint="look at its screen and at the network, then start again",
        ) from lost
    except DirectLost as lost:
        raise PeerLostError(
            f"lost the link between {lost}",
            hint="look at their screens and at the network between them, then start again",
        ) from lost


def _links(cluster: Cluster, config: Config, nbytes: int) -> list[dict[str, Any]]:
    found = []
    for worker in cluster.workers:
        _log.info("measuring the link to worker %s", worker)
        speed = link_probe.measure(partial(cluster.ask, worker), nbytes)
        found.append({"from": "coordinator", "to": worker, **asdict(speed)})
    pairs: dict[frozenset[int | str], tuple[int | str, int | str]] = {}  # each once
    for before, after in pairwise(config.plan.stages):
        if before.index in cluster.assembly.direct:
            pairs.setdefault(frozenset((before.owner, after.owner)), (before.owner, after.owner))
    for one, other in pairs.values():
        _log.info("measuring the link between workers %s and %s", one, other)
        most = min(nbytes, link_probe.MOST_BYTES_OF_PEER)
        question = link_probe.peer_question(_REQUEST, other, most)
        answer = cluster.ask(one, question)
        found.append({"from": one, "to": other, **asdict(link_probe.peer_speed(answer))})
        answer.release()
    return found


@dataclass(frozen=True)
class _Taken:
    """One step, without its commit."""

    seconds: float
    tokens: int
    micro_batches: int


def _steps(cluster: Cluster, parts: setup.Prepared, steps: int) -> list[_Taken]:
    """Compute steps and forget them; what all but the first took. An epoch's last step may be a
    short one, so it is left out where there are others."""
    data = parts.data
    usual = max(1, min(data.steps_per_epoch - 1, data.total_steps))
    taken = []
    for number in range(steps):
        batches = data.step_batches(number % usual)
        began = time.perf_counter()
        tokens = sum(map(token_count, batches))
        cluster.begin(number, len(batches), train=True, num_items=tokens)
        cluster.pipeline.run(batches)
        _, found = cluster.pipeline.report_gradients()
        took = time.perf_counter() - began
        cluster.assembly.observe(len(batches), found)
        cluster.pipeline.abort()
        taken.append(_Taken(took, tokens, len(batches)))
        _log.info("step %d of %d: %s", number + 1, steps, seconds(took))
    return taken[1:]


def _stages(config: Config, profile: Profile, facts: setup.Facts) -> list[dict[str, Any]]:
    found = []
    for spec in config.plan.stages:
        forward_s, backward_s = profile.forward_s[spec.index], profile.backward_s[spec.index]
        times = {"forward_s": forward_s, "backward_s": backward_s, "both_s": forward_s + backward_s}
        layers = spec.end - spec.start
        per_layer = {f"{k}_per_layer": t / layers if layers else None for k, t in times.items()}
        stage = {
            "index": spec.index,
            "process": spec.process,
            "device": facts[spec.owner].device,
            "start": spec.start,
            "end": spec.end,
            "layers": spec.layers,
            **times,
            **per_layer,
        }
        if spec.is_last:  # it does both at once
            stage |= {f"{way}_s{end}": None for way in _WAYS for end in ("", "_per_layer")}
        found.append(stage)
    return found


def _boundaries(profile: Profile) -> list[dict[str, Any]]:
    return [
        {
            "after": k,
            "way": "direct" if edge.relay is None else "relay",
            "activation_s": edge.forward_s,
            "gradient_s": edge.backward_s,
            "latency_s": edge.latency_s,
        }
        for k, edge in enumerate(profile.edges)
        if profile.devices[k] != profile.devices[k + 1]
    ]


def _predicted(
    config: Config, profile: Profile, micro_batches: int, memory_limits: tuple[int, ...] | None
) -> dict[str, Any]:
    most = config.training.max_in_flight
    choice = tune(profile, micro_batches, max_in_flight=most, in_flight_limits=memory_limits)
    busy = choice.forecast.busy
    return {
        "step_s": choice.forecast.seconds,
        "bound_s": step_bound(profile, micro_batches),
        "bubble": 1.0 - sum(busy) / len(busy),
        "window": choice.max_in_flight,
        "held": list(choice.in_flight_limits),
    }


_LINK_HEAD = ("link", "round trip", "there", "back", "both at once")
_STAGE_HEAD = (
    "stage", "process", "device", "layers", "forward", "backward", "forward per layer",
    "backward per layer",
)  # fmt: skip
_BOUNDARY_HEAD = ("boundary", "way", "activation", "gradient", "delay")


def text(found: dict[str, Any]) -> str:
    """The report for a person."""
    lines = []
    if found["links"]:
        lines += [f"Links, with messages of {found['link_bytes'] / 1e6:.3g} MB:"]
        lines += [*table(_LINK_HEAD, [_link_row(link) for link in found["links"]]), ""]
    rows = found["micro_batch_samples"]
    lines += [f"For each micro-batch of {plural(rows, 'sample')}:"]
    lines += table(_STAGE_HEAD, [_stage_row(s) for s in found["stages"]], left=(0, 1, 2, 3))
    if found["boundaries"]:
        rows = [_boundary_row(boundary) for boundary in found["boundaries"]]
        lines += ["", *table(_BOUNDARY_HEAD, rows, left=(0, 1))]
    return "\n".join([*lines, "", *_step_lines(found)])


def _step_lines(found: dict[str, Any]) -> list[str]:
    predicted, m = found["predicted"], found["micro_batches"]
    lines = [
        f"A step of {plural(m, 'micro-batch')} took {seconds(found['step_s'])}: "
        f"{found['tokens_per_s']:,.0f} tokens/s, without the optimizer's part.",
        f"Estimates from these means: {seconds(predicted['step_s'])} for a step, "
        f"{seconds(predicted['bound_s'])} under the best schedule.",
    ]
    if len(found["stages"]) > 1:
        lines.append(
            f"Predicted: devices idle {share(predicted['bubble'])} of the time, with "
            f"{plural(predicted['window'], 'micro-batch')} under way."
        )
    times = found["step_s"] / predicted["step_s"]
    if times > _UNEXPLAINED:
        lines += [
            f"It took {times:.1f} times what they predict: processes share cores or a link,",
            "a machine has other work, or samples differ much in length.",
        ]
    return lines


def _link_row(link: dict[str, Any]) -> tuple[str, ...]:
    one = link["from"] if link["from"] == "coordinator" else f"worker {link['from']}"
    rates = (bit_rate(link[f"{way}_bytes_per_s"]) for way in ("up", "down"))
    both_ways = f"{link['both_ways']:.1f} x as long"
    return (f"{one} - worker {link['to']}", seconds(link["round_trip_s"]), *rates, both_ways)


def _stage_row(stage: dict[str, Any]) -> tuple[str, ...]:
    def pair(suffix: str) -> tuple[str, str]:
        both = stage[f"both_s{suffix}"]
        if both is None:
            return ("-", "-")
        forward, backward = stage[f"forward_s{suffix}"], stage[f"backward_s{suffix}"]
        if forward is None:
            return (seconds(both), "(both)")
        return (seconds(forward), seconds(backward))

    where = (str(stage["index"]), stage["process"], stage["device"], stage["layers"])
    return (*where, *pair(""), *pair("_per_layer"))


def _boundary_row(boundary: dict[str, Any]) -> tuple[str, ...]:
    after = boundary["after"]
    times = (boundary[name] for name in ("activation_s", "gradient_s", "latency_s"))
    return (f"{after} - {after + 1}", boundary["way"], *map(seconds, times))
