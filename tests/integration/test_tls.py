"""Training over TLS: the same bits, nothing readable on the wire, and no access without keys."""

from __future__ import annotations

import dataclasses
import json
import socket
import ssl
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.core import messages as m
from hetero_framework.core import tls
from hetero_framework.core.dial import connect
from hetero_framework.core.messages import Message
from hetero_framework.errors import HeteroError
from hetero_framework.security import authority as x509
from hetero_framework.security.access import Keyed, KeyOptions, access_of
from hetero_framework.security.keys import KeyDirectory
from hetero_framework.trainer.coordinator import train
from tests.certificates import authority, keys_of
from tests.fault_proxy import FaultProxy
from tests.framed import framed
from tests.pools import TRAINING, Notes, is_listening, read_metrics, started, with_end
from tests.samples import free_ports, plan_of
from tests.waiting import WAIT_S


class Cluster:
    """Two workers with keys, each behind a proxy, and the configuration of their coordinator. A
    link through a proxy keeps TLS on one machine, too."""

    def __init__(self, folder: Path, llama: Path, texts: Path) -> None:
        self.folder = folder
        self.keys = keys_of(folder / "keys", "local", 1, 2, 3)
        self.ports = free_ports(2)
        self.proxies = [
            FaultProxy(("127.0.0.1", port), follows_frames=False) for port in self.ports
        ]
        machine = {"ip": "127.0.0.1", "device": "cpu"}
        self.raw: dict[str, Any] = {
            "coordinator": {**machine, "port": free_ports(1)[0]},
            "workers": [{**machine, "id": i, "port": p} for i, p in enumerate(self.ports, 1)],
            "shard_plan": plan_of(("local", 2), (1, 4), (2, 6)),
            "model": {"name_or_path": str(llama)},
            "data": {"train": str(texts), "max_length": 64},
            "training": {**TRAINING, "num_train_epochs": 2, "rejoin_wait_s": 60.0},
        }
        file = folder / "workers.json"
        file.write_text(json.dumps(self.raw))
        self.logs = [folder / f"worker-{i}.log" for i in (1, 2)]
        self.processes = [self._start(i, file, log) for i, log in enumerate(self.logs, 1)]

    def _start(self, worker: int, config: Path, log: Path) -> subprocess.Popen[bytes]:
        words = ["worker", "--keep", "--supervised", "--config", str(config)]
        words += ["--worker-id", str(worker), "--keys", str(self.keys.path)]
        return started(log, *words, stdin=subprocess.PIPE)

    def wait(self) -> None:
        for process, port in zip(self.processes, self.ports, strict=True):
            while not is_listening(port):
                with_end(process)

    def config(self, name: str, proxies: list[FaultProxy] | None) -> Config:
        """Through the proxies, if any."""
        ports = self.ports if proxies is None else [proxy.port for proxy in proxies]
        workers = [
            {**worker, "port": port}
            for worker, port in zip(self.raw["workers"], ports, strict=True)
        ]
        output = {"output_dir": str(self.folder / name)}
        own = {"workers": workers, "training": {**self.raw["training"], **output}}
        return Config.from_dict({**self.raw, **own})

    def train(
        self, name: str, notes: Notes | None = None, *, proxied: bool = True
    ) -> tuple[list[tuple], list[str]]:
        notes = notes or Notes()
        config = self.config(name, self.proxies if proxied else None)
        access = access_of(config, "local", KeyOptions(self.keys.path))
        train(config, debug=True, progress=notes, access=access)
        return read_metrics(self.folder / name), notes.lines

    def train_plain(self, name: str, proxies: list[FaultProxy]) -> None:
        """With other workers, which have no keys."""
        train(self.config(name, proxies), debug=True)

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait(30)
        for proxy in self.proxies:
            proxy.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, llama, texts):
    made = Cluster(tmp_path_factory.mktemp("tls"), llama, texts)
    try:
        made.wait()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def undisturbed(cluster):
    return cluster.train("undisturbed")[0]


def test_run_over_tls_equals_the_plain_one_to_the_last_bit(undisturbed, losses):
    assert undisturbed == losses([2, 4], training={"num_train_epochs": 2})


