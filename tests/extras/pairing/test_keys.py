"""`hetero invite`, `join`, `keys` and the key making of `init`, as a user meets them."""

from __future__ import annotations

import json
import queue
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import cli
from hetero_framework.config import LIGHTHOUSE_PORT, load_config
from hetero_framework.core import addresses
from hetero_framework.core.threads import in_background
from hetero_framework.errors import IdentityError, UserError
from hetero_framework.extras.pairing.key_management import (
    check,
    findings,
    invite,
    invite_islands,
    join_cluster,
    lighthouse_address,
)
from hetero_framework.security import certificates
from hetero_framework.security.access import KeyOptions, lighthouse_access
from hetero_framework.security.keys import KeyDirectory
from tests.certificates import keys_of_year
from tests.samples import free_ports, plan_of
from tests.unit.commands.test_diagnosis import view
from tests.waiting import WAIT_S


def configuration(folder: Path) -> Path:
    raw: dict[str, Any] = {
        "coordinator": {"ip": "127.0.0.1", "port": free_ports(1)[0]},
        "workers": [{"id": 1, "ip": "192.0.2.7"}, {"id": "two", "ip": "192.0.2.8"}],
        "shard_plan": plan_of(("local", 1), (1, 2), ("two", 3)),
    }
    folder.mkdir()
    file = folder / "hetero_config.json"
    file.write_text(json.dumps(raw))
    return file


def held(folder: Path) -> list[str]:
    """What a directory of keys holds; each has a .gitignore and a lock."""
    found = {entry.name for entry in folder.iterdir()}
    assert {".gitignore", ".lock"} <= found
    assert (folder / ".gitignore").read_text() == "*\n"
    return sorted(found - {".gitignore", ".lock"})


def invited(file: Path, keys: Path, *workers: str) -> tuple[Any, queue.SimpleQueue[str]]:
    """`hetero invite` under way, and the lines that it prints."""
    said = queue.SimpleQueue[str]()
    config, own = load_config(file), KeyDirectory(keys)
    inviting = in_background(lambda: invite(config, file, own, workers, say=said.put), "invite")
    return inviting, said


def test_line_that_invite_prints_makes_a_machine_a_worker(tmp_path, logged):
    file = configuration(tmp_path / "coordinator")
    inviting, said = invited(file, file.parent / "hetero_keys", "1", "two", "1")
    for worker, ip in (("1", "192.0.2.7"), ("two", "192.0.2.8")):
        assert said.get(timeout=WAIT_S) == f"on the machine of worker {worker} ({ip}):"
        hetero, join, address, token, *more = said.get(timeout=WAIT_S).split()
        assert (hetero, join, more) == ("hetero", "join", [])
        box = tmp_path / f"box-{worker}"
        box.mkdir()
        own = box / "hetero_config.json"
        own.write_text("{}" if worker == "1" else file.read_text())
        joined = join_cluster(address, token, own, KeyDirectory(box / "hetero_keys"))
        assert joined.identity.worker == worker
        assert own.read_text() == file.read_text()
        assert (box / "hetero_config.json.before").exists() == (worker == "1")
        assert cli.main(["keys", "check", "--config", str(own)]) == 0
    inviting.result(WAIT_S)
    home = addresses.primary_address()  # loopback gives way to it
    assert any(f"worker two has joined from {home}:" in line for line in logged)


def test_line_names_the_file_that_the_other_machine_is_to_have(tmp_path):
    file = configuration(tmp_path / "coordinator").rename(tmp_path / "my cluster.json")
    inviting, said = invited(file, tmp_path / "hetero_keys", "1")
    said.get(timeout=WAIT_S)
    words = shlex.split(said.get(timeout=WAIT_S))
    assert words[:2] == ["hetero", "join"]
    assert words[4:] == ["--config", "my cluster.json"]
    join_cluster(words[2], words[3], tmp_path / "box.json", KeyDirectory(tmp_path / "box"))
    inviting.result(WAIT_S)


@pytest.mark.parametrize("year", [2090, 2001])
def test_keys_that_are_of_no_use_by_this_clock_are_named(year, tmp_path, monkeypatch, logged):
    keys_of_year(monkeypatch, year)
    keys = KeyDirectory(tmp_path / "hetero_keys")
    certificates.ensure_authority(keys)
    with pytest.raises(IdentityError, match=r"coordinator\.pem: this machine's clock says 20") as f:
        check(None, keys)
    assert f"good from {year}-01-01" in f.value.message
    assert "set it by the network" in str(f.value.hint)
    lighthouse_access(keys, "127.0.0.1", KeyOptions())
    assert any("this machine's clock says" in line for line in logged)


def test_worker_that_is_not_in_the_file_cannot_be_invited(tmp_path):
    file = configuration(tmp_path / "coordinator")
    keys = KeyDirectory(file.parent / "hetero_keys")
    with pytest.raises(UserError, match=r"has no worker 3 \(workers: 1, two\)"):
        invite(load_config(file), file, keys, ["3"])
    assert not keys.path.exists()


