"""Checkpoints on disk: complete or not there at all.

    <root>/step_40/
        stage-0.0.safetensors      one file per stage and part
        stage-1.0.safetensors
        manifest.json              written last: what belongs here, with the hash of each file

Tensors are keyed by parameter name ("weights/<param>", "optimizer/<state>/<param>"), never by
rank, so a checkpoint can be read under any plan. A checkpoint is written in `step_40.tmp` and
renamed when every byte is on the disk: a process killed at any moment leaves the old state or the
new one, never a mixture. Two further names live for moments only: `step_40.old`, a complete
checkpoint that is just being replaced, and `step_40.trash`, one that is being deleted.

This module knows files only; what the tensors mean is the business of its callers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hetero_framework.core.files import (
    put_back,
    rename,
    replace_directory,
    sync_directory,
    sync_file,
)
from hetero_framework.errors import CheckpointError, HeteroError, ResourceError
from hetero_framework.units import size

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DEFAULT_PART_BYTES = 64 * 2**20

_STEP_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_LEFTOVER_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})\.(tmp|old|trash)")
_FILE_NAME = re.compile(r"stage-[0-9]+\.[0-9]+\.safetensors")
_OWN_KEYS = ("format_version", "step", "files", "digest")
_NO_SPACE = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_HASH_CHUNK = 4 * 2**20

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run.

    `save_total_limit` is how many complete ones are kept (None: all); the one just written is never
    among those deleted. Everything that happens unasked is logged: a leftover removed, an old
    checkpoint that could not be deleted, a damaged one passed over.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        save_total_limit: int | None = None,
    ) -> None:
        if save_total_limit is not None and save_total_limit < 1:
            raise CheckpointError(
                f"save_total_limit is {save_total_limit}", hint="give 1 or more, or null for all"
            )
        self.root = Path(root)
        self.save_total_limit = save_total_limit
        self._verified: set[tuple[str, int, int]] = set()

    def begin(self, step: int) -> CheckpointWriter:
        """Open a new checkpoint for writing.

        Raises ResourceError if that cannot be done; so do all methods of the writer.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        directory = self.root / f"step_{step}.tmp"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.clean()
            directory.mkdir()
        except OSError as error:
            raise _cannot_write(error, directory) from error
        return CheckpointWriter(self, step, directory)

    def clean(self) -> list[str]:
        """Remove what an interrupted write left behind; returns (and notifies) what was done."""
        done = []
        for path in self._entries():
            match = _LEFTOVER_NAME.fullmatch(path.name)
            if match is None:
                continue
            if path.is_symlink() or not path.is_dir():
                raise _in_the_way(path)
            final = self.root / f"step_{match[1]}"
            if match[2] == "old" and put_back(final, path):
                done.append(f"put checkpoint {match[1]} back: its replacement was interrupted")
            else:
                shutil.rmtree(path)
                done.append(f"removed {path.name}, left by an interrupted write")
        for line in done:
            _log.warning("%s", line)
        return done

    def paths(self) -> list[Path]:
        """All that checkpoints are and left: complete ones, incomplete ones, leftovers."""
        return [
            path
            for path in self._read_entries()
            if _STEP_NAME.fullmatch(path.name) or _LEFTOVER_NAME.fullmatch(path.name)
        ]

    def complete_steps(self) -> list[int]:
        """Steps that have a manifest, ascending. Looks at names only; `resolve` looks inside."""
        steps = set()
        for path in self._read_entries():
            match = _STEP_NAME.fullmatch(path.name.removesuffix(".old"))
            if match and not path.is_symlink() and (path / MANIFEST).is_file():
                steps.add(int(match[1]))
        return sorted(steps)

    def resolve(self, which: int | str) -> int:
        """The step that `which` ("latest" or a number) means, after reading and hashing all of it.

        "latest" passes over damaged checkpoints and logs a warning; a number never falls
        back. Raises CheckpointError that lists the complete steps.
        """
        if which == "latest":
            return self._resolve_latest()
        if isinstance(which, bool) or not re.fullmatch(r"[0-9]{1,18}", str(which)):
            raise CheckpointError(f"checkpoint {which!r}: give a step number or 'latest'")
        step = int(which)
        try:
            self.open(step).verify()
        except CheckpointError as error:
            others = [other for other in self.complete_steps() if other != step]
            hints = [error.hint, self._list_text(others)]
            raise CheckpointError(error.message, hint="; ".join(filter(None, hints))) from error
        return step

    def _resolve_latest(self) -> int:
        complete = self.complete_steps()
        problems = []
        for step in reversed(complete):
            try:
                self.open(step).verify()
            except CheckpointError as error:
                problems.append(error.message)
                continue
            for problem in problems:
                _log.warning("%s; using checkpoint %d", problem, step)
            return step
        if problems:
            raise CheckpointError("; ".join(problems), hint=f"no valid checkpoint in {self.root}")
        raise CheckpointError(
            f"there is no checkpoint in {self.root}",
            hint="start without a step to resume from, or point checkpoint_dir at the old run",
        )

    def open(self, step: int) -> CheckpointReader:
        """Open checkpoint `step`: manifest and sizes are checked now, hashes on first use.

        Raises CheckpointError when it is absent, incomplete or damaged.
        """
        directory = self._directory(step)
        if directory.is_symlink():
            raise CheckpointError(
                f"{directory} is a symbolic link",
                hint="put the checkpoint directory itself there",
            )
        if not directory.is_dir():
            raise CheckpointError(f"there is no checkpoint {step} in {self.root}")
        return CheckpointReader(step, directory, self._verified)

    def rotate(self, newest: int) -> None:
        """Delete the lowest steps beyond `save_total_limit`, but never `newest`."""
        if self.save_total_limit is None:
            return
        try:
            others = [step for step in self.complete_steps() if step != newest]
        except CheckpointError as error:  # the new one is there; that alone matters
            _log.warning("%s", error.message)
            return
        for step in others[: max(0, len(others) + 1 - self.save_total_limit)]:
            self._delete(step)

    def _delete(self, step: int) -> None:
        """Rename, then delete: a half-deleted checkpoint must not look complete."""
        directory = self._directory(step)
        trash = self.root / f"step_{step}.trash"
        try:
            rename(directory, trash)
            shutil.rmtree(trash)
        except OSError as error:
            # Disk is lost, not state: a file held open elsewhere (Windows) must not end a run.
            _log.warning("could not delete the old checkpoint %s: %s", directory, error)

    def _directory(self, step: int) -> Path:
        directory = self.root / f"step_{step}"
        replaced = self.root / f"step_{step}.old"
        return replaced if replaced.is_dir() and not directory.exists() else directory

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.root.iterdir())
        except FileNotFoundError:
            return []

    def _read_entries(self) -> list[Path]:
        try:
            return self._entries()
        except NotADirectoryError as error:
            raise CheckpointError(
                f"the checkpoint directory {self.root} is a file",
                hint="move it away or set another checkpoint_dir",
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"cannot read the checkpoint directory {self.root}: {error.strerror}"
            ) from error

    def _list_text(self, steps: list[int]) -> str:
        if not steps:
            return f"there is no complete one in {self.root}"
        return f"complete in {self.root}: {', '.join(map(str, steps))}"


