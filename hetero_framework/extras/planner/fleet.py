"""`hetero plan --measure`: the time of each part of the model on each machine, and all links.

Real workers and links serve a tiny model. Each process measures the parts of the real model with
random weights, so no process needs to have it.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from hetero_framework.cluster import link_probe, model_allowlist
from hetero_framework.cluster.cluster import Cluster, free_bytes
from hetero_framework.cluster.roles import machine_of
from hetero_framework.config import Config, process_name
from hetero_framework.core.fields import WorkerId
from hetero_framework.engine.hosts import DirectLost, LinkLost
from hetero_framework.errors import HeteroError, PeerLostError, UserError
from hetero_framework.extras.planner import FleetProfile, Result, remote_measurement
from hetero_framework.extras.planner.measuring import ModelCost, profile_of
from hetero_framework.models.files.quantization import check_devices, devices_known
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.memory import parts_by_process
from hetero_framework.security.access import Access
from hetero_framework.trainer.signals import StopRequest
from hetero_framework.units import bit_rate, seconds

_log = logging.getLogger(__name__)
_MAX_FRAME_BYTES = 1 << 28
_LINK_BYTES = (1 << 20, 1 << 25)
_FREE = 0.9  # share of a machine's free memory that layers may fill
_DISTURBED = 1.2
"""A smaller slowdown of both directions of a link together is taken for noise."""


def measure_fleet(
    config: Config, *, access: Access | None = None, anew: bool = False
) -> FleetProfile:
    """Measure this machine, every worker of `config`, and the links between all of them. Machines
    measure at once, processes of one machine in turn. Results that a machine has cached for the
    same model, settings and versions are used unless `anew`. Raises UserError for a worker that
    cannot be measured or goes away, what `Cluster.start` raises, and KeyboardInterrupt. No worker
    that was started here is left behind."""
    with _measured(config, access, anew) as (_, profile):
        return profile


def plan_fleet(
    config: Config, plan: Callable[[FleetProfile], Result], *, access: Access | None = None
) -> Result:
    """Measure as `measure_fleet` does, and call `plan` while the workers are here. Workers that are
    left out are told so and end; the others wait for the run. Raises what both calls raise."""
    with _measured(config, access, anew=False) as (cluster, profile):
        result = plan(profile)
        needed = {entry["id"] for entry in result.shard_plan}
        why = {limit.id: limit.figure for limit in result.limits}
        for worker in (w for w in cluster.workers if w not in needed):
            with suppress(HeteroError):  # one that is gone need not know
                cluster.control(worker, model_allowlist.LEFT_OUT, why.get(worker, "not used"))
        return result


@contextmanager
def _measured(
    config: Config, access: Access | None, anew: bool
) -> Iterator[tuple[Cluster, FleetProfile]]:
    config.require("model")
    model = ModelSource.of(config).config
    check_devices(config, model, devices_known(config, ["local"]))
    began = time.monotonic()
    with StopRequest(), tempfile.TemporaryDirectory(prefix="hetero-plan-") as folder:
        tiny = _tiny(config, folder)
        with Cluster(
            tiny, max_frame_bytes=_MAX_FRAME_BYTES, access=access, session="measurement"
        ) as cluster:
            facts = cluster.start()
            check_devices(config, model, {id: fact.no_four_bit for id, fact in facts.items()})
            cluster.assemble(tiny)
            try:
                measuring = _Measuring(config, model, cluster, anew)
                costs = measuring.costs()
                links = measuring.links(costs["local"].hidden_bytes)
            except (LinkLost, DirectLost, PeerLostError) as error:
                raise UserError(
                    f"it was being measured: {_loss(cluster, error)}",
                    hint="start it and measure again, or take it out of the configuration",
                ) from error
            _log.info("measured in %s", seconds(time.monotonic() - began))
            parts = parts_by_process(config, model, list(costs))
            host = {
                id: (_FREE * (facts[id].host_free or 0), cost.link)
                for id, cost in costs.items()
                if cost.link is not None
            }
            yield cluster, profile_of(config, parts, costs, free_bytes(config, facts), links, host)


def _loss(cluster: Cluster, error: LinkLost | DirectLost | PeerLostError) -> str:
    """Name the worker or link that was lost. A lost link is not mended while a machine is measured,
    since the repair would be part of the time."""
    if isinstance(error, LinkLost):
        return f"lost worker {error.worker}: {cluster.why(error)}"
    if isinstance(error, DirectLost):
        return f"lost the link between {error}"
    return error.message


class _Measuring:
    """The measurements of a cluster, with a log line for each."""

    def __init__(
        self, config: Config, model: PretrainedConfig, cluster: Cluster, anew: bool
    ) -> None:
        self._config, self._model, self._cluster, self._anew = config, model, cluster, anew
        self._numbers = itertools.count(1 << 31)

    def costs(self) -> dict[WorkerId, ModelCost]:
        """Costs of the model's parts on each process, the coordinator's first."""
        measured: dict[WorkerId, remote_measurement.Measurement] = {}
        for together in turns(self._config):
            _log.info("measuring %s", ", ".join(map(process_name, together)))
            measured |= self._measured_at_once(together)
        order: list[WorkerId] = ["local", *self._cluster.workers]
        return {id: measured[id].cost for id in order}

    def _measured_at_once(
        self, together: Sequence[WorkerId]
    ) -> dict[WorkerId, remote_measurement.Measurement]:
        """The costs on these processes, measured at once; this thread measures this process."""
        cluster, measured = self._cluster, {}
        asked = {
            worker: remote_measurement.question(
                next(self._numbers), self._config, self._model, worker, anew=self._anew
            )
            for worker in together
            if worker != "local"
        }

        def note(id: WorkerId, one: remote_measurement.Measurement) -> None:
            measured[id] = one
            _log.info("%s: %s", process_name(id), _summary(one))

        def all_answered() -> bool:
            for worker, question in asked.items():
                if worker in measured:
                    continue
                answer = cluster.pipeline.answer(worker, question)
                if answer is not None:
                    note(worker, remote_measurement.answer_of(worker, answer))
                    answer.release()
            return len(measured) == len(together)

        if "local" in together:
            if asked:
                all_answered()  # sends the questions
            config = self._config.held_by("local")
            local = remote_measurement.model_costs(
                config, self._model, cluster.device, anew=self._anew
            )
            note("local", local)
        names = ", ".join(f"worker {worker}" for worker in asked)
        cluster.pipeline.until(all_answered, f"what {names} measures")
        return measured

    def links(self, hidden_bytes: int) -> list[dict[str, Any]]:
        """The links of all pairs of processes, measured with messages of a boundary's size."""
        least, most = _LINK_BYTES
        nbytes = max(least, min(hidden_bytes, most))
        cluster = self._cluster
        links: list[dict[str, Any]] = []

        def note(one: WorkerId, other: WorkerId, speed: link_probe.LinkSpeed) -> None:
            up, down, trip_s = speed.up_bytes_per_s, speed.down_bytes_per_s, speed.round_trip_s
            text = "%s to %s: %s there, %s back, both at once %.1f x as long, round trip %s"
            names = process_name(one), process_name(other)
            _log.info(text, *names, bit_rate(up), bit_rate(down), speed.both_ways, seconds(trip_s))
            links.extend(directions(one, other, speed))

        for worker in cluster.workers:
            note("local", worker, link_probe.measure(partial(cluster.ask, worker), nbytes))
        pairs = list(itertools.combinations(cluster.workers, 2))
        problems = cluster.link_workers(pairs) if pairs else {}
        for one, other in pairs:
            if (problem := problems.get(frozenset((one, other)))) is not None:
                _log.info("workers %s and %s: no direct link (%s)", one, other, problem)
                continue
            question = link_probe.peer_question(next(self._numbers), other, nbytes)
            answer = cluster.ask(one, question)
            try:
                note(one, other, link_probe.peer_speed(answer))
            except HeteroError as error:
                _log.info("workers %s and %s: not measured (%s)", one, other, error.message)
            finally:
                answer.release()
        return links


