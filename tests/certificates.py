"""Keys of clusters that exist for one test."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hetero_framework.core.identity import STAR, Identity, Kind
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
    kind: Kind = STAR,
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
