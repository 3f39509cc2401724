"""Addresses in the configuration: their syntax, and when two of them are equal."""

from __future__ import annotations

import ipaddress
import re

from hetero_framework.config.problems import shown

_SCOPE = re.compile(r"[A-Za-z0-9_.~-]+")  # of an IPv6 address: the name of an interface
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")


def checked_host(value: str) -> str:
    """`value` itself. Raises ValueError unless it is an IP address or a host name."""
    if not value:
        raise ValueError("is missing: the machine's address, or name (of a worker, hostname does)")
    try:
        ipaddress.ip_address(value)
        if "%" not in value or _SCOPE.fullmatch(value.partition("%")[2]):
            return value
    except ValueError:
        pass
    if "://" in value or "/" in value:
        raise ValueError(
            f"{shown(value)} is not an address; write only the host, without scheme or path"
        )
    if value.startswith("[") or (value.count(":") == 1 and value.split(":")[1].isdigit()):
        raise ValueError(
            f'{shown(value)} is not an address; the port goes into "port", without brackets'
        )
    labels = value.removesuffix(".").split(".")
    if re.fullmatch(r"[\d.]+", value) or len(value) > 253 or not labels[0]:
        raise ValueError(f"{shown(value)} is neither an IP address nor a host name")
    for label in labels:
        # Labels that a resolver refuses, too: empty, or of more than 63 characters.
        if len(label) > 63 or not _LABEL.fullmatch(label):
            raise ValueError(
                f"{shown(value)} is neither an IP address nor a host name: {shown(label)} between"
                " its dots must be 1 to 63 letters, digits, '-' or '_', with no '-' at either end"
            )
    return value


def normal_host(host: str) -> str:
    """One spelling per address, for comparison: IP addresses shortest, names in lower case."""
    if host.lower() == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def host_and_port(host: str, port: int) -> str:
    """Host and port in the usual spelling, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(value: str) -> tuple[str, int]:
    """The inverse of `host_and_port`. Raises ValueError."""
    host, colon, port = value.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(
            f"{shown(value)} has no port; write address and port as in"
            ' "10.0.0.1:29510" or "[fe80::1]:29510"'
        )
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{shown(value)}: an IPv6 address in front of a port needs brackets")
    return checked_host(host[1:-1] if host.startswith("[") else host), int(port)
