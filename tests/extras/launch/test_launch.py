from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hetero_framework import cli, control
from hetero_framework._version import __version__
from hetero_framework.core import addresses
from hetero_framework.extras.launch import launch_files
from hetero_framework.security.keys import AUTHORITY, KeyDirectory

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX shells")
ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "launch"
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
ISLAND = '{"name": "a", "lighthouse": "10.0.0.1:1"}'
Launch = Callable[..., int]


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """`hetero launch` on the coordinator's machine, in a directory with a space in its name."""
    monkeypatch.setattr(addresses, "local_addresses", lambda: ["127.0.0.1", "192.168.1.10"])
    monkeypatch.setattr(addresses, "local_hostnames", lambda: ["desk"])
    monkeypatch.setattr(control, "_imported", [])  # other tests' processes import none of it
    place = tmp_path / "my cluster"
    place.mkdir()
    (place / "cluster.json").write_text(json.dumps(CLUSTER))
    monkeypatch.chdir(place)
    return lambda *words: cli.main(["launch", "--config", "cluster.json", *words])


def written(place: Path) -> dict[str, str]:
    """The files of launch/, with other names for what differs from machine to machine."""
    names = {str(place): "/srv/my cluster", str(ROOT): "/opt/hetero", __version__: "VERSION"}
    names[f"{os.getuid()}:{os.getgid()}"] = "1000:1000"
    found = {}
    for file in sorted(file for file in Path("launch").rglob("[!.]*") if file.is_file()):
        text = file.read_text()
        for here, there in names.items():
            text = text.replace(here, there)
        found[file.relative_to("launch").as_posix()] = text
    return found


def compose_program() -> list[str] | None:
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]) is not None:
            asked = subprocess.run([*words, "version"], capture_output=True, timeout=60)
            if asked.returncode == 0:
                return words
    return None


COMPOSE = compose_program()
WAYS = {
    "ssh": ("--host", "1=ann@gpu1", "--ssh-option", "Port=2222"),
    "slurm": ("--resources", "1=--partition=a100 --gpus=1"),
    "compose": (),
    "sky": tuple(f"--resources={worker}=L4:1" for worker in (1, 2, 4)),
    "sky-away": ("--set=coordinator.ip=192.0.2.1", "--resources=local=A10:1")
    + tuple(f"--resources={worker}=L4:1" for worker in (1, 2, 4)),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_files_are_the_golden_ones(launch, tmp_path, way, monkeypatch):
    """HETERO_WRITE_GOLDEN=1 writes them anew, to be read."""
    monkeypatch.setattr(launch_files, "_DRI", tmp_path)
    (tmp_path / "renderD128").touch()
    os.chown(tmp_path / "renderD128", -1, os.getgid())
    Path("my model.py").touch()
    common = ("--set", "training.seed=3", "--import", "my model.py", "--", "--resume", "latest")
    assert launch(f"--{way.removesuffix('-away')}", *WAYS[way], *common) == 0
    files = {
        name: text.replace(f"group_add:\n    - '{os.getgid()}'", "group_add:\n    - '110'")
        for name, text in written(tmp_path / "my cluster").items()
    }
    golden = GOLDEN / way
    if os.environ.get("HETERO_WRITE_GOLDEN"):
        golden.mkdir(exist_ok=True, parents=True)
        for name in (name for name in files if "/" not in name):
            (golden / name).write_text(files[name])
    expected = {file.name: file.read_text() for file in golden.iterdir()}
    assert {name: text for name, text in files.items() if "/" not in name} == expected
    names = ("coordinator", "worker-1", "worker-2", "worker-4", "worker-laptop")
    keys = {f"keys/{name}/{name}.pem" for name in names} if way != "ssh" else set()
    assert {name for name in files if "/" in name} == keys


@pytest.mark.skipif(COMPOSE is None, reason="needs docker compose, of any version")
def test_compose_accepts_its_file(launch):
    assert launch("--compose") == 0
    words = [*COMPOSE, "-f", "launch/compose.yaml", "config"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "worker-laptop" in done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_no_file_holds_the_authoritys_key(launch, way):
    assert launch(f"--{way.removesuffix('-away')}", *WAYS[way]) == 0
    secret = KeyDirectory(Path("hetero_keys").absolute()).read(AUTHORITY).split(b"-----")[2].strip()
    assert len(secret) > 100
    for file in (file for file in Path("launch").rglob("*") if file.is_file()):
        assert secret not in file.read_bytes(), file
        assert file.stat().st_mode & 0o077 == 0
        assert file.parent.stat().st_mode & 0o077 == 0 or file.parent == Path("launch/keys")


def test_an_insecure_launch_needs_no_keys(launch):
    assert launch("--ssh", "--insecure-plaintext") == 0
    assert not Path("hetero_keys").exists()
    assert "--insecure-plaintext" in Path("launch/ssh.sh").read_text()


def test_a_launch_that_differs_is_kept_without_force(launch, capsys):
    assert launch("--ssh") == 0
    before = Path("launch/ssh.sh").read_bytes()
    assert launch("--ssh") == 0
    assert launch("--ssh", "--set", "training.seed=9") == 2
    assert "launch differs from what would be written: ssh.sh" in capsys.readouterr().err
    assert Path("launch/ssh.sh").read_bytes() == before
    assert launch("--ssh", "--set", "training.seed=9", "--overwrite") == 0
    assert "training.seed=9" in Path("launch/ssh.sh").read_text()
    there = sorted(path.name for path in Path().iterdir())
    assert there == ["cluster.json", "hetero_keys", "launch"]


def test_a_directory_of_others_is_never_replaced(launch, capsys):
    Path("launch").mkdir()
    Path("launch/thesis.txt").write_text("")
    assert launch("--ssh", "--overwrite") == 2
    assert "launch is there already" in capsys.readouterr().err
    assert Path("launch/thesis.txt").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "give one of --ssh, --slurm"),
        (("--slurm", "--compose"), "give one of --ssh, --slurm"),
        (("--sky", "--set=model.name_or_path=/opt"), "the rented machines have no /opt"),
        (("--compose", "--set=data.train=/gone.jsonl"), "/gone.jsonl, which the configuration"),
        (("--compose", "--set=training.output_dir=/gone/run"), "it does not exist"),
        (("--compose", "--set=training.output_dir=.."), "it holds the keys"),
        (("--sky",), "--resources 1=NAME:COUNT has to say which accelerator"),
        (("--slurm", f"--set=island={ISLAND}"), "the key of an island"),
        (("--sky", "--set=coordinator.ip=127.0.0.1"), "rented machines cannot dial"),
        (("--slurm", "--run"), "--run with --ssh or --compose"),
        (("--ssh", "--host", "9=x"), "9=x is not ID=VALUE with an ID of: local, 1, 2, laptop"),
        (("--ssh", "--host", "4=x"), "4=x is not"),  # the coordinator starts it
        (("--ssh", "--host", "1="), "1= is not"),
    ],
)
def test_what_cannot_be_launched_says_why(launch, words, problem, capsys):
    assert launch(*words) == 2
    assert problem in capsys.readouterr().err
    assert not Path("launch").exists()


