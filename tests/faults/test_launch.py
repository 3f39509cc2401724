"""`hetero launch`: real runs on machines with a network of their own, over a real ssh server and in
a real Slurm. What it says and sends by ssh is in tests/extras/launch/test_launch_over_ssh.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.network import Network, open_network
from tests import sshd
from tests.faults import networked
from tests.integration.test_parity import LORA
from tests.samples import plan_of, save_llama, save_texts

WHY = networked.needs()
NO_SSH = sshd.needs()
SLURM = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = f"{os.environ['PATH']}:/usr/sbin"
NO_SLURM = None if all(shutil.which(p, path=PATH) for p in SLURM) else "needs Slurm and MUNGE"
pytestmark = [pytest.mark.faults, pytest.mark.skipif(WHY is not None, reason=str(WHY))]
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 100.0


def within(place: Network, machine: int) -> list[str]:
    return ["nsenter", "-t", str(place.places[machine].namespace_pid), "-n"]


def soon(is_so: Callable[[], object], otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.05)  # nothing announces what other processes do


def configuration(at: Path, machines: list[dict[str, Any]]) -> Path:
    """A configuration of this coordinator and these workers, and a program `hetero` beside it."""
    workers = [{**machine, "id": k} for k, machine in enumerate(machines)][1:]
    ends = [3, 6] if len(workers) == 1 else [2, 4, 6]
    raw = {
        "coordinator": machines[0],
        "workers": workers,
        "shard_plan": plan_of(*((k or "local", end) for k, end in enumerate(ends))),
        "model": {"name_or_path": str(save_llama(at / "llama"))},
        "adapter": LORA,
        "data": {"train": str(save_texts(at / "texts.json", 32)), "max_length": 64},
        "training": {**networked.TRAINING, "output_dir": str(at / "run")},
    }
    (at / "hetero").write_text(
        f"#!/bin/sh\nPYTHONPATH='{ROOT}' HF_HUB_OFFLINE=1 HETERO_CACHE= exec "
        f"'{sys.executable}' -m hetero_framework \"$@\"\n"
    )
    (at / "hetero").chmod(0o700)
    file = at / "config.json"
    file.write_text(json.dumps(raw))
    return file


class Place:
    def __init__(self, at: Path, network: Network, server: sshd.Server) -> None:
        self.at, self.network, self.server = at, network, server
        hosts = [{"ip": ip, "port": port, "num_threads": 1} for ip, port in network.reach]
        self.file = configuration(at, hosts)
        options = [word for o in server.options for word in ("--ssh-option", o)]
        self.words = ["--config", str(self.file), "--hetero", str(at / "hetero"), *options]
        self.words += ["--directory", str(at / "there")]

    @contextmanager
    def launched(self, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        words = [sys.executable, "-m", "hetero_framework", "launch", "--ssh", "--run"]
        with (self.at / "said").open("ab") as said:
            process = subprocess.Popen(
                [*within(self.network, 0), *words, *self.words, *more],
                stderr=said,
                cwd=self.at,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)
            soon(lambda: not self.left(), self.said)

    def left(self) -> list[psutil.Process]:
        """The processes of this configuration, on either machine."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or [])
            if "hetero_framework" in words and (str(self.at) in words or "--life-line" in words):
                found.append(process)
        return found

    def said(self) -> str:
        return (self.at / "said").read_text()


@pytest.fixture
def place(tmp_path):
    with open_network("100mbit", 2) as network:
        address = network.places[1].address
        enter = within(network, 1)
        with sshd.ssh_server(tmp_path / "sshd", 2222, address, enter) as server:
            yield Place(tmp_path, network, server)


