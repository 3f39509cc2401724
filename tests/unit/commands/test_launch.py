from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_framework import cli
from hetero_framework.commands import launch_plan
from hetero_framework.core import addresses
from hetero_framework.security.keys import AUTHORITY, KeyDirectory

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX shells")
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "launch"
CLUSTER = {
    "coordinator": {"hostname": "desk", "ip": "192.168.1.10", "device": "cuda:0"},
    "workers": [
        {"id": 1, "hostname": "box", "ip": "192.168.1.20", "port": 9999, "device": "cuda:0"},
        {"id": 2, "hostname": "box", "ip": "192.168.1.20", "port": 9998, "device": "rocm:1"},
        {"id": "laptop", "ip": "2001:db8::30", "device": "cpu"},
        {"id": 4, "ip": "192.168.1.10", "port": 9997, "device": "cuda:1"},
    ],
    "shard_plan": [
        {"id": owner, "start": at, "end": at + 1}
        for at, owner in enumerate(("local", 1, 2, "laptop", 4))
    ],
    "model": {"name_or_path": "org/model"},
    "data": {"train": "train.jsonl"},
}
Launch = Callable[..., int]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """`hetero launch` on the coordinator's machine, in a directory with a space in its name."""
    monkeypatch.setattr(addresses, "local_addresses", lambda: ["127.0.0.1", "192.168.1.10"])
    monkeypatch.setattr(addresses, "local_hostnames", lambda: ["desk"])
    place = tmp_path / "my cluster"
    place.mkdir()
    (place / "cluster.json").write_text(json.dumps(CLUSTER))
    monkeypatch.chdir(place)
    return lambda *words: cli.main(["launch", "--config", "cluster.json", *words])


def written(place: Path) -> dict[str, str]:
    """The files of launch/, with `place` by another name."""
    files = sorted(file for file in Path("launch").rglob("*") if file.is_file())
    return {
        file.relative_to("launch").as_posix(): file.read_text().replace(
            str(place), "/srv/my cluster"
        )
        for file in files
    }


def check(golden: str, text: str) -> None:
    assert text == (GOLDEN / golden).read_text()


def test_the_ssh_script_is_the_golden_one(launch: Launch, tmp_path: Path) -> None:
    assert launch("--ssh", "--set", "training.seed=3", "--host", "1=ann@gpu1") == 0
    check("ssh.sh", written(tmp_path / "my cluster")["ssh.sh"])


def test_an_insecure_launch_needs_no_keys(launch: Launch) -> None:
    assert launch("--ssh", "--insecure-plaintext") == 0
    assert not Path("hetero_keys").exists()
    assert "--insecure-plaintext" in Path("launch/ssh.sh").read_text()


def test_the_machines_of_workers_get_their_own_keys_alone(launch: Launch) -> None:
    assert launch("--ssh") == 0
    keys = KeyDirectory(Path("hetero_keys").absolute())
    assert sorted(keys.processes()) == ["1", "2", "4", "laptop", "local"]
    script = Path("launch/ssh.sh").read_text()
    assert AUTHORITY not in script
    copies = [line for line in script.splitlines() if "cat > " in line and ".pem" in line]
    assert [line.rpartition("/")[2].strip("'") for line in copies] == [
        f"worker-{k}.pem" for k in (1, 2, "laptop")
    ]


def test_a_launch_that_differs_is_kept_without_force(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("--ssh") == 0
    before = Path("launch/ssh.sh").read_bytes()
    assert launch("--ssh") == 0
    assert launch("--ssh", "--set", "training.seed=9") == 2
    assert "launch differs from what would be written: ssh.sh" in capsys.readouterr().err
    assert Path("launch/ssh.sh").read_bytes() == before
    assert launch("--ssh", "--set", "training.seed=9", "--force") == 0
    assert "training.seed=9" in Path("launch/ssh.sh").read_text()
    assert sorted(path.name for path in Path().iterdir()) == [
        "cluster.json",
        "hetero_keys",
        "launch",
    ]


def test_a_directory_of_others_is_never_replaced(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("launch").mkdir()
    Path("launch/thesis.txt").write_text("")
    assert launch("--ssh", "--force") == 2
    assert "launch has files of others" in capsys.readouterr().err
    assert Path("launch/thesis.txt").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "say how to launch"),
        (("--ssh", "--host", "9=x"), "there is no process 9"),
        (("--ssh", "--host", "4=x"), "worker 4 is on the coordinator's machine"),
        (("--ssh", "--host", "1=-oProxyCommand=x"), "is not of the form ID=VALUE"),
    ],
)
def test_what_cannot_be_launched_says_why(
    launch: Launch, words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*words) == 2
    assert problem in capsys.readouterr().err
    assert not Path("launch").exists()


def test_options_that_train_does_not_have_end_the_command(launch: Launch) -> None:
    for words in (["--bogus"], ["--config", "x"], ["--role", "worker"]):
        with pytest.raises(SystemExit):
            launch("--ssh", "--", *words)


def test_without_the_authority_no_key_is_made(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("--ssh") == 0
    Path("hetero_keys", AUTHORITY).unlink()
    Path("hetero_keys", "worker-2.pem").unlink()
    assert launch("--ssh") == 3
    assert "has no key of worker 2, and not the authority" in capsys.readouterr().err


def test_ids_of_repeated_options() -> None:
    assert launch_plan.by_id(["1=a=b", "x=c"], "--host") == {"1": "a=b", "x": "c"}
