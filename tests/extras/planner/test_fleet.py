from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework.cluster.link_probe import LinkSpeed
from hetero_framework.cluster.model_allowlist import check_permitted
from hetero_framework.config import Config
from hetero_framework.engine.hosts import DirectLost, LinkLost
from hetero_framework.errors import PeerLostError
from hetero_framework.extras.planner import fleet
from hetero_framework.extras.planner.fleet import directions, turns


def test_machines_are_measured_at_once_and_processes_of_one_in_turn():
    workers = [("a", "10.0.0.2"), ("b", "10.0.0.2"), ("c", "127.0.0.1"), ("d", "10.0.0.3")]
    entries = [{"id": id, "ip": ip, "port": 9000 + k} for k, (id, ip) in enumerate(workers)]
    raw = {"coordinator": {"ip": "10.0.0.1"}, "workers": entries, "shard_plan": "auto"}
    config = Config.from_dict(raw)
    assert list(turns(config)) == [["local", "a", "d"], ["c", "b"]]


def test_a_link_has_the_speed_measured_with_both_directions_in_use():
    there, back = directions("local", 1, LinkSpeed(0.01, 1e8, 4e7, both_ways=2.0))
    assert there == {"from": "local", "to": 1, "bytes_per_s": 5e7, "latency_s": 0.005}
    assert back == {"from": 1, "to": "local", "bytes_per_s": 2e7, "latency_s": 0.005}
    there, back = directions("local", 1, LinkSpeed(0.01, 1e8, 4e7, both_ways=1.1))  # noise
    assert (there["bytes_per_s"], back["bytes_per_s"]) == (1e8, 4e7)


@pytest.mark.parametrize("model", [{"name_or_path": "models/[1]"}, {"from_config": {}}])
def test_a_worker_that_is_started_to_be_measured_may_load_the_model(model):
    """The file that it is given names another, tiny one."""
    fields = {"model_type": "llama", "num_hidden_layers": 2}
    model = {"from_config": fields, "tokenizer": "none"} if "from_config" in model else model
    machine = {"ip": "127.0.0.1"}
    workers = [{**machine, "id": 1, "port": 9999}]
    sections = {"coordinator": machine, "workers": workers, "shard_plan": "auto", "model": model}
    asked = Config.from_dict(sections)
    own = fleet._tiny(asked, "runs")
    assert check_permitted(asked, own, own.worker(1)) == asked


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (LinkLost("box", "closed"), "lost worker box: ended with exit code 1"),
        (DirectLost(1, "box", "closed"), "lost the link between workers 1 and box: closed"),
        (PeerLostError("worker 1 is gone"), "worker 1 is gone"),
    ],
)
def test_the_loss_of_a_worker_is_named(lost, message):
    cluster: Any = SimpleNamespace(why=lambda lost: "ended with exit code 1")
    assert fleet._loss(cluster, lost) == message
