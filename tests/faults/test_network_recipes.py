"""The networks of docs/networks.md, made of network namespaces with the page's addresses: real
workers are trained with there, and `hetero doctor --config` says what the page quotes of it.

A router filters by the port that a packet goes to, as a firewall does by the connection, and
rewrites addresses where nft is installed. A process passes ports on.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machines import Child, Machines
from benchmarks.network import Place, hold_namespaces, pass_on
from hetero_framework.commands import diagnosis
from hetero_framework.config import Config
from hetero_framework.security.access import KeyOptions
from tests.certificates import keys_of
from tests.faults import networked
from tests.integration.test_parity import LORA
from tests.samples import plan_of, save_llama, save_texts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300), pytest.mark.xdist_group("recipes")]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "networks.md"
WIREGUARD = ("wg", "wg-quick", "wireguard-go")
SERVICES = "1-32767"
"""Ports below those from which Linux opens connections."""
WAIT_S = 120.0
VARIES = re.compile(r"(?<![\d.:])\d[\d.]*(?= times?| s\b| ms\b| us\b| [KMG]?bit/s)")
Raw = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """A network namespace."""

    pid: int

    def tool(self, command: str, **options: Any) -> str:
        """What a tool of the system prints there."""
        words = ["nsenter", "-t", str(self.pid), "-n", *command.split()]
        done = subprocess.run(words, check=True, capture_output=True, text=True, **options)
        return done.stdout

    def guard(self, card: str) -> None:
        """Be a router that lets connections out through its network card, and none in."""
        self.tool("sysctl -qw net.ipv4.ip_forward=1")
        self.tool("ip rule add pref 30 lookup local")  # after the firewall, instead of first
        self.tool("ip rule del pref 0")
        self.tool(f"ip rule add pref 20 iif {card} ipproto tcp dport {SERVICES} blackhole")
        if shutil.which("nft"):
            chain = "{ type nat hook postrouting priority 100; }"
            rules = f"add table ip nat\nadd chain ip nat out {chain}\n"
            self.tool("nft -f -", input=f"{rules}add rule ip nat out oif {card} masquerade\n")

    def let_in(self, port: int) -> None:
        """A router's: one TCP port that others may connect to."""
        self.tool(f"ip rule add pref 10 ipproto tcp dport {port} lookup local")


class Net:
    """Machines, what connects them, and the processes on them."""

    def __init__(self, stack: ExitStack, base: Mapping[str, Any], at: Path) -> None:
        self.stack, self.at = stack, at
        self._keys = keys_of(at / "keys", "local", 1).path
        self._base, self._started = base, stack.enter_context(Machines())
        self._cards = 0

    def machine(self) -> Machine:
        [pid] = self.stack.enter_context(hold_namespaces(1))
        machine = Machine(pid)
        machine.tool("ip link set lo up")
        return machine

    def lan(self, members: Mapping[Machine, str], mtu: int = 1500) -> dict[Machine, str]:
        """An Ethernet of these machines and their addresses; the names of their cards."""
        switch, cards = self.machine(), {}
        switch.tool("ip link add bridge type bridge")
        switch.tool("ip link set bridge up")
        for machine, address in members.items():
            self._cards += 1
            card, port = f"eth{self._cards}", f"port{self._cards}"
            switch.tool(f"ip link add {card} netns {machine.pid} type veth peer name {port}")
            switch.tool(f"ip link set {port} master bridge up")
            machine.tool(f"ip addr add {address}/24 dev {card}")
            machine.tool(f"ip link set {card} mtu {mtu} up")
            cards[machine] = card
        return cards

    def home(self, inside: str, outside: str) -> tuple[Machine, Machine, Machine]:
        """A machine at 203.0.113.10, and one behind a router: these two and the router."""
        desk, router, box = self.machine(), self.machine(), self.machine()
        router.guard(self.lan({desk: "203.0.113.10", router: outside})[router])
        network = inside.rpartition(".")[0]
        self.lan({router: f"{network}.1", box: inside})
        box.tool(f"ip route add default via {network}.1")
        desk.tool(f"ip route add {network}.0/24 via {outside}")
        return desk, router, box

    def start(self, machine: Machine, function: Any, *arguments: Any) -> Child:
        return self._started.start(Place("", 0, "", machine.pid), function, *arguments)

    def forward(self, machine: Machine, at: str, to: str) -> None:
        """Have a machine pass on what comes to "address:port" of its own."""
        ends = [(host, int(port)) for host, _, port in (end.partition(":") for end in (at, to))]
        self.start(machine, pass_on, *ends).receive(WAIT_S)

    def config(self, coordinator: str, *workers: Raw) -> Raw:
        """A configuration that gives all machines layers."""
        machine, ends = {"device": "cpu", "num_threads": 1}, [2, 4, 6][: len(workers)] + [6]
        return {
            **self._base,
            "coordinator": {"ip": coordinator, "port": 9998, **machine},
            "workers": [{"id": k, **machine, **worker} for k, worker in enumerate(workers, 1)],
            "shard_plan": plan_of(*((k or "local", end) for k, end in enumerate(ends))),
            "training": {**networked.TRAINING, "max_steps": 3, "output_dir": str(self.at / "run")},
        }

    def doctor(self, machine: Machine, raw: Raw, worker_id: int | None = None) -> set[str]:
        """The lines of `hetero doctor --config` there."""
        child = self.start(machine, examine, raw, worker_id, self._keys)
        try:
            return lines(child.receive(WAIT_S))
        finally:
            child.end()
            child.join()

    def worker(self, machine: Machine, raw: Raw) -> Child:
        """Worker 1, which serves one run after the other."""
        logs = self.at / f"logs-{machine.pid}-{len(list(self.at.iterdir()))}"
        return self.start(machine, networked.work, raw, 1, str(logs), self._keys)

    def train(self, machine: Machine, raw: Raw) -> None:
        """A run of three steps."""
        child = self.start(machine, networked.coordinate, raw, self._keys)
        run = networked.Run(self.at / "run", child)
        run.after_step(3)
        run.finish()


