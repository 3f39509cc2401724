from __future__ import annotations

import re

import pytest

from hetero_framework.config.host_names import (
    checked_host,
    host_and_port,
    normal_host,
    split_address,
)


@pytest.mark.parametrize(
    "host",
    [
        *("10.0.0.1", "::1", "fe80::1%eth0", "box", "box-2.lan", "box_2", "a.b."),
        *("x" * 63, "3com.example"),
    ],
)
def test_valid_hosts_are_accepted_unchanged(host):
    assert checked_host(host) == host


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("", "is missing"),
        ("http://box", "without scheme or path"),
        ("box/path", "without scheme or path"),
        ("box:99", 'the port goes into "port"'),
        ("10.0.0.3:99", 'the port goes into "port"'),
        ("[::1]", 'the port goes into "port"'),
        ("10.0.0", "neither an IP address nor a host name"),
        ("box.lan..", "neither an IP address nor a host name"),
        ("10.0.0.256", "neither an IP address nor a host name"),
        (".", "neither an IP address nor a host name"),
        ("fe80::1%eth0; reboot", "neither an IP address nor a host name"),
        (".".join(["x" * 63] * 4), "neither an IP address nor a host name"),
        ("a..b", "between its dots"),
        ("-box", "between its dots"),
        ("box-", "between its dots"),
        ("my box", "between its dots"),
        ("x" * 64, "1 to 63 letters"),
        ("a." + "b" * 64, "1 to 63 letters"),
    ],
)
def test_an_invalid_host_is_refused_with_advice(host, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        checked_host(host)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("localhost", "127.0.0.1"),
        ("LOCALHOST", "127.0.0.1"),
        ("Box.lan.", "box.LAN"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("FE80::0001", "fe80::1"),
    ],
)
def test_spellings_of_one_address_are_equal(one, other):
    assert normal_host(one) == normal_host(other)
    assert normal_host(normal_host(one)) == normal_host(one)


def test_different_addresses_are_not():
    assert len({normal_host(h) for h in ("box", "box.lan", "127.0.0.1", "127.0.0.2", "::1")}) == 5


@pytest.mark.parametrize("host", ["10.0.0.1", "box.lan", "fe80::1", "::1"])
def test_an_address_is_split_as_it_is_written(host):
    assert split_address(host_and_port(host, 29510)) == (host, 29510)


def test_ipv6_has_brackets_before_a_port():
    assert host_and_port("fe80::1", 80) == "[fe80::1]:80"
    assert host_and_port("box", 80) == "box:80"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("box", "has no port"),
        ("box:", "has no port"),
        ("box:0", "has no port"),
        ("box:65536", "has no port"),
        ("box:8\N{SUPERSCRIPT TWO}", "has no port"),
        ("fe80::1:80", "needs brackets"),
        (":80", "is missing"),
        ("my box:80", "between its dots"),
    ],
)
def test_an_invalid_address_with_port_is_refused(address, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        split_address(address)
