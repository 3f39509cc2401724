from __future__ import annotations

import socket
from contextlib import closing
from types import SimpleNamespace

import psutil
import pytest

from hetero_framework.core import addresses
from hetero_framework.core.dial import Listener
from tests.samples import free_ports


def fake_interfaces(monkeypatch: pytest.MonkeyPatch, **interfaces: list[tuple[int, str]]) -> None:
    entries = {
        name: [SimpleNamespace(family=family, address=address) for family, address in found]
        for name, found in interfaces.items()
    }
    stats = {name: SimpleNamespace(isup=name != "down0") for name in interfaces}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)


def test_addresses_of_all_interfaces_without_zones(monkeypatch):
    fake_interfaces(
        monkeypatch,
        lo=[(socket.AF_INET, "127.0.0.1")],
        eth0=[(socket.AF_INET, "192.168.1.20"), (socket.AF_INET6, "fe80::1%eth0"), (17, "aa:bb")],
        wlan0=[(socket.AF_INET, "10.1.1.5")],
    )
    assert addresses.local_addresses() == ["127.0.0.1", "192.168.1.20", "fe80::1", "10.1.1.5"]
    assert addresses.addresses_for_others() == ["192.168.1.20", "10.1.1.5"]
    assert addresses.is_local_address("192.168.1.20")
    assert addresses.is_local_address("FE80:0::1")
    assert not addresses.is_local_address("192.168.1.21")


def test_primary_address_is_of_the_way_to_others_or_of_an_interface_that_is_up(monkeypatch):
    class Routed(socket.socket):
        def connect(self, address):
            if routes:
                return
            raise OSError

        def getsockname(self):
            return ("10.0.0.7", 1)

    routes = True
    monkeypatch.setattr(socket, "socket", Routed)
    assert addresses.primary_address() == "10.0.0.7"
    routes = False
    fake_interfaces(
        monkeypatch,
        down0=[(socket.AF_INET, "10.0.0.1")],
        eth0=[(socket.AF_INET, "169.254.3.3")],
        lo=[(socket.AF_INET, "127.0.0.1")],
        wlan0=[(socket.AF_INET, "192.168.1.20")],
    )
    assert addresses.primary_address() == "192.168.1.20"
    fake_interfaces(monkeypatch, lo=[(socket.AF_INET, "127.0.0.1")])
    assert addresses.primary_address() == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost", "0.0.0.0"])
def test_loopback_is_local(host):
    assert addresses.is_local_address(host)


def test_own_names_are_local(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Desk.example.org")
    assert addresses.local_hostnames() == ["desk.example.org", "desk", "desk.local"]
    monkeypatch.setattr(addresses, "resolve", lambda name: ())
    for name in ("desk", "DESK", "desk.local", "desk.example.org."):
        assert addresses.is_local_address(name)
    assert not addresses.is_local_address("desktop")


def test_name_that_resolves_elsewhere_or_nowhere_is_not_local(monkeypatch):
    known = {"other-box": "203.0.113.9", "alias-of-me": "127.0.0.1"}

    def resolve(name: str, *args: object, **options: object) -> list[object]:
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    addresses.resolve.cache_clear()
    assert not addresses.is_local_address("other-box")
    assert not addresses.is_local_address("nobody")
    assert addresses.is_local_address("alias-of-me")
    addresses.resolve.cache_clear()


def test_loopback_only_addresses():
    assert addresses.is_loopback("127.0.0.1")
    assert addresses.is_loopback("localhost")
    assert not addresses.is_loopback("192.168.1.20")
    assert not addresses.is_loopback("box")


def test_port_is_free_until_somebody_listens():
    (port,) = free_ports(1)
    assert addresses.port_is_free("127.0.0.1", port)
    with closing(Listener("127.0.0.1", port)):
        assert not addresses.port_is_free("127.0.0.1", port)
    assert addresses.port_is_free("127.0.0.1", port)
    assert not addresses.port_is_free("198.51.100.7", port)