@pytest.mark.long
def test_killed_worker_whose_link_left_tls_costs_steps_and_changes_nothing(
    tmp_path, llama, texts, undisturbed
):
    cluster = Cluster(tmp_path, llama, texts)

    def kill(step: int) -> None:
        if step == 2 and cluster.processes[0].returncode is None:
            cluster.processes[0].kill()
            cluster.processes[0].wait(WAIT_S)
            file, log = tmp_path / "workers.json", tmp_path / "again.log"
            cluster.logs.append(log)
            cluster.processes.append(cluster._start(1, file, log))

    notes = Notes(kill)
    try:
        cluster.wait()
        assert cluster.train("killed", notes, proxied=False)[0] == undisturbed
    finally:
        cluster.close()
    assert any("lost the link to worker 1" in line for line in notes.lines)
    for log in cluster.logs:
        assert "the link goes on without encryption" in log.read_text()


def test_byte_that_is_changed_on_its_way_costs_a_step_and_changes_nothing(cluster, undisturbed):
    def flip(step: int) -> None:
        if step == 2:
            cluster.proxies[0].up.flip_in = 5000

    notes = Notes(flip)
    assert cluster.train("flipped", notes)[0] == undisturbed
    assert any("lost the link to worker 1" in line for line in notes.lines)
    assert "DECRYPTION_FAILED_OR_BAD_RECORD_MAC" in cluster.logs[0].read_text()


def test_tls_hides_every_byte_of_a_plain_run(cluster, pool, undisturbed):
    """Both runs send the same tensors: no 16 bytes of the plain one, tokens, activations, gradients
    or weights, are among those of the other."""
    ports = [worker["port"] for worker in pool.machines["workers"][:2]]
    plain_proxies = [FaultProxy(("127.0.0.1", port)) for port in ports]
    try:
        plain = kept(plain_proxies, lambda: cluster.train_plain("read", plain_proxies))
    finally:
        for proxy in plain_proxies:
            proxy.stop()
    hidden = kept(cluster.proxies, lambda: cluster.train("hidden"))
    pieces = {plain[at : at + 16] for at in range(0, len(plain) - 16, 16)}
    known = {piece for piece in pieces if len(set(piece)) > 4}
    [weights] = (cluster.folder / "read").glob("*/*.safetensors")
    # The plain copy has what it should have: weights that workers sent, as they were written.
    assert any(plain.find(piece) >= 0 for piece in chunks(weights.read_bytes()))
    assert len(known) > 10_000
    assert len(hidden) > 0.9 * len(plain)
    assert not [at for at in range(len(hidden) - 15) if hidden[at : at + 16] in known]


def kept(proxies: list[FaultProxy], run: Callable[[], Any]) -> bytes:
    directions = [faults for proxy in proxies for faults in (proxy.up, proxy.down)]
    for faults in directions:
        faults.kept = bytearray()
    run()
    found = b"".join(bytes(faults.kept or b"") for faults in directions)
    for faults in directions:
        faults.kept = None
    return found