def test_an_address_without_port_and_half_a_token_are_refused(tmp_path):
    keys = KeyDirectory(tmp_path / "keys")
    token = f"HT1-{'a' * 52}-{'a' * 26}"
    with pytest.raises(UserError, match="has no port"):
        join_cluster("127.0.0.1", token, tmp_path / "c.json", keys)
    with pytest.raises(IdentityError, match="not all of it"):
        join_cluster("127.0.0.1:9998", token[:60], tmp_path / "c.json", keys)


def test_keys_are_exported_listed_revoked_and_rotated(tmp_path, capsys):
    file = configuration(tmp_path / "coordinator")

    def hetero(*words: str) -> str:
        code = cli.main(["keys", *words, "--config", str(file)])
        captured = capsys.readouterr()
        return f"{code} {captured.out}{captured.err}"

    assert "there are no keys in" in hetero("check")
    out = tmp_path / "out"
    assert hetero("export", "--output", str(out)).startswith("0 wrote")
    assert sorted(f.name for f in out.iterdir()) == ["worker-1.pem", "worker-two.pem"]
    assert "worker two: good" in hetero("list")
    assert "worker two: 1 revoked" in hetero("revoke", "two")
    assert "worker two: revoked" in hetero("list")
    assert hetero("revoke", "two").startswith("3 ")
    before = (file.parent / "hetero_keys" / "coordinator.pem").read_bytes()
    assert "the coordinator has a new key" in hetero("revoke", "coordinator")
    assert (file.parent / "hetero_keys" / "coordinator.pem").read_bytes() != before
    assert "all good" in hetero("check")
    assert "hetero invite 1 two" in hetero("rotate")
    for wrong in (["revoke"], ["list", "1"], ["export", "1"], ["check", "--output", "x"]):
        assert hetero(*wrong).startswith("2 "), wrong


@pytest.fixture
def two_clusters(tmp_path):
    """Each with a worker of its machine and a revoked one elsewhere."""
    found = (KeyDirectory(tmp_path / "own"), KeyDirectory(tmp_path / "other"))
    for keys in found:
        made, _ = certificates.ensure_authority(keys)
        certificates.issue_missing(keys, [1])
        certificates.issue_pem(keys, made, 2)
        certificates.revoke(keys, 2)
        assert check(None, keys).endswith("all good")
    return found


@pytest.mark.parametrize(
    ("is_missing", "file", "said"),
    [
        (False, "worker-1.pem", r"worker-1\.pem: it is of cluster .*, and the authority here of "),
        (False, "coordinator.pem", r"coordinator\.pem: it is of cluster .*, and the authority her"),
        (False, "issued.json", r"issued\.json is the list of cluster .*; the authority is of "),
        (False, "revoked.json", r"1 of the certificates in .*revoked\.json are not in issued\.jso"),
        (False, "authority.pem", r"the key directory .* has \d problems"),
        (True, "issued.json", "lacks its certificate, which cannot be revoked by name"),
        (True, "coordinator.pem", "there is no .*coordinator.pem, the key of the coordinator"),
        (True, "authority.pem", "issued.json is here without the authority.pem that it belongs to"),
    ],
)
def test_file_of_another_cluster_or_that_is_missing_is_named(is_missing, file, said, two_clusters):
    own, other = two_clusters
    if is_missing:
        (own.path / file).unlink()
    else:
        own.write(file, other.read(file))
    with pytest.raises(IdentityError) as found:
        check(None, own)
    assert re.search(said, str(found.value))
    assert is_missing or re.search("cluster|hetero keys rotate", str(found.value))


def test_revoked_key_lost_entry_and_left_overs_are_all_named_at_once(two_clusters, tmp_path):
    keys, _ = two_clusters
    certificates.revoke(keys, 1)
    entries = [entry for entry in certificates.issued(keys) if entry.process != "local"]
    keys.write("issued.json", json.dumps([vars(entry) for entry in entries]).encode())
    (keys.path / ".rotating").mkdir()
    (keys.path / ".authority.pem.00000000.tmp").touch()
    with pytest.raises(IdentityError, match="has 4 problems") as found:
        check(None, keys)
    left = "was left by a change of keys that was interrupted\n    delete it"
    for text in (
        *("worker-1.pem: it was revoked", "coordinator.pem: issued.json lacks its"),
        *(f".rotating {left}", f".authority.pem.00000000.tmp {left}"),
    ):
        assert text in str(found.value)
    certificates.rotate(keys)
    assert check(None, keys).endswith("all good")
    assert not keys.left_overs()


def test_doctor_finds_nothing_about_keys_where_none_are_used(tmp_path):
    made = view(tmp_path, worker={"ip": "192.0.2.7"})
    made.options = KeyOptions(insecure=True)
    assert list(findings(made)) == []


