"""This machine's addresses and names, and free ports.

Nothing here needs a route to the internet or a name server: without them, interfaces and the
machine's own names are looked at.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import socket
import sys
from contextlib import suppress

import psutil

LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = {"localhost", "localhost.localdomain", "ip6-localhost"}


def local_addresses() -> list[str]:
    """IPv4 and IPv6 addresses of this machine, loopback included, without zones ("%eth0")."""
    addresses: dict[str, None] = {LOOPBACK: None}
    for interface in psutil.net_if_addrs().values():
        for address in interface:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                addresses[address.address.split("%")[0]] = None
    return list(addresses)


def local_hostnames() -> list[str]:
    """This machine's name in lower case: as the system has it, its first label, and LABEL.local."""
    name = socket.gethostname().lower()
    return list(dict.fromkeys([name, name.split(".")[0], f"{name.split('.')[0]}.local"]))


def is_local_address(host: str) -> bool:
    """Whether `host` is an address or a name of this machine, or resolves to such an address."""
    address = parsed(host)
    if address is not None:
        if address.is_loopback or address.is_unspecified:
            return True
        return any(address == parsed(local) for local in local_addresses())
    name = host.lower().rstrip(".")
    is_own = name in _LOOPBACK_NAMES or name in local_hostnames()
    return is_own or any(map(is_local_address, resolve(host)))


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    address = parsed(host)
    return address.is_loopback if address is not None else host.lower() in _LOOPBACK_NAMES


def is_loopback_by_name(host: str) -> bool:
    """Whether `host` is a name that only means this machine here, as "localhost" does."""
    ips = resolve(host) if parsed(host) is None and host.lower() not in _LOOPBACK_NAMES else ()
    return bool(ips) and all(is_loopback(address) for address in ips)


def primary_address() -> str:
    """The address to give to others: that of the way to other networks, else the first one of an
    interface that is up, else loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # finds the way, and sends nothing
        return str(probe.getsockname()[0])
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for entry in addresses:
            address = parsed(entry.address) if entry.family == socket.AF_INET else None
            if name in up and address and not (address.is_loopback or address.is_link_local):
                return str(address)
    return LOOPBACK


def addresses_for_others() -> list[str]:
    """The addresses of this machine that may be given to others: neither loopback nor link-local;
    loopback where there is no other."""
    known = [(local, parsed(local)) for local in local_addresses()]
    given = [host for host, ip in known if ip and not (ip.is_loopback or ip.is_link_local)]
    return given or [LOOPBACK]


def port_is_free(host: str, port: int) -> bool:
    """Whether a program on this machine could listen on host:port now. This listens there for a
    moment, which may keep a program that starts just then from the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        if sys.platform != "win32":  # there SO_REUSEADDR would let two programs have the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                return False
            raise
    return True


def parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return None


def family(host: str) -> socket.AddressFamily:
    """That of an IPv6 address, or else IPv4."""
    return socket.AF_INET6 if getattr(parsed(host), "version", 4) == 6 else socket.AF_INET


@functools.lru_cache(maxsize=256)
def resolve(name: str) -> tuple[str, ...]:
    """The addresses that this machine resolves a name to; none for an unknown name."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown here: then it is not this machine
        return ()
    return tuple(str(entry[4][0]) for entry in entries)


def port_holder(port: int) -> str | None:
    """The program of this machine that listens on a port; None where the system does not tell."""
    with suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN:
                return f"{psutil.Process(entry.pid).name()} (process {entry.pid})"
    return None


def local_networks() -> list[ipaddress.IPv4Network]:
    """The IPv4 networks of this machine's interfaces, loopback left out."""
    networks: dict[ipaddress.IPv4Network, None] = {}
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and entry.netmask and not is_loopback(entry.address):
                interface = ipaddress.IPv4Interface(f"{entry.address}/{entry.netmask}")
                networks[interface.network] = None
    return list(networks)


def in_none(host: str, networks: list[ipaddress.IPv4Network]) -> bool:
    """Whether `host` is a private IPv4 address outside of all these networks."""
    address = parsed(host)
    if not isinstance(address, ipaddress.IPv4Address) or not address.is_private or not networks:
        return False
    return not any(address in network for network in networks)