def examine(connection: Connection, raw: Raw, worker_id: int | None, keys: Path) -> None:
    config = Config.from_dict(raw)
    found = diagnosis.diagnose(config, worker_id=worker_id, options=KeyOptions(keys))
    connection.send(diagnosis.text(found))


def lines(shown: str) -> set[str]:
    """What doctor says, without figures that differ from run to run."""
    kept = [
        line for line in shown.splitlines() if line.startswith(("wrong:", "    do:", "nothing"))
    ]
    return {VARIES.sub("N", line).replace("N time ", "N times ").strip() for line in kept}


def quoted(section: str) -> set[str]:
    """What a section of the page quotes of doctor."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, f"the page has no section {section!r}"
    return lines("\n".join(re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)))


FINE = {"nothing is wrong"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    if problem := networked.needs():
        pytest.skip(problem)
    at = tmp_path_factory.mktemp("recipes")
    model, texts = save_llama(at / "llama"), save_texts(at / "texts.jsonl", 21)
    data = {"train": str(texts), "max_length": 64}
    return {"model": {"name_or_path": str(model)}, "data": data, "adapter": LORA}


@pytest.fixture
def net(base, tmp_path):
    with ExitStack() as stack:
        yield Net(stack, base, tmp_path)


def test_one_lan(net):
    desk, box = net.machine(), net.machine()
    net.lan({desk: "192.168.1.10", box: "192.168.1.20"})
    raw = net.config("192.168.1.10", {"ip": "192.168.1.20", "port": 9999})
    said = net.doctor(desk, raw)  # nothing is started there
    box.tool(f"ip rule add pref 20 ipproto tcp sport {SERVICES} blackhole")
    said |= net.doctor(desk, raw)  # a firewall
    box.tool("ip rule del pref 20")
    elsewhere = net.config("192.168.1.10", {"ip": "192.168.0.20", "port": 9999})
    said |= net.doctor(desk, elsewhere)
    net.worker(box, raw)
    assert net.doctor(desk, raw) == FINE
    net.train(desk, raw)
    assert said == quoted("One LAN")


def test_a_tunnel_of_wireguard(net):
    if missing := [tool for tool in WIREGUARD if shutil.which(tool) is None]:
        pytest.skip(f"WireGuard is not installed: {', '.join(missing)}")
    desk, _, box = net.home("192.168.2.20", "203.0.113.5")
    page = PAGE.read_text(encoding="utf-8")
    files = re.findall(r"^```ini\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    secrets = [subprocess.check_output(["wg", "genkey"], text=True).strip() for _ in files]
    public = [
        subprocess.check_output(["wg", "pubkey"], input=secret, text=True).strip()
        for secret in secrets
    ]
    names = ("hetero1", "hetero2")
    for k, (machine, file) in enumerate(zip((desk, box), files, strict=True)):
        keyed = re.sub("PrivateKey = .*", f"PrivateKey = {secrets[k]}", file)
        keyed = re.sub("PublicKey = .*", f"PublicKey = {public[1 - k]}", keyed)
        written = net.at / f"{names[k]}.conf"
        written.write_text(keyed, encoding="utf-8")
        written.chmod(0o600)
        machine.tool(f"wg-quick up {written}")
        net.stack.callback(machine.tool, f"wg-quick down {written}")
        assert "mtu 1420" in machine.tool(f"ip link show {names[k]}")
    raw = net.config("10.0.0.1", {"ip": "10.0.0.2", "port": 9999})
    net.worker(box, raw)
    assert not {line for line in net.doctor(desk, raw) if "reach" in line}
    shape = "root tbf rate 1gbit burst 1300 limit 1mb"
    desk.tool(f"tc qdisc replace dev {names[0]} {shape}")  # larger packets are lost
    said = {line for line in net.doctor(desk, raw) if "slow" not in line}
    for machine, name in zip((desk, box), names, strict=True):
        machine.tool(f"ip link set dev {name} mtu 1280")
    assert not {line for line in net.doctor(desk, raw) if "drops large" in line}
    net.train(desk, raw)
    assert said == quoted("Two homes by WireGuard")


@pytest.mark.alone  # on a busy machine the first link is slow, too
def test_a_tunnel_of_tailscale(net):
    """Its MTU, and the speed of a relay."""
    desk, box = net.machine(), net.machine()
    cards = net.lan({desk: "100.64.0.1", box: "100.64.0.2"}, mtu=1280)
    raw = net.config("100.64.0.1", {"ip": "100.64.0.2", "port": 9999})
    net.worker(box, raw)
    assert net.doctor(desk, raw) == FINE
    for machine, card in cards.items():
        machine.tool(f"tc qdisc replace dev {card} root tbf rate 8mbit burst 16kb limit 1mb")
    said = net.doctor(desk, raw)
    net.train(desk, raw)
    assert said == quoted("Two homes by Tailscale")


def test_behind_a_router(net):
    """The worker's router lets nothing in. The coordinator's passes its port on."""
    desk, _, box = net.home("192.168.2.20", "203.0.113.5")
    listening = net.config("203.0.113.10", {"ip": "192.168.2.20", "port": 9999})
    net.worker(box, listening)
    said = net.doctor(desk, listening)
    inner = net.machine()  # the coordinator's machine: `desk` is its router from now on
    net.lan({desk: "192.168.1.1", inner: "192.168.1.10"})
    net.forward(desk, "203.0.113.10:9998", "192.168.1.10:9998")
    raw = net.config("203.0.113.10", {"hostname": "laptop", "port": None})
    own = {**raw, "coordinator": {**raw["coordinator"], "ip": "192.168.1.10"}}
    said |= net.doctor(inner, own)
    net.worker(box, raw)
    assert net.doctor(inner, own) == FINE
    net.train(inner, own)
    assert said == quoted("Behind a router")


def test_a_firewall_of_a_cloud(net):
    """A machine at 10.1.0.4 whose public address only the cloud has."""
    desk, cloud, machine = net.home("10.1.0.4", "203.0.113.7")
    raw = net.config("203.0.113.10", {"ip": "203.0.113.7", "port": 9999})
    said = net.doctor(desk, raw) | net.doctor(machine, raw, worker_id=1)
    cloud.let_in(9999)
    net.forward(cloud, "203.0.113.7:9999", "10.1.0.4:9999")
    own = with_ip(raw, "10.1.0.4")
    net.worker(machine, own)
    assert net.doctor(desk, raw) == FINE
    assert net.doctor(machine, own) == FINE
    net.train(desk, raw)
    assert said == quoted("Cloud firewalls")


def test_a_port_that_windows_or_a_container_engine_passes_on(net):
    """The worker's machine is one inside of 192.168.1.20, with an address of its own."""
    desk, outer, inner = net.machine(), net.machine(), net.machine()
    net.lan({desk: "192.168.1.10", outer: "192.168.1.20"})
    net.lan({outer: "172.20.0.1", inner: "172.20.0.2"})
    raw = net.config("192.168.1.10", {"ip": "192.168.1.20", "port": 9999})
    net.forward(outer, "192.168.1.20:9999", "172.20.0.2:9999")
    assert net.doctor(desk, raw) == quoted("WSL 2")  # nothing listens behind it
    [without, _] = sorted(net.doctor(inner, raw, worker_id=1), reverse=True)
    assert "does not have its address 192.168.1.20" in without
    net.worker(inner, with_ip(raw, "172.20.0.2"))
    assert net.doctor(desk, raw) == FINE
    net.train(desk, raw)


def with_ip(raw: Raw, ip: str) -> Raw:
    """As --set workers[0].ip=... has it."""
    return {**raw, "workers": [{**raw["workers"][0], "ip": ip}, *raw["workers"][1:]]}


def test_every_quotation_is_compared():
    page = PAGE.read_text(encoding="utf-8")
    compared = set(re.findall(r'quoted\("(.*?)"\)', Path(__file__).read_text(encoding="utf-8")))
    sections = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert {f"`{line}`" for line in FINE} <= set(re.findall(r"`[^`]+`", page))
    assert {section for section in sections if quoted(section)} == compared
