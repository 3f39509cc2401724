"""`hetero doctor --config` asks real workers, and they serve a run afterwards."""

from __future__ import annotations

import json

import psutil
import pytest

from hetero_framework import cli, control
from hetero_framework.cluster import roles, worker_info
from hetero_framework.commands import diagnosis
from hetero_framework.config import Config

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def elsewhere(monkeypatch):
    """As if the pool's workers were on other machines."""
    monkeypatch.setattr(roles, "local_worker_ids", lambda config, identity: ())


@pytest.mark.usefixtures("elsewhere")
def test_workers_that_are_up_are_asked_and_serve_a_run_afterwards(
    pool, tmp_path, llama, losses, capsys, monkeypatch
):
    sections = {"model": {"name_or_path": str(llama)}}
    config = pool.config(tmp_path / "run", [2, 4], **sections)
    file = tmp_path / "c.json"
    file.write_text(json.dumps(config))
    code = cli.main(["doctor", "--config", str(file), "--json"])
    assert (code, json.loads(capsys.readouterr().out)["findings"]) == (0, [])
    view = diagnosis.MachineView(Config.from_dict(config), roles.Role(True, ()))
    for asked in view.workers.values():
        assert asked.problem is None
        assert asked.facts["versions"] == worker_info.facts()["versions"]
        assert abs(asked.clock_s) < 5
        assert asked.speed.up_bytes_per_s > 0
    assert set(view.workers) == {1, 2}
    assert len(losses([2, 4])) > 1


def test_processes_of_a_run_listen_only_where_the_file_says(pool, losses, monkeypatch):
    """Seen after each step, while all links stand, those between workers too."""
    seen: set[tuple[str, int]] = set()
    processes = [psutil.Process(), *(psutil.Process(started.pid) for started in pool.processes)]

    def look(step: int, cluster: control.WorkerControl) -> None:
        for process in processes:
            for found in process.net_connections("inet"):
                if found.status == psutil.CONN_LISTEN:
                    seen.add(tuple(found.laddr))

    monkeypatch.setattr(control, "_watchers", [look])
    losses([2, 4])
    named = {(entry["ip"], entry["port"]) for entry in pool.machines["workers"]}
    coordinator = pool.machines["coordinator"]
    assert named <= seen <= {*named, (coordinator["ip"], coordinator["port"])}
