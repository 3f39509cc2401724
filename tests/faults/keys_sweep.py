"""Rotating keys, with the n-th system call failing or killing the process, for every n.

What is there afterwards is the old set, byte for byte, or a new one of a single authority: keys,
authority and lists. A certificate that was revoked is then on the list, or of no account. The keys
of islands, beside those of workers, stay as they are.

    python -m tests.faults.keys_sweep [every n-th point]
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hetero_framework.security import authority as x509
from hetero_framework.security import certificates
from hetero_framework.security.keys import KeyDirectory
from tests.faults.syscall_sweep import MODES, WRITTEN, WRITTEN_AGAIN, Counts, disturbed, points, run

Tree = dict[str, bytes]


def cluster(root: Path) -> None:
    """A coordinator, a worker of its machine, one elsewhere that was revoked, and islands."""
    keys = KeyDirectory(root / "hetero_keys")
    made, _ = certificates.ensure_authority(keys)
    certificates.issue_missing(keys, [1])
    certificates.issue_pem(keys, made, 2)
    certificates.revoke(keys, 2)
    certificates.ensure_authority(keys.of_islands)


def after_a_kill(root: Path) -> None:
    cluster(root)
    keys = root / "hetero_keys"
    shutil.copytree(keys, keys / ".rotating")
    (keys / ".authority.pem.12345678.tmp").write_bytes(b"half")


SCENES: dict[str, Callable[[Path], None]] = {
    "a whole set": cluster,
    "after a kill": after_a_kill,
}


def tree(keys: KeyDirectory) -> Tree:
    """Names and bytes of what counts."""
    found = [path for path in keys.path.iterdir() if path.is_file() and path.name != ".lock"]
    return {path.name: path.read_bytes() for path in found if not path.name.endswith(".tmp")}


def is_new(keys: KeyDirectory) -> bool:
    """Whether all here is of one authority, which has nothing to do with the revoked worker."""
    cluster = certificates.read_authority(keys).cluster
    listed = certificates.issued(keys)
    own = {process: x509.serial_of(keys.bundle(process).read_bytes()) for process in ("local", 1)}
    return (
        {keys.identity(process).cluster for process in own} == {cluster}
        and {entry.cluster for entry in listed} == {cluster}
        and sorted(int(entry.serial, 16) for entry in listed) == sorted(own.values())
        and keys.revoked() == frozenset()
    )


def _case(root: Path, old: Tree, islands: Tree, mode: str, n: int) -> str | None:
    keys = KeyDirectory(root / "hetero_keys")
    reached, result = disturbed(root, lambda: certificates.rotate(keys) and None, mode, n)
    if not reached:
        return None
    keys.settle()  # as whatever uses the keys does
    outcome = "old" if tree(keys) == old else "new"
    assert outcome == "old" or is_new(keys), "neither the old nor the new set"
    assert outcome == "new" or result not in (WRITTEN, WRITTEN_AGAIN), "said to be new"
    assert tree(keys.of_islands) == islands, "the keys of islands are others"
    certificates.rotate(keys)
    assert is_new(keys)
    assert not keys.left_overs()
    assert [path.name for path in root.iterdir()] == ["hetero_keys"]
    return outcome


def sweep(base: Path, every: int) -> Counts:
    """Every scene, every mode, every n-th point: how often the old and a new set is found."""
    results: Counts = {}
    start, root = base / "start", base / "case"
    for scene, prepare in SCENES.items():
        prepare(start)
        keys = KeyDirectory(start / "hetero_keys")
        old, islands = tree(keys), tree(keys.of_islands)
        for mode in MODES:
            case = partial(_case, root, old, islands, mode)
            results[f"{scene}: {mode}"] = points(start, root, every, case)
        shutil.rmtree(start)
    return results


if __name__ == "__main__":
    run(sweep)
