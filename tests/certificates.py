"""Keys of clusters that exist for one test."""

from __future__ import annotations

import datetime
from functools import cache
from pathlib import Path

import pytest

from hetero_framework.core.identity import STAR, ClusterKind, Identity
from hetero_framework.security import authority as x509
from hetero_framework.security.authority import Authority
from hetero_framework.security.keys import AUTHORITY, KeyDirectory


@cache
def authority(name: str = "own") -> Authority:
    """The authority of a cluster; the same one for the same name."""
    return Authority.make()


def keys_of(
    folder: Path,
    *processes: int | str,
    of: str = "own",
    with_authority: bool = False,
    kind: ClusterKind = STAR,
) -> KeyDirectory:
    """A key directory with keys of these processes."""
    keys = KeyDirectory(folder, kind)
    made = authority(of)
    for process in processes:
        identity = Identity.of(made.cluster, process, kind)
        keys.write_bundle(identity, made.issue(identity)[0])
    if with_authority:
        keys.write(AUTHORITY, made.to_pem())
    return keys


_NOW = r"this machine's clock says 20\d\d-\d\d-\d\d \d\d:\d\d UTC"
YEARS = [
    (2090, f"{_NOW}, by which .* is not valid yet", f"for not valid yet by its own clock; {_NOW}"),
    (2001, f"{_NOW}, by which .* has expired", f"for expired by its own clock; {_NOW}"),
]
"""When certificates are good, and what is said then by who verifies one and by the other side."""


def keys_of_year(monkeypatch: pytest.MonkeyPatch, year: int) -> None:
    """Certificates that are made from now on are good in that year alone: by them the clock of this
    machine is as wrong as one of 1970 or 2050 is by others."""
    first = datetime.datetime(year, 1, 1, tzinfo=datetime.UTC)
    monkeypatch.setattr(x509, "_FROM", first)
    monkeypatch.setattr(x509, "_TO", first.replace(year=year + 1))
