from __future__ import annotations

import pytest

from hetero_framework.cluster.roles import (
    MachineNames,
    Role,
    available_cores,
    decide_role,
    local_worker_ids,
    this_machine,
    threads_for,
)
from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from tests.unit.cluster.conftest import star


def config_of(*machines: tuple[str | None, str], threads: int | None = None) -> Config:
    """The first machine is the coordinator, the others are the workers 1, 2, ..."""
    name, ip = machines[0]
    workers = [
        {"id": i, "hostname": n, "ip": a, "port": 29500 + i, "num_threads": threads}
        for i, (n, a) in enumerate(machines[1:], start=1)
    ]
    owners = ["local", *range(1, len(machines))]
    return star(workers, owners, coordinator={"hostname": name, "ip": ip})


THREE = config_of(("desk", "10.0.0.1"), ("box", "10.0.0.2"), ("mac", "10.0.0.3"))
DNS = config_of((None, "desk.lan"), (None, "box.lan"))
CLONES = config_of(("ubuntu", "10.0.0.1"), ("ubuntu", "10.0.0.2"))
ANYWHERE = config_of((None, "127.0.0.1"), (None, "10.0.0.2"))
LOOPBACK = config_of(("localhost", "127.0.0.1"), (None, "127.0.0.1"), (None, "localhost"))
SEVERAL = config_of(
    ("desk", "10.0.0.1"), ("box", "10.0.0.2"), ("box", "10.0.0.2"), (None, "127.0.0.1")
)


def machine(*found: str) -> MachineNames:
    names = [text for text in found if not text[0].isdigit()]
    return MachineNames.of(
        names, [text for text in found if text[0].isdigit()] + ["127.0.0.1", "::1"]
    )


@pytest.mark.parametrize(
    ("config", "identity", "expected"),
    [
        (THREE, machine("x", "10.0.0.1"), Role(True, ())),
        (THREE, machine("x", "10.0.0.2"), Role(False, (1,))),
        (THREE, machine("MAC", "192.168.0.9"), Role(False, (2,))),
        (THREE, machine("mac.local", "192.168.0.9"), Role(False, (2,))),
        (THREE, machine("desk", "192.168.0.9"), Role(True, ())),
        (LOOPBACK, machine("anything", "10.9.9.9"), Role(True, (1, 2))),
        (SEVERAL, machine("x", "10.0.0.1"), Role(True, (3,))),
        (SEVERAL, machine("x", "10.0.0.2"), Role(False, (1, 2))),
        # The address of a DNS name is its name.
        (DNS, machine("box"), Role(False, (1,))),
        (DNS, machine("desk.lan"), Role(True, ())),
        # IPv6 in another spelling.
        (
            config_of((None, "fd00:0:0::1"), (None, "fd00::2")),
            MachineNames.of(["x"], ["fd00::1"]),
            Role(True, ()),
        ),
        # A loopback coordinator is wherever no worker is.
        (ANYWHERE, machine("x", "10.0.0.7"), Role(True, ())),
        (ANYWHERE, machine("x", "10.0.0.2"), Role(False, (1,))),
        # A loopback worker is on the coordinator's machine, whatever its host name says.
        (config_of((None, "127.0.0.1"), ("x", "127.0.0.1")), machine("x"), Role(True, (1,))),
        # Cloned machines have one host name; their addresses decide.
        (CLONES, machine("ubuntu", "10.0.0.2"), Role(False, (1,))),
    ],
)
def test_role_follows_addresses_and_names(config, identity, expected):
    assert decide_role(config, identity=identity) == expected


def test_role_given_on_the_command_line_wins():
    here = machine("x", "10.0.0.1")
    assert decide_role(THREE, worker_id="2", identity=here) == Role(False, (2,))
    assert decide_role(THREE, role="worker", worker_id=1, identity=here) == Role(False, (1,))
    there = machine("x", "10.0.0.9")
    assert decide_role(THREE, role="coordinator", identity=there) == Role(True, ())
    assert decide_role(LOOPBACK, role="worker", identity=there) == Role(False, (1, 2))


