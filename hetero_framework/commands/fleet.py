"""`hetero plan --measure`: what each machine takes for each part of the model, and all links.

Real workers and links, but a tiny model between them: each process measures the parts of the real
one with random weights, so none of them needs to have it.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections import Counter
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from hetero_framework.cluster import link_probe, survey
from hetero_framework.cluster.assembly import Cluster
from hetero_framework.cluster.roles import machine_of
from hetero_framework.commands.bench import losses_told
from hetero_framework.commands.fleet_profile import profile_of
from hetero_framework.config import Config
from hetero_framework.core.fields import WorkerId
from hetero_framework.engine.measuring import ModelCost, measure
from hetero_framework.errors import HeteroError, PeerLostError, UserError
from hetero_framework.models.memory import memory_of_parts
from hetero_framework.models.shard import load_model_config
from hetero_framework.planner import FleetProfile
from hetero_framework.security.access import Access
from hetero_framework.trainer.signals import StopRequest

_log = logging.getLogger(__name__)
_MAX_FRAME_BYTES = 1 << 28
_LINK_BYTES = (1 << 20, 1 << 25)
_TINY = {
    **{"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}


def measure_fleet(config: Config, *, access: Access | None = None) -> FleetProfile:
    """Measure this machine, every worker of `config`, and the links between all of them. Raises
    UserError for a worker that cannot be measured or goes away, what `Cluster.start` raises, and
    KeyboardInterrupt; no worker that was started here is left behind."""
    config.require("model")
    assert config.model is not None
    model = load_model_config(config.model, config.base_dir)
    numbers = itertools.count(1 << 31)
    with StopRequest(), tempfile.TemporaryDirectory(prefix="hetero-plan-") as folder:
        tiny = _tiny(config, folder)
        with Cluster(tiny, max_frame_bytes=_MAX_FRAME_BYTES, access=access) as cluster:
            facts = cluster.start()
            cluster.assemble(tiny)
            try:
                with losses_told(cluster):
                    costs: dict[WorkerId, ModelCost] = {"local": _own(config, model, cluster)}
                    for worker in cluster.workers:
                        _log.info("measuring worker %s", worker)
                        asked = survey.question(next(numbers), config, model, worker)
                        answer = cluster.ask(worker, asked)
                        costs[worker] = survey.cost(answer)
                        answer.release()
                    links = _links(cluster, costs["local"].hidden_bytes, numbers)
            except PeerLostError as error:
                raise UserError(
                    f"it was being measured: {error.message}",
                    hint="start it and measure again, or take it out of the configuration",
                ) from error
    # Processes that share a device share what is free there.
    places = {id: (machine_of(config, config.machine(id)), facts[id].device) for id in facts}
    sharers = Counter(places.values())
    memory = {id: facts[id].memory_free / sharers[places[id]] for id in facts}
    return profile_of(
        config, memory_of_parts(config, model, len(costs["local"].kinds)), costs, memory, links
    )


def _own(config: Config, model: PretrainedConfig, cluster: Cluster) -> ModelCost:
    _log.info("measuring this machine")
    return measure(config, model, cluster.device)


def _tiny(config: Config, folder: str) -> Config:
    """The processes of `config`, all of them, with a layer of a tiny model each."""
    raw, owners = config.to_dict(), ["local", *(worker.id for worker in config.workers)]
    plan = [{"id": owner, "start": k, "end": k + 1} for k, owner in enumerate(owners)]
    fields = {**_TINY, "num_hidden_layers": len(owners)}
    kept = ("connect_timeout_s", "liveness_timeout_s", "load_timeout_s", "log_level")
    training = {name: raw["training"][name] for name in kept}
    return Config.from_dict(
        {
            **{name: raw[name] for name in ("coordinator", "workers")},
            "shard_plan": plan,
            "links": "relay",  # those between workers are opened when their turn comes
            "model": {"from_config": fields, "tokenizer": "none"},
            "training": {**training, "output_dir": folder},
        },
        config.base_dir,
    )


def _links(cluster: Cluster, hidden_bytes: int, numbers: Any) -> list[dict[str, Any]]:
    """Every pair of processes, both ways, with messages as large as the boundary's tensors."""
    least, most = _LINK_BYTES
    nbytes = max(least, min(hidden_bytes, most))
    found = []

    def note(one: WorkerId, other: WorkerId, speed: link_probe.LinkSpeed) -> None:
        shared = {"latency_s": speed.round_trip_s / 2}
        found.append({"from": one, "to": other, "bytes_per_s": speed.up_bytes_per_s, **shared})
        found.append({"from": other, "to": one, "bytes_per_s": speed.down_bytes_per_s, **shared})

    for worker in cluster.workers:
        _log.info("measuring the link to worker %s", worker)
        note("local", worker, link_probe.measure(partial(cluster.ask, worker), nbytes))
    pairs = list(itertools.combinations(cluster.workers, 2))
    problems = cluster.link_workers(pairs) if pairs else {}
    for one, other in pairs:
        if (problem := problems.get(frozenset((one, other)))) is not None:
            _log.info("workers %s and %s: no direct link (%s)", one, other, problem)
            continue
        _log.info("measuring the link between workers %s and %s", one, other)
        answer = cluster.ask(one, link_probe.peer_question(next(numbers), other, nbytes))
        try:
            note(one, other, link_probe.peer_speed(answer))
        except HeteroError as error:
            _log.info("workers %s and %s: not measured (%s)", one, other, error.message)
        finally:
            answer.release()
    return found