class CheckpointWriter:
    """One checkpoint being written. `commit` makes it exist; anything else leaves no trace.

    As a context manager it aborts unless it was committed.
    """

    def __init__(self, store: CheckpointStore, step: int, directory: Path) -> None:
        self.step = step
        self._store = store
        self._directory = directory
        self._files: list[dict[str, Any]] = []
        self._names: set[str] = set()
        self._bytes = 0
        self._open = True

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def add(self, stage_index: int, part: int, tensors: dict[str, torch.Tensor]) -> None:
        """Write CPU tensors as `stage-<stage_index>.<part>.safetensors` and force it to the disk.

        Raises ResourceError when that fails (the checkpoint is then aborted) and CheckpointError
        when a name was added before.
        """
        self._check_open()
        twice = sorted(self._names.intersection(tensors))
        if twice:
            self.abort()
            raise CheckpointError(f"checkpoint {self.step} got {twice[0]!r} from two stages")
        path = self._directory / f"stage-{stage_index}.{part}.safetensors"
        if path.exists():
            self.abort()
            raise CheckpointError(f"checkpoint {self.step} got {path.name} twice")
        try:
            save_file(_separate(tensors), path)
            sync_file(path)
            entry = {
                "name": path.name,
                "stage": stage_index,
                "part": part,
                "bytes": path.stat().st_size,
                "sha256": _sha256(path),
                "tensors": sorted(tensors),
            }
        except (OSError, SafetensorError) as error:
            self.abort()
            needed = sum(tensor.nbytes for tensor in tensors.values())
            raise self._write_error(error, path, needed) from error
        self._files.append(entry)
        self._names.update(tensors)
        self._bytes += path.stat().st_size

    def commit(self, manifest: dict[str, Any]) -> Path:
        """Write the manifest, make the checkpoint exist under its name, delete the oldest ones.

        `manifest` is JSON data about the run (config, plan, seed, data position, versions, ...);
        the keys format_version, step, files and digest are added here. Returns the directory.
        """
        self._check_open()
        reserved = [key for key in _OWN_KEYS if key in manifest]
        if reserved:
            raise ValueError(f"reserved manifest keys: {reserved}")
        content = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            **manifest,
            "files": self._files,
        }
        content["digest"] = _digest(content)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        path = self._directory / MANIFEST
        try:
            path.write_text(text, encoding="utf-8", newline="\n")
            sync_file(path)
            sync_directory(self._directory)
            final = self._publish()
        except OSError as error:
            self.abort()
            raise self._write_error(error, path, len(text)) from error
        self._open = False
        self._store.rotate(self.step)
        return final

    def _publish(self) -> Path:
        """The moment of truth: one rename. A checkpoint of the same step steps aside first."""
        root = self._store.root
        final, replaced = root / f"step_{self.step}", root / f"step_{self.step}.old"
        if final.is_symlink() or (final.exists() and not final.is_dir()):
            self.abort()
            raise _in_the_way(final)
        replace_directory(self._directory, final, replaced)
        return final

    def abort(self) -> None:
        """Remove what was written so far. Does nothing after commit or a former abort."""
        if self._open:
            self._open = False
            shutil.rmtree(self._directory, ignore_errors=True)

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError(f"the writer of checkpoint {self.step} is closed")

    def _write_error(self, error: Exception, path: Path, needed_bytes: int) -> HeteroError:
        code = getattr(error, "errno", None)
        if code is None:  # safetensors reports the operating system's error as text
            found = re.search(r"os error (\d+)", str(error))
            code = int(found[1]) if found else None
        if code in _NO_SPACE:
            # The files written so far are gone by now, so both numbers are about the whole of it.
            try:
                free = f"{size(shutil.disk_usage(self._store.root).free)} are free"
            except OSError as problem:
                free = f"what is free cannot be told ({problem.strerror})"
            return ResourceError(
                f"no space for checkpoint {self.step} in {self._store.root}: it needs at least "
                f"{size(self._bytes + needed_bytes)}, {free}",
                hint="free some space, lower save_total_limit or set another checkpoint_dir. "
                "Earlier checkpoints are intact",
            )
        return _cannot_write(error, path)