@pytest.mark.skipif(NO_SSH is not None, reason=str(NO_SSH))
def test_a_run_is_started_stopped_and_continued(place):
    run = place.at / "run"
    with place.launched("--set", "training.num_train_epochs=200") as process:
        metrics = run / "metrics.jsonl"
        soon(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2, place.said)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 75, place.said()
    assert [*(run / "checkpoints").glob("step_*")], place.said()
    assert "worker 1 | " in place.said()
    assert "coordinator | " in place.said()
    steps = json.loads(metrics.read_text().splitlines()[-1])["step"]
    changed = ("--set", f"training.max_steps={steps + 3}")
    with place.launched(*changed, "--", "--resume", "latest") as process:
        assert process.wait(WAIT_S) == 0, place.said()
    assert (run / "adapter" / "adapter_model.safetensors").exists(), place.said()
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == steps + 3


@contextmanager
def slurm(at: Path, network: Network) -> Iterator[dict[str, str]]:
    """A Slurm of one node per machine, n0 and so on; the environment for its commands."""
    at.mkdir(mode=0o711)
    addresses = [place.address for place in network.places]
    hosts = "".join(f"{address} n{k}\n" for k, address in enumerate(addresses))
    (at / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    (at / "key").write_bytes(os.urandom(1024))
    (at / "key").chmod(0o600)
    nodes = [
        f"NodeName=n{k} NodeHostname={socket.gethostname()} NodeAddr={address} Port=26820 CPUs=1"
        for k, address in enumerate(addresses)
    ]
    settings = f"""ClusterName=test
SlurmctldHost={socket.gethostname()}({addresses[0]})
AuthType=auth/munge
AuthInfo=socket={at}/munge
SlurmUser=root
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
"""
    partition = "PartitionName=all Nodes=ALL Default=YES State=UP\n"
    (at / "slurm.conf").write_text("\n".join([settings, *nodes, partition]))
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(at / "slurm.conf")}
    munge = ["munged", "-F", f"--socket={at}/munge", f"--key-file={at}/key", "--force"]
    munge += [f"--{name}-file={at}/munge.{name}" for name in ("pid", "log", "seed")]
    conf = ["-D", "-f", str(at / "slurm.conf")]
    commands = [munge, [*within(network, 0), *named(at), "slurmctld", *conf]]
    for k in range(len(addresses)):
        commands.append([*within(network, k), *named(at), "slurmd", *conf, "-N", f"n{k}"])
    with (at / "said").open("wb") as said, ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)

        def idle() -> bool:
            asked = [*within(network, 0), *named(at), "sinfo", "-h", "-o", "%T %D"]
            shown = subprocess.run(asked, capture_output=True, text=True, env=environment)
            return shown.stdout.split() == ["idle", str(len(addresses))]

        soon(idle, (at / "said").read_text)
        yield environment


def named(at: Path) -> list[str]:
    """Runs a command where /etc/hosts knows the nodes."""
    mount = f"mount --bind '{at}/hosts' /etc/hosts && exec \"$@\""
    return ["unshare", "--mount", "sh", "-c", mount, "sh"]


@pytest.mark.skipif(NO_SLURM is not None, reason=str(NO_SLURM))
def test_a_heterogeneous_job_trains_on_three_nodes(tmp_path):
    with open_network("100mbit", 3) as network, slurm(tmp_path / "slurm", network) as environment:
        ports = [{"ip": f"192.0.2.{k}", "port": 9000, "device": "cpu"} for k in range(1, 4)]
        file = configuration(tmp_path, ports)
        words = [sys.executable, "-m", "hetero_framework", "launch", "--slurm"]
        words += ["--config", str(file), "--hetero", str(tmp_path / "hetero")]
        words += ["--", "--save_every_n_steps", "3"]
        written = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert written.returncode == 0
        submit = ["sbatch", "--wait", "launch/slurm.sh"]
        command = [*within(network, 0), *named(tmp_path / "slurm"), *submit]
        done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=WAIT_S)
        said = "\n".join(f"{f.name}:\n{f.read_text()}" for f in tmp_path.glob("hetero-*.log"))
        assert done.returncode == 0, said
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists(), said
    assert len([*tmp_path.glob("hetero-*-worker-*.log")]) == 2
