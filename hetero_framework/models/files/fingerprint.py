"""Fingerprints of weights, which show whether all processes read the same weights.

A fingerprint maps each layer, and each tensor outside the layers, to a hash of its names, types,
shapes and bytes, however the files are cut. Further entries stand for the configuration,
the list of files and the hub's commit. Entries that two fingerprints have in common must be equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hetero_framework.core.cache import recall, remember
from hetero_framework.errors import ModelError
from hetero_framework.models.files.weights import Checkpoint

Fingerprint = dict[str, str]

CONFIG, COMMIT, INDEX = "config.json", "commit", "index"

_LAYER = re.compile(r"(.*?\.\d+)\.")
_CHUNK_BYTES = 4 << 20
_THREADS = 4
# Fields that a library writes beside the settings themselves.
_NOT_SETTINGS = ("_name_or_path", "transformers_version", "architectures", "auto_map")


def fingerprint(checkpoint: Checkpoint, names: Iterable[str]) -> Fingerprint:
    """Hashes of the layers that hold the tensors `names`; a layer's hash is of all its tensors.
    Remembered until a file changes. Raises ModelError for a file that cannot be read."""
    groups = {layer_group(name) for name in names}
    members: dict[str, list[str]] = defaultdict(list)
    for name in checkpoint.files:
        if layer_group(name) in groups:
            members[layer_group(name)].append(name)
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in (name for group in members.values() for name in group):
        by_file[checkpoint.files[name]].append(name)
    digests: dict[str, str] = {}
    for filename, wanted in sorted(by_file.items()):
        digests.update(_file_digests(checkpoint.checked(filename), wanted))
    hashes = {g: _hash(sorted((name, digests[name]) for name in members[g])) for g in groups}
    return {**hashes, **_origin(checkpoint)}


def whole_fingerprint(source: str, revision: str | None) -> Fingerprint | None:
    """The fingerprint of all weights on this machine; None where a file is absent. It leaves out
    commit and list of files, since other files may hold the same weights."""
    try:
        checkpoint = Checkpoint(source, revision, local=True)
        whole = fingerprint(checkpoint, checkpoint.files)
    except ModelError:
        return None
    return {key: value for key, value in whole.items() if key not in (COMMIT, INDEX)}


def check_same_model(
    loaded: Sequence[tuple[str, Mapping[str, str]]], expected: Fingerprint | None
) -> None:
    """Raise ModelError unless all stages were read from one model: `loaded` are the processes with
    the fingerprints that they read, `expected` the coordinator's own. Without `expected` the stages
    are compared with each other, by configuration, list of files and revision."""
    for number, (process, read) in enumerate(loaded):
        others = loaded[:number] if expected is None else [("the coordinator", expected)]
        for other, theirs in others:
            if what := difference(theirs, read):
                raise ModelError(
                    f"{process} has loaded another model than {other}: {what}",
                    hint="copy one model directory to all machines, or set model.revision to one"
                    " commit",
                )


def difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first entry that both have and that differs, as text."""
    different = [key for key in one if key in other and one[key] != other[key]]
    words = {
        CONFIG: "config.json differs",
        COMMIT: "it is another revision of the repository",
        INDEX: "the weight files have other contents",
    }
    for key, text in words.items():
        if key in different:
            return text
    first = min(different, key=_natural, default=None)
    return None if first is None else f"the weights of {first} differ"


def summary(parts: Iterable[Mapping[str, str]]) -> str:
    """One hash of all weights of a run, the same under any cut."""
    together: Fingerprint = {}
    for part in parts:
        together.update(part)
    for key in (COMMIT, INDEX):
        together.pop(key, None)
    return _hash(sorted(together.items()))


def layer_group(name: str) -> str:
    """The layer of a tensor, such as "model.layers.3"; outside the layers the tensor's name."""
    layer = _LAYER.match(name)
    return layer.group(1) if layer else name


def _natural(key: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]


def _origin(checkpoint: Checkpoint) -> Fingerprint:
    """Hashes of the list of files and the settings, and the commit of the weights."""
    origin = {INDEX: _hash(sorted(checkpoint.files.items()))}
    config = checkpoint.path("config.json")
    if config is not None:
        settings: dict[str, Any] = json.loads(config.read_bytes())
        origin[CONFIG] = _hash({k: v for k, v in settings.items() if k not in _NOT_SETTINGS})
        if config.parent.parent.name == "snapshots":
            origin[COMMIT] = config.parent.name
    return origin


def _file_digests(path: Path, names: list[str]) -> dict[str, str]:
    """The hash of type, shape and bytes of each of these tensors of one file."""
    status = path.stat()
    # The change time too: copying programs keep the time of modification.
    times = status.st_mtime_ns, status.st_ctime_ns
    question = json.dumps([os.path.realpath(path), status.st_size, *times])
    known: dict[str, str] = recall("digests", question) or {}
    if absent := [name for name in names if name not in known]:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        with ThreadPoolExecutor(_THREADS) as pool:
            hashes = pool.map(lambda name: _tensor_digest(path, 8 + length, header[name]), absent)
            known = {**known, **dict(zip(absent, hashes, strict=True))}
        remember("digests", question, known)
    return {name: known[name] for name in names}


def _tensor_digest(path: Path, base: int, entry: dict[str, Any]) -> str:
    start, end = entry["data_offsets"]
    digest = hashlib.sha256(json.dumps([entry["dtype"], entry["shape"]]).encode())
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, end - start)))
    with path.open("rb", buffering=0) as file:
        file.seek(base + start)
        left = end - start
        while left and (count := file.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()


def _hash(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
