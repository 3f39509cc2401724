from __future__ import annotations

from hetero_framework.commands.fleet import turns
from hetero_framework.config import Config


def test_machines_are_measured_at_once_and_processes_of_one_in_turn() -> None:
    workers = [("a", "10.0.0.2"), ("b", "10.0.0.2"), ("c", "127.0.0.1"), ("d", "10.0.0.3")]
    config = Config.from_dict(
        {
            "coordinator": {"ip": "10.0.0.1"},
            "workers": [
                {"id": id, "ip": ip, "port": 9000 + k} for k, (id, ip) in enumerate(workers)
            ],
            "shard_plan": "auto",
        }
    )
    assert list(turns(config)) == [["local", "a", "d"], ["c", "b"]]