def chunks(data: bytes) -> Iterator[bytes]:
    """Pieces of the second half, which are tensors of the last layers."""
    half = data[len(data) // 2 :]
    return (half[at : at + 64] for at in range(0, len(half) - 64, 4096))


class Strangers(Notes):
    """At the first step all of them come to worker 1."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__()
        self.said: dict[str, str] = {}
        self._cluster = cluster
        self._folder = folder

    def step(self, metrics: dict[str, Any]) -> None:
        super().step(metrics)
        if metrics["step"] == 1:
            for name, attempt in self._attempts().items():
                self.said[name] = attempt()

    def _attempts(self) -> dict[str, Callable[[], str]]:
        own, of = self._cluster.keys, partial(keys_of, self._folder / "foreign", "local")
        revoked = keys_of(self._folder / "revoked", "local")
        self._cluster.keys.revoke([x509.serial_of(revoked.read("coordinator.pem"))])
        hello = Message(m.Hello("stranger", 1, process="p", epoch=1, max_frame_bytes=1 << 20))
        return {
            "plaintext": lambda: self._raw(framed(hello)),
            "HTTP": lambda: self._raw(b"GET / HTTP/1.1\r\n\r\n"),
            "TLS 1.2": lambda: self._tls(maximum_version=ssl.TLSVersion.TLSv1_2),
            "no certificate": self._tls,
            "other cluster": lambda: self._dial(of(of="other"), "local"),
            "other cluster, unchecked": lambda: self._tls(of(of="other").bundle("local")),
            "self-signed": lambda: self._tls(self_signed(self._folder, own)),
            "id not in plan": lambda: self._dial(own, 3),
            "revoked": lambda: self._dial(revoked, "local"),
            "worker as coordinator": lambda: self._dial(own, 2, hello),
        }

    @property
    def _address(self) -> tuple[str, int]:
        return "127.0.0.1", self._cluster.ports[0]

    def _raw(self, data: bytes) -> str:
        with socket.create_connection(self._address, WAIT_S) as sock:
            sock.sendall(data)
            return said_in(sock)

    def _tls(self, bundle: Path | None = None, **settings: Any) -> str:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
        made.set_alpn_protocols([tls.ALPN])
        for name, value in settings.items():
            setattr(made, name, value)
        if bundle is not None:
            made.load_cert_chain(bundle)
        with socket.create_connection(self._address, WAIT_S) as sock:
            try:
                with made.wrap_socket(sock) as wrapped:
                    return said_in(wrapped)
            except ssl.SSLError as error:
                return str(error.reason)

    def _dial(self, keys: KeyDirectory, who: int | str, hello: Message | None = None) -> str:
        access = Keyed(keys, who, [1, 2, 3])
        try:
            stream = connect(*self._address, WAIT_S, secure=partial(access.dialled, process=1))
        except HeteroError as error:
            return error.message
        with closing(stream):
            if hello is not None:
                stream.write(deque([memoryview(framed(hello))]))
            view = memoryview(bytearray(4096))
            deadline = time.monotonic() + WAIT_S
            while (count := stream.read(view)) is None:
                assert time.monotonic() < deadline
            return f"{count} bytes"


def said_in(sock: Any) -> str:
    """What the other side says until it hangs up; a TLS alert in plaintext, of 7 bytes, may be lost
    when it does."""
    got = b""
    try:
        while more := sock.recv(4096):
            got += more
    except ssl.SSLError as error:
        return str(error.reason)
    except ConnectionResetError:
        pass
    return "nothing" if not got or (len(got) == 7 and got[0] == 21) else repr(got)


def self_signed(folder: Path, keys: KeyDirectory) -> Path:
    """A certificate of this cluster's coordinator, by an authority that only has the same name."""
    forged = dataclasses.replace(authority(), key=x509.new_key())
    pem, _ = forged.issue(keys.identity("local"))
    file = folder / "forged.pem"
    file.write_bytes(pem)
    return file


def test_unauthenticated_connections_get_nothing_and_disturb_nothing(
    cluster, undisturbed, tmp_path
):
    notes = Strangers(cluster, tmp_path)
    assert cluster.train("strangers", notes)[0] == undisturbed
    assert not any("lost" in line for line in notes.lines)
    # Which of two alerts it is depends on OpenSSL's version.
    assert notes.said.pop("self-signed") in ("TLSV1_ALERT_UNKNOWN_CA", "TLSV1_ALERT_DECRYPT_ERROR")
    assert notes.said == {
        "plaintext": "nothing",
        "HTTP": "nothing",
        "TLS 1.2": "TLSV1_ALERT_PROTOCOL_VERSION",
        "no certificate": "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "other cluster": "worker 1 has keys of another cluster, or a certificate of its own",
        "other cluster, unchecked": "TLSV1_ALERT_UNKNOWN_CA",
        "id not in plan": "worker 1 refused this machine: worker 3 is not in this machine's "
        "configuration (workers: 1, 2)",
        "revoked": "worker 1 refused this machine: its certificate was revoked "
        "(hetero keys revoke)",
        "worker as coordinator": "0 bytes",
    }


@pytest.mark.long
def test_500_idle_connections_do_not_keep_the_coordinator_out(cluster, undisturbed):
    """They come from the coordinator's own address, and none of them says a word."""
    address = ("127.0.0.1", cluster.ports[0])
    with ExitStack() as held:
        for _ in range(500):
            held.enter_context(socket.create_connection(address, WAIT_S))
        assert cluster.train("crowded")[0] == undisturbed