class CheckpointReader:
    """One complete checkpoint. `manifest` is what the writer was given, and the list of files."""

    def __init__(self, step: int, directory: Path, verified: set[tuple[str, int, int]]) -> None:
        self.step = step
        self.directory = directory
        self._verified = verified
        self.manifest = self._read_manifest()
        self._files: dict[str, dict[str, Any]] = {}
        self._file_of: dict[str, str] = {}
        try:
            for entry in self.manifest["files"]:
                self._check_size(entry)
                self._files[entry["name"]] = entry
                self._file_of.update(dict.fromkeys(entry["tensors"], entry["name"]))
        except (KeyError, TypeError) as error:
            raise self._damaged(f"the list of files in {MANIFEST} is not one") from error

    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._file_of)

    def verify(self) -> None:
        """Read every file and compare its hash. Raises CheckpointError naming the first bad one."""
        for name in self._files:
            self._verify_file(name)

    def read(
        self, names: Iterable[str], part_bytes: int = DEFAULT_PART_BYTES
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the named tensors, each once, in parts of at most `part_bytes` (or one tensor).

        The order is that of the files. Raises CheckpointError at once for names that are absent.
        """
        wanted = dict.fromkeys(names)
        missing = [name for name in wanted if name not in self._file_of]
        if missing:
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise CheckpointError(
                f"checkpoint {self.step} lacks {len(missing)} of {len(wanted)} tensors: {shown}",
                hint="it was written by a run with another model, adapter or optimizer",
            )
        return self._parts(wanted, part_bytes)

    def _parts(self, wanted: dict[str, None], part_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        part: dict[str, torch.Tensor] = {}
        size = 0
        for file_name, entry in self._files.items():
            chosen = [name for name in entry["tensors"] if name in wanted]
            if not chosen:
                continue
            self._verify_file(file_name)
            with safe_open(self.directory / file_name, framework="pt") as file:
                for name in chosen:
                    # A copy, not a view of the mapped file: rotation may delete the file.
                    tensor = file.get_tensor(name).clone()
                    if part and size + tensor.nbytes > part_bytes:
                        yield part
                        part, size = {}, 0
                    part[name] = tensor
                    size += tensor.nbytes
        if part:
            yield part

    def _read_manifest(self) -> dict[str, Any]:
        path = self.directory / MANIFEST
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise CheckpointError(
                f"checkpoint {self.step} is incomplete: it has no {MANIFEST}"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(f"{MANIFEST} cannot be read ({error})") from error
        if not isinstance(content, dict):
            raise self._damaged(f"{MANIFEST} is not an object")
        version = content.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {self.step} has format {version}, this version reads up to "
                f"{FORMAT_VERSION}",
                hint="upgrade hetero-framework",
            )
        if version != FORMAT_VERSION:
            raise self._damaged(f"{MANIFEST} has format_version {version!r}")
        digest = content.pop("digest", None)
        if digest != _digest(content):
            raise self._damaged(f"{MANIFEST} was changed after it was written")
        if content.get("step") != self.step:
            raise CheckpointError(
                f"{self.directory} holds the checkpoint of step {content.get('step')}",
                hint=f"rename it to step_{content.get('step')}",
            )
        return content

    def _check_size(self, entry: dict[str, Any]) -> None:
        path = self.directory / entry["name"]
        if not _FILE_NAME.fullmatch(entry["name"]) or path.is_symlink():
            raise self._damaged(f"{entry['name']!r} is not a file of a checkpoint")
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise self._damaged(f"{entry['name']} is missing") from error
        except OSError as error:
            raise self._damaged(f"{entry['name']} cannot be read ({error.strerror})") from error
        if size != entry["bytes"]:
            raise self._damaged(f"{entry['name']} has {size} bytes instead of {entry['bytes']}")

    def _verify_file(self, name: str) -> None:
        path = self.directory / name
        try:
            status = path.stat()
            key = (str(path), status.st_size, status.st_mtime_ns)
            if key in self._verified:
                return
            found = _sha256(path)
        except OSError as error:
            raise self._damaged(f"{name} cannot be read ({error.strerror})") from error
        if found != self._files[name]["sha256"]:
            raise self._damaged(f"{name} does not have the sha256 that its manifest says")
        self._verified.add(key)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.step} is damaged: {why}")


def _separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors, none sharing memory with another (tied weights are saved twice)."""
    separate: dict[str, torch.Tensor] = {}
    starts: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        separate[name] = plain.clone() if plain.data_ptr() in starts else plain
        starts.add(plain.data_ptr())
    return separate


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digest(content: dict[str, Any]) -> str:
    """The hash of a manifest, so that an edit by hand is noticed."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _in_the_way(path: Path) -> ResourceError:
    return ResourceError(
        f"{path} is in the way of a checkpoint: it is not a directory", hint="move it away"
    )


def _cannot_write(error: Exception, path: Path) -> ResourceError:
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return ResourceError(
            f"cannot write a checkpoint to {path}: a file is in the way",
            hint="move it away or set another checkpoint_dir",
        )
    reason = getattr(error, "strerror", None) or str(error)
    return ResourceError(
        f"cannot write a checkpoint to {path}: {reason}",
        hint="make the directory writable or set another checkpoint_dir",
    )