def test_line_that_invite_prints_makes_a_coordinator_an_island(tmp_path, capsys):
    keys, said = KeyDirectory(tmp_path / "lighthouse" / "hetero_keys"), queue.SimpleQueue[str]()
    address = ("127.0.0.1", free_ports(1)[0])
    names = ["garage", "attic", "garage"]
    inviting = in_background(
        lambda: invite_islands(keys.of_islands, names, address, say=said.put), "invite"
    )
    for name in ("garage", "attic"):
        assert said.get(timeout=WAIT_S) == f"on the machine of island {name}:"
        _hetero, _join, at, token = said.get(timeout=WAIT_S).split()
        file = configuration(tmp_path / name)
        before = file.read_text()
        assert cli.main(["join", at, token, "--config", str(file)]) == 0
        assert capsys.readouterr().out == (
            f"this machine is island {name}; its key is here. Next: hetero train --config {file}\n"
        )
        assert file.read_text() == before  # each island has its own configuration
        assert held(file.parent / "hetero_keys") == ["islands"]
        assert cli.main(["keys", "check", "--islands", "--config", str(file)]) == 0
        assert f"island-{name}.pem: the key of island {name}" in capsys.readouterr().out
    inviting.result(WAIT_S)


def test_keys_of_islands_are_exported_listed_revoked_and_rotated(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the lighthouse's machine need not have a configuration

    def hetero(*words: str) -> str:
        code = cli.main(["keys", *words, "--islands"])
        captured = capsys.readouterr()
        return f"{code} {captured.out}{captured.err}"

    assert "hetero invite --island NAME on the lighthouse's machine" in hetero("check")
    assert hetero("export", "--output", "out").startswith("2 ")
    assert hetero("export", "local", "--output", "out").startswith("2 ")
    exported = hetero("export", "garage", "attic", "--output", "out")
    assert "copy it to hetero_keys/islands" in exported
    assert {f.name for f in Path("out").iterdir()} == {"island-attic.pem", "island-garage.pem"}
    assert "island garage: good" in hetero("list")
    assert "island garage: 1 revoked. Islands hear of it" in hetero("revoke", "garage")
    assert "island garage: revoked" in hetero("list")
    assert "the lighthouse has a new key" in hetero("revoke", "lighthouse")
    assert "all good" in hetero("check")
    assert "hetero invite --island attic --island garage" in hetero("rotate")
    assert held(Path("hetero_keys")) == ["islands"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "takes IDs of workers or --island NAME"),
        (["1", "--island", "garage"], "takes IDs of workers or --island NAME"),
        (["1", "--bind", "127.0.0.1"], "goes with hetero invite --island"),
        (["--island", "two words"], "no island can be called 'two words': a name has 1 to 64"),
        (["--island", "local"], "names the lighthouse"),
        (["--island", "lighthouse"], "names the lighthouse"),
    ],
)
def test_an_invitation_without_a_valid_recipient_is_refused(words, said, tmp_path, capsys):
    file = tmp_path / "none" / "c.json"
    assert cli.main(["invite", *words, "--config", str(file)]) == 2
    assert said in capsys.readouterr().err
    assert not file.parent.exists()


def test_islands_are_told_the_address_that_the_configuration_has(tmp_path):
    file = configuration(tmp_path / "own")
    raw = {**json.loads(file.read_text()), "island": {"name": "a", "lighthouse": "[fd00::1]:7"}}
    file.write_text(json.dumps(raw))
    assert lighthouse_address(load_config(file), None) == ("fd00::1", 7)
    assert lighthouse_address(load_config(file), "192.0.2.1") == ("192.0.2.1", 7)
    assert lighthouse_address(None, "192.0.2.1") == ("192.0.2.1", LIGHTHOUSE_PORT)
    assert lighthouse_address(None, None)[0] == addresses.primary_address()


def test_init_makes_keys_where_other_machines_take_part(tmp_path, capsys):
    def init(folder: str, *words: str) -> str:
        output = tmp_path / folder / "c.json"
        output.parent.mkdir()
        options = ["--non-interactive", "--model", "org/m", "--layers", "4", "--output"]
        assert cli.main(["init", *options, str(output), *words]) == 0
        return capsys.readouterr().out

    own = ["--coordinator", "127.0.0.1:9998:cpu"]
    assert "hetero invite 1 --config" in init("far", *own, "--worker", "192.0.2.7")
    made = ["authority.pem", "coordinator.pem", "issued.json"]
    assert held(tmp_path / "far" / "hetero_keys") == made
    assert "invite" not in init("near", *own, "--worker", "127.0.0.1:9001")
    assert not (tmp_path / "near" / "hetero_keys").exists()
    assert "hetero invite --island a\n" in init(
        "island", *own, "--island", "a", "--lighthouse", "192.0.2.9:29510"
    )
    # Another machine is to be the coordinator: it makes the keys.
    init("elsewhere", "--coordinator", "192.0.2.9:9998", "--worker", "192.0.2.7")
    assert not (tmp_path / "elsewhere" / "hetero_keys").exists()