def test_compose_mounts_what_the_configuration_names(launch, tmp_path):
    outside, place = tmp_path / "outside", Path.cwd()
    outside.mkdir()
    (outside / "data.jsonl").touch()
    (place / "train.jsonl").symlink_to(outside / "data.jsonl")
    settings = {"data.eval": "../outside/data.jsonl", "training.output_dir": str(outside)}
    settings["training.sample_prompts"] = f"{outside}/data.jsonl"
    assert launch("--compose", *(f"--set={name}={value}" for name, value in settings.items())) == 0
    services = yaml.safe_load(Path("launch/compose.yaml").read_text())["services"]
    for service in services.values():
        assert {
            f"{outside}/data.jsonl:{outside}/data.jsonl",
            f"{outside}/data.jsonl:/outside/data.jsonl",
            f"{outside}:{outside}",
        } <= set(service["volumes"])


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("printf 'no way in\\r\\n' >&2; exit 255", 2, "cannot be reached"),
        ('kill -TERM "$PPID"; exec sleep 300', 75, "stopped: before anything was started"),
    ],
)
def test_ssh_that_fails_or_hangs_ends_with_the_launch(
    launch, script, code, said, monkeypatch, capsys
):
    ssh = Path("bin/ssh")
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path.cwd()}/bin{os.pathsep}{os.environ['PATH']}")
    assert launch("--ssh", "--run") == code
    text = capsys.readouterr().err
    assert said in text
    assert "\\r" not in text


def test_options_that_train_does_not_have_end_the_command(launch):
    for words in (["--bogus"], ["--resume", "never"]):
        with pytest.raises(SystemExit):
            launch("--ssh", "--", *words)


def test_without_the_authority_no_key_is_made(launch, capsys):
    assert launch("--ssh") == 0
    Path("hetero_keys", AUTHORITY).unlink()
    Path("hetero_keys", "worker-2.pem").unlink()
    assert launch("--ssh") == 3
    assert "has keys, but not the authority that made them" in capsys.readouterr().err