def test_a_machine_without_an_entry_has_the_role_of_its_key():
    elsewhere = machine("x", "10.0.0.9")
    assert decide_role(THREE, identity=elsewhere, keys=["2"]) == Role(False, (2,))
    assert decide_role(THREE, identity=machine("x", "10.0.0.2"), keys=["2"]) == Role(False, (1,))
    with pytest.raises(ConfigError):  # the coordinator's machine has keys of workers, too
        decide_role(THREE, identity=elsewhere, keys=["local", "2"])


def test_coordinators_own_workers_are_found_by_its_address():
    config = config_of(("desk", "10.0.0.1"), (None, "10.0.0.1"), ("box", "10.0.0.2"))
    assert decide_role(config, identity=machine("x", "10.0.0.1")) == Role(True, (1,))
    # Behind a translated address only --role says who this is; its own workers stay its own.
    behind = machine("x", "172.17.0.2")
    assert decide_role(config, role="coordinator", identity=behind) == Role(True, (1,))
    assert local_worker_ids(config, behind) == (1,)


def test_a_machine_without_a_role_is_shown_its_name_and_the_entries():
    with pytest.raises(ConfigError) as caught:
        decide_role(THREE, identity=machine("stranger", "10.7.7.7"))
    text = str(caught.value)
    for part in ("stranger", "10.7.7.7", "coordinator: desk, 10.0.0.1", "worker 2: mac, 10.0.0.3"):
        assert part in text
    assert "--worker-id" in text


def test_contradicting_options_are_refused():
    with pytest.raises(ConfigError, match="exclude each other"):
        decide_role(THREE, role="coordinator", worker_id=1, identity=machine("x"))
    with pytest.raises(ConfigError, match="no worker"):
        decide_role(THREE, worker_id=7, identity=machine("x"))
    with pytest.raises(ConfigError, match="nothing in the configuration"):
        decide_role(THREE, role="worker", identity=machine("x", "10.0.0.1"))


def test_this_machine_is_the_coordinator_of_a_loopback_configuration():
    assert "127.0.0.1" in this_machine().addresses
    assert decide_role(LOOPBACK) == Role(True, (1, 2))


def test_threads_share_the_cores_of_a_machine():
    assert threads_for(LOOPBACK, "local", cores=16, environ={}) == 5
    assert threads_for(LOOPBACK, 2, cores=2, environ={}) == 1
    assert threads_for(THREE, 1, cores=16, environ={}) == 16
    assert threads_for(SEVERAL, 1, cores=16, environ={}) == 8
    assert threads_for(SEVERAL, 3, cores=16, environ={}) == 8
    assert 1 <= threads_for(LOOPBACK, 1, environ={}) <= available_cores()


def test_threads_given_by_environment_or_entry_win():
    config = config_of((None, "127.0.0.1"), (None, "127.0.0.1"), threads=3)
    assert threads_for(config, 1, cores=16, environ={}) == 3
    assert threads_for(config, 1, cores=16, environ={"OMP_NUM_THREADS": "7"}) == 7
    assert threads_for(config, 1, cores=16, environ={"OMP_NUM_THREADS": "4,2"}) == 4
    assert threads_for(config, 1, cores=16, environ={"OMP_NUM_THREADS": "many"}) == 3


def test_a_worker_without_an_entry_takes_no_part():
    raw = LOOPBACK.to_dict()
    raw["shard_plan"].pop()
    config = Config.from_dict(raw)
    assert local_worker_ids(config, machine("x")) == (1,)
    assert threads_for(config, 1, cores=8, environ={}) == 4
    with pytest.raises(ConfigError, match="worker 2 has no entry in shard_plan"):
        decide_role(config, worker_id=2, identity=machine("x"))


def test_a_machine_that_the_plan_leaves_out_gets_a_message():
    raw = THREE.to_dict()
    raw["shard_plan"].pop()
    with pytest.raises(ConfigError, match="worker 2 has no entry in shard_plan"):
        decide_role(Config.from_dict(raw), identity=machine("mac"))