def directions(
    one: WorkerId, other: WorkerId, speed: link_probe.LinkSpeed
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both directions of a link as a profile has them. A step has activations and gradients under
    way at once, so each direction has its full-duplex speed."""
    times = speed.both_ways if speed.both_ways > _DISTURBED else 1.0
    up, down, delay_s = speed.up_bytes_per_s, speed.down_bytes_per_s, speed.round_trip_s / 2
    return (
        {"from": one, "to": other, "bytes_per_s": up / times, "latency_s": delay_s},
        {"from": other, "to": one, "bytes_per_s": down / times, "latency_s": delay_s},
    )


def turns(config: Config) -> Iterator[list[WorkerId]]:
    """Processes that are measured at the same time: one of each machine, until all had their
    turn."""
    machines: dict[str, list[WorkerId]] = {}
    owners: list[WorkerId] = ["local", *(worker.id for worker in config.workers)]
    for owner in owners:
        machines.setdefault(machine_of(config, config.machine(owner)), []).append(owner)
    for column in itertools.zip_longest(*machines.values()):
        yield [owner for owner in column if owner is not None]


def _summary(measured: remote_measurement.Measurement) -> str:
    layers = len(measured.cost.kinds)
    forward_s, backward_s = (
        sum(measured.cost.of_layers(name)) / layers for name in ("forward_s", "backward_s")
    )
    how = "remembered" if measured.was_known else f"measured in {seconds(measured.seconds)}"
    text = f"a layer takes {seconds(forward_s)} forward, {seconds(backward_s)} backward ({how})"
    if (link := measured.cost.link) is not None:
        there, back, both, slower = vars(link).values()
        text += (
            f"; {there / 1e9:.3g} GB/s from its machine's memory and {back / 1e9:.3g} to it, both"
            f" at once {both:.2f} x as long, computing meanwhile {slower:.2f} x"
        )
    return text


def _tiny(config: Config, folder: str) -> Config:
    """A configuration with all processes of `config`, each with a layer of a tiny model."""
    raw, owners = config.to_dict(), ["local", *(worker.id for worker in config.workers)]
    plan = [{"id": owner, "start": k, "end": k + 1} for k, owner in enumerate(owners)]
    fields = {**model_allowlist.TINY, "num_hidden_layers": len(owners)}
    kept = ("connect_timeout_s", "liveness_timeout_s", "load_timeout_s", "log_level")
    training = {name: raw["training"][name] for name in kept}
    for machine in (raw["coordinator"], *raw["workers"]):
        machine["quantization"] = None
    for worker in raw["workers"]:
        worker["models"] = ["*"]  # a worker that this process starts serves nobody else
    return Config.from_dict(
        {
            **{name: raw[name] for name in ("coordinator", "workers")},
            "shard_plan": plan,
            "links": "relay",  # links between workers are opened when their turn comes
            "model": {"from_config": fields, "tokenizer": "none"},
            "training": {**training, "output_dir": folder},
        },
        config.base_dir,
    )
